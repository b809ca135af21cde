import json
import random
import re

import jsonschema
import pytest

import gd_plugin as gd

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}

AGE = gd.Guide.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})

CASES = [
    # guide, text, ok, complete, position, something that is expected, pointer
    (gd.Guide.regex(r"\d{2}-\d"), "12-3", True, True, None, None, None),
    (gd.Guide.regex(r"\d{2}-\d"), "1x-3", False, False, 1, "0-9", None),
    (gd.Guide.regex(r"\d{2}-\d"), "12-", False, False, 3, "0-9", None),
    (gd.Guide.regex(r"\d{2}-\d"), "12-34", False, True, 4, "end of text", None),
    (gd.Guide.regex("é日x"), "é日y", False, False, 2, "x", None),
    (gd.Guide.regex("é日x"), "éa", False, False, 1, "characters past ASCII", None),
    (gd.Guide.choice(["yes", "no"]), "maybe", False, False, 0, "y", None),
    (gd.Guide.ebnf('root ::= "(" root ")" | "x"'), "((x)", False, False, 4, ")", None),
    (gd.Guide.json_schema(PERSON), '{"name":"a","tags":[1,"b"]}', False, False, 22, "0-9", "#/tags/1"),
    (gd.Guide.json_schema(PERSON), '{"name":"a}","tags":[1,2]}', True, True, None, None, None),
    (gd.Guide.json_schema(PERSON), '{"name":5', False, False, 8, '"', "#/name"),
    (gd.Guide.json_schema(PERSON), '{"name":"a"', False, False, 11, ",", "#/name"),
    (gd.Guide.json_schema(PERSON), "[", False, False, 0, "{", "#"),
    (gd.Guide.json(), '{"a":[1,{"b~/":nul', False, False, 18, "l", "#/a/1/b~0~1"),
    (gd.Guide.json(), r'{"q\"/\u00e9":nul', False, False, 17, "l", '#/q"~1é'),
    (gd.Guide.json(), r'{"\ud800":nul', False, False, 13, "l", r"#/\ud800"),
    # brackets of a thought are none of the document's
    (AGE.with_reasoning(), 'I think {"x": [ </think>{"a":"z"}', False, False, 29, "0-9", "#/a"),
    (AGE.with_reasoning(), '[{ "</think>[', False, False, 12, "{", "#"),
    (AGE.with_reasoning(), '{"x": [', False, False, 7, "a-z", "#"),
    (AGE.with_reasoning(start="[THINK]"), ' [THINK]{"x"[</think>{"a":z', False, False, 26, "0-9", "#/a"),
    (AGE.with_reasoning(start="[THINK]"), " [TH", False, False, 4, "I", "#"),
    (AGE.with_reasoning(start="[THINK]"), '{"a":"</think>', False, False, 5, "0-9", "#/a"),
    (gd.Guide.regex("1").with_reasoning(max_tokens=1), "some thought</think>1", True, True, None, None, None),
    (gd.Guide.regex("1").with_reasoning(), "some thought</think>2", False, False, 20, "1", None),
]


@pytest.mark.parametrize(("guide", "text", "ok", "complete", "position", "expected", "pointer"), CASES)
def test_verdict(guide, text, ok, complete, position, expected, pointer):
    verdict = gd.validate(guide, text)
    assert (verdict.ok, verdict.complete, verdict.position, verdict.pointer) == (ok, complete, position, pointer)
    assert bool(verdict) == ok
    assert expected is None or expected in verdict.expected


def test_regex_agrees_with_re():
    rnd = random.Random(5)
    guide = gd.Guide.regex(r"(a|bc)*\d?")
    for _ in range(200):
        text = "".join(rnd.choice("abc1é") for _ in range(rnd.randint(0, 6)))
        assert gd.validate(guide, text).ok == bool(re.fullmatch(r"(a|bc)*\d?", text)), text


def test_schema_agrees_with_jsonschema():
    rnd = random.Random(6)
    guide = gd.Guide.json_schema(PERSON)
    for _ in range(100):
        value = {"name": rnd.choice(["x", 1, "é\n"]), "tags": rnd.choice([[], [1, 2], ["a"], None])}
        legal = jsonschema.Draft202012Validator(PERSON).is_valid(value)
        assert gd.validate(guide, json.dumps(value)).ok == legal, value


def test_tokenizer_must_spell_it():
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"bc", None], stop_token_ids=[2])
    guide = gd.Guide.regex("[abc]+")
    assert gd.validate(guide, "abca", tokenizer=vocabulary).ok
    verdict = gd.validate(guide, "acb", tokenizer=vocabulary)
    assert not verdict.ok
    assert verdict.position == 1


def test_wrong_arguments():
    with pytest.raises(TypeError, match="Guide"):
        gd.validate("a", "a")
    with pytest.raises(TypeError, match="str"):
        gd.validate(gd.Guide.regex("a"), b"a")
