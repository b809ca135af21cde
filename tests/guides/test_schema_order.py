"""Declared keys in declared order, or each once in any order: the judge is `jsonschema`, and a loop over all orders."""

import itertools
import json
import random

import pytest

import gd_plugin as gd
from tests.schemas import BYTES, Texts, is_valid, walk

pytest.importorskip("llguidance")

_NAMED = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}}
_CLOSED = {"type": "object", "properties": _NAMED, "additionalProperties": False}
_OPEN = {"type": "object", "properties": _NAMED}
# one value a key, but for one that also has a wrong value
_VALUES = {"a": [1, "x"], "b": ["s"], "c": [None], "x1": [3], "y": [True]}

SCHEMAS = {
    "optional": _CLOSED,
    "required": {**_OPEN, "required": ["c", "b"]},
    "required and undeclared": {**_OPEN, "required": ["y", "b"]},
    "patterns": {**_CLOSED, "required": ["b"], "patternProperties": {"^x": {"type": "integer"}}},
    "least members": {**_CLOSED, "required": ["b"], "minProperties": 2},
    "least members, one free": {**_OPEN, "required": ["a"], "minProperties": 2},
    "most members": {**_CLOSED, "maxProperties": 2},
    "most members, others free": {**_OPEN, "required": ["b"], "maxProperties": 2},
    "only the required": {**_OPEN, "required": ["a", "b"], "maxProperties": 2},
    "between": {**_OPEN, "minProperties": 1, "maxProperties": 3},
    "one or the other": {**_CLOSED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "if": {**_CLOSED, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "a key that is not named": {**_OPEN, "required": ["a"], "not": {"propertyNames": {"enum": ["a", "b", "c", "y"]}}},
    "a key that is not named, of few": {
        **_OPEN,
        "required": ["a"],
        "maxProperties": 3,
        "not": {"propertyNames": {"enum": ["a", "b", "c", "y"]}},
    },
    "a key that is not named, alone": {**_OPEN, "maxProperties": 1, "not": {"propertyNames": {"pattern": "^[ab]"}}},
    "two keys that are not named": {
        **_OPEN,
        "allOf": [{"not": {"propertyNames": {"pattern": pattern}}} for pattern in ("^[abc]$|^x", "^[abc]$|^y")],
    },
    "a constant": {"enum": [{"a": 1, "b": "s"}, {"y": True, "x1": 3, "c": None}]},
}


def _objects():
    for count in range(len(_VALUES) + 1):
        for keys in itertools.permutations(_VALUES, count):
            for values in itertools.product(*(_VALUES[key] for key in keys)):
                yield dict(zip(keys, values, strict=True))


def _declared_order(schema, value):
    if "enum" in schema:
        return any(list(value.items()) == list(fixed.items()) for fixed in schema["enum"])
    order = list(dict.fromkeys([*schema["properties"], *schema.get("required", ())]))
    places = [order.index(key) for key in value if key in order]
    return places == sorted(places)


@pytest.mark.parametrize("order", ["declared", "any"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_all_orders(name, order):
    schema = SCHEMAS[name]
    texts = Texts(schema, property_order=order)
    wrong = []
    for value in _objects():
        legal = is_valid(schema, value) and (order == "any" or _declared_order(schema, value))
        if texts.admits(json.dumps(value)) != legal:
            wrong.append((value, legal))
    assert not wrong
    rng = random.Random(5)
    for _ in range(5):
        texts.matcher.reset()
        text = walk(texts.matcher, rng)
        assert text is not None, "a dead end"
        assert not text or is_valid(schema, json.loads(text)), text


@pytest.mark.parametrize("text", ['{"b":"s","a":1,"b":"t"}', '{"a":1,"b":"s","a":1}', '{"b":"s","\\u0062":"s"}'])
def test_a_declared_key_stands_once(text):
    assert not Texts({**_OPEN, "required": ["b"]}, property_order="any").admits(text)


def test_a_backend_that_would_drop_required_keys_refuses():
    texts = {"a": {"type": "string"}, "b": {"type": "string"}}
    schema = {"type": "object", "properties": texts, "required": ["b"], "additionalProperties": False}
    assert Texts(schema, backend="xgrammar", property_order="declared").admits('{"b":"x"}')
    with pytest.raises(gd.UnsupportedGuideError, match="property_order"):
        Texts(schema, backend="xgrammar", property_order="any")
    assert Texts(schema, backend="auto", property_order="any").compiled.backend == "llguidance"


def test_many_keys():
    keys = [f"k{index}" for index in range(63)]
    texts = Texts(
        {"properties": {key: {"type": "integer"} for key in keys}, "required": keys[::2]}, property_order="any"
    )
    random.Random(3).shuffle(keys)
    whole = dict.fromkeys(keys, 1)
    assert texts.admits(json.dumps(whole))
    assert not texts.admits(json.dumps({key: 1 for key in keys if key != "k62"}))
    assert texts.admits(json.dumps({key: 1 for key in keys if key != "k61"}))


def test_too_many_keys_are_refused_or_keep_their_order():
    inner = {"properties": {f"k{index}": {"type": "integer"} for index in range(64)}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"x": {"type": "object", **inner}, "y": {"type": "null"}}}
    with pytest.raises(gd.UnsupportedGuideError, match="property_order='declared'") as caught:
        Texts(schema, backend="auto", property_order="any")
    assert caught.value.pointer == "#/properties/x/properties"
    for backend in ("auto", "llguidance"):
        texts = Texts(schema, backend=backend, property_order="any", strict=False)
        (problem,) = texts.compiled.not_enforced
        assert problem.pointer == "#/properties/x/properties"
        assert texts.compiled.backend == "llguidance"
        assert texts.admits('{"y":null,"x":{"k1":1,"k2":1}}')
        assert not texts.admits('{"y":null,"x":{"k2":1,"k1":1}}')


def test_schemas_inside_tags():
    schema = {**_CLOSED, "required": ["b"], "maxProperties": 2}
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    guide = gd.Guide.structural_tag({"type": "structural_tag", "format": tag})
    config = gd.GuidedDecodingConfig(property_order="any")
    factory = gd.GrammarMatcherFactory(BYTES, backend="llguidance", config=config)
    matcher = factory.create(guide)
    for text, legal in [('{"c":null,"b":"s"}', True), ('{"c":null,"a":1}', False), ('{"b":"s","a":1,"c":null}', False)]:
        matcher.reset()
        tokens = list(f"<f>{text}</f>".encode())
        assert (matcher.validate_tokens(tokens) == len(tokens)) == legal
