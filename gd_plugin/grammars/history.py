"""MatcherTree: a guide's state for any token history.

In:  token histories, in any order: longer, shorter, forked, repeated.
Out: nodes; a live node's mask row.
Kept here: state is found from token history, never from a row's index; one history's failure is its own.

A node is one history. Matchers are few (about one a current row): each sits at some node and is moved to where it is
needed by rolling back to the common ancestor and accepting from there, which costs microseconds, while a fork copies the
whole history (xgrammar 0.2.9: 4 us at 100 tokens, 21-30 us at 4,000). Masks stay at their nodes, so a draft model and
its target share them. Nodes off the live paths and masks are dropped once they lie further back than the window.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final

from gd_plugin.errors import MatcherError
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.masks.pool import BitmaskPool

__all__ = ["MatcherTree", "Node", "NodeState"]


class NodeState(Enum):
    """LIVE: the guide goes on. FINISHED: a stop token was accepted. DEAD: a token was rejected, or nothing is legal."""

    LIVE = "live"
    FINISHED = "finished"
    DEAD = "dead"


class Node:
    """One token history.

    Attributes:
        parent: the history without its last token; None at the root.
        token_id: the last token; -1 at the root.
        depth: tokens since the root.
        num_accepted: tokens the matcher has accepted on the way here; less than `depth` behind a skipped token.
        state: see NodeState.
        mask_row: row of the pool that holds this node's mask, or -1.
        first_legal: lowest legal token of that mask.
        closing: tokens that may follow under a budget -> a completion behind each; None until a budget asks.
        error: why this node or the one it follows is dead, if not because a token was rejected.
    """

    __slots__ = (
        "children",
        "closing",
        "depth",
        "error",
        "first_legal",
        "mask_row",
        "matcher",
        "num_accepted",
        "parent",
        "state",
        "token_id",
    )

    def __init__(self, parent: "Node | None", token_id: int, state: NodeState) -> None:
        self.parent = parent
        self.token_id = token_id
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.num_accepted: int = 0 if parent is None else parent.num_accepted + 1
        self.state = state
        self.children: dict[int, Node] = {}
        self.matcher: GrammarMatcher | None = None
        self.mask_row = -1
        self.first_legal = -1
        self.closing: dict[int, tuple[int, ...]] | None = None
        self.error: Exception | None = None

    def ancestor(self, depth: int) -> "Node":
        """Return the node of this path at `depth`, at most this node's own."""
        node = self
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return node

    def token_ids(self) -> tuple[int, ...]:
        """Return the whole history. O(depth)."""
        tokens = []
        node = self
        while node.parent is not None:
            tokens.append(node.token_id)
            node = node.parent
        return tuple(reversed(tokens))


class MatcherTree:
    """States of one compiled guide by token history. Not thread-safe.

    Args:
        create: returns a new matcher at the start of the guide.
        pool: where masks are kept.
        window: how far behind the newest node of a path a history may come back (the longest draft), in tokens.
    """

    def __init__(self, create: Callable[[], GrammarMatcher], pool: BitmaskPool, *, window: int = 64) -> None:
        self.root = Node(None, -1, NodeState.LIVE)
        self.failures: dict[tuple[int, ...], Exception] = {}
        self.interventions: set[tuple[int, ...]] = set()  # histories at which a budget refused a token
        self._create = create
        self._pool = pool
        self._window = window
        self._seats: dict[Node, None] = {}
        self._steps_since_prune = 0
        self._floor = 0

    def step(self, moves: Sequence[tuple[Node, int]]) -> list[Node]:
        """Return the node behind each (node, token); creates those that are not known yet.

        A token that the guide rejects, or that follows a finished or dead node, leads to a node too.
        """
        if len(moves) == 1:
            node, token = moves[0]
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = self._advance(node, token, _NO_DEMAND, set())
            return [child]
        demand = Counter(node for node, token in moves if token not in node.children and node.state is NodeState.LIVE)
        reached: list[Node] = []
        kept: set[Node] = set()
        for node, token in moves:
            child = node.children.get(token)
            if child is None:
                child = self._advance(node, token, demand, kept)
                demand[node] -= 1
                node.children[token] = child
            kept.add(child)
            reached.append(child)
        return reached

    def walk(self, node: Node, token_ids: Iterable[int]) -> Node:
        """Return the node that lies behind `token_ids` from `node`."""
        for token_id in token_ids:
            node = self.step([(node, token_id)])[0]
        return node

    def skip(self, node: Node, token_id: int) -> Node:
        """Let `token_id` behind `node` be no part of the guide (a forced start token); the state stays the same."""
        child = node.children.get(token_id)
        if child is None:
            child = Node(node, token_id, node.state)
            child.num_accepted = node.num_accepted
            node.children[token_id] = child
        return child

    def needs_mask(self, node: Node) -> bool:
        """Tell whether the node is live and its mask has not been filled, or has been dropped."""
        return node.state is NodeState.LIVE and node.mask_row < 0

    def seat(self, node: Node, kept: "set[Node]") -> GrammarMatcher | None:
        """Return a matcher in the state of a live node, ready to fill; None if the engine failed.

        Matchers at the nodes of `kept` stay where they are.
        """
        if node.matcher is not None:
            return node.matcher
        try:
            return self._place(node, kept, _NO_DEMAND)
        except Exception as error:  # engines fail in ways of their own; only this history is lost
            self.fail(node, error)
            return None

    def add_mask(self, node: Node, row: int, first_legal: int) -> None:
        """Remember that pool row `row` holds the node's mask."""
        node.mask_row = row
        node.first_legal = first_legal

    def drop_mask(self, node: Node) -> None:
        """Give the node's mask back, if it has one; `needs_mask` is true of it then."""
        if node.mask_row >= 0:
            self._pool.give_back(node.mask_row)
            node.mask_row = -1

    def fail(self, node: Node, error: Exception) -> None:
        """Declare a node dead, with the reason; its matcher may be broken and is thrown away."""
        if node.matcher is not None:
            self._unseat(node)
        self.close(node, error)

    def close(self, node: Node, error: Exception) -> None:
        """Declare a node dead, with the reason; its matcher is sound and goes on to serve other histories."""
        node.state = NodeState.DEAD
        node.error = error
        self.failures[node.token_ids()] = error

    def prune(self, tips: Iterable[Node]) -> None:
        """Drop what lies further than the window behind `tips` and is on no path to them. Amortised O(1) a token."""
        self._steps_since_prune += 1
        if self._steps_since_prune < self._window:
            return
        self._steps_since_prune = 0
        tips = list(tips)
        floor = min((tip.depth for tip in tips), default=0) - self._window
        # up to here earlier sweeps have left nothing but live paths
        swept = self._floor if floor >= self._floor else 0
        self._floor = max(floor, 0)
        live: set[Node] = set()
        for tip in tips:
            node: Node | None = tip
            while node is not None and node not in live and node.depth >= swept:
                live.add(node)
                node = node.parent
        for node in live:
            if node.depth < floor:
                self.drop_mask(node)
                for token_id in [token for token, child in node.children.items() if child not in live]:
                    self._drop_subtree(node.children.pop(token_id))
        for node in list(self._seats):
            if len(self._seats) <= 2 * len(tips):
                break
            if node not in live:
                self._unseat(node)

    @property
    def num_matchers(self) -> int:
        """Matchers alive now."""
        return len(self._seats)

    def _advance(self, node: Node, token_id: int, demand: "Counter[Node]", kept: "set[Node]") -> Node:
        if node.state is not NodeState.LIVE:
            child = Node(node, token_id, node.state)
            child.error = node.error
            return child
        child = Node(node, token_id, NodeState.LIVE)
        try:
            matcher = self._place(node, kept, demand)
            if demand[node] > 1:
                # others leave from this node in the same step, so the matcher that sits here stays
                spare = self._spare(node, kept, demand)
                matcher = matcher.fork() if spare is None else self._move(spare, node)
            else:
                self._unseat(node)
            accepted = matcher.accept_token(token_id)
            if not accepted and node.matcher is None:
                self._sit(matcher, node)
            terminated = accepted and matcher.is_terminated()
        except Exception as error:  # engines fail in ways of their own; only this history is lost
            self.fail(child, error)
            return child
        if not accepted:
            child.state = NodeState.DEAD
            return child
        child.state = NodeState.FINISHED if terminated else NodeState.LIVE
        self._sit(matcher, child)
        return child

    def _place(self, node: Node, kept: "set[Node]", demand: "Counter[Node]") -> GrammarMatcher:
        """Make a matcher sit at `node` and return it."""
        if node.matcher is not None:
            return node.matcher
        source = self._spare(node, kept, demand)
        if source is not None:
            try:
                matcher = self._move(source, node)
            except Exception:  # a rollback an engine cannot do: start over
                matcher = self._replay(node)
        else:
            matcher = self._replay(node)
        self._sit(matcher, node)
        return matcher

    def _spare(self, node: Node, kept: "set[Node]", demand: "Counter[Node]") -> Node | None:
        """The nearest seat that nobody needs in this step, within the window."""
        best, best_distance = None, 2 * self._window
        for seat in self._seats:
            if seat is node or seat in kept or demand[seat] > 0:
                continue
            distance = _distance(seat, node, best_distance)
            if distance < best_distance:
                best, best_distance = seat, distance
        return best

    def _move(self, source: Node, target: Node) -> GrammarMatcher:
        """Take the matcher from `source` and bring it into the state of `target`; it sits nowhere then."""
        matcher = source.matcher
        if matcher is None:
            raise MatcherError("no matcher sits at the source node")
        self._unseat(source)
        path: list[int] = []
        back, ahead = source, target
        while back is not ahead:
            if back.depth >= ahead.depth:
                back = _parent(back)
            else:
                if ahead.num_accepted > _parent(ahead).num_accepted:
                    path.append(ahead.token_id)
                ahead = _parent(ahead)
        matcher.rollback(source.num_accepted - back.num_accepted)
        _accept_all(matcher, reversed(path))
        return matcher

    def _replay(self, node: Node) -> GrammarMatcher:
        """Return a new matcher fed the whole history. O(depth)."""
        matcher = self._create()
        tokens = []
        while node.parent is not None:
            if node.num_accepted > node.parent.num_accepted:
                tokens.append(node.token_id)
            node = node.parent
        _accept_all(matcher, reversed(tokens))
        return matcher

    def _sit(self, matcher: GrammarMatcher, node: Node) -> None:
        node.matcher = matcher
        self._seats[node] = None

    def _unseat(self, node: Node) -> None:
        node.matcher = None
        del self._seats[node]

    def _drop_subtree(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            self.drop_mask(node)
            if node.matcher is not None:
                self._unseat(node)
            stack.extend(node.children.values())
            node.children = {}
            node.parent = None  # no cycle is left for the garbage collector


# matchers that others need in the same step: none
_NO_DEMAND: Final[Counter[Node]] = Counter()


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise MatcherError("the histories have no common start")
    return node.parent


def _distance(a: Node, b: Node, limit: int) -> int:
    """Edges between two nodes, or `limit` if there are at least that many."""
    steps = 0
    while a is not b:
        if steps >= limit:
            return limit
        deeper, other = (a, b) if a.depth >= b.depth else (b, a)
        if deeper.parent is None:
            return limit
        a, b = deeper.parent, other
        steps += 1
    return steps


def _accept_all(matcher: GrammarMatcher, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if not matcher.accept_token(token_id):
            raise MatcherError(
                f"the engine refuses token {token_id}, which it accepted before in the same history; "
                "this is a fault of the engine: please report the guide"
            )
