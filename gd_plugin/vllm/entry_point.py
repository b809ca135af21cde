"""The processor as vLLM finds it by itself, through the entry-point group `vllm.logits_processors`.

    PYTHONPATH="$(python -m gd_plugin.vllm)" vllm serve MODEL

Every engine of an environment loads every entry point of that group, so one that is installed with a package reaches
engines whose owners never asked for it: an import error, or a clash with their options, would keep them from starting.
Installing gd_plugin therefore registers none. It carries a folder with the registration, which takes effect only in
processes that have the folder on their path.

vLLM skips entry points in silence where it refuses a named processor: with speculative decoding under the V1 runner.
It also tells them no tokens under asynchronous scheduling there. In both cases guided requests are refused here, before
they run, and all others go on as ever.
Source: vllm/v1/sample/logits_processor/__init__.py (build_logitsprocs) and vllm/v1/worker/gpu_model_runner.py, 0.33;
https://github.com/vllm-project/vllm/issues/52461
"""

from typing import Any

import torch

from gd_plugin.vllm.model import engine_config
from gd_plugin.vllm.params import read_guide
from gd_plugin.vllm.processor import GuidedLogitsProcessor

__all__ = ["EntryPointLogitsProcessor", "refusal"]

_NAME = "gd_plugin.vllm:GuidedLogitsProcessor"


class EntryPointLogitsProcessor(GuidedLogitsProcessor):
    """GuidedLogitsProcessor for engines that were not told its name; it stands back where they were."""

    def __init__(self, vllm_config: Any, device_or_states: Any, is_pin_memory: bool | None = None) -> None:
        super().__init__(vllm_config, device_or_states, is_pin_memory)
        self._stands_back = _is_named(vllm_config)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what the class itself refuses, and guides that this engine would pass over in silence.

        Raises:
            ValueError: says which, and what to do.
        """
        if not sampling_params.extra_args:
            return
        super().validate_params(sampling_params)
        if read_guide(sampling_params.extra_args) is not None:
            reason = refusal(engine_config())
            if reason is not None:
                raise ValueError(f"guide refused: {reason}")

    def update_state(self, batch_update: Any) -> None:
        """See `GuidedLogitsProcessor.update_state`."""
        if not self._stands_back:
            super().update_state(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """See `GuidedLogitsProcessor.add_request`."""
        return not self._stands_back and super().add_request(req_idx, sampling_params)

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """See `GuidedLogitsProcessor.apply`."""
        return logits if self._stands_back else super().apply(logits, ctx)


def refusal(vllm_config: Any) -> str | None:
    """Return why this engine cannot guide through an entry point, or None if it can."""
    advice = f"name the processor instead: --logits-processors {_NAME}"
    if vllm_config is None:
        return f"this version of vLLM does not tell whether it calls processors found by entry point; {advice}"
    if _is_named(vllm_config) or getattr(vllm_config, "use_v2_model_runner", False):
        return None
    if getattr(vllm_config, "speculative_config", None):
        return "vLLM's V1 model runner passes over logits processors under speculative decoding; turn one of them off"
    if getattr(getattr(vllm_config, "scheduler_config", None), "async_scheduling", False):
        return (
            "under asynchronous scheduling vLLM's V1 model runner tells no tokens to processors found by entry point; "
            f"pass --no-async-scheduling, or {advice}"
        )
    return None


def _is_named(vllm_config: Any) -> bool:
    named = getattr(getattr(vllm_config, "model_config", None), "logits_processors", None) or ()
    return any(
        item == _NAME if isinstance(item, str) else isinstance(item, type) and issubclass(item, GuidedLogitsProcessor)
        for item in named
    )
