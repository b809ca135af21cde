"""One step's batch as the decoder sees it: snapshots of the engine's requests, and which mask rows they own.

In:  GuidedRequest records that the engine fills from its own requests.
Out: GuidedRequests: private copies with row offsets, in batch order.

Rows: a context request has 1, a generation request K' + 1 (row `o + i` masks the token that follows draft i, row `o`
the one that follows the golden token), a draft request 1. K' is the draft length of this step.
"""

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Final, NamedTuple, SupportsIndex

from gd_plugin.guides.guide import Guide

__all__ = ["DraftTree", "GuidedRequest", "GuidedRequests", "check_batch", "check_requests", "walk_tree"]


class DraftTree(NamedTuple):
    """The shape of a tree of drafts. Node 0 is the golden token, node i > 0 is `draft_tokens[i - 1]`; -1 is none.

    Attributes:
        first_child: first child of each node.
        next_sibling: next sibling of each node.
    """

    first_child: Sequence[int]
    next_sibling: Sequence[int]

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> "DraftTree":
        """Build from the parent of each node; `parents[0]` is -1, a parent comes before its children.

        Raises:
            ValueError: node 0 has a parent, or a parent does not come before its child.
        """
        num_nodes = len(parents)
        first_child, next_sibling, last_child = [-1] * num_nodes, [-1] * num_nodes, [-1] * num_nodes
        for node, parent in enumerate(parents):
            if not (-1 if node == 0 else 0) <= parent < max(node, 0):
                raise ValueError(f"node {node} of a draft tree cannot have parent {parent}; a parent comes first")
            if node == 0:
                continue
            if last_child[parent] < 0:
                first_child[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent] = node
        return cls(first_child, next_sibling)


def walk_tree(tree: DraftTree | tuple[Sequence[int], Sequence[int]]) -> list[tuple[int, int, int]]:
    """Return (node, parent, depth) of every node of a draft tree, parents first, depth first.

    Raises:
        ValueError: the two lists differ in length, a link leads outside, or a node is reached twice or not at all.
    """
    first_child, next_sibling = tree
    num_nodes = len(first_child)
    if num_nodes < 1 or len(next_sibling) != num_nodes:
        raise ValueError(f"a draft tree needs as many siblings as children, got {len(next_sibling)} and {num_nodes}")
    nodes, seen = [], set()
    waiting = [(0, -1, 0)]
    while waiting:
        node, parent, depth = waiting.pop()
        if node >= num_nodes or node in seen:
            raise ValueError(f"node {node} of a draft tree of {num_nodes} nodes is outside it or is reached twice")
        seen.add(node)
        nodes.append((node, parent, depth))
        if node and next_sibling[node] >= 0:
            waiting.append((next_sibling[node], parent, depth))
        if first_child[node] >= 0:
            waiting.append((first_child[node], node, depth + 1))
    if len(seen) < num_nodes:
        raise ValueError(f"only {len(seen)} of a draft tree's {num_nodes} nodes can be reached from node 0")
    return nodes


_TOKEN_FIELDS: Final = (
    "new_token",
    "draft_tokens",
    "draft_tree",
    "num_accepted_draft_tokens",
    "accepted_nodes",
    "history",
)


@dataclass(slots=True)
class GuidedRequest:
    """What the decoder must know of one request in one step. `add_batch` copies it.

    Attributes:
        guide: what the request may generate; None leaves it unguided.
        request_id: the engine's name of the request; failures are reported under it.
        seq_slot: the slot its state lives in, 0 <= seq_slot < max_num_sequences.
        prev_seq_slot: the slot its tokens were written under in the step before, the column of `new_tokens`; None
            where the request was not in that step, or has its tokens in `new_token` and `draft_tokens`.
        is_context_init_state: the prompt is being processed.
        is_last_context_chunk: its last chunk is: this step's row samples the first token.
        is_generation_in_progress_state: the request emits tokens.
        is_generation_only_first_iteration: it arrives from a prefill elsewhere and has not been in a batch here.
        new_token: golden token: emitted by the target, not yet consumed by the matcher.
        is_draft: the row belongs to a draft model's step.
        draft_tokens: proposals behind the golden token, cut at the first negative id; with a `draft_tree` those of its
            nodes from 1 on.
        draft_tree: shape of a tree of drafts, `DraftTree` or (first_child, next_sibling); None is a chain.
        num_accepted_draft_tokens: drafts of the step before that the target accepted, the bonus token left out.
        accepted_nodes: with a tree, the accepted nodes from the root down, node 0 left out.
        history: all tokens emitted before `new_token` (in a context step: all tokens emitted), for a request that
            comes back after preemption or from another engine; None where nothing is to be replayed.
        max_new_tokens: tokens within which the guide is complete, stop token and history included; read when the guide
            starts. Near the limit rows keep only tokens behind which it can still be completed. None is no budget.
    """

    guide: Guide | None = None
    request_id: object = None
    seq_slot: int | None = None
    prev_seq_slot: int | None = None
    is_context_init_state: bool = False
    is_last_context_chunk: bool = False
    is_generation_in_progress_state: bool = False
    is_generation_only_first_iteration: bool = False
    new_token: int | None = None
    is_draft: bool = False
    draft_tokens: Sequence[int] | None = None
    draft_tree: DraftTree | tuple[Sequence[int], Sequence[int]] | None = None
    num_accepted_draft_tokens: int | None = None
    accepted_nodes: Sequence[int] | None = None
    history: Sequence[int] | None = None
    max_new_tokens: int | None = None

    @property
    def slot(self) -> int:
        """`seq_slot` of a request that must have one.

        Raises:
            ValueError: it has none.
        """
        if self.seq_slot is None:
            raise ValueError(f"request {self.request_id!r} has no seq_slot")
        return self.seq_slot

    def require_matcher_init(self) -> bool:
        """Tell whether this step starts the guide: the last chunk of the prompt, and not a draft model's."""
        return not self.is_draft and self.is_context_init_state and self.is_last_context_chunk

    def require_matcher_advance(self) -> bool:
        """Tell whether this step consumes `new_token`. Never true together with `require_matcher_init`."""
        return self.is_draft or (self.is_generation_in_progress_state and not self.is_context_init_state)

    def snapshot(self) -> "GuidedRequest":
        """Return a copy that later changes of this one, or of its lists, do not reach.

        Raises:
            TypeError: token ids, accepted nodes or links of a tree that are no integers.
        """
        return GuidedRequest(
            self.guide,
            self.request_id,
            self.seq_slot,
            self.prev_seq_slot,
            self.is_context_init_state,
            self.is_last_context_chunk,
            self.is_generation_in_progress_state,
            self.is_generation_only_first_iteration,
            self._integer("new_token", self.new_token),
            self.is_draft,
            self._integers("draft_tokens", self.draft_tokens),
            self._links(self.draft_tree),
            self._integer("num_accepted_draft_tokens", self.num_accepted_draft_tokens),
            self._integers("accepted_nodes", self.accepted_nodes),
            self._integers("history", self.history),
            self.max_new_tokens,
        )

    @staticmethod
    def _integer(name: str, value: SupportsIndex | None) -> int | None:
        try:
            return None if value is None else index(value)
        except TypeError:
            raise TypeError(f"{name} must be an int or None, got {type(value).__name__}") from None

    @staticmethod
    def _integers(name: str, values: Sequence[SupportsIndex] | None) -> list[int] | None:
        # tensors and arrays of one dimension are read too
        try:
            return None if values is None else list(map(index, values))
        except TypeError as error:
            raise TypeError(
                f"{name} must be a sequence of int or None, got {type(values).__name__} ({error})"
            ) from None

    @classmethod
    def _links(cls, tree: DraftTree | tuple[Sequence[int], Sequence[int]] | None) -> DraftTree | None:
        if tree is None:
            return None
        try:
            first_child, next_sibling = tree
        except (TypeError, ValueError):
            raise TypeError(
                "draft_tree must be a DraftTree, (first_child, next_sibling) or None, got "
                f"{reprlib.repr(tree)}; DraftTree.from_parents makes one"
            ) from None
        return DraftTree(
            cls._integers("draft_tree", first_child) or (), cls._integers("draft_tree", next_sibling) or ()
        )

    def as_draft(self) -> "GuidedRequest":
        """Return the draft request that a target request of the same slot turns into in a draft loop."""
        takes_part = self.require_matcher_init() or self.require_matcher_advance()
        return GuidedRequest(
            guide=self.guide if takes_part else None,
            request_id=self.request_id,
            seq_slot=self.seq_slot,
            prev_seq_slot=self.prev_seq_slot,
            is_draft=True,
        )


class GuidedRequests:
    """A batch of requests in batch order.

    Attributes:
        requests: the requests.
        max_num_draft_tokens: K', drafts a generation request may have in this step.
        num_bitmask_tokens: rows of the layout; 0 for an empty batch.
        is_draft: the batch is a draft model's step.
        deferred: slots whose request is put off: its grammar is not ready.
        refused: slot -> why its request, which starts in this step, gets no matcher.
        unreadable: slot -> why its request's tokens cannot be read; it fails in this step.

    Raises:
        ValueError: draft and target requests in one batch, or a negative draft length.
    """

    def __init__(self, requests: Sequence[GuidedRequest], max_num_draft_tokens: int) -> None:
        """Lay out the rows.

        Raises:
            ValueError: draft and target requests in one batch, or a negative draft length.
        """
        if max_num_draft_tokens < 0:
            raise ValueError(f"the draft length must not be negative, got {max_num_draft_tokens}")
        self.requests = list(requests)
        self.max_num_draft_tokens = max_num_draft_tokens
        self.is_draft = bool(self.requests) and self.requests[0].is_draft
        self.deferred: set[int] = set()
        self.refused: dict[int, str] = {}
        self.unreadable: dict[int, str] = {}
        self._valid: list[GuidedRequest] = []
        self._first_rows: list[int] = []
        row = 0
        for request in self.requests:
            if request.is_draft != self.is_draft:
                raise ValueError(
                    f"request {request.request_id!r} in slot {request.seq_slot}: draft and target requests cannot "
                    "share a batch; add the draft model's requests in a batch of their own"
                )
            if request.guide is not None:
                self._valid.append(request)
                self._first_rows.append(row)
            row += 1 if request.is_draft or request.is_context_init_state else max_num_draft_tokens + 1
        self.num_bitmask_tokens = row

    @classmethod
    def of_snapshots(cls, requests: Sequence[GuidedRequest], max_num_draft_tokens: int) -> "GuidedRequests":
        """Copy the requests; one whose tokens cannot be read is copied without them.

        Raises:
            TypeError: something else than requests.
            ValueError: see `GuidedRequests`.
        """
        check_requests(requests)
        copies, problems = [], []
        for request in requests:
            try:
                copies.append(request.snapshot())
            except TypeError as error:
                nothing: dict[str, Any] = dict.fromkeys(_TOKEN_FIELDS)
                copies.append(replace(request, **nothing))
                problems.append((request, str(error)))
        batch = cls(copies, max_num_draft_tokens)
        batch.unreadable = {request.slot: problem for request, problem in problems if request.seq_slot is not None}
        return batch

    def valid_requests(self) -> Iterator[GuidedRequest]:
        """Yield the requests that have a guide."""
        return iter(self._valid)

    def valid_requests_with_offsets(self) -> Iterator[tuple[GuidedRequest, int]]:
        """Yield the requests that have a guide, each with its first row."""
        return zip(self._valid, self._first_rows, strict=True)

    def __len__(self) -> int:
        return len(self.requests)


def check_requests(requests: Sequence[GuidedRequest]) -> None:
    """Raise TypeError if `requests` is no sequence of GuidedRequest."""
    if isinstance(requests, str | bytes) or not isinstance(requests, Sequence):
        raise TypeError(f"requests must be a list of GuidedRequest, got {type(requests).__name__}")
    for place, request in enumerate(requests):
        if not isinstance(request, GuidedRequest):
            raise TypeError(f"requests[{place}] must be a GuidedRequest, got {type(request).__name__}")


def check_batch(
    batch: GuidedRequests, *, num_slots: int, num_rows: int, max_num_drafts: int, reads_new_tokens: bool
) -> None:
    """Check what every later phase relies on.

    Args:
        batch: a batch of the engine.
        num_slots: slots there are.
        num_rows: rows there is room for.
        max_num_drafts: K; a step with a shorter draft length cuts drafts, as its caller has asked.
        reads_new_tokens: requests with a `prev_seq_slot` get their tokens from the device.

    Raises:
        ValueError: a slot out of range or used twice, a request id used twice, more rows than reserved, more drafts
            than K, a broken draft tree.
        TypeError: a slot that is no integer, a request id that cannot be hashed.
    """
    if batch.num_bitmask_tokens > num_rows:
        raise ValueError(
            f"the batch needs {batch.num_bitmask_tokens} rows but {num_rows} are reserved; raise max_num_sequences"
        )
    used: dict[int, object] = {}
    slots: dict[object, int] = {}
    for request in batch.valid_requests():
        slot = _checked_slot(request, request.seq_slot, num_slots)
        if slot in used:
            raise ValueError(f"requests {used[slot]!r} and {request.request_id!r} are both in slot {slot}")
        used[slot] = request.request_id
        # without an id there is nothing to tell requests apart by, and nothing that can be mistaken
        if request.request_id is not None and _first_slot(slots, request, slot) != slot:
            raise ValueError(
                f"request {request.request_id!r} is in slots {slots[request.request_id]} and {slot} of one batch; "
                "failures are told by the id, so each request needs one of its own"
            )
        late = reads_new_tokens and request.prev_seq_slot is not None
        if not (late or request.is_draft or request.is_context_init_state or request.draft_tree is not None):
            _check_chain(request, max_num_drafts)
        if request.prev_seq_slot is not None:
            _checked_slot(request, request.prev_seq_slot, num_slots)
        if request.draft_tree is not None and not (request.is_draft or request.is_context_init_state):
            _check_tree(request, request.draft_tree, batch.max_num_draft_tokens, reads_new_tokens)


def _first_slot(slots: dict[object, int], request: GuidedRequest, slot: int) -> int:
    try:
        return slots.setdefault(request.request_id, slot)
    except TypeError as error:
        raise TypeError(f"the request in slot {slot}: its request_id must be hashable ({error})") from None


def _checked_slot(request: GuidedRequest, slot: int | None, num_slots: int) -> int:
    if slot is not None and not hasattr(slot, "__index__"):
        raise TypeError(f"request {request.request_id!r}: a slot must be an int, got {slot!r}")
    if slot is None or not 0 <= slot < num_slots:
        advice = "raise max_num_sequences, or give the request a lower slot"
        if slot is None or slot < 0:
            advice = "give the request the slot that its state lives in" if slot is None else "slots count from 0"
        raise ValueError(f"request {request.request_id!r}: slot {slot} is not in [0, {num_slots}); {advice}")
    return slot


def _check_chain(request: GuidedRequest, max_num_drafts: int) -> None:
    """Refuse drafts that no row can guide. Placeholders are none: drafts end at the first."""
    drafts = request.draft_tokens or ()
    if len(drafts) > max_num_drafts and min(drafts[: max_num_drafts + 1]) >= 0:
        raise ValueError(
            f"request {request.request_id!r} in slot {request.seq_slot}: {len(drafts)} draft_tokens, but "
            f"max_num_draft_tokens is {max_num_drafts}; raise it or cut the drafts"
        )


def _check_tree(
    request: GuidedRequest,
    tree: DraftTree | tuple[Sequence[int], Sequence[int]],
    draft_len: int,
    reads_new_tokens: bool,
) -> None:
    try:
        num_nodes = len(walk_tree(tree))
        if num_nodes > draft_len + 1:
            raise ValueError(f"{num_nodes} nodes need a draft length of {num_nodes - 1}")
        late = reads_new_tokens and request.prev_seq_slot is not None
        if not late and len(request.draft_tokens or ()) < num_nodes - 1:
            raise ValueError(f"{num_nodes} nodes need {num_nodes - 1} draft_tokens")
    except ValueError as error:
        raise ValueError(f"request {request.request_id!r} in slot {request.seq_slot}: {error}") from None
