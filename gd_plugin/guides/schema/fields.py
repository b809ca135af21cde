"""What a keyword's function is given, and the checks that its value is of the kind that the keyword needs.

In:  a `Subschema` and a keyword in it.
Out: its value as a number, a count, an array, an object or names; an error with the place where it is something else.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gd_plugin.errors import InvalidGuideError
from gd_plugin.guides.schema.document import Subschema
from gd_plugin.guides.schema.numbers import read_number
from gd_plugin.guides.schema.terms import (
    Conjunction,
    ItemCount,
    MemberCount,
    Refuse,
    Types,
)

if TYPE_CHECKING:
    from gd_plugin.guides.schema.reading import Reader

__all__ = [
    "UNREACHABLE",
    "Assertion",
    "Negation",
    "Scopes",
    "array_at",
    "count_at",
    "counts",
    "fail",
    "names_at",
    "not_counts",
    "number_at",
    "object_at",
]

# schemas with unevaluated* keywords that see what is evaluated
Scopes = tuple[int, ...]
# what a keyword says of a value
Assertion = Callable[["Reader", Subschema, Scopes], Conjunction]
# the ways in which a value is not what a keyword says
Negation = Callable[["Reader", Subschema], list[Conjunction]]


# a count that no output of a model reaches says nothing
UNREACHABLE = 1 << 24


def fail(place: Subschema, keyword: str, needed: str) -> InvalidGuideError:
    """The error for a keyword whose value is not what it needs."""
    pointer = f"{place.pointer}/{keyword}"
    found = place.value[keyword]
    return InvalidGuideError(
        f"{pointer}: {needed}, got {str(found)[:40]!r}",
        pointer=pointer,
        keyword=keyword,
        hint=f"correct the value of {keyword}, or remove the keyword",
    )


def number_at(place: Subschema, keyword: str) -> Fraction:
    """The keyword's value, a number."""
    value = place.value[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise fail(place, keyword, "a number is needed")
    return read_number(value)


def count_at(place: Subschema, keyword: str) -> int:
    """The keyword's value, a whole number that is not negative."""
    value = number_at(place, keyword)
    if value < 0 or value.denominator != 1:
        raise fail(place, keyword, "a whole number that is not negative is needed")
    return int(value)


def array_at(place: Subschema, keyword: str) -> list[Any]:
    """The keyword's value, an array."""
    value = place.value[keyword]
    if not isinstance(value, list):
        raise fail(place, keyword, "an array is needed")
    return value


def object_at(place: Subschema, keyword: str) -> dict[str, Any]:
    """The keyword's value, an object."""
    value = place.value[keyword]
    if not isinstance(value, dict):
        raise fail(place, keyword, "an object is needed")
    return value


def names_at(place: Subschema, keyword: str, value: Any) -> tuple[str, ...]:
    """The texts of an array in a keyword's value, each once."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise fail(place, keyword, "an array of texts is needed")
    return tuple(dict.fromkeys(value))


def counts(place: Subschema, keyword: str, negative: bool = False) -> Conjunction | None:
    """Terms of minItems, maxItems, minProperties, maxProperties or their complement; None where there is none."""
    count = count_at(place, keyword)
    is_low = keyword.startswith("min") ^ negative
    if negative:
        count += 1 if is_low else -1
        if count < 0:
            return None
    low, high = (count, None) if is_low else (0, None if count >= UNREACHABLE else count)
    pointer = f"{place.pointer}/{keyword}"
    if low > 10_000:
        kind = "array" if "Items" in keyword else "object"
        return (Refuse(kind, pointer, keyword, f"over 10000 members are needed, got {count}"),)
    return (ItemCount(low, high),) if "Items" in keyword else (MemberCount(low, high, pointer),)


def not_counts(keyword: str) -> Negation:
    """The complement of a keyword that counts items or members."""

    def negation(reader: "Reader", place: Subschema) -> list[Conjunction]:
        terms = counts(place, keyword, negative=True)
        kind = "array" if "Items" in keyword else "object"
        return [] if terms is None else [(Types(frozenset({kind})), *terms)]

    return negation
