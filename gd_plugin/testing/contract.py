"""The contract of grammars/matcher.py as checks that any matcher must pass, an engine's, a third party's, a fake's.

In:  something that creates matchers of one guide, the vocabulary, and a random generator.
Out: nothing, or a ContractError that says what was expected and in which state.

    @pytest.mark.parametrize("check", CONTRACT_CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(backend.compile(guide).create_matcher, vocabulary, random.Random(0))
"""

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.errors import MatcherError, RollbackError
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import allocate_token_bitmask, num_mask_words

__all__ = ["CONTRACT_CHECKS", "Check", "ContractError", "Create", "check_same_masks"]

Create = Callable[[], GrammarMatcher]
Check = Callable[[Create, Vocabulary, random.Random], None]

_NUM_STEPS = 24
# every id is tried in a vocabulary up to this size, a sample of them above
_ALL_IDS = 600
_NUM_SAMPLED_IDS = 150
_NUM_THREADS = 4


class ContractError(AssertionError):
    """A matcher does not do what the contract says."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


def _mask(matcher: GrammarMatcher, vocabulary: Vocabulary) -> npt.NDArray[np.bool_]:
    """Return the mask as bool [vocab_size]; the row's memory was all ones before."""
    bitmask = torch.full((1, num_mask_words(vocabulary.vocab_size)), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(bitmask, 0)
    bits = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")
    _require(not bits[vocabulary.vocab_size :].any(), "a bit at or above vocab_size is set")
    return bits[: vocabulary.vocab_size].astype(bool)


def _state(matcher: GrammarMatcher, vocabulary: Vocabulary) -> tuple[bytes, int, bool, bool]:
    """Everything that can be seen of a matcher, to be compared."""
    return (
        _mask(matcher, vocabulary).tobytes(),
        matcher.num_tokens,
        matcher.is_terminated(),
        matcher.is_accepting(),
    )


def _choose(matcher: GrammarMatcher, vocabulary: Vocabulary, rng: random.Random, *, may_stop: bool) -> int | None:
    """Return a legal token, rather a long one; a stop token now and then; None when there is no other."""
    legal = _mask(matcher, vocabulary)
    stops = [i for i in vocabulary.stop_token_ids if legal[i]]
    legal[stops] = False
    text = legal.nonzero()[0]
    if may_stop and stops and (not len(text) or rng.random() < 0.2):
        return rng.choice(stops)
    if not len(text):
        return None
    return max(_sample(text, 3, rng), key=lambda i: len(vocabulary.tokens[i]))


def _sample(ids: "Sequence[int] | npt.NDArray[np.intp]", count: int, rng: random.Random) -> list[int]:
    """Return up to `count` of `ids`."""
    return [int(ids[i]) for i in rng.sample(range(len(ids)), min(count, len(ids)))]


def _walk(
    matcher: GrammarMatcher, vocabulary: Vocabulary, rng: random.Random, *, may_stop: bool, num_steps: int = _NUM_STEPS
) -> list[int]:
    """Accept legal tokens until there is none, a stop token, or `num_steps`; return them."""
    accepted: list[int] = []
    while len(accepted) < num_steps and not matcher.is_terminated():
        token_id = _choose(matcher, vocabulary, rng, may_stop=may_stop)
        if token_id is None:
            break
        _require(matcher.accept_token(token_id), f"token {token_id} is in the mask after {accepted} and was refused")
        accepted.append(token_id)
    return accepted


def _some_ids(legal: npt.NDArray[np.bool_], vocabulary: Vocabulary, rng: random.Random) -> list[int]:
    """Ids worth trying: all of a small vocabulary, else stop tokens, legal ones, special ones and any."""
    size = vocabulary.vocab_size
    if size <= _ALL_IDS:
        return list(range(size))
    ids = set(vocabulary.stop_token_ids) | {0, size - 1}
    for pool in (legal.nonzero()[0], sorted(vocabulary.special_token_ids), range(size)):
        ids.update(_sample(pool, _NUM_SAMPLED_IDS // 3, rng))
    return sorted(ids)


def check_mask_is_the_accept_set(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """In every state a bit is 1 exactly when the token would be accepted; asking leaves no trace."""
    matcher = create()
    done: list[int] = []
    for _ in range(_NUM_STEPS):
        legal = _mask(matcher, vocabulary)
        for token_id in _some_ids(legal, vocabulary, rng):
            accepted = matcher.accept_token(token_id)
            _require(
                accepted == bool(legal[token_id]),
                f"after {done}: token {token_id} {vocabulary.tokens[token_id]!r} has bit {int(legal[token_id])} "
                f"and accept_token returned {accepted}",
            )
            if accepted:
                matcher.rollback(1)
        _require(bool((_mask(matcher, vocabulary) == legal).all()), f"after {done}: trying tokens changed the mask")
        step = _walk(matcher, vocabulary, rng, may_stop=False, num_steps=1)
        if not step:
            return
        done += step


def check_refusals_leave_no_trace(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Illegal, special, padded, negative and far too large ids are refused, and nothing has happened."""
    matcher = create()
    outside = (-1, -(2**31), vocabulary.vocab_size, vocabulary.vocab_size + 31, 2**31, 2**63, 2**70)
    for _ in range(4):
        before = _state(matcher, vocabulary)
        legal = _mask(matcher, vocabulary)
        banned = [i for i in _some_ids(legal, vocabulary, rng) if not legal[i]]
        for token_id in (*outside, *banned):
            _require(not matcher.accept_token(token_id), f"token {token_id} is illegal and was accepted")
        _require(_state(matcher, vocabulary) == before, "refused tokens changed the state")
        _walk(matcher, vocabulary, rng, may_stop=False, num_steps=3)


def check_rollback_restores_masks(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """`rollback(k)` after k tokens, stop tokens among them, restores the identical state, and it can go on."""
    matcher = create()
    states = [_state(matcher, vocabulary)]
    tokens: list[int] = []
    for _ in range(_NUM_STEPS):
        step = _walk(matcher, vocabulary, rng, may_stop=True, num_steps=1)
        if step:
            tokens += step
            states.append(_state(matcher, vocabulary))
        if not step or rng.random() < 0.35:
            back = rng.randint(0, len(tokens))
            matcher.rollback(back)
            del tokens[len(tokens) - back :], states[len(states) - back :]
            _require(_state(matcher, vocabulary) == states[-1], f"rollback({back}) to {tokens} gave another state")
    for impossible in (-1, len(tokens) + 1, 2**40):
        try:
            matcher.rollback(impossible)
        except RollbackError:
            pass
        else:
            raise ContractError(f"rollback({impossible}) after {len(tokens)} tokens raised no RollbackError")
        _require(_state(matcher, vocabulary) == states[-1], f"the refused rollback({impossible}) changed the state")


def check_state_is_a_function_of_history(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Whatever came between: a matcher equals a new one that was given the same tokens."""
    matcher = create()
    tokens: list[int] = []
    for _ in range(_NUM_STEPS):
        move = rng.random()
        if move < 0.55:
            tokens += _walk(matcher, vocabulary, rng, may_stop=True, num_steps=rng.randint(1, 3))
        elif move < 0.75:
            back = rng.randint(0, len(tokens))
            matcher.rollback(back)
            del tokens[len(tokens) - back :]
        elif move < 0.85:
            if matcher.accept_token(rng.randrange(-3, vocabulary.vocab_size + 3)):
                matcher.rollback(1)
        elif move < 0.95:
            matcher = matcher.fork()
        else:
            matcher.reset()
            tokens.clear()
        fresh = create()
        _require(all(map(fresh.accept_token, tokens)), f"a new matcher refuses {tokens}")
        _require(_state(matcher, vocabulary) == _state(fresh, vocabulary), f"after {tokens}: not as a new matcher")


def check_forks_are_independent(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """A fork starts in the same state; from there neither sees what the other does."""
    matcher = create()
    _walk(matcher, vocabulary, rng, may_stop=False, num_steps=4)
    before = _state(matcher, vocabulary)
    twin = matcher.fork()
    _require(_state(twin, vocabulary) == before, "a fork differs from its origin")
    _walk(twin, vocabulary, rng, may_stop=True)
    _require(_state(matcher, vocabulary) == before, "a fork's tokens reached its origin")
    after = _state(twin, vocabulary)
    matcher.rollback(matcher.num_tokens)
    _walk(matcher, vocabulary, rng, may_stop=True)
    _require(_state(twin, vocabulary) == after, "the origin's tokens reached its fork")
    twin.rollback(twin.num_tokens)
    _require(_state(twin, vocabulary) == _state(create(), vocabulary), "a fork cannot roll back to the start")


def check_after_termination(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """A stop token is accepted where the text may end, counts as a token, and is the last one."""
    for stop in vocabulary.stop_token_ids:
        matcher = create()
        for _ in range(_NUM_STEPS):
            if matcher.is_accepting() or not _walk(matcher, vocabulary, rng, may_stop=False, num_steps=1):
                break
        if not matcher.is_accepting():
            return
        before = _state(matcher, vocabulary)
        _require(matcher.accept_token(stop), f"stop token {stop} was refused where is_accepting() is True")
        _require(matcher.is_terminated() and not matcher.is_accepting(), "a stop token did not terminate")
        _require(matcher.num_tokens == before[1] + 1, "a stop token does not count as a token")
        legal = _mask(matcher, vocabulary)
        _require(
            legal.nonzero()[0].tolist() == list(vocabulary.stop_token_ids), "the row of a terminated matcher is wrong"
        )
        for token_id in _some_ids(legal, vocabulary, rng):
            _require(not matcher.accept_token(token_id), f"token {token_id} was accepted after termination")
        _require(matcher.forced_text() == b"", "forced_text() after termination")
        matcher.rollback(1)
        _require(_state(matcher, vocabulary) == before, "rollback(1) over a stop token gave another state")


def check_rows_are_written_whole(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Any row of any legal buffer: written from end to end, and nothing beside it."""
    matcher = create()
    words = num_mask_words(vocabulary.vocab_size)
    for _ in range(3):
        expected = allocate_token_bitmask(1, vocabulary.vocab_size)
        matcher.fill_next_token_bitmask(expected, 0)
        exact = torch.full((3, words), -1, dtype=torch.int32)
        wide = torch.full((3, words + 5), -1, dtype=torch.int32)
        view = torch.full((3, words + 9), -1, dtype=torch.int32)[:, 2 : words + 4]
        steps = torch.full((7, words), -1, dtype=torch.int32)[1::2]
        for bitmask in (exact, wide, view, steps):
            matcher.fill_next_token_bitmask(bitmask, 1)
            _require(
                torch.equal(bitmask[1, :words], expected[0]), f"wrong row in a buffer of strides {bitmask.stride()}"
            )
            _require(not bitmask[1, words:].any(), "words past the vocabulary are not cleared")
            base = bitmask if bitmask._base is None else bitmask._base
            bitmask[1] = -1
            _require(bool((base == -1).all()), "a row's neighbours were written")
        _walk(matcher, vocabulary, rng, may_stop=True, num_steps=2)


def check_bad_bitmasks_are_refused(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Wrong type, width, stride, shape or row: a ValueError, and nothing is written."""
    matcher = create()
    words = num_mask_words(vocabulary.vocab_size)
    before = _state(matcher, vocabulary)
    bad: list[tuple[str, torch.Tensor, int]] = [
        ("int64", torch.full((1, words), -1, dtype=torch.int64), 0),
        ("float", torch.full((1, words), -1.0), 0),
        ("one dimension", torch.full((words,), -1, dtype=torch.int32), 0),
        ("three dimensions", torch.full((1, 1, words), -1, dtype=torch.int32), 0),
        ("too narrow", torch.full((1, max(words - 1, 0)), -1, dtype=torch.int32), 0),
        ("row past the end", torch.full((2, words), -1, dtype=torch.int32), 2),
        ("negative row", torch.full((2, words), -1, dtype=torch.int32), -1),
        ("no rows", torch.full((0, words), -1, dtype=torch.int32), 0),
        ("not on the CPU", torch.full((1, words), -1, dtype=torch.int32, device="meta"), 0),
    ]
    if words > 1:
        bad.append(("stride", torch.full((1, 2 * words), -1, dtype=torch.int32)[:, ::2], 0))
    for name, bitmask, row in bad:
        try:
            matcher.fill_next_token_bitmask(bitmask, row)
        except ValueError:
            pass
        else:
            raise ContractError(f"a bad bitmask ({name}) raised no ValueError")
        _require(bitmask.is_meta or bool((bitmask == -1).all()), f"a bad bitmask ({name}) was written to")
    _require(_state(matcher, vocabulary) == before, "bad bitmasks changed the state")


def check_validate_tokens(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """The longest legal prefix, counted without a trace."""
    matcher = create()
    _walk(matcher, vocabulary, rng, may_stop=False, num_steps=2)
    ahead = _walk(matcher.fork(), vocabulary, rng, may_stop=True, num_steps=6)
    before = _state(matcher, vocabulary)
    for tokens, expected in ((ahead, len(ahead)), ([*ahead, -1, *ahead], len(ahead)), ([], 0), ([-1], 0)):
        found = matcher.validate_tokens(tokens)
        _require(found == expected, f"validate_tokens({tokens}) is {found}, expected {expected}")
        _require(_state(matcher, vocabulary) == before, "validate_tokens changed the state")


def check_reset(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """`reset` goes back to the start, and what was before is gone for `rollback` too."""
    matcher = create()
    start = _state(matcher, vocabulary)
    for may_stop in (False, True):
        _walk(matcher, vocabulary, rng, may_stop=may_stop)
        matcher.reset()
        _require(_state(matcher, vocabulary) == start, "reset does not lead to the start")
        try:
            matcher.rollback(1)
        except RollbackError:
            continue
        raise ContractError("rollback(1) after reset raised no RollbackError")


def check_forced_text(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Every token of a walk agrees with what was said to be forced before it."""
    matcher = create()
    for _ in range(_NUM_STEPS):
        forced = matcher.forced_text()
        _require(not (forced and matcher.is_accepting()), "text is forced where the output may end")
        step = _walk(matcher, vocabulary, rng, may_stop=False, num_steps=1)
        if not step:
            return
        token = vocabulary.tokens[step[0]]
        size = min(len(token), len(forced))
        _require(token[:size] == forced[:size], f"{forced!r} was said to be forced, and {token!r} was legal")


def check_threads(create: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Matchers of one grammar in several threads do as in one; two threads in one matcher get an error or an answer."""
    seeds = [rng.random() for _ in range(_NUM_THREADS)]
    alone = [_walk(create(), vocabulary, random.Random(seed), may_stop=True) for seed in seeds]
    together: list[list[int] | BaseException] = [[] for _ in seeds]

    def run(position: int) -> None:
        try:
            together[position] = _walk(create(), vocabulary, random.Random(seeds[position]), may_stop=True)
        except BaseException as error:
            together[position] = error

    _run_threads(run)
    _require(together == alone, f"in threads {together}, alone {alone}")

    shared = create()
    before = _state(shared, vocabulary)
    wrong: list[BaseException] = []

    def abuse(position: int) -> None:
        for _ in range(20):
            try:
                _mask(shared, vocabulary)
                shared.is_accepting()
            except MatcherError:
                continue
            except BaseException as error:
                wrong.append(error)

    _run_threads(abuse)
    _require(not wrong, f"two threads in one matcher raised {wrong[:1]!r}; a MatcherError is allowed")
    _require(_state(shared, vocabulary) == before, "two threads in one matcher changed its state")


def _run_threads(target: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=target, args=(position,)) for position in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_same_masks(first: Create, second: Create, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Two matchers of one guide, of different makes, agree bit by bit in every state of a walk."""
    one, other = first(), second()
    done: list[int] = []
    while True:
        differing = (_mask(one, vocabulary) != _mask(other, vocabulary)).nonzero()[0].tolist()
        _require(
            not differing,
            f"after {vocabulary.decode(done)!r} {done}: masks differ at {differing[:5]} "
            f"{[vocabulary.tokens[i] for i in differing[:5]]}, {len(differing)} in all",
        )
        _require(one.is_accepting() == other.is_accepting(), f"after {done}: only one is accepting")
        token_id = _choose(one, vocabulary, rng, may_stop=True)
        if token_id is None or len(done) == _NUM_STEPS or one.is_terminated():
            return
        _require(one.accept_token(token_id) and other.accept_token(token_id), f"after {done}: {token_id} was refused")
        done.append(token_id)


CONTRACT_CHECKS: tuple[Check, ...] = (
    check_after_termination,
    check_bad_bitmasks_are_refused,
    check_forced_text,
    check_forks_are_independent,
    check_mask_is_the_accept_set,
    check_refusals_leave_no_trace,
    check_reset,
    check_rollback_restores_masks,
    check_rows_are_written_whole,
    check_state_is_a_function_of_history,
    check_threads,
    check_validate_tokens,
)
