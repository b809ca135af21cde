"""Does this text match this guide? Without a model, with the first bad position and what was expected there.

In:  a Guide and a text.      Out: a Verdict.
The text is fed byte by byte to a matcher of the backend that "auto" chooses, over a vocabulary of single bytes, so that the
answer does not depend on how a tokenizer would cut it.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gd_plugin.grammars.compiler import GrammarMatcherFactory
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.reasoning import opening_step
from gd_plugin.grammars.spelling import Speller
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide, Reasoning
from gd_plugin.guides.language import JSON_DOCUMENTS
from gd_plugin.guides.problem import escape_pointer
from gd_plugin.masks.bitmask import allocate_token_bitmask

__all__ = ["Verdict", "byte_vocabulary", "expected_next", "validate"]

_STOP = 256
_MAX_EXPECTED = 24


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `validate` found.

    Attributes:
        ok: the whole text matches the guide.
        complete: the legal part of the text, which is all of it if `position` is its length, matches the guide.
        position: index of the first character that may not stand there; the text's length if it only breaks off too
            early; None if all is well.
        expected: what may stand at `position`: characters, ranges of them, "end of text".
        pointer: for JSON guides, where in the document `position` is (`#/items/0`); else None.
    """

    ok: bool
    complete: bool
    position: int | None = None
    expected: tuple[str, ...] = ()
    pointer: str | None = None

    def __bool__(self) -> bool:
        return self.ok


@lru_cache(maxsize=1)
def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary of the 256 bytes and a stop token."""
    tokens: list[bytes | None] = [bytes([value]) for value in range(256)]
    return Vocabulary.from_bytes([*tokens, None], stop_token_ids=[_STOP])


@lru_cache(maxsize=1)
def _factory() -> GrammarMatcherFactory:
    return GrammarMatcherFactory(byte_vocabulary())


def validate(guide: Guide, text: str, *, tokenizer: Any = None) -> Verdict:
    """Tell whether `text` matches `guide`. A budget of reasoning tokens is left aside: text has no tokens.

    Args:
        guide: the guide.
        text: what was generated, or should be.
        tokenizer: any tokenizer `Vocabulary.from_tokenizer` reads; the text must then be spelled by its tokens too.

    Raises:
        GuideError: no installed backend can enforce the guide.
        TypeError: `guide` is no Guide, or `text` is not text.
    """
    if not isinstance(guide, Guide):
        raise TypeError(f"guide must be a Guide, got {type(guide).__name__}; use Guide.json_schema(...) and so on")
    if not isinstance(text, str):
        raise TypeError(f"text must be str, got {type(text).__name__}; decode bytes first")
    if guide.reasoning is not None:
        guide = replace(guide, reasoning=replace(guide.reasoning, max_tokens=None))
    matcher = _factory().create(guide)
    data = text.encode("utf-8", errors="surrogatepass")
    legal = matcher.validate_tokens(data)
    unspelled = len(data) if tokenizer is None else _spelled_length(tokenizer, data)
    legal = min(legal, unspelled)
    for byte in data[:legal]:
        matcher.accept_token(byte)
    complete = matcher.is_accepting()
    if legal == len(data) and complete:
        return Verdict(ok=True, complete=True)
    position = len(data[:legal].decode("utf-8", errors="ignore"))
    return Verdict(
        ok=False,
        complete=complete,
        position=position,
        expected=expected_next(matcher),
        pointer=_json_pointer(_document(text[:position], guide.reasoning))
        if guide.guide_type in JSON_DOCUMENTS
        else None,
    )


def _spelled_length(tokenizer: Any, data: bytes) -> int:
    """Return how many bytes the tokenizer's tokens can spell."""
    vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary.from_tokenizer(tokenizer)
    return Speller.of(vocabulary).spelled_length(data)


def expected_next(matcher: GrammarMatcher) -> tuple[str, ...]:
    """Return what may come next at a matcher over `byte_vocabulary()`: characters, ranges of them, "end of text"."""
    row = allocate_token_bitmask(1, _STOP + 1)
    matcher.fill_next_token_bitmask(row, 0)
    words = row[0].tolist()
    legal = [byte for byte in range(256) if words[byte >> 5] >> (byte & 31) & 1]
    shown: list[str] = []
    ascii_bytes = [byte for byte in legal if byte < 128]
    while ascii_bytes:
        first = last = ascii_bytes.pop(0)
        while ascii_bytes and ascii_bytes[0] == last + 1 and chr(last).isalnum() == chr(last + 1).isalnum():
            last = ascii_bytes.pop(0)
        shown.append(_character(first) if first == last else f"{_character(first)}-{_character(last)}")
    if any(byte >= 128 for byte in legal):
        shown.append("characters past ASCII")
    if len(shown) > _MAX_EXPECTED:
        shown = [*shown[:_MAX_EXPECTED], "..."]
    return (*shown, "end of text") if matcher.is_accepting() else tuple(shown)


def _character(byte: int) -> str:
    return repr(chr(byte))[1:-1] if byte < 32 or byte == 127 else chr(byte)


def _document(prefix: str, reasoning: Reasoning | None) -> str:
    """Return what stands behind the reasoning: the part of a legal prefix that the guide itself reads."""
    if reasoning is None:
        return prefix
    data = prefix.encode("utf-8", errors="surrogatepass")
    free = 0
    if reasoning.start is not None:
        start = reasoning.start.encode()
        _, matched, free = opening_step(start, 0, 0, data)
        if free < 0:  # no reasoning: the guide begins at once
            return prefix
        if matched < len(start):
            return ""
    _, _, document = data[free:].partition(reasoning.end.encode())
    return document.decode("utf-8", errors="surrogatepass")


def _json_pointer(prefix: str) -> str:
    """Return where in a JSON document its prefix ends."""
    # one entry a container: [key or index, whether the next string is a key]
    stack: list[list[Any]] = []
    position = 0
    while position < len(prefix):
        character = prefix[position]
        if character == '"':
            end = _string_end(prefix, position)
            if stack and stack[-1][1] and end <= len(prefix):
                stack[-1][0] = _decoded_key(prefix[position:end])
            position = end
            continue
        if character in "{[":
            stack.append(["", True] if character == "{" else [0, False])
        elif character in "}]" and stack:
            stack.pop()
        elif character == ":" and stack:
            stack[-1][1] = False
        elif character == "," and stack:
            if isinstance(stack[-1][0], int):
                stack[-1][0] += 1
            else:
                stack[-1] = ["", True]
        position += 1
    steps = [escape_pointer(key) for key, is_key in stack if not is_key]
    return "/".join(["#", *steps])


def _decoded_key(written: str) -> str:
    try:
        key = str(json.loads(written))
        key.encode()
    except ValueError:  # half of a surrogate pair: no text spells it but its escape
        return written[1:-1]
    return key


def _string_end(text: str, begin: int) -> int:
    """Return the index behind the string that begins at `begin`; past the end of the text if it is not closed."""
    position = begin + 1
    while position < len(text) and text[position] != '"':
        position += 2 if text[position] == "\\" else 1
    return position + 1
