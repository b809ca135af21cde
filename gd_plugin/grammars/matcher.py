"""The matcher contract, and the part of it that every engine needs done the same way.

GrammarMatcher    what everything above relies on; third parties implement it too
EngineMatcher     owns stop tokens, termination, the token count and stray bits, so that an adapter only speaks to its
                  engine: stop tokens never reach an engine, because engines disagree about them in every respect

Until termination the mask equals the accept set: a bit is 1 exactly when `accept_token` of that id would return True.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from operator import index
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.errors import MatcherError, RollbackError
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import num_mask_words

__all__ = ["EngineMatcher", "GrammarMatcher", "checked_row", "num_cores"]


class GrammarMatcher(ABC):
    """One request's state in a guide. Not thread-safe; `fork` gives an independent one."""

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Advance by one token and return True, or return False and leave the state as it was.

        False for illegal ids, ids out of range, stop tokens before the guide is complete, and everything after
        termination.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, stop tokens included.

        Raises:
            RollbackError: negative, or more than have been accepted; the state is as before the call.
        """

    @abstractmethod
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """Write row `index` of `bitmask`, int32 [rows, >=W] on the CPU, whole: legal ids 1, everything else 0.

        After termination the row holds the stop tokens only. The state does not change.

        Raises:
            ValueError: wrong dtype, device, width, stride or index; nothing is written.
            MatcherError: the engine failed; the row's content is undefined.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Tell whether a stop token has been accepted."""

    @abstractmethod
    def is_accepting(self) -> bool:
        """Tell whether a stop token would be accepted now."""

    @abstractmethod
    def fork(self) -> "GrammarMatcher":
        """Return an independent matcher in the same state."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to the start, with an empty history."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Accepted tokens that a rollback could undo, stop tokens included."""

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest prefix of `token_ids` that would be accepted; the state is unchanged."""
        accepted = 0
        try:
            for token_id in token_ids:
                if not self.accept_token(token_id):
                    break
                accepted += 1
        finally:
            self.rollback(accepted)
        return accepted

    def forced_text(self) -> bytes:
        """Return bytes that every continuation must start with; b"" if none, or if the engine cannot tell."""
        return b""


def checked_row(bitmask: torch.Tensor, index: int, num_words: int) -> torch.Tensor:
    """Return row `index` as int32 [>=num_words], or raise the ValueError that the contract promises."""
    _check_bitmask(bitmask, index, num_words)
    return bitmask[index]


def _check_bitmask(bitmask: torch.Tensor, index: int, num_words: int) -> None:
    if not isinstance(bitmask, torch.Tensor):
        raise ValueError(f"bitmask must be an int32 tensor on the CPU, got {type(bitmask).__name__}")
    if bitmask.dtype != torch.int32 or not bitmask.is_cpu or bitmask.layout is not torch.strided:
        raise ValueError(f"bitmask must be int32 on the CPU, got {bitmask.dtype} on {bitmask.device}")
    if bitmask.ndim != 2:
        raise ValueError(f"bitmask must be [rows, words], got shape {tuple(bitmask.shape)}")
    rows, words = bitmask.shape
    if not 0 <= index < rows:
        raise ValueError(f"row {index} is outside the bitmask's {rows} rows")
    if words < num_words:
        raise ValueError(
            f"bitmask has {words} words a row, this vocabulary needs {num_words}; "
            "use allocate_token_bitmask(rows, vocab_size)"
        )
    # the stride of a single word says nothing
    if words > 1 and bitmask.stride(1) != 1:
        raise ValueError(f"bitmask must have stride 1 along its words, got {bitmask.stride(1)}")


@cache
def num_cores() -> int:
    """Return the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# bitmask, its address and shape, and numpy's view of it; replaced as a whole, so threads see one or the other
_last_view: tuple[torch.Tensor, int, torch.Size, npt.NDArray[np.int32]]
_last_view = (_nothing := torch.empty((0, 0), dtype=torch.int32), 0, _nothing.shape, _nothing.numpy())


class EngineMatcher(GrammarMatcher):
    """Base of the adapters: does what the contract says, given the six hooks below.

    Hooks see text tokens only, never a stop token, and only while the matcher is not terminated. One runs at a time:
    a second thread that calls while one is inside gets a `MatcherError`, and the engine never sees two at once.
    """

    # matchers of one step from which `_engine_fill_many` beats a loop; None: never
    batch_break_even: ClassVar[int | None] = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # read for each token and row
        self._vocab_size = vocabulary.vocab_size
        self._stop_token_set = vocabulary.stop_token_set
        self._special_token_ids = vocabulary.special_token_ids
        self._stop_words = [(word, bits, ~bits) for word, bits in vocabulary.stop_words]
        self._num_words = num_mask_words(vocabulary.vocab_size)
        self._num_tokens = 0
        self._terminated = False
        self._busy = threading.Lock()

    @abstractmethod
    def _engine_accept(self, token_id: int) -> bool:
        """Advance the engine by a text token, or leave it as it was and return False."""

    @abstractmethod
    def _engine_rollback(self, num_tokens: int) -> None:
        """Undo `num_tokens` text tokens, at least 1 and never more than were accepted."""

    @abstractmethod
    def _engine_fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write the legal text tokens into contiguous int32 [W]; stop and stray bits may hold anything."""

    @classmethod
    def _engine_fill_many(
        cls, matchers: "Sequence[Any]", bitmask: torch.Tensor, indices: Sequence[int], num_threads: int
    ) -> dict[int, Exception]:
        """Do `_engine_fill` for all `matchers` of this class on the engine's own threads.

        Args:
            matchers: all of this class and different.
            bitmask: contiguous int32 [rows, W].
            indices: a row for each matcher.
            num_threads: threads to use.

        Returns:
            Position in `matchers` -> error; the other rows are filled. What it raises makes the caller loop.
        """
        raise NotImplementedError

    @abstractmethod
    def _engine_accepting(self) -> bool:
        """Tell whether the text so far matches the whole guide."""

    @abstractmethod
    def _engine_fork(self) -> "EngineMatcher":
        """Return a new matcher whose engine is in the same state; the base class copies its own state."""

    @abstractmethod
    def _engine_reset(self) -> None:
        """Go back to the start."""

    def _engine_forced_text(self) -> bytes:
        """Return bytes that every continuation must start with; b"" if the engine cannot tell."""
        return b""

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept_token`."""
        # numbers of other libraries hash differently; what is no whole number is a TypeError
        token_id = index(token_id)
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            if self._terminated or not 0 <= token_id < self._vocab_size:
                return False
            if token_id in self._stop_token_set:
                if not self._engine_accepting():
                    return False
                self._terminated = True
            elif token_id in self._special_token_ids or not self._engine_accept(token_id):
                return False
            self._num_tokens += 1
            return True
        finally:
            self._busy.release()

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        num_tokens = index(num_tokens)
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            if not 0 <= num_tokens <= self._num_tokens:
                raise RollbackError(f"cannot roll back {num_tokens} tokens: {self._num_tokens} have been accepted")
            # the stop token is always the last one and never reached the engine
            text_tokens = num_tokens - (1 if self._terminated and num_tokens else 0)
            if text_tokens:
                self._engine_rollback(text_tokens)
            if num_tokens:
                self._terminated = False
            self._num_tokens -= num_tokens
        finally:
            self._busy.release()

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """See `GrammarMatcher.fill_next_token_bitmask`."""
        row = self._row(bitmask, index)
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            if self._terminated:
                row[:] = 0
            else:
                self._engine_fill(row if len(row) == self._num_words else row[: self._num_words])
            self._finish_row(row)
        finally:
            self._busy.release()

    def _row(self, bitmask: torch.Tensor, index: int) -> npt.NDArray[np.int32]:
        """Return a row as numpy's view, or raise the ValueError that the contract promises.

        Checking a bitmask and asking torch for a view take longer than most fills. Steps fill one bitmask again and
        again, so the last one is remembered, by its object and all that could be changed about it in place.
        """
        global _last_view
        known, pointer, shape, words = _last_view
        if (
            bitmask is not known
            or bitmask.data_ptr() != pointer
            or bitmask.shape != shape
            or shape[1] < self._num_words
            or not 0 <= index < shape[0]
        ):
            _check_bitmask(bitmask, index, self._num_words)
            words = bitmask.numpy()
            _last_view = (bitmask, bitmask.data_ptr(), bitmask.shape, words)
        row: npt.NDArray[np.int32] = words[index]
        return row

    def _finish_row(self, row: npt.NDArray[np.int32]) -> None:
        """Clear what lies past the vocabulary and set the stop tokens' bits as the contract says."""
        if self._vocab_size & 31:
            row[self._num_words - 1] &= self._vocabulary.tail_word
        if len(row) > self._num_words:
            row[self._num_words :] = 0
        legal = self._terminated or self._engine_accepting()
        for word, bits, others in self._stop_words:
            row[word] = row[word] | bits if legal else row[word] & others

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        return self._terminated

    def is_accepting(self) -> bool:
        """See `GrammarMatcher.is_accepting`."""
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            return not self._terminated and self._engine_accepting()
        finally:
            self._busy.release()

    def fork(self) -> "GrammarMatcher":
        """See `GrammarMatcher.fork`."""
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            twin = self._engine_fork()
            twin._num_tokens = self._num_tokens
            twin._terminated = self._terminated
            return twin
        finally:
            self._busy.release()

    def reset(self) -> None:
        """See `GrammarMatcher.reset`."""
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            self._engine_reset()
            self._num_tokens = 0
            self._terminated = False
        finally:
            self._busy.release()

    def forced_text(self) -> bytes:
        """See `GrammarMatcher.forced_text`."""
        if not self._busy.acquire(False):
            raise _in_use()
        try:
            return b"" if self._terminated else self._engine_forced_text()
        finally:
            self._busy.release()

    @property
    def num_tokens(self) -> int:
        """See `GrammarMatcher.num_tokens`."""
        return self._num_tokens


def _in_use() -> MatcherError:
    return MatcherError("this matcher is in use in another thread; give each thread its own with fork()")
