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
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.decoding.attaching import Attaching
from gd_plugin.decoding.building import BatchBuilder, Failures
from gd_plugin.decoding.requests import GuidedRequest, GuidedRequests
from gd_plugin.decoding.rows import RowWriter
from gd_plugin.decoding.slots import SlotStates
from gd_plugin.decoding.speculation import walk_tree
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.apply import apply_token_bitmask_
from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.masks.device import MaskDevice, open_device
from gd_plugin.masks.shard import VocabShard

__all__ = ["GuidedDecoder", "MatcherFactory"]


class MatcherFactory(Protocol):
    """What makes matchers: `GrammarMatcherFactory`, or anything with its `create`."""

    def create(self, guide: Guide) -> GrammarMatcher:
        """Return a new matcher at the start of `guide`."""


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
        requests: the batch at hand.
        deferred: ids of the batch's requests whose grammar is not ready: their rows of this step are not guided, so the
            engine drops what it samples for them and runs the step again.

    Raises:
        ValueError: a size out of range, or a vocabulary wider than `vocab_size_padded`.
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
        sizes = {"max_num_sequences": (max_num_sequences, 1), "vocab_size_padded": (vocab_size_padded, 1)}
        sizes |= {"max_num_draft_tokens": (max_num_draft_tokens, 0), "max_look_ahead": (max_look_ahead, 0)}
        for name, (value, least) in sizes.items():
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        vocabulary = getattr(factory, "vocabulary", None)
        if vocabulary is not None and vocabulary.vocab_size > vocab_size_padded:
            raise ValueError(
                f"the vocabulary has {vocabulary.vocab_size} tokens but vocab_size_padded is {vocab_size_padded}; it "
                "must be the width of the model's logits"
            )
        self._config = config or GuidedDecodingConfig()
        self._max_num_sequences = max_num_sequences
        self._max_num_draft_tokens = max_num_draft_tokens
        self._vocab_size = vocab_size_padded if vocabulary is None else vocabulary.vocab_size
        self._shard = shard
        self._draft_shard = draft_shard
        self._max_look_ahead = max_look_ahead
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
        num_tokens = max_num_sequences * (max_num_draft_tokens + 1)
        self._new_tokens_host = self._device.empty_host(num_tokens)
        self._draft_tokens_host = self._device.empty_host(2 * max_num_sequences)
        self._draft_subset: tuple[torch.Tensor, npt.NDArray[np.int32] | None] | None = None

        self.num_advanced_tokens = self._slots.num_advanced
        self.num_guided_tokens = self._slots.num_guided
        self.num_advanced_draft_tokens = self._slots.num_advanced_draft
        self.is_draft_terminated = self._slots.draft_terminated
        self.max_acceptable_tokens = self._slots.max_acceptable
        self.grammar_matchers = self._slots.matchers
        self.requests = GuidedRequests([], max_num_draft_tokens)
        self.deferred: list[object] = []
        self._target = self.requests
        self._has_new_tokens = False
        self._draft_step: int | None = None
        # what the batch at hand has been built to; None is not yet
        self._failures: Failures | None = []

    # a captured graph's copy always reads the same buffer, so there the count is 1
    _num_host_buffers = 2

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
            runtime_draft_len: K' of this step, 0 <= K' <= K; None is K.

        Raises:
            ValueError: a slot out of range or used twice, more rows than are reserved, a draft length or tokens of the
                wrong size, a broken draft tree, draft and target requests together. The batch before is kept.
        """
        draft_len = self._max_num_draft_tokens if runtime_draft_len is None else runtime_draft_len
        if not 0 <= draft_len <= self._max_num_draft_tokens:
            raise ValueError(f"runtime_draft_len must be in [0, {self._max_num_draft_tokens}], got {draft_len}")
        batch = GuidedRequests([request.snapshot() for request in requests], draft_len)
        self._check_batch(batch)
        if new_tokens is not None:
            self._check_new_tokens(new_tokens)
            self._copy_to_host(self._new_tokens_host, new_tokens.reshape(-1))
        self._enqueue(batch, has_new_tokens=new_tokens is not None, draft_step=None)
        self._target = batch
        if not batch.is_draft:
            self.deferred = self._attaching.decide(batch)

    def _enqueue(self, batch: GuidedRequests, *, has_new_tokens: bool, draft_step: int | None) -> None:
        """Make `batch` the one that the next build is about."""
        self.requests = batch
        self._has_new_tokens = has_new_tokens
        self._draft_step = draft_step
        self._failures = None

    def _check_batch(self, batch: GuidedRequests) -> None:
        if batch.num_bitmask_tokens > self._buffers.num_rows:
            raise ValueError(
                f"the batch needs {batch.num_bitmask_tokens} rows but {self._buffers.num_rows} are reserved; raise "
                "max_num_sequences"
            )
        used: dict[int, object] = {}
        for request in batch.valid_requests():
            self._check_request(request, batch)
            slot = self._checked_slot(request, request.seq_slot)
            if slot in used:
                raise ValueError(f"requests {used[slot]!r} and {request.request_id!r} are both in slot {slot}")
            used[slot] = request.request_id
            if request.prev_seq_slot is not None:
                self._checked_slot(request, request.prev_seq_slot)

    def _checked_slot(self, request: GuidedRequest, slot: int | None) -> int:
        if slot is None or not 0 <= slot < self._max_num_sequences:
            raise ValueError(
                f"request {request.request_id!r}: slot {slot} is not in [0, {self._max_num_sequences}); raise "
                "max_num_sequences or give the request a slot"
            )
        return slot

    def _check_request(self, request: GuidedRequest, batch: GuidedRequests) -> None:
        if request.draft_tree is None or request.is_draft or request.is_context_init_state:
            return
        try:
            num_nodes = len(walk_tree(request.draft_tree))
            if num_nodes > batch.max_num_draft_tokens + 1:
                raise ValueError(f"{num_nodes} nodes need a draft length of {num_nodes - 1}")
            if not self._reads_new_tokens(request) and len(request.draft_tokens or ()) < num_nodes - 1:
                raise ValueError(f"{num_nodes} nodes need {num_nodes - 1} draft_tokens")
        except ValueError as error:
            raise ValueError(f"request {request.request_id!r} in slot {request.seq_slot}: {error}") from None

    def _check_new_tokens(self, new_tokens: torch.Tensor) -> None:
        shape = (self._max_num_draft_tokens + 1, self._max_num_sequences)
        if new_tokens.dtype != torch.int32 or tuple(new_tokens.shape) != shape:
            raise ValueError(
                f"new_tokens must be int32 {list(shape)} (golden and drafts, by slot), got {new_tokens.dtype} "
                f"{list(new_tokens.shape)}"
            )

    def _copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy of device tokens on the main stream; `token_event` tells when they have arrived."""
        main = self._device.main()
        self._device.copy(target[: source.numel()], source, main)
        self._device.record(self._buffers.token_event, main)

    def _reads_new_tokens(self, request: GuidedRequest) -> bool:
        return self._has_new_tokens and request.prev_seq_slot is not None

    def build(self) -> Failures:
        """Advance the matchers of the batch and write its rows on the host.

        Called again for the same batch it changes nothing and returns the same.

        Returns:
            (request id, message) of the requests that cannot go on. Their rows are unguided.
        """
        if self._failures is None:
            self._fetch()
            self._failures = self._build(None)
        return list(self._failures)

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
            ValueError: fewer logits rows than that, or what `apply_token_bitmask_` refuses; nothing is written.
        """
        num_rows = self._checked_rows(num_bitmask_tokens)
        if logits.dim() != 2 or logits.shape[0] < num_rows:
            raise ValueError(f"logits must be [rows, columns] with at least {num_rows} rows, got {list(logits.shape)}")
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
            )
        device.record(self._buffers.token_event, main)

    def _checked_rows(self, num_rows: int | None) -> int:
        if num_rows is None:
            return self.requests.num_bitmask_tokens
        if not 0 <= num_rows <= self._buffers.num_rows:
            raise ValueError(f"num_bitmask_tokens must be in [0, {self._buffers.num_rows}], got {num_rows}")
        return num_rows

    def execute(self, logits: torch.Tensor | None, d2t: torch.Tensor | None = None) -> Failures:
        """Build, copy and apply.

        Args:
            logits: see `apply_bitmask`; None on ranks without logits (all pipeline stages but the last), which then
                keep their state in step and copy nothing.
            d2t: see `apply_bitmask`.

        Returns:
            See `build`.
        """
        if self._failures is None:
            self._fetch()
            self._failures = self._build(d2t)
        if logits is not None:
            self.copy_bitmask()
            self.apply_bitmask(logits, d2t)
        return list(self._failures)

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
        batch_size, draft_len = len(self._target), self._target.max_num_draft_tokens
        if not 0 <= draft_step < draft_len:
            raise ValueError(f"draft_step must be in [0, {draft_len}), the draft length of the batch, got {draft_step}")
        self._check_by_position("new_tokens", new_tokens)
        staged = [new_tokens]
        if draft_step == 0:
            if num_accepted_tokens is None:
                raise ValueError("draft step 0 rolls rejected drafts back: it needs num_accepted_tokens")
            self._check_by_position("num_accepted_tokens", num_accepted_tokens)
            staged.append(num_accepted_tokens)
        for tokens, start in zip(staged, (0, self._max_num_sequences), strict=False):
            self._copy_to_host(self._draft_tokens_host[start : start + batch_size], tokens)
        drafts = GuidedRequests([request.as_draft() for request in self._target.requests], draft_len)
        self._enqueue(drafts, has_new_tokens=False, draft_step=draft_step)

    def _check_by_position(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != (len(self._target),):
            raise ValueError(
                f"{name} must be int32 [{len(self._target)}], one number a request of the batch, got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )

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
        if self._draft_step != draft_step:
            raise ValueError(f"draft step {draft_step} was not added: the batch at hand is step {self._draft_step}")
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
        counts: list[int | None] = []
        for request in self.requests.requests:
            accepted = request.num_accepted_draft_tokens
            if accepted is None and self._builder.credit(request) > 1:
                raise ValueError(
                    f"request {request.request_id!r} in slot {request.seq_slot}: num_accepted_draft_tokens is missing"
                )
            counts.append(None if accepted is None else accepted + 1)
        return self._builder.rollback_rejected(self.requests, counts, None)

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
            ValueError: tensors that do not have one row a request of the batch; nothing is undone.
        """
        self._check_by_position("num_accepted_tokens", num_accepted_tokens)
        if accepted_nodes is not None and (accepted_nodes.dim() != 2 or accepted_nodes.shape[0] != len(self._target)):
            raise ValueError(f"accepted_nodes must be [{len(self._target)}, L], got {list(accepted_nodes.shape)}")
        if self._target.max_num_draft_tokens == 0:
            return []
        paths = None if accepted_nodes is None else accepted_nodes.tolist()
        return self._builder.rollback_rejected(self._target, num_accepted_tokens.tolist(), paths)

    def rollback_draft_tokens(self) -> None:
        """End the draft loops under way: undo what they accepted, the golden token of step 0 included."""
        self._builder.rollback_drafts()

    def init_disagg_gen_requests(self) -> None:
        """Attach matchers to the batch's requests that had their prefill elsewhere. Safe to call again.

        Failures are reported by the next build.
        """
        self._builder.init_arrivals(self.requests)

    def submit(self, requests: Sequence[GuidedRequest]) -> None:
        """Start compiling the guides of requests that will be in a batch later. Submitting again does nothing."""
        for request in requests:
            self._attaching.submit(request)

    # inside a build -------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Read the tokens that were copied from the device into the snapshots."""
        if not self._has_new_tokens and self._draft_step is None:
            return
        self._device.synchronize(self._buffers.token_event)
        self._read_tokens()

    def _read_tokens(self) -> None:
        if self._draft_step is not None:
            tokens = self._draft_tokens_host[: len(self.requests)].tolist()
            for request, token_id in zip(self.requests.requests, tokens, strict=True):
                request.new_token = token_id
            return
        columns = self._new_tokens_host.view(-1, self._max_num_sequences).t().tolist()
        for request in self.requests.valid_requests():
            if self._reads_new_tokens(request):
                request.new_token, *drafts = columns[request.prev_seq_slot or 0]
                if not request.is_draft:
                    request.draft_tokens = drafts

    def _build(self, d2t: torch.Tensor | None) -> Failures:
        failures: Failures = []
        batch, first_step, last_step = self.requests, 0, self.requests.max_num_draft_tokens - 1
        if self._draft_step == first_step:
            start = self._max_num_sequences
            counts = self._draft_tokens_host[start : start + len(batch)].tolist()
            failures += self._builder.rollback_rejected(self._target, counts, None)
        words, token_mask = self._buffers.next_rows()
        token_mask[: batch.num_bitmask_tokens] = 0
        rows = RowWriter(
            self.bitmask_host,
            words,
            token_mask,
            self._vocab_size,
            draft_words=self._draft_words(d2t) if batch.is_draft else None,
            max_look_ahead=self._max_look_ahead,
            fill_threads=self._config.fill_threads,
        )
        failures += self._builder.build(batch, rows)
        if self._draft_step == last_step:
            self._builder.rollback_drafts()
        return failures

    def _draft_words(self, d2t: torch.Tensor | None) -> npt.NDArray[np.int32] | None:
        """Return the tokens that the draft vocabulary can spell as mask words; None if that is not known or is all."""
        total = None if self._draft_shard is None else self._draft_shard.total
        if d2t is None or (total is not None and d2t.shape[0] != total):
            # one shard of a d2t must not decide: every rank has to come to the same masks
            return None
        if self._draft_subset is None or self._draft_subset[0] is not d2t:
            offsets = d2t.cpu().numpy().astype(np.int64)
            tokens = offsets + np.arange(len(offsets))
            num_words = self.bitmask_host.shape[1]
            bits = np.zeros(32 * num_words, dtype=np.uint8)
            bits[tokens[(tokens >= 0) & (tokens < self._vocab_size)]] = 1
            self._draft_subset = (d2t, np.packbits(bits, bitorder="little").view(np.int32))
        return self._draft_subset[1]
