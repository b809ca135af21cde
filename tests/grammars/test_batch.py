"""Batch fill: the rows are those of a loop, and one matcher's failure stays in its row."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import MatcherError
from gd_plugin.grammars.backends.registry import create_backend
from gd_plugin.grammars.batch import _Pace, fill_next_token_bitmasks
from gd_plugin.grammars.matcher import EngineMatcher, GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import allocate_token_bitmask
from gd_plugin.testing import FakeMatcher

STOP = 256


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are new to every test, so the first step is filled together."""
    monkeypatch.setattr("gd_plugin.grammars.batch._paces", {})


TOKENS: list[bytes | None] = [*(bytes([byte]) for byte in range(256)), None, b"12", b"]]", b"[["]
VOCABULARY = Vocabulary.from_bytes(TOKENS, stop_token_ids=[STOP], vocab_size=270)
GUIDES = [Guide.json(), Guide.regex("[0-9]{1,9}"), Guide.choice(["yes", "no", "12"])]


def batch(engines: list[str], num_rows: int, seed: int = 0) -> list[GrammarMatcher]:
    """Matchers of several engines and guides, each some tokens into its text, some terminated."""
    rng = random.Random(seed)
    backends = [create_backend(engine, VOCABULARY, GuidedDecodingConfig()) for engine in engines]
    grammars = [backend.compile(guide) for backend in backends for guide in GUIDES if not backend.problems(guide)]
    matchers: list[GrammarMatcher] = []
    for _ in range(num_rows):
        matcher = rng.choice(grammars).create_matcher()
        for _ in range(rng.randrange(6)):
            matcher.accept_token(rng.choice([*b'[]0123456789yes"', STOP, 257, 258]))
        matchers.append(matcher)
    return matchers


def looped(matchers: list[GrammarMatcher], num_rows: int, indices: list[int]) -> torch.Tensor:
    bitmask = allocate_token_bitmask(num_rows, 270)
    for matcher, index in zip(matchers, indices, strict=True):
        matcher.fill_next_token_bitmask(bitmask, index)
    return bitmask


@pytest.mark.parametrize("num_threads", [None, 1, 2])
@pytest.mark.parametrize(
    "engines",
    [["xgrammar"], ["llguidance"], ["outlines_core"], ["xgrammar", "llguidance", "outlines_core"]],
    ids="+".join,
)
def test_equals_a_loop(engines: list[str], num_threads: int | None) -> None:
    num_rows = 300
    matchers = batch(engines, num_rows)
    indices = random.Random(1).sample(range(num_rows + 5), num_rows)
    expected = looped(matchers, num_rows + 5, indices)
    # together and one by one, in turn
    for _ in range(4):
        bitmask = allocate_token_bitmask(num_rows + 5, 270)
        assert fill_next_token_bitmasks(matchers, bitmask, indices, num_threads=num_threads) == {}
        assert torch.equal(bitmask, expected)


@pytest.mark.parametrize("num_rows", [1, 31, 32, 40])
def test_equals_a_loop_in_any_buffer(num_rows: int) -> None:
    matchers = batch(["llguidance"], num_rows)
    indices = list(range(num_rows))
    expected = looped(matchers, num_rows, indices)
    wide = torch.full((num_rows, 14), -1, dtype=torch.int32)
    views: list[torch.Tensor] = [wide, wide.clone()[:, 2:12], wide.clone().repeat(2, 1)[::2]]
    for bitmask in views:
        assert fill_next_token_bitmasks(matchers, bitmask, indices) == {}
        assert torch.equal(bitmask[:, :9], expected)
        assert not bitmask[:, 9:].any()


class Failing(FakeMatcher):
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        raise MatcherError("broken")


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
def test_a_failure_stays_in_its_row(engine: str) -> None:
    matchers = batch([engine], 300)
    indices = list(range(300))
    expected = looped(matchers, 300, indices)
    matchers[7] = Failing.of_texts(VOCABULARY, ["a"])
    busy = matchers[11]
    assert isinstance(busy, EngineMatcher)
    assert busy._enter()
    indices[20] = 999
    bitmask = allocate_token_bitmask(300, 270)
    errors = fill_next_token_bitmasks(matchers, bitmask, indices)
    busy._leave()
    assert {position: type(error) for position, error in errors.items()} == {
        7: MatcherError,
        11: MatcherError,
        20: ValueError,
    }
    for row in set(range(300)) - errors.keys():
        assert torch.equal(bitmask[row], expected[row])
    # and all can go on
    matchers[7], indices[20] = matchers[6].fork(), 20
    assert fill_next_token_bitmasks(matchers, bitmask, indices) == {}


def test_an_engine_that_fails_as_a_whole_is_looped(monkeypatch: pytest.MonkeyPatch) -> None:
    matchers = batch(["llguidance"], 40)
    kind = type(matchers[0])
    called = []

    def fail(*args: object) -> None:
        called.append(args)
        raise RuntimeError("Already borrowed")

    monkeypatch.setattr(kind, "_engine_fill_many", fail)
    bitmask = allocate_token_bitmask(40, 270)
    assert fill_next_token_bitmasks(matchers, bitmask, list(range(40)), num_threads=2) == {}
    assert len(called) == 1
    assert torch.equal(bitmask, looped(matchers, 40, list(range(40))))


def ways(pace: _Pace, together_s: float, alone_s: float, num_steps: int) -> list[bool]:
    """What is chosen when the two ways take these times."""
    chosen = []
    for _ in range(num_steps):
        chosen.append(pace.together())
        pace.note(chosen[-1], together_s if chosen[-1] else alone_s)
    return chosen


def test_the_faster_way_is_taken() -> None:
    for together_s, alone_s in ((1.0, 2.0), (2.0, 1.0), (math.inf, 1.0)):
        pace = _Pace()
        first, rest = ways(pace, together_s, alone_s, 6), ways(pace, together_s, alone_s, 640)
        assert first == [True, False] * 3
        assert rest.count(together_s < alone_s) == 630
    # and when that changes
    pace = _Pace()
    ways(pace, 1.0, 2.0, 100)
    assert ways(pace, 3.0, 2.0, 400)[-1] is False
    assert ways(pace, 1.0, 2.0, 400)[-1] is True


def test_one_matcher_in_several_rows() -> None:
    matcher = batch(["llguidance"], 1)[0]
    bitmask = allocate_token_bitmask(40, 270)
    assert fill_next_token_bitmasks([matcher] * 40, bitmask, list(range(40))) == {}
    assert (bitmask == bitmask[0]).all()


BAD: list[Callable[[], object]] = [
    lambda: fill_next_token_bitmasks(batch(["xgrammar"], 2), allocate_token_bitmask(2, 270), [0]),
    lambda: fill_next_token_bitmasks([], allocate_token_bitmask(2, 270), [0]),
]


@pytest.mark.parametrize("call", BAD)
def test_lengths_must_agree(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="need as many rows"):
        call()


def test_a_wrong_buffer_fails_every_row_alike() -> None:
    for bitmask in (torch.zeros((40, 9), dtype=torch.int64), torch.zeros((40, 5), dtype=torch.int32)):
        errors = fill_next_token_bitmasks(batch(["llguidance"], 40), bitmask, list(range(40)))
        assert [type(error) for error in errors.values()] == [ValueError] * 40
        assert not bitmask.any()
