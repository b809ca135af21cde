"""`enum` and `const`: terms for a value that equals one of some, or none of them."""

from fractions import Fraction
from typing import Any

from gd_plugin.guides.schema.languages import negate, words
from gd_plugin.guides.schema.numbers import Numbers, read_number
from gd_plugin.guides.schema.terms import (
    NEVER,
    Bools,
    Choice,
    Conjunction,
    ItemCount,
    Items,
    KeyOutside,
    Members,
    Num,
    Required,
    Term,
    Text,
    Types,
    without_type,
)

__all__ = ["other_value_terms", "scalar_type", "value_terms"]


def scalar_type(value: Any) -> str:
    """The JSON type of a value, integers being numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def value_terms(values: list[Any]) -> Conjunction:
    """The terms for a value that equals one of `values`."""
    scalars = [value for value in values if not isinstance(value, list | dict)]
    options: list[Conjunction] = []
    if scalars:
        options.append(
            (
                Types(frozenset(map(scalar_type, scalars))),
                Bools(frozenset(value for value in scalars if isinstance(value, bool))),
                Num(Numbers(values=_numbers(scalars))),
                Text(words(value for value in scalars if isinstance(value, str))),
            )
        )
    for value in values:
        if isinstance(value, list):
            items = Items(tuple(value_terms([item]) for item in value), NEVER)
            options.append((Types(frozenset({"array"})), items, ItemCount(len(value), len(value))))
        elif isinstance(value, dict):
            named = tuple((key, value_terms([item])) for key, item in value.items())
            members = Members(named, additional=NEVER, declares=False)
            options.append((Types(frozenset({"object"})), members, Required(tuple(value))))
    return options[0] if len(options) == 1 else (Choice(tuple(options)),)


def other_value_terms(values: list[Any], pointer: str, keyword: str) -> Conjunction:
    """The terms for a value that equals none of `values`."""
    scalars = [value for value in values if not isinstance(value, list | dict)]
    terms: list[Term] = []
    if None in scalars:
        terms.append(without_type("null"))
    terms.append(Bools(frozenset({True, False}) - {value for value in scalars if isinstance(value, bool)}))
    terms.append(Num(Numbers(excluded=_numbers(scalars))))
    terms.append(Text(negate(words(value for value in scalars if isinstance(value, str)))))
    for value in values:
        options: list[Conjunction] = []
        if isinstance(value, list):
            options = [(without_type("array"),), (ItemCount(len(value) + 1),)]
            if value:
                options.append((ItemCount(0, len(value) - 1),))
            for place, item in enumerate(value):
                other = other_value_terms([item], pointer, keyword)
                options.append((ItemCount(place + 1), Items((*((),) * place, other), None)))
        elif isinstance(value, dict):
            options = [(without_type("object"),), (KeyOutside(negate(words(value)), pointer, keyword),)]
            for key, item in value.items():
                other = other_value_terms([item], pointer, keyword)
                options.append((Members(((key, NEVER),), declares=False),))
                options.append((Required((key,)), Members(((key, other),), declares=False)))
        if options:
            terms.append(Choice(tuple(options)))
    return tuple(terms)


def _numbers(values: list[Any]) -> frozenset[Fraction]:
    # programs compare a float that is a whole number by its binary value: 10**23 is not 1e23
    return frozenset(
        Fraction(value) if isinstance(value, float) and value.is_integer() else read_number(value)
        for value in values
        if scalar_type(value) == "number"
    )
