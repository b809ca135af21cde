"""Keywords for any type, numbers and strings -> terms, and the terms of their complements.

Source: JSON Schema validation, sections 6.1 to 6.3 and 7; draft 4 for booleans beside bounds, and for what an integer is.
"""

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from gd_plugin.guides.schema.document import Subschema
from gd_plugin.guides.schema.fields import UNREACHABLE, Assertion, Negation, Scopes, array_at, count_at, fail, number_at
from gd_plugin.guides.schema.formats import COMPLEMENTED, REFUSED, format_language
from gd_plugin.guides.schema.languages import ANY_CHAR, Language, negate, repeat
from gd_plugin.guides.schema.numbers import ANY_NUMBER, Numbers
from gd_plugin.guides.schema.terms import ALL_TYPES, Conjunction, Num, Refuse, Term, Text, Types
from gd_plugin.guides.schema.values import other_value_terms, value_terms

if TYPE_CHECKING:
    from gd_plugin.guides.schema.reading import Reader

__all__ = ["ASSERTIONS", "NEGATIONS"]


# states that a text of that many characters goes through are kept, a kilobyte each
_LONGEST = 1 << 16


def _type_terms(names: set[str], negative: bool, draft: int) -> Conjunction:
    """Types by name; "integer" is a kind of number."""
    plain = frozenset(names - {"integer"})
    if negative:
        if "integer" in names and "number" not in names:
            return (Types(ALL_TYPES - plain), Num(ANY_NUMBER.of_kind(False)))
        return (Types(ALL_TYPES - plain),)
    if "integer" in names and "number" not in names:
        # up to draft 4, 1.0 is no integer
        return (Types(plain | {"number"}), Num(replace(ANY_NUMBER.of_kind(True), digits_only=draft == 4)))
    return (Types(plain),)


def _type_names(place: Subschema) -> set[str]:
    value = place.value["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or name not in ALL_TYPES | {"integer"}:
            raise fail(place, "type", "a type is null, boolean, integer, number, string, array or object")
    return set(names)


def _values(place: Subschema, keyword: str) -> list[Any]:
    if keyword == "const":
        return [place.value["const"]]
    return array_at(place, "enum")


def _bounds(place: Subschema, keyword: str, *, negated: bool = False) -> Numbers:
    bound = place.value[keyword]
    if place.draft == 4 and keyword.startswith("exclusive"):
        if not isinstance(bound, bool):
            raise fail(place, keyword, "draft 4 has a boolean here")
        return ANY_NUMBER
    bound = number_at(place, keyword)
    is_lower = keyword in ("minimum", "exclusiveMinimum")
    if bound.denominator == 1:
        # a large one written as a float is compared by its text or by its binary value: what is inside both is legal
        bound = (max if is_lower != negated else min)(bound, Fraction(place.value[keyword]))
    is_open = keyword.startswith("exclusive")
    if is_lower:
        if place.draft == 4:
            is_open = place.value.get("exclusiveMinimum") is True
        return ANY_NUMBER.at_least(bound, is_open)
    if place.draft == 4:
        is_open = place.value.get("exclusiveMaximum") is True
    return ANY_NUMBER.at_most(bound, is_open)


def _not_bounds(place: Subschema, keyword: str) -> list[Conjunction]:
    numbers = _bounds(place, keyword, negated=True)
    if numbers.low is not None:
        outside = ANY_NUMBER.at_most(numbers.low, not numbers.low_open)
    elif numbers.high is not None:
        outside = ANY_NUMBER.at_least(numbers.high, not numbers.high_open)
    else:
        return []
    return [(Types(frozenset({"number"})), Num(outside))]


def _step(place: Subschema) -> Fraction:
    step = number_at(place, "multipleOf")
    if step <= 0:
        raise fail(place, "multipleOf", "a number over 0 is needed")
    return step


def _length(place: Subschema, keyword: str) -> Language:
    count = count_at(place, keyword)
    if keyword == "minLength":
        return repeat(ANY_CHAR, count, None)
    return repeat(ANY_CHAR, 0, None if count >= UNREACHABLE else count)


def _read_min_length(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    if count_at(place, "minLength") > _LONGEST:
        return (reader.refuse("string", place, "minLength", f"a text of over {_LONGEST} characters is needed"),)
    return (Text(_length(place, "minLength")),)


def _not_length(keyword: str) -> Negation:
    return lambda reader, place: [(Types(frozenset({"string"})), Text(negate(_length(place, keyword))))]


def _read_pattern(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    pattern = reader.pattern(place, place.value["pattern"], "pattern")
    if isinstance(pattern, Refuse):
        return (pattern,)
    return (Text(pattern.narrow, None if pattern.wide == pattern.narrow else pattern.wide),)


def _not_pattern(reader: "Reader", place: Subschema) -> list[Conjunction]:
    pattern = reader.pattern(place, place.value["pattern"], "pattern")
    outside: Term = pattern if isinstance(pattern, Refuse) else Text(negate(pattern.wide))
    return [(Types(frozenset({"string"})), outside)]


def _read_format(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    name = place.value["format"]
    if not isinstance(name, str):
        raise fail(place, "format", "a format's name is needed")
    if name in REFUSED:
        return (reader.refuse("string", place, "format", f"what {name!r} asks is not regular"),)
    language = format_language(name)
    return () if language is None else (Text(language),)


def _not_format(reader: "Reader", place: Subschema) -> list[Conjunction]:
    terms = _read_format(reader, place, ())
    if not terms:
        return []
    name, term = place.value["format"], terms[0]
    if isinstance(term, Text) and name in COMPLEMENTED:
        return [(Types(frozenset({"string"})), Text(negate(term.language)))]
    return [reader.refusal("string", place, "format", f"{name!r} has no complement that can be written")]


ASSERTIONS: Final[dict[str, Assertion]] = {
    "type": lambda reader, place, scopes: _type_terms(_type_names(place), False, place.draft),
    "enum": lambda reader, place, scopes: value_terms(_values(place, "enum")),
    "const": lambda reader, place, scopes: value_terms(_values(place, "const")),
    "minimum": lambda reader, place, scopes: (Num(_bounds(place, "minimum")),),
    "maximum": lambda reader, place, scopes: (Num(_bounds(place, "maximum")),),
    "exclusiveMinimum": lambda reader, place, scopes: (Num(_bounds(place, "exclusiveMinimum")),),
    "exclusiveMaximum": lambda reader, place, scopes: (Num(_bounds(place, "exclusiveMaximum")),),
    "multipleOf": lambda reader, place, scopes: (
        Num(ANY_NUMBER.multiples_of(_step(place)), f"{place.pointer}/multipleOf"),
    ),
    "minLength": _read_min_length,
    "maxLength": lambda reader, place, scopes: (Text(_length(place, "maxLength")),),
    "pattern": _read_pattern,
    "format": _read_format,
}


NEGATIONS: Final[dict[str, Negation]] = {
    "type": lambda reader, place: [_type_terms(_type_names(place), True, place.draft)],
    "enum": lambda reader, place: [other_value_terms(_values(place, "enum"), place.pointer, "enum")],
    "const": lambda reader, place: [other_value_terms(_values(place, "const"), place.pointer, "const")],
    "minimum": lambda reader, place: _not_bounds(place, "minimum"),
    "maximum": lambda reader, place: _not_bounds(place, "maximum"),
    "exclusiveMinimum": lambda reader, place: _not_bounds(place, "exclusiveMinimum"),
    "exclusiveMaximum": lambda reader, place: _not_bounds(place, "exclusiveMaximum"),
    "multipleOf": lambda reader, place: [
        (
            Types(frozenset({"number"})),
            Num(Numbers(not_multiples=(_step(place),)), f"{place.pointer}/multipleOf"),
        )
    ],
    "minLength": _not_length("minLength"),
    "maxLength": _not_length("maxLength"),
    "pattern": _not_pattern,
    "format": _not_format,
}
