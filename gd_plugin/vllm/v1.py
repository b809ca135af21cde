"""Which request is in which row, for the V1 model runner: rows are requests, and the engine tells every change.

In:  the batch updates of vLLM's `BatchUpdate`.      Out: row -> request and its output tokens.
Source: vllm/v1/sample/logits_processor/interface.py and state.py, 0.33. The list of output tokens is shared with the engine
and grows; under asynchronous scheduling its last entry is -1 until just before the logits are processed, so it is read
in `follow` and never before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from gd_plugin.vllm.rows import GuidedRow

__all__ = ["BatchRows"]


class _Entry(NamedTuple):
    state: GuidedRow
    output_ids: list[int]


class BatchRows:
    """The guided requests of a persistent batch.

    Args:
        create: makes the state of a request from its SamplingParams; None if it is unguided.
    """

    def __init__(self, create: Callable[[Any], GuidedRow | None]) -> None:
        self._create = create
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def update(self, batch_update: Any) -> None:
        """Follow one `BatchUpdate`, or None for no change: removed, then added, then moved."""
        if batch_update is None:
            return
        entries = self._entries
        for row in batch_update.removed:
            entries.pop(row, None)
        for row, params, _, output_ids in batch_update.added:
            state = self._create(params)
            if state is None:
                entries.pop(row, None)
            else:
                entries[row] = _Entry(state, output_ids)
        for source, target, direction in batch_update.moved:
            moved, displaced = entries.pop(source, None), entries.pop(target, None)
            if moved is not None:
                entries[target] = moved
            # by name: the enumeration is vLLM's
            if displaced is not None and direction.name == "SWAP":
                entries[source] = displaced

    def follow(self) -> tuple[list[int], list[GuidedRow]]:
        """Let every request see its new output; return rows and requests."""
        for state, output_ids in self._entries.values():
            state.follow(output_ids)
        return list(self._entries), [entry.state for entry in self._entries.values()]
