"""The engine's view: batches of requests in slots, speculation, draft trees, ranks.

In:         requests of one step, then logits            Out: masked logits, requests that cannot go on
May import: torch, numpy, gd_plugin.grammars, masks, guides, config and errors
Read:       requests, slots, attaching, rows, speculation, decoder
"""
