"""Guides from public reports, by row of the collection they are kept in: right ones mean what they say.

Wrong guides are refused when they are built or compiled, before any token, with class, place and what to do.
"""

import re
import time

import pytest

import gd_plugin as gd

# milliseconds on a machine of its own
HANG_S = 10.0


def schema(value):
    return lambda: gd.Guide.json_schema(value)


def node(required):
    """A list node that holds the next one."""
    item = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    return {"$ref": "#/$defs/node", "$defs": {"node": {**item, "required": ["next"]} if required else item}}


def ladder(length):
    """Objects inside objects."""
    return {"type": "object", "properties": {"x": ladder(length - 1)}} if length else {"type": "null"}


TOOLS = [{"type": "function", "function": {"name": f"tool{i}", "parameters": {"type": "object"}}} for i in range(34)]
BAD_FIELD = {"type": "object", "properties": {"x": {"type": "strnig"}}}
BAD_TOOLS = [*TOOLS[:20], {"type": "function", "function": {"name": "bad", "parameters": BAD_FIELD}}, *TOOLS[21:]]
IN_TOOL_20 = "#/format/tags/20/content/json_schema"
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}

PROPERTY_CYCLE = {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}}
MUTUAL = {
    "$ref": "#/$defs/a",
    "$defs": {
        name: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{other}"}}, "required": ["x"]}
        for name, other in ("ab", "ba")
    },
}
INVALID, UNSUPPORTED, UNSATISFIABLE = gd.InvalidGuideError, gd.UnsupportedGuideError, gd.UnsatisfiableGuideError
TOO_LARGE = gd.GuideTooLargeError
regex, ebnf, lark, tag, tools = (
    lambda *given, build=build: lambda: build(*given)
    for build in (gd.Guide.regex, gd.Guide.ebnf, gd.Guide.lark, gd.Guide.structural_tag, gd.Guide.tools)
)
UNTRIGGERED = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<b"]}
SEQUENCE = {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "(a"}]}}

WRONG = [
    # row of the collection and what is wrong, guide, class, the place in front of the message
    ("46 required recursion", schema(node(True)), UNSATISFIABLE, "#"),
    ("46 two that require each other", schema(MUTUAL), UNSATISFIABLE, "#"),
    ("46 items that need themselves", schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), UNSATISFIABLE, "#"),
    ("46 pure cycle", schema(CYCLE), UNSATISFIABLE, "#/$defs/"),
    ("46 refers to itself", schema({"$ref": "#"}), UNSATISFIABLE, "#"),
    ("46 cycle through allOf", schema(PROPERTY_CYCLE), UNSATISFIABLE, "#/properties/a"),
    ("46 cycle through anyOf", schema({"anyOf": [{"type": "null"}, {"$ref": "#"}]}), UNSATISFIABLE, "#"),
    ("50 empty range", schema({"type": "integer", "minimum": 9, "maximum": 3}), UNSATISFIABLE, "#"),
    ("50 empty open range", schema({"type": "number", "exclusiveMinimum": 3, "maximum": 3}), UNSATISFIABLE, "#"),
    ("50 no whole number", schema({"type": "integer", "minimum": 0.2, "maximum": 0.8}), UNSATISFIABLE, "#"),
    ("50 no multiple", schema({"type": "integer", "minimum": 4, "maximum": 5, "multipleOf": 3}), UNSATISFIABLE, "#"),
    ("50 a multiple of 0", schema({"multipleOf": 0}), INVALID, "#/multipleOf"),
    ("50 a bound of text", schema({"minimum": "3"}), INVALID, "#/minimum"),
    ("50 lengths", schema({"type": "string", "minLength": 3, "maxLength": 2}), UNSATISFIABLE, "#"),
    ("50 items", schema({"type": "array", "minItems": 3, "maxItems": 2}), UNSATISFIABLE, "#"),
    ("50 a negative length", schema({"type": "string", "maxLength": -1}), INVALID, "#/maxLength"),
    ("54 an empty enum", schema({"enum": []}), UNSATISFIABLE, "#"),
    ("54 false", schema(False), UNSATISFIABLE, "#"),
    ("54 required but false", schema({"type": "object", "properties": {"a": False}, "required": ["a"]}), UNSATISFIABLE, "#"),
    ("54 const of another type", schema({"type": "string", "const": 5}), UNSATISFIABLE, "#"),
    ("54 no option", lambda: gd.Guide.choice([]), UNSATISFIABLE, "#"),
    ("59 inner anchor", regex("a^b"), UNSUPPORTED, "position 1"),
    ("59 inner end", regex("a$b"), UNSUPPORTED, "position 1"),
    ("60 look-ahead", regex("x(?=a)a"), UNSUPPORTED, "position 1"),
    ("60 negative look-ahead", regex("(?!a)b"), UNSUPPORTED, "position 0"),
    ("60 look-behind", regex("x(?<=x)a"), UNSUPPORTED, "position 1"),
    ("60 negative look-behind", regex("x(?<!y)a"), UNSUPPORTED, "position 1"),
    ("60 back-reference", regex(r"(a)\1"), UNSUPPORTED, "position 3"),
    ("60 named back-reference", regex(r"(?P<n>a)(?P=n)"), UNSUPPORTED, "position 8"),
    ("60 word boundary", regex(r"a\b"), UNSUPPORTED, "position 1"),
    ("60 conditional group", regex("(a)?(?(1)b|c)"), UNSUPPORTED, "position 4"),
    ("60 atomic group", regex("(?>a+)b"), UNSUPPORTED, "position 0"),
    ("60 possessive quantifier", regex("a++b"), UNSUPPORTED, "position 1"),
    ("60 look-ahead in EBNF", ebnf('root ::= (="a") "a"'), UNSUPPORTED, "line 1, column 10"),
    ("60 a template in Lark", lark('start: list{"a"}'), UNSUPPORTED, "line 1"),
    ("60 look-ahead in Lark", lark("start: /(?=a)a/"), UNSUPPORTED, "line 1, column 8"),
    ("60 look-ahead in a tag", tag({"format": {"type": "regex", "pattern": "(?=a)a"}}), UNSUPPORTED, "#/format/pattern"),
    ("61 nothing matches", regex(r"[^\s\S]"), UNSATISFIABLE, "#"),
    ("61 bytes", lambda: gd.Guide.regex(re.compile(b"a")), INVALID, "#"),
    ("62 unclosed group", regex("(ab"), INVALID, "position 0"),
    ("62 unclosed class", regex("[ab"), INVALID, "position 0"),
    ("62 repeated anchor", regex("^+[a-z]$"), INVALID, "position"),
    ("62 repeated quantifier", regex("a**"), INVALID, "position 2"),
    ("62 bounds the wrong way", regex("a{3,2}"), INVALID, "position 2"),
    ("62 unknown escape", regex(r"\q"), INVALID, "position 0"),
    ("62 undefined rule", ebnf('root ::= "a" b'), INVALID, "line 1, column 14"),
    ("62 no root", ebnf('a ::= "a"'), INVALID, "line 1, column 1"),
    ("62 no rules", ebnf(""), INVALID, "line 1, column 1"),
    ("62 no start of that name", ebnf('root ::= "a"', "other"), INVALID, "line 1, column 1"),
    ("62 duplicate rule", ebnf('root ::= a\na ::= "a"\na ::= "b"'), INVALID, "line 3, column 1"),
    ("62 endless", ebnf('root ::= "a" root'), UNSATISFIABLE, "line 1"),
    ("62 endless together", ebnf('root ::= "a" b\nb ::= root'), UNSATISFIABLE, "line 1"),
    ("62 unclosed literal", ebnf('root ::= "a'), INVALID, "line 1, column 12"),
    ("62 unclosed EBNF class", ebnf("root ::= [a"), INVALID, "line 1, column 12"),
    ("62 unclosed EBNF group", ebnf('root ::= ("a"'), INVALID, "line 1, column 14"),
    ("62 empty alternative", ebnf('root ::= "a" | '), INVALID, "line 1"),
    ("62 unclosed comment", ebnf('root ::= "a" /* b'), INVALID, "line 1, column 14"),
    ("62 repeat of too many digits", lark('start: "a"~1000000000'), INVALID, "line 1, column 11"),
    ("62 half an escape", ebnf(r'root ::= "\u12"'), INVALID, "line 1, column 11"),
    ("62 EBNF bounds", ebnf('root ::= "a"{2,1}'), INVALID, "line 1, column 13"),
    ("62 undefined rule in Lark", lark("start: a"), INVALID, "line 1, column 8"),
    ("62 no start in Lark", lark('a: "a"'), INVALID, "line 1, column 1"),
    ("62 duplicate rule in Lark", lark('start: "a"\nstart: "b"'), INVALID, "line 2, column 1"),
    ("62 endless Lark", lark('start: "a" start'), UNSATISFIABLE, "line 1"),
    ("62 broken regex in Lark", lark("start: /(a/"), INVALID, "line 1, column 8"),
    ("62 broken regex in a tag", tag(SEQUENCE), INVALID, "#/format/elements/0/pattern"),
    ("62 broken JSON", schema('{"type": '), INVALID, "line 1, column 10"),
    ("62 a key twice", schema('{"type": "string", "type": "null"}'), INVALID, "#"),
    ("62 not a number", schema({"minimum": float("nan")}), INVALID, "#/minimum"),
    ("62 not JSON", schema({"default": {1, 2}}), INVALID, "#/default"),
    ("62 not UTF-8", schema(b'{"title": "\xff"}'), INVALID, "position 11"),
    ("62 not a schema", schema("[1]"), INVALID, "#"),
    ("62 unknown type", schema({"properties": {"a": {"type": "strnig"}}}), INVALID, "#/properties/a/type"),
    ("62 properties in a list", schema({"properties": ["a"]}), INVALID, "#/properties"),
    ("62 required as text", schema({"required": "a"}), INVALID, "#/required"),
    ("62 a number for a schema", schema({"items": 3}), INVALID, "#/items"),
    ("62 broken pattern", schema({"type": "string", "pattern": "(a"}), INVALID, "#/pattern"),
    ("62 no such definition", schema({"$ref": "#/$defs/none"}), INVALID, "#/$ref"),
    ("62 remote reference", schema({"$ref": "https://example.org/x.json"}), INVALID, "#/$ref"),
    ("62 draft 3", schema({"$schema": "http://json-schema.org/draft-03/schema#"}), UNSUPPORTED, "#/$schema"),
    ("62 unknown format of a tag", tag({"format": {"type": "jsn"}}), INVALID, "#/format"),
    ("62 unknown field of a tag", tag({"format": {"type": "regex", "patern": "a"}}), INVALID, "#/format/patern"),
    ("62 a tag that no trigger begins", tag(UNTRIGGERED), INVALID, "#/tags/0/begin"),
    ("64 groups", regex("(" * 20_000), TOO_LARGE, "position"),
    ("64 groups in EBNF", ebnf("root ::= " + "(" * 20_000), TOO_LARGE, "line 1"),
    ("64 groups in Lark", lark("start: " + "(" * 20_000), TOO_LARGE, "line 1"),
    ("64 arrays", schema('{"items":' * 3000 + "{}" + "}" * 3000), TOO_LARGE, "position"),
    ("64 references", schema(ladder(65)), TOO_LARGE, "#"),
    ("65 repeats of repeats", regex("((a{1000}){1000}){2}"), TOO_LARGE, "#"),
    ("65 2 MB", schema({"enum": ["x" * 1000 + str(i) for i in range(2000)]}), TOO_LARGE, "#"),
    ("65 repeats in EBNF", ebnf('root ::= (("a"{1000}){1000}){2}'), TOO_LARGE, "line 1, column 1"),
    ("69 a bad field in the 21st of 34 tools", tools(BAD_TOOLS), INVALID, f"{IN_TOOL_20}/properties/x/type"),
    ("69 no such tool", tools(TOOLS, "other"), INVALID, "#/tool_choice"),
    ("69 two of one name", tools([TOOLS[0], TOOLS[0]]), INVALID, "#/1/function/name"),
    ("69 parameters of text", tools([{"function": {"name": "f", "parameters": "x"}}]), INVALID, "#/0/function/parameters"),
]  # fmt: skip


@pytest.fixture(scope="module")
def factory():
    tokens = [bytes([value]) for value in range(256)]
    return gd.GrammarMatcherFactory(gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[256]))


@pytest.mark.parametrize(("row", "build", "error", "place"), WRONG, ids=[row for row, *_ in WRONG])
def test_wrong_guides_are_told(factory, row, build, error, place):
    begin = time.monotonic()
    with pytest.raises(gd.GuideError) as caught:
        factory.compile(build())
    taken_s = time.monotonic() - begin
    found = caught.value
    assert type(found) is error, repr(found)
    assert str(found).startswith(place), str(found)
    assert found.pointer is not None and found.pointer.startswith(place)
    assert found.hint and str(found).endswith(found.hint)
    if "tools" in row:
        assert '"bad"' in str(found)
    assert factory._worker._process is None, "a wrong guide has started a process"
    assert taken_s < HANG_S


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
MEANING = {
    # row: guide, texts that match, texts that do not
    "41 pattern and length": (
        schema({"type": "string", "pattern": "^[bc]+$", "maxLength": 3}), ['"bcb"'], ['"bcbcb"', '"a"']
    ),
    "41 pattern without a bound": (schema({"type": "string", "pattern": "a+"}), ['"xay"'], ['"xy"']),
    "41 format and length": (
        schema({"type": "string", "format": "email", "maxLength": 6}), ['"a@b.cd"'], ['"ab@b.cd"', '"abcdef"']
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
    "47 if and then": (
        schema({"enum": [1, 2, "x"], "if": {"type": "integer"}, "then": {"maximum": 1}}), ["1", '"x"'], ["2"]
    ),
    "47 uniqueItems": (
        schema({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}), ["[1,2]", "[]"], ["[1,1]"]
    ),
    "47 contains": (
        schema({"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}}), ["[1,2]"], ["[1]", "[]"]
    ),
    "47 dependentRequired": (
        schema({**OBJECT, "required": [], "dependentRequired": {"a": ["b"]}}), ['{"a":1,"b":2}', '{"b":2}'], ['{"a":1}']
    ),
    "47 not": (schema({"type": "integer", "not": {"const": 3}}), ["4"], ["3"]),
    "49 overlapping oneOf": (
        schema({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 5}]}), ["4", "6"], ["5"]
    ),
    "49 disjoint oneOf": (schema({"oneOf": [{"type": "integer"}, {"type": "null"}]}), ["4", "null"], ['"x"']),
    "50 multipleOf": (schema({"type": "number", "multipleOf": 2.5}), ["2.5", "5"], ["3"]),
    "50 range of numbers": (schema({"type": "number", "minimum": 0.5, "maximum": 1.5}), ["1.5", "1"], ["1.6", "0.4"]),
    "50 bounds": (schema({"type": "integer", "exclusiveMinimum": 3, "maximum": 5}), ["4", "5"], ["3", "6"]),
    "51 unknown format": (schema({"type": "string", "format": "isbn"}), ['"x"'], ["1"]),
    "51 date-time": (
        schema({"type": "string", "format": "date-time"}), ['"2024-02-29T23:59:59Z"'], ['"2024-19-01T00:00:00Z"']
    ),
    "54 empty arrays": (schema({"type": "array", "maxItems": 0}), ["[]"], ["[1]"]),
    "54 empty objects": (schema({"type": "object", "properties": {}, "additionalProperties": False}), ["{}"], ['{"a":1}']),
    "55 other keys": (schema(OBJECT), ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
    "56 order of keys": (schema(OBJECT), ['{"a":1,"b":2}'], ['{"b":2,"a":1}']),
    "59 outer anchors": (lambda: gd.Guide.regex(r"^on$|^off$"), ["on", "off"], ["onoff"]),
    "59 outer anchors in a group": (lambda: gd.Guide.regex(r"(?:^a|b)$"), ["a", "b"], ["ab"]),
    "61 Unicode letters": (lambda: gd.Guide.regex(r"\w+"), ["été"], ["-"]),
    "61 dot with flag s": (lambda: gd.Guide.regex("(?s)."), ["\n"], ["ab"]),
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
