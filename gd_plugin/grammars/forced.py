"""Drafts from a guide: the text it forces, and behind that what the row has held before, as far as the guide allows it.

In:  a matcher, the tokens so far, what a forward pass costs.
Out: tokens the matcher would accept, to be checked by the model in one pass.
A draft is a guess about the model, never about the guide; whoever uses it keeps only what the model itself chooses.
Each kind of guess has a share that was right lately, learned from every step whether the guess was sent to the model or
not. A draft is as long as the passes it is expected to save exceed what it adds to the pass that checks it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.spelling import Speller, spell_text
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.masks.bitmask import allocate_token_bitmask, few_legal_tokens

__all__ = ["Drafter", "PassCost", "likely_text"]

# a draft copies what followed the last few tokens earlier on, longest match first
_LONGEST_MATCH = 3
# tokens copied at once; further off, a copy is seldom right
_MAX_COPIED = 10
# share of guesses that are right before any has been seen, by kind: forced text, the value ends here, copies by the
# tokens that match before them, and what a copy goes on with
_PRIORS = {"forced": 0.8, "end": 0.3, "copy1": 0.2, "copy2": 0.4, "copy3": 0.6, "on": 0.75}
# guesses such a prior counts for, and how fast old guesses are forgotten
_PRIOR_WEIGHT = 3.0
_MEMORY = 0.9
# what may end a value
_CLOSERS = (b'"', b"}", b"]", b",")
# where more tokens are legal, no text is likely
_MAX_LEGAL = 128
# ways of writing the same that a model seldom takes: escapes, and white space before what must come
_UNLIKELY = frozenset(b"\\ \n\t\r")


class PassCost(NamedTuple):
    """What a forward pass over several tokens costs, counted in passes over one.

    Attributes:
        second: what the second token adds.
        further: what each token behind it adds.
    """

    second: float = 0.0
    further: float = 0.0

    def added(self, num_tokens: int, num_drafted: int) -> float:
        """Return what drafted tokens add to a pass over `num_tokens`, at least 1."""
        second = self.second - self.further if num_tokens == 1 and num_drafted else 0.0
        return second + self.further * num_drafted


class _Guess(NamedTuple):
    """One token of a draft.

    Attributes:
        token_id: the token.
        usual: what the tokenizer would have written.
        kind: how it came about, a key of `_PRIORS`.
        is_alone: no other token is legal there.
    """

    token_id: int
    usual: int
    kind: str
    is_alone: bool


class _Share:
    """The share of guesses that are right, old ones counting less."""

    def __init__(self, prior: float) -> None:
        self._right = prior * _PRIOR_WEIGHT
        self._made = _PRIOR_WEIGHT

    @property
    def value(self) -> float:
        return self._right / self._made

    def learn(self, right: bool) -> None:
        self._right = _MEMORY * self._right + right
        self._made = _MEMORY * self._made + 1


class _Lookup:
    """Where the last tokens of a row have occurred before. Grows with the row."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens. What ends at the row's end is known only once something follows it."""
        for token_id in token_ids:
            for size in range(1, _LONGEST_MATCH + 1):
                if len(self._tokens) >= size:
                    self._ends[tuple(self._tokens[-size:])] = len(self._tokens)
            self._tokens.append(token_id)

    def continuation(self, draft: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many tokens match and what followed them, for the row's end, `draft` included; (0, []) if none."""
        tail = [*self._tokens[-_LONGEST_MATCH:], *draft][-_LONGEST_MATCH:]
        for size in range(len(tail), 0, -1):
            start = self._ends.get(tuple(tail[-size:]))
            if start is not None:
                # a copy may run into itself: what repeats goes on repeating
                copied = [*self._tokens[start:], *draft][:_MAX_COPIED]
                period = len(copied)
                while len(copied) < _MAX_COPIED:
                    copied.append(copied[-period])
                return size, copied
        return 0, []


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
    legal = few_legal_tokens(bitmask[0], vocabulary.vocab_size, _MAX_LEGAL)
    if legal is None:
        return b""
    texts = [vocabulary.tokens[token_id] for token_id in legal]
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
        pass_cost: what a wider forward pass costs; as it stands, width costs nothing and drafts are as long as they can be.
        skips_alone: whoever asks appends a token that alone is legal without a forward pass.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prompt_lookup: bool = True,
        pass_cost: PassCost = PassCost(),  # noqa: B008 (immutable)
        skips_alone: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._speller = Speller.of(vocabulary)
        self._lookup = _Lookup() if prompt_lookup else None
        self._pass_cost = pass_cost
        self._skips_alone = skips_alone
        self._bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)
        self._shares = {kind: _Share(prior) for kind, prior in _PRIORS.items()}
        # token the tokenizer would write -> token this model writes in its place
        self._habits: dict[int, int] = {}
        self._seen: set[int] = set()
        self._num_tokens = 0
        # what might follow, as far as it was thought of
        self._chains: list[list[_Guess]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far."""
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens by which the row has grown: the prompt, then what the model has chosen."""
        self._num_tokens += len(token_ids)
        for chain in self._chains:
            self._learn(chain, token_ids)
        self._chains = []
        self._seen.update(token_ids)
        if self._lookup is not None:
            self._lookup.extend(token_ids)

    def propose(self, matcher: GrammarMatcher, limit: int, *, num_pending: int = 1) -> list[int]:
        """Return at most `limit` tokens that may follow; the matcher is left as it was. None behind a stop token.

        Args:
            matcher: state of the row behind all tokens that `extend` was given.
            limit: longest draft.
            num_pending: tokens that the pass holds anyway.
        """
        self._chains = [self._chain(matcher, limit, "copy")]
        if self._lookup is not None and not any(guess.kind == "forced" for guess in self._chains[0][:1]):
            self._chains.append(self._chain(matcher, limit, "end"))
        best: list[_Guess] = []
        best_gain = 0.0
        for chain in self._chains:
            gain, length = self._best_cut(chain, num_pending)
            if gain > best_gain:
                best, best_gain = chain[:length], gain
        return [guess.token_id for guess in best]

    def _best_cut(self, chain: list[_Guess], num_pending: int) -> tuple[float, int]:
        """Return the passes that a draft from `chain` is expected to save, and its length."""
        best, best_length = 0.0, 0
        likelihood, saved = 1.0, 0.0
        for length, guess in enumerate(chain, 1):
            if not guess.is_alone:
                likelihood *= self._shares[guess.kind].value
                saved += likelihood
            gain = saved - self._pass_cost.added(num_pending, length)
            if gain > best:
                best, best_length = gain, length
        return best, best_length

    def _chain(self, matcher: GrammarMatcher, limit: int, first: str) -> list[_Guess]:
        """Return what might follow: forced text, one guess of the kind `first` where none is, and so on behind it."""
        chain: list[_Guess] = []
        start = matcher.num_tokens
        try:
            while len(chain) < limit and not matcher.is_terminated():
                length = len(chain)
                self._grow(matcher, chain, limit, first)
                if len(chain) == length:
                    break
        finally:
            matcher.rollback(matcher.num_tokens - start)
        return chain

    def _grow(self, matcher: GrammarMatcher, chain: list[_Guess], limit: int, first: str) -> None:
        likely = likely_text(matcher, self._vocabulary, self._bitmask)
        if likely:
            self._take(matcher, chain, limit, "forced", "forced", self._spell(likely))
        elif self._lookup is None or (chain and chain[-1].kind != "forced"):
            return
        elif first == "end" and not chain:
            self._take(matcher, chain, limit, "end", "forced", self._spell(self._end_of_value(matcher)))
        else:
            size, copied = self._lookup.continuation([guess.token_id for guess in chain])
            self._take(matcher, chain, limit, f"copy{size}", "on", [(token_id, token_id) for token_id in copied])

    def _take(
        self,
        matcher: GrammarMatcher,
        chain: list[_Guess],
        limit: int,
        kind: str,
        then: str,
        pairs: list[tuple[int, int]],
    ) -> None:
        """Append what the matcher accepts of (token, the tokenizer's own)."""
        for token_id, usual in pairs[: limit - len(chain)]:
            is_alone = self._skips_alone and kind == "forced" and self._is_alone(matcher)
            if not matcher.accept_token(token_id):
                return
            chain.append(_Guess(token_id, usual, kind, is_alone))
            kind = then

    def _is_alone(self, matcher: GrammarMatcher) -> bool:
        matcher.fill_next_token_bitmask(self._bitmask, 0)
        return few_legal_tokens(self._bitmask[0], self._vocabulary.vocab_size, 1) is not None

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
            token_id = self._habit(usual)
            if token_id != usual:
                if not text.startswith(tokens[token_id]) and not tokens[token_id].startswith(text):
                    token_id = usual
                else:
                    pending = list(spell_text(self._vocabulary, text[len(tokens[token_id]) :]) or ())
            pairs.append((token_id, usual))
            text = text[len(tokens[token_id]) :]
        return pairs

    def _habit(self, usual: int) -> int:
        """Return the token that this model writes where the tokenizer would write `usual`."""
        if usual in self._habits or usual in self._seen:
            return self._habits.get(usual, usual)
        text = self._vocabulary.tokens[usual]
        if any(byte > 127 or bytes([byte]).isalnum() for byte in text):
            return usual
        # punctuation as it stands in the prompt: behind `":` the tokenizer's next token may be another one there
        for end in range(len(text) - 1, 0, -1):
            token_id = self._speller.token_ids.get(text[:end])
            if token_id in self._seen:
                return token_id
        return usual

    def _learn(self, chain: list[_Guess], token_ids: Sequence[int]) -> None:
        """Compare what was thought of with what was chosen."""
        for guess, chosen in zip(chain, token_ids, strict=False):
            right = guess.token_id == chosen
            if not guess.is_alone:
                self._shares[guess.kind].learn(right)
            if not right:
                one, other = self._vocabulary.tokens[guess.usual], self._vocabulary.tokens[chosen]
                if other and (one.startswith(other) or other.startswith(one)):
                    self._habits[guess.usual] = chosen
                return
