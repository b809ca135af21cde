"""One call fills the rows of a step, and one matcher's failure stays in its row.

In:  matchers of any backend, a bitmask, the row of each.      Out: filled rows, and the errors of the rest by position.
Where an engine's own threads beat a loop, rows go to them in one call: whoever cannot (another kind of matcher, one that
has terminated or is in use, an engine that fails as a whole) is filled one by one. Whether they do depends on the
machine, what else runs on it, and how much of their masks guides have cached, so from an adapter's `batch_break_even` on
both ways are measured as they are used.
"""

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import torch

from gd_plugin.grammars.matcher import EngineMatcher, GrammarMatcher, engine_errors, num_cores

__all__ = ["fill_next_token_bitmasks"]

# the slower way is tried again once in so many steps
_PROBE_STEPS = 64
_KEPT_TIMES = 3


class _Pace:
    """Which way has been faster lately: seconds a row of the last few steps, by whether they were filled together."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {way: deque(maxlen=_KEPT_TIMES) for way in (True, False)}
        self._num_steps = 0

    def together(self) -> bool:
        """Choose the way of the next step."""
        together, alone = self._seconds[True], self._seconds[False]
        if len(alone) < _KEPT_TIMES:
            return len(together) <= len(alone)
        self._num_steps += 1
        # the shortest time is the one that other programs disturbed least
        return (min(together) < min(alone)) is not (self._num_steps % _PROBE_STEPS == 0)

    def note(self, together: bool, seconds: float) -> None:
        """Remember what a step took, `math.inf` if it failed."""
        self._seconds[together].append(seconds)


# by kind of matcher and the number of rows, in powers of two; a race of two threads costs a measurement
_paces: dict[tuple[type[EngineMatcher], int], _Pace] = {}


def fill_next_token_bitmasks(
    matchers: Sequence[GrammarMatcher], bitmask: torch.Tensor, indices: Sequence[int], *, num_threads: int | None = None
) -> dict[int, Exception]:
    """Fill row `indices[i]` of `bitmask` from `matchers[i]`, for all i.

    Args:
        matchers: one a row; several rows may not share one.
        bitmask: int32 [rows, >=W] on the CPU.
        indices: row of each matcher.
        num_threads: threads to use; None is one a core, 1 never starts one.

    Returns:
        Position in `matchers` -> error, for the rows that could not be filled; their content is undefined. All others
        are filled.

    Raises:
        ValueError: `matchers` and `indices` differ in length; nothing is written.
    """
    if len(matchers) != len(indices):
        raise ValueError(f"{len(matchers)} matchers need as many rows, got {len(indices)} indices")
    errors: dict[int, Exception] = {}
    done: set[int] = set()
    threads = num_threads or num_cores()
    kinds = set(map(type, matchers)) if len(matchers) > 1 and threads > 1 else set()
    for kind in kinds:
        if not issubclass(kind, EngineMatcher) or len(matchers) < (kind.batch_break_even or len(matchers) + 1):
            continue
        pace = _paces.setdefault((kind, len(matchers).bit_length()), _Pace())
        together, start = pace.together(), time.perf_counter()
        filled: Collection[int] = ()
        if together:
            positions = _fillable(kind, matchers, bitmask, indices)
            if len(positions) >= (kind.batch_break_even or 0):
                filled = _fill_together(kind, matchers, bitmask, indices, positions, threads, errors)
        else:
            filled = range(len(matchers))
            if len(kinds) > 1:
                filled = [i for i in filled if type(matchers[i]) is kind]
            _fill_each(matchers, bitmask, indices, filled, errors)
        pace.note(together, (time.perf_counter() - start) / len(filled) if filled else math.inf)
        done.update(filled)
    rest = range(len(matchers)) if not done else [i for i in range(len(matchers)) if i not in done]
    _fill_each(matchers, bitmask, indices, rest, errors)
    return errors


def _fill_each(
    matchers: Sequence[GrammarMatcher],
    bitmask: torch.Tensor,
    indices: Sequence[int],
    positions: Iterable[int],
    errors: dict[int, Exception],
) -> None:
    """Fill the rows of `positions` one by one."""
    for position in positions:
        try:
            matchers[position].fill_next_token_bitmask(bitmask, indices[position])
        except Exception as error:
            errors[position] = error


def _fillable(
    kind: type[EngineMatcher], matchers: Sequence[GrammarMatcher], bitmask: torch.Tensor, indices: Sequence[int]
) -> list[int]:
    """Return the positions that the engine may fill in one call: it checks some of this differently, or not at all."""
    if not isinstance(bitmask, torch.Tensor) or bitmask.dtype != torch.int32 or not bitmask.is_cpu:
        return []
    if bitmask.ndim != 2 or not bitmask.is_contiguous():
        return []
    rows, words = bitmask.shape
    seen: set[int] = set()
    found: list[int] = []
    for position, matcher in enumerate(matchers):
        if (
            type(matcher) is kind
            and matcher._num_words == words
            and not matcher._terminated
            and 0 <= indices[position] < rows
            and id(matcher) not in seen
        ):
            seen.add(id(matcher))
            found.append(position)
    return found


def _fill_together(
    kind: type[EngineMatcher],
    matchers: Sequence[GrammarMatcher],
    bitmask: torch.Tensor,
    indices: Sequence[int],
    positions: list[int],
    num_threads: int,
    errors: dict[int, Exception],
) -> set[int]:
    """Fill the rows of `positions` in one call and return those that are dealt with, filled or in `errors`."""
    held: list[EngineMatcher] = []
    done: list[int] = []
    try:
        for position in positions:
            matcher = matchers[position]
            # one in use is left to the loop, which says so
            if isinstance(matcher, EngineMatcher) and matcher._enter():
                held.append(matcher)
                done.append(position)
        rows = [indices[position] for position in done]
        try:
            failed = kind._engine_fill_many(held, bitmask, rows, num_threads)
        except engine_errors():
            return set()
        words = bitmask.numpy()
        for i, matcher in enumerate(held):
            if i in failed:
                errors[done[i]] = failed[i]
                continue
            if kind.fills_whole_row:
                continue
            try:
                matcher._finish_row(words[rows[i]])
            except engine_errors() as error:
                errors[done[i]] = kind._engine_error(error)
        return set(done)
    finally:
        for matcher in held:
            matcher._leave()
