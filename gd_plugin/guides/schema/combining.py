"""Keywords that apply other schemas to the same value -> terms, and the terms of their complements.

Source: JSON Schema core 2020-12, sections 8.2.3 and 10.2; draft 7 for `dependencies`.
"""

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from gd_plugin.guides.schema.document import Subschema
from gd_plugin.guides.schema.fields import Assertion, Negation, Scopes, array_at, fail, names_at, object_at
from gd_plugin.guides.schema.terms import (
    NEVER,
    Choice,
    Conjunction,
    Members,
    Required,
    SchemaTerm,
    Term,
    Types,
    without_type,
)

if TYPE_CHECKING:
    from gd_plugin.guides.schema.reading import Reader

__all__ = ["ASSERTIONS", "NEGATIONS"]


# parts of an anyOf that are also tried together
_MAX_JOINED = 5


def scoped(conjunction: Conjunction, scopes: Scopes) -> Conjunction:
    if not scopes:
        return conjunction
    return tuple(
        SchemaTerm(term.index, term.positive, scopes) if isinstance(term, SchemaTerm) else term for term in conjunction
    )


def _parts(reader: "Reader", place: Subschema, keyword: str) -> list[Conjunction]:
    parts = array_at(place, keyword)
    if not parts:
        raise fail(place, keyword, "an array with at least one schema is needed")
    return [reader.child(place, item, keyword, index) for index, item in enumerate(parts)]


def _read_any_of(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    parts = [scoped(part, scopes) for part in _parts(reader, place, "anyOf")]
    if not scopes:
        return (Choice(tuple(parts)),)
    # each part that holds has evaluated something, so more than one may have to
    most = len(parts) if len(parts) <= _MAX_JOINED else 1
    options = [
        tuple(term for part in chosen for term in part)
        for count in range(1, most + 1)
        for chosen in combinations(parts, count)
    ]
    return (Choice(tuple(options)),)


def _read_one_of(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    parts = _parts(reader, place, "oneOf")
    if f"{place.pointer}/oneOf" in reader.dropped:
        return (Choice(tuple(scoped(part, scopes) for part in parts)),)
    # keywords beside oneOf help to prove that its parts exclude each other
    beside = reader.plain_terms(place)
    options = [list(scoped(part, scopes)) for part in parts]
    tags = [reader.tags(part) for part in parts]
    for index, part in enumerate(parts):
        for other in range(index):
            if not _exclude(tags[index], tags[other]) and reader.overlap(beside, part, parts[other]):
                options[index].extend(reader.invert(parts[other]))
                options[other].extend(reader.invert(part))
    return (Choice(tuple(map(tuple, options))),)


def _exclude(some: dict[str, frozenset[str]], others: dict[str, frozenset[str]]) -> bool:
    """Whether objects with these members are told apart by one of them."""
    return any(key in others and texts.isdisjoint(others[key]) for key, texts in some.items())


def _not_one_of(reader: "Reader", place: Subschema) -> list[Conjunction]:
    parts = _parts(reader, place, "oneOf")
    options = [tuple(term for part in parts for term in reader.invert(part))]
    for index, part in enumerate(parts):
        for rival in parts[index + 1 :]:
            if reader.overlap(part, rival):
                options.append((*part, *rival))
    return options


def _conditions(reader: "Reader", place: Subschema) -> tuple[Conjunction, Conjunction, Conjunction]:
    return tuple(  # type: ignore[return-value]
        reader.child(place, place.value[key], key)
        if key in place.value and f"{place.pointer}/{key}" not in reader.dropped
        else ()
        for key in ("if", "then", "else")
    )


def _read_if(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    test, then, otherwise = _conditions(reader, place)
    if not then and not otherwise and not scopes:
        return ()
    yes = (*scoped(test, scopes), *scoped(then, scopes))
    return (Choice((yes, (*reader.invert(test), *scoped(otherwise, scopes)))),)


def _not_if(reader: "Reader", place: Subschema) -> list[Conjunction]:
    test, then, otherwise = _conditions(reader, place)
    return [(*test, *reader.invert(then)), (*reader.invert(test), *reader.invert(otherwise))]


def _reference(keyword: str) -> Assertion:
    return lambda reader, place, scopes: scoped(
        reader.term(reader.document.resolve(place, keyword, place.value[keyword])), scopes
    )


def _not_reference(keyword: str) -> Negation:
    return lambda reader, place: [reader.invert(_reference(keyword)(reader, place, ()))]


def _read_dependencies(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    found: list[Term] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if keyword in reader.keywords(place):
            for key, value in object_at(place, keyword).items():
                terms = _dependency(reader, place, keyword, key, value, scopes)
                absent = Members(((key, NEVER),), declares=False)
                present = (Types(frozenset({"object"})), Required((key,)), *terms)
                found.append(Choice(((without_type("object"),), (absent,), present)))
    return tuple(found)


def _dependency(reader: "Reader", place: Subschema, keyword: str, key: str, value: Any, scopes: Scopes) -> Conjunction:
    if keyword != "dependentSchemas" and isinstance(value, list):
        return (Required(names_at(place, keyword, value)),)
    return scoped(reader.child(place, value, keyword, key), scopes)


def _read_dependencies_once(keyword: str) -> Assertion:
    def read(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
        names = ("dependentRequired", "dependentSchemas", "dependencies")
        first = next(key for key in reader.keywords(place) if key in names)
        return _read_dependencies(reader, place, scopes) if keyword == first else ()

    return read


def _not_dependencies(keyword: str) -> Negation:
    def negation(reader: "Reader", place: Subschema) -> list[Conjunction]:
        options: list[Conjunction] = []
        for key, value in object_at(place, keyword).items():
            start: Conjunction = (Types(frozenset({"object"})), Required((key,)))
            if keyword != "dependentSchemas" and isinstance(value, list):
                for name in names_at(place, keyword, value):
                    options.append((*start, Members(((name, NEVER),), declares=False)))
            else:
                options.append((*start, *reader.invert(reader.child(place, value, keyword, key))))
        return options

    return negation


ASSERTIONS: Final[dict[str, Assertion]] = {
    "$ref": _reference("$ref"),
    "$dynamicRef": _reference("$dynamicRef"),
    "$recursiveRef": _reference("$recursiveRef"),
    "allOf": lambda reader, place, scopes: tuple(
        term for part in _parts(reader, place, "allOf") for term in scoped(part, scopes)
    ),
    "anyOf": _read_any_of,
    "oneOf": _read_one_of,
    "not": lambda reader, place, scopes: reader.invert(reader.child(place, place.value["not"], "not")),
    "if": _read_if,
    "dependentRequired": _read_dependencies_once("dependentRequired"),
    "dependentSchemas": _read_dependencies_once("dependentSchemas"),
    "dependencies": _read_dependencies_once("dependencies"),
}


NEGATIONS: Final[dict[str, Negation]] = {
    "$ref": _not_reference("$ref"),
    "$dynamicRef": _not_reference("$dynamicRef"),
    "$recursiveRef": _not_reference("$recursiveRef"),
    "allOf": lambda reader, place: [reader.invert(part) for part in _parts(reader, place, "allOf")],
    "anyOf": lambda reader, place: [
        tuple(term for part in _parts(reader, place, "anyOf") for term in reader.invert(part))
    ],
    "oneOf": _not_one_of,
    "not": lambda reader, place: [reader.child(place, place.value["not"], "not")],
    "if": _not_if,
    "dependentRequired": _not_dependencies("dependentRequired"),
    "dependentSchemas": _not_dependencies("dependentSchemas"),
    "dependencies": _not_dependencies("dependencies"),
}
