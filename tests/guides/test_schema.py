# ruff: noqa: E501  (one row of a table, one line)
"""Every keyword: what is admitted is valid, what is valid in the documented spellings is admitted.

The judge of validity is `jsonschema`; the tables say what must be admitted, so that a refusal of everything fails too.
"""

import json
import pathlib

import jsonschema
import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import create_backend
from gd_plugin.guides.schema import schema_problems
from gd_plugin.guides.schema.emit import to_llguidance
from gd_plugin.guides.schema.graph import build_graph
from gd_plugin.guides.schema.reading import known_keywords
from gd_plugin.guides.schema.support import SUPPORT, support_table, xgrammar_problems

pytest.importorskip("llguidance")

# schema, instances to try: the judge says which of them are valid
CASES = {
    "type": ({"type": "integer"}, [1, 0, -5, 1.0, 1.5, "1", None, True, [], {}]),
    "type list": ({"type": ["string", "null"]}, ["", None, 1, True]),
    "no type beside a bound": ({"minimum": 3}, [2, 3, "x", None, [1], {"a": 1}]),
    "boolean true": (True, [1, "x", None, {"a": [1, {}]}]),
    "boolean inside": ({"properties": {"a": False, "b": True}}, [{"b": 1}, {"a": 1}, {}]),
    "enum": ({"enum": [1, "a", None, True, [1, 2], {"x": 1}]}, [1, 1.0, "a", None, True, False, [1, 2], [2], {"x": 1}, {}]),
    "const string": ({"const": 'a"\\/\n\u00e9\U0001f600'}, ['a"\\/\n\u00e9\U0001f600', "a"]),
    "minimum": ({"type": "number", "minimum": -1.5}, [-1.5, -1.6, 0, 1e-7, 3e20, -2]),
    "exclusive bounds": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        [0, 0.0, 1e-7, 9.5, 10, 9, 10.0],
    ),
    "integer range": ({"type": "integer", "minimum": -3, "maximum": 120}, [-4, -3, 0, 99, 100, 120, 121, 12.0, 12.5]),
    "past 64 bits": ({"type": "integer", "maximum": 2**70}, [2**70, 2**70 + 1, -(2**80)]),
    "multipleOf": ({"type": "integer", "multipleOf": 6}, [0, 6, 7, 12, 15, 600, -6, 3]),
    "multipleOf decimal": ({"type": "number", "multipleOf": 2.5, "minimum": 0}, [0, 2.5, 3, 5, 7.5, 10, 12]),
    "minLength": ({"type": "string", "minLength": 2, "maxLength": 3}, ["a", "ab", "a\nb", "\U0001f600" * 3, "abcd"]),
    "pattern": ({"type": "string", "pattern": "a+b"}, ["xaab", "ab", "ba", "aXb"]),
    "dependentSchemas evaluate nothing of an array": (
        {"unevaluatedItems": False, "dependentSchemas": {"a": {"items": True}}},
        [[], [1], {"a": 1}, {}],
    ),
    "prefixItems of dependentSchemas": (
        {"unevaluatedItems": {"type": "null"}, "dependentSchemas": {"a": {"prefixItems": [True]}}},
        [[], [1], [None], {"a": 1}],
    ),
    "unevaluatedProperties inside": (
        {"unevaluatedProperties": False, "allOf": [{"unevaluatedProperties": {"type": "string"}}]},
        [{}, {"b": "s"}, {"b": 1}],
    ),
    "unevaluatedProperties inside a part that holds": (
        {"unevaluatedProperties": False, "anyOf": [{"unevaluatedProperties": True, "required": ["a"]}, {"required": ["z"]}]},
        [{"a": 1, "b": 2}, {"z": 1}, {}],
    ),
    "unevaluatedItems inside": (
        {"unevaluatedItems": False, "$ref": "#/$defs/t", "$defs": {"t": {"prefixItems": [True], "unevaluatedItems": {"type": "integer"}}}},
        [[], ["a"], ["a", 1], ["a", "b"]],
    ),
    "const past binary floats": ({"const": 1e23}, [1e23, 10**23, int(1e23), 1e22]),
    "const of many digits": ({"enum": [7.012826629078087e16, 5e-324, 1e-100, 1e300]}, [7.012826629078087e16, 5e-324, 1e-100, 1e300, 0, 7.0128266290780872e16 + 16]),
    "const integer past binary floats": ({"const": 10**23}, [10**23, 1e23, int(1e23)]),
    "oneOf with a pattern that dialects read differently": (
        {"oneOf": [{"pattern": "^\\w$"}, {"enum": ["\u00e9", "--"]}]},
        ["\u00e9", "a", "--", "-"],
    ),
    "if for each value of a key": (
        {
            "type": "object",
            "properties": {"k": {"enum": [f"o{i}" for i in range(30)]}, "v": True},
            "required": ["k"],
            "allOf": [
                {"if": {"properties": {"k": {"const": f"o{i}"}}, "required": ["k"]}, "then": {"properties": {"v": {"const": i}}}}
                for i in range(29)
            ],
        },
        [{"k": "o3"}, {"k": "o3", "v": 3}, {"k": "o3", "v": 4}, {"k": "o29", "v": 4}, {"k": "x"}, {"v": 3}],
    ),
    "if for each value of a key that may be missing": (
        {
            "properties": {"k": {"type": "string"}, "v": True},
            "allOf": [
                {"if": {"properties": {"k": {"enum": [f"o{i}", f"p{i}"]}}}, "then": {"required": [f"r{i}"]}}
                for i in range(12)
            ],
        },
        [{"k": "o3"}, {"k": "p3", "r3": 3}, {"k": "x"}, {"k": 1}, {"v": 1}, {f"r{i}": 1 for i in range(12)}, 5, "o3"],
    ),
    "oneOf told apart by a key": (
        {
            "oneOf": [
                {"$ref": "#/$defs/d"} if i == 7 else
                {"type": "object", "properties": {"t": {"const": f"k{i}"}, "v": {"minimum": i}}, "required": ["t"]}
                for i in range(60)
            ],
            "$defs": {"d": {"type": "object", "properties": {"t": {"enum": ["k7", "seven"]}}, "required": ["t"]}},
        },
        [{"t": "k3", "v": 3}, {"t": "k3", "v": 2}, {"t": "seven", "v": 0}, {"t": "x"}, {"v": 3}],
    ),
    "oneOf told apart by a key that may be missing": (
        {"oneOf": [{"type": "object", "properties": {"t": {"const": str(i)}}} for i in range(3)]},
        [{"t": "1"}, {}, {"t": "3"}],
    ),
    "not multipleOf a fraction": (
        {"type": "number", "not": {"multipleOf": 1.5}},
        [0, 1, 1.5, 3, 2.5, -39132341580705533, 3 * 10**18, 10**14],
    ),
    "not multipleOf an integer": ({"type": "integer", "not": {"multipleOf": 3}}, [0, 1, 3, 10**18, 3 * 10**18]),
    "pattern and length": ({"type": "string", "pattern": "^[bc]+$", "maxLength": 3}, ["bcb", "bcbc", "x", ""]),
    "look-ahead": ({"type": "string", "pattern": "^(?!foo)[a-z]+$"}, ["foo", "food", "fo", "bar"]),
    "format date": ({"type": "string", "format": "date"}, ["2024-02-29", "2023-02-29", "2024-04-31", "0000-01-01"]),
    "format date-time": (
        {"type": "string", "format": "date-time"},
        ["2024-02-29T10:00:00Z", "2024-02-29T10:00:00.5+01:00", "2024-02-29T25:00:00Z", "2024-02-29T10:00:00"],
    ),
    "format unknown": ({"type": "string", "format": "isbn"}, ["x", ""]),
    "format uuid": ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000", "123e4567", 1]),
    "items": ({"type": "array", "items": {"type": "boolean"}}, [[], [True], [True, False], [1]]),
    "minItems": ({"type": "array", "minItems": 2, "maxItems": 3}, [[], [1], [1, "a"], [1, 2, 3], [1, 2, 3, 4]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": {"type": "null"}},
        [[], ["a"], ["a", 1], ["a", 1, None], [1], ["a", 1, 1]],
    ),
    "items of a tuple, draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}], "additionalItems": False},
        [[], ["a"], ["a", 1], [1]],
    ),
    "contains": ({"type": "array", "contains": {"type": "null"}}, [[], [None], [1, None, 2], [1]]),
    "minContains": (
        {"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"type": "null"}, "minContains": 2, "maxContains": 3},
        [[], [None], [None, 1, None], [None, None, None], [None] * 4],
    ),
    "contains at most": ({"contains": {"type": "integer"}, "maxItems": 2}, [[], [1], [1, 2], ["a", 1], ["a"], [1, 2, 3]]),
    "maxContains alone": ({"contains": {"type": "integer"}, "maxContains": 1}, [[], [1], [1, 2], ["a", 1], ["a"]]),
    "contains nothing else": ({"items": {"type": "integer"}, "contains": True, "maxContains": 2}, [[], [1], [1, 2], [1, 2, 3]]),
    "not of a keyword of one type": (
        {"anyOf": [{"type": "null"}, {"type": "string", "not": {"propertyNames": {"minLength": 2}}}]},
        ["a", None, {}, {"a": 1}],
    ),
    "if of a format": ({"type": "integer", "if": {"format": "uri"}, "then": {"minimum": 3}}, [2, 3, "x"]),
    "oneOf with one type's keyword": ({"type": "boolean", "oneOf": [{"propertyNames": {"minLength": 2}}, {"type": "null"}]}, [True, None]),
    "integers of draft 4": ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "maximum": 5}, [4, 5, 6, 4.0, -3]),
    "multiples of draft 4": ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "multipleOf": 5}, [5, 6, 5.0, -10]),
    "a text beside integers": ({"enum": ["é", "😀"], "type": "string"}, ["é", "😀", "e"]),
    "items of a tuple, open": ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "integer"}]}, [[1, "a"], ["a"], []]),
    "not an object": ({"not": {"enum": [{"b": 2}, [1], "a", None]}}, [{"b": 2}, {"b": 3}, {}, {"b": 2, "c": 1}, [1], [2], "a", "b"]),
    "not additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "not": {"properties": {"a": {}, "b": {}}, "additionalProperties": False}},
        [{}, {"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "c": 1}, {"c": 1, "b": 1}],
    ),
    "not propertyNames": (
        {"type": "object", "properties": {"ab": {}, "abcd": {}}, "not": {"propertyNames": {"maxLength": 3}}},
        [{}, {"ab": 1}, {"abcd": 1}, {"ab": 1, "xyzw": 1}, {"x": 1}, {"x": 1, "wxyz": 2, "y": 3}],
    ),
    "not propertyNames, all declared": (
        {"properties": {"a": {}, "bb": {}, "cc": {}}, "additionalProperties": False, "not": {"propertyNames": {"pattern": "^.$"}}},
        [{}, {"a": 1}, {"bb": 1}, {"a": 1, "cc": 1}, {"bb": 1, "cc": 1}],
    ),
    "not two kinds of names": (
        {"type": "object", "not": {"anyOf": [{"propertyNames": {"pattern": "^a"}}, {"propertyNames": {"pattern": "z$"}}]}},
        [{}, {"a": 1}, {"z": 1}, {"a": 1, "z": 1}, {"b": 1}, {"az": 1, "b": 2}],
    ),
    "unevaluatedProperties of several": (
        {"type": "object", "anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}], "unevaluatedProperties": False},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"c": 1}, {"a": 1, "c": 1}],
    ),
    "uniqueItems of a range": ({"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 40}, "uniqueItems": True}, [[1, 2], [1, 1], [1, 1.0], [40, 3, 1]]),
    "uniqueItems": ({"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True}, [[], ["a", "b"], ["a", "a"], [1, "b"]]),
    "required alone": ({"type": "object", "required": ["q"]}, [{}, {"q": 1}, {"a": 1, "q": 2}]),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
        [{}, {"b": "x"}, {"a": 1, "b": "x"}, {"a": 1}, {"b": 1}, {"a": 1, "b": "x", "c": None}],
    ),
    "additionalProperties": (
        {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": "x"}, {"z": 1}, {"z": "x"}, {"z": 1, "a": 2, "y": 3}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"n_a": 1}, {"n_a": "x"}, {"a": 1}],
    ),
    "patternProperties overlap": (
        {"patternProperties": {"a": {"minimum": 3}, "b": {"maximum": 5}}},
        [{"a": 3}, {"a": 2}, {"b": 5}, {"b": 6}, {"ab": 4}, {"ab": 6}, {"c": 9}],
    ),
    "propertyNames": ({"propertyNames": {"pattern": "^[a-z]+$"}}, [{}, {"a": 1}, {"A": 1}, {"ab": {}}]),
    "minProperties": ({"type": "object", "minProperties": 1}, [{}, {"a": 1}, {"a": 1, "b": 2}]),
    "maxProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 2},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"x": 1, "y": 1}, {"x": 1, "y": 1, "z": 1}],
    ),
    "dependentRequired": (
        {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1}, {"a": 1, "b": 2}, 3],
    ),
    "dependentSchemas": (
        {"properties": {"a": {}}, "dependentSchemas": {"a": {"required": ["c"], "properties": {"c": {"type": "null"}}}}},
        [{}, {"a": 1}, {"a": 1, "c": None}, {"a": 1, "c": 1}, {"c": 1}],
    ),
    "allOf": (
        {"allOf": [{"properties": {"a": {"minimum": 3}}}, {"properties": {"a": {"maximum": 5}}, "required": ["a"]}]},
        [{"a": 4}, {"a": 2}, {"a": 6}, {}],
    ),
    "anyOf and siblings": (
        {"type": "object", "properties": {"k": {"type": "string"}}, "anyOf": [{"required": ["k"]}, {"required": ["z"]}]},
        [{}, {"k": "x"}, {"z": 1}, {"k": 1}, {"k": "x", "z": 1}],
    ),
    "oneOf disjoint": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None, "x"]),
    "oneOf overlapping": ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, [2, 3, 4, 5, 6]),
    "oneOf required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "not": ({"not": {"type": "integer"}}, [1, 1.5, "x", None, {}]),
    "not enum": ({"type": "string", "not": {"enum": ["a", "b"]}}, ["a", "b", "c", ""]),
    "not maxLength": ({"type": "string", "not": {"maxLength": 2}}, ["", "a", "ab", "abc", "abcd"]),
    "not minLength": ({"type": "string", "not": {"minLength": 2}}, ["", "a", "ab", "abc"]),
    "not pattern of any characters": ({"type": "string", "not": {"pattern": "^[^a]{2}$"}}, ["", "b", "bb", "bbb", "ab", "a"]),
    "not pattern": ({"type": "string", "not": {"pattern": "^a"}}, ["a", "ba", "", "ab"]),
    "not required": ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}]),
    "if": (
        {
            "properties": {"k": {"enum": ["x", "y"]}, "v": {}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "x"}}},
            "then": {"properties": {"v": {"type": "integer"}}},
            "else": {"properties": {"v": {"type": "string"}}},
        },
        [{"k": "x", "v": 1}, {"k": "x", "v": "s"}, {"k": "y", "v": "s"}, {"k": "y", "v": 1}, {"k": "y"}],
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
        [{}, {"a": 1}, {"b": 1}, {"c": 1}],
    ),
    "unevaluatedItems": ({"prefixItems": [{"type": "null"}], "unevaluatedItems": {"type": "string"}}, [[], [None], [None, "a"], [None, 1]]),
    "recursion": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"v": {"type": "integer"}, "k": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "required": ["v"]}}},
        [{"v": 1}, {"v": 1, "k": [{"v": 2, "k": []}]}, {"v": 1, "k": [{}]}, {}],
    ),
    "anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, [None, 1]),
    "identifier": (
        {"$id": "http://a.example/r", "$ref": "s", "$defs": {"s": {"$id": "s", "type": "null"}}},
        [None, 1],
    ),
    "ref hides siblings in draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "properties": {"a": {"$ref": "#/definitions/n", "maximum": 3}},
            "definitions": {"n": {"type": "integer"}},
        },
        [{"a": 9}, {"a": "x"}],
    ),
    "draft 4 exclusive": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 3, "exclusiveMinimum": True},
        [3, 3.5, 4],
    ),
}  # fmt: skip


class Texts:
    """Asks one compiled guide about texts, byte by byte."""

    def __init__(self, schema, **options):
        tokens = [bytes([value]) for value in range(256)]
        vocabulary = gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[256])
        options = {"whitespace": "any", "additional_properties": True, **options}
        backend = create_backend("llguidance", vocabulary, gd.GuidedDecodingConfig(**options))
        self.matcher = backend.compile(gd.Guide.json_schema(schema)).create_matcher()

    def admits(self, text):
        self.matcher.reset()
        return all(self.matcher.accept_token(byte) for byte in text.encode()) and self.matcher.is_accepting()


def is_valid(schema, instance):
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return cls(schema, format_checker=jsonschema.FormatChecker()).is_valid(instance)


def spellings(instance):
    return [
        json.dumps(instance),
        json.dumps(instance, separators=(",", ":"), ensure_ascii=False),
        json.dumps(instance, indent=2),
    ]


@pytest.mark.parametrize("name", CASES)
def test_admits_what_the_judge_accepts(name):
    schema, instances = CASES[name]
    texts = Texts(schema)
    wrong = [
        (text, is_valid(schema, instance))
        for instance in instances
        for text in spellings(instance)
        if texts.admits(text) != is_valid(schema, instance)
    ]
    assert not wrong
    assert len({is_valid(schema, instance) for instance in instances}) == 2 or schema is True or "isbn" in str(schema)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "maxLength": 1}, '"\\ud83d\\ude00"'),
        ({"type": "string", "maxLength": 1}, '"\\u00e9"'),
        ({"type": "string", "pattern": "^/$"}, '"\\/"'),
        ({"type": "string"}, '"\\u0061"'),
        ({"const": "\u00e9"}, '"\\u00E9"'),
        ({"const": "<a&b>"}, '"\\u003ca\\u0026b\\u003E"'),
        ({"properties": {"\u00e9/": {"type": "null"}}, "required": ["\u00e9/"]}, '{"\\u00e9\\/":null}'),
        ({"propertyNames": {"pattern": "^[^a]$"}}, '{"\\u00e9":null}'),
        ({"type": "string", "pattern": "^.b$"}, '"\\u0061b"'),
        ({"type": "integer"}, "1e2"),
        ({"type": "integer"}, "-0"),
        ({"type": "integer", "minimum": 5, "maximum": 20}, "1e1"),
        ({"type": "number", "minimum": 5}, "5e0"),
    ],
)
def test_admits_every_spelling(schema, text):
    assert Texts(schema).admits(text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, '"\\ud83d"'),
        ({"type": "string"}, '"a\tb"'),
        ({"contains": {"type": "integer"}, "maxItems": 2}, "[1,2]]"),
        ({"maxProperties": 1}, '{"a":1}}'),
        ({"type": "number", "maximum": 2**63 - 1}, "9223372036854775807.0"),
        ({"type": "number", "exclusiveMaximum": 1}, "0.99999999999999999999"),
        ({"const": 2**53 + 1}, "9007199254740993.0"),
        ({"properties": {"a": {"type": "null"}}}, '{"\\u0061":1}'),
        ({"properties": {"a": {"type": "null"}}}, '{"\\u0061":null}'),
        ({"properties": {"\u00e9": {"type": "null"}}}, '{"\\u00E9":1}'),
        ({"type": "string", "not": {"const": "ab"}}, '"\\u0061b"'),
        ({"type": "string", "not": {"pattern": "[a-c]"}}, '"\\u0061"'),
        ({"const": "a"}, '"\\u0061"'),
        ({"type": "integer"}, "1e-2"),
        ({"type": "integer"}, "01"),
        ({}, " 1"),
        ({}, "1 "),
        ({"type": "object", "properties": {"a": {}, "b": {}}}, '{"b":1,"a":1}'),
    ],
)
def test_refuses_by_policy_or_grammar(schema, text):
    assert not Texts(schema).admits(text)


@pytest.mark.parametrize(
    ("schema", "error", "pointer"),
    [
        ({"$ref": "#/a"}, gd.InvalidGuideError, "#/$ref"),
        ({"$ref": "http://elsewhere.example/x"}, gd.InvalidGuideError, "#/$ref"),
        ({"type": "foo"}, gd.InvalidGuideError, "#/type"),
        ({"properties": {"a": {"pattern": "("}}}, gd.InvalidGuideError, "#/properties/a/pattern"),
        ({"properties": {"a": 3}}, gd.InvalidGuideError, "#/properties/a"),
        (False, gd.UnsatisfiableGuideError, "#"),
        ({"minimum": 5, "maximum": 3, "type": "integer"}, gd.UnsatisfiableGuideError, "#"),
        ({"enum": []}, gd.UnsatisfiableGuideError, "#"),
        ({"$ref": "#"}, gd.UnsatisfiableGuideError, "#"),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, gd.UnsatisfiableGuideError, "#"),
        ({"type": "array", "uniqueItems": True}, gd.UnsupportedGuideError, "#/uniqueItems"),
        ({"type": "string", "format": "regex"}, gd.UnsupportedGuideError, "#/format"),
        ({"properties": {"a": {"pattern": "(a)\\1"}}}, gd.UnsupportedGuideError, "#/properties/a/pattern"),
    ],
)
def test_refusals_name_the_place(schema, error, pointer):
    with pytest.raises(error) as caught:
        build_graph(schema, additional_properties=True, strict=True)
    assert caught.value.pointer == pointer


def test_not_strict_drops_and_lists():
    schema = {"type": "array", "items": {"type": "string", "pattern": "(a)\\1"}, "uniqueItems": True}
    normal = build_graph(schema, additional_properties=True, strict=False)
    assert {(p.pointer, p.keyword) for p in normal.dropped} == {
        ("#/uniqueItems", "uniqueItems"),
        ("#/items/pattern", "pattern"),
    }


@pytest.mark.parametrize(
    ("whitespace", "text", "legal"),
    [
        ("compact", '{"a":1}', True),
        ("compact", '{"a": 1}', False),
        ("bounded", '{ \n"a" : 1 }', True),
        ("bounded", '{"a":' + " " * 17 + "1}", False),
        ("any", '{"a":' + " " * 99 + "1}", True),
    ],
)
def test_white_space(whitespace, text, legal):
    assert Texts({"properties": {"a": {}}}, whitespace=whitespace).admits(text) == legal


def test_silent_objects_are_closed_where_they_declare_keys():
    closed = Texts({"properties": {"a": {}}}, additional_properties=False)
    assert closed.admits('{"a":1}') and not closed.admits('{"b":1}')
    assert Texts({"type": "object"}, additional_properties=False).admits('{"b":1}')
    merged = Texts({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, additional_properties=False)
    assert merged.admits('{"a":1,"b":2}') and not merged.admits('{"c":1}')


HOSTILE = {
    "long strings": {"type": "string", "maxLength": 10**9, "pattern": "^a"},
    "long minimum": {"type": "string", "minLength": 10**9},
    "many values": {"enum": [f"value {i}" for i in range(5000)]},
    "many keys": {"properties": {f"k{i}": {"type": "integer"} for i in range(500)}},
    "counted keys": {"properties": {f"k{i}": {"type": "integer"} for i in range(900)}, "minProperties": 3},
    "long tuple": {"prefixItems": [{"type": "integer"}] * 1900},
    "deep references": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(600)} | {"d600": {}},
    },
    "exponential allOf": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)]},
    "exponential oneOf": {"oneOf": [{"required": [f"a{i}"]} for i in range(60)]},
    "huge bound": {"type": "integer", "maximum": 10**3000},
    "many patterns": {"patternProperties": {f"a{i}": {"minimum": i} for i in range(60)}},
    "long pattern": {"pattern": "[^a]" * 3000},
    "long pattern over many values": {"enum": [f"value {i}" for i in range(5000)], "pattern": "[^a]" * 300},
    "many alternatives": {"allOf": [{"anyOf": [{"minimum": i}, {"maxLength": i}, {"maxItems": i}]} for i in range(30)]},
    "overlapping patterns": {"oneOf": [{"pattern": f"^a{i}"} for i in range(60)]},
    "nested choices": {"oneOf": [{"multipleOf": i} for i in (2, 3, 5, 7, 11, 13)]},
    "a chain of references": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"type": "integer"}},
    },
    "many optional keys": {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(2000)}},
    "many fixed numbers": {"enum": list(range(5000))},
    "many excluded texts": {"type": "string", "not": {"enum": [f"value {i}" for i in range(2000)]}},
    "backtracking": {"pattern": "^(a|aa)+b(a|aa)+c$"},
    "nested groups": {"pattern": "(" * 5000 + "a" + ")" * 5000},
    "nested counts": {"type": "string", "pattern": "^((((a{1,999}){1,999}){1,999}){1,999})$"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_end(name):
    # steps are counted, so that the bound is the same on every machine: seconds are only watched
    try:
        normal = build_graph(HOSTILE[name], additional_properties=True, strict=True)
        assert len(to_llguidance(normal)) < 1 << 22
    except gd.GuideError as error:
        assert error.pointer


def test_document_has_the_table():
    path = pathlib.Path(__file__).parents[2] / "docs" / "schemas.md"
    assert path.read_text(encoding="utf-8").endswith(support_table())


def test_the_table_names_every_keyword_that_is_read():
    read_with_another = {"then", "else", "minContains", "maxContains", "$anchor", "$id", "$defs", "definitions"}
    assert set(SUPPORT) == set(known_keywords()) | read_with_another


@pytest.mark.parametrize("keyword", SUPPORT)
def test_the_table_says_what_xgrammar_is_given(keyword):
    values = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}, "type": "string", "enum": ["a"], "const": "a"}
    values |= {"anyOf": [{"type": "null"}, {"type": "string"}], "properties": {"a": {"type": "null"}}, "required": []}
    values |= {"additionalProperties": {"type": "null"}, "items": {"type": "null"}, "minItems": 1, "maxItems": 2}
    around = {"properties": {"type": "object", "additionalProperties": False}, "items": {"type": "array"}}
    around |= {
        "additionalProperties": {"type": "object"},
        "required": {"type": "object", "additionalProperties": False},
    }
    around |= {key: {"type": "array", "items": {"type": "null"}} for key in ["minItems", "maxItems"]}
    around |= {"$ref": {"$defs": values["$defs"]}, "$defs": {"type": "null"}}
    schema = {keyword: values.get(keyword, {}), **around.get(keyword, {})}
    refused = any(problem.keyword == keyword for problem in xgrammar_problems(json.dumps(schema), False))
    if keyword == "definitions":
        return
    assert refused == (SUPPORT[keyword]["xgrammar"] == "refused")


UNSOUND_IN_XGRAMMAR = [
    "minLength",
    "pattern and length",
    "contains",
    "uniqueItems",
    "allOf",
    "oneOf overlapping",
    "not",
    "if",
]


@pytest.mark.parametrize("name", UNSOUND_IN_XGRAMMAR)
def test_xgrammar_is_not_given_what_it_does_not_enforce(name):
    pytest.importorskip("xgrammar")
    problems = schema_problems(json.dumps(CASES[name][0]), gd.GuidedDecodingConfig(), "xgrammar")
    assert problems


def test_a_reference_whose_meaning_depends_on_the_way_to_it_is_refused():
    tree = {"$id": "t", "$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}
    schema = {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "$id": "https://example.org/s",
        "$recursiveAnchor": True,
        "$ref": "t",
        "maxItems": 1,
        "$defs": {"t": tree},
    }
    with pytest.raises(gd.UnsupportedGuideError, match="recursiveAnchor") as caught:
        Texts(schema)
    assert caught.value.pointer == "#/$defs/t/items/$recursiveRef"
    # with one anchor there is one meaning
    assert Texts({**schema, "$recursiveAnchor": False}).admits("[[1,2]]")


def test_texts_that_must_be_very_long_are_refused():
    with pytest.raises(gd.UnsupportedGuideError, match="characters"):
        Texts({"type": "string", "minLength": 1_000_000})


def test_thousands_of_numbers_take_their_usual_spelling():
    texts = Texts({"enum": [*range(0, 30_000, 3), 0.5]})
    assert all(texts.admits(text) for text in ("0", "3", "29997", "0.5"))
    assert not any(texts.admits(text) for text in ("1", "29998", "3.0", "5e-1"))
