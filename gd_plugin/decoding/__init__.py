"""The engine's view: batches of requests in slots, speculation, draft trees, ranks.

In:         requests of one step, then logits            Out: masked logits, requests that cannot go on
May import: torch, numpy, gd_plugin.grammars, gd_plugin.masks, gd_plugin.guides
Read:       requests, slots, attaching, rows, speculation, decoder
"""
