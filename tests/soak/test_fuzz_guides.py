"""Guides of any text: a guide or a typed refusal, soon; and lint tells of every guide what the engines make of it.

Texts are drawn from the characters that mean something in each language, and from sound examples with pieces cut out,
doubled and put elsewhere. Each refusal is judged by its class alone: what the languages mean is tested elsewhere.
"""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gd_plugin as gd
from tests.fuzz import pick

pytestmark = pytest.mark.timeout(pick(120, 7200))
# far over anything but a hang: the machine may be busy
HANG_S = 60.0
MAKERS = {
    "regex": gd.Guide.regex,
    "ebnf": gd.Guide.ebnf,
    "lark": gd.Guide.lark,
    "json_schema": gd.Guide.json_schema,
    "structural_tag": gd.Guide.structural_tag,
    "from_json": gd.Guide.from_json,
}
CHARACTERS = {
    "regex": r"ab01(){}[]|*+?.^$\-,dwsSDWbBxunN:=!<>P'Pé漢" + "\n\x00\U0001f600",
    "ebnf": 'abr ot:=|"[]()*+?{}0,-\\/#.<>^~\n\x00é漢',
    "lark": 'abstr:|"/[]()*+?{}~.0-9\\%_AZ\n\x00é漢i',
}
JSON = '{}[]":,0123456789.-+eE \\u/truefalsn' + "é漢\n"
EXAMPLES = {
    "regex": [r"(\d{4}-\d{2}-\d{2})(T\d{2}:\d{2})?", r"[^\W_a-f]+|(?:ab|cd){2,5}", r"(?=a)\w*\b", r"(?P<n>a)(?P=n)"],
    "ebnf": [
        'root ::= "a" (b | [c-f]+)* "\\n"\nb ::= root? "x"',
        "root ::= [^\\x00-\\x1f]{2,3} # note",
        'root = "a" ;',
    ],
    "lark": [
        'start: "a" (b | C)+\nb: start?\nC: /[c-f]+/',
        'start: A~2..3\nA: "x"i\n%ignore " "',
        "%import common.INT",
    ],
    "json_schema": [
        '{"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": [1, "x", null]}}}',
        '{"oneOf": [{"type": "integer", "minimum": 3}, {"type": "string", "pattern": "^a+$", "maxLength": 4}]}',
        '{"type": "array", "items": {"not": {"type": "null"}}, "contains": {"const": 2}, "uniqueItems": true}',
        '{"type": "string", "format": "date-time"}',
    ],
    "structural_tag": [
        '{"format": {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}}',
        '{"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}',
    ],
    "from_json": ['{"regex": "a+", "reasoning": {"end": "</think>"}}', '{"choice": ["a", "b"]}', '{"json": "any"}'],
}


@st.composite
def texts(draw):
    """A kind of guide and a text for it."""
    kind = draw(st.sampled_from(sorted(MAKERS)))
    alphabet = st.sampled_from(CHARACTERS.get(kind, JSON))
    if draw(st.integers(0, 3)) == 0:
        return kind, draw(st.text(alphabet | st.characters(codec="utf-8"), max_size=40))
    text = draw(st.sampled_from(EXAMPLES[kind]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 12)))
        change = draw(st.sampled_from(["cut", "double", "move", "write"]))
        if change == "cut":
            text = text[:start] + text[end:]
        elif change == "double":
            text = text[:end] + text[start:end] * draw(st.integers(1, 3)) + text[end:]
        elif change == "move":
            rest = text[:start] + text[end:]
            place = draw(st.integers(0, len(rest)))
            text = rest[:place] + text[start:end] + rest[place:]
        else:
            text = text[:start] + draw(st.text(alphabet, max_size=4)) + text[start:]
    return kind, text


def made(kind, text):
    """The guide, or None where the text is refused."""
    try:
        return MAKERS[kind](text)
    except gd.GuideError as error:
        assert str(error)
        return None


@settings(max_examples=pick(150, 20_000))
@given(texts())
def test_any_text_is_a_guide_or_refused(kind_and_text):
    begun = time.monotonic()
    guide = made(*kind_and_text)
    if guide is not None:
        assert gd.Guide.from_json(guide.to_json()) == guide and hash(guide) == hash(made(*kind_and_text))
    assert time.monotonic() - begun < HANG_S


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "items",
                    "anyOf",
                    "allOf",
                    "$ref",
                    "enum",
                    "const",
                    "pattern",
                    "minimum",
                    "maxItems",
                    "format",
                    "required",
                    "additionalProperties",
                    "$defs",
                    "not",
                    "if",
                    "regex",
                    "a",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=pick(100, 10_000))
@given(VALUES)
def test_any_json_value_is_a_schema_or_refused(value):
    for make in (gd.Guide.json_schema, gd.Guide.structural_tag, gd.Guide.from_json):
        for given_as in (value, json.dumps(value)):
            try:
                make(given_as)
            except (gd.GuideError, TypeError) as error:
                # what is no JSON object, list or text at all is a TypeError of the caller's
                assert str(error)


@pytest.fixture(scope="module")
def vocabulary():
    return gd.Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), b"ab", None], stop_token_ids=[257])


@settings(max_examples=pick(25, 2_000))
@given(texts())
def test_lint_tells_of_any_guide(vocabulary, kind_and_text):
    guide = made(*kind_and_text)
    if guide is None:
        return
    begun = time.monotonic()
    report = gd.lint(guide, tokenizer=vocabulary)
    assert report.ok or report.problems
    if report.ok:
        # what is said to be satisfiable begins with a mask that is not empty
        bitmask = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
        gd.GrammarMatcherFactory(vocabulary).create(guide).fill_next_token_bitmask(bitmask, 0)
        assert gd.row_has_valid_token(bitmask[0], vocabulary.vocab_size)
    assert time.monotonic() - begun < HANG_S
