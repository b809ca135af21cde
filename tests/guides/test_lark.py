"""Lark guides: texts inside and outside each grammar, on every backend; what is refused, with line and column."""

import pytest

import gd_plugin as gd

WRITTEN = {
    "arithmetic": (
        '?start: sum\n?sum: product | sum "+" product -> add\n?product: atom | product "*" atom\n'
        '?atom: NUMBER -> number\n     | "(" sum ")"\n%import common.NUMBER\n%ignore " "',
        ["1", "1+1", " 1 + ( 2*3.5e1 ) ", "((1))"],
        ["", "1+", "(1", "1  1"],
    ),
    "json": (
        "start: value\n"
        '?value: dict | list | ESCAPED_STRING -> string | SIGNED_NUMBER | "true" | "false" | "null"\n'
        'list: "[" [value ("," value)*] "]"\ndict: "{" [pair ("," pair)*] "}"\npair: ESCAPED_STRING ":" value\n'
        "%import common (ESCAPED_STRING, SIGNED_NUMBER)\n%import common.WS -> SPACE\n%ignore SPACE\n",
        ['{"a": [1, -2.5, {}],\n "b\\"": null}', "[]", " true "],
        ['{"a" 1}', "[1,]", "tru e", "{a:1}", ""],
    ),
    "priorities and comments": (
        '// one\nstart.2: A | b  # two\nA.3: "x"\n!b: "y"\n',
        ["x", "y"],
        ["xy", ""],
    ),
    "case": ('start: "Select"i /from|to/i "x"', ["SELECTfROMx", "selectTOx"], ["selecttoX", "selext"]),
    "ranges and repeats": (
        'start: ("a".."c")~2..3 "x"~2 D{1,2}\nD: "0".."9"',
        ["abxx1", "abcxx12"],
        ["axx1", "abxx", "abxx123"],
    ),
    "regexes": (r"start: /a\/[^\/]b/ X?" "\nX: /./s", ["a/xb", "a/xb\n"], ["a//b", "a/xbcd"]),
    "no longest match": ('start: A "ab"\nA: /[ab]+/', ["aab", "abab"], ["ab", "aaa"]),
    "empty alternative": ('start: "a" rest\nrest: | "b" rest', ["a", "abb"], ["", "b"]),
    "nothing is ignored inside a terminal": ('start: A "c"\nA: "a" "b"\n%ignore /\\s/', ["ab c", " abc "], ["a b c"]),
    "escapes": (r'start: "\"\\\n\u00e9\x41"', ['"\\\néA'], ['"']),
    "one line after another": ('start: a\n  b\na: "x"\nb: "y"', ["xy"], ["x"]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written(backend, judge, name):
    text, good, bad = WRITTEN[name]
    guide = gd.Guide.lark(text)
    if backend.problems(guide):
        pytest.skip(f"{backend.name} refuses it: {backend.problems(guide)[0].message}")
    asked = judge(guide)
    assert [text for text in good if not asked.accepts(text)] == []
    assert [text for text in bad if asked.accepts(text)] == []
    assert asked.mask_differs(good[0]) is None
    assert gd.Guide.from_json(guide.to_json()) == guide


@pytest.mark.parametrize("name", WRITTEN)
def test_the_table_is_what_lark_says(name):
    lark = pytest.importorskip("lark", reason="needs the package lark")
    text, good, bad = WRITTEN[name]
    if "{1,2}" in text or name == "one line after another":
        pytest.skip("lark has neither x{1,2} nor rules over lines without |")
    parser = lark.Lark(text, parser="earley", lexer="dynamic_complete")

    def parses(candidate):
        try:
            parser.parse(candidate)
        except lark.exceptions.LarkError:
            return False
        return True

    assert [text for text in good if not parses(text)] == []
    assert [text for text in bad if parses(text)] == []


MALFORMED = [
    # grammar, place, word of the message
    ("", "line 1, column 1", "start"),
    ('other: "a"', "line 1, column 1", "start"),
    ("start: a", "line 1, column 8", "'a' is not defined"),
    ('start: "a"\nstart: "b"', "line 2, column 1", "defined twice"),
    ('start: "a', "line 1, column 10", "not closed"),
    ('start: ("a"', "line 1, column 12", "not closed"),
    ("start: /a", "line 1, column 8", "not closed"),
    ("start: /(a/", "line 1, column 8", "unterminated"),
    ('start: "ab".."z"', "line 1, column 8", "range"),
    ('start: "a"~3..2', "line 1, column 11", "wrong way round"),
    ('start ::= "a"', "line 1, column 1", "EBNF"),
    ("start: X\n%import common.NUMBRE", "line 2, column 1", "NUMBRE"),
    ('start: "a" )', "line 1, column 12", "expected a rule"),
]


@pytest.mark.parametrize(("text", "place", "words"), MALFORMED, ids=[repr(row[0]) for row in MALFORMED])
def test_malformed(text, place, words):
    with pytest.raises(gd.InvalidGuideError) as caught:
        gd.Guide.lark(text)
    assert caught.value.pointer == place
    assert words in str(caught.value)


BEYOND = [
    'start: list{"a"}\nlist{x}: x',
    "start: <think>",
    "start: @other",
    'start: a\na[lazy]: "x"',
    "start: /(?=a)b/",
    "%declare X\nstart: X",
    "%import .other (a)\nstart: a",
    'start: %json {"type": "object"}',
]


@pytest.mark.parametrize("text", BEYOND)
def test_unsupported(text):
    with pytest.raises(gd.UnsupportedGuideError) as caught:
        gd.Guide.lark(text)
    assert caught.value.pointer.startswith("line ")


@pytest.mark.parametrize("text", ['start: start "a"', 'start: "a" x\nx: "b" x'])
def test_empty_language(text):
    with pytest.raises(gd.UnsatisfiableGuideError):
        gd.Guide.lark(text)


def test_too_deep():
    with pytest.raises(gd.GuideTooLargeError):
        gd.Guide.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000)


def test_errors_name_only_written_rules() -> None:
    with pytest.raises(gd.InvalidGuideError, match="there are start") as caught:
        gd.Guide.lark('start: "a" b')
    assert "ignored" not in str(caught.value)
