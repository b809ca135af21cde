"""Which accesses to memory are ordered, and which only happened to come out right: races by vector clocks.

In:  accesses, each with the clock of the work that makes it.
Out: a sentence for every pair that touches the same bytes, one of them writing, with nothing that orders them.

A lane is a sequence of work that is ordered by itself: a stream, the calling thread, one stream's part of a graph. A clock
maps lanes to how much of each has happened before. So a race is found whatever order a run has chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["AccessLog"]

Clock = Mapping[str, int]


@dataclass(slots=True)
class _Access:
    who: str
    lane: str
    count: int
    start: int
    stop: int
    is_write: bool
    # keeps the address from being handed out again
    tensor: torch.Tensor

    def is_before(self, clock: Clock) -> bool:
        return self.count <= clock.get(self.lane, 0)


class AccessLog:
    """The accesses so far that a later one may still race with."""

    def __init__(self) -> None:
        self._accesses: dict[int, list[_Access]] = {}

    def note(self, who: str, lane: str, clock: Clock, tensor: torch.Tensor, *, is_write: bool) -> list[str]:
        """Add an access; return what it races with.

        Args:
            who: name of the work, for the sentences.
            lane: lane of the work.
            clock: its clock, itself counted.
            tensor: what it touches, as a range of bytes from its first to its last element.
            is_write: it writes.
        """
        start, stop = _byte_range(tensor)
        if start == stop:
            return []
        new = _Access(who, lane, clock[lane], start, stop, is_write, tensor)
        races, kept = [], []
        for old in self._accesses.get(tensor.untyped_storage().data_ptr(), ()):
            is_before = old.is_before(clock)
            if not is_before and old.start < stop and start < old.stop and (is_write or old.is_write):
                races.append(_describe(old, new))
            # what comes later and races with a covered access races with the covering one too
            if not (is_before and start <= old.start and old.stop <= stop and (is_write or not old.is_write)):
                kept.append(old)
        kept.append(new)
        self._accesses[tensor.untyped_storage().data_ptr()] = kept
        return races


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) of the tensor in its storage."""
    if tensor.numel() == 0:
        return 0, 0
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _describe(old: _Access, new: _Access) -> str:
    def verb(access: _Access) -> str:
        return "writes" if access.is_write else "reads"

    start, stop = max(old.start, new.start), min(old.stop, new.stop)
    return (
        f"{new.who} {verb(new)} bytes [{start}, {stop}) of a buffer that {old.who} {verb(old)}, and nothing orders the "
        "two; record an event behind the one and have the other's stream wait for it"
    )
