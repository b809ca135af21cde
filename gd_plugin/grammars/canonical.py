r"""Canonical forcing: where a guide forces text, only the tokenizer's own spelling of it is legal.

In:  a compiled guide of any backend.      Out: one whose matchers allow a single token wherever text is forced.
The rule, a function of the matcher's state alone: the longest text that must follow is spelled by the tokenizer, its last
token is left open because what follows may merge with it, and of the rest the first token is the only legal one. Every
text of the guide can still be written. In JSON, "must follow" looks past escapes: where a key's `n` could also be written
as `\u006e`, it is written as `n`.
A token that is alone in its mask needs no forward pass (see gd_plugin.hf.drafting), and no prompt can talk a model into
another spelling.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.matcher import GrammarMatcher, checked_row
from gd_plugin.grammars.spelling import Speller, spell_text
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.language import JSON_DOCUMENTS, WRITTEN_IN_JSON
from gd_plugin.masks.bitmask import allocate_token_bitmask, num_mask_words, token_ids_to_words

__all__ = ["CanonicalGrammar", "CanonicalMatcher"]

# bytes that one run may force; a guide that forces more is spelled piece by piece
_MAX_FORCED = 1024
# words of a row that are looked at first
_MAX_HEAD_WORDS = 32
# spellings kept for each guide
_MAX_SPELLINGS = 512


class CanonicalGrammar(CompiledGrammar):
    """A compiled guide whose forced text has one spelling. Shared between threads."""

    def __init__(self, inner: CompiledGrammar, vocabulary: Vocabulary) -> None:
        self.guide = inner.guide
        self.backend = inner.backend
        self.reason = inner.reason
        self.not_enforced = inner.not_enforced
        self.nbytes = inner.nbytes
        self._inner = inner
        self._rule = _Rule(vocabulary, escapes=inner.guide.guide_type in JSON_DOCUMENTS | WRITTEN_IN_JSON)

    def create_matcher(self) -> "CanonicalMatcher":
        """See `CompiledGrammar.create_matcher`."""
        return CanonicalMatcher(self._inner.create_matcher(), self._rule)


class _Others(NamedTuple):
    """Which tokens do not begin with some byte.

    Attributes:
        words: int32 [W], a bit for each of them.
        head: the first words as a number.
    """

    words: npt.NDArray[np.int32]
    head: int


class _Rule:
    """What all matchers of one guide share."""

    def __init__(self, vocabulary: Vocabulary, *, escapes: bool) -> None:
        self.vocabulary = vocabulary
        self.num_words = num_mask_words(vocabulary.vocab_size)
        self._escapes = escapes
        self._speller = Speller.of(vocabulary)
        # threads may write the same
        self._spellings: dict[bytes, int | None] = {b"": None}
        self._others: dict[bytes, _Others] = {}
        single = [i for text, i in self._speller.token_ids.items() if len(text) == 1]
        self._num_head_words = min(max(single, default=0) // 32 + 1, _MAX_HEAD_WORDS)

    def forced_text(self, matcher: GrammarMatcher, row: torch.Tensor) -> bytes:
        """Return the longest text that must follow; `row`, int32 [1, W], is overwritten."""
        found = bytearray()
        try:
            while len(found) < _MAX_FORCED and (text := self._next_forced(matcher, row)):
                for byte in text[: _MAX_FORCED - len(found)]:
                    token_id = self._speller.token_ids.get(bytes([byte]))
                    if token_id is None or not matcher.accept_token(token_id):
                        return bytes(found)
                    found.append(byte)
        finally:
            matcher.rollback(len(found))
        return bytes(found)

    def first_token(self, text: bytes) -> int | None:
        """Return the first token of forced text, or None if it is the last one too."""
        known = self._spellings.get(text, -1)
        if known == -1:
            spelled = spell_text(self.vocabulary, text)
            known = spelled[0] if spelled is not None and len(spelled) > 1 else None
            if len(self._spellings) < _MAX_SPELLINGS:
                self._spellings[text] = known
        return known

    def _next_forced(self, matcher: GrammarMatcher, row: torch.Tensor) -> bytes:
        """Return what the engine knows to be forced, or else the byte with which every legal token begins."""
        if matcher.is_terminated() or matcher.is_accepting():
            return b""
        known = matcher.forced_text()
        if known:
            return known
        matcher.fill_next_token_bitmask(row, 0)
        words = row[0].numpy()
        # the tokens of one byte lie together at the front of most vocabularies, and mostly tell
        head = int.from_bytes(words[: self._num_head_words].tobytes(), "little")
        if self._escapes:
            head = head & self._others_of(b"\\").head or head
        if head:
            first = self._first_byte(head)
            others = self._others_of(first)
            if not first or head & others.head:
                return b""
        if self._escapes and np.count_nonzero(plain := words & self._others_of(b"\\").words):
            words = plain
        if not head:
            word = int((words != 0).argmax())
            bits = int(words[word]) & 0xFFFFFFFF
            if not bits:
                return b""
            first = self._first_byte(bits << 32 * word)
            others = self._others_of(first)
        return b"" if not first or np.count_nonzero(words & others.words) else first

    def _first_byte(self, bits: int) -> bytes:
        """Return the first byte of the lowest token in `bits`."""
        token_id = (bits & -bits).bit_length() - 1
        return self.vocabulary.tokens[token_id][:1] if token_id < self.vocabulary.vocab_size else b""

    def _others_of(self, first: bytes) -> "_Others":
        others = self._others.get(first)
        if others is None:
            words = ~token_ids_to_words(list(self._speller.starting_with(first)) if first else [], self.num_words)
            head = int.from_bytes(words[: self._num_head_words].tobytes(), "little")
            others = self._others[first] = _Others(words, head)
        return others


class CanonicalMatcher(GrammarMatcher):
    """A matcher whose forced text has one spelling. Not thread-safe; `fork` gives an independent one."""

    def __init__(self, inner: GrammarMatcher, rule: _Rule) -> None:
        self._inner = inner
        self._rule = rule
        self._scratch = allocate_token_bitmask(1, rule.vocabulary.vocab_size)
        # what must follow, behind each accepted token; None where it has not been asked yet
        self._forced: list[bytes | None] = [None]

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept_token`."""
        only = self._only_token()
        if only is not None and token_id != only:
            return False
        if not self._inner.accept_token(token_id):
            return False
        text = self._rule.vocabulary.tokens[token_id]
        # what was forced goes on being forced, so that a run is looked through once
        forced = self._forced[-1]
        is_known = forced and text and forced.startswith(text) and len(text) < len(forced) < _MAX_FORCED
        self._forced.append(forced[len(text) :] if forced and is_known else None)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        self._inner.rollback(num_tokens)
        del self._forced[len(self._forced) - num_tokens :]

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """See `GrammarMatcher.fill_next_token_bitmask`."""
        row = checked_row(bitmask, index, self._rule.num_words)
        only = self._only_token()
        if only is None:
            self._inner.fill_next_token_bitmask(bitmask, index)
            return
        row.zero_()
        row[only >> 5] = int(np.uint32(1 << (only & 31)).view(np.int32))

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        return self._inner.is_terminated()

    def is_accepting(self) -> bool:
        """See `GrammarMatcher.is_accepting`."""
        return self._inner.is_accepting()

    def fork(self) -> "CanonicalMatcher":
        """See `GrammarMatcher.fork`."""
        twin = CanonicalMatcher(self._inner.fork(), self._rule)
        twin._forced = self._forced[:]
        return twin

    def reset(self) -> None:
        """See `GrammarMatcher.reset`."""
        self._inner.reset()
        self._forced = [None]

    @property
    def num_tokens(self) -> int:
        """See `GrammarMatcher.num_tokens`."""
        return self._inner.num_tokens

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """See `GrammarMatcher.validate_tokens`."""
        # what the guide refuses need not be looked at token by token
        length = self._inner.validate_tokens(token_ids)
        return super().validate_tokens(token_ids[:length]) if length else 0

    def forced_text(self) -> bytes:
        """See `GrammarMatcher.forced_text`."""
        return self._inner.forced_text()

    def _only_token(self) -> int | None:
        """Return the token that alone is legal because of the rule, or None."""
        forced = self._forced[-1]
        if forced is None:
            forced = self._forced[-1] = self._rule.forced_text(self._inner, self._scratch)
        first = self._rule.first_token(forced)
        # a guide may ask for tokens of its own
        return first if first is not None and self._inner.validate_tokens([first]) == 1 else None
