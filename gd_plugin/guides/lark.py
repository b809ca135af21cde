r"""Lark -> grammar.

In:  grammar text in Lark's notation, with the rule `start`.
Out: `parse_lark(text) -> Grammar`, the same normal form as EBNF, so that every engine gets the same language.

    rule: expansion | expansion     TERMINAL: ...     ?rule, !rule, rule.2 and `-> alias` change nothing in the language
    "text" "text"i "a".."z" /regex/ims    x* x+ x? [x]   x~2 x~2..4 x{2,4}     %ignore X    %import common.WS
    // comment   # comment

The language is the context-free one: any division of the text into terminals counts, as with Lark's Earley parser and its
dynamic_complete lexer, not a lexer's longest match. Regexes are those of Python's `re`. What is ignored may stand before,
between and behind terminals, not inside them. Source: Lark's grammar reference.
"""

import re
from typing import NoReturn

from gd_plugin.errors import GuideError
from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.ebnf import Scanner, checked_grammar, read_alternatives, read_escape
from gd_plugin.guides.expression import Literal, Node, Reference, char_set, either, repeat, sequence
from gd_plugin.guides.grammar import Grammar
from gd_plugin.guides.regex import parse_regex

__all__ = ["parse_lark"]

_IGNORED = " ignored "
_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_]\w*", re.A)
_HEAD = re.compile(r"[?!]{0,2}([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:(?!:)", re.A)
_ATTRIBUTES = re.compile(r"[?!]{0,2}[A-Za-z_]\w*(?:\.-?\d+)?\[[^\]\n]*\][ \t]*:", re.A)
_DIRECTIVE = re.compile(r"%\w+")
_TIMES = re.compile(r"~\s*(\d{1,9})(?!\d)(?:\s*\.\.\s*(\d{1,9})(?!\d))?|\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?)?\s*\}")
_ALIAS = re.compile(r"->\s*\w+")
_REGEX = re.compile(r"/((?:\\.|[^/\\\n])+)/([imslux]*)")
_IMPORT = re.compile(r"[ \t]*common[ \t]*\.[ \t]*(?:(\w+)[ \t]*(?:->[ \t]*(\w+))?)")
_IMPORT_LIST = re.compile(r"[ \t]*common[ \t]*\(([\w\s,]+)\)")

# Lark's common.lark, written as regexes of Python's re
_INT, _DECIMAL = "[0-9]+", r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_EXPONENT = "[eE][+-]?[0-9]+"
_FLOAT = f"(?:[0-9]+{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": _INT,
    "SIGNED_INT": f"[+-]?{_INT}",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|{_INT})",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_INT})",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}


@text_cache
def parse_lark(text: str) -> Grammar:
    """Return the grammar, without rules that `start` never reaches.

    Raises:
        InvalidGuideError: syntax, an undefined or duplicate rule, no rule `start`; names line and column.
        UnsupportedGuideError: templates, tokens by name, rule attributes and other extensions.
        UnsatisfiableGuideError: no text matches.
        GuideTooLargeError: nested too deeply, or too large with its repeats written out.
    """
    return _Parser(Scanner(text)).parse()


class _Parser:
    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.rules: dict[str, Node] = {}
        self.places: dict[str, int] = {}
        self.uses: list[tuple[str, int]] = []
        self.ignored: list[Node] = []
        # whether the body being read is a terminal's: nothing is ignored inside one
        self.in_terminal = False

    def parse(self) -> Grammar:
        scanner = self.scanner
        self._skip()
        while scanner.peek():
            if scanner.peek() == "%":
                self._directive()
            else:
                self._definition()
            self._skip()
        rules = dict(self.rules)
        rules[_IGNORED] = repeat(either(self.ignored), 0, None) if self.ignored else Literal("")
        checked_grammar(scanner, rules, self.uses, "start", "name the first rule start")
        # what is ignored may also stand before the first terminal
        rules[" start"] = sequence([Reference(_IGNORED), Reference("start")])
        return Grammar(rules, " start").productive()

    def _skip(self) -> None:
        self.scanner.take(_SPACE)

    def _define(self, name: str, node: Node, begin: int) -> None:
        if name in self.rules:
            first = self.scanner.place(self.places[name])
            self.scanner.fail(
                f"{name!r} is defined twice, first at {first}", begin, name, hint="rename one, or join them with |"
            )
        self.places[name] = begin
        self.rules[name] = node

    def _definition(self) -> None:
        scanner = self.scanner
        begin = scanner.position
        head = scanner.take(_HEAD)
        if head is None:
            self._bad_head(begin)
        name = head.group(1)
        self.in_terminal = _is_terminal(name)
        self._define(name, self._alternatives(0), begin)

    def _bad_head(self, begin: int) -> NoReturn:
        scanner = self.scanner
        name = _NAME.match(scanner.text, begin)
        following = scanner.text[name.end() :].lstrip()[:1] if name else ""
        if following == "{":
            scanner.refuse("a template", "write its uses out as rules", begin)
        if following == "[":
            scanner.refuse("a rule attribute", "leave it out, or use another guide", begin)
        if following == ":":
            scanner.fail("'::=' is EBNF", begin, hint="write rules as 'name: ...', or use Guide.ebnf")
        scanner.fail(
            f"expected a rule, found {scanner.peek()!r}",
            begin,
            hint="write rules as 'name: ...', directives as '%name'",
        )

    def _directive(self) -> None:
        scanner = self.scanner
        begin = scanner.position
        match = scanner.take(_DIRECTIVE)
        word = match.group() if match else "%"
        if word == "%ignore":
            self.in_terminal = True
            self.ignored.append(self._alternatives(0))
        elif word == "%import":
            self._import(begin)
        else:
            scanner.refuse(f"the directive {word}", "there are %ignore and %import common.NAME", begin)

    def _import(self, begin: int) -> None:
        scanner = self.scanner
        listed = scanner.take(_IMPORT_LIST)
        single = None if listed else scanner.take(_IMPORT)
        if listed:
            names = [(name.strip(), name.strip()) for name in listed.group(1).split(",") if name.strip()]
        elif single:
            names = [(single.group(1), single.group(2) or single.group(1))]
        else:
            scanner.refuse("an import of another grammar", "there is %import common.NAME", begin)
        for name, alias in names:
            if name not in _COMMON:
                scanner.fail(f"common has no {name!r}", begin, name, hint=f"there are {', '.join(_COMMON)}")
            self._define(alias, parse_regex(_COMMON[name]), begin)

    def _alternatives(self, depth: int) -> Node:
        return read_alternatives(self.scanner, depth, self._sequence)

    def _sequence(self, depth: int) -> Node:
        scanner = self.scanner
        parts: list[Node] = []
        self._skip()
        while not self._ends_sequence():
            parts.append(self._repeats(self._atom(depth)))
            self._skip()
        # an empty alternative is legal in Lark; an alias names a tree node and changes nothing
        scanner.take(_ALIAS)
        self._skip()
        return sequence(parts)

    def _ends_sequence(self) -> bool:
        scanner = self.scanner
        if scanner.peek() in ("", "|", ")", "]", "%") or scanner.text.startswith("->", scanner.position):
            return True
        if _ATTRIBUTES.match(scanner.text, scanner.position):
            scanner.refuse("a rule attribute", "leave it out, or use another guide")
        return _HEAD.match(scanner.text, scanner.position) is not None

    def _atom(self, depth: int) -> Node:
        scanner = self.scanner
        begin = scanner.position
        character = scanner.peek()
        if character in "([":
            scanner.position += 1
            inner = self._alternatives(depth + 1)
            end = {"(": ")", "[": "]"}[character]
            if scanner.peek() != end:
                scanner.fail(f"the group opened at {scanner.place(begin)} is not closed", hint=f"close it with {end!r}")
            scanner.position += 1
            return inner if character == "(" else repeat(inner, 0, 1)
        if character == '"':
            return self._terminal(self._text_or_range())
        if character == "/":
            return self._terminal(self._regex())
        name = scanner.take(_NAME)
        if name is not None:
            if scanner.peek() == "{" and _TIMES.match(scanner.text, scanner.position) is None:
                scanner.refuse("a template", "write its uses out as rules", begin)
            self.uses.append((name.group(), begin))
            node: Node = Reference(name.group())
            return self._terminal(node) if _is_terminal(name.group()) else node
        if character in "<@&~":
            scanner.refuse(f"the extension {character!r}", "write it as text, rules and regexes", begin)
        return scanner.fail(
            f"expected a literal, a regex, a name or a group, found {character!r}",
            hint='write text as "text", a regex as /regex/',
        )

    def _terminal(self, node: Node) -> Node:
        return node if self.in_terminal else sequence([node, Reference(_IGNORED)])

    def _text_or_range(self) -> Node:
        scanner = self.scanner
        begin = scanner.position
        text = self._string()
        if scanner.text.startswith("..", scanner.position):
            scanner.position += 2
            last = self._string() if scanner.peek() == '"' else ""
            if len(text) != 1 or len(last) != 1 or last < text:
                scanner.fail("a range is of two characters in order", begin, hint='write "a".."z"')
            return char_set([(ord(text), ord(last))])
        if scanner.peek() == "i":
            scanner.position += 1
            return parse_regex(f"(?i:{re.escape(text)})")
        return Literal(text)

    def _string(self) -> str:
        scanner = self.scanner
        begin = scanner.position
        scanner.position += 1
        characters: list[str] = []
        while scanner.peek() != '"':
            if scanner.peek() in ("", "\n"):
                scanner.fail(
                    f"the literal opened at {scanner.place(begin)} is not closed",
                    hint='close it with ", and write a line end as \\n',
                )
            if scanner.peek() == "\\":
                characters.append(chr(read_escape(scanner)))
            else:
                characters.append(scanner.peek())
                scanner.position += 1
        scanner.position += 1
        return "".join(characters)

    def _regex(self) -> Node:
        scanner = self.scanner
        begin = scanner.position
        match = scanner.take(_REGEX)
        if match is None:
            scanner.fail(
                "the regex is not closed", begin, hint="close it with / on the same line; write a slash as \\/"
            )
        pattern = match.group(1).replace("\\/", "/")
        flags = match.group(2).replace("u", "").replace("l", "")
        try:
            return parse_regex(f"(?{flags}:{pattern})" if flags else pattern)
        except GuideError as error:
            place = scanner.place(begin)
            raise error.placed(f"{place}: {error.message}", place) from error

    def _repeats(self, item: Node) -> Node:
        scanner = self.scanner
        while True:
            begin = scanner.position
            bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(scanner.peek())
            if bounds is not None and _HEAD.match(scanner.text, begin) is None:
                scanner.position += 1
                item = repeat(item, *bounds)
                continue
            match = scanner.take(_TIMES)
            if match is None and scanner.peek() == "~":
                scanner.fail("this is no repeat", begin, hint="write ~2, ~2..4 or {2,4}, of nine digits at most")
            if match is None:
                return item
            low = int(match[1] or match[3])
            high = int(match[2] or match[5]) if match[2] or match[5] else None if match[4] else low
            if high is not None and high < low:
                scanner.fail(
                    f"the repeat {match.group()} has its bounds the wrong way round",
                    begin,
                    hint="write the lower first",
                )
            item = repeat(item, low, high)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()
