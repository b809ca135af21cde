"""Reports: what a guide did to a model's output, step by step.

In:         scores before and after the mask, token ids      Out: a Report, as JSON or as a page
May import: torch, gd_plugin.grammars and masks              Read: report, recorder, measure, page, plots
"""
