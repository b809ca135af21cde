"""`transformers`: a logits processor for every way `generate` works.

In:         guides, a tokenizer, the scores of a step        Out: scores that obey
May import: transformers, gd_plugin.reports, grammars, masks, guides, config and errors
Read:       processor, drafting, continuous_batching
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gd_plugin.hf.continuous_batching import enable_continuous_batching

__all__ = ["enable_continuous_batching"]


def __getattr__(name: str) -> Any:
    # late, as in the package itself: importing the room must not load transformers
    if name not in __all__:
        raise AttributeError(f"module 'gd_plugin.hf' has no attribute {name!r}")
    from gd_plugin.hf.continuous_batching import enable_continuous_batching

    return enable_continuous_batching
