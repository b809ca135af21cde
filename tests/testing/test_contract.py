"""The contract suite itself: a right matcher passes, and each way to be wrong is caught."""

import random
from collections.abc import Callable

import pytest
import torch

from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.testing import CONTRACT_CHECKS, ContractError, FakeMatcher, check_same_masks

TEXTS = ["yes", "yesterday", "no", "né", ""]
TOKENS: list[bytes | None] = [
    *(bytes([byte]) for byte in range(97, 123)),
    b"ye",
    b"yes",
    b"ter",
    b"\xc3",
    b"\xa9",
    b"da",
]
VOCABULARY = Vocabulary.from_bytes([*TOKENS, None, None, b"ye"], stop_token_ids=[32, 40], vocab_size=45)


def fake() -> FakeMatcher:
    return FakeMatcher.of_texts(VOCABULARY, TEXTS)


@pytest.mark.parametrize("check", CONTRACT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_a_right_matcher_passes(check: Callable[..., None], seed: int) -> None:
    check(fake, VOCABULARY, random.Random(seed))


class LosesRollback(FakeMatcher):
    def rollback(self, num_tokens: int) -> None:
        super().rollback(max(num_tokens - 1, 0))


class ForgivesRollback(FakeMatcher):
    def rollback(self, num_tokens: int) -> None:
        super().rollback(max(0, min(num_tokens, self.num_tokens)))


class SharesForks(FakeMatcher):
    def fork(self) -> "FakeMatcher":
        return self


class LeavesTail(FakeMatcher):
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        super().fill_next_token_bitmask(bitmask, index)
        bitmask[index, 1] |= 1 << 20


class NarrowMask(FakeMatcher):
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        super().fill_next_token_bitmask(bitmask, index)
        bitmask[index, 0] &= ~(1 << 27)


class WideMask(FakeMatcher):
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        super().fill_next_token_bitmask(bitmask, index)
        bitmask[index, 1] |= 1


class TakesOneStopOnly(FakeMatcher):
    def accept_token(self, token_id: int) -> bool:
        return token_id != 40 and super().accept_token(token_id)


class OpenAfterTheEnd(FakeMatcher):
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        super().fill_next_token_bitmask(bitmask, index)
        if self.is_terminated():
            bitmask[index] = -1
            bitmask[index, 1] = (1 << 13) - 1


class WritesBeside(FakeMatcher):
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        super().fill_next_token_bitmask(bitmask, index)
        if index:
            bitmask[index - 1] = 0


class TakesAnyBuffer(FakeMatcher):
    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        try:
            super().fill_next_token_bitmask(bitmask, index)
        except ValueError:
            return


class KeepsRefused(FakeMatcher):
    def accept_token(self, token_id: int) -> bool:
        accepted = super().accept_token(token_id)
        if not accepted and self._is_prefix(b"y"):
            self._history.append(24)
        return accepted


class KeepsHistoryOverReset(FakeMatcher):
    def reset(self) -> None:
        super().rollback(min(self.num_tokens, 1))


class ForcesTooMuch(FakeMatcher):
    def forced_text(self) -> bytes:
        return b"yes"


class CountsOneMore(FakeMatcher):
    def validate_tokens(self, token_ids: object) -> int:
        return 1


WRONG = [
    CountsOneMore,
    ForcesTooMuch,
    ForgivesRollback,
    KeepsHistoryOverReset,
    KeepsRefused,
    LeavesTail,
    LosesRollback,
    NarrowMask,
    OpenAfterTheEnd,
    SharesForks,
    TakesAnyBuffer,
    TakesOneStopOnly,
    WideMask,
    WritesBeside,
]


def broken_checks(create: Callable[[], GrammarMatcher]) -> list[str]:
    broken = []
    for check in CONTRACT_CHECKS:
        try:
            for seed in range(3):
                check(create, VOCABULARY, random.Random(seed))
        except (ContractError, Exception):
            broken.append(check.__name__)
    return broken


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_matcher_is_caught(kind: type[FakeMatcher]) -> None:
    assert broken_checks(lambda: kind.of_texts(VOCABULARY, TEXTS))


def test_every_check_catches_something() -> None:
    caught = {name for kind in WRONG for name in broken_checks(lambda kind=kind: kind.of_texts(VOCABULARY, TEXTS))}  # type: ignore[misc]
    assert caught == {check.__name__ for check in CONTRACT_CHECKS}


def test_different_languages_are_told_apart() -> None:
    check_same_masks(fake, fake, VOCABULARY, random.Random(0))
    with pytest.raises(ContractError, match="masks differ"):
        check_same_masks(fake, lambda: FakeMatcher.of_texts(VOCABULARY, ["yes", "no"]), VOCABULARY, random.Random(0))
