"""Reading guides from request parameters. Runs wherever vLLM is installed: the room refuses to be imported without."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm builds an environment that has it")

from gd_plugin import Guide, InvalidGuideError
from gd_plugin.vllm.params import GuideParams, read_guide

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

GOOD: list[tuple[str, dict[str, Any] | None, GuideParams | None]] = [
    ("none", None, None),
    ("empty", {}, None),
    ("other plugins' keys", {"session_id": "7", "kv_transfer": {"x": 1}}, None),
    ("nested", {"guide": {"json_schema": SCHEMA}}, GuideParams(Guide.json_schema(SCHEMA))),
    ("text", {"guide": '{"regex":"a+"}'}, GuideParams(Guide.regex("a+"))),
    ("a guide itself", {"guide": Guide.choice(["a"])}, GuideParams(Guide.choice(["a"]))),
    (
        "nested with reasoning",
        {"guide": Guide.regex("a").with_reasoning().to_json()},
        GuideParams(Guide.regex("a").with_reasoning()),
    ),
    ("flat schema as text", {"guide_json_schema": json.dumps(SCHEMA)}, GuideParams(Guide.json_schema(SCHEMA))),
    ("flat schema as mapping", {"guide_json_schema": SCHEMA}, GuideParams(Guide.json_schema(SCHEMA))),
    ("flat regex", {"guide_regex": r"\d"}, GuideParams(Guide.regex(r"\d"))),
    ("flat choice", {"guide_choice": ["x", "y"]}, GuideParams(Guide.choice(["x", "y"]))),
    ("flat json as bool", {"guide_json": True}, GuideParams(Guide.json())),
    ("flat json as number", {"guide_json": 1}, GuideParams(Guide.json())),
    ("flat json as text", {"guide_json": "true"}, GuideParams(Guide.json())),
    ("flat json object", {"guide_json": "object"}, GuideParams(Guide.json("object"))),
    ("flat ebnf", {"guide_ebnf": 'a ::= "x"', "guide_start": "a"}, GuideParams(Guide.ebnf('a ::= "x"', start="a"))),
    ("backend", {"guide_regex": "a", "guide_backend": "xgrammar"}, GuideParams(Guide.regex("a"), "xgrammar")),
    (
        "reasoning marker",
        {"guide_regex": "a", "guide_reasoning": "##"},
        GuideParams(Guide.regex("a").with_reasoning(end="##")),
    ),
    (
        "reasoning as text",
        {"guide_regex": "a", "guide_reasoning": '{"end": "##", "max_tokens": 3}'},
        GuideParams(Guide.regex("a").with_reasoning(end="##", max_tokens=3)),
    ),
    (
        "reasoning as bool",
        {"guide_regex": "a", "guide_reasoning": True},
        GuideParams(Guide.regex("a").with_reasoning()),
    ),
]

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("misspelt key", {"guide_regexp": "a"}, "did you mean 'guide_regex'"),
    ("two guides", {"guide_regex": "a", "guide_choice": ["a"]}, "exactly one of"),
    ("backend alone", {"guide_backend": "xgrammar"}, "exactly one of"),
    ("backend of the wrong type", {"guide_regex": "a", "guide_backend": 3}, "guide_backend must be text"),
    ("a lone string as choice", {"guide_choice": "yes"}, "must be a list of strings"),
    ("bad regex", {"guide_regex": "("}, "position"),
    ("bad JSON", {"guide_json_schema": "{"}, "line 1"),
    ("regex of the wrong type", {"guide_regex": 5}, "must be text"),
    ("json of the wrong type", {"guide_json": "yes please"}, "pass true"),
    ("guide of the wrong type", {"guide": 5}, "guide must be a mapping"),
    ("unknown kind", {"guide": {"xml": "a"}}, "exactly one of the keys"),
    ("option beside a whole guide", {"guide": {"regex": "a"}, "guide_reasoning": "x"}, "put it inside 'guide'"),
    ("reasoning not JSON", {"guide_regex": "a", "guide_reasoning": "{"}, "guide_reasoning is not JSON"),
    ("choice of numbers", {"guide_choice": [1, 2]}, "#/0"),
]


@pytest.mark.parametrize(("extra_args", "expected"), [row[1:] for row in GOOD], ids=[row[0] for row in GOOD])
def test_reads(extra_args: dict[str, Any] | None, expected: GuideParams | None) -> None:
    assert read_guide(extra_args) == expected


@pytest.mark.parametrize(("extra_args", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_refuses(extra_args: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidGuideError, match=message):
        read_guide(extra_args)


@pytest.mark.parametrize(
    "guide",
    [Guide.json(), Guide.json_schema(SCHEMA), Guide.regex("a"), Guide.choice(["b"]), Guide.ebnf('root ::= "c"')],
    ids=lambda guide: guide.guide_type.value,
)
def test_reads_what_to_json_writes(guide: Guide) -> None:
    for value in (guide.to_json(), json.loads(guide.to_json())):
        assert read_guide({"guide": value}) == GuideParams(guide)
