"""MatcherTree against fresh matchers: any way through the tree gives what a new matcher gives when fed the same history."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

import gd_plugin as gd
from gd_plugin.grammars.history import MatcherTree, Node, NodeState
from gd_plugin.masks.pool import BitmaskPool
from tests.fuzz import pick

LETTERS = b'ab01"[],: {}'
STOP = len(LETTERS) + 3
OTHER_STOP = STOP + 1
WIDTH = STOP + 4
# every letter, some pairs, two stop tokens, and ids without text; 2 ids behind the width
TOKENS = st.integers(0, WIDTH + 1)
GUIDES = [
    gd.Guide.regex("(?:ab|b0)*1?"),
    gd.Guide.choice(["ab", "aba", "abab1", "b", ""]),
    gd.Guide.json(),
    gd.Guide.json_schema({"type": "array", "items": {"enum": [0, 1, 10, "a"]}, "maxItems": 3}),
]


@pytest.fixture(scope="module")
def vocabulary() -> gd.Vocabulary:
    return make_vocabulary()


def make_vocabulary() -> gd.Vocabulary:
    tokens: list[bytes | None] = [bytes([letter]) for letter in LETTERS]
    tokens += [b"ab", b'",', b"10", None, None]
    return gd.Vocabulary.from_bytes(tokens, stop_token_ids=[STOP, OTHER_STOP], vocab_size=WIDTH)


_compiled: dict[gd.Guide, Any] = {}


def compiled(guide: gd.Guide) -> Any:
    if guide not in _compiled:
        _compiled[guide] = gd.GrammarMatcherFactory(make_vocabulary()).compile(guide)
    return _compiled[guide]


def fresh(guide: gd.Guide, history: tuple[int, ...]) -> tuple[NodeState, gd.GrammarMatcher]:
    """Return the state after `history`, and the matcher that tells it."""
    matcher = compiled(guide).create_matcher()
    for token in history:
        if matcher.is_terminated():
            return NodeState.FINISHED, matcher
        if not matcher.accept_token(token):
            return NodeState.DEAD, matcher
    return (NodeState.FINISHED if matcher.is_terminated() else NodeState.LIVE), matcher


class TreeMachine(RuleBasedStateMachine):
    """Histories are walked, shortened, forked and repeated in any order; a window bounds what is kept."""

    nodes = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.last: list[Node] = []

    @initialize(target=nodes, guide=st.sampled_from(GUIDES), window=st.sampled_from([1, 2, 5, 64]))
    def start(self, guide: gd.Guide, window: int) -> Any:
        self.guide = guide
        self.pool = BitmaskPool(WIDTH, 2)
        self.tree = MatcherTree(compiled(guide).create_matcher, self.pool, window=window)
        self.window = window
        self.last = [self.tree.root]
        return (self.tree.root, ())

    @rule(target=nodes, where=nodes, tokens=st.lists(TOKENS, max_size=6))
    def walk(self, where: Any, tokens: list[int]) -> Any:
        node, history = self.known(where)
        return self.arrive([(self.tree.walk(node, tokens), (*history, *tokens))])[0]

    @rule(target=nodes, where=nodes, steps=st.integers(1, 6), choice=st.randoms(use_true_random=False))
    def walk_legally(self, where: Any, steps: int, choice: Any) -> Any:
        """Random tokens die soon: take tokens that the guide allows."""
        node, history = self.known(where)
        state, matcher = fresh(self.guide, history)
        tokens: list[int] = []
        while state is NodeState.LIVE and len(tokens) < steps:
            legal = [token for token in range(WIDTH) if matcher.validate_tokens([token])]
            if not legal or matcher.is_terminated():
                break
            tokens.append(choice.choice(legal))
            matcher.accept_token(tokens[-1])
        return self.arrive([(self.tree.walk(node, tokens), (*history, *tokens))])[0]

    @rule(target=nodes, wheres=st.lists(nodes, min_size=1, max_size=4), data=st.data())
    def step_together(self, wheres: list[Any], data: Any) -> Any:
        """One step of a batch: several rows may leave one node, by the same token or by others."""
        known = [self.known(where) for where in wheres]
        tokens = [data.draw(TOKENS) for _ in known]
        reached = self.tree.step([(node, token) for (node, _), token in zip(known, tokens, strict=True)])
        arrived = [(node, (*history, token)) for node, (_, history), token in zip(reached, known, tokens, strict=True)]
        return multiple(*self.arrive(arrived))

    @rule(target=nodes, where=nodes, back=st.integers(1, 6))
    def shorten(self, where: Any, back: int) -> Any:
        node, history = self.known(where)
        kept = history[: max(0, len(history) - back)]
        return self.arrive([(node.ancestor(len(kept)), kept)])[0]

    @rule(wheres=st.lists(nodes, min_size=1, max_size=4))
    def fill(self, wheres: list[Any]) -> None:
        """Fill the masks of a step and compare them with those of fresh matchers."""
        known = [self.known(where) for where in wheres]
        waiting = {node: None for node, _ in known if self.tree.needs_mask(node)}
        # all are seated before one is filled, as a step does it
        matchers = [self.tree.seat(node, set(waiting)) for node in waiting]
        for node, seated in zip(waiting, matchers, strict=True):
            assert seated is not None
            row = self.pool.take()
            seated.fill_next_token_bitmask(self.pool.bitmask, row)
            self.tree.add_mask(node, row, 0)
        for node, history in known:
            state, matcher = fresh(self.guide, history)
            assert node.state is state
            if state is not NodeState.LIVE:
                continue
            expected = gd.allocate_token_bitmask(1, WIDTH)
            matcher.fill_next_token_bitmask(expected, 0)
            assert (self.pool.bitmask[node.mask_row] == expected[0]).all()

    @rule(wheres=st.lists(nodes, min_size=1, max_size=3))
    def prune(self, wheres: list[Any]) -> None:
        self.last = [self.known(where)[0] for where in wheres]
        for _ in range(self.window):
            self.tree.prune(self.last)
        for tip in self.last:
            assert tip.ancestor(0) is self.tree.root, "a live path was cut"

    @rule(where=nodes)
    def drop_mask(self, where: Any) -> None:
        self.tree.drop_mask(self.known(where)[0])

    @rule(where=consumes(nodes))
    def forget(self, where: Any) -> None:
        pass

    def known(self, where: Any) -> Any:
        """A node that was pruned away is found anew by its history, as a session does."""
        node, history = where
        if node.ancestor(0) is self.tree.root:
            return where
        return self.tree.walk(self.tree.root, history), history

    def arrive(self, arrived: list[Any]) -> list[Any]:
        for node, history in arrived:
            state, matcher = fresh(self.guide, history)
            assert node.state is state, history
            assert node.token_ids() == history
            assert node.depth == len(history)
            if node.matcher is not None:
                assert node.matcher.num_tokens == matcher.num_tokens
                assert node.matcher.is_terminated() == matcher.is_terminated()
                assert node.matcher.is_accepting() == matcher.is_accepting()
        return arrived

    @invariant()
    def every_matcher_sits_at_one_node(self) -> None:
        if not hasattr(self, "tree"):
            return
        seats, masks = 0, []
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            seats += node.matcher is not None
            if node.matcher is not None:
                assert node.state is not NodeState.DEAD
            if node.mask_row >= 0:
                masks.append(node.mask_row)
            for token, child in node.children.items():
                assert child.parent is node and child.token_id == token
                stack.append(child)
        assert seats == self.tree.num_matchers
        assert len(masks) == len(set(masks)) == self.pool.num_used


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=pick(60, 2000), stateful_step_count=pick(30, 60))


class FailingMatcher:
    """Wraps a matcher; accepting, rolling back or filling fails where it is told to."""

    def __init__(self, inner: gd.GrammarMatcher, fails: set[str]) -> None:
        self._inner, self._fails = inner, fails

    def __getattr__(self, name: str) -> Any:
        if name in self._fails:
            raise RuntimeError(f"{name} failed")
        return getattr(self._inner, name)

    def fork(self) -> "FailingMatcher":
        if "fork" in self._fails:
            raise RuntimeError("fork failed")
        return FailingMatcher(self._inner.fork(), self._fails)


@pytest.mark.parametrize("broken", ["accept_token", "fork", "rollback"])
def test_an_engine_that_fails_costs_one_history_alone(broken: str) -> None:
    guide = GUIDES[0]
    fails: set[str] = set()
    tree = MatcherTree(lambda: FailingMatcher(compiled(guide).create_matcher(), fails), BitmaskPool(WIDTH))
    a, b, zero = (LETTERS.index(letter) for letter in b"ab0")
    sound = tree.walk(tree.root, [a, b, b])
    fails.add(broken)
    [one, two] = tree.step([(sound, zero), (sound, a)])
    fails.clear()
    # whatever failed, it says so, or a new matcher has been found for it
    assert one.state is NodeState.LIVE or isinstance(one.error, Exception)
    assert two.state is NodeState.DEAD
    other = tree.walk(tree.root, [b, zero])
    assert other.state is NodeState.LIVE
    assert tree.seat(other, {other}) is not None


def test_a_skipped_token_is_no_part_of_the_guide() -> None:
    tree = MatcherTree(compiled(GUIDES[1]).create_matcher, BitmaskPool(WIDTH))
    a, b = LETTERS.index(b"a"), LETTERS.index(b"b")
    start = tree.skip(tree.root, STOP + 2)
    assert tree.skip(tree.root, STOP + 2) is start
    node = tree.walk(start, [a, b])
    matcher = tree.seat(node, {node})
    assert matcher is not None and matcher.num_tokens == 2
    back = tree.seat(start, {start})
    assert back is not None and back.num_tokens == 0
    assert tree.walk(node, [STOP]).state is NodeState.FINISHED


def test_matchers_seated_for_one_step_are_distinct() -> None:
    tree = MatcherTree(compiled(GUIDES[0]).create_matcher, BitmaskPool(WIDTH))
    a, b = LETTERS.index(b"a"), LETTERS.index(b"b")
    nodes = [tree.walk(tree.root, path) for path in ([a, b], [b], [a])]
    matchers = [tree.seat(node, set(nodes)) for node in nodes]
    assert len({id(matcher) for matcher in matchers}) == 3
    assert [matcher.num_tokens for matcher in matchers if matcher] == [2, 1, 1]
