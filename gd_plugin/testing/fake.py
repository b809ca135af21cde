"""A matcher without an engine: plain Python, slow, and right by construction.

In:  a Vocabulary and two questions about text: can these bytes still become a match, and do they match?
Out: a matcher that keeps the contract, for tests of what stands above matchers, and as a judge of engines.
"""

from collections.abc import Callable, Iterable

import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import RollbackError, UnsupportedGuideError
from gd_plugin.grammars.backends.registry import Backend, CompiledGrammar
from gd_plugin.grammars.matcher import GrammarMatcher, checked_row
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.problem import Problem
from gd_plugin.masks.bitmask import num_mask_words, token_ids_to_words

__all__ = ["FakeBackend", "FakeMatcher", "create_fake_backend"]

Question = Callable[[bytes], bool]


class FakeMatcher(GrammarMatcher):
    """A matcher whose whole state is the list of tokens it has accepted."""

    def __init__(self, vocabulary: Vocabulary, is_prefix: Question, is_match: Question) -> None:
        self._vocabulary = vocabulary
        self._is_prefix = is_prefix
        self._is_match = is_match
        self._history: list[int] = []

    @classmethod
    def of_texts(cls, vocabulary: Vocabulary, texts: Iterable[str]) -> "FakeMatcher":
        """Return a matcher of exactly these texts."""
        whole = frozenset(text.encode() for text in texts)
        prefixes = frozenset(text[:end] for text in whole for end in range(len(text) + 1))
        return cls(vocabulary, prefixes.__contains__, whole.__contains__)

    def _text(self) -> bytes:
        return self._vocabulary.decode(i for i in self._history if i not in self._vocabulary.stop_token_set)

    def _is_legal(self, token_id: int) -> bool:
        if self.is_terminated() or not 0 <= token_id < self._vocabulary.vocab_size:
            return False
        if token_id in self._vocabulary.stop_token_set:
            return self._is_match(self._text())
        token = self._vocabulary.token_bytes(token_id)
        return bool(token) and self._is_prefix(self._text() + token)

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept_token`."""
        legal = self._is_legal(token_id)
        if legal:
            self._history.append(token_id)
        return legal

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        if not 0 <= num_tokens <= len(self._history):
            raise RollbackError(f"cannot roll back {num_tokens} tokens: {len(self._history)} have been accepted")
        del self._history[len(self._history) - num_tokens :]

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """See `GrammarMatcher.fill_next_token_bitmask`."""
        row = checked_row(bitmask, index, num_mask_words(self._vocabulary.vocab_size))
        if self.is_terminated():
            legal = list(self._vocabulary.stop_token_ids)
        else:
            legal = [token_id for token_id in range(self._vocabulary.vocab_size) if self._is_legal(token_id)]
        row.copy_(torch.from_numpy(token_ids_to_words(legal, len(row))))

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        return bool(self._history) and self._history[-1] in self._vocabulary.stop_token_set

    def is_accepting(self) -> bool:
        """See `GrammarMatcher.is_accepting`."""
        return not self.is_terminated() and self._is_match(self._text())

    def fork(self) -> "FakeMatcher":
        """See `GrammarMatcher.fork`."""
        twin = FakeMatcher(self._vocabulary, self._is_prefix, self._is_match)
        twin._history = list(self._history)
        return twin

    def reset(self) -> None:
        """See `GrammarMatcher.reset`."""
        self._history.clear()

    @property
    def num_tokens(self) -> int:
        """See `GrammarMatcher.num_tokens`."""
        return len(self._history)


class _FakeCompiledGrammar(CompiledGrammar):
    backend = "fake"

    def __init__(self, guide: Guide, vocabulary: Vocabulary) -> None:
        self.guide = guide
        self.nbytes = len(guide.guide)
        self._vocabulary = vocabulary

    def create_matcher(self) -> FakeMatcher:
        """See `CompiledGrammar.create_matcher`."""
        return FakeMatcher.of_texts(self._vocabulary, self.guide.options())


class FakeBackend(Backend):
    """A backend of choice guides alone."""

    name = "fake"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def problems(self, guide: Guide) -> list[Problem]:
        """See `Backend.problems`."""
        if guide.guide_type is GuideType.CHOICE and guide.reasoning is None:
            return []
        return [Problem("#", guide.guide_type.value, self.name, "the fake backend takes choice guides only")]

    def compile(self, guide: Guide) -> CompiledGrammar:
        """See `Backend.compile`."""
        for problem in self.problems(guide):
            raise UnsupportedGuideError(
                f"#: {problem.message}",
                pointer="#",
                hint="use Guide.choice, or a real backend",
                reasons={self.name: problem.message},
            )
        return _FakeCompiledGrammar(guide, self._vocabulary)


def create_fake_backend(vocabulary: Vocabulary, config: GuidedDecodingConfig) -> FakeBackend:
    """Return the fake backend; fits `gd_plugin.register_backend("fake", create_fake_backend)`."""
    return FakeBackend(vocabulary)
