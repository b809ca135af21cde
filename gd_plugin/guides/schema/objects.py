"""Keywords for objects -> terms, and the terms of their complements.

Source: JSON Schema core 2020-12, section 10.3.2, and validation, section 6.5.
"""

from typing import TYPE_CHECKING, Final

from gd_plugin.guides.schema.document import Subschema
from gd_plugin.guides.schema.fields import Assertion, Negation, Scopes, counts, names_at, not_counts, object_at
from gd_plugin.guides.schema.languages import both, negate, words
from gd_plugin.guides.schema.patterns import compile_pattern
from gd_plugin.guides.schema.terms import (
    NEVER,
    Conjunction,
    KeyOutside,
    Keys,
    MemberCount,
    Members,
    Refuse,
    Required,
    Types,
)

if TYPE_CHECKING:
    from gd_plugin.guides.schema.reading import Reader

__all__ = ["ASSERTIONS", "NEGATIONS"]


def _read_members(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    value, refused = place.value, []
    keywords = reader.keywords(place)
    named: tuple[tuple[str, Conjunction], ...] = ()
    if "properties" in keywords:
        named = tuple(
            (key, reader.child(place, item, "properties", key)) for key, item in object_at(place, "properties").items()
        )
    patterns: list[tuple[str, Conjunction]] = []
    if "patternProperties" in keywords:
        for key, item in object_at(place, "patternProperties").items():
            pattern = reader.pattern(place, key, "patternProperties", key)
            if isinstance(pattern, Refuse):
                refused.append(pattern)
            patterns.append((key, reader.child(place, item, "patternProperties", key)))
    additional = None
    if "additionalProperties" in keywords:
        additional = reader.child(place, value["additionalProperties"], "additionalProperties")
    if refused:
        return tuple(refused)
    declares = bool(named or patterns)
    pointer = f"{place.pointer}/properties" if named else place.pointer
    return (Members(named, tuple(patterns), additional, scopes, declares, pointer),)


_MEMBERS = ("properties", "patternProperties", "additionalProperties")


def _read_members_once(keyword: str) -> Assertion:
    """The three keywords that give an object's values are read together, with the first of them."""

    def read(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
        first = next(key for key in reader.keywords(place) if key in _MEMBERS)
        return _read_members(reader, place, scopes) if keyword == first else ()

    return read


def _not_members(keyword: str) -> Negation:
    def negation(reader: "Reader", place: Subschema) -> list[Conjunction]:
        options: list[Conjunction] = []
        for term in _read_members_once(keyword)(reader, place, ()):
            kind = Types(frozenset({"object"}))
            if not isinstance(term, Members):
                return [(kind, term)]
            for key, item in term.named:
                other = Members(((key, reader.invert(item)),), declares=False)
                options.append((kind, Required((key,)), other))
            for pattern, item in term.patterns:
                # a key written twice counts by its last value, so a wrong value cannot be held fast
                if item == NEVER:
                    language = compile_pattern(pattern).narrow
                    options.append((kind, KeyOutside(language, place.pointer, "patternProperties")))
                elif item != ():
                    options.append(reader.refusal("object", place, "patternProperties", "has no complement"))
            if term.additional == NEVER:
                outside = [negate(words(key for key, _ in term.named))]
                outside.extend(negate(compile_pattern(pattern).wide) for pattern, _ in term.patterns)
                language = outside[0]
                for part in outside[1:]:
                    language = both(language, part)
                options.append((kind, KeyOutside(language, place.pointer, "additionalProperties")))
            elif term.additional:
                options.append(reader.refusal("object", place, "additionalProperties", "has no complement"))
        return options

    return negation


def _not_property_names(reader: "Reader", place: Subschema) -> list[Conjunction]:
    names = reader.child(place, place.value["propertyNames"], "propertyNames")
    if names == ():
        return []
    if names == NEVER:
        return [(Types(frozenset({"object"})), MemberCount(1))]
    outside = KeyOutside(None, f"{place.pointer}/propertyNames", "propertyNames", reader.invert(names))
    return [(Types(frozenset({"object"})), outside)]


ASSERTIONS: Final[dict[str, Assertion]] = {
    "properties": _read_members_once("properties"),
    "patternProperties": _read_members_once("patternProperties"),
    "additionalProperties": _read_members_once("additionalProperties"),
    "required": lambda reader, place, scopes: (
        # draft 3 had a boolean here, which later drafts do not read
        (Required(names_at(place, "required", place.value["required"])),)
        if not isinstance(place.value["required"], bool)
        else ()
    ),
    "minProperties": lambda reader, place, scopes: counts(place, "minProperties") or (),
    "maxProperties": lambda reader, place, scopes: counts(place, "maxProperties") or (),
    "propertyNames": lambda reader, place, scopes: (
        Keys(reader.child(place, place.value["propertyNames"], "propertyNames")),
    ),
    "unevaluatedProperties": lambda reader, place, scopes: (),
}


NEGATIONS: Final[dict[str, Negation]] = {
    "properties": _not_members("properties"),
    "patternProperties": _not_members("patternProperties"),
    "additionalProperties": _not_members("additionalProperties"),
    "required": lambda reader, place: [
        (Types(frozenset({"object"})), Members(((name, NEVER),), declares=False))
        for name in names_at(place, "required", place.value["required"])
    ],
    "minProperties": not_counts("minProperties"),
    "maxProperties": not_counts("maxProperties"),
    "propertyNames": _not_property_names,
}
