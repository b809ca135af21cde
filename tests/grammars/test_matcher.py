"""The base of the adapters: threads that meet in one matcher, and the memory of bitmasks."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import MatcherError
from gd_plugin.grammars.budgets import hold_to_budget
from gd_plugin.grammars.compiler import GrammarMatcherFactory
from gd_plugin.grammars.matcher import EngineMatcher, GrammarMatcher, engine_errors
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import allocate_token_bitmask
from gd_plugin.testing import FakeMatcher

ENGINES = ("xgrammar", "llguidance", "outlines_core")

VOCABULARY = Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=[2])


class AnyText(EngineMatcher):
    """Accepts `a` and `b` for ever; on request it waits inside a hook."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.inside = threading.Event()
        self.leave = threading.Event()
        self.leave.set()
        self.text: list[int] = []

    def _wait(self) -> None:
        self.inside.set()
        self.leave.wait(60)

    def _engine_accept(self, token_id: int) -> bool:
        self._wait()
        self.text.append(token_id)
        return True

    def _engine_rollback(self, num_tokens: int) -> None:
        del self.text[-num_tokens:]

    def _engine_fill(self, rows: npt.NDArray[np.int32], index: int, address: int) -> None:
        self._wait()
        rows[index, 0] = 0b011

    def _engine_accepting(self) -> bool:
        return bool(self.text)

    def _engine_fork(self) -> "AnyText":
        return AnyText()

    def _engine_reset(self) -> None:
        self.text.clear()


CALLS: dict[str, Callable[[GrammarMatcher], object]] = {
    "accept": lambda matcher: matcher.accept_token(0),
    "fill": lambda matcher: matcher.fill_next_token_bitmask(allocate_token_bitmask(1, 3), 0),
    "rollback": lambda matcher: matcher.rollback(0),
    "accepting": lambda matcher: matcher.is_accepting(),
    "fork": lambda matcher: matcher.fork(),
    "reset": lambda matcher: matcher.reset(),
    "forced text": lambda matcher: matcher.forced_text(),
}


@pytest.mark.parametrize("first", ["accept", "fill"])
@pytest.mark.parametrize("second", CALLS)
def test_a_second_thread_gets_an_error(first: str, second: str) -> None:
    matcher = AnyText()
    matcher.leave.clear()
    thread = threading.Thread(target=CALLS[first], args=(matcher,))
    thread.start()
    assert matcher.inside.wait(60)
    with pytest.raises(MatcherError, match="another thread"):
        CALLS[second](matcher)
    matcher.leave.set()
    thread.join()
    # the first one's call was done, the second one's was not
    assert matcher.num_tokens == len(matcher.text) == (first == "accept")
    CALLS[second](matcher)


def test_a_bitmask_is_not_kept_alive() -> None:
    matcher = AnyText()
    bitmask = allocate_token_bitmask(4, 3)
    matcher.fill_next_token_bitmask(bitmask, 3)
    kept = weakref.ref(bitmask)
    del bitmask
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda bitmask: bitmask.resize_((2, 1)),
        lambda bitmask: bitmask.resize_((64, 8)),
        lambda bitmask: bitmask.set_(torch.zeros((4, 1), dtype=torch.int32)),
        lambda bitmask: setattr(bitmask, "data", torch.zeros((4, 2), dtype=torch.int32)),
    ],
)
def test_a_bitmask_changed_in_place_is_looked_at_again(change: Callable[[torch.Tensor], object]) -> None:
    matcher = AnyText()
    bitmask = allocate_token_bitmask(4, 3)
    matcher.fill_next_token_bitmask(bitmask, 3)
    change(bitmask)
    bitmask.fill_(-1)
    matcher.fill_next_token_bitmask(bitmask, 1)
    expected = torch.full_like(bitmask, -1)
    expected[1] = 0
    expected[1, 0] = 0b011
    assert torch.equal(bitmask, expected)
    with pytest.raises(ValueError, match="outside"):
        matcher.fill_next_token_bitmask(bitmask, len(bitmask))


@cache
def matchers() -> dict[str, GrammarMatcher]:
    """One of each class that there is in the package."""
    guide = Guide.regex("[ab]{1,9}")
    found = {name: GrammarMatcherFactory(VOCABULARY, backend=name).create(guide) for name in ENGINES}
    factory = GrammarMatcherFactory(VOCABULARY)
    found["reasoning"] = factory.create(guide.with_reasoning(end="ba"))
    found["canonical"] = GrammarMatcherFactory(VOCABULARY, config=GuidedDecodingConfig(canonical_forcing=True)).create(
        guide
    )
    found["budget"] = hold_to_budget(factory.create(guide), factory, guide, 20)
    found["fake"] = FakeMatcher.of_texts(VOCABULARY, ["ab"])
    return found


@pytest.fixture(scope="module", params=["reasoning", "canonical", "budget", "fake", *ENGINES])
def matcher(request: pytest.FixtureRequest) -> GrammarMatcher:
    return matchers()[request.param]


WRONG_FILLS: dict[str, tuple[Any, Any, str]] = {
    "a float": (allocate_token_bitmask(2, 3), 1.0, "index must be a row of the bitmask"),
    "a text": (allocate_token_bitmask(2, 3), "0", "index must be a row of the bitmask"),
    "a flag": (allocate_token_bitmask(2, 3), True, "index must be a row of the bitmask"),
    "no index": (allocate_token_bitmask(2, 3), None, "index must be a row of the bitmask"),
    "behind": (allocate_token_bitmask(2, 3), 2, "row 2 is outside the bitmask's 2 rows"),
    "before": (allocate_token_bitmask(2, 3), -1, "row -1 is outside the bitmask's 2 rows"),
    "int64": (torch.zeros((2, 1), dtype=torch.int64), 0, "bitmask must be int32 on the CPU, got torch.int64"),
    "one dimension": (torch.zeros(2, dtype=torch.int32), 0, r"bitmask must be \[rows, words\]"),
    "no words": (torch.zeros((2, 0), dtype=torch.int32), 0, "0 words a row, this vocabulary needs 1"),
    "an array": (np.zeros((2, 1), dtype=np.int32), 0, "bitmask must be an int32 tensor on the CPU, got ndarray"),
    "nothing": (None, 0, "bitmask must be an int32 tensor on the CPU, got NoneType"),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("case", WRONG_FILLS)
def test_a_wrong_bitmask_is_the_callers_mistake(matcher: GrammarMatcher, case: str, known: bool) -> None:
    bitmask, index, words = WRONG_FILLS[case]
    if known and isinstance(bitmask, torch.Tensor) and bitmask.dtype == torch.int32 and bitmask.numel() == 2:
        if bitmask.ndim == 2:
            matcher.fill_next_token_bitmask(bitmask, 0)
    else:
        matcher.fill_next_token_bitmask(allocate_token_bitmask(1, 3), 0)  # dies, and with it what is remembered
    with pytest.raises(ValueError, match=words):
        matcher.fill_next_token_bitmask(bitmask, index)


def test_rows_of_other_integer_types(matcher: GrammarMatcher) -> None:
    expected = allocate_token_bitmask(2, 3)
    matcher.fill_next_token_bitmask(expected, 1)
    for index in (np.int64(1), np.uint8(1), torch.tensor(1)):
        bitmask = allocate_token_bitmask(2, 3)
        matcher.fill_next_token_bitmask(bitmask, index)
        assert torch.equal(bitmask, expected)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_matcher_is_copied_by_fork_alone(matcher: GrammarMatcher, how: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"fork\(\) gives an independent one"):
        how(matcher)


def test_what_engines_raise() -> None:
    assert issubclass(MemoryError, engine_errors())
    assert not issubclass(KeyboardInterrupt, engine_errors())
    assert not issubclass(SystemExit, engine_errors())
