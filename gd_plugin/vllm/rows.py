"""Requests and their mask rows, the same for both model runners.

In:  requests, the tokens each has emitted, the logits rows of a step.
Out: logits, banned columns at -inf, after one copy from host to device.
Kept here: one request's failure is its own. A row that cannot go on may only stop, its reason is logged once, and nothing
raises into the engine's step.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import CompileTimeoutError, DeadEndError, MatcherError, TokenRejectedError
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.batch import fill_next_token_bitmasks
from gd_plugin.grammars.dead_ends import dead_end_error
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.apply import apply_token_bitmask_, open_banned_rows_
from gd_plugin.masks.bitmask import first_valid_tokens, num_mask_words, token_ids_to_words
from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.masks.device import open_device

__all__ = ["GuidedRow", "RowMasks"]

_log = logging.getLogger(__name__)


class GuidedRow:
    """One guided request: its matcher, and how much of its output the matcher has seen.

    Attributes:
        num_seen: output tokens seen.
        drafts: tokens proposed in the last step, in order; only those before the first illegal one matter.
        finished: a stop token has been emitted.
        error: why the request cannot go on, or None.

    Args:
        compiled: the compiled guide, which may still be in the making.
        stop_token_ids: ids at which the engine ends this request.
        may_conflict: the request has other parameters that ban tokens before the guide does.
    """

    def __init__(
        self,
        compiled: "Future[CompiledGrammar]",
        vocabulary: Vocabulary,
        config: GuidedDecodingConfig,
        stop_token_ids: frozenset[int],
        may_conflict: bool = False,
    ) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._config = config
        self._deadline = time.monotonic() + config.compile_timeout_s
        in_range = frozenset(i for i in stop_token_ids if 0 <= i < vocabulary.vocab_size)
        self.stop_token_ids = in_range or vocabulary.stop_token_set
        self.may_conflict = may_conflict
        self.matcher: GrammarMatcher | None = None
        num_words = num_mask_words(vocabulary.vocab_size)
        self.stop_words = token_ids_to_words(tuple(self.stop_token_ids), num_words)
        # ids that end a request differ from the vocabulary's: their bits are set here, not by the matcher
        self.own_stops = self.stop_token_ids != vocabulary.stop_token_set
        self.text_words = ~token_ids_to_words(tuple(self.stop_token_ids | vocabulary.stop_token_set), num_words)
        self.num_seen = 0
        self._last = -1
        self.drafts: list[int] = []
        self.finished = False
        self.error: Exception | None = None
        self.warned = False

    @property
    def live(self) -> bool:
        """The matcher decides what comes next."""
        return self.error is None and not self.finished

    @property
    def released(self) -> bool:
        """The request goes on unguided from its dead end."""
        return self._config.on_dead_end == "release" and isinstance(self.error, DeadEndError)

    def follow(self, output_ids: Sequence[int]) -> None:
        """See all of the request's output so far; what was seen before is not read again. Never raises."""
        count = len(output_ids)
        if self.num_seen and (count < self.num_seen or output_ids[self.num_seen - 1] != self._last):
            # the engine took tokens back
            self._restart()
        if count > self.num_seen:
            self.extend(output_ids[self.num_seen :])

    def extend(self, token_ids: Sequence[int]) -> None:
        """See further output. Never raises."""
        for token_id in token_ids:
            if self.live:
                try:
                    self._see(token_id)
                except Exception as error:
                    self.fail(error)
            self.num_seen += 1
            self._last = token_id

    def fail(self, error: Exception) -> None:
        """End the request's guide: from here on it may only stop."""
        if self.error is None:
            self.error = error
            _log.warning("a guided request ends after %d tokens: %s", self.num_seen, error)

    def ready_matcher(self) -> GrammarMatcher:
        """Return the matcher; waits for the guide to be compiled.

        Raises:
            GuideError: the guide could not be compiled for this vocabulary.
            CompileTimeoutError: it takes too long.
        """
        if self.matcher is None:
            try:
                # since it was submitted: requests that wait for one another do not add up
                self.matcher = self._compiled.result(max(0.0, self._deadline - time.monotonic())).create_matcher()
            except TimeoutError as error:
                seconds = self._config.compile_timeout_s
                raise CompileTimeoutError(
                    f"the guide was not compiled within {seconds} s; simplify it, or raise GD_PLUGIN_COMPILE_TIMEOUT_S",
                    seconds=seconds,
                ) from error
        return self.matcher

    def accept_draft(self, token_id: int) -> bool:
        """Advance over one draft, to be undone by `undo_drafts`; False if the guide or a stop token ends it here."""
        if not self.live or token_id in self.stop_token_ids:
            return False
        return self.ready_matcher().accept_token(token_id)

    def undo_drafts(self, num_tokens: int) -> None:
        """Go back over drafts that were accepted."""
        if num_tokens and self.matcher is not None:
            self.matcher.rollback(num_tokens)

    def _see(self, token_id: int) -> None:
        if token_id < 0:
            raise MatcherError(
                "vLLM has not told the last token yet: with asynchronous scheduling the processor must be named in "
                "logits_processors (--logits-processors gd_plugin.vllm:GuidedLogitsProcessor), or pass "
                "--no-async-scheduling"
            )
        matcher = self.ready_matcher()
        if token_id in self.stop_token_ids and matcher.is_accepting():
            self.finished = True
        elif token_id in self.stop_token_ids or not matcher.accept_token(token_id):
            raise TokenRejectedError(
                f"token {token_id} was emitted although the guide does not allow it; something behind the guide chose it",
                token_id=token_id,
                num_tokens=self.num_seen,
            )

    def _restart(self) -> None:
        self.num_seen, self._last, self.finished, self.drafts = 0, -1, False, []
        if isinstance(self.error, DeadEndError | TokenRejectedError):
            self.error = None
        if self.matcher is not None:
            self.matcher.reset()

    def dead_end(self) -> DeadEndError:
        """Say that nothing can follow."""
        return dead_end_error(self.num_seen)


class RowMasks:
    """The mask rows of one step: `begin`, any number of `fill`, `apply`.

    Guided rows are packed, so that what is copied to the device grows with them and not with the batch. Not thread-safe.

    Args:
        device: where the logits are.
        vocabulary: of the model.
        config: settings.
    """

    def __init__(self, device: torch.device, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self._device = open_device(device, config.pin_memory)
        self._vocab_size = vocabulary.vocab_size
        self._buffers: MaskBuffers | None = None
        self._states: list[GuidedRow] = []
        self._bitmask: torch.Tensor = torch.empty(0)
        self._index: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._num_rows = 0

    def begin(self, num_rows: int) -> None:
        """Start a step with `num_rows` logits rows, all of them left alone until they are filled."""
        if self._buffers is None or self._buffers.num_rows < num_rows:
            self._buffers = MaskBuffers(self._device, max(8, 1 << (num_rows - 1).bit_length()), self._vocab_size)
        # the buffer's switches hold, for each logits row, where its mask row lies: one copy carries both
        _, self._index = self._buffers.next_rows()
        self._bitmask = self._buffers.bitmask_host
        self._num_rows = num_rows
        self._index[:num_rows] = -1
        self._states = []

    def fill(self, rows: Sequence[int], states: Sequence[GuidedRow], width: int) -> None:
        """Write one mask row for each logits row, from its request as it is now. Never raises.

        Args:
            rows: logits rows.
            states: the request of each.
            width: columns of the logits.
        """
        start = len(self._states)
        slots: list[int] = []
        matchers: list[GrammarMatcher] = []
        for slot, state in enumerate(states, start):
            if state.live:
                try:
                    matchers.append(state.ready_matcher())
                    slots.append(slot)
                except Exception as error:
                    state.fail(error)
        errors = fill_next_token_bitmasks(matchers, self._bitmask, slots)
        for position, reason in errors.items():
            states[slots[position] - start].fail(reason)
        words: npt.NDArray[np.int32] = self._bitmask.numpy()
        for slot, state in enumerate(states, start):
            if not state.live:
                words[slot] = state.stop_words
            elif state.own_stops:
                words[slot] &= state.text_words
                if state.ready_matcher().is_accepting():
                    words[slot] |= state.stop_words
        stop = start + len(states)
        legal = first_valid_tokens(self._bitmask[start:stop], min(width, self._vocab_size)).tolist()
        for slot, (row, state) in enumerate(zip(rows, states, strict=True), start):
            if legal[slot - start] < 0 and state.live:
                state.fail(state.dead_end())
                words[slot] = state.stop_words
            if not state.released:
                self._index[row] = slot
        self._states.extend(states)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Ban columns of float [num_rows, N] in place and return it. Does not wait for the device."""
        buffers = self._buffers
        if buffers is None or not self._states:
            return logits
        device = self._device
        buffers.copy(len(self._states))
        device.wait(buffers.bitmask_event, device.main())
        bitmask, row_index = buffers.bitmask, buffers.token_mask[: self._num_rows]
        arguments: dict[str, Any] = {"row_index": row_index, "vocab_size": self._vocab_size}
        apply_token_bitmask_(logits, bitmask, **arguments)
        if any(state.may_conflict for state in self._states):
            self._mend(logits, bitmask, arguments)
        device.record(buffers.token_event, device.main())
        return logits

    def _mend(self, logits: torch.Tensor, bitmask: torch.Tensor, arguments: dict[str, Any]) -> None:
        """Where something before the guide banned every legal token, let all of them through alike."""
        for state in self._states:
            if state.may_conflict and not state.warned:
                state.warned = True
                _log.info("a guided request has parameters that ban tokens; where they leave none, the guide wins")
        open_banned_rows_(logits, bitmask, arguments["row_index"] >= 0, **arguments)
