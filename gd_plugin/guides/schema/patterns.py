r"""JSON Schema `pattern`: an ECMA-262 expression that is searched for -> a language of whole texts.

In:  the pattern as the schema has it.
Out: `Pattern.narrow`, texts that surely match, and `Pattern.wide`, texts that may match. They differ where the dialects
     that validators use (ECMA-262, Python's `re`) read a pattern differently: `\w` on non-ASCII letters, `$` before a
     last newline, `.` on U+2028. What must match is guided by `narrow`, what must not by the complement of `wide`.
Source: ECMA-262, "RegExp (Regular Expression) Objects"; JSON Schema 2020-12 core, section 6.4.
"""

import re
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.schema.languages import (
    ANY_CHAR,
    ANY_TEXT,
    EMPTY,
    EPSILON,
    Language,
    alt,
    both,
    cat,
    chars,
    complement_ranges,
    negate,
    repeat,
    text,
)

__all__ = ["Pattern", "PatternError", "compile_pattern"]

_MAX_DEPTH = 40
_MAX_REPEAT = 1 << 20
_MAX_LENGTH = 20_000
# copies of a continuation that look-around and alternation may make
_MAX_STEPS = 20_000

_Range = tuple[int, int]


class PatternError(Exception):
    """The pattern cannot be read (`unsupported` False) or is no regular language we can build (True)."""

    def __init__(self, message: str, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


@dataclass(frozen=True, slots=True)
class Pattern:
    """Whole texts in which a pattern is found; see the module."""

    narrow: Language
    wide: Language


@dataclass(frozen=True, slots=True)
class _Set:
    narrow: tuple[_Range, ...]
    wide: tuple[_Range, ...]


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: tuple["_Node", ...]


@dataclass(frozen=True, slots=True)
class _Times:
    part: "_Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Edge:
    """`^` or `$`."""

    symbol: str


@dataclass(frozen=True, slots=True)
class _Look:
    part: "_Node"
    negative: bool


_Node = _Set | _Sequence | _Choice | _Times | _Edge | _Look

_DIGIT: list[_Range] = [(48, 57)]
_WORD: list[_Range] = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE_BOTH: list[_Range] = [
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
_SPACE_EITHER: list[_Range] = [*_SPACE_BOTH, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
_NEWLINE: list[_Range] = [(10, 10)]
_LINE_ENDS: list[_Range] = [(10, 10), (13, 13), (0x2028, 0x2029)]
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


# no letter or digit stands behind it
_LAST_LETTER = 0x32400


@lru_cache(maxsize=1)
def _unicode_digits() -> tuple[_Range, ...]:
    r"""What Python's `\d` takes."""
    return tuple((match.start(), match.end() - 1) for match in re.finditer(r"\d+", _all_letters()))


@lru_cache(maxsize=1)
def _unicode_words() -> tuple[_Range, ...]:
    r"""A superset of what Python's `\w` takes: gaps shorter than 32 code points count as words, to keep it short."""
    gaps = [(match.start(), match.end() - 1) for match in re.finditer(r"\W{32,}", _all_letters())]
    gaps = [gap for gap in gaps if gap[0] > 0x7F and gap[1] < _LAST_LETTER - 1]
    return (*_WORD, *complement_ranges([(0, 0x7F), *gaps, (_LAST_LETTER, 0xE00FF), (0xE01F0, 0x10FFFF)]))


def _all_letters() -> str:
    return array("I", range(_LAST_LETTER)).tobytes().decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")


def _shorthand(letter: str) -> _Set:
    if letter in "dD":
        narrow, wide = tuple(_DIGIT), _unicode_digits()
    elif letter in "wW":
        narrow, wide = tuple(_WORD), _unicode_words()
    else:
        narrow, wide = tuple(_SPACE_BOTH), tuple(_SPACE_EITHER)
    return _invert(_Set(narrow, wide)) if letter.isupper() else _Set(narrow, wide)


def _invert(item: _Set) -> _Set:
    return _Set(tuple(complement_ranges(item.wide)), tuple(complement_ranges(item.narrow)))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0
        self.depth = 0

    def fail(self, message: str, unsupported: bool = False) -> PatternError:
        return PatternError(f"{message} at position {self.position} of {_shorten(self.pattern)!r}", unsupported)

    def peek(self, count: int = 1) -> str:
        return self.pattern[self.position : self.position + count]

    def take(self, symbol: str) -> bool:
        if self.pattern.startswith(symbol, self.position):
            self.position += len(symbol)
            return True
        return False

    def parse(self) -> _Node:
        node = self.choice()
        if self.peek():
            raise self.fail("unmatched ')'")
        return node

    def choice(self) -> _Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.fail(f"groups nested over {_MAX_DEPTH} deep", unsupported=True)
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def sequence(self) -> _Node:
        parts: list[_Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.quantified())
        return _Sequence(tuple(parts))

    def quantified(self) -> _Node:
        node = self.atom()
        while True:
            bounds = self.quantifier()
            if bounds is None:
                return node
            if isinstance(node, _Edge | _Look):
                raise self.fail("a quantifier behind an assertion")
            low, high = bounds
            if high is not None and low > high:
                raise self.fail("a repetition whose least count is over its greatest")
            if low > _MAX_REPEAT:
                raise self.fail(f"a repetition over {_MAX_REPEAT} times", unsupported=True)
            node = _Times(node, low, high)
            self.take("?")
            if self.peek() in ("*", "+"):
                raise self.fail("two quantifiers in a row")

    def quantifier(self) -> tuple[int, int | None] | None:
        for symbol, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(symbol):
                return bounds
        if self.peek() != "{":
            return None
        end = self.pattern.find("}", self.position)
        low, comma, high = self.pattern[self.position + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not low and comma and _is_number(high):
            raise self.fail("a repetition without a least count, which dialects read differently", unsupported=True)
        if not _is_number(low) or (high and not _is_number(high)):
            # outside unicode mode a brace that opens no repetition is itself
            return None
        self.position = end + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def atom(self) -> _Node:
        symbol = self.peek()
        if symbol in ("*", "+", "?"):
            raise self.fail("nothing to repeat")
        self.position += 1
        if symbol in ("^", "$"):
            return _Edge(symbol)
        if symbol == ".":
            return _Set(tuple(complement_ranges(_LINE_ENDS)), tuple(complement_ranges(_NEWLINE)))
        if symbol == "(":
            return self.group()
        if symbol == "[":
            return self.brackets()
        if symbol == "\\":
            return self.escape(in_class=False)
        return _point(ord(symbol))

    def group(self) -> _Node:
        look: bool | None = None
        if self.take("?:"):
            pass
        elif self.take("?="):
            look = False
        elif self.take("?!"):
            look = True
        elif self.peek(3) in ("?<=", "?<!"):
            raise self.fail("look-behind", unsupported=True)
        elif self.take("?<") or self.take("?P<"):
            end = self.pattern.find(">", self.position)
            if end < 0 or not self.pattern[self.position : end].isidentifier():
                raise self.fail("a group name that is not one")
            self.position = end + 1
        elif self.peek() == "?":
            raise self.fail("an inline flag or a group that ECMA-262 does not have", unsupported=True)
        node = self.choice()
        if not self.take(")"):
            raise self.fail("a group that is not closed")
        return node if look is None else _Look(node, look)

    def escape(self, in_class: bool) -> _Set:
        letter = self.peek()
        if not letter:
            raise self.fail("a backslash at the end")
        self.position += 1
        if letter in "dDwWsS":
            return _shorthand(letter)
        if letter in _CONTROLS:
            return _point(_CONTROLS[letter])
        if letter == "b" and in_class:
            return _point(8)
        if letter in "bB":
            raise self.fail("a word boundary", unsupported=True)
        if letter == "0" and not self.peek().isdigit():
            return _point(0)
        if letter.isdigit() or letter == "k":
            raise self.fail("a back-reference", unsupported=True)
        if letter in "pP":
            raise self.fail("a Unicode property", unsupported=True)
        if letter == "c" and self.peek().isascii() and self.peek().isalpha():
            self.position += 1
            return _point(ord(self.pattern[self.position - 1]) % 32)
        for mark, count in (("x", 2), ("u", 4)):
            if letter == mark:
                return _point(self.hexadecimal(count))
        if letter.isascii() and letter.isalpha():
            raise self.fail(f"an escape that dialects read differently, \\{letter}", unsupported=True)
        return _point(ord(letter))

    def hexadecimal(self, count: int) -> int:
        if count == 4 and self.take("{"):
            end = self.pattern.find("}", self.position)
            count = end - self.position
            value = self.digits(count)
            self.position += 1
            return value
        value = self.digits(count)
        if 0xD800 <= value < 0xDC00 and self.take("\\u"):
            low = self.digits(4)
            if not 0xDC00 <= low < 0xE000:
                raise self.fail("half a surrogate pair")
            return 0x10000 + ((value - 0xD800) << 10) + (low - 0xDC00)
        return value

    def digits(self, count: int) -> int:
        value = self.peek(count) if count > 0 else ""
        if len(value) != max(count, 1) or any(letter not in "0123456789abcdefABCDEF" for letter in value):
            raise self.fail("a hexadecimal escape that is not complete")
        self.position += count
        if int(value, 16) > 0x10FFFF:
            raise self.fail("a code point over U+10FFFF")
        return int(value, 16)

    def brackets(self) -> _Set:
        inverted = self.take("^")
        narrow: list[_Range] = []
        wide: list[_Range] = []
        while not self.take("]"):
            if not self.peek():
                raise self.fail("a character class that is not closed")
            item = self.class_atom()
            low = _single(item)
            if low is not None and self.peek() == "-" and self.peek(2)[1:] not in ("]", ""):
                self.position += 1
                high = _single(self.class_atom())
                if high is None:
                    raise self.fail("a range that ends in a class of characters")
                if high < low:
                    raise self.fail("a range whose ends are out of order")
                item = _Set(((low, high),), ((low, high),))
            narrow.extend(item.narrow)
            wide.extend(item.wide)
        result = _Set(tuple(narrow), tuple(wide))
        return _invert(result) if inverted else result

    def class_atom(self) -> _Set:
        if self.take("\\"):
            return self.escape(in_class=True)
        symbol = self.peek()
        if not symbol:
            raise self.fail("a character class that is not closed")
        self.position += 1
        return _point(ord(symbol))


def _point(value: int) -> _Set:
    return _Set(((value, value),), ((value, value),))


def _single(item: _Set) -> int | None:
    if len(item.narrow) == 1 and item.narrow == item.wide and item.narrow[0][0] == item.narrow[0][1]:
        return item.narrow[0][0]
    return None


def _is_number(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) < 10


def _has_edges(node: _Node) -> bool:
    """Whether an assertion stands anywhere in `node`."""
    if isinstance(node, _Edge | _Look):
        return True
    if isinstance(node, _Sequence | _Choice):
        return any(_has_edges(part) for part in node.parts)
    return isinstance(node, _Times) and _has_edges(node.part)


def _consumes(node: _Node) -> bool:
    """Whether every match of `node` is at least one character long."""
    if isinstance(node, _Set):
        return True
    if isinstance(node, _Sequence):
        return any(_consumes(part) for part in node.parts)
    if isinstance(node, _Choice):
        return all(_consumes(part) for part in node.parts)
    return isinstance(node, _Times) and node.low > 0 and _consumes(node.part)


def _plain(node: _Node, wide: bool) -> Language:
    """The language of a node without assertions."""
    if isinstance(node, _Set):
        return chars(node.wide if wide else node.narrow)
    if isinstance(node, _Sequence):
        return cat(*(_literal_runs(node.parts, wide)))
    if isinstance(node, _Choice):
        return alt(*(_plain(part, wide) for part in node.parts))
    if isinstance(node, _Times):
        return repeat(_plain(node.part, wide), node.low, node.high)
    raise TypeError(f"an assertion where none was expected: {node!r}")


def _literal_runs(parts: tuple[_Node, ...], wide: bool) -> list[Language]:
    found: list[Language] = []
    run = ""
    for part in parts:
        point = _single(part) if isinstance(part, _Set) else None
        if point is not None and not 0xD800 <= point <= 0xDFFF:
            run += chr(point)
            continue
        if run:
            found.append(text(run))
            run = ""
        found.append(_plain(part, wide))
    if run:
        found.append(text(run))
    return found


class _Translator:
    """Builds, for a node and the language of what follows, the language of both; assertions become intersections."""

    def __init__(self, wide: bool, fail: Callable[..., PatternError], plain: dict[tuple[int, bool], Language]) -> None:
        self.wide = wide
        self.fail = fail
        self.steps = 0
        self._plain = plain

    def translate(self, node: _Node, rest: Language, at_start: bool) -> Language:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise self.fail("assertions in too many alternatives", unsupported=True)
        if not _has_edges(node):
            return cat(self.plain(node), rest)
        if isinstance(node, _Edge):
            if node.symbol == "^":
                return rest if at_start else EMPTY
            end = alt(EPSILON, text("\n")) if self.wide else EPSILON
            return both(rest, end)
        if isinstance(node, _Look):
            ahead = _Translator(self.wide ^ node.negative, self.fail, self._plain).translate(
                node.part, ANY_TEXT, at_start
            )
            return both(rest, negate(ahead) if node.negative else ahead)
        if isinstance(node, _Choice):
            return alt(*(self.translate(part, rest, at_start) for part in node.parts))
        if isinstance(node, _Sequence):
            return self.sequence(node.parts, rest, at_start)
        if isinstance(node, _Times):
            return self.times(node, rest, at_start)
        raise TypeError(f"not a pattern: {node!r}")

    def plain(self, node: _Node) -> Language:
        """The language of a node without assertions; one for both readings where they agree."""
        key = (id(node), self.wide and not _is_read_alike(node))
        if key not in self._plain:
            self._plain[key] = _plain(node, self.wide)
        return self._plain[key]

    def sequence(self, parts: tuple[_Node, ...], rest: Language, at_start: bool) -> Language:
        starts = []
        for part in parts:
            starts.append(at_start)
            if at_start and not isinstance(part, _Edge | _Look):
                if _consumes(part):
                    at_start = False
                elif any(_has_edges(later) for later in parts[len(starts) :]):
                    later = _Sequence(parts[len(starts) :])
                    if _mentions_start(later):
                        raise self.fail("a ^ behind something optional", unsupported=True)
                    at_start = False
        for part, start in zip(reversed(parts), reversed(starts), strict=True):
            rest = self.translate(part, rest, start)
        return rest

    def times(self, node: _Times, rest: Language, at_start: bool) -> Language:
        if node.high is None or node.high > 1 or node.low > 1:
            raise self.fail("an assertion inside a repetition", unsupported=True)
        once = self.translate(node.part, rest, at_start)
        return once if node.low else alt(once, rest)


def _mentions_start(node: _Node) -> bool:
    if isinstance(node, _Edge):
        return node.symbol == "^"
    if isinstance(node, _Sequence | _Choice):
        return any(_mentions_start(part) for part in node.parts)
    return isinstance(node, _Times | _Look) and _mentions_start(node.part)


def _is_read_alike(node: _Node) -> bool:
    """Whether the dialects agree on every part of `node`."""
    if isinstance(node, _Set):
        return node.narrow == node.wide
    if isinstance(node, _Edge):
        return node.symbol == "^"
    if isinstance(node, _Sequence | _Choice):
        return all(map(_is_read_alike, node.parts))
    return _is_read_alike(node.part)


@text_cache
def compile_pattern(pattern: str) -> Pattern:
    """Return the texts in which `pattern` is found.

    Raises:
        PatternError: not an ECMA-262 expression, or one that is no regular language.
    """
    if len(pattern) > _MAX_LENGTH:
        raise PatternError(f"a pattern of {len(pattern)} characters; {_MAX_LENGTH} is the most", unsupported=True)
    parser = _Parser(pattern)
    node = parser.parse()

    # by the nodes' ids, which live as long as `node`
    plain: dict[tuple[int, bool], Language] = {}

    def search(node: _Node, wide: bool) -> Language:
        translator = _Translator(wide, parser.fail, plain)
        if not _mentions_start(node):
            return cat(ANY_TEXT, translator.translate(node, ANY_TEXT, False))
        at_start = translator.translate(node, ANY_TEXT, True)
        later = translator.translate(node, ANY_TEXT, False)
        return alt(at_start, cat(repeat(ANY_CHAR, 1, None), later))

    narrow = search(node, wide=False)
    return Pattern(narrow, narrow if _is_read_alike(node) else search(node, wide=True))


def _shorten(value: str, limit: int = 60) -> str:
    return value if len(value) <= limit else value[: limit - 3] + "..."
