"""Certificates: a concrete token sequence that completes a guide from a given state, its stop token included.

In:  a matcher.      Out: tokens it would accept, the last of them a stop token; never proven to be the fewest.
A budget holds because a certificate is carried from step to step: a token may be chosen only if a certificate behind it
fits into what remains, and the old certificate's own next token always is such a token. A certificate that is longer
than need be costs freedom, never the guarantee.
The search sees the matcher contract alone: bytes are tried as single-byte tokens.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import GuideError
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.forced import likely_text
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.spelling import Speller
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.completion import Completion, completion_of
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.json_bound import json_bound
from gd_plugin.guides.schema import normal_form
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns

__all__ = [
    "Certificate",
    "closing_hints",
    "completion_bound",
    "exact_certificate",
    "find_certificate",
    "minimum_tokens",
    "renew_certificate",
]

Certificate = tuple[int, ...]

# bytes of text a certificate may have, accepts one search may make, and those it may make for a shorter one
_MAX_BYTES = 4096
_MAX_ACCEPTS = 40_000
_MAX_MORE_ACCEPTS = 4_000
# bytes that close something, in the order they are preferred; the quote comes first, inside a string only
_CLOSERS = b"}],:"
# where a quote may follow, these may too inside a string only
_IN_STRINGS = (b"Z", b"~", b":")
# bytes tried where nothing closes: beginnings of short values, fillers of strings and numbers, then all of ASCII
_OPENERS = b'"0[{tfn-1aA.'
# blanks lead nowhere, and escapes are longer than what they stand for
_LAST = b"\\ \n\t\r"
_OTHERS = bytes(b for b in range(33, 127) if b not in _CLOSERS + _OPENERS + _LAST)
_ORDER = {byte: place for place, byte in enumerate(_OPENERS + _OTHERS)}
# of those, so many are followed to the end before the shortest is taken
_MAX_TRIED = 12
# old certificates are tried without up to so many of their first tokens
_MAX_DROPPED = 6


def closing_hints(guide: Guide) -> tuple[bytes, ...]:
    """Return texts that are worth trying at the start: the marker that ends a reasoning, the shortest text."""
    if guide.reasoning is not None:
        return (guide.reasoning.end.encode(),)
    completion = completion_of(guide)
    shortest = None if completion is None else completion.complete(b"")
    return (shortest,) if shortest else ()


def completion_bound(guide: Guide, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> int | None:
    """Return the tokens, a stop token included, that complete the guide from anywhere; None if no bound is proven.

    Proven for regular guides, where every byte of a shortest completion is a token at worst, and for the schemas of
    gd_plugin.guides.json_bound; in both cases where each byte that may be needed has a token.
    """
    if config.canonical_forcing:
        return None
    speller = Speller.of(vocabulary)
    if guide.guide_type is GuideType.JSON_SCHEMA:
        return None if guide.reasoning is not None else _schema_bound(guide, speller, config)
    completion = completion_of(guide)
    if completion is None or any(bytes([byte]) not in speller.token_ids for byte in completion.needed):
        return None
    return completion.bound + 1


def _schema_bound(guide: Guide, speller: Speller, config: GuidedDecodingConfig) -> int | None:
    if any(bytes([byte]) not in speller.token_ids for byte in range(0x20, 0x7F)):
        return None
    try:
        normal = normal_form(guide.guide, config)
    except GuideError:
        return None

    def cost(text: bytes) -> int | None:
        tokens = speller.spell(text)
        return None if tokens is None else len(tokens)

    # what was dropped may have made more documents legal
    bound = None if normal.dropped else json_bound(normal, cost)
    return None if bound is None else bound + 1


def exact_certificate(
    matcher: GrammarMatcher, vocabulary: Vocabulary, completion: Completion, text: bytes
) -> Certificate | None:
    """Return the shortest completion of a regular guide behind `text`, or None if the matcher does not agree."""
    rest = completion.complete(text)
    spelled = None if rest is None else Speller.of(vocabulary).spell(rest)
    if spelled is None:
        return None
    certificate = (*spelled, vocabulary.stop_token_ids[0])
    return certificate if matcher.validate_tokens(certificate) == len(certificate) else None


def find_certificate(
    matcher: GrammarMatcher, vocabulary: Vocabulary, hints: Iterable[bytes] = (), old: Sequence[int] = ()
) -> Certificate | None:
    """Search a short completion from the matcher's state; the matcher is left as it was. None if none was found.

    Deterministic and bounded in work. It fills many masks: milliseconds where those are cheap, up to seconds
    where each is dear (a large vocabulary, a guide whose masks are built when first reached); `renew_certificate` is the
    cheap way to go on.

    Args:
        matcher: the state; not terminated.
        vocabulary: the matcher's own.
        hints: texts worth trying first.
        old: certificate of a state nearby: the search ends where its rest fits, or soon.
    """
    search = _Search(matcher.fork(), vocabulary, old)
    found = search.from_hints(hints) or search.shortest()
    return None if found is None else tuple(found)


def minimum_tokens(grammar: CompiledGrammar, vocabulary: Vocabulary) -> int | None:
    """Return the tokens of the shortest completion known for a guide, its stop token included; None if none is known."""
    found = find_certificate(grammar.create_matcher(), vocabulary, closing_hints(grammar.guide))
    return None if found is None else len(found)


def renew_certificate(matcher: GrammarMatcher, old: Sequence[int]) -> Certificate | None:
    """Return what of an earlier state's certificate completes this state, or None; the matcher is left as it was."""
    for dropped in range(min(_MAX_DROPPED + 1, len(old))):
        rest = tuple(old[dropped:])
        if matcher.validate_tokens(rest) == len(rest):
            return rest
    return None


class _Search:
    """One search on a matcher of its own."""

    def __init__(self, matcher: GrammarMatcher, vocabulary: Vocabulary, old: Sequence[int]) -> None:
        self._matcher = matcher
        self._old = old
        self._vocabulary = vocabulary
        self._speller = Speller.of(vocabulary)
        self._accepts = 0
        self._max_accepts = _MAX_MORE_ACCEPTS if old else _MAX_ACCEPTS
        self._bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)

    def from_hints(self, hints: Iterable[bytes]) -> list[int] | None:
        best: list[int] | None = None
        for hint in hints:
            marker = self._vocabulary.special_token_names.get(hint.decode(errors="replace"))
            head = [marker] if marker is not None and self._accept(marker) else self._take(hint)
            if head is None:
                continue
            rest = self.shortest()
            self._matcher.rollback(len(head))
            if rest is not None and (best is None or len(head) + len(rest) < len(best)):
                best = self._shorten([*head, *rest])
        return best

    def shortest(self) -> list[int] | None:
        """Return tokens that complete the state, a stop token last; the matcher is left as it was."""
        found = self._complete(_MAX_BYTES, look_ahead=False)
        if not self._old and (found is None or len(found) > 1):
            if found is not None:
                self._max_accepts = min(self._max_accepts, self._accepts + _MAX_MORE_ACCEPTS)
            better = self._complete(_MAX_BYTES if found is None else len(found), look_ahead=True)
            found = found if better is None else better
        return None if found is None else self._shorten([*found, self._vocabulary.stop_token_ids[0]])

    def _complete(self, limit: int, *, look_ahead: bool) -> list[int] | None:
        """Return at most `limit` tokens, mostly of one byte, up to an accepting state; the matcher is left as it was."""
        start = self._matcher.num_tokens
        tokens: list[int] = []
        uses: Counter[int] = Counter()
        found: list[int] | None = None
        while len(tokens) <= limit and self._accepts < self._max_accepts:
            if self._matcher.is_accepting():
                found = tokens
                break
            rest = renew_certificate(self._matcher, self._old)
            if rest is not None:
                found = [*tokens, *rest[:-1]]
                break
            step = self._step(uses, limit - len(tokens) if look_ahead else 0)
            if step is None:
                break
            tokens += step
        self._matcher.rollback(self._matcher.num_tokens - start)
        return found

    def _step(self, uses: "Counter[int]", look_ahead: int) -> list[int] | None:
        """Advance by the best next bytes; None if there is no way on."""
        likely = likely_text(self._matcher, self._vocabulary, self._bitmask)
        if likely:
            taken = self._take(likely)
            if taken is not None:
                return taken
        if self._legal(b'"') and any(self._legal(byte) for byte in _IN_STRINGS):
            return self._take(b'"')
        for byte in _CLOSERS:
            if (taken := self._take(bytes([byte]))) is not None:
                return taken
        legal = self._legal_bytes()
        # what has been taken least comes first, so that no loop is walked for ever
        ahead = sorted(legal & _ORDER.keys(), key=lambda byte: (uses[byte], _ORDER[byte])) or [
            byte for byte in _LAST if byte in legal
        ]
        best = self._best_of(ahead, look_ahead) if look_ahead and len(ahead) > 1 else None
        for byte in ahead if best is None else [best]:
            if (taken := self._take(bytes([byte]))) is not None:
                uses[byte] += 1
                return taken
        return self._any_token()

    def _best_of(self, ahead: list[int], limit: int) -> int | None:
        """Follow the first of these bytes to the end and return the one that ends first."""
        best: int | None = None
        for byte in ahead[:_MAX_TRIED]:
            head = self._take(bytes([byte]))
            if head is None:
                continue
            rest = self._complete(limit - 1, look_ahead=False)
            self._matcher.rollback(len(head))
            if rest is not None:
                best, limit = byte, len(rest)
        return best

    def _any_token(self) -> list[int] | None:
        """Bytes outside ASCII, where a guide allows nothing else; then any token."""
        for byte in range(128, 256):
            if (taken := self._take(bytes([byte]))) is not None:
                return taken
        self._matcher.fill_next_token_bitmask(self._bitmask, 0)
        for token_id in legal_columns(self._bitmask[0], self._vocabulary.vocab_size).nonzero()[0].tolist():
            if self._accept(token_id):
                return [token_id]
        return None

    def _legal_bytes(self) -> set[int]:
        """ASCII bytes that may come next, by the mask; a byte without a token of its own is left to `_take`."""
        self._matcher.fill_next_token_bitmask(self._bitmask, 0)
        row = self._bitmask.numpy()[0]
        legal = set()
        for byte in range(128):
            token_id = self._speller.token_ids.get(bytes([byte]))
            if token_id is None or row[token_id >> 5] >> (token_id & 31) & 1:
                legal.add(byte)
        return legal

    def _accept(self, token_id: int) -> bool:
        self._accepts += 1
        return self._matcher.accept_token(token_id)

    def _legal(self, text: bytes) -> bool:
        taken = self._take(text)
        if taken is None:
            return False
        self._matcher.rollback(len(taken))
        return True

    def _take(self, text: bytes) -> list[int] | None:
        """Accept the bytes of `text` one by one; None, and the state as before, if that cannot be done."""
        tokens: list[int] = []
        for byte in text:
            token_id = self._speller.token_ids.get(bytes([byte]))
            if token_id is None or not self._accept(token_id):
                self._matcher.rollback(len(tokens))
                return self._take_whole(text)
            tokens.append(token_id)
        return tokens

    def _take_whole(self, text: bytes) -> list[int] | None:
        """The same with the fewest tokens: a vocabulary may lack a byte, or a guide may want its own spelling."""
        tokens = self._speller.spell(text)
        if tokens is None:
            return None
        for count, token_id in enumerate(tokens):
            if not self._accept(token_id):
                self._matcher.rollback(count)
                return None
        return tokens

    def _shorten(self, tokens: list[int]) -> list[int]:
        """Spell the same text with the fewest tokens, where the matcher agrees."""
        special = self._vocabulary.special_token_ids
        if any(token in special for token in tokens[:-1]):
            return tokens
        fewest = self._speller.spell(self._vocabulary.decode(tokens[:-1]))
        if fewest is None or len(fewest) + 1 >= len(tokens):
            return tokens
        shorter = [*fewest, tokens[-1]]
        return shorter if self._matcher.validate_tokens(shorter) == len(shorter) else tokens
