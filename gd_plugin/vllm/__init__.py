"""vLLM: guides for the requests of an engine, offline or served, on one device or many.

In:         `extra_args` of a request, the logits of a step        Out: logits that obey
May import: vllm, transformers, gd_plugin.grammars, masks, guides, config and errors
Read:       processor, rows, v1, v2, params, model

    LLM(model, logits_processors=["gd_plugin.vllm:GuidedLogitsProcessor"])
    vllm serve MODEL --logits-processors gd_plugin.vllm:GuidedLogitsProcessor
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gd_plugin.errors import BackendNotInstalledError

if TYPE_CHECKING:
    from gd_plugin.vllm.processor import GuidedLogitsProcessor

__all__ = ["GuidedLogitsProcessor"]

if find_spec("vllm") is None:
    raise BackendNotInstalledError(
        "gd_plugin.vllm needs vLLM, which is not installed: pip install 'gd_plugin[vllm]'", name="vllm"
    )


def __getattr__(name: str) -> Any:
    if name == "GuidedLogitsProcessor":
        from gd_plugin.vllm.processor import GuidedLogitsProcessor

        return GuidedLogitsProcessor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
