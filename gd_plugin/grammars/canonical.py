r"""Canonical forcing: where a guide forces text, only the tokenizer's own spelling of it is legal.

In:  a compiled guide of any backend.      Out: one whose matchers allow a single token wherever text is forced.
The rule, a function of the matcher's state alone: the longest text that must follow is spelled by the tokenizer, its last
token is left open because what follows may merge with it, and of the rest the first token is the only legal one. Every
text of the guide can still be written. In JSON, "must follow" looks past escapes: where a key's `n` could also be written
as `\u006e`, it is written as `n`.
A token that is alone in its mask needs no forward pass (see gd_plugin.hf.drafting), and no prompt can talk a model into
another spelling.
"""

import numpy as np
import torch

from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.matcher import GrammarMatcher, checked_row
from gd_plugin.grammars.spelling import Speller, spell_text
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import GuideType
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns, num_mask_words

__all__ = ["CanonicalGrammar", "CanonicalMatcher"]

_JSON_KINDS = frozenset({GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.STRUCTURAL_TAG})
_BACKSLASH = ord("\\")
# bytes that one run may force; a guide that forces more is spelled piece by piece
_MAX_FORCED = 1024
# where more tokens are legal they begin with different bytes, or the run is left alone: blanks alone have dozens
_MAX_LEGAL = 512
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
        self._rule = _Rule(vocabulary, escapes=inner.guide.guide_type in _JSON_KINDS)

    def create_matcher(self) -> "CanonicalMatcher":
        """See `CompiledGrammar.create_matcher`."""
        return CanonicalMatcher(self._inner.create_matcher(), self._rule)


class _Rule:
    """What all matchers of one guide share."""

    def __init__(self, vocabulary: Vocabulary, *, escapes: bool) -> None:
        self.vocabulary = vocabulary
        self.num_words = num_mask_words(vocabulary.vocab_size)
        self._escapes = escapes
        self._speller = Speller.of(vocabulary)
        self._spellings: dict[bytes, int | None] = {b"": None}  # threads may write the same

    def forced_text(self, matcher: GrammarMatcher, row: torch.Tensor) -> bytes:
        """Return the longest text that must follow; `row`, int32 [1, W], is overwritten."""
        found = bytearray()
        try:
            while len(found) < _MAX_FORCED and (byte := self._forced_byte(matcher, row)) is not None:
                token_id = self._speller.token_ids.get(bytes([byte]))
                if token_id is None or not matcher.accept_token(token_id):
                    break
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

    def _forced_byte(self, matcher: GrammarMatcher, row: torch.Tensor) -> int | None:
        """Return the byte with which every legal token begins, if there is one."""
        if matcher.is_terminated() or matcher.is_accepting():
            return None
        matcher.fill_next_token_bitmask(row, 0)
        legal = legal_columns(row[0], self.vocabulary.vocab_size).nonzero()[0]
        if not 0 < len(legal) <= _MAX_LEGAL:
            return None
        tokens = self.vocabulary.tokens
        first = {tokens[token_id][:1] for token_id in legal.tolist()}
        if self._escapes and len(first) == 2:
            first.discard(b"\\")
        if len(first) != 1 or b"" in first:
            return None
        return int(next(iter(first))[0])


class CanonicalMatcher(GrammarMatcher):
    """A matcher whose forced text has one spelling. Not thread-safe; `fork` gives an independent one."""

    def __init__(self, inner: GrammarMatcher, rule: _Rule) -> None:
        self._inner = inner
        self._rule = rule
        self._scratch = allocate_token_bitmask(1, rule.vocabulary.vocab_size)
        # what must follow; None where it has not been asked yet
        self._forced: bytes | None = None

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept_token`."""
        only = self._only_token()
        if only is not None and token_id != only:
            return False
        if not self._inner.accept_token(token_id):
            return False
        text = self._rule.vocabulary.tokens[token_id]
        # what was forced goes on being forced, so that a run is looked through once
        forced = self._forced
        rest = forced[len(text) :] if forced and text and len(text) < len(forced) < _MAX_FORCED else None
        self._forced = rest if forced is not None and forced.startswith(text) else None
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        self._inner.rollback(num_tokens)
        if num_tokens:
            self._forced = None

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
        twin._forced = self._forced
        return twin

    def reset(self) -> None:
        """See `GrammarMatcher.reset`."""
        self._inner.reset()
        self._forced = None

    @property
    def num_tokens(self) -> int:
        """See `GrammarMatcher.num_tokens`."""
        return self._inner.num_tokens

    def forced_text(self) -> bytes:
        """See `GrammarMatcher.forced_text`."""
        return self._inner.forced_text()

    def _only_token(self) -> int | None:
        """Return the token that alone is legal because of the rule, or None."""
        if self._forced is None:
            self._forced = self._rule.forced_text(self._inner, self._scratch)
        first = self._rule.first_token(self._forced)
        # a guide may ask for tokens of its own
        return first if first is not None and self._inner.validate_tokens([first]) == 1 else None
