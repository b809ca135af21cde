"""Which request is in which row, for the V2 model runner: requests live in slots, rows are laid out anew every step.

In:  `add_request` by slot, the `LogitsContext` of a step.      Out: filled mask rows.
Source: vllm/v1/worker/gpu/sample/logits_processor/interface.py, 0.33. A slot is reused without notice. With speculative
decoding a request has one row for each draft token and one more; its first row's input is its newest token, the inputs
of the others are this step's drafts.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from gd_plugin.vllm.rows import GuidedRow, RowMasks

__all__ = ["SlotRows"]


class _Walk(NamedTuple):
    """The rows of one request in a step: its first row and the drafts behind it."""

    state: GuidedRow
    row: int
    drafts: list[int]


class SlotRows:
    """The guided requests of the V2 runner's slots.

    Args:
        req_states: vLLM's `LogitsProcRequestState`.
    """

    def __init__(self, req_states: Any) -> None:
        self._req_states = req_states
        self._slots: dict[int, GuidedRow] = {}

    def set(self, slot: int, state: GuidedRow | None) -> None:
        """Put a request into a slot, in place of whatever was there."""
        if state is None:
            self._slots.pop(slot, None)
        else:
            self._slots[slot] = state

    def fill(self, masks: RowMasks, logits: torch.Tensor, ctx: Any) -> bool:
        """Follow the requests of this step and fill their rows; False if none is guided. One transfer from the device."""
        if not any(slot in self._slots for slot in ctx.idx_mapping_np.tolist()):
            return False
        num_rows, width = logits.shape
        columns = [ctx.expanded_idx_mapping, ctx.input_ids, ctx.pos]
        slots, tokens, positions = torch.stack([c[:num_rows].to(torch.int64) for c in columns]).tolist()
        masks.begin(num_rows)
        walks = []
        for slot, group in groupby(range(num_rows), key=slots.__getitem__):
            state = self._slots.get(slot)
            rows = list(group)
            first = rows[0]
            # a prompt that is still being read in pieces emits nothing
            if state is None or positions[first] + 1 < int(self._req_states.prefill_len.np[slot]):
                continue
            self._follow(state, slot, positions[first], tokens[first])
            walks.append(_Walk(state, first, [tokens[row] for row in rows[1:]]))
        _fill_walks(masks, walks, width)
        return bool(walks)

    def _follow(self, state: GuidedRow, slot: int, position: int, token_id: int) -> None:
        """Let a request see its output up to `position`, where `token_id` is."""
        prompt_len = int(self._req_states.prompt_len.np[slot])
        num_new = position + 1 - prompt_len - state.num_seen
        if num_new < 0:
            state.follow([])
            num_new = position + 1 - prompt_len
        if num_new == 0:
            return
        if num_new > 1 + len(state.drafts):
            # resumed after preemption: the tokens of its earlier life, once
            start = prompt_len + state.num_seen
            state.extend(self._req_states.all_token_ids.gpu[slot, start : position + 1].tolist())
        else:
            # the drafts that were accepted, and what the target put behind them
            state.extend([*state.drafts[: num_new - 1], token_id])


def _fill_walks(masks: RowMasks, walks: Sequence[_Walk], width: int) -> None:
    """Fill the first row of every request, then those behind its first draft, and so on; then go back."""
    depth = 0
    active = list(walks)
    while active:
        masks.fill([walk.row + depth for walk in active], [walk.state for walk in active], width)
        going: list[_Walk] = []
        for walk in active:
            accepted = False
            if depth < len(walk.drafts):
                try:
                    accepted = walk.state.accept_draft(walk.drafts[depth])
                except Exception as error:
                    walk.state.fail(error)
            if accepted:
                going.append(walk)
            else:
                # rows behind a draft that the guide refuses are never sampled from
                walk.state.undo_drafts(depth)
        active, depth = going, depth + 1
    for walk in walks:
        walk.state.drafts = walk.drafts
