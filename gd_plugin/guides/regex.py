"""Regexes: Python's `re` under fullmatch -> expression, the same language on every engine.

In:  a pattern that `re.compile` takes.
Out: `parse_regex(pattern) -> Node`. Adapters then ask for their engine's text:
     `grammar.to_xgrammar_ebnf(grammar.one_rule(node))`, `expression.to_rust_regex(node)` (llguidance, outlines-core).
The pattern is parsed by the standard library's own parser, and what a character class, `.` or a case-insensitive letter
matches is asked of `re` itself, so there is no second opinion about the dialect. Look-around, back-references, word
boundaries, atomic groups, possessive repeats and anchors inside the pattern are not regular or mean something else to
the engines: they are refused by name and position.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

from gd_plugin.errors import GuideTooLargeError, InvalidGuideError, UnsatisfiableGuideError, UnsupportedGuideError
from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.expression import (
    EMPTY,
    NOTHING,
    Literal,
    Node,
    Ranges,
    char_set,
    complement,
    either,
    num_positions,
    repeat,
    sequence,
)

__all__ = ["MAX_REGEX_POSITIONS", "parse_regex"]

# Longer patterns take seconds to be read.
_MAX_PATTERN = 200_000
# Nested groups: `re` recurses a few frames a level, and so do we.
_MAX_NESTING = 100
# Characters of a pattern with its repeats written out. Above it every engine takes minutes or gigabytes.
MAX_REGEX_POSITIONS = 1_000_000

# The parser of `re` itself: its tree is the only exact reading of a pattern. It has no type information.
sre: Any = import_module("re._constants")
sre_parser: Any = import_module("re._parser")

_SURROGATE = 0xD800
_NUM_SURROGATES = 0x800
_ONE_CHARACTER = frozenset({sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY})
_FLAGS_THAT_CHANGE_SETS = re.IGNORECASE | re.ASCII
_REFUSED = {
    sre.ASSERT: "look-around",
    sre.ASSERT_NOT: "look-around",
    sre.FAILURE: "look-around",
    sre.GROUPREF: "back-reference",
    sre.GROUPREF_EXISTS: "conditional group",
    sre.ATOMIC_GROUP: "atomic group",
    sre.POSSESSIVE_REPEAT: "possessive quantifier",
}
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


@text_cache
def parse_regex(pattern: str) -> Node:
    """Return the expression that `re.fullmatch(pattern, text)` matches.

    Raises:
        InvalidGuideError: `re` refuses the pattern, or warns of it where warnings are errors; names the position.
        UnsupportedGuideError: a construct no engine can enforce; names it and its position.
        UnsatisfiableGuideError: no text matches.
        GuideTooLargeError: nested too deeply, or over `MAX_REGEX_POSITIONS` with its repeats written out.
    """
    if len(pattern) > _MAX_PATTERN:
        raise GuideTooLargeError(
            f"#: the regex has {len(pattern)} characters, over {_MAX_PATTERN}",
            pointer="#",
            limit="max_regex_characters",
            value=len(pattern),
            hint="use Guide.choice for a list of texts, or shorten the pattern",
        )
    _check_nesting(pattern)
    try:
        # not re.compile: what only its code generator notices is in look-behinds, which are refused anyway
        tree = sre_parser.parse(pattern)
        flags = tree.state.flags
    except re.error as error:
        place = f"position {error.pos}" if error.pos is not None else "#"
        raise InvalidGuideError(
            f"{place}: {error.msg} in {_shorten(pattern)!r}",
            pointer=place,
            hint="guides use the syntax of Python's re module",
        ) from error
    except Warning as error:
        # where warnings are errors: `re` means to read such a set in another way some day
        raise InvalidGuideError(
            f"#: {error} in {_shorten(pattern)!r}",
            pointer="#",
            hint="escape the characters [ - & ~ | that stand for themselves inside a set",
        ) from error
    except (RecursionError, OverflowError, MemoryError) as error:
        raise GuideTooLargeError(
            f"#: the regex of {len(pattern)} characters is nested or repeated too deeply to be read",
            pointer="#",
            limit="max_nesting",
            hint="flatten the pattern, or lower its repeat counts",
        ) from error
    try:
        node = _convert(tree, flags, True, True)
    except _RefusedError as refused:
        raise _refusal(pattern, flags, refused.feature) from None
    if node == NOTHING:
        raise UnsatisfiableGuideError(
            f"#: no text matches the regex {_shorten(pattern)!r}",
            pointer="#",
            hint="look for a class without a character, such as [^\\s\\S]",
        )
    size = num_positions(node)
    if size > MAX_REGEX_POSITIONS:
        raise GuideTooLargeError(
            f"#: the regex {_shorten(pattern)!r} has {size} characters with its repeats written out, over "
            f"{MAX_REGEX_POSITIONS}",
            pointer="#",
            limit="max_regex_positions",
            value=size,
            hint="lower the repeat counts",
        )
    return node


class _RefusedError(Exception):
    def __init__(self, feature: str) -> None:
        super().__init__(feature)
        self.feature = feature


def _convert(tree: Any, flags: int, at_start: bool, at_end: bool) -> Node:
    """Convert a parsed pattern; `at_start` and `at_end` tell whether nothing can come before or behind it."""
    items = list(tree)
    places = [index for index, item in enumerate(items) if _max_width(item)]
    first, last = (places[0], places[-1]) if places else (len(items), -1)
    parts: list[Node] = []
    exact = not flags & re.IGNORECASE
    for index, (op, argument) in enumerate(items):
        if exact and op is sre.LITERAL:
            # most of most patterns
            parts.append(_character(argument))
            continue
        parts.append(_convert_item(op, argument, flags, at_start and index <= first, at_end and index >= last))
    return sequence(parts)


def _convert_item(op: Any, argument: Any, flags: int, at_start: bool, at_end: bool) -> Node:
    if op in _ONE_CHARACTER:
        return _convert_set(op, argument, flags)
    if op is sre.BRANCH:
        return either(_convert(branch, flags, at_start, at_end) for branch in argument[1])
    if op is sre.SUBPATTERN:
        _, added, removed, body = argument
        return _convert(body, (flags | added) & ~removed, at_start, at_end)
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        low, high, body = argument
        limit = None if high is sre.MAXREPEAT else int(high)
        if limit == 0:
            return EMPTY
        # text of one round stands before and behind the others, unless there is one round only
        alone = limit == 1 or not _max_width((op, argument))
        return repeat(_convert(body, flags, at_start and alone, at_end and alone), int(low), limit)
    if op is sre.AT:
        return _convert_anchor(argument, at_start, at_end)
    raise _RefusedError(_REFUSED.get(op, str(op).lower()))


def _convert_anchor(argument: Any, at_start: bool, at_end: bool) -> Node:
    if argument in (sre.AT_BOUNDARY, sre.AT_NON_BOUNDARY):
        raise _RefusedError("word boundary")
    if argument in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        holds = at_start
    else:
        # fullmatch ends at the end of the text, where `$` and `\Z` both hold
        holds = at_end
    if not holds:
        raise _RefusedError("anchor inside the pattern")
    return EMPTY


def _max_width(item: Any) -> int:
    """Characters one parsed item can match at most."""
    op = item[0]
    if op in _ONE_CHARACTER:
        return 1
    if op is sre.AT:
        return 0
    pattern = sre_parser.SubPattern(sre_parser.State(), [item])
    if op is sre.GROUPREF:
        return 1
    return int(pattern.getwidth()[1])


def _convert_set(op: Any, argument: Any, flags: int) -> Node:
    if op is sre.ANY:
        return char_set([(0, 0x10FFFF)]) if flags & re.DOTALL else complement(((10, 10),))
    if op in (sre.LITERAL, sre.NOT_LITERAL):
        text = f"[{'^' if op is sre.NOT_LITERAL else ''}{_escape(argument)}]"
    else:
        text = _set_text(argument)
    return char_set(_matched_ranges(text, flags & _FLAGS_THAT_CHANGE_SETS))


def _character(code: int) -> Node:
    return NOTHING if _SURROGATE <= code < _SURROGATE + _NUM_SURROGATES else Literal(chr(code))


def _set_text(items: Any) -> str:
    """Write a parsed character class back as a class."""
    text = ""
    for op, argument in items:
        if op is sre.NEGATE:
            text += "^"
        elif op is sre.LITERAL:
            text += _escape(argument)
        elif op is sre.RANGE:
            text += f"{_escape(argument[0])}-{_escape(argument[1])}"
        else:
            text += _CATEGORIES[argument]
    return f"[{text}]"


def _escape(code: int) -> str:
    return f"\\U{code:08x}"


@lru_cache(maxsize=1)
def _all_characters() -> str:
    return "".join(map(chr, (*range(_SURROGATE), *range(_SURROGATE + _NUM_SURROGATES, 0x110000))))


@text_cache
def _matched_ranges(text: str, flags: int) -> Ranges:
    """Return the code points that the class `text` matches, by asking `re`: runs of matches are ranges."""
    found = []
    for match in re.compile(f"{text}+", flags).finditer(_all_characters()):
        first, last = match.start(), match.end() - 1
        if first >= _SURROGATE:
            first, last = first + _NUM_SURROGATES, last + _NUM_SURROGATES
        elif last >= _SURROGATE:
            last += _NUM_SURROGATES
        found.append((first, last))
    return char_set(found).ranges


def _check_nesting(pattern: str) -> None:
    if pattern.count("(") <= _MAX_NESTING:
        return
    depth = 0
    for token, position in _tokens(pattern):
        depth += 1 if token.startswith("(") else -1 if token == ")" else 0
        if depth > _MAX_NESTING:
            raise GuideTooLargeError(
                f"position {position}: the regex nests over {_MAX_NESTING} groups",
                pointer=f"position {position}",
                limit="max_nesting",
                value=depth,
                hint="flatten the pattern",
            )


# One lexical token: escape, class, comment, group opening, anything else. Enough to tell what is a construct and what is
# a character; verbose mode's own comments are handled by the caller. What nothing closes goes on to the end of the pattern,
# so that no character is read twice.
_TOKEN = re.compile(
    r"""\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|\(\?\#[^)]*+(?:\)|\Z)|\(\?(?:P?<?[=!]|P=\w+\)|\(|>|P?<|[a-zA-Z-]*[:)])|[*+?}]\+|.""",
    re.S,
)


def _tokens(pattern: str) -> Iterator[tuple[str, int]]:
    """Yield the lexical tokens of a pattern and their positions; a group with flags only yields as a character."""
    verbose = bool(re.match(r"\(\?[a-zA-Z]*x[a-zA-Z]*\)", pattern))
    position = 0
    while match := _TOKEN.match(pattern, position):
        token = match.group()
        if verbose and token == "#":
            end = pattern.find("\n", position)
            position = len(pattern) if end < 0 else end + 1
            continue
        if not (token.startswith("(?") and token.endswith(")")) or token.startswith("(?P="):
            yield token, position
        position = match.end()


_SPELLINGS = {
    "look-around": ("(?=", "(?!", "(?<=", "(?<!"),
    "conditional group": ("(?(",),
    "atomic group": ("(?>",),
    "possessive quantifier": ("*+", "++", "?+", "}+"),
    "word boundary": (r"\b", r"\B"),
}
_ANCHORS = frozenset({"^", "$", r"\A", r"\Z", r"\z"})
_HINTS = {
    "look-around": "write the condition into the pattern itself, or use an EBNF grammar",
    "back-reference": "list the values that may repeat as alternatives",
    "anchor inside the pattern": "a guide always matches the whole text: remove the anchor",
    "word boundary": r"a guide always matches the whole text: write the neighbours out, for example \W",
    "possessive quantifier": "use the plain quantifier",
}


def _refusal(pattern: str, flags: int, feature: str) -> UnsupportedGuideError:
    place = f"position {_find(pattern, flags, feature)}"
    return UnsupportedGuideError(
        f"{place}: {feature} in {_shorten(pattern)!r} cannot be enforced by any backend",
        pointer=place,
        keyword=feature,
        hint=_HINTS.get(feature, "write the pattern without it, or use an EBNF grammar"),
        reasons=dict.fromkeys(("xgrammar", "llguidance", "outlines_core"), f"{feature} is not regular there"),
    )


def _find(pattern: str, flags: int, feature: str) -> int:
    """Return where the refused construct is. The parsed tree has no positions, so the text is searched."""
    tokens = list(_tokens(pattern))
    if feature == "back-reference":
        groups = [p for t, p in tokens if t.startswith("(?P=") or (t[0] == "\\" and t[1:].isdigit() and t != r"\0")]
        return groups[0] if groups else 0
    if feature != "anchor inside the pattern":
        return next((p for t, p in tokens if t in _SPELLINGS.get(feature, ())), 0)
    anchors = [(t, p) for t, p in tokens if t in _ANCHORS]
    for _, suspect in anchors[:64]:
        # with all other anchors gone, the pattern is refused for this one or not at all
        alone = pattern
        for token, position in reversed(anchors):
            if position != suspect:
                alone = alone[:position] + "(?:)" + alone[position + len(token) :]
        try:
            _convert(sre_parser.parse(alone), flags, True, True)
        except (_RefusedError, re.error):
            return suspect
    return anchors[0][1] if anchors else 0


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
