"""Speller: tokens by their bytes. Which tokens spell a text, begin with one, or hold one.

In:  a Vocabulary.      Out: token ids. Stop and special tokens spell nothing.
"""

import weakref
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import num_mask_words

__all__ = ["Speller", "spell_text"]

_spellers: "weakref.WeakKeyDictionary[Vocabulary, Speller]" = weakref.WeakKeyDictionary()


class Speller:
    """The text tokens of a vocabulary in the order of their bytes. Immutable; shared by everything that asks.

    Attributes:
        text_row: int32 [W], a bit for each text token.
        token_ids: text of a token -> the lowest id that spells it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        stops = vocabulary.stop_token_set
        pairs = sorted((text, i) for i, text in enumerate(vocabulary.tokens) if text and i not in stops)
        self._texts = [text for text, _ in pairs]
        self._ids = [token_id for _, token_id in pairs]
        self.token_ids = dict(reversed(pairs))
        self._longest = max((len(text) for text in self._texts), default=0)
        self._num_words = num_mask_words(vocabulary.vocab_size)
        bits = np.zeros(self._num_words * 32, dtype=np.uint8)
        bits[self._ids] = 1
        self.text_row: npt.NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "Speller":
        """Return the vocabulary's speller; it is built once."""
        speller = _spellers.get(vocabulary)
        if speller is None:
            speller = cls(vocabulary)
            _spellers[vocabulary] = speller
        return speller

    def empty_row(self) -> npt.NDArray[np.int32]:
        """Return int32 [W], all zero."""
        return np.zeros(self._num_words, dtype=np.int32)

    def starting_with(self, prefix: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes begin with `prefix`, which is not empty."""
        position = bisect_left(self._texts, prefix)
        while position < len(self._texts) and self._texts[position].startswith(prefix):
            yield self._ids[position]
            position += 1

    def starting_with_any(self, characters: bytes) -> Iterator[int]:
        """Yield the tokens that begin with one of these bytes."""
        for character in characters:
            yield from self.starting_with(bytes([character]))

    def equal_to(self, text: bytes) -> Iterator[int]:
        """Yield the tokens whose bytes are `text`."""
        position = bisect_left(self._texts, text)
        while position < len(self._texts) and self._texts[position] == text:
            yield self._ids[position]
            position += 1

    def holding(self, part: bytes) -> Iterator[int]:
        """Yield the tokens that hold `part` anywhere."""
        return (token_id for text, token_id in zip(self._texts, self._ids, strict=True) if part in text)

    def spelled_length(self, text: bytes) -> int:
        """Return the length of the longest prefix of `text` that tokens can spell."""
        reached = {0}
        for begin in range(len(text)):
            if begin in reached:
                for end in range(begin + 1, min(len(text), begin + self._longest) + 1):
                    if end not in reached and text[begin:end] in self.token_ids:
                        reached.add(end)
        return max(reached)

    def spell(self, text: bytes) -> list[int] | None:
        """Return tokens that spell `text`, few and long ones first, or None if there are none."""
        # from the end back: (tokens to the end, the next token, where it ends) of the best spelling from each position
        steps: list[tuple[int, int, int] | None] = [None] * (len(text) + 1)
        steps[len(text)] = (0, -1, len(text))
        for begin in range(len(text) - 1, -1, -1):
            best: tuple[int, int, int] | None = None
            for end in range(begin + 1, min(len(text), begin + self._longest) + 1):
                rest = steps[end]
                if rest is not None and (best is None or rest[0] + 1 < best[0]):
                    token_id = self.token_ids.get(text[begin:end])
                    if token_id is not None:
                        best = (rest[0] + 1, token_id, end)
            steps[begin] = best
        ids: list[int] = []
        step = steps[0]
        while step is not None and step[1] >= 0:
            ids.append(step[1])
            step = steps[step[2]]
        return None if step is None else ids


def spell_text(vocabulary: Vocabulary, text: bytes) -> list[int] | None:
    """Return the tokenizer's own tokens for `text`, or as few as possible where it cannot say; None if there are none."""
    if vocabulary.encode is not None:
        try:
            ids = list(vocabulary.encode(text.decode()))
        except UnicodeDecodeError:
            ids = []  # a part of a character
        known = all(0 <= token_id < vocabulary.vocab_size for token_id in ids)
        special = vocabulary.special_token_ids, vocabulary.stop_token_set
        if known and all(kind.isdisjoint(ids) for kind in special) and vocabulary.decode(ids) == text:
            return ids
    return Speller.of(vocabulary).spell(text)
