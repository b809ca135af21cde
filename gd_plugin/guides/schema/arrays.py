"""Keywords for arrays -> terms, and the terms of their complements.

Source: JSON Schema core 2020-12, section 10.3.1, and validation, section 6.4; draft 7 for `items` as an array.
"""

from typing import TYPE_CHECKING, Final

from gd_plugin.guides.schema.document import Subschema
from gd_plugin.guides.schema.fields import Assertion, Negation, Scopes, count_at, counts, not_counts
from gd_plugin.guides.schema.terms import NEVER, Conjunction, ContainsItem, ItemCount, Items, Types, Unique

if TYPE_CHECKING:
    from gd_plugin.guides.schema.reading import Reader

__all__ = ["ASSERTIONS", "NEGATIONS"]


def _read_items(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    value = place.value
    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction | None = None
    tuple_key = "prefixItems" if "prefixItems" in value and place.draft >= 2020 else "items"
    if isinstance(value.get(tuple_key), list):
        if f"{place.pointer}/{tuple_key}" not in reader.dropped:
            prefix = tuple(reader.child(place, item, tuple_key, i) for i, item in enumerate(value[tuple_key]))
        rest_key = "items" if tuple_key == "prefixItems" else "additionalItems"
    else:
        rest_key = "items"
    if rest_key in value and f"{place.pointer}/{rest_key}" not in reader.dropped:
        rest = reader.child(place, value[rest_key], rest_key)
    return (Items(prefix, rest, scopes),)


def _read_items_once(keyword: str) -> Assertion:
    """`prefixItems`, `items` and `additionalItems` are read together, with the first of them."""

    def read(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
        first = next(key for key in reader.keywords(place) if key in ("prefixItems", "items", "additionalItems"))
        return _read_items(reader, place, scopes) if keyword == first else ()

    return read


def _not_items(keyword: str) -> Negation:
    def negation(reader: "Reader", place: Subschema) -> list[Conjunction]:
        terms = _read_items_once(keyword)(reader, place, ())
        options: list[Conjunction] = []
        for term in terms:
            if not isinstance(term, Items):
                continue
            array = Types(frozenset({"array"}))
            for index, item in enumerate(term.prefix):
                wrong = Items((*((),) * index, reader.invert(item)), None)
                options.append((array, ItemCount(index + 1), wrong))
            if term.rest == NEVER:
                options.append((array, ItemCount(len(term.prefix) + 1)))
            elif term.rest:
                if term.prefix:
                    options.append(reader.refusal("array", place, "items", "behind fixed items has no complement"))
                else:
                    other = reader.invert(term.rest)
                    options.append((array, ContainsItem(other, (), 1, None, f"{place.pointer}/items")))
        return options

    return negation


def _read_contains(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    item = reader.child(place, place.value["contains"], "contains")
    modern = place.draft >= 2019
    low = count_at(place, "minContains") if modern and "minContains" in place.value else 1
    high = count_at(place, "maxContains") if modern and "maxContains" in place.value else None
    if low == 0 and high is None and not (scopes and place.draft >= 2020):
        # nothing is asked; since 2020-12 unevaluatedItems knows which items it holds for
        return ()
    other = reader.invert(item) if high is not None else ()
    return (ContainsItem(item, other, low, high, f"{place.pointer}/contains"),)


def _not_contains(reader: "Reader", place: Subschema) -> list[Conjunction]:
    array = Types(frozenset({"array"}))
    options: list[Conjunction] = []
    for term in _read_contains(reader, place, ()):
        if isinstance(term, ContainsItem):
            outside = reader.invert(term.item)
            if term.low == 1:
                options.append((array, Items((), outside)))
            elif term.low:
                options.append((array, ContainsItem(term.item, outside, 0, term.low - 1, term.pointer)))
            if term.high is not None:
                options.append((array, ContainsItem(term.item, (), term.high + 1, None, term.pointer)))
    return options


def _read_unique(reader: "Reader", place: Subschema, scopes: Scopes) -> Conjunction:
    return (Unique(f"{place.pointer}/uniqueItems"),) if place.value["uniqueItems"] is True else ()


def _not_unique(reader: "Reader", place: Subschema) -> list[Conjunction]:
    if place.value["uniqueItems"] is not True:
        return []
    return [reader.refusal("array", place, "uniqueItems", "has no complement that can be written")]


ASSERTIONS: Final[dict[str, Assertion]] = {
    "prefixItems": _read_items_once("prefixItems"),
    "items": _read_items_once("items"),
    "additionalItems": _read_items_once("additionalItems"),
    "minItems": lambda reader, place, scopes: counts(place, "minItems") or (),
    "maxItems": lambda reader, place, scopes: counts(place, "maxItems") or (),
    "contains": _read_contains,
    "uniqueItems": _read_unique,
    "unevaluatedItems": lambda reader, place, scopes: (),
}


NEGATIONS: Final[dict[str, Negation]] = {
    "prefixItems": _not_items("prefixItems"),
    "items": _not_items("items"),
    "additionalItems": _not_items("additionalItems"),
    "minItems": not_counts("minItems"),
    "maxItems": not_counts("maxItems"),
    "contains": _not_contains,
    "uniqueItems": _not_unique,
}
