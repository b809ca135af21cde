"""Structural tags for llguidance: the grammar in its Lark, and where its lexer would read another language.

In:  a normal form's format (guides/structural_tag.py).
Out: `to_structural_lark(format, schema_lark)`, and `lexer_conflict(format)`, whether that would not be exact.
llguidance's lexer takes the longest match of all terminals that may stand at a place, and never goes back. Single characters
are safe from that, so literals, regexes and grammars are written as such. Free text and the parts of JSON cannot be: they
are terminals of their own, and where one may begin with a character that something else may begin or go on with, the
lexer decides for one of the two and loses the other. Such formats are found here and refused; xgrammar takes them.
"""

import json
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, NamedTuple

from gd_plugin.guides.expression import ANYTHING, Literal, Ranges, char_set, to_rust_regex, used_ranges
from gd_plugin.guides.grammar import Grammar, one_rule, to_lark
from gd_plugin.guides.regex import parse_regex
from gd_plugin.guides.structural_tag import grammar_of

__all__ = ["lexer_conflict", "to_structural_lark"]

_JSON_FIRST = {
    "object": "{",
    "array": "[",
    "string": '"',
    "boolean": "tf",
    "null": "n",
    "number": "-0123456789",
    "integer": "-0123456789",
}
_NUMBER = "-+.eE0123456789"


class _Edges(NamedTuple):
    """How texts of a format begin behind a fixed prefix, and how they could go on.

    Attributes:
        prefix: characters that every text begins with, read one by one.
        empty: whether the rest may be empty.
        first: characters that the rest may begin with, read one by one.
        long: characters that the rest may begin with, read as part of a longer terminal.
        more: characters that may follow a whole text inside a longer one, read one by one.
        more_long: the same, read as part of a longer terminal.
        used: all characters that are read one by one.
        plain: whether there are no longer terminals.
    """

    prefix: str = ""
    empty: bool = False
    first: Ranges = ()
    long: Ranges = ()
    more: Ranges = ()
    more_long: Ranges = ()
    used: Ranges = ()
    plain: bool = True

    @property
    def starts(self) -> tuple[bool, Ranges, Ranges]:
        """Whether a text may be empty; its first characters, read one by one; those read as part of more."""
        return (False, _ranges(self.prefix[0]), ()) if self.prefix else (self.empty, self.first, self.long)


_END = _Edges(empty=True)
_FREE = _Edges(empty=True, long=ANYTHING.ranges, more_long=ANYTHING.ranges, plain=False)
# ends with its first stop, so that nothing can follow inside it
_UNTIL = _Edges(long=ANYTHING.ranges, plain=False)


class _ConflictError(Exception):
    pass


def lexer_conflict(form: dict[str, Any]) -> bool:
    """Tell whether llguidance's lexer could cut a text of this format otherwise than the format means; errs towards True."""
    try:
        _edges(form)
    except _ConflictError:
        return True
    return False


def _edges(node: dict[str, Any]) -> _Edges:
    kind = node["type"]
    if kind == "const_string":
        return _text(node["value"])
    if kind == "json_schema":
        return _json(node["json_schema"])
    if kind == "regex":
        return _characters(one_rule(parse_regex(node["pattern"])))
    if kind == "grammar":
        return _characters(grammar_of(node))
    if kind == "any_text":
        return _FREE
    if kind == "sequence":
        return _joined(map(_edges, node["elements"]))
    if kind == "or":
        return _either(map(_edges, node["elements"]))
    if kind == "tag":
        return _tag(node, "")
    if kind == "triggered_tags":
        return _triggered(node)
    if kind == "tags_with_separator":
        tags = _either(_tag(tag, "") for tag in node["tags"])
        if not node["stop_after_first"]:
            tags = _joined([tags, _looped(_joined([_text(node["separator"]), tags]))])
        return tags if node["at_least_one"] else _either([tags, _END])
    item = _edges(node["content"])
    low = {"optional": 0, "star": 0, "plus": 1}.get(kind, node.get("min"))
    if kind == "optional" or node.get("max") == 1:
        return item if low else _either([item, _END])
    return _joined([item, _looped(item)]) if low else _looped(item)


def _text(text: str) -> _Edges:
    return _Edges(prefix=text, empty=True, used=_ranges(text))


def _ranges(characters: str) -> Ranges:
    return char_set((ord(character), ord(character)) for character in characters).ranges


def _characters(grammar: Grammar) -> _Edges:
    """Any of its characters may be the first, and may follow where it could also end."""
    used = char_set(pair for node in grammar.rules.values() for pair in used_ranges(node)).ranges
    return _Edges(empty=True, first=used, more=used, used=used)


def _json(schema: Any) -> _Edges:
    kinds = _json_kinds(schema)
    number = _NUMBER if kinds & {"number", "integer"} else ""
    first = "".join(_JSON_FIRST[kind] for kind in kinds)
    return _Edges(long=_ranges(first), more_long=_ranges(number), plain=False)


def _json_kinds(schema: Any) -> set[str]:
    """Return the types that a value of the schema may have, or more than those."""
    if isinstance(schema, dict):
        declared = schema.get("type")
        if isinstance(declared, str | list):
            return {declared} if isinstance(declared, str) else set(declared)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            starts = {json.dumps(value)[0] for value in values}
            return {kind for kind, first in _JSON_FIRST.items() if not starts.isdisjoint(first)}
    return set(_JSON_FIRST)


def _tag(tag: dict[str, Any], begin: str) -> _Edges:
    """A tag of which `begin` has been read."""
    head = _text(tag["begin"][len(begin) :])
    if tag["content"]["type"] == "any_text":
        return _joined([head, _UNTIL])
    return _joined([head, _edges(tag["content"]), _either(map(_text, tag["end"]))])


def _triggered(node: dict[str, Any]) -> _Edges:
    # text up to a trigger and text without one begin alike, but no text of one is part of the other's
    behind = [
        _either(_tag(tag, trigger) for tag in node["tags"] if tag["begin"].startswith(trigger))
        for trigger in node["triggers"]
    ]
    whole = _either(_tag(tag, "") for tag in node["tags"])
    if node["stop_after_first"]:
        return whole if node["at_least_one"] else _FREE
    for tags in behind:
        _joined([tags, _FREE])
    return _joined([whole, _FREE]) if node["at_least_one"] else _FREE


def _joined(parts: Iterable[_Edges]) -> _Edges:
    whole = _END
    for part in parts:
        whole = _pair(whole, part)
    return whole


def _pair(one: _Edges, other: _Edges) -> _Edges:
    """Return the edges of one behind the other."""
    if one == _END:
        return other
    used, plain = _union(one.used, other.used), one.plain and other.plain
    empty, first, long = other.starts
    # where `one` may go on, or has not begun, `other` may begin
    ambiguous = _beside(one.more, one.more_long, first, long)
    if one.empty and not one.prefix:
        ambiguous |= _beside(one.first, one.long, first, long)
    if ambiguous and not plain:
        raise _ConflictError
    more, more_long = other.more, other.more_long
    if empty:
        more, more_long = _union(one.more, more, first), _union(one.more_long, more_long, long)
    if one.empty:
        first, long = _union(one.first, first), _union(one.long, long)
    else:
        first, long = one.first, one.long
    if one.empty and one.first == one.long == ():
        # a literal and what follows it
        prefix, empty, first, long = one.prefix + other.prefix, other.empty, other.first, other.long
    else:
        prefix, empty = one.prefix, one.empty and empty
    return _Edges(prefix, empty, first, long, used if ambiguous else more, more_long, used, plain)


def _either(options: Iterable[_Edges]) -> _Edges:
    kept = list(options)
    if len(kept) == 1:
        return kept[0]
    more: list[Ranges] = [option.more for option in kept]
    more_long = [option.more_long for option in kept]
    for index, one in enumerate(kept):
        for other in kept[:index]:
            pairs = zip(one.prefix, other.prefix, strict=False)
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            one_rest, other_rest = (option._replace(prefix=option.prefix[shared:]) for option in (one, other))
            if one_rest.prefix and other_rest.prefix:
                continue
            one_empty, first, long = one_rest.starts
            other_empty, other_first, other_long = other_rest.starts
            if _beside(first, long, other_first, other_long):
                if not (one.plain and other.plain):
                    raise _ConflictError
                more.extend((one.used, other.used))
            if one_empty:
                more, more_long = [*more, other_first], [*more_long, other_long]
            if other_empty:
                more, more_long = [*more, first], [*more_long, long]
    starts = [option.starts for option in kept]
    return _Edges(
        empty=any(empty for empty, _, _ in starts),
        first=_union(*(first for _, first, _ in starts)),
        long=_union(*(long for _, _, long in starts)),
        more=_union(*more),
        more_long=_union(*more_long),
        used=_union(*(option.used for option in kept)),
        plain=all(option.plain for option in kept),
    )


def _looped(item: _Edges) -> _Edges:
    """Return the edges of any number of items."""
    twice = _pair(item, item)
    _, first, long = item.starts
    more, more_long = _union(twice.more, first), _union(twice.more_long, long)
    return _Edges("", True, first, long, more, more_long, item.used, item.plain)


def _beside(first: Ranges, long: Ranges, other: Ranges, other_long: Ranges) -> bool:
    """Tell whether two texts that may begin at one place may begin alike.

    Raises:
        _ConflictError: they may, and one of them in a longer terminal.
    """
    if _meet(first, other_long) or _meet(long, other) or _meet(long, other_long):
        raise _ConflictError
    return _meet(first, other)


def _meet(one: Ranges, other: Ranges) -> bool:
    return any(low <= last and first <= high for low, high in one for first, last in other)


def _union(*parts: Ranges) -> Ranges:
    return char_set(pair for part in parts for pair in part).ranges


def to_structural_lark(node: dict[str, Any], schema_lark: Callable[[Any], str]) -> str:
    """Return a normal form's format as llguidance's Lark with the rule `start`, without any `%` directive.

    Free text up to a trigger is one terminal that ends with the first trigger in it: no text of it begins another, so
    the lexer's longest match cannot take too much.

    Args:
        node: the format.
        schema_lark: JSON Schema -> the right-hand side of a rule.
    """
    return _LarkWriter(schema_lark).write(node)


class _LarkWriter:
    def __init__(self, schema_lark: Callable[[Any], str]) -> None:
        self._schema_lark = schema_lark
        self._lines: list[str] = []
        self._known: dict[str, str] = {}

    def write(self, node: dict[str, Any]) -> str:
        root = self._rule(node)
        return "\n".join([f"start: {root}", *self._lines]) + "\n"

    def _named(self, prefix: str, body: str) -> str:
        name = f"{prefix}{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """The characters of a text, each a terminal."""
        return " ".join(self._character(character) for character in text) if text else '""'

    def _character(self, character: str) -> str:
        if character not in self._known:
            self._known[character] = self._named("T", f"/{to_rust_regex(Literal(character))}/")
        return self._known[character]

    def _grammar(self, grammar: Grammar) -> str:
        """Take over another grammar's rules under new names."""
        prefix = f"g{len(self._lines)}_"
        for line in to_lark(grammar, alone=False).splitlines():
            self._lines.append(_prefixed(line, prefix))
        return f"{prefix}start"

    def _until(self, stops: list[str], stop: str) -> str:
        """Text that ends with the first occurrence of one of `stops`, which is `stop`."""
        any_stop = "|".join(to_rust_regex(Literal(text)) for text in stops)
        one = to_rust_regex(Literal(stop))
        return self._named("U", f"/(?s:.*){one}/ & ~/(?s:.*)({any_stop})(?s:.+)/")

    def _without(self, stops: list[str]) -> str:
        any_stop = "|".join(to_rust_regex(Literal(text)) for text in stops)
        return self._named("W", f"/(?s:.*)/ & ~/(?s:.*)({any_stop})(?s:.*)/")

    def _tag(self, tag: dict[str, Any], begin: str) -> str:
        """A tag behind `begin`, the part of its begin that has been written already."""
        head = self._literal(tag["begin"][len(begin) :])
        if tag["content"]["type"] == "any_text":
            ends = " | ".join(self._until(tag["end"], end) for end in tag["end"])
            return f"({head} ({ends}))"
        ends = " | ".join(f"({self._literal(end)})" for end in tag["end"])
        return f"({head} {self._rule(tag['content'])} ({ends}))"

    def _rule(self, node: dict[str, Any]) -> str:
        kind = node["type"]
        if kind == "const_string":
            return f"({self._literal(node['value'])})"
        if kind == "json_schema":
            return self._named("j", self._schema_lark(node["json_schema"]))
        if kind == "regex":
            return self._grammar(one_rule(parse_regex(node["pattern"])))
        if kind == "grammar":
            return self._grammar(grammar_of(node))
        if kind == "any_text":
            return self._without(node["excludes"]) if node["excludes"] else self._named("W", "/(?s:.*)/")
        if kind == "sequence":
            return "(" + " ".join(map(self._rule, node["elements"])) + ")"
        if kind == "or":
            return "(" + " | ".join(map(self._rule, node["elements"])) + ")"
        if kind == "tag":
            return self._tag(node, "")
        if kind == "triggered_tags":
            return self._triggered(node)
        if kind == "tags_with_separator":
            return self._separated(node)
        if kind == "repeat":
            high = "" if node["max"] is None else node["max"]
            return f"({self._rule(node['content'])}){{{node['min']},{high}}}"
        return f"({self._rule(node['content'])})" + {"optional": "?", "star": "*", "plus": "+"}[kind]

    def _triggered(self, node: dict[str, Any]) -> str:
        options = []
        for trigger in node["triggers"]:
            tags = [self._tag(tag, trigger) for tag in node["tags"] if tag["begin"].startswith(trigger)]
            if tags:
                options.append(f"{self._until(node['triggers'], trigger)} ({' | '.join(tags)})")
        tagged = self._named("r", " | ".join(options))
        rest = self._without(node["triggers"])
        # as xgrammar has it: where a tag is needed, the text begins with it
        first = f"({' | '.join(self._tag(tag, '') for tag in node['tags'])})"
        if node["stop_after_first"]:
            return first if node["at_least_one"] else f"({tagged} | {rest})"
        return f"({first if node['at_least_one'] else ''} {tagged}* {rest})"

    def _separated(self, node: dict[str, Any]) -> str:
        tag = self._named("r", " | ".join(self._tag(tag, "") for tag in node["tags"]))
        body = tag
        if not node["stop_after_first"]:
            body = f"({tag} ({self._literal(node['separator'])} {tag})*)"
        return body if node["at_least_one"] else f"({body})?"


def _prefixed(line: str, prefix: str) -> str:
    """Rename the rules of one line that `to_lark` wrote: names are start, rule<n> and SET<n>, texts are regexes."""
    head, _, body = line.partition(": ")
    if not body.startswith("/"):
        words = body.replace("(", " ( ").replace(")", " ) ").split(" ")
        body = " ".join(_renamed(word, prefix) for word in words)
    return f"{_renamed(head, prefix)}: {body}"


def _renamed(word: str, prefix: str) -> str:
    if word.startswith("SET"):
        return prefix.upper() + word
    return prefix + word if word == "start" or word.startswith("rule") else word
