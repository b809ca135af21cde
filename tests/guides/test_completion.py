"""The shortest completion of a regular guide: `re` judges the texts, a search of all short ones their length."""

import itertools
import random
import re

import pytest

import gd_plugin as gd
from gd_plugin.guides.completion import completion_of

PATTERNS = [
    "ab|ac|b{3}",
    "a(b|c)*bb",
    "a{2,4}b?",
    "(ab|ba){1,3}c",
    "a*",
    "abb{6}|ac|bc{4}",
    "(a|b)*abb(c|aa)",
    "c?(a|bb)+",
]


def shortest_by_search(pattern: str, prefix: str) -> int | None:
    for size in range(8):
        if any(re.fullmatch(pattern, prefix + "".join(rest)) for rest in itertools.product("abc", repeat=size)):
            return size
    return None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_completions_are_the_shortest_and_within_the_bound(pattern: str) -> None:
    completion = completion_of(gd.Guide.regex(pattern))
    assert completion is not None
    for size in range(4):
        for prefix in map("".join, itertools.product("abc", repeat=size)):
            found = completion.complete(prefix.encode())
            if found is None:
                assert shortest_by_search(pattern, prefix) is None
            else:
                assert re.fullmatch(pattern, prefix + found.decode())
                assert len(found) == shortest_by_search(pattern, prefix)
                assert len(found) <= completion.bound


def test_parts_of_characters_are_completed() -> None:
    pattern = "[é😀-😂]{2}ok"
    completion = completion_of(gd.Guide.regex(pattern))
    assert completion is not None
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice("é😀😁😂") for _ in range(2)) + "ok"
        for cut in range(len(text.encode())):
            begun = text.encode()[:cut]
            found = completion.complete(begun)
            assert found is not None
            assert re.fullmatch(pattern, (begun + found).decode())
            assert len(found) <= completion.bound


def test_what_has_no_bound_is_none() -> None:
    assert completion_of(gd.Guide.json()) is None
    assert completion_of(gd.Guide.ebnf('root ::= "a" root "b" | "ab"')) is None
    assert completion_of(gd.Guide.regex("a").with_reasoning()) is None
    assert completion_of(gd.Guide.choice(["yes", "no"])) is not None
    assert completion_of(gd.Guide.regex("x{5000}")) is None
