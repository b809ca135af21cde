"""Triton kernels and their plain-torch definitions; installed as `gd_plugin.triton_kernels`.

In:         logits and bitmask rows on a device        Out: masked logits
May import: torch, triton                              Read: reference, logits_bitmask
"""
