"""Triton kernels and their plain-torch definitions; installed as `gd_plugin.triton_kernels`.

In:         logits and bitmask rows on a device        Out: masked logits
May import: torch, triton, gd_plugin.masks             Read: reference, logits_bitmask, masked_argmax, aot
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gd_plugin.triton_kernels.logits_bitmask import apply_token_bitmask_

__all__ = ["apply_token_bitmask_"]


def __getattr__(name: str) -> Any:
    # late: the definitions in reference.py are used where triton is not installed
    if name == "apply_token_bitmask_":
        return import_module("gd_plugin.triton_kernels.logits_bitmask").apply_token_bitmask_
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
