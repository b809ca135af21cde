"""Guides for the requests of transformers' continuous batching, which drops logits processors without a word.

In:  a model or one of its managers; the guide of each request, as JSON text.   Out: requests that obey their guides.
Kept here: state belongs to the request, never to a row; rows of unguided requests leave bit-identical; one request's
failure (bad guide, engine error, dead end) is its own.
Source: transformers 5.24, generation/continuous_batching (cb_logits_processors.py, continuous_api.py, requests.py).
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.continuous_batching import cb_logits_processors
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState

from gd_plugin.config import GuidedDecodingConfig, checked_config
from gd_plugin.errors import DeadEndError
from gd_plugin.grammars.compiler import GrammarMatcherFactory, shared_factory
from gd_plugin.grammars.dead_ends import dead_end_error
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary, text_of
from gd_plugin.guides.guide import Guide
from gd_plugin.hf.model_facts import resolve_vocabulary
from gd_plugin.masks.apply import apply_token_bitmask_, open_banned_rows_
from gd_plugin.masks.bitmask import allocate_token_bitmask, row_has_valid_token, token_ids_to_words

__all__ = ["enable_continuous_batching"]

# `generate` puts processors of the user's before these, and so do we
_WARPERS = tuple(
    getattr(module, name)
    for module, names in (
        (
            logits_process,
            (
                "TemperatureLogitsWarper",
                "TopHLogitsWarper",
                "TopKLogitsWarper",
                "TopPLogitsWarper",
                "MinPLogitsWarper",
                "TypicalLogitsWarper",
                "EpsilonLogitsWarper",
                "EtaLogitsWarper",
                "WatermarkLogitsProcessor",
                "LogitNormalization",
            ),
        ),
        (
            cb_logits_processors,
            (
                "ContinuousBatchingTemperatureLogitsWarper",
                "ContinuousBatchingTopKLogitsWarper",
                "ContinuousBatchingTopPLogitsWarper",
            ),
        ),
    )
    for name in names
    if hasattr(module, name)
)
# the request's own state hangs on transformers' record of it, so that it lives, forks and ends with the request
_PROGRESS = "_gd_plugin_progress"


@contextmanager
def enable_continuous_batching(
    model_or_manager: Any,
    *,
    tokenizer: Any = None,
    vocabulary: Vocabulary | None = None,
    config: GuidedDecodingConfig | None = None,
) -> Iterator[Any]:
    """Let the requests of transformers' continuous batching have guides, until the context ends.

    Inside, `add_request(ids, guide=...)`, `add_requests(inputs, guide=...)` and, on a model,
    `generate_batch(inputs, guide=...)` take a `Guide`, its JSON text (`guide.to_json()`), or None; the latter two also
    take a list with one guide per prompt. A guide that is wrong, a dead end or an engine's failure fails its request
    alone: `GenerationOutput.error` says why. A guided request ends at any stop token of the vocabulary.

    Batches are prepared one after the other: asynchronous batching and captured CUDA graphs prepare a batch before the
    last one's tokens are known, so they are switched off where transformers chooses and refused where you ask for them.

    Args:
        model_or_manager: a model, which covers every manager it creates inside; or one manager that is not started yet.
        tokenizer: the model's tokenizer; not needed with `vocabulary`.
        vocabulary: a ready Vocabulary instead of a tokenizer.
        config: settings; None is the defaults. `on_dead_end="raise"` ends the request, like "stop".

    Yields:
        `model_or_manager`.

    Raises:
        TypeError: neither a model that can batch continuously nor a manager, or neither tokenizer nor vocabulary.
        ValueError: asynchronous batching or CUDA graphs were asked for.
        RuntimeError: guides are enabled already, or the manager has been started or warmed up.
        VocabularyError: the tokenizer does not fit the model.
    """
    is_manager = isinstance(model_or_manager, ContinuousBatchingManager)
    if not is_manager and not hasattr(model_or_manager, "init_continuous_batching"):
        raise TypeError(
            "enable_continuous_batching takes a transformers model or its ContinuousBatchingManager, got "
            f"{type(model_or_manager).__name__}"
        )
    model = model_or_manager.model if is_manager else model_or_manager
    vocabulary = resolve_vocabulary(tokenizer, model, vocabulary, None, None)
    factory = shared_factory(vocabulary, checked_config(config))
    with ExitStack() as undo:
        if is_manager:
            _install(model_or_manager, factory, undo, _BatchGuides())
        else:
            _patch_model(model_or_manager, factory, undo)
        yield model_or_manager


class _Progress:
    """How far one request has come in its guide.

    Attributes:
        matcher: state behind `token_ids`; None once nothing is guided any more.
        token_ids: generated tokens the matcher has been shown.
        error: why the request has failed.
    """

    def __init__(self, text: str, matcher: GrammarMatcher | None) -> None:
        self.text = text
        self.matcher = matcher
        self.token_ids: list[int] = []
        self.error: Exception | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Progress":
        """Fork: transformers copies a request's record to give it further return sequences."""
        twin = _Progress(self.text, None if self.matcher is None else self.matcher.fork())
        twin.token_ids = self.token_ids[:]
        twin.error = self.error
        return twin

    def follow(self, generated: list[int]) -> None:
        """Bring the matcher behind `generated`. Tokens the guide rejects raise."""
        if self.matcher is None:
            return
        known = len(self.token_ids)
        if generated[:known] != self.token_ids:
            known = next(i for i, (a, b) in enumerate(zip(self.token_ids, [*generated, None], strict=False)) if a != b)
            self.matcher.rollback(len(self.token_ids) - known)
            del self.token_ids[known:]
        for token_id in generated[known:]:
            if not self.matcher.accept_token(token_id):
                raise DeadEndError(f"token {token_id} is not legal here", num_tokens=len(self.token_ids))
            self.token_ids.append(token_id)


class _GuideProcessor(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Ban what each request's guide bans. One a manager; its calls all come from the manager's thread."""

    supported_kwargs: dict[str, type] = {"guide": str}  # noqa: RUF012 (transformers' own declaration)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, factory: GrammarMatcherFactory, device: torch.device) -> None:
        self._factory = factory
        self._vocabulary = factory.vocabulary
        self._device = device
        self._bitmask = allocate_token_bitmask(8, self._vocabulary.vocab_size)
        self._on_device = self._bitmask.to(device)
        self._stop_words = torch.from_numpy(
            token_ids_to_words(self._vocabulary.stop_token_ids, self._bitmask.shape[1]).copy()
        )

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Rows are unguided unless `prepare_tensor_args` says so."""
        int32_tensor.fill_(-1)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Fill the mask row of each guided request; return int32 [requests], the row of each or -1."""
        rows = torch.full((len(requests_with_new_token),), -1, dtype=torch.int32)
        if len(rows) > self._bitmask.shape[0]:
            self._bitmask = allocate_token_bitmask(2 * len(rows), self._vocabulary.vocab_size)
        for index, request in enumerate(requests_with_new_token):
            text = request.state.logit_processor_kwargs.get("guide")
            if text is not None and self._fill_row(request.state, text, index):
                rows[index] = index
        if (rows >= 0).any():
            self._on_device = self._bitmask.to(self._device)
        return rows

    def _fill_row(self, state: Any, text: str, index: int) -> bool:
        """Write the request's mask row; False leaves the request unguided."""
        progress: _Progress | None = getattr(state, _PROGRESS, None)
        try:
            if progress is None or progress.text != text:
                progress = _Progress(text, None)
                setattr(state, _PROGRESS, progress)
                # whatever ends the guide ends the request, also where generation was given other ids
                state._eos_token_ids.update(self._vocabulary.stop_token_ids)
                progress.matcher = self._factory.create(Guide.from_json(text))
            if progress.error is None:
                progress.follow(_generated(state))
                if progress.matcher is not None:
                    progress.matcher.fill_next_token_bitmask(self._bitmask, index)
                    if not row_has_valid_token(self._bitmask[index], self._vocabulary.vocab_size):
                        raise self._dead_end(progress)
        except Exception as error:  # engines fail in ways of their own; only this request is lost
            progress = _Progress(text, None) if progress is None else progress
            progress.error, progress.matcher = error, None
            setattr(state, _PROGRESS, progress)
            state.error = f"{type(error).__name__}: {error}"
        if progress.error is None:
            return progress.matcher is not None
        if isinstance(progress.error, DeadEndError) and self._factory.config.on_dead_end == "release":
            return False
        # the step is under way, so the request gets one more token, the last one
        self._bitmask[index] = self._stop_words
        state._new_tokens_limit = state.generated_len() + 1
        return True

    def _dead_end(self, progress: _Progress) -> DeadEndError:
        return dead_end_error(len(progress.token_ids), text_of(self._vocabulary, progress.token_ids))

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return new scores [rows, V]; rows at -1 keep theirs.

        Rows of requests that are still reading their prompt hold leftovers in `tensor_arg`; nobody reads what comes out.
        """
        row_index = tensor_arg[: scores.shape[0]].clamp(max=self._on_device.shape[0] - 1)
        arguments: dict[str, Any] = {"row_index": row_index, "vocab_size": self._vocabulary.vocab_size}
        out = torch.empty_like(scores)
        apply_token_bitmask_(scores.contiguous(), self._on_device, out=out, **arguments)
        open_banned_rows_(out, self._on_device, row_index >= 0, **arguments)
        return out


def _generated(state: Any) -> list[int]:
    """Tokens generated so far; a request that was put back under cache pressure counts them as part of its prompt."""
    tokens: list[int] = state.generated_tokens
    if state._true_initial_tokens:
        return [*state.initial_tokens[state._true_initial_tokens :], *tokens]
    return tokens


def _guide_text(guide: Any) -> str:
    """Return a guide of any accepted form as JSON text, unchecked."""
    if isinstance(guide, str):
        return guide
    if isinstance(guide, Guide):
        return guide.to_json()
    if isinstance(guide, Mapping):
        return Guide.from_json(guide).to_json()
    raise TypeError(f"guide must be a Guide, its JSON text or None, got {type(guide).__name__}")


def _guide_list(guide: Any, count: int) -> list[Any]:
    """Return one guide per prompt."""
    if isinstance(guide, Sequence) and not isinstance(guide, str | bytes):
        if len(guide) != count:
            raise ValueError(f"{len(guide)} guides cannot serve {count} prompts: pass one per prompt, or a single one")
        return list(guide)
    return [guide] * count


def _refuse_ahead_of_time(config: Any) -> None:
    """Refuse what prepares a step before the last one's tokens are known."""
    graphs = getattr(config, "use_cuda_graph", None)
    if getattr(config, "use_async_batching", None):
        raise ValueError(
            "guides need the last token before the next batch is prepared: leave use_async_batching out, or set it to "
            "False in ContinuousBatchingConfig"
        )
    if graphs is True or (isinstance(graphs, tuple) and any(graphs)):
        raise ValueError(
            "guides cannot be applied inside captured CUDA graphs here: leave use_cuda_graph out, or set it to False in "
            "ContinuousBatchingConfig"
        )


class _BatchGuides(threading.local):
    """What a thread's `generate_batch` was given; it hands its prompts to `add_requests` in the same thread."""

    guides: list[Any] | None = None


def _install(manager: Any, factory: GrammarMatcherFactory, undo: ExitStack, batch: _BatchGuides) -> None:
    """Put the processor into a manager's list, and let its methods take guides."""
    listed = manager.logit_processor
    if any(isinstance(processor, _GuideProcessor) for processor in listed.logits_processor):
        raise RuntimeError("this manager takes guides already: leave the other enable_continuous_batching first")
    if manager.is_running() or manager.batch_processor is not None:
        raise RuntimeError(
            "the manager has been started or warmed up, so its buffers are laid out: enable guides before start(); a "
            "kept manager goes away with model.destroy_cached_continuous_batching_manager()"
        )
    _refuse_ahead_of_time(manager.continuous_batching_config)
    processor = _GuideProcessor(factory, manager.model.device)
    _insert(listed, processor)
    undo.callback(_remove, manager, listed, processor)
    add_request, add_requests = manager.add_request, manager.add_requests

    def add_guided_request(input_ids: list[int], *args: Any, guide: Any = None, **options: Any) -> str | None:
        if guide is None:
            return add_request(input_ids, *args, **options)  # type: ignore[no-any-return]
        try:
            text = _guide_text(guide)
            # compiled in the caller's thread, so that the requests under way need not wait for it
            factory.compile(Guide.from_json(text))
        except Exception as error:
            return _fail(manager, input_ids, args, options, error)
        return add_request(input_ids, *args, guide=text, **options)  # type: ignore[no-any-return]

    def add_guided_requests(inputs: list[list[int]], *args: Any, guide: Any = None, **options: Any) -> list[str]:
        guide = batch.guides if guide is None else guide
        if guide is None:
            return add_requests(inputs, *args, **options)  # type: ignore[no-any-return]
        guides = _guide_list(guide, len(inputs))
        options |= dict(zip(("max_new_tokens", "streaming", "record_timestamps"), args, strict=False))
        return [
            str(manager.add_request(input_ids=ids, guide=one, **options))
            for ids, one in zip(inputs, guides, strict=True)
        ]

    _override(manager, undo, add_request=add_guided_request, add_requests=add_guided_requests)


def _insert(listed: Any, processor: _GuideProcessor) -> None:
    processors = listed.logits_processor
    place = next((i for i, other in enumerate(processors) if isinstance(other, _WARPERS)), len(processors))
    processors.insert(place, processor)
    listed.tensors_required += 1
    listed._retrieve_processors_kwargs()
    listed.do_processing = True


def _remove(manager: Any, listed: Any, processor: _GuideProcessor) -> None:
    if manager.is_running():
        # its guided requests go on as they began; new ones with a guide are refused by transformers itself
        listed.supported_keys.pop("guide", None)
        return
    listed.logits_processor.remove(processor)
    listed.tensors_required -= 1
    listed._retrieve_processors_kwargs()
    listed.do_processing = len(listed.logits_processor) > 0


def _fail(manager: Any, input_ids: list[int], args: tuple[Any, ...], options: dict[str, Any], error: Exception) -> str:
    """Deliver a failed result, as transformers does for a request it refuses."""
    request_id = args[0] if args else options.get("request_id")
    if request_id is None:
        with manager._request_lock:
            request_id = f"req_{manager._request_counter}"
            manager._request_counter += 1
    # whoever asked for several sequences waits for each of them
    children = [f"{request_id}__child#{i}" for i in range(manager.num_return_sequences - 1)]
    for failed_id in (request_id, *children):
        state = RequestState(request_id=failed_id, initial_tokens=list(input_ids))
        manager.output_router.fail_and_deliver(state, error)
    return str(request_id)


def _patch_model(model: Any, factory: GrammarMatcherFactory, undo: ExitStack) -> None:
    """Cover every manager the model creates; `generate_batch` and the context manager go through the same method."""
    if "init_continuous_batching" in vars(model):
        raise RuntimeError("this model takes guides already: leave the other enable_continuous_batching first")
    init, generate_batch = model.init_continuous_batching, model.generate_batch
    batch = _BatchGuides()

    def init_guided(
        generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        _refuse_ahead_of_time(continuous_batching_config)
        manager = init(generation_config, continuous_batching_config, workload_hints)
        if any(isinstance(processor, _GuideProcessor) for processor in manager.logit_processor.logits_processor):
            return manager  # one that was kept from an earlier call inside this context
        if continuous_batching_config is None or manager.batch_processor is None:
            # chosen by transformers, not by the caller
            manager.continuous_batching_config.use_async_batching = False
            manager.continuous_batching_config.use_cuda_graph = (False, False)
        _install(manager, factory, undo, batch)
        return manager

    def generate_guided_batch(inputs: list[list[int]], *args: Any, guide: Any = None, **options: Any) -> Any:
        _refuse_unknown(options)
        batch.guides = None if guide is None else _guide_list(guide, len(inputs))
        try:
            return generate_batch(inputs, *args, **options)
        finally:
            batch.guides = None

    _override(model, undo, init_continuous_batching=init_guided, generate_batch=generate_guided_batch)


def _refuse_unknown(options: dict[str, Any]) -> None:
    """Refuse what transformers drops: `generate_batch` ignores what it does not know, and a processor would go unnoticed."""
    if "logits_processor" in options:
        raise TypeError("generate_batch drops logits_processor without a word; pass guide=... instead")


def _override(target: Any, undo: ExitStack, **methods: Callable[..., Any]) -> None:
    """Set methods on one object, and take them off again at the end."""
    for name, method in methods.items():
        setattr(target, name, method)
        undo.callback(vars(target).pop, name, None)
