r"""EBNF (GBNF and W3C style) -> grammar.

In:  grammar text and the name of its start rule.
Out: `parse_ebnf(text, start) -> Grammar`; guides/grammar.py spells it for the engines.

    name ::= expression             `-`, `_` and `.` may stand inside a name; a body may run over lines
    "text" 'text' [a-z] [^a-z] .    escapes \n \r \t \xHH \uHHHH \UHHHHHHHH; `.` is any character, line ends included
    x* x+ x? x{2} x{2,} x{2,4}      (grouping)   a | b
    # comment   // comment   /* comment */          [#x20-#x7E] W3C code points

Errors name line and column.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from gd_plugin.errors import GuideTooLargeError, InvalidGuideError, UnsatisfiableGuideError, UnsupportedGuideError
from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.expression import (
    ANYTHING,
    NOTHING,
    CharSet,
    Literal,
    Node,
    Reference,
    char_set,
    complement,
    either,
    num_positions,
    repeat,
    sequence,
)
from gd_plugin.guides.grammar import Grammar

__all__ = ["Scanner", "checked_grammar", "parse_ebnf", "read_escape"]

_MAX_NESTING = 100
_MAX_POSITIONS = 1_000_000
_SPACE = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.S)
_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.A)
_REPEAT = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_W3C_CLASS = re.compile(r"\^?(?:#x[0-9A-Fa-f]{2,6}(?:-#x[0-9A-Fa-f]{2,6})?)+")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "b": "\b", "f": "\f", "v": "\v"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_WRITE_RULES = "write rules as 'name ::= ...'"
_WRITE_CODES = r"write a code point as \xHH, \uHHHH or \UHHHHHHHH; one past U+FFFF needs \U, not a surrogate pair"
_NAME_THE_START = "define it; Guide.ebnf also takes the name of another rule as start=..."


@dataclass
class Scanner:
    """Grammar text and a position in it.

    Attributes:
        text: the whole text.
        position: index of the next character.
    """

    text: str
    position: int = 0

    def __post_init__(self) -> None:
        # before anything is read: a longer text takes seconds, and is too large even where nothing is repeated
        if len(self.text) > _MAX_POSITIONS:
            raise GuideTooLargeError(
                f"line 1, column 1: the grammar's text has {len(self.text)} characters, over {_MAX_POSITIONS}",
                pointer="line 1, column 1",
                limit="max_grammar_characters",
                value=len(self.text),
                hint="use Guide.choice for a list of texts, or shorten the grammar",
            )

    def place(self, position: int | None = None) -> str:
        """Return line and column of a position, counted from 1."""
        at = self.position if position is None else position
        line = self.text.count("\n", 0, at) + 1
        return f"line {line}, column {at - (self.text.rfind(chr(10), 0, at) + 1) + 1}"

    def fail(self, message: str, position: int | None = None, keyword: str | None = None, *, hint: str) -> NoReturn:
        """Raise the error of a malformed grammar, with its place in front."""
        place = self.place(position)
        raise InvalidGuideError(f"{place}: {message}", pointer=place, keyword=keyword, hint=hint)

    def refuse(self, feature: str, hint: str, position: int | None = None) -> NoReturn:
        """Raise the error of a construct that no backend enforces."""
        place = self.place(position)
        raise UnsupportedGuideError(f"{place}: {feature} cannot be enforced", pointer=place, keyword=feature, hint=hint)

    def peek(self) -> str:
        """Return the next character, "" at the end."""
        return self.text[self.position : self.position + 1]

    def take(self, pattern: "re.Pattern[str]") -> "re.Match[str] | None":
        """Match at the position and move behind the match."""
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match


@text_cache
def parse_ebnf(text: str, start: str = "root") -> Grammar:
    """Return the grammar, without rules that the start rule never reaches.

    Raises:
        InvalidGuideError: syntax, an undefined or duplicate rule, no start rule; names line and column.
        UnsupportedGuideError: look-ahead and other constructs beyond context-free grammars.
        UnsatisfiableGuideError: no text matches.
        GuideTooLargeError: nested too deeply, or too large with its repeats written out.
    """
    return _Parser(Scanner(text)).parse(start)


class _Parser:
    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.rules: dict[str, Node] = {}
        self.places: dict[str, int] = {}
        self.uses: list[tuple[str, int]] = []

    def parse(self, start: str) -> Grammar:
        scanner = self.scanner
        self._skip()
        while scanner.peek():
            self._rule()
            self._skip()
        return checked_grammar(scanner, self.rules, self.uses, start, _NAME_THE_START)

    def _skip(self) -> None:
        self.scanner.take(_SPACE)

    def _rule(self) -> None:
        scanner = self.scanner
        begin = scanner.position
        name = scanner.take(_NAME)
        if name is None:
            scanner.fail(f"expected a rule, found {scanner.peek()!r}", hint=_WRITE_RULES)
        self._skip()
        if not scanner.text.startswith("::=", scanner.position):
            found = scanner.peek() or "the end"
            scanner.fail(f"expected '::=' after the rule name {name.group()!r}, found {found!r}", hint=_WRITE_RULES)
        scanner.position += 3
        if name.group() in self.rules:
            first = scanner.place(self.places[name.group()])
            scanner.fail(
                f"rule {name.group()!r} is defined twice, first at {first}",
                begin,
                name.group(),
                hint="rename one, or join them with |",
            )
        self.places[name.group()] = begin
        self.rules[name.group()] = self._alternatives(0)
        if scanner.peek() == ";":
            scanner.position += 1

    def _alternatives(self, depth: int) -> Node:
        return read_alternatives(self.scanner, depth, self._sequence)

    def _sequence(self, depth: int) -> Node:
        scanner = self.scanner
        parts: list[Node] = []
        while True:
            self._skip()
            if self._ends_sequence():
                break
            item = self._element(depth)
            parts.append(self._repeats(item))
        if not parts:
            scanner.fail("an alternative is empty", hint='write "" where nothing may stand')
        return sequence(parts)

    def _ends_sequence(self) -> bool:
        """Tell whether the next thing is `|`, `)`, `;`, the end, or the head of another rule."""
        scanner = self.scanner
        if scanner.peek() in ("", "|", ")", ";"):
            return True
        name = _NAME.match(scanner.text, scanner.position)
        if name is None:
            return False
        space = _SPACE.match(scanner.text, name.end())
        return scanner.text.startswith("::=", space.end() if space else name.end())

    def _element(self, depth: int) -> Node:
        scanner = self.scanner
        begin = scanner.position
        character = scanner.peek()
        if character in ('"', "'"):
            return self._literal(character)
        if character == "[":
            return read_class(scanner)
        if character == ".":
            scanner.position += 1
            return ANYTHING
        if character == "(":
            scanner.position += 1
            if scanner.peek() in ("=", "!"):
                scanner.refuse("look-ahead", "write the condition into the rules", begin)
            inner = self._alternatives(depth + 1)
            if scanner.peek() != ")":
                scanner.fail(f"the group opened at {scanner.place(begin)} is not closed", hint="close it with )")
            scanner.position += 1
            return inner
        name = scanner.take(_NAME)
        if name is not None:
            if scanner.peek() == "(":
                scanner.refuse(f"the macro {name.group()}(...)", "use a structural tag guide", begin)
            self.uses.append((name.group(), begin))
            return Reference(name.group())
        if character == "-":
            scanner.refuse("the exception A - B", "write the remaining alternatives out", begin)
        if character == "<":
            scanner.refuse("a token by name or id", "write its text as a literal", begin)
        if scanner.text.startswith("/*", begin):
            scanner.fail("the comment is not closed", begin, hint="close it with */")
        return scanner.fail(
            f"expected a literal, a class, a rule or a group, found {character!r}",
            hint='write text as "text", sets of characters as [a-z]',
        )

    def _repeats(self, item: Node) -> Node:
        scanner = self.scanner
        while True:
            self._skip()
            begin = scanner.position
            character = scanner.peek()
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(character)
            if bounds is not None:
                scanner.position += 1
                item = repeat(item, *bounds)
            elif character == "{":
                item = repeat(item, *self._bounds(begin))
            else:
                return item

    def _bounds(self, begin: int) -> tuple[int, int | None]:
        match = self.scanner.take(_REPEAT)
        if match is None or not (match[1] or match[3]) or max(len(match[1]), len(match[3])) > 9:
            self.scanner.fail("this is no repeat", begin, hint="write {2}, {2,}, {2,4} or {,4}, of nine digits at most")
        low = int(match[1] or 0)
        high = low if not match[2] else int(match[3]) if match[3] else None
        if high is not None and high < low:
            self.scanner.fail(
                f"the repeat {match.group()} has its bounds the wrong way round",
                begin,
                hint="write the lower one first",
            )
        return low, high

    def _literal(self, quote: str) -> Node:
        scanner = self.scanner
        begin = scanner.position
        scanner.position += 1
        characters: list[str] = []
        while scanner.peek() != quote:
            if scanner.peek() in ("", "\n"):
                scanner.fail(
                    f"the literal opened at {scanner.place(begin)} is not closed",
                    hint=f"close it with {quote}, and write a line end as \\n",
                )
            if scanner.peek() == "\\":
                characters.append(chr(read_escape(scanner)))
            else:
                characters.append(scanner.peek())
                scanner.position += 1
        scanner.position += 1
        return Literal("".join(characters))


def read_alternatives(scanner: Scanner, depth: int, read_sequence: Callable[[int], Node]) -> Node:
    """Read sequences with `|` between them, `depth` groups deep.

    Raises:
        GuideTooLargeError: too deep.
    """
    if depth > _MAX_NESTING:
        raise GuideTooLargeError(
            f"{scanner.place()}: the grammar nests over {_MAX_NESTING} groups",
            pointer=scanner.place(),
            limit="max_nesting",
            value=depth,
            hint="name the inner parts as rules",
        )
    options = [read_sequence(depth)]
    while scanner.peek() == "|":
        scanner.position += 1
        options.append(read_sequence(depth))
    return either(options)


def read_class(scanner: Scanner) -> CharSet:
    """Read `[...]` and return its characters."""
    begin = scanner.position
    scanner.position += 1
    end = scanner.text.find("]", begin)
    if end > 0 and _W3C_CLASS.fullmatch(scanner.text, scanner.position, end):
        return _w3c_class(scanner, begin, end)
    negated = scanner.peek() == "^"
    scanner.position += negated
    ranges: list[tuple[int, int]] = []
    while scanner.peek() != "]":
        low = _class_character(scanner, begin)
        high = low
        if scanner.peek() == "-" and scanner.text[scanner.position + 1 : scanner.position + 2] not in ("]", ""):
            scanner.position += 1
            high = _class_character(scanner, begin)
            if high < low:
                scanner.fail(
                    f"the range {chr(low)!r}-{chr(high)!r} is the wrong way round",
                    begin,
                    hint="write the lower end first",
                )
        ranges.append((low, high))
    scanner.position += 1
    if not ranges and not negated:
        scanner.fail("the class [] matches nothing", begin, hint='write "" where nothing may stand')
    found = char_set(ranges)
    return complement(found.ranges) if negated else found


def _w3c_class(scanner: Scanner, begin: int, end: int) -> CharSet:
    body = scanner.text[begin + 1 : end]
    scanner.position = end + 1
    ranges = []
    for low, high in re.findall(r"#x([0-9A-Fa-f]+)(?:-#x([0-9A-Fa-f]+))?", body):
        first, last = int(low, 16), int(high or low, 16)
        if last > 0x10FFFF or last < first:
            scanner.fail(
                "the class has a code point past #x10FFFF, or a range the wrong way round",
                begin,
                hint="write ranges as #x20-#x7E, the lower end first",
            )
        ranges.append((first, last))
    found = char_set(ranges)
    return complement(found.ranges) if body.startswith("^") else found


def _class_character(scanner: Scanner, begin: int) -> int:
    character = scanner.peek()
    if character in ("", "\n"):
        scanner.fail(
            f"the class opened at {scanner.place(begin)} is not closed",
            hint="close it with ], and write a line end as \\n, a bracket as \\]",
        )
    if character == "\\":
        return read_escape(scanner)
    scanner.position += 1
    return ord(character)


def read_escape(scanner: Scanner) -> int:
    """Read an escape at the position and return its code point."""
    begin = scanner.position
    letter = scanner.text[begin + 1 : begin + 2]
    scanner.position = begin + 2
    if letter in _HEX_DIGITS:
        count = _HEX_DIGITS[letter]
        digits = scanner.text[begin + 2 : begin + 2 + count]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{count}}}", digits):
            scanner.fail(f"\\{letter} without {count} hexadecimal digits", begin, hint=_WRITE_CODES)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            scanner.fail(f"\\{letter}{digits} is not a character", begin, hint=_WRITE_CODES)
        scanner.position += count
        return code
    if letter in _ESCAPES:
        return ord(_ESCAPES[letter])
    if not letter or letter.isalnum() or letter == "\n":
        scanner.fail(f"unknown escape \\{letter}", begin, hint="write a backslash as \\\\")
    return ord(letter)


def checked_grammar(
    scanner: Scanner, rules: dict[str, Node], uses: list[tuple[str, int]], start: str, name_the_start: str
) -> Grammar:
    """Return the grammar of `rules`, or say what is wrong with them as a whole.

    Raises:
        InvalidGuideError: no rule, no start rule, or a use of an undefined one.
        UnsatisfiableGuideError: no text matches.
        GuideTooLargeError: over a million characters with its repeats written out.
    """
    # names with a space are our own helpers, not the writer's rules
    written = [name for name in rules if " " not in name][:8]
    found = f"there are {', '.join(written)}" if written else "there are no rules"
    for name, position in uses:
        if name not in rules:
            scanner.fail(
                f"rule {name!r} is not defined; {found}", position, name, hint="define it, or correct the name"
            )
    if start not in rules:
        scanner.fail(f"the start rule {start!r} is not defined; {found}", 0, start, hint=name_the_start)
    size = sum(map(num_positions, rules.values()))
    if size > _MAX_POSITIONS:
        raise GuideTooLargeError(
            f"line 1, column 1: the grammar has {size} characters with its repeats written out, over {_MAX_POSITIONS}",
            pointer="line 1, column 1",
            limit="max_grammar_positions",
            value=size,
            hint="lower the repeat counts",
        )
    grammar = Grammar(rules, start).productive()
    if grammar.rules[start] == NOTHING:
        raise UnsatisfiableGuideError(
            f"line 1, column 1: no text matches the rule {start!r}: every way through it goes on for ever",
            pointer="line 1, column 1",
            keyword=start,
            hint="give the recursion an alternative that ends it",
        )
    return grammar
