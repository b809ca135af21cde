"""Guide: canonical text, equality, hashing, pickling, the JSON form, and kind errors for bad input."""

import copy
import dataclasses
import json
import pickle
import re
from enum import Enum
from typing import Any, Literal, Required, TypedDict

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gd_plugin as gd
from gd_plugin.guides.guide import Reasoning, check_guide


class Color(Enum):
    RED = "red"


class Model(pydantic.BaseModel):
    name: str
    tags: list[Literal["a", "b"]] = []
    color: Color | None = None


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Record(TypedDict):
    n: int


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
GUIDES = [
    gd.Guide.json(),
    gd.Guide.json("object"),
    gd.Guide.json_schema(SCHEMA),
    gd.Guide.json_schema(True),
    gd.Guide.json_schema(Model),
    gd.Guide.json_schema(Point),
    gd.Guide.json_schema(Record),
    gd.Guide.from_type(list[Literal["a", "é😀"]]),
    gd.Guide.regex(r"\d{4}-[a-z]+"),
    gd.Guide.regex(re.compile("a.c", re.I | re.S)),
    gd.Guide.ebnf('root ::= "a" | "b"'),
    gd.Guide.ebnf('start ::= "a" | "b"', start="start"),
    gd.Guide.choice(["yes", "no", ""]),
    gd.Guide.choice(["yes"]).with_reasoning(),
    gd.Guide.json().with_reasoning(start="<think>", end="</think>", max_tokens=5),
]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.guide[:30])
def test_copies_are_equal_and_hash_the_same(guide: gd.Guide) -> None:
    for twin in (pickle.loads(pickle.dumps(guide)), copy.deepcopy(guide), gd.Guide.from_json(guide.to_json())):
        assert twin == guide and hash(twin) == hash(guide) and repr(twin) == repr(guide)
    assert gd.Guide.from_json(json.loads(guide.to_json())) == guide
    assert gd.Guide.from_json(guide.to_json().encode()) == guide


class Nested(TypedDict, total=False):
    records: list[Record]
    one: Required[Record | None]


def test_typed_dicts_become_schemas() -> None:
    """Those of `typing` too, which pydantic refuses before Python 3.12; also below other types."""
    schema = json.loads(gd.Guide.json_schema(Record).guide)
    assert schema["properties"]["n"]["type"] == "integer" and schema["required"] == ["n"]
    text = gd.Guide.json_schema(Nested).guide
    assert '"records"' in text and '"integer"' in text and '"required":["one"]' in text
    assert '"integer"' in gd.Guide.from_type(list[Record]).guide


def test_different_guides_differ() -> None:
    assert len(set(GUIDES)) == len(GUIDES)


def test_a_guide_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GUIDES[0].guide = "object"  # type: ignore[misc]


def test_spacing_is_no_meaning_and_key_order_is() -> None:
    text = json.dumps(SCHEMA)
    same = [SCHEMA, text, text.encode(), json.dumps(SCHEMA, indent=4), json.dumps(SCHEMA, separators=(",", ":"))]
    assert len({gd.Guide.json_schema(schema) for schema in same}) == 1
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    assert gd.Guide.json_schema(turned) != gd.Guide.json_schema(SCHEMA)
    assert list(json.loads(gd.Guide.json_schema(SCHEMA).guide)["properties"]) == ["b", "a"]


def test_choices_keep_their_order_and_count_once() -> None:
    assert gd.Guide.choice(["b", "a", "b"]).options() == ["b", "a"]
    assert gd.Guide.choice(iter(["b"])) == gd.Guide.choice(("b",))
    with pytest.raises(TypeError, match="regex"):
        gd.Guide.regex("a").options()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, unique=True))
def test_any_choices_survive_the_round_trip(options: list[str]) -> None:
    guide = gd.Guide.from_json(gd.Guide.choice(options).to_json())
    assert guide.options() == options


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), _JSON, max_size=4))
def test_any_object_is_kept_as_it_is(schema: dict[str, Any]) -> None:
    guide = gd.Guide.json_schema(schema)
    assert json.loads(guide.guide) == schema
    assert list(json.loads(guide.guide)) == list(schema)
    assert gd.Guide.from_json(guide.to_json()) == guide


def cyclic() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {"self": schema}
    return schema


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: gd.Guide.json("array"), gd.InvalidGuideError, "any"),  # type: ignore[arg-type]
    (lambda: gd.Guide.json_schema("{"), gd.InvalidGuideError, "line 1, column 2"),
    (lambda: gd.Guide.json_schema('{\n"a":}'), gd.InvalidGuideError, "line 2"),
    (lambda: gd.Guide.json_schema("[]"), gd.InvalidGuideError, "array"),
    (lambda: gd.Guide.json_schema("7"), gd.InvalidGuideError, "int"),
    (lambda: gd.Guide.json_schema(b"\xff"), gd.InvalidGuideError, "UTF-8"),
    (lambda: gd.Guide.json_schema('{"a":1,"a":2}'), gd.InvalidGuideError, "'a' twice"),
    (lambda: gd.Guide.json_schema('{"minimum":NaN}'), gd.InvalidGuideError, "NaN"),
    (lambda: gd.Guide.json_schema({"minimum": float("inf")}), gd.InvalidGuideError, "#/minimum"),
    (lambda: gd.Guide.json_schema({1: "x"}), gd.InvalidGuideError, "key 1"),
    (lambda: gd.Guide.json_schema({"enum": [{1, 2}]}), gd.InvalidGuideError, "#/enum/0: set"),
    (lambda: gd.Guide.json_schema({"a/b": {"c~d": object()}}), gd.InvalidGuideError, "#/a~1b/c~0d"),
    (lambda: gd.Guide.json_schema({"title": "\ud800"}), gd.InvalidGuideError, "surrogate"),
    (lambda: gd.Guide.json_schema(cyclic()), gd.GuideTooLargeError, "holding itself"),
    (lambda: gd.Guide.json_schema(deep(5000)), gd.GuideTooLargeError, "deep"),
    (lambda: gd.Guide.json_schema("[" * 100_000), gd.GuideTooLargeError, "deep"),
    (lambda: gd.Guide.json_schema('{"a":' * 100_000), gd.GuideTooLargeError, "deep"),
    (lambda: gd.Guide.json_schema("9" * 10_000), gd.InvalidGuideError, ""),
    (lambda: gd.Guide.json_schema(object()), gd.InvalidGuideError, "object"),
    (lambda: gd.Guide.regex("(ab"), gd.InvalidGuideError, "position 0"),
    (lambda: gd.Guide.regex("a**"), gd.InvalidGuideError, "position"),
    (lambda: gd.Guide.regex(b"a"), gd.InvalidGuideError, "bytes"),  # type: ignore[arg-type]
    (lambda: gd.Guide.regex(re.compile(b"a")), gd.InvalidGuideError, "bytes"),  # type: ignore[arg-type]
    (lambda: gd.Guide.regex("(" * 20_000 + ")" * 20_000), gd.GuideTooLargeError, "position"),
    (lambda: gd.Guide.regex("a\udfff"), gd.InvalidGuideError, "position 1: a regex holds the lone surrogate"),
    (lambda: gd.Guide.ebnf('x ::= y\ny ::= "\ud800"'), gd.InvalidGuideError, "line 2, column 8: an EBNF grammar holds"),
    (lambda: gd.Guide.ebnf('a ::= "a"', "\ud800"), gd.InvalidGuideError, "position 0: the start rule's name"),
    (lambda: gd.Guide.lark('start: "\ud800"'), gd.InvalidGuideError, "line 1, column 9: a Lark grammar"),
    (lambda: gd.Guide.lark(None), gd.InvalidGuideError, "NoneType"),  # type: ignore[arg-type]
    (lambda: gd.Guide.json_schema(None), gd.InvalidGuideError, "NoneType"),
    (lambda: gd.Guide.structural_tag('{"type":1,"type":2}'), gd.InvalidGuideError, "'type' twice"),
    (lambda: gd.Guide.from_json('{"regex":"a","regex":"b"}'), gd.InvalidGuideError, "'regex' twice"),
    (lambda: gd.Guide.from_json('{"json_schema":{"minimum":-Infinity}}'), gd.InvalidGuideError, "-Infinity"),
    (lambda: gd.Guide.from_json({"regex": "a", "a/b": 1}), gd.InvalidGuideError, "#/a~1b"),
    (lambda: gd.Guide.json().with_reasoning(end="\ud800"), gd.InvalidGuideError, "#/reasoning/end: "),
    (lambda: gd.Guide.json().with_reasoning(start="<\udfff"), gd.InvalidGuideError, "#/reasoning/start: "),
    (
        lambda: gd.Guide.from_json('{"regex":"a","reasoning":{"end":"\\ud800"}}'),
        gd.InvalidGuideError,
        "#/reasoning/end: ",
    ),
    (lambda: gd.Guide.tools([]), gd.InvalidGuideError, "#/tool_choice"),
    (lambda: gd.Guide.tools([], style=[]), gd.InvalidGuideError, "#/style"),  # type: ignore[arg-type]
    # too long to be read: refused for that, before anything is read, and never for "repeat counts"
    (
        lambda: gd.Guide.regex("b" * 1_060_000),
        gd.GuideTooLargeError,
        "has 1060000 characters, over 200000; use Guide.ch",
    ),
    (
        lambda: gd.Guide.ebnf("b" * 1_060_000),
        gd.GuideTooLargeError,
        "1060000 characters, over 1000000; use Guide.choice",
    ),
    (
        lambda: gd.Guide.lark("b" * 1_060_000),
        gd.GuideTooLargeError,
        "1060000 characters, over 1000000; use Guide.choice",
    ),
    (lambda: gd.Guide.ebnf("  \n"), gd.InvalidGuideError, "line 1, column 1"),
    (lambda: gd.Guide.ebnf(7), gd.InvalidGuideError, "int"),  # type: ignore[arg-type]
    (lambda: gd.Guide.choice("yes"), gd.InvalidGuideError, "list of strings"),
    (lambda: gd.Guide.choice(["a", 1]), gd.InvalidGuideError, "#/1"),  # type: ignore[list-item]
    (lambda: gd.Guide.choice(7), gd.InvalidGuideError, "int"),  # type: ignore[arg-type]
    (lambda: gd.Guide.choice(["\ud800"]), gd.InvalidGuideError, "surrogate"),
    (lambda: gd.Guide.choice([]), gd.UnsatisfiableGuideError, "no options"),
    (lambda: gd.Guide.from_type(object()), gd.InvalidGuideError, ""),
    (lambda: gd.Guide.json().with_reasoning(end=""), gd.InvalidGuideError, "end"),
    (lambda: gd.Guide.json().with_reasoning(start=""), gd.InvalidGuideError, "start"),
    (lambda: gd.Guide.json().with_reasoning(max_tokens=-1), gd.InvalidGuideError, "max_tokens"),
    (lambda: gd.Guide.json().with_reasoning(max_tokens=True), gd.InvalidGuideError, "max_tokens"),
    (lambda: gd.Guide.from_json("x"), gd.InvalidGuideError, "line 1"),
    (lambda: gd.Guide.from_json("[1]"), gd.InvalidGuideError, "array"),
    (lambda: gd.Guide.from_json({}), gd.InvalidGuideError, "json_schema"),
    (lambda: gd.Guide.from_json({"regex": "a", "choice": ["a"]}), gd.InvalidGuideError, "exactly one"),
    (lambda: gd.Guide.from_json({"regex": "a", "flags": 1}), gd.InvalidGuideError, "#/flags"),
    (lambda: gd.Guide.from_json({"regex": "a", "start": "x"}), gd.InvalidGuideError, "#/start"),
    (lambda: gd.Guide.from_json({"regex": "("}), gd.InvalidGuideError, "position"),
    (lambda: gd.Guide.from_json({"regex": 7}), gd.InvalidGuideError, "int"),
    (lambda: gd.Guide.from_json({"choice": "yes"}), gd.InvalidGuideError, "list"),
    (lambda: gd.Guide.from_json({"json": "all"}), gd.InvalidGuideError, "any"),
    (lambda: gd.Guide.from_json({"json": []}), gd.InvalidGuideError, "any"),
    (lambda: gd.Guide.from_json({"json": "any", "reasoning": {"stop": "x"}}), gd.InvalidGuideError, "#/reasoning"),
    (lambda: gd.Guide.from_json({"json": "any", "reasoning": 3}), gd.InvalidGuideError, "#/reasoning"),
    (lambda: gd.Guide.from_json({"json": "any", "reasoning": {"end": 3}}), gd.InvalidGuideError, "end"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_input_is_refused_with_its_place(number: int) -> None:
    make, error, words = BAD[number]
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)
    assert isinstance(caught.value, gd.GuideError)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.pointer) == (str(caught.value), caught.value.pointer)
    # a pointer is a JSON pointer or a place in the text, and an error is told once, with its own hint
    assert re.fullmatch(r"#(/.*)?|position \d+|line \d+, column \d+", caught.value.pointer)
    assert caught.value.hint and str(caught.value).count(caught.value.hint) == 1
    assert len(re.findall(r"#: |position \d+: |line \d+, column \d+: ", str(caught.value))) <= 1
    assert not isinstance(caught.value.__cause__, gd.GuideError)


@pytest.mark.parametrize("wrong", [("yaml", "x"), ("json", 7), ("regex", None)])
def test_the_bare_constructor_checks_too(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        gd.Guide(*wrong)


@pytest.mark.parametrize(
    "guide",
    [
        gd.Guide(gd.GuideType.JSON_SCHEMA, "{"),
        gd.Guide(gd.GuideType.JSON_SCHEMA, "[]"),
        gd.Guide(gd.GuideType.JSON, "zzz"),
        gd.Guide(gd.GuideType.CHOICE, "zz"),
        gd.Guide(gd.GuideType.CHOICE, "[1]"),
        gd.Guide(gd.GuideType.CHOICE, "{}"),
        gd.Guide(gd.GuideType.CHOICE, '"ab"'),
        gd.Guide(gd.GuideType.STRUCTURAL_TAG, "{}"),
        gd.Guide(gd.GuideType.STRUCTURAL_TAG, "x"),
        gd.Guide(gd.GuideType.STRUCTURAL_TAG, '{"structures": [], "triggers": []}'),
        gd.Guide(gd.GuideType.REGEX, "("),
        gd.Guide(gd.GuideType.REGEX, "a", reasoning="x"),  # type: ignore[arg-type]
        gd.Guide(gd.GuideType.REGEX, "a", reasoning=Reasoning(end="")),
    ],
    ids=str,
)
def test_guides_built_directly_are_checked_when_compiled(guide: gd.Guide) -> None:
    vocabulary = gd.Vocabulary.from_bytes([*(bytes([b]) for b in range(256)), None], stop_token_ids=[256])
    with pytest.raises(gd.InvalidGuideError):
        gd.GrammarMatcherFactory(vocabulary).compile(guide)


def test_guides_of_the_class_methods_pass_the_check() -> None:
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    for guide in [*GUIDES, gd.Guide.structural_tag({"type": "structural_tag", "format": tag})]:
        check_guide(guide)


def test_from_json_names_what_it_takes() -> None:
    with pytest.raises(gd.InvalidGuideError, match="JSON text or a mapping, got NoneType"):
        gd.Guide.from_json(None)  # type: ignore[arg-type]
