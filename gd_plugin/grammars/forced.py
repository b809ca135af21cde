"""Drafts from a guide: the text it forces, and behind that what the prompt holds, as far as the guide allows it.

In:  a matcher, the tokens so far.      Out: tokens the matcher would accept, to be checked by the model in one pass.
A draft is a guess about the model, never about the guide; whoever uses it keeps only what the model itself chooses.
"""

from collections.abc import Callable, Sequence

import torch

from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns

__all__ = ["Lookup", "SpellText", "likely_text", "propose_draft"]

# text -> the tokenizer's own tokens for it
SpellText = Callable[[bytes], Sequence[int]]

# a draft copies what followed the last few tokens earlier on, longest match first
_LONGEST_MATCH = 3
_SHORTEST_MATCH = 2
# tokens copied at once; further off, a copy is seldom right
_MAX_COPIED = 10
# where more tokens are legal, no text is likely
_MAX_LEGAL = 128
# ways of writing the same that a model seldom takes: escapes, and white space before what must come
_UNLIKELY = frozenset(b"\\ \n\t\r")


class Lookup:
    """Where the last tokens of a row have occurred before. Grows with the row."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
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
                return self._tokens[start : start + _MAX_COPIED]
        return []


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


def propose_draft(
    matcher: GrammarMatcher, vocabulary: Vocabulary, spell_text: SpellText, lookup: Lookup | None, limit: int
) -> list[int]:
    """Return at most `limit` tokens that may follow; the matcher is left as it was. Never a token behind a stop token.

    Args:
        matcher: state of the row.
        vocabulary: the matcher's own.
        spell_text: the tokenizer.
        lookup: the row's tokens; None drafts forced text alone.
        limit: longest draft.
    """
    draft: list[int] = []
    start = matcher.num_tokens
    bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)
    try:
        while len(draft) < limit and not matcher.is_terminated():
            likely = likely_text(matcher, vocabulary, bitmask)
            if likely:
                proposed: Sequence[int] = spell_text(likely)
            elif lookup is not None:
                proposed = lookup.continuation(draft)
            else:
                proposed = ()
            accepted = 0
            for token_id in proposed[: limit - len(draft)]:
                if not matcher.accept_token(token_id):
                    break
                draft.append(token_id)
                accepted += 1
            if not accepted:
                break
    finally:
        matcher.rollback(matcher.num_tokens - start)
    return draft
