r"""Languages -> terminals in Lark syntax, as JSON spells them.

In:  a `Language` of texts (or of numbers, whose characters need no escapes).
Out: a terminal expression. Every spelling that JSON allows of a member is in it: raw, short escape, `\uXXXX`; but letters
and digits are written `\uXXXX` only in texts that may hold all of them, and not in keys: no program does that, and it costs
the engine a third of its time. Large sets of fixed words take their usual spelling only (`_FULL_WORDS`). Complements leave
out all spellings that what they are taken from has.
Kept here: spelling maps each text to a set of spellings that no other text has, so it commutes with intersection and
complement. Source: RFC 8259, section 7; llguidance's Lark dialect (`&`, `~` on terminals).
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from gd_plugin.guides.schema.languages import (
    ANY_CHAR,
    Alt,
    And,
    Cat,
    Chars,
    Language,
    Not,
    Ranges,
    Repeat,
    Words,
    complement_ranges,
    weight,
)

__all__ = ["Spelling"]

# what is written `\uXXXX` in a key: all but letters, digits and what stands between them in names
_NO_LETTERS = tuple(
    complement_ranges([(ord(" "), ord(" ")), (ord("-"), ord(".")), (48, 57), (65, 90), (95, 95), (97, 122)])
)
_SHORT = {34: '"', 92: "\\", 47: "/", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
# characters of a set of words that are spelled in every way
_FULL_WORDS = 3000
# characters of a part from which it gets a name
_SHARED = 120
# nodes of a language from which its parts are written one by one
_LARGE = 2000


class Spelling:
    """Writes the terminals of one grammar. `shared` are parts, by name, that several of them may use."""

    def __init__(self) -> None:
        self.shared: dict[str, str] = {}
        self._written: dict[tuple[Language, str], str] = {}
        self._texts = _Speller("text", self._share)
        self._keys = _Speller("key", self._share)
        self._numbers = _Speller("number", self._share)

    def number(self, language: Language) -> str:
        """The terminal expression of a language whose characters stand for themselves."""
        return self._numbers.part(language, False)

    def json_text(self, language: Language) -> str:
        """The terminal expression of the JSON strings, quotes included, whose value is in `language`."""
        return self._quoted(self._texts, language, "")

    def json_key(self, language: Language, tail: str) -> str:
        """The terminal expression of the keys in `language`, quotes included, and `tail`, a regex."""
        return self._quoted(self._keys, language, tail)

    def _quoted(self, speller: "_Speller", language: Language, tail: str) -> str:
        key = (language, tail)
        if key not in self._written:
            pattern = speller.pattern(language, full=False) if weight(language) < _LARGE else None
            if pattern is None:
                self._written[key] = f'/"/ {speller.expression(language)} /"{tail}/'
            else:
                self._written[key] = f'/"{pattern}"{tail}/'
        return self._written[key]

    def _share(self, body: str) -> str:
        # the engine reads a named part once, however many terminals name it
        return body if len(body) < _SHARED else self.shared.setdefault(body, f"S{len(self.shared)}")


class _Speller:
    def __init__(self, kind: Literal["text", "key", "number"], share: Callable[[str], str]) -> None:
        self.kind = kind
        self.share = share
        self._parts: dict[tuple[Language, bool], str] = {}

    def pattern(self, node: Language, full: bool) -> str | None:
        """A regex for a node without intersections and complements, else None."""
        if isinstance(node, Chars):
            body = self._set(node, full)
            return body if len(body) < _SHARED else None
        if isinstance(node, Words):
            return self._words(node, full)
        if isinstance(node, Cat):
            parts = [self.pattern(part, full) for part in node.parts]
            return None if None in parts else "".join(map(str, parts))
        if isinstance(node, Alt):
            parts = [self.pattern(part, full) for part in node.parts]
            return None if None in parts else f"(?:{'|'.join(map(str, parts))})"
        if isinstance(node, Repeat):
            part = self.pattern(node.part, full)
            return None if part is None else f"(?:{part}){_times(node)}"
        return None

    def _words(self, node: Words, full: bool) -> str:
        spell: Callable[[str], str]
        if self.kind == "number":
            spell = _raw_word
        elif full:
            spell = _full_word if self.kind == "text" else _key_word
        else:
            spell = _key_word if sum(map(len, node.members)) <= _FULL_WORDS else _usual_word
        members = [spell(word) for word in sorted(node.members)]
        return members[0] if len(members) == 1 else f"(?:{'|'.join(members)})" if members else "[a&&b]"

    def _set(self, node: Chars, full: bool) -> str:
        if self.kind == "number":
            return _raw_set(node.ranges)
        # leaving letters out costs more than having them where all of them are there
        every = full or any(low <= 32 and high >= 122 for low, high in node.ranges)
        return _escaped_set(node.ranges, self.kind == "text" and every)

    def expression(self, node: Language, full: bool = False) -> str:
        """A Lark terminal expression."""
        # a large one may have parts in common, which get names
        pattern = self.pattern(node, full) if weight(node) < _LARGE or isinstance(node, Words) else None
        if pattern is not None:
            # two slashes begin a comment
            return f"/{pattern or '(?:)'}/"
        if isinstance(node, Chars):
            return f"/{self._set(node, full)}/"
        if isinstance(node, Cat):
            return f"({' '.join(self.part(part, full) for part in node.parts)})"
        if isinstance(node, Alt):
            return f"({' | '.join(self.part(part, full) for part in node.parts)})"
        if isinstance(node, Repeat):
            # in brackets as a whole: `~` binds closer than a repeat
            return f"({self.part(node.part, full)}{_times(node)})"
        if isinstance(node, Not):
            return f"({self.anything()} & ~{self.part(node.part, True)})"
        if not isinstance(node, And):
            raise TypeError(f"not a language: {node!r}")
        plain = [self.part(part, full) for part in node.parts if not isinstance(part, Not)]
        barred = [f"~{self.part(part.part, True)}" for part in node.parts if isinstance(part, Not)]
        return f"({' & '.join([*(plain or [self.anything()]), *barred])})"

    def part(self, node: Language, full: bool) -> str:
        """The expression of a part of another: the name of a shared terminal where it is long."""
        key = (node, full)
        if key not in self._parts:
            self._parts[key] = self.share(self.expression(node, full))
        return self._parts[key]

    def anything(self) -> str:
        """All texts."""
        return "/[0-9.eE+\\-]*/" if self.kind == "number" else f"({self.part(ANY_CHAR, False)}*)"


def _times(node: Repeat) -> str:
    if node.high is None:
        return {0: "*", 1: "+"}.get(node.low, f"{{{node.low},}}")
    return "?" if (node.low, node.high) == (0, 1) else f"{{{node.low},{node.high}}}"


@lru_cache(maxsize=4096)
def _raw(point: int) -> str:
    letter = chr(point)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{point:x}}}"


@lru_cache(maxsize=1024)
def _raw_word(word: str) -> str:
    return "".join(_raw(ord(letter)) for letter in word)


def _raw_set(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _raw(ranges[0][0])
    return "[" + "".join(_raw(low) if low == high else f"{_raw(low)}-{_raw(high)}" for low, high in ranges) + "]"


@lru_cache(maxsize=4096)
def _letter(letter: str, letters: bool) -> str:
    point = ord(letter)
    return _escaped_set(((point, point),), letters)


def _full_word(word: str) -> str:
    return "".join(_letter(letter, True) for letter in word)


def _key_word(word: str) -> str:
    return "".join(_letter(letter, False) for letter in word)


def _usual_word(word: str) -> str:
    found = []
    for letter in word:
        point = ord(letter)
        if point in _SHORT and point != 47:
            found.append(rf"\\{_raw(ord(_SHORT[point]))}")
        elif point < 32:
            found.append(rf"\\u{point:04x}")
        else:
            found.append(_raw(point))
    return "".join(found)


def _without_letters(ranges: Ranges) -> Ranges:
    return tuple(
        (max(low, start), min(high, end))
        for low, high in ranges
        for start, end in _NO_LETTERS
        if max(low, start) <= min(high, end)
    )


@lru_cache(maxsize=1024)
def _escaped_set(ranges: Ranges, letters: bool) -> str:
    r"""One character of `ranges` in any JSON spelling; `letters` and digits as `\\uXXXX` too."""
    raw = [
        (max(low, start), min(high, end))
        for low, high in ranges
        for start, end in ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))
        if max(low, start) <= min(high, end)
    ]
    parts = [_raw_set(tuple(raw))] if raw else []
    escapes = []
    short = [sign for point, sign in _SHORT.items() if any(low <= point <= high for low, high in ranges)]
    if short:
        escapes.append("[" + "".join(_raw(ord(sign)) for sign in short) + "]")
    ranges = ranges if letters else _without_letters(ranges)
    units = [_hex_range(low, min(high, 0xFFFF), 4) for low, high in ranges if low <= 0xFFFF]
    pairs = [pair for low, high in ranges if high > 0xFFFF for pair in _pairs(max(low, 0x10000), high)]
    if units or pairs:
        found = [*units, *pairs]
        escapes.append(f"u(?:{'|'.join(found)})" if len(found) > 1 else f"u{found[0]}")
    if escapes:
        parts.append(rf"\\(?:{'|'.join(escapes)})" if len(escapes) > 1 else rf"\\{escapes[0]}")
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _pairs(low: int, high: int) -> list[str]:
    r"""Surrogate pairs of code points over U+FFFF, behind a first `\u`."""
    first, last = divmod(low - 0x10000, 0x400), divmod(high - 0x10000, 0x400)
    rows = []
    if first[0] == last[0]:
        rows.append((first[0], first[0], first[1], last[1]))
    else:
        start, end = first[0], last[0]
        if first[1]:
            rows.append((start, start, first[1], 0x3FF))
            start += 1
        if last[1] != 0x3FF:
            rows.append((end, end, 0, last[1]))
            end -= 1
        if start <= end:
            rows.append((start, end, 0, 0x3FF))
    return [
        f"{_hex_range(0xD800 + a, 0xD800 + b, 4)}\\\\u{_hex_range(0xDC00 + c, 0xDC00 + d, 4)}" for a, b, c, d in rows
    ]


def _hex_digits(low: int, high: int) -> str:
    if low == 0 and high == 15:
        return "[0-9A-Fa-f]"
    numbers = f"{low}-{min(high, 9)}" if low < min(high, 9) else f"{low}" if low <= 9 else ""
    if high < 10:
        return numbers if low == high else f"[{numbers}]"
    a, b = max(low, 10), high
    upper = "".join(chr(55 + value) for value in range(a, b + 1))
    return f"[{numbers}{upper}{upper.lower()}]"


@lru_cache(maxsize=4096)
def _hex_range(low: int, high: int, width: int) -> str:
    """Hexadecimal numbers of `width` digits from `low` to `high`, in either case."""
    if width == 1:
        return _hex_digits(low, high)
    unit = 16 ** (width - 1)
    (first, rest_low), (last, rest_high) = divmod(low, unit), divmod(high, unit)
    if first == last:
        return _hex_digits(first, first) + _hex_range(rest_low, rest_high, width - 1)
    parts = []
    if rest_low:
        parts.append(_hex_digits(first, first) + _hex_range(rest_low, unit - 1, width - 1))
        first += 1
    if rest_high != unit - 1:
        parts.append(_hex_digits(last, last) + _hex_range(0, rest_high, width - 1))
        last -= 1
    if first <= last:
        parts.append(_hex_digits(first, last) + _hex_range(0, unit - 1, width - 1))
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
