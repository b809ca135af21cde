"""GuidedDecoder: guided decoding for a batching engine, one call a phase or one call a step.

In:  each step's requests with their new tokens, then the logits.
Out: logits with illegal columns at -inf, and (request id, message) of requests that cannot go on.

    add_batch -> build -> copy_bitmask -> apply_bitmask -> the engine samples -> rollback_rejected_tokens
                 (execute: these three)

One request's failure is that request's alone: its rows are left as they are, everything else goes on, and the engine
ends it after it has sampled. State lives by slot, never by row.

Order on a device: the side stream waits until the device rows have been read (token_event), copies the new ones and
records bitmask_event; the main stream waits for that, applies them and records token_event. The grammar work on the CPU
and the copy so overlap the forward pass that the engine has put on the main stream before.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.config import GuidedDecodingConfig, checked_config
from gd_plugin.decoding.attaching import Attaching, MatcherFactory
from gd_plugin.decoding.building import BatchBuilder, Failures
from gd_plugin.decoding.requests import GuidedRequest, GuidedRequests, check_batch, check_requests
from gd_plugin.decoding.rows import DraftVocabulary, RowWriter
from gd_plugin.decoding.slots import SlotStates
from gd_plugin.decoding.tokens import Step, TokenBuffers, check_by_position, check_verified
from gd_plugin.masks.apply import apply_token_bitmask_
from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.masks.device import MaskDevice, open_device
from gd_plugin.masks.shard import VocabShard, check_shard

__all__ = ["GuidedDecoder", "MatcherFactory"]


class GuidedDecoder:
    """Guided decoding for one model of one engine. Not thread-safe; one rank of each pipeline stage's end has one.

    Args:
        factory: makes the matchers.
        max_num_sequences: number of slots.
        vocab_size_padded: columns of the whole vocabulary's logits, padding included.
        max_num_draft_tokens: K, drafts a request may have in a step; nodes of a draft tree without node 0.
        device: where the logits are; None is the current CUDA device if there is one, else the CPU.
        shard: columns of the target's logits that this rank holds.
        draft_shard: columns of the draft's logits that this rank holds, counted in the draft vocabulary.
        group: process group whose ranks run the same requests; rank 0 decides when a grammar is attached.
        config: `rows_behind_refused_draft`, `pin_memory`, `compile_timeout_s`, `fill_threads` are read here.
        max_look_ahead: rows with at most this many legal tokens lose those behind which no token is legal, and any
            row loses a draft that leads there; 0 does not look ahead.
        defer: requests whose grammar is still being compiled are put into `deferred` instead of being waited for.

    Attributes:
        num_advanced_tokens, num_guided_tokens, num_advanced_draft_tokens, is_draft_terminated: by slot, see
            `SlotStates`.
        max_acceptable_tokens: by slot, tokens the target may emit this step, bonus included.
        grammar_matchers: by slot, live; a matcher put in here is used as it is.
        deferred: ids of the batch's requests whose grammar is not ready: their rows of this step are not guided, so the
            engine drops what it samples for them and runs the step again.

    Raises:
        ValueError: a size out of range, or a vocabulary wider than `vocab_size_padded`.
        TypeError: something without `create` as the factory, a size that is no integer, a `config` or a shard of another
            class.
    """

    def __init__(
        self,
        factory: MatcherFactory,
        *,
        max_num_sequences: int,
        vocab_size_padded: int,
        max_num_draft_tokens: int = 0,
        device: torch.device | str | MaskDevice | None = None,
        shard: VocabShard | None = None,
        draft_shard: VocabShard | None = None,
        group: Any = None,
        config: GuidedDecodingConfig | None = None,
        max_look_ahead: int = 0,
        defer: bool = False,
    ) -> None:
        _check_sizes(1, max_num_sequences=max_num_sequences, vocab_size_padded=vocab_size_padded)
        _check_sizes(0, max_num_draft_tokens=max_num_draft_tokens, max_look_ahead=max_look_ahead)
        if not callable(getattr(factory, "create", None)):
            raise TypeError(
                f"factory must have create(guide), got {type(factory).__name__}; use GrammarMatcherFactory(vocabulary)"
            )
        check_shard("shard", shard)
        check_shard("draft_shard", draft_shard)
        self._config = checked_config(config)
        vocabulary = getattr(factory, "vocabulary", None)
        if vocabulary is not None and vocabulary.vocab_size > vocab_size_padded:
            raise ValueError(
                f"the vocabulary has {vocabulary.vocab_size} tokens but vocab_size_padded is {vocab_size_padded}; it "
                "must be the width of the model's logits"
            )
        self._max_num_sequences = max_num_sequences
        self._max_num_draft_tokens = max_num_draft_tokens
        self._vocab_size_padded = vocab_size_padded
        self._vocab_size = vocab_size_padded if vocabulary is None else vocabulary.vocab_size
        self._shard = shard
        self._draft_shard = draft_shard
        self._device = open_device(device, self._config.pin_memory)
        self._slots = SlotStates(max_num_sequences, vocabulary)
        self._attaching = Attaching(factory, self._slots, self._config.compile_timeout_s, group, defer)
        self._builder = BatchBuilder(
            self._slots,
            self._attaching,
            open_rows=self._config.rows_behind_refused_draft == "open",
            speculates=max_num_draft_tokens > 0,
        )
        self._buffers = MaskBuffers(
            self._device,
            max_num_sequences * (max_num_draft_tokens + 1),
            vocab_size_padded,
            num_host_buffers=self._num_host_buffers,
        )
        self._tokens = TokenBuffers(self._device, max_num_sequences, max_num_draft_tokens, self._buffers)
        self._writers = [
            RowWriter(host, self._vocab_size, max_look_ahead=max_look_ahead, fill_threads=self._config.fill_threads)
            for host in self._buffers.host
        ]
        self._draft_vocabulary = DraftVocabulary(draft_shard, self._buffers.host[0].words.shape[1], self._vocab_size)

        self.num_advanced_tokens = self._slots.num_advanced
        self.num_guided_tokens = self._slots.num_guided
        self.num_advanced_draft_tokens = self._slots.num_advanced_draft
        self.is_draft_terminated = self._slots.draft_terminated
        self.max_acceptable_tokens = self._slots.max_acceptable
        self.grammar_matchers = self._slots.matchers
        nothing = GuidedRequests([], max_num_draft_tokens)
        self.deferred: list[object] = []
        self._step = Step(nothing, nothing)
        # what the step at hand has been built to; None is not yet
        self._failures: Failures | None = []

    # a captured graph's copy always reads the same buffer, so there the count is 1
    _num_host_buffers = 2

    @property
    def requests(self) -> GuidedRequests:
        """The batch at hand."""
        return self._step.requests

    @property
    def bitmask_host(self) -> torch.Tensor:
        """Rows of the last build, int32 [rows, W] on the host."""
        return self._buffers.bitmask_host

    @property
    def token_mask_host(self) -> torch.Tensor:
        """Which rows of the last build are guided, int32 [rows] on the host."""
        return self._buffers.token_mask_host

    @property
    def bitmask(self) -> torch.Tensor:
        """Rows of the last copy, int32 [rows, W] on the device."""
        return self._buffers.bitmask

    @property
    def token_mask(self) -> torch.Tensor:
        """Which rows of the last copy are guided, int32 [rows] on the device."""
        return self._buffers.token_mask

    # one step ------------------------------------------------------------------------------------------------------

    def add_batch(
        self,
        requests: list[GuidedRequest],
        new_tokens: torch.Tensor | None = None,
        runtime_draft_len: int | None = None,
    ) -> None:
        """Take a snapshot of the next step's batch.

        Args:
            requests: in the order of their rows.
            new_tokens: int32 [K + 1, max_num_sequences] on the device, by slot, row 0 golden, then drafts; copied
                asynchronously. None: the snapshots' own tokens. A request without `prev_seq_slot` keeps its own.
            runtime_draft_len: K' of this step, 0 <= K' <= K, to which drafts are cut; None is K.

        Raises:
            ValueError: a slot out of range or used twice, a request id used twice, more rows than are reserved, more
                drafts than K, a draft length or tokens of the wrong size, a broken draft tree, draft and target
                requests together. The batch before is kept.
            TypeError: something else than a list of requests, a slot or a draft length that is no integer, a request id
                that cannot be hashed. Likewise.
        """
        draft_len = self._max_num_draft_tokens if runtime_draft_len is None else runtime_draft_len
        _check_int("runtime_draft_len", draft_len)
        if not 0 <= draft_len <= self._max_num_draft_tokens:
            raise ValueError(f"runtime_draft_len must be in [0, {self._max_num_draft_tokens}], got {draft_len}")
        batch = GuidedRequests.of_snapshots(requests, draft_len)
        check_batch(
            batch,
            num_slots=self._max_num_sequences,
            num_rows=self._buffers.num_rows,
            max_num_drafts=self._max_num_draft_tokens,
            reads_new_tokens=new_tokens is not None,
        )
        if new_tokens is not None:
            self._tokens.copy_new_tokens(new_tokens)
        if not batch.is_draft:
            self._attaching.decide(batch)
            self.deferred = [request.request_id for request in batch.valid_requests() if request.slot in batch.deferred]
        self._enqueue(Step(batch, batch, new_tokens is not None))

    def _enqueue(self, step: Step) -> None:
        """Make `step` the one that the next build is about."""
        self._step = step
        self._failures = None

    def build(self) -> Failures:
        """Advance the matchers of the batch and write its rows on the host.

        Called again for the same batch it changes nothing and returns the same.

        Returns:
            (request id, message) of the requests that cannot go on. Their rows are unguided.
        """
        return self._build_once(None)

    def _build_once(self, d2t: torch.Tensor | None) -> Failures:
        if self._failures is None:
            step = self._step
            if step.has_new_tokens or step.draft_step is not None:
                self._tokens.synchronize()
            draft_words = self._draft_vocabulary.words(d2t) if step.requests.is_draft else None
            self._failures = self._build_step(step, draft_words)
        return list(self._failures)

    def _build_step(self, step: Step, draft_words: npt.NDArray[np.int32] | None) -> Failures:
        """Build a step whose tokens have arrived."""
        self._tokens.read(step)
        if step.draft_step == 0:
            # whoever fails here is reported by the build below
            self._builder.rollback_rejected(step.target, self._tokens.num_emitted(len(step.target)), None)
        rows = self._next_rows()
        rows.begin(step.requests.num_bitmask_tokens, draft_words)
        failures = self._builder.build(step.requests, rows)
        if step.ends_draft_loop:
            self._builder.rollback_drafts()
        return failures

    def _next_rows(self) -> RowWriter:
        """Return the writer of host rows that no copy reads any more."""
        self._buffers.next_rows()
        return self._writers[self._buffers.current]

    def copy_bitmask(self, num_bitmask_tokens: int | None = None) -> None:
        """Put the copy of the rows on the side stream, behind the last reader of the device rows.

        Args:
            num_bitmask_tokens: rows to copy; None is all of the batch.
        """
        self._buffers.copy(self._checked_rows(num_bitmask_tokens))

    def apply_bitmask(
        self, logits: torch.Tensor, d2t: torch.Tensor | None = None, num_bitmask_tokens: int | None = None
    ) -> None:
        """Ban the illegal columns of the guided rows, in place, on the main stream behind the copy.

        Args:
            logits: [>= rows, N] on the device; N columns of the vocabulary or of this rank's shard of it.
            d2t: see `apply_token_bitmask_`, for draft models with a pruned vocabulary.
            num_bitmask_tokens: rows to apply; None is all of the batch.

        Raises:
            ValueError: fewer logits rows than that, a width that is not the model's, or what `apply_token_bitmask_`
                refuses; nothing is written.
        """
        num_rows = self._checked_rows(num_bitmask_tokens)
        self._check_logits(logits, num_rows, d2t)
        device, main = self._device, self._device.main()
        device.wait(self._buffers.bitmask_event, main)
        if num_rows:
            bitmask, token_mask = self.bitmask[:num_rows], self.token_mask[:num_rows]
            shard = self._draft_shard if self.requests.is_draft else self._shard
            device.launch(
                lambda: apply_token_bitmask_(
                    logits[:num_rows], bitmask, token_mask, d2t, shard=shard, vocab_size=self._vocab_size
                ),
                main,
                reads=(bitmask, token_mask),
                writes=(logits[:num_rows],),
            )
        device.record(self._buffers.token_event, main)

    def _check_logits(self, logits: torch.Tensor, num_rows: int, d2t: torch.Tensor | None) -> None:
        most: int | None = None
        if not self.requests.is_draft:
            shard, least, most = self._shard, self._vocab_size_padded, self._vocab_size_padded
        else:
            # a draft model may pad the vocabulary to another width; where a d2t prunes it, the d2t says how wide it is
            shard, least = self._draft_shard, self._vocab_size if d2t is None else 0
        if shard is not None:
            # behind a shard's columns there may be padding
            least, most = shard.num_columns, None
        _check_logits_shape(logits, num_rows, least, most)

    def _checked_rows(self, num_rows: int | None) -> int:
        if num_rows is None:
            return self.requests.num_bitmask_tokens
        if not 0 <= num_rows <= self._buffers.num_rows:
            raise ValueError(f"num_bitmask_tokens must be in [0, {self._buffers.num_rows}], got {num_rows}")
        return num_rows

    def execute(self, logits: torch.Tensor | None, d2t: torch.Tensor | None = None) -> Failures:
        """Build, copy and apply.

        Args:
            logits: [B, V] or this rank's columns, see `apply_bitmask`; None on ranks without logits (all pipeline stages
                but the last), which then keep their state in step and copy nothing.
            d2t: see `apply_bitmask`.

        Returns:
            See `build`.
        """
        failures = self._build_once(d2t)
        if logits is not None:
            self.copy_bitmask()
            self.apply_bitmask(logits, d2t)
        return failures

    # draft loops ----------------------------------------------------------------------------------------------------

    def add_draft_batch(
        self, new_tokens: torch.Tensor, num_accepted_tokens: torch.Tensor | None, draft_step: int = 0
    ) -> None:
        """Turn the target batch into one step of its draft loop.

        Args:
            new_tokens: int32 [batch] on the device, by batch position: the golden token in step 0, then the token
                drafted last.
            num_accepted_tokens: int32 [batch], tokens the target emitted, bonus included; read in step 0 only.
            draft_step: 0 <= draft_step < K'.

        Raises:
            ValueError: no target batch, a step out of range, or tensors of the wrong size.
        """
        target = self._step.target
        draft_len = target.max_num_draft_tokens
        if not 0 <= draft_step < draft_len:
            raise ValueError(f"draft_step must be in [0, {draft_len}), the draft length of the batch, got {draft_step}")
        check_by_position("new_tokens", new_tokens, len(target))
        if draft_step == 0:
            if num_accepted_tokens is None:
                raise ValueError("draft step 0 rolls rejected drafts back: it needs num_accepted_tokens")
            check_by_position("num_accepted_tokens", num_accepted_tokens, len(target))
        self._tokens.copy_draft_tokens(new_tokens, num_accepted_tokens if draft_step == 0 else None)
        drafts = GuidedRequests([request.as_draft() for request in target.requests], draft_len)
        self._enqueue(Step(drafts, target, draft_step=draft_step))

    def execute_draft_batch(
        self, logits: torch.Tensor | None, d2t: torch.Tensor | None = None, draft_step: int = 0
    ) -> Failures:
        """Run one step of a draft loop: step 0 first undoes what the target rejected, the last step undoes the loop.

        Args:
            logits: see `execute`.
            d2t: see `apply_bitmask`; a row whose legal tokens the draft vocabulary cannot spell is unguided, and so is
                the rest of that request's loop.
            draft_step: as given to `add_draft_batch`.

        Returns:
            See `build`.

        Raises:
            ValueError: not the step that was added.
        """
        added = self._step.draft_step
        if added != draft_step:
            raise ValueError(f"draft step {draft_step} was not added: the batch at hand is step {added}")
        return self.execute(logits, d2t)

    def rollback_rejected_tokens(self) -> Failures:
        """Undo the drafts that the target rejected, by the batch's own `num_accepted_draft_tokens`.

        A second call without a build in between does nothing.

        Returns:
            (request id, message) of requests whose target emitted more than their guide allows; the next build that
            holds them reports them once more.

        Raises:
            ValueError: a request that has drafts to undo does not say how many were accepted; nothing is undone.
        """
        return self._builder.rollback_rejected(self.requests, self._builder.num_emitted(self.requests), None)

    def rollback_rejected_batch(
        self, num_accepted_tokens: torch.Tensor, accepted_nodes: torch.Tensor | None = None
    ) -> Failures:
        """Undo the drafts that the target rejected, for drafters that do not sample under the mask themselves.

        Args:
            num_accepted_tokens: int32 [batch], by batch position: tokens emitted, bonus included.
            accepted_nodes: int32 [batch, L]: with draft trees, the accepted nodes from the root down, -1 behind them.

        Returns:
            See `rollback_rejected_tokens`.

        Raises:
            TypeError: something else than tensors. Likewise.
            ValueError: tensors that do not have one row a request of the batch; nothing is undone.
        """
        target = self._step.target
        check_verified(num_accepted_tokens, accepted_nodes, len(target))
        if target.max_num_draft_tokens == 0:
            return []
        paths = None if accepted_nodes is None else accepted_nodes.tolist()
        return self._builder.rollback_rejected(target, num_accepted_tokens.tolist(), paths)

    def rollback_draft_tokens(self) -> None:
        """End the draft loops under way: undo what they accepted, the golden token of step 0 included."""
        self._builder.rollback_drafts()

    def init_disagg_gen_requests(self) -> None:
        """Attach matchers to the batch's requests that had their prefill elsewhere. Safe to call again.

        Failures are reported by the next build.
        """
        self._builder.init_arrivals(self.requests)

    def submit(self, requests: Sequence[GuidedRequest]) -> None:
        """Start compiling the guides of requests that will be in a batch later. Submitting again does nothing.

        Raises:
            TypeError: something else than a list of requests.
        """
        check_requests(requests)
        for request in requests:
            self._attaching.submit(request)

    def poll(self, request_id: object) -> Literal["pending", "ready", "failed"]:
        """Tell how far the grammar of a submitted request is, without waiting.

        "failed" is told once more by the batch that holds the request, and so is a guide that was never submitted, which
        counts as "ready" here.
        """
        return self._attaching.poll(request_id)

    def cancel(self, request_ids: Sequence[object]) -> None:
        """Forget submitted requests that have been given up before any batch held them."""
        for request_id in request_ids:
            self._attaching.cancel(request_id)


def _check_logits_shape(logits: torch.Tensor, num_rows: int, least: int, most: int | None) -> None:
    """Check that there is a row of logits for each row of the mask, and a column for each token.

    Args:
        logits: what the engine passed.
        num_rows: rows of the mask.
        least: columns there must be.
        most: columns there may be; None is any number.

    Raises:
        ValueError: there is not.
    """
    if logits.dim() != 2 or logits.shape[0] < num_rows:
        raise ValueError(f"logits must be [rows, columns] with at least {num_rows} rows, got {list(logits.shape)}")
    width = logits.shape[1]
    if width < least or (most is not None and width > most):
        wanted = f"{least}" if most is not None else f"at least {least}"
        raise ValueError(
            f"logits have {width} columns but must have {wanted}; check vocab_size_padded, or pass the shard that "
            "these columns are"
        )


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")


def _check_sizes(least: int, **sizes: int) -> None:
    for name, value in sizes.items():
        _check_int(name, value)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
