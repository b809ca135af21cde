"""The matcher contract, and the part of it that every engine needs done the same way.

GrammarMatcher    what everything above relies on; third parties implement it too
EngineMatcher     owns stop tokens, termination, the token count and stray bits, so that an adapter only speaks to its
                  engine: stop tokens never reach an engine, because engines disagree about them in every respect

Until termination the mask equals the accept set: a bit is 1 exactly when `accept_token` of that id would return True.
"""

import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from operator import index
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.errors import GuidedDecodingError, MatcherError, RollbackError
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import num_mask_words

__all__ = ["EngineMatcher", "GrammarMatcher", "checked_row", "engine_errors", "num_cores"]


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

    def __reduce__(self) -> str | tuple[Any, ...]:
        # `copy` and `pickle` ask here; copying attributes would share the engine's state, or fail inside it
        raise TypeError(f"a {type(self).__name__} can be neither copied nor pickled; fork() gives an independent one")


def checked_row(bitmask: torch.Tensor, index: int, num_words: int) -> torch.Tensor:
    """Return row `index` as int32 [>=num_words], or raise the ValueError that the contract promises."""
    _check_bitmask(bitmask, index, num_words)
    return bitmask[index]


def _check_bitmask(bitmask: torch.Tensor, index: int, num_words: int) -> None:
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise ValueError(f"index must be a row of the bitmask (an int), got {index!r}")
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


def engine_errors() -> tuple[type[BaseException], ...]:
    """Return the classes that engines raise, to be named behind `except`.

    A panic of an engine written in Rust is no `Exception`, each engine has a class of its own for it, and none of them
    can be imported. Interrupts and exits are left alone. Source: PyO3's `PanicException`.
    """
    return (Exception, *(kind for kind in BaseException.__subclasses__() if kind.__name__ == "PanicException"))


class _View(NamedTuple):
    """A bitmask that has been checked, and numpy's view of its memory.

    The view does not keep the memory: it is used only while `bitmask()` is the caller's own tensor, at the same address.
    """

    bitmask: "weakref.ref[torch.Tensor]"
    pointer: int
    shape: torch.Size
    num_rows: int
    num_words: int
    row_nbytes: int
    rows: npt.NDArray[np.int32]

    @classmethod
    def of(cls, bitmask: torch.Tensor) -> "_View":
        """Look at int32 [rows, words] with stride 1 along its words."""
        rows, words = bitmask.shape
        nbytes, pointer = 4 * bitmask.stride(0), bitmask.data_ptr()
        size = (rows - 1) * nbytes + 4 * words if rows else 0
        memory = memoryview((ctypes.c_char * size).from_address(pointer))
        view: npt.NDArray[np.int32] = np.ndarray((rows, words), np.int32, memory, strides=(nbytes, 4))
        return cls(weakref.ref(bitmask), pointer, bitmask.shape, rows, words, nbytes, view)


# Checking a bitmask and asking torch for a view take longer than most fills, and steps fill one bitmask again and again:
# the last one is remembered, by its object and all that could be changed about it in place. It is replaced as a whole, so
# threads see one or the other.
_last_view = _View.of(torch.empty((0, 0), dtype=torch.int32))


def _look_at(bitmask: torch.Tensor, index: int, num_words: int) -> _View:
    """Check a bitmask and remember it, or raise the ValueError that the contract promises."""
    global _last_view
    _check_bitmask(bitmask, index, num_words)
    _last_view = view = _View.of(bitmask)
    return view


class _Alone:
    """Lets one thread at a time into a matcher, and what an engine raises inside out as a `MatcherError`."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: "EngineMatcher") -> None:
        self._matcher = matcher

    def __enter__(self) -> None:
        if not self._matcher._enter():
            raise _in_use()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._matcher._leave()
        if error is not None and isinstance(error, engine_errors()) and not isinstance(error, GuidedDecodingError):
            raise self._matcher._engine_error(error) from error


class EngineMatcher(GrammarMatcher):
    """Base of the adapters: does what the contract says, given the hooks below.

    Hooks see text tokens only, never a stop token, and only while the matcher is not terminated. One runs at a time:
    a second thread that calls while one is inside gets a `MatcherError`, and the engine never sees two at once. What a
    hook raises is translated here: hooks let the engine's errors through.
    """

    # name of the engine in messages
    engine: ClassVar[str] = "the engine"
    # whether `_engine_fill` writes the stop tokens' bits as `_engine_accepting` says, and none past the vocabulary
    fills_whole_row: ClassVar[bool] = False
    # matchers of one step from which `_engine_fill_many` may beat a loop; None: never
    batch_break_even: ClassVar[int | None] = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        # read for each token and row
        self._vocab_size = vocabulary.vocab_size
        self._stop_token_set = vocabulary.stop_token_set
        self._not_text = vocabulary.not_text
        self._stop_words = vocabulary.stop_words
        self._num_words = num_mask_words(vocabulary.vocab_size)
        self._num_tokens = 0
        self._terminated = False
        # holds its item while no thread is inside: taking it is atomic, and twice as fast as a lock
        self._idle = [None]

    @abstractmethod
    def _engine_accept(self, token_id: int) -> bool:
        """Advance the engine by a text token, or leave it as it was and return False."""

    @abstractmethod
    def _engine_rollback(self, num_tokens: int) -> None:
        """Undo `num_tokens` text tokens, at least 1 and never more than were accepted."""

    @abstractmethod
    def _engine_fill(self, rows: npt.NDArray[np.int32], index: int, address: int) -> None:
        """Write the legal text tokens into the first W words of row `index` of `rows`, which begin at `address`.

        Stop and stray bits may hold anything, unless `fills_whole_row` says otherwise.
        """

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

    @staticmethod
    def _engine_message(error: BaseException) -> str:
        """Return the engine's own sentence."""
        return str(error).strip()

    @classmethod
    def _engine_error(cls, error: BaseException) -> MatcherError:
        """Translate what the engine raised in a hook, a panic included."""
        return MatcherError(f"{cls.engine} failed while matching: {cls._engine_message(error) or type(error).__name__}")

    def _enter(self) -> bool:
        """Keep other threads out until `_leave`; False if one is inside."""
        try:
            self._idle.pop()
        except IndexError:
            return False
        return True

    def _leave(self) -> None:
        self._idle.append(None)

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept_token`."""
        # numbers of other libraries hash differently; what is no whole number is a TypeError
        token_id = index(token_id)
        # here and in filling, what _Alone does is written out: it takes as long as the rest
        try:
            self._idle.pop()
        except IndexError:
            raise _in_use() from None
        try:
            if self._terminated or not 0 <= token_id < self._vocab_size:
                return False
            if token_id not in self._not_text:
                if not self._engine_accept(token_id):
                    return False
            elif token_id in self._stop_token_set and self._engine_accepting():
                self._terminated = True
            else:
                return False
            self._num_tokens += 1
            return True
        except GuidedDecodingError:
            raise
        except engine_errors() as error:
            raise self._engine_error(error) from error
        finally:
            self._idle.append(None)

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        num_tokens = index(num_tokens)
        with _Alone(self):
            if not 0 <= num_tokens <= self._num_tokens:
                raise RollbackError(f"cannot roll back {num_tokens} tokens: {self._num_tokens} have been accepted")
            # the stop token is always the last one and never reached the engine
            text_tokens = num_tokens - (1 if self._terminated and num_tokens else 0)
            if text_tokens:
                self._engine_rollback(text_tokens)
            if num_tokens:
                self._terminated = False
            self._num_tokens -= num_tokens

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """See `GrammarMatcher.fill_next_token_bitmask`."""
        known, pointer, shape, num_rows, width, row_nbytes, rows = _last_view
        if (
            bitmask is None
            or known() is not bitmask
            or type(index) is not int
            or bitmask.data_ptr() != pointer
            or bitmask.shape != shape
            or width < self._num_words
            or not 0 <= index < num_rows
        ):
            _, pointer, _, _, width, row_nbytes, rows = _look_at(bitmask, index, self._num_words)
            index = int(index)
        try:
            self._idle.pop()
        except IndexError:
            raise _in_use() from None
        try:
            if self._terminated:
                rows[index] = 0
            else:
                self._engine_fill(rows, index, pointer + index * row_nbytes)
                if self.fills_whole_row and width == self._num_words:
                    return
            self._finish_row(rows[index])
        except GuidedDecodingError:
            raise
        except engine_errors() as error:
            raise self._engine_error(error) from error
        finally:
            self._idle.append(None)

    def _finish_row(self, row: npt.NDArray[np.int32]) -> None:
        """Clear what lies past the vocabulary and set the stop tokens' bits as the contract says."""
        if self._vocab_size & 31:
            row[self._num_words - 1] &= self._vocabulary.tail_word
        if len(row) > self._num_words:
            row[self._num_words :] = 0
        legal = self._terminated or self._engine_accepting()
        for word, bits in self._stop_words:
            row[word] = row[word] | bits if legal else row[word] & ~bits

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        return self._terminated

    def is_accepting(self) -> bool:
        """See `GrammarMatcher.is_accepting`."""
        with _Alone(self):
            return not self._terminated and self._engine_accepting()

    def fork(self) -> "GrammarMatcher":
        """See `GrammarMatcher.fork`."""
        with _Alone(self):
            twin = self._engine_fork()
            twin._num_tokens = self._num_tokens
            twin._terminated = self._terminated
            return twin

    def reset(self) -> None:
        """See `GrammarMatcher.reset`."""
        with _Alone(self):
            self._engine_reset()
            self._num_tokens = 0
            self._terminated = False

    def forced_text(self) -> bytes:
        """See `GrammarMatcher.forced_text`."""
        with _Alone(self):
            return b"" if self._terminated else self._engine_forced_text()

    @property
    def num_tokens(self) -> int:
        """See `GrammarMatcher.num_tokens`."""
        return self._num_tokens


def _in_use() -> MatcherError:
    return MatcherError("this matcher is in use in another thread; give each thread its own with fork()")
