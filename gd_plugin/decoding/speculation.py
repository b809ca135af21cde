"""One step of guidance under speculation: accept the golden token and its drafts, fill a row behind each of them.

In:  the golden token and drafts of each request, its slot, its first row.
Out: filled rows, the counters by slot, and a message for each request that cannot go on.

Requests advance in lock step, one position at a time, so that the rows of a position are filled by one call. What
happens at a position, with row o for the golden token and row o + i behind draft i (adv tokens accepted so far):

    the token is refused         golden: the request fails. Draft: adv stays; rows behind it repeat the last legal row
                                 ("repeat") or stay open ("open")
    the matcher terminates       no row is needed any more
    its row has no legal token   golden: undone, the request fails (a draft model's request goes on unguided).
                                 Draft: undone and treated as refused ("repeat"), or kept with open rows ("open")

The target may emit at most `adv` tokens, bonus included: `max_acceptable`. Nothing here clamps what it does emit: more
than that is a violation, unless the matcher has terminated, and then what follows the stop token is dropped.

Source: accounting of TensorRT-LLM's guided decoder (tensorrt_llm/_torch/pyexecutor/guided_decoder.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gd_plugin.decoding.requests import GuidedRequest, walk_tree
from gd_plugin.decoding.rows import RowWriter
from gd_plugin.decoding.slots import SlotStates
from gd_plugin.grammars.matcher import GrammarMatcher

__all__ = [
    "Advance",
    "advance_chains",
    "advance_tree",
    "cut_drafts",
    "describe",
    "report_dead_end",
    "rollback_rejected",
]


@dataclass(slots=True)
class Advance:
    """One request on its way through a step: its matcher has consumed the golden token (none in a context step)."""

    request: GuidedRequest
    slot: int
    matcher: GrammarMatcher
    row: int
    drafts: Sequence[int] = ()
    position: int = 0  # drafts accepted so far; its next row is row + position


def cut_drafts(drafts: Sequence[int] | None, max_num_drafts: int) -> Sequence[int]:
    """Return the drafts in front of the first placeholder (a negative id), at most `max_num_drafts`."""
    if not drafts or max_num_drafts <= 0:
        return ()
    kept = drafts[:max_num_drafts]
    for position, token_id in enumerate(kept):
        if token_id < 0:
            return kept[:position]
    return kept


def advance_chains(
    chains: list[Advance],
    slots: SlotStates,
    rows: RowWriter,
    *,
    open_rows: bool,
    report: Callable[[Advance, str, bool], None],
) -> None:
    """Fill the rows of all chains and accept their drafts, position by position.

    Args:
        chains: requests whose golden token has been accepted and counted.
        slots: counters and matchers, updated.
        rows: the step's rows.
        open_rows: leave rows behind a refused draft open instead of repeating the last legal one.
        report: called as report(chain, message, lost) for a request that fails; `lost` tells that its matcher's state
            is not known any more.
    """
    while chains:
        errors = rows.fill([chain.matcher for chain in chains], [chain.row + chain.position for chain in chains])
        going_on = []
        for index, chain in enumerate(chains):
            try:
                if index in errors:
                    raise errors[index]
                if _after_fill(chain, slots, rows, open_rows, report):
                    going_on.append(chain)
            except Exception as error:
                report(chain, f"the grammar engine failed: {describe(error)}", True)
        chains = going_on


def _after_fill(
    chain: Advance, slots: SlotStates, rows: RowWriter, open_rows: bool, report: Callable[[Advance, str, bool], None]
) -> bool:
    """Judge the row just filled, then accept the next draft; True if that needs a row of its own."""
    slot = chain.slot
    if not rows.has_legal_token(chain.row + chain.position):
        _dead_row(chain, slots, rows, open_rows, report)
        return False
    rows.switch_on(chain.row + chain.position)
    slots.num_guided[slot] += 1
    if chain.position == len(chain.drafts):
        return False
    if not slots.accept(slot, chain.drafts[chain.position]):
        _stop_guiding_drafts(chain, rows, open_rows)
        return False
    chain.position += 1
    slots.num_advanced[slot] += 1
    slots.max_acceptable[slot] = slots.num_advanced[slot]
    return not chain.matcher.is_terminated()


def _stop_guiding_drafts(chain: Advance, rows: RowWriter, open_rows: bool) -> None:
    """The next draft is refused: see to the rows behind it."""
    if not open_rows:
        last = chain.row + chain.position
        rows.repeat(last, range(last + 1, chain.row + len(chain.drafts) + 1))


def _dead_row(
    chain: Advance, slots: SlotStates, rows: RowWriter, open_rows: bool, report: Callable[[Advance, str, bool], None]
) -> None:
    """The row at the chain's position has no legal token."""
    slot = chain.slot
    while chain.position:
        if open_rows and not rows.max_look_ahead:
            return
        slots.rollback(slot, 1)
        slots.num_advanced[slot] -= 1
        slots.max_acceptable[slot] = slots.num_advanced[slot]
        chain.position -= 1
        last = chain.row + chain.position
        if rows.max_look_ahead:
            rows.ban(last, chain.drafts[chain.position])
            if not rows.has_legal_token(last):
                # every token of this row leads to a dead row, so it is one itself
                rows.switch_off(last)
                slots.num_guided[slot] -= 1
                continue
        _stop_guiding_drafts(chain, rows, open_rows)
        return
    if chain.request.is_draft:
        slots.draft_terminated[slot] = True
        return
    report_dead_end(chain, slots, report)


def report_dead_end(chain: Advance, slots: SlotStates, report: Callable[[Advance, str, bool], None]) -> None:
    """No token is legal behind the golden token: undo it and report the request, with its text so far."""
    slot = chain.slot
    text = f"after {len(slots.tokens(slot))} tokens no token is legal and the guide is not complete"
    report(chain, f"{text}; text so far: {slots.text(slot)!r}", False)
    if not chain.request.require_matcher_init():
        slots.rollback(slot, 1)
    # in a context step the one token of credit is a phantom: nothing was consumed
    slots.num_advanced[slot] = 0
    slots.max_acceptable[slot] = 1


def advance_tree(chain: Advance, slots: SlotStates, rows: RowWriter, *, open_rows: bool) -> bool:
    """Fill one row a node of a draft tree, depth first, and leave the matcher behind the golden token.

    Row `chain.row + n` masks what follows node n. A node that the guide refuses, or behind which no token is legal, and
    all nodes below it repeat the row of the last legal node above ("open": are left alone); rows of a node that ends
    the guide and of all nodes below it are left alone.

    Args:
        chain: the request, with a checked `draft_tree`; its golden token has been accepted and counted, and `drafts`
            are the tokens of nodes 1, 2, ...
        slots: counters; `max_acceptable` becomes the length of the longest legal path, bonus included.
        rows: the step's rows.
        open_rows: see above.

    Returns:
        False if no token is legal behind the golden token.

    Raises:
        Exception: whatever the matcher raises; its state is not known then.
    """
    slot, matcher, depth_reached = chain.slot, chain.matcher, 0
    slots.drafts[slot] = chain.drafts
    ended: dict[int, bool] = {}  # nodes the walk does not go below -> whether the guide ended there
    for node, parent, depth in walk_tree(chain.request.draft_tree or ((-1,), (-1,))):
        row = chain.row + node
        if parent in ended:
            ended[node] = ended[parent]
        elif node:
            matcher.rollback(depth_reached - (depth - 1))
            depth_reached = depth - 1
            if chain.drafts[node - 1] < 0 or not matcher.accept_token(chain.drafts[node - 1]):
                ended[node] = False
            else:
                depth_reached = depth
                if matcher.is_terminated():
                    ended[node] = True
                    slots.max_acceptable[slot] = max(slots.max_acceptable[slot], depth + 1)
        if node not in ended:
            errors = rows.fill([matcher], [row])
            if errors:
                raise errors[0]
            if rows.has_legal_token(row):
                rows.switch_on(row)
                slots.num_guided[slot] += 1
                slots.max_acceptable[slot] = max(slots.max_acceptable[slot], depth + 1)
                continue
            if not node:
                return False
            ended[node] = False
        if not (ended[node] or open_rows):
            rows.repeat(chain.row + parent, range(row, row + 1))
    matcher.rollback(depth_reached)
    return True


def rollback_rejected(
    slots: SlotStates, slot: int, num_emitted: int, accepted_nodes: Sequence[int] | None
) -> tuple[int, str | None]:
    """Undo the drafts that the target rejected: the matcher is left behind the golden token and the accepted drafts.

    Args:
        slots: counters and matchers; `num_advanced` becomes 0, so that a second call does nothing.
        slot: the slot, whose last build credited at least one token.
        num_emitted: tokens the target emitted, bonus included.
        accepted_nodes: with a draft tree, the accepted nodes from the root down.

    Returns:
        Drafts that count as accepted, and what is wrong, or None. If anything is, the matcher has been dropped.
    """
    num_advanced, slots.num_advanced[slot] = slots.num_advanced[slot], 0
    tokens, slots.drafts[slot] = slots.drafts[slot], ()
    matcher = slots.matchers[slot]
    try:
        if matcher is None:
            return 0, None
        if num_emitted < 1:
            raise ValueError(f"the target must emit at least 1 token, bonus included, got {num_emitted}")
        if tokens:
            return _accept_path(slots, slot, num_emitted, tokens, accepted_nodes), None
        if num_emitted > num_advanced:
            if not matcher.is_terminated():
                raise ValueError(
                    f"the target emitted {num_emitted} tokens where the guide allows {num_advanced}: a draft that the "
                    "guide refuses has been accepted; hold the target to max_acceptable_tokens"
                )
            num_emitted = num_advanced
        slots.rollback(slot, num_advanced - num_emitted)
    except Exception as error:
        slots.fail(slot)
        return 0, describe(error)
    return num_emitted - 1, None


def _accept_path(
    slots: SlotStates, slot: int, num_emitted: int, tokens: Sequence[int], accepted_nodes: Sequence[int] | None
) -> int:
    """Replay the accepted path of a tree behind the golden token; return its length."""
    path = [] if accepted_nodes is None else [node for node in accepted_nodes if node >= 0]
    if len(path) < num_emitted - 1:
        raise ValueError(
            f"{num_emitted - 1} drafts of a tree were accepted but {len(path)} nodes are named; pass accepted_nodes"
        )
    for accepted, node in enumerate(path[: num_emitted - 1]):
        if not 1 <= node <= len(tokens):
            raise ValueError(f"node {node} is not in a draft tree of {len(tokens) + 1} nodes")
        matcher = slots.matchers[slot]
        if matcher is not None and matcher.is_terminated():
            # what follows a stop token is dropped
            return accepted
        if not slots.accept(slot, tokens[node - 1]):
            raise ValueError(f"node {node} of the draft tree has been accepted, which the guide refuses")
    return num_emitted - 1


def describe(error: BaseException) -> str:
    """One line about an error: its text, or its class where it has none."""
    return str(error).strip() or type(error).__name__
