"""How a guide is checked: vocabularies, matchers, compiled grammars and the engines behind them.

In:         a Guide and a tokenizer        Out: matchers that fill bitmask rows
May import: torch, numpy, gd_plugin.guides, masks, config and errors; engines only inside backends/
Read:       matcher, vocabulary, compiler, history, backends
"""
