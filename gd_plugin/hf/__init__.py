"""`transformers`: a logits processor for every way `generate` works.

In:         guides, a tokenizer, the scores of a step        Out: scores that obey
May import: transformers, gd_plugin.grammars and masks       Read: processor
"""
