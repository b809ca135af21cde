"""Numbers as programs print them, in every order of magnitude, on both sides of bounds."""

import json
import random
from fractions import Fraction

import pytest

from tests.fuzz import pick
from tests.guides.test_schema import Texts, is_valid

pytest.importorskip("llguidance")

BOUNDS = [
    {},
    {"minimum": 0},
    {"minimum": -(10**21), "maximum": 10**20 + 7},
    {"minimum": -(2**60), "exclusiveMaximum": 2**60},
    {"exclusiveMinimum": 3, "maximum": 5.5e22},
    {"maximum": 9.99e21},
    {"minimum": 1e30},
    {"not": {"minimum": 1e30}},
    {"not": {"maximum": 5.5e22}},
    {"maximum": 10**23},
    {"exclusiveMinimum": 1e23, "maximum": 1e80},
]


def numbers_around(schema, rng):
    """Integers and floats, of any size, round ones, and neighbours of the bounds."""
    bounds = [value for value in (schema | schema.get("not", {})).values() if isinstance(value, int | float)] or [1]
    for _ in range(pick(400, 4000)):
        size = 10 ** rng.choice([rng.uniform(-3, 25), rng.uniform(0, 99)])
        value = (
            rng.choice([-1, 1]) * rng.choice([rng.random(), rng.randrange(1, 10), rng.randrange(1, 1000) / 100]) * size
        )
        near = rng.choice(bounds) * rng.choice([1, 1.0, 1 - 2**-53, 1 + 2**-52, 0.9, 1.1])
        value = rng.choice([value, float(round(value)), near])
        yield rng.choice([value, int(value) + rng.choice([-1, 0, 1])])


def by_text(schema, text):
    """Whether the number that a text spells, exactly, is inside bounds that are read exactly too."""
    value = Fraction(text)
    compare = {
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "exclusiveMaximum": lambda bound: value < bound,
        "not": lambda inner: not by_text(inner, text),
    }
    return all(
        check(Fraction(repr(schema[key])) if key != "not" else schema[key])
        for key, check in compare.items()
        if key in schema
    )


def is_beside_a_bound(schema, value):
    bounds = [bound for bound in (schema | schema.get("not", {})).values() if isinstance(bound, int | float)]
    return any(abs(Fraction(value) - Fraction(bound)) <= abs(Fraction(bound)) / 2**51 for bound in bounds)


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bounds", BOUNDS, ids=json.dumps)
def test_printed_numbers(kind, bounds):
    schema = {"type": kind, **bounds}
    texts = Texts(schema)
    wrong = []
    for value in numbers_around(bounds, random.Random(4)):
        text = json.dumps(value)
        valid = is_valid(schema, json.loads(text))
        # beside a large bound readers differ: what one of them refuses need not be legal
        if texts.admits(text) != valid and (
            not valid or (by_text(bounds, text) and not is_beside_a_bound(bounds, value))
        ):
            wrong.append((text, valid))
    assert not wrong


def test_a_bound_that_floats_hold_is_reached():
    for bound in (10**20, 1e22, 2**60, 2**63):
        texts = Texts({"maximum": bound})
        assert texts.admits(json.dumps(bound)) and texts.admits(json.dumps(float(bound)))
        assert not texts.admits(str(int(bound) + 1))
