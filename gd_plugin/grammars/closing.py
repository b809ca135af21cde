"""Certificates: a concrete token sequence that completes a guide from a given state, its stop token included.

In:  a matcher.      Out: tokens it would accept, the last of them a stop token; never proven to be the fewest.
A budget holds because a certificate is carried from step to step: a token may be chosen only if a certificate behind it
fits into what remains, and the old certificate's own next token always is such a token. A certificate that is longer
than need be costs freedom, never the guarantee.
The search sees the matcher contract alone: bytes are tried as single-byte tokens.
"""

import weakref
from collections.abc import Iterable, Sequence

from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import allocate_token_bitmask

__all__ = ["Certificate", "closing_hints", "fewest_tokens", "find_certificate", "renew_certificate"]

Certificate = tuple[int, ...]

# bytes of text a certificate may have, and accepts one search may make
_MAX_BYTES = 4096
_MAX_ACCEPTS = 40_000
# bytes that close something, in the order they are preferred; the quote comes first, inside a string only
_CLOSERS = b"}],:"
# bytes tried where nothing closes: beginnings of short values, fillers of strings and numbers, then all of ASCII
_OPENERS = b'"0[{tfn-1aA.'
_OTHERS = bytes(b for b in range(33, 127) if b not in _CLOSERS + _OPENERS)
_BLANKS = b" \n\t\r"
# of those, so many are followed to the end before the shortest is taken
_MAX_TRIED = 12
# old certificates are tried without up to so many of their first tokens
_MAX_DROPPED = 6


class _Spelling:
    """What a vocabulary spells, by bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.token_ids: dict[bytes, int] = {}
        special = vocabulary.special_token_ids | vocabulary.stop_token_set
        for token_id, text in enumerate(vocabulary.tokens):
            if text and token_id not in special:
                self.token_ids.setdefault(text, token_id)
        self.longest = max(map(len, self.token_ids), default=1)

    def fewest(self, text: bytes) -> list[int] | None:
        """Return the fewest tokens that spell `text`, or None if it cannot be spelled. O(len * longest token)."""
        best: list[tuple[int, int]] = [(0, 0)]  # tokens up to here, length of the last one
        for end in range(1, len(text) + 1):
            choice = (len(text) + 1, 0)
            for size in range(1, min(end, self.longest, 64) + 1):
                if best[end - size][0] + 1 < choice[0] and text[end - size : end] in self.token_ids:
                    choice = (best[end - size][0] + 1, size)
            best.append(choice)
        tokens: list[int] = []
        end = len(text)
        while end:
            size = best[end][1]
            if not size:
                return None
            tokens.append(self.token_ids[text[end - size : end]])
            end -= size
        return tokens[::-1]


_spellings: "weakref.WeakKeyDictionary[Vocabulary, _Spelling]" = weakref.WeakKeyDictionary()


def _spelling(vocabulary: Vocabulary) -> _Spelling:
    spelling = _spellings.get(vocabulary)
    if spelling is None:
        spelling = _spellings[vocabulary] = _Spelling(vocabulary)
    return spelling


def fewest_tokens(vocabulary: Vocabulary, text: bytes) -> list[int] | None:
    """Return the fewest tokens that spell `text`, or None if the vocabulary cannot spell it."""
    return _spelling(vocabulary).fewest(text)


def closing_hints(guide: Guide) -> tuple[bytes, ...]:
    """Return texts that are worth trying at the start: the marker that ends a reasoning, the options of a choice."""
    if guide.reasoning is not None:
        return (guide.reasoning.end.encode(),)
    if guide.guide_type.value == "choice":
        return tuple(sorted((option.encode() for option in guide.options()), key=len)[:_MAX_TRIED])
    return ()


def find_certificate(
    matcher: GrammarMatcher, vocabulary: Vocabulary, hints: Iterable[bytes] = (), old: Sequence[int] = ()
) -> Certificate | None:
    """Search a short completion from the matcher's state; the matcher is left as it was. None if none was found.

    Deterministic and bounded in work. Costs milliseconds; `renew_certificate` is the cheap way to go on.

    Args:
        matcher: the state; not terminated.
        vocabulary: the matcher's own.
        hints: texts worth trying first.
        old: certificate of a state nearby: the search ends where its rest fits.
    """
    search = _Search(matcher.fork(), vocabulary, old)
    found = search.from_hints(hints) or search.complete()
    return None if found is None else tuple(found)


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
        self._spelling = _spelling(vocabulary)
        self._accepts = 0
        self._bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)

    def from_hints(self, hints: Iterable[bytes]) -> list[int] | None:
        best: list[int] | None = None
        for hint in hints:
            marker = self._vocabulary.special_token_names.get(hint.decode(errors="replace"))
            head = [marker] if marker is not None and self._accept(marker) else self._take(hint)
            if head is None:
                continue
            rest = self.complete()
            self._matcher.rollback(len(head))
            if rest is not None and (best is None or len(head) + len(rest) < len(best)):
                best = self._shorten([*head, *rest])
        return best

    def complete(self, *, look_ahead: bool = True) -> list[int] | None:
        """Return tokens that complete the state; the matcher is left as it was."""
        start = self._matcher.num_tokens
        tokens: list[int] | None = []
        while tokens is not None and not self._matcher.is_accepting():
            if len(tokens) > _MAX_BYTES or self._accepts > _MAX_ACCEPTS:
                tokens = None
                break
            rest = renew_certificate(self._matcher, self._old)
            if rest is not None:
                self._matcher.rollback(self._matcher.num_tokens - start)
                return [*tokens, *rest]
            step = self._step(look_ahead)
            tokens = None if step is None else tokens + step
        self._matcher.rollback(self._matcher.num_tokens - start)
        return None if tokens is None else self._shorten([*tokens, self._vocabulary.stop_token_ids[0]])

    def _step(self, look_ahead: bool) -> list[int] | None:
        """Advance by the best next bytes; None if there is no way on."""
        forced = self._matcher.forced_text()
        if forced:
            taken = self._take(forced)
            if taken is not None:
                return taken
        if self._legal(b'"') and (self._legal(b"Z") or self._legal(b"~")):
            return self._take(b'"')  # inside a string
        for byte in _CLOSERS:
            if (taken := self._take(bytes([byte]))) is not None:
                return taken
        return self._best_other(look_ahead)

    def _best_other(self, look_ahead: bool) -> list[int] | None:
        """Follow each of the other bytes to the end and take the one that ends first; deeper down, the first one."""
        best: list[int] | None = None
        length = tried = 0
        legal = self._legal_bytes()
        # blanks lead nowhere, so they come last
        ahead = [b for b in _OPENERS + _OTHERS if b in legal] or [b for b in _BLANKS if b in legal]
        for byte in ahead:
            head = self._take(bytes([byte]))
            if head is None:
                continue
            if not look_ahead or len(ahead) == 1:
                return head
            rest = self.complete(look_ahead=False)
            self._matcher.rollback(len(head))
            if rest is not None and (best is None or len(rest) < length):
                best, length = head, len(rest)
            tried += 1
            if tried >= _MAX_TRIED:
                break
        if best is not None:
            for token_id in best:
                self._accept(token_id)
            return best
        return self._any_token()

    def _any_token(self) -> list[int] | None:
        """Bytes outside ASCII, where a guide allows nothing else."""
        for byte in range(128, 256):
            if (taken := self._take(bytes([byte]))) is not None:
                return taken
        return None

    def _legal_bytes(self) -> set[int]:
        """ASCII bytes that may come next, by the mask; a byte without a token of its own is left to `_take`."""
        self._matcher.fill_next_token_bitmask(self._bitmask, 0)
        row = self._bitmask.numpy()[0]
        legal = set()
        for byte in range(128):
            token_id = self._spelling.token_ids.get(bytes([byte]))
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
            token_id = self._spelling.token_ids.get(bytes([byte]))
            if token_id is None or not self._accept(token_id):
                self._matcher.rollback(len(tokens))
                return self._take_whole(text)
            tokens.append(token_id)
        return tokens

    def _take_whole(self, text: bytes) -> list[int] | None:
        """The same with the fewest tokens: a vocabulary may lack a byte, or a guide may want its own spelling."""
        tokens = self._spelling.fewest(text)
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
        fewest = self._spelling.fewest(self._vocabulary.decode(tokens[:-1]))
        if fewest is None or len(fewest) + 1 >= len(tokens):
            return tokens
        shorter = [*fewest, tokens[-1]]
        return shorter if self._matcher.validate_tokens(shorter) == len(shorter) else tokens
