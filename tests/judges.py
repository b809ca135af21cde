"""Judges that know no grammar engine: does a text match a guide, and can it still become a match?

A `Case` pairs a guide with plain-Python judges of its language: `re`, `json` with `jsonschema`, sets.
Prefixes are judged by the partial matching of the `regex` package, or by closing what is open and parsing the result.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import regex

from gd_plugin import Guide

__all__ = ["CASES", "SMALL_SCHEMA", "Case", "is_json_prefix"]

# the schema of the field cases
SMALL_SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 22, 333]}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
_SPACE = r"[ \n\t\r]{0,16}"


@dataclass(frozen=True)
class Case:
    """A guide, and what may be said about it without an engine."""

    name: str
    guide: Guide
    is_complete: Callable[[str], bool]
    is_prefix: Callable[[str], bool]

    def __repr__(self) -> str:
        return self.name


def is_json_prefix(text: str) -> bool:
    """Tell whether JSON text can begin with `text`: close what is open, and let the json module read it."""
    if not text:
        return True
    if text != text.lstrip(" \n\r\t"):
        return False
    closers: list[str] = []
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            closers.append("]" if character == "[" else "}")
        elif character in "]}" and (not closers or closers.pop() != character):
            return False
    tail = "".join(reversed(closers))
    if in_string:
        # the rest of an escape, or the closing quote alone
        endings = [rest + '"' for rest in ("", "n", "0", "00", "000", "0000")]
    else:
        literals = [word[start:] for word in ("true", "false", "null") for start in range(1, 5)]
        endings = ["", "0", "+0", "e0", "null", '"":0', ":0", *literals]
    more = ["", ":0", "0", '"":0'] if in_string or closers else [""]
    return any(_reads(text + ending + extra + tail) for ending in endings for extra in more)


def _reads(text: str) -> bool:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def _pattern_case(name: str, guide: Guide, pattern: str) -> Case:
    return Case(
        name,
        guide,
        lambda text: re.fullmatch(pattern, text) is not None,
        lambda text: regex.fullmatch(pattern, text, partial=True) is not None,
    )


# 22 may be written 22.0 or 2.2E1: its digits, with zeros and a point anywhere, and an exponent
_ENUM_NUMBER = r"[0.]*(?:1|2\.?2|3\.?3\.?3)[0.]*(?:[eE][+-]?\d+)?"
_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?"


def _schema_case(name: str, schema: dict[str, Any], pattern: str) -> Case:
    """`pattern` describes the spellings of the schema's values, escaped keys too; jsonschema judges whole texts."""

    def is_complete(text: str) -> bool:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return text == text.strip()

    return Case(
        name,
        Guide.json_schema(schema),
        is_complete,
        lambda text: regex.fullmatch(pattern, text, partial=True) is not None,
    )


def _choice_case(name: str, options: list[str]) -> Case:
    return Case(
        name,
        Guide.choice(options),
        lambda text: text in options,
        lambda text: any(option.startswith(text) for option in options),
    )


def _pairs_complete(text: str) -> bool:
    half = len(text) // 2
    return half > 0 and text == "a" * half + "b" * half


def _pairs_prefix(text: str) -> bool:
    body = text.lstrip("a")
    return set(body) <= {"b"} and (not body or len(body) <= len(text) - len(body))


CASES = [
    _choice_case("choice", ["yes", "no", "maybe", "yesterday", "é😀", "yes no"]),
    _pattern_case("regex", Guide.regex(r"[0-9]{3}-[a-z]{2,8}"), r"[0-9]{3}-[a-z]{2,8}"),
    _pattern_case("regex_emoji", Guide.regex("[😀-🙏]{2}"), "[😀-🙏]{2}"),
    _schema_case(
        "schema_object",
        SMALL_SCHEMA,
        rf'\{{{_SPACE}"n"{_SPACE}:{_SPACE}{_ENUM_NUMBER}{_SPACE},{_SPACE}"ok"{_SPACE}:{_SPACE}(?:true|false){_SPACE}\}}',
    ),
    _schema_case("schema_boolean", {"type": "boolean"}, r"true|false"),
    _schema_case(
        "schema_array",
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        rf"\[{_SPACE}(?:{_NUMBER}(?:{_SPACE},{_SPACE}{_NUMBER}){{0,2}}){_SPACE}\]",
    ),
    Case("json_any", Guide.json(), _reads, is_json_prefix),
    Case(
        "ebnf_pairs",
        Guide.ebnf('root ::= pairs\npairs ::= "a" pairs "b" | "ab"'),
        _pairs_complete,
        _pairs_prefix,
    ),
]
