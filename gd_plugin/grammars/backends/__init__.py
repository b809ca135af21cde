"""One adapter an engine, nothing shared but the contract.

In:         a Guide and a Vocabulary        Out: a CompiledGrammar that creates matchers
May import: its own engine, on top; the adapters themselves are imported late
Read:       registry, xgrammar
"""
