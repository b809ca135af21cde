"""The bits: int32 rows of mask words, from host memory onto the logits.

In:         rows filled by a GrammarMatcher        Out: logits, banned columns at -inf
May import: torch, numpy, gd_plugin.errors         Read: bitmask, shard, apply, argmax, cpu
"""
