"""The base of the adapters: threads that meet in one matcher, and the memory of bitmasks."""

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gd_plugin.errors import MatcherError
from gd_plugin.grammars.matcher import EngineMatcher, GrammarMatcher, engine_errors
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import allocate_token_bitmask

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


def test_what_engines_raise() -> None:
    assert issubclass(MemoryError, engine_errors())
    assert not issubclass(KeyboardInterrupt, engine_errors())
    assert not issubclass(SystemExit, engine_errors())
