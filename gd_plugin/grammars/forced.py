"""Drafts from a guide: the text it forces, and behind that what the row has held before, as far as the guide allows it.

In:  a matcher, the tokens so far, what became of earlier drafts.
Out: tokens the matcher would accept, to be checked by the model in one pass.
A draft is a guess about the model, never about the guide; whoever uses it keeps only what the model itself chooses.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.spelling import Speller, spell_text
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns

__all__ = ["Drafter", "likely_text"]

# a draft copies what followed the last few tokens earlier on, longest match first
_LONGEST_MATCH = 3
_SHORTEST_MATCH = 1
# tokens copied at once; further off, a copy is seldom right
_MAX_COPIED = 10
# a guess that has brought fewer tokens a time is made only now and then: a wider pass costs up to 1.6 narrow ones
_WORTHWHILE = 0.3
_RETRY = 12
# how fast old guesses are forgotten
_MEMORY = 0.85
# what may end a value
_CLOSERS = (b'"', b"}", b"]", b",")
# where more tokens are legal, no text is likely
_MAX_LEGAL = 128
# ways of writing the same that a model seldom takes: escapes, and white space before what must come
_UNLIKELY = frozenset(b"\\ \n\t\r")


class _Lookup:
    """Where the last tokens of a row have occurred before. Grows with the row."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens. What ends at the row's end is known only once something follows it."""
        for token_id in token_ids:
            for size in range(_SHORTEST_MATCH, _LONGEST_MATCH + 1):
                if len(self._tokens) >= size:
                    self._ends[tuple(self._tokens[-size:])] = len(self._tokens)
            self._tokens.append(token_id)

    def continuation(self, draft: Sequence[int]) -> list[int]:
        """Return what followed the last occurrence of the row's end, `draft` included; [] if there was none."""
        tail = [*self._tokens[-_LONGEST_MATCH:], *draft][-_LONGEST_MATCH:]
        for size in range(min(_LONGEST_MATCH, len(tail)), _SHORTEST_MATCH - 1, -1):
            start = self._ends.get(tuple(tail[-size:]))
            if start is not None:
                # a copy may run into itself: what repeats goes on repeating
                copied = [*self._tokens[start:], *draft][:_MAX_COPIED]
                period = len(copied)
                while len(copied) < _MAX_COPIED:
                    copied.append(copied[-period])
                return copied
        return []


class _Guess:
    """Whether a kind of guess pays: tokens it has brought, old ones counting less."""

    def __init__(self, brought: float) -> None:
        self._brought = brought
        self._made = 1.0
        self._left_out = 0

    def pays(self) -> bool:
        if self._brought >= _WORTHWHILE * self._made:
            return True
        self._left_out += 1
        return self._left_out % _RETRY == 0

    def learn(self, num_tokens: int) -> None:
        self._brought = _MEMORY * self._brought + num_tokens
        self._made = _MEMORY * self._made + 1


def likely_text(matcher: GrammarMatcher, vocabulary: Vocabulary, bitmask: torch.Tensor) -> bytes:
    """Return text that must follow, or would if nothing were written with escapes or more white space; b"" if none.

    Args:
        matcher: the state; left as it was.
        vocabulary: the matcher's own.
        bitmask: int32 [1, W], overwritten.
    """
    forced = matcher.forced_text()
    if forced or matcher.is_accepting():
        return forced
    matcher.fill_next_token_bitmask(bitmask, 0)
    legal = legal_columns(bitmask[0], vocabulary.vocab_size).nonzero()[0]
    if len(legal) > _MAX_LEGAL:
        return b""
    texts = [vocabulary.tokens[token_id] for token_id in legal.tolist()]
    found = b""
    while True:
        following = {text[len(found)] for text in texts if len(text) > len(found)}
        if len(following) > 1:
            following -= _UNLIKELY
        # behind a byte, tokens do not show all that may follow
        if len(following) != 1 or (found and following <= _UNLIKELY):
            return found
        found += bytes(following)
        texts = [text for text in texts if text.startswith(found)]


class Drafter:
    """Drafts for one row, and learns from what became of them.

    Args:
        vocabulary: the matchers' own.
        prompt_lookup: also copy what followed the last tokens earlier in the row, and guess where values end.
    """

    def __init__(self, vocabulary: Vocabulary, *, prompt_lookup: bool = True) -> None:
        self._vocabulary = vocabulary
        self._speller = Speller.of(vocabulary)
        self._lookup = _Lookup() if prompt_lookup else None
        self._bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)
        self._guesses = {"copy": _Guess(5.0), "end": _Guess(5.0)}
        # token the tokenizer would write -> token this model writes in its place
        self._habits: dict[int, int] = {}
        self._num_tokens = 0
        # of the last draft: its tokens, those the tokenizer would have written, and the kind of guess they came by
        self._draft: list[int] = []
        self._usual: list[int] = []
        self._kinds: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far."""
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens by which the row has grown: the prompt, then what the model has chosen."""
        self._num_tokens += len(token_ids)
        self._learn(token_ids)
        if self._lookup is not None:
            self._lookup.extend(token_ids)

    def propose(self, matcher: GrammarMatcher, limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow; the matcher is left as it was. None behind a stop token.

        Args:
            matcher: state of the row behind all tokens that `extend` was given.
            limit: longest draft.
        """
        self._draft, self._usual, self._kinds = [], [], []
        start = matcher.num_tokens
        try:
            while len(self._draft) < limit and not matcher.is_terminated():
                if not any(self._try(matcher, kind, pairs, limit) for kind, pairs in self._proposals(matcher)):
                    break
        finally:
            matcher.rollback(matcher.num_tokens - start)
        return self._draft

    def _proposals(self, matcher: GrammarMatcher) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        likely = likely_text(matcher, self._vocabulary, self._bitmask)
        if likely:
            yield "forced", self._spell(likely)
            return
        if self._lookup is None or (self._kinds and self._kinds[-1] != "forced"):
            return
        copied = self._lookup.continuation(self._draft)
        if copied and self._guesses["copy"].pays():
            yield "copy", [(token_id, token_id) for token_id in copied]
        if not self._draft and self._guesses["end"].pays():
            yield "end", self._spell(self._end_of_value(matcher))

    def _try(self, matcher: GrammarMatcher, kind: str, pairs: list[tuple[int, int]], limit: int) -> bool:
        """Append what the matcher accepts; False if that is nothing."""
        before = len(self._draft)
        for token_id, usual in pairs[: limit - before]:
            if not matcher.accept_token(token_id):
                break
            self._draft.append(token_id)
            self._usual.append(usual)
            self._kinds.append(kind)
        return len(self._draft) > before

    def _end_of_value(self, matcher: GrammarMatcher) -> bytes:
        """Return what follows if the value that is being written ends here."""
        for closer in _CLOSERS:
            token_id = self._speller.token_ids.get(closer)
            if token_id is not None and matcher.accept_token(token_id):
                text = closer + likely_text(matcher, self._vocabulary, self._bitmask)
                matcher.rollback(1)
                return text
        return b""

    def _spell(self, text: bytes) -> list[tuple[int, int]]:
        """Return (token, the tokenizer's own) for `text`, the way this model has been seen to write it."""
        tokens = self._vocabulary.tokens
        pairs: list[tuple[int, int]] = []
        pending = list(spell_text(self._vocabulary, text) or ())
        while pending and len(pairs) < len(text):
            usual = pending.pop(0)
            token_id = self._habits.get(usual, usual)
            if token_id != usual:
                if not text.startswith(tokens[token_id]) and not tokens[token_id].startswith(text):
                    token_id = usual
                else:
                    pending = list(spell_text(self._vocabulary, text[len(tokens[token_id]) :]) or ())
            pairs.append((token_id, usual))
            text = text[len(tokens[token_id]) :]
        return pairs

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Compare the last draft with what was chosen."""
        right = 0
        while right < min(len(self._draft), len(token_ids)) and self._draft[right] == token_ids[right]:
            right += 1
        for kind in set(self._kinds) - {"forced"}:
            if right >= self._kinds.index(kind):  # else it was never asked
                self._guesses[kind].learn(self._kinds[:right].count(kind))
        if right < min(len(self._draft), len(token_ids)):
            usual, chosen = self._usual[right], token_ids[right]
            one, other = self._vocabulary.tokens[usual], self._vocabulary.tokens[chosen]
            if other and (one.startswith(other) or other.startswith(one)):
                self._habits[usual] = chosen
        self._draft, self._usual, self._kinds = [], [], []
