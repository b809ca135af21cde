"""Guides from public reports, by row of the collection they are kept in: right ones mean what they say.

Wrong guides are refused when they are built or compiled, before any token, with class, place and what to do.
"""

import pytest

import gd_plugin as gd


def schema(value):
    return lambda: gd.Guide.json_schema(value)


def node(required):
    """A list node that holds the next one."""
    item = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    return {"$ref": "#/$defs/node", "$defs": {"node": {**item, "required": ["next"]} if required else item}}


TOOLS = [{"type": "function", "function": {"name": f"tool{i}", "parameters": {"type": "object"}}} for i in range(34)]
BAD_FIELD = {"type": "object", "properties": {"x": {"type": "strnig"}}}
BAD_TOOLS = [*TOOLS[:20], {"type": "function", "function": {"name": "bad", "parameters": BAD_FIELD}}, *TOOLS[21:]]
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}

WRONG = {
    # row: guide, class, the place in front of the message
    "46 required recursion": (schema(node(True)), gd.UnsatisfiableGuideError, "#"),
    "46 pure cycle": (schema(CYCLE), gd.GuideError, "#"),
    "50 empty range": (schema({"type": "integer", "minimum": 9, "maximum": 3}), gd.UnsatisfiableGuideError, "#"),
    "59 inner anchor": (lambda: gd.Guide.regex("a^b"), gd.UnsupportedGuideError, "position 1"),
    "60 look-ahead": (lambda: gd.Guide.regex("x(?=a)a"), gd.UnsupportedGuideError, "position 1"),
    "60 negative look-ahead": (lambda: gd.Guide.regex("(?!a)b"), gd.UnsupportedGuideError, "position 0"),
    "60 look-behind": (lambda: gd.Guide.regex("x(?<=x)a"), gd.UnsupportedGuideError, "position 1"),
    "60 back-reference": (lambda: gd.Guide.regex(r"(a)\1"), gd.UnsupportedGuideError, "position 3"),
    "60 word boundary": (lambda: gd.Guide.regex(r"a\b"), gd.UnsupportedGuideError, "position 1"),
    "62 unclosed group": (lambda: gd.Guide.regex("(ab"), gd.InvalidGuideError, "position 0"),
    "62 repeated anchor": (lambda: gd.Guide.regex("^+[a-z]$"), gd.InvalidGuideError, "position"),
    "62 undefined rule": (lambda: gd.Guide.ebnf('root ::= "a" b'), gd.InvalidGuideError, "line 1, column 14"),
    "62 no root": (lambda: gd.Guide.ebnf('a ::= "a"'), gd.InvalidGuideError, "line 1, column 1"),
    "62 duplicate rule": (lambda: gd.Guide.ebnf('root ::= a\na ::= "a"\na ::= "b"'), gd.InvalidGuideError, "line 3"),
    "62 endless": (lambda: gd.Guide.ebnf('root ::= "a" root'), gd.UnsatisfiableGuideError, "line 1"),
    "62 broken JSON": (schema('{"type": '), gd.InvalidGuideError, "line 1"),
    "62 unknown type": (schema({"properties": {"a": {"type": "strnig"}}}), gd.InvalidGuideError, "#/properties/a/type"),
    "62 remote reference": (schema({"$ref": "https://example.org/x.json"}), gd.InvalidGuideError, "#/$ref"),
    "64 groups": (lambda: gd.Guide.regex("(" * 20_000), gd.GuideTooLargeError, "position"),
    "64 arrays": (schema('{"items":' * 3000 + "{}" + "}" * 3000), gd.GuideTooLargeError, "position"),
    "69 a bad field in the 21st of 34 tools": (
        lambda: gd.Guide.tools(BAD_TOOLS), gd.InvalidGuideError, "#/format/tags/20/content/json_schema/properties/x/type"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def factory():
    tokens = [bytes([value]) for value in range(256)]
    return gd.GrammarMatcherFactory(gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[256]))


@pytest.mark.parametrize("row", WRONG)
def test_wrong_guides_are_told(factory, row):
    build, error, place = WRONG[row]
    with pytest.raises(error) as caught:
        factory.compile(build())
    assert str(caught.value).startswith(place), str(caught.value)
    assert caught.value.pointer is not None and caught.value.pointer.startswith(place)
    if "tools" in row:
        assert '"bad"' in str(caught.value)
    assert factory._worker._process is None, "a wrong guide has started a process"


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
MEANING = {
    # row: guide, texts that match, texts that do not
    "41 pattern and length": (
        schema({"type": "string", "pattern": "^[bc]+$", "maxLength": 3}), ['"bcb"'], ['"bcbcb"', '"a"']
    ),
    "42 escapes count once": (schema({"type": "string", "maxLength": 3}), [r'"a\nb"', r'"\ud83d\ude00"'], ['"abcd"']),
    "43 patternProperties": (
        schema({"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}),
        ['{"n_a":1}', "{}"],
        ['{"n_a":"x"}', '{"x":1}'],
    ),
    "44 required without properties": (schema({"type": "object", "required": ["sku"]}), ['{"sku":1}'], ["{}"]),
    "44 minItems without items": (schema({"type": "array", "minItems": 2}), ["[1,2]"], ["[]", "[1]"]),
    "46 recursion": (schema(node(False)), ['{"next":{"next":{}}}', "{}"], ['{"next":1}']),
    "47 not": (schema({"type": "integer", "not": {"const": 3}}), ["4"], ["3"]),
    "49 overlapping oneOf": (
        schema({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}]}), ["4", "6"], ["5"]
    ),
    "50 bounds": (schema({"type": "integer", "exclusiveMinimum": 3, "maximum": 5}), ["4", "5"], ["3", "6"]),
    "51 unknown format": (schema({"type": "string", "format": "isbn"}), ['"x"'], ["1"]),
    "54 empty containers": (schema({"type": "array", "maxItems": 0}), ["[]"], ["[1]"]),
    "55 other keys": (schema(OBJECT), ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
    "56 order of keys": (schema(OBJECT), ['{"a":1,"b":2}'], ['{"b":2,"a":1}']),
    "59 outer anchors": (lambda: gd.Guide.regex(r"^on$|^off$"), ["on", "off"], ["onoff"]),
    "61 Unicode digits": (lambda: gd.Guide.regex(r"\d+"), ["٤٢", "42"], ["x"]),
    "61 dot": (lambda: gd.Guide.regex("."), ["é"], ["\n"]),
    "61 flags and names": (lambda: gd.Guide.regex("(?i)(?P<y>ab)"), ["AB"], ["ba"]),
}  # fmt: skip


@pytest.mark.parametrize("row", MEANING)
def test_right_guides_mean_what_they_say(factory, row):
    build, good, bad = MEANING[row]
    matcher = factory.create(build())
    for text in (*good, *bad):
        data = text.encode()
        matcher.reset()
        legal = matcher.validate_tokens(data) == len(data) and all(map(matcher.accept_token, data))
        assert (legal and matcher.is_accepting()) == (text in good), text
