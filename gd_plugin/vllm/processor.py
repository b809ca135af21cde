"""GuidedLogitsProcessor: the class that vLLM loads, for the V1 and the V2 model runner alike.

In:  vLLM's calls.      Out: logits that obey each request's guide; those of unguided requests are not touched.

vLLM 0.33 has two interfaces of the same names behind one option; one class that implements both loads whichever runner
is chosen. Where a version has only one of them, the other base is an empty class.
Source: vllm/v1/sample/logits_processor and vllm/v1/worker/gpu/sample/logits_processor, 0.33.
"""

from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import VocabularyError
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.validation import byte_vocabulary
from gd_plugin.vllm.model import GuideCompiler, read_vocabulary, request_stop_ids
from gd_plugin.vllm.params import read_guide
from gd_plugin.vllm.rows import GuidedRow, RowMasks
from gd_plugin.vllm.v1 import BatchRows
from gd_plugin.vllm.v2 import SlotRows

if TYPE_CHECKING:

    class V1Interface:
        """Stands for vLLM's abstract class, which carries no types."""

    class V2Interface:
        """Stands for vLLM's abstract class, which carries no types."""
else:
    try:
        from vllm.v1.sample.logits_processor import LogitsProcessor as V1Interface
    except ImportError:
        V1Interface = type("V1Interface", (), {})
    try:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Interface
    except ImportError:
        V2Interface = type("V2Interface", (), {})

__all__ = ["GuidedLogitsProcessor"]

# parameters of a request that ban tokens before a custom processor runs
_BANNING = ("min_tokens", "allowed_token_ids", "bad_words", "logit_bias")


class GuidedLogitsProcessor(V1Interface, V2Interface):
    """Make the requests of a vLLM engine obey the guides in their `extra_args`.

    Never constructed by hand: name it in `logits_processors`. Settings come from `GD_PLUGIN_*` variables.

    Args:
        vllm_config: vLLM's configuration.
        device_or_states: the device (V1), or the `LogitsProcRequestState` (V2).
        is_pin_memory: whether host memory can be page-locked (V1 only).

    Raises:
        ValueError: settings that an engine cannot honour.
        VocabularyError: the model's tokenizer cannot be read, or does not fit it.
    """

    def __init__(self, vllm_config: Any, device_or_states: Any, is_pin_memory: bool | None = None) -> None:
        config = _engine_settings()
        if is_pin_memory is False:
            config = config.replace_fields(pin_memory=False)
        self._config = config
        self._compiler = GuideCompiler(read_vocabulary(vllm_config), config)
        self._batch = BatchRows(self._guided_row)
        self._slots: SlotRows | None = None
        device = device_or_states
        if is_pin_memory is None:
            self._slots = SlotRows(device_or_states)
            device = device_or_states.device
        self._masks = RowMasks(torch.device(device), self._compiler.vocabulary, config)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose guide is wrong, before anything runs: an HTTP 400 for it alone.

        The guide is compiled for the bytes alone, because this runs in a process that knows no model.

        Raises:
            ValueError: with the guide's own message.
        """
        try:
            params = read_guide(sampling_params.extra_args)
            if params is None:
                return
            if getattr(sampling_params, "structured_outputs", None) is not None:
                raise ValueError("a request is guided by structured_outputs or by a guide, not by both")
            _frontend_compiler().compile(params)
        except Exception as error:
            # the one class that every version turns into a refusal of this request
            raise ValueError(f"guide refused: {error}") from error

    def is_argmax_invariant(self) -> bool:
        """Masks change the argmax, so greedy requests need them too (V1)."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the persistent batch; guides of new requests start compiling while the model runs (V1)."""
        self._batch.update(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Put a request into a slot; True if it is guided (V2)."""
        row = self._guided_row(sampling_params)
        if self._slots is not None:
            self._slots.set(req_idx, row)
        return row is not None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Ban what the guides of this step's rows ban, in place.

        Args:
            logits: float [rows, V].
            ctx: vLLM's `LogitsContext` (V2).

        Raises:
            VocabularyError: the logits are a part of the vocabulary only; masks would fall on the wrong columns.
        """
        if self._slots is not None:
            if self._slots.fill(self._masks, self._whole(logits), ctx):
                self._masks.apply(logits)
            return logits
        if not len(self._batch):
            return logits
        rows, states = self._batch.follow()
        self._masks.begin(self._whole(logits).shape[0])
        self._masks.fill(rows, states, logits.shape[1])
        return self._masks.apply(logits)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[1] < self._compiler.vocabulary.vocab_size:
            raise VocabularyError(
                f"the logits have {logits.shape[1]} columns, the model's vocabulary {self._compiler.vocabulary.vocab_size}: "
                "tensor-parallel logits must be gathered before they are processed"
            )
        return logits

    def _guided_row(self, sampling_params: Any) -> GuidedRow | None:
        """Return the state of a request, None if it is unguided. What is wrong with its guide fails it alone."""
        compiled: Future[CompiledGrammar]
        try:
            params = read_guide(sampling_params.extra_args)
            if params is None:
                return None
            compiled = self._compiler.submit(params)
        except Exception as error:
            compiled = Future()
            compiled.set_exception(error)
        return GuidedRow(
            compiled,
            self._compiler.vocabulary,
            self._config,
            request_stop_ids(sampling_params),
            may_conflict=any(getattr(sampling_params, name, None) for name in _BANNING),
        )


def _engine_settings() -> GuidedDecodingConfig:
    config = GuidedDecodingConfig.from_env()
    if config.on_dead_end == "raise":
        raise ValueError(
            "on_dead_end='raise' would end every request of the engine with the one that is stuck; "
            "set GD_PLUGIN_ON_DEAD_END to stop or release"
        )
    return config


@cache
def _frontend_compiler() -> GuideCompiler:
    return GuideCompiler(byte_vocabulary(), _engine_settings())
