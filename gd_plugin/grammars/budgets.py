"""Budgets: which tokens may follow so that a guide is complete within the tokens that remain.

In:  a compiled guide, a matcher's state, the tokens that remain, candidates.
Out: the candidates behind which a certificate fits, each with its certificate.
Near the limit: where a bound is proven on what completes the guide from anywhere, no step is touched until no more than
that remains behind its token. Without such a bound every step is near.
Kept here: the certificate's own next token always stays, so whoever has begun within a budget ends within it, whatever is
chosen. Other candidates stay if a certificate behind them is found: sound, not complete.
"""

from collections.abc import Iterable, Sequence

import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import MatcherError
from gd_plugin.grammars.closing import (
    Certificate,
    closing_hints,
    completion_bound,
    exact_certificate,
    find_certificate,
    renew_certificate,
)
from gd_plugin.grammars.matcher import GrammarMatcher, checked_row
from gd_plugin.grammars.reasoning import ReasoningMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.completion import completion_of
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import legal_columns, num_mask_words, token_ids_to_words

__all__ = ["NUM_CANDIDATES", "BudgetMatcher", "Closing", "check_budget", "hold_to_budget", "refusal"]

# legal tokens tried at a step
NUM_CANDIDATES = 64


class Closing:
    """How one guide is completed. Safe to share between matchers of the guide.

    Args:
        guide: the guide.
        vocabulary: the matchers' own.
        config: the settings it was compiled with.
    """

    def __init__(self, guide: Guide, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self._guide = guide
        self._vocabulary = vocabulary
        self._bound = completion_bound(guide, vocabulary, config)

    def is_near(self, left: int) -> bool:
        """Tell whether some token may lead to a state that `left - 1` tokens do not complete."""
        return self._bound is None or left <= self._bound

    def find(self, matcher: GrammarMatcher, token_ids: Sequence[int], old: Certificate = ()) -> Certificate | None:
        """Return a completion of the state behind `token_ids`, or None.

        Args:
            matcher: the state; left as it was.
            token_ids: all tokens it has accepted.
            old: certificate of a state nearby.
        """
        completion = completion_of(self._guide)
        if completion is not None:
            found = exact_certificate(matcher, self._vocabulary, completion, self._vocabulary.decode(token_ids))
            if found is not None:
                return found
        # the end marker is worth trying as long as the free text goes on
        free = isinstance(matcher, ReasoningMatcher) and matcher.is_reasoning
        hints = closing_hints(self._guide) if free or not token_ids else ()
        return find_certificate(matcher, self._vocabulary, hints, old)

    def fitting(
        self,
        matcher: GrammarMatcher,
        token_ids: Sequence[int],
        certificate: Certificate,
        left: int,
        candidates: Iterable[int],
    ) -> tuple[dict[int, Certificate], bool]:
        """Return the tokens that may follow, each with a certificate behind it, and whether a legal one was refused.

        Args:
            matcher: the state; left as it was.
            token_ids: all tokens it has accepted.
            certificate: completes the state in at most `left` tokens; its next token is the first of the result.
            left: tokens that remain.
            candidates: tokens to try.
        """
        found: dict[int, Certificate] = {certificate[0]: certificate[1:]}
        refused = False
        for token_id in candidates:
            if token_id in self._vocabulary.stop_token_set and matcher.is_accepting():
                found[token_id] = ()
            if token_id in found or not matcher.accept_token(token_id):
                continue
            try:
                behind = renew_certificate(matcher, certificate)
                if behind is None or len(behind) >= left:
                    behind = self.find(matcher, (*token_ids, token_id), certificate)
            finally:
                matcher.rollback(1)
            if behind is None or len(behind) >= left:
                refused = True
            else:
                found[token_id] = behind
        return found, refused


class BudgetMatcher(GrammarMatcher):
    """A matcher whose masks keep it within a budget; what it accepts is the guide's own affair.

    Of a row's legal tokens those with the lowest ids are tried, because nobody has scores here.

    Args:
        inner: the guide's matcher, at its start.
        closing: the guide's.
        vocabulary: the matcher's own.
        max_new_tokens: tokens until the guide is complete, stop token included.

    Attributes:
        intervened: a token was tried and refused because of the budget.

    Raises:
        ValueError: the budget is below the shortest completion known; the message has the number.
    """

    def __init__(self, inner: GrammarMatcher, closing: Closing, vocabulary: Vocabulary, max_new_tokens: int) -> None:
        check_budget(max_new_tokens)
        self.intervened = False
        self._inner = inner
        self._closing = closing
        self._vocabulary = vocabulary
        self._max_new_tokens = max_new_tokens
        self._num_words = num_mask_words(vocabulary.vocab_size)
        self._token_ids: list[int] = []
        # behind each accepted token: tokens that may follow -> a completion behind each; None until a mask asked
        self._known: list[dict[int, Certificate] | None] = [None]
        self._start = closing.find(inner, ())
        if self._start is None or len(self._start) > max_new_tokens:
            raise refusal(max_new_tokens, self._start)

    def accept_token(self, token_id: int) -> bool:
        """See `GrammarMatcher.accept_token`."""
        if not self._inner.accept_token(token_id):
            return False
        self._token_ids.append(token_id)
        self._known.append(None)
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `GrammarMatcher.rollback`."""
        self._inner.rollback(num_tokens)
        kept = len(self._token_ids) - num_tokens
        del self._token_ids[kept:], self._known[kept + 1 :]

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """See `GrammarMatcher.fill_next_token_bitmask`; near the limit legal tokens that do not fit are left out."""
        row = checked_row(bitmask, index, self._num_words)
        self._inner.fill_next_token_bitmask(bitmask, index)
        left = self._max_new_tokens - len(self._token_ids)
        if self._inner.is_terminated() or not self._closing.is_near(left):
            return
        certificate = self._certificate()
        if certificate is None:
            return  # a history that no mask of this matcher allowed
        legal = legal_columns(row, self._vocabulary.vocab_size).nonzero()[0]
        known, refused = self._closing.fitting(
            self._inner, self._token_ids, certificate, left, legal[:NUM_CANDIDATES].tolist()
        )
        self._known[-1] = known
        self.intervened |= refused
        row.zero_()
        row[: self._num_words] = torch.from_numpy(token_ids_to_words(list(known), self._num_words))

    def _certificate(self) -> Certificate | None:
        """Return the certificate of this state: what the state before knows of it, or a new one."""
        if not self._token_ids:
            return self._start
        before = self._known[-2]
        known = None if before is None else before.get(self._token_ids[-1])
        return self._closing.find(self._inner, self._token_ids) if known is None else known

    def is_terminated(self) -> bool:
        """See `GrammarMatcher.is_terminated`."""
        return self._inner.is_terminated()

    def is_accepting(self) -> bool:
        """See `GrammarMatcher.is_accepting`."""
        return self._inner.is_accepting()

    def fork(self) -> "BudgetMatcher":
        """See `GrammarMatcher.fork`."""
        twin = object.__new__(BudgetMatcher)
        twin.__dict__.update(self.__dict__)
        twin._inner = self._inner.fork()
        twin._token_ids, twin._known = self._token_ids[:], self._known[:]
        return twin

    def reset(self) -> None:
        """See `GrammarMatcher.reset`."""
        self._inner.reset()
        self._token_ids, self._known = [], [None]

    @property
    def num_tokens(self) -> int:
        """See `GrammarMatcher.num_tokens`."""
        return self._inner.num_tokens

    def forced_text(self) -> bytes:
        """See `GrammarMatcher.forced_text`."""
        return self._inner.forced_text()


def hold_to_budget(matcher: GrammarMatcher, factory: object, guide: Guide, max_new_tokens: int) -> BudgetMatcher:
    """Return `matcher`, which is at the start of `guide`, with masks that keep it within a budget.

    Args:
        matcher: what the factory has made.
        factory: a `GrammarMatcherFactory`, or anything with a `vocabulary`.
        guide: the matcher's.
        max_new_tokens: tokens until the guide is complete, stop token included.

    Raises:
        MatcherError: the factory has no vocabulary to complete guides with.
        ValueError: the budget is no number of tokens, or below the shortest completion known.
    """
    vocabulary = getattr(factory, "vocabulary", None)
    if not isinstance(vocabulary, Vocabulary):
        raise MatcherError("max_new_tokens needs a GrammarMatcherFactory: this factory has no vocabulary")
    config = getattr(factory, "config", None)
    closing = Closing(guide, vocabulary, config if isinstance(config, GuidedDecodingConfig) else GuidedDecodingConfig())
    return BudgetMatcher(matcher, closing, vocabulary, max_new_tokens)


def check_budget(max_new_tokens: object) -> None:
    """Raise ValueError unless this is a number of tokens."""
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive number of tokens or None, got {max_new_tokens!r}")


def refusal(max_new_tokens: int, certificate: Certificate | None) -> ValueError:
    """Return the error for a budget that no known completion fits into."""
    if certificate is None:
        return ValueError(
            f"max_new_tokens={max_new_tokens} cannot be guaranteed: no completion of this guide was found to begin with; "
            "leave the budget out, or bound the guide"
        )
    return ValueError(
        f"max_new_tokens={max_new_tokens} is too small: the shortest completion known for this guide needs "
        f"{len(certificate)} tokens, the stop token included; pass at least max_new_tokens={len(certificate)}"
    )
