"""EBNF guides against a small recogniser of our own, on every backend, with generated grammars and texts.

The recogniser judges the grammar as the test made it, before it was written as text: it shares nothing with the parser.
"""

import os
import random

import pytest

import gd_plugin as gd

NUM_GRAMMARS = {"ci": 40, "long": 2000}[os.environ.get("GD_PLUGIN_FUZZ", "ci")]


def ends(node, text, begin, table):
    """Where `node` can end when it begins at `begin`; table holds what is known of (rule, position) so far."""
    kind, *args = node
    if kind == "text":
        return {begin + len(args[0])} if text.startswith(args[0], begin) else set()
    if kind == "set":
        return {begin + 1} if begin < len(text) and text[begin] in args[0] else set()
    if kind == "rule":
        return table.setdefault((args[0], begin), set())
    if kind == "either":
        return set().union(*(ends(option, text, begin, table) for option in args[0]))
    if kind == "all":
        here = {begin}
        for part in args[0]:
            here = set().union(*(ends(part, text, place, table) for place in here))
        return here
    item, low, high = args
    found, here, rounds = set(), {begin}, 0
    while here and (high is None or rounds <= high):
        if rounds >= low:
            if here <= found:
                break
            found |= here
        here = set().union(*(ends(item, text, place, table) for place in here))
        rounds += 1
    return found


def derives(rules, start, text):
    table = {(start, 0): set()}
    while True:
        before = {key: len(value) for key, value in table.items()}
        for name, begin in list(table):
            table[name, begin] = table[name, begin] | ends(rules[name], text, begin, table)
        if before == {key: len(value) for key, value in table.items()}:
            return len(text) in table[start, 0]


def write(node):
    kind, *args = node
    if kind == "text":
        return '"' + args[0].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if kind == "set":
        return "[" + "".join("\\" + c if c in "]\\^-" else c for c in args[0]) + "]"
    if kind == "rule":
        return args[0]
    if kind == "either":
        return "(" + " | ".join(map(write, args[0])) + ")"
    if kind == "all":
        return "(" + " ".join(map(write, args[0])) + ")"
    item, low, high = args
    return f"({write(item)}){{{low},{'' if high is None else high}}}"


LEAVES = [("text", text) for text in ("a", "b", "ab", "(", ")", "é\n", '"', "")]
LEAVES += [("set", characters) for characters in ("ab", "]-^\\", "é日")]
NAMES = ["root", "a-b", "a_b", "x.y", "Z"]


def make_node(rnd, depth):
    roll = rnd.random()
    if depth == 0 or roll < 0.2:
        return rnd.choice(LEAVES)
    if roll < 0.45:
        return ("rule", rnd.choice(NAMES))
    if roll < 0.65:
        return ("either", [make_node(rnd, depth - 1) for _ in range(rnd.randint(2, 3))])
    if roll < 0.9:
        return ("all", [make_node(rnd, depth - 1) for _ in range(rnd.randint(2, 3))])
    return ("repeat", make_node(rnd, depth - 1), *rnd.choice([(0, None), (1, None), (0, 1), (2, 2), (1, 3)]))


def make_text(rnd, rules, node, fuel):
    kind, *args = node
    if fuel[0] <= 0:
        return rnd.choice(["a", "b", ")", ""])
    fuel[0] -= 1
    if kind == "text":
        return args[0]
    if kind == "set":
        return rnd.choice(args[0])
    if kind == "rule":
        return make_text(rnd, rules, rules[args[0]], fuel)
    if kind == "either":
        return make_text(rnd, rules, rnd.choice(args[0]), fuel)
    if kind == "all":
        return "".join(make_text(rnd, rules, part, fuel) for part in args[0])
    item, low, high = args
    return "".join(
        make_text(rnd, rules, item, fuel) for _ in range(rnd.randint(low, low + 2 if high is None else high))
    )


def make_case(rnd):
    rules = {name: make_node(rnd, 3) for name in NAMES}
    lines = [f"{name} ::= {write(node)}" for name, node in rules.items()]
    rnd.shuffle(lines)
    texts = {"".join(rnd.choice('ab()é日"]') for _ in range(rnd.randint(0, 4))) for _ in range(8)}
    for _ in range(12):
        text = make_text(rnd, rules, rules["root"], [12])[:12]
        cut = rnd.randrange(len(text) + 1)
        texts |= {text, text[:cut] + text[cut + 1 :]}
    return rules, "\n".join(lines), sorted(texts)


def guides(seed, count):
    rnd = random.Random(seed)
    while count:
        rules, text, texts = make_case(rnd)
        try:
            guide = gd.Guide.ebnf(text)
        except gd.UnsatisfiableGuideError:
            assert not any(derives(rules, "root", candidate) for candidate in texts), text
            continue
        count -= 1
        yield rules, guide, texts


def test_language(backend, judge):
    for rules, guide, texts in guides(1, NUM_GRAMMARS):
        if backend.problems(guide):
            continue
        asked = judge(guide)
        for text in texts:
            assert asked.accepts(text) == derives(rules, "root", text), (backend.name, guide.guide, text)


def test_mask_is_accept_set(backend, judge):
    for _, guide, texts in guides(2, NUM_GRAMMARS // 4):
        if backend.problems(guide):
            continue
        asked = judge(guide)
        for text in texts[:4]:
            assert asked.mask_differs(text) is None, (backend.name, guide.guide, text)


# what people write: grammar, start rule, texts of the language, texts outside it
WRITTEN = {
    "arithmetic": (
        'expr ::= expr "+" term | term\nterm ::= term "*" factor | factor\nfactor ::= "(" expr ")" | [0-9]+',
        "expr",
        ["1", "1+1", "((2*(3)+4))*5"],
        ["", "1+", "(1", "1)"],
    ),
    "comments": ('# one\nroot ::= "a" # two "\n  // three\n  | /* four\n */ "b" ;\n', "root", ["a", "b"], ["ab", ""]),
    "escapes": (r'root ::= "\x41\u00e9\U0001F600\"\\\n" [\]\-\\\x09] [^\n]', "root", ['Aé😀"\\\n]x'], ['Aé😀"\\\n]\n']),
    "w3c": ("root ::= 'it\"s' [#x41-#x43#x61]", "root", ['it"sB', 'it"sa'], ['it"s#', 'it"sx']),
    "names": ('root ::= a-b a_b\na-b ::= "x"\na_b ::= "y"', "root", ["xy"], ["yx", "xx"]),
    "right recursion": ('root ::= "a" root | "b"', "root", ["b", "aab"], ["a", "ba"]),
    "centre recursion": ('root ::= "(" root ")" | "x"', "root", ["x", "((x))"], ["((x)", "(x))"]),
    "hidden left recursion": ('root ::= e root "a" | "b"\ne ::= "" | "c"', "root", ["b", "ba", "cba"], ["a", "c"]),
    "any character": ("root ::= . .?", "root", ["\n", "😀a"], ["", "abc"]),
    "repeats": ('root ::= "ab"{2} [0-9]{,2} ("x" | "y"){1,}', "root", ["ababx", "abab12yx"], ["abx", "abab123x"]),
    "several lines": ('root ::=\n  item\n  ("," item)*\nitem ::= [a-z]+', "root", ["a", "a,bc"], [",", "a,"]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written(backend, judge, name):
    text, start, good, bad = WRITTEN[name]
    guide = gd.Guide.ebnf(text, start=start)
    if backend.problems(guide):
        pytest.skip(f"{backend.name} refuses it: {backend.problems(guide)[0].message}")
    asked = judge(guide)
    assert [text for text in good if not asked.accepts(text)] == []
    assert [text for text in bad if asked.accepts(text)] == []
    for text in good:
        assert asked.mask_differs(text) is None


MALFORMED = [
    # grammar, place, word of the message
    ("", "line 1, column 1", "no rules"),
    ("  \n# nothing\n", "line 1, column 1", "no rules"),
    ('other ::= "a"', "line 1, column 1", "root"),
    ("root ::= a", "line 1, column 10", "'a' is not defined"),
    ('root ::= "a"\nb ::= "c"\nroot ::= "d"', "line 3, column 1", "defined twice, first at line 1"),
    ('root ::= "a', "line 1, column 12", "not closed"),
    ("root ::= [a", "line 1, column 12", "not closed"),
    ('root ::= ("a"', "line 1, column 14", "not closed"),
    ('root ::= "a" |', "line 1, column 15", "empty"),
    ("root ::= ", "line 1, column 10", "empty"),
    ('root ::= "a"{2,1}', "line 1, column 13", "wrong way round"),
    ('root ::= "a"{}', "line 1, column 13", "repeat"),
    ("root ::= [z-a]", "line 1, column 10", "wrong way round"),
    (r'root ::= "\q"', "line 1, column 11", "unknown escape"),
    (r'root ::= "\xZZ"', "line 1, column 11", "hexadecimal"),
    (r'root ::= "\ud800"', "line 1, column 11", "not a character"),
    ('root = "a"', "line 1, column 6", "::="),
    ('root ::= "a" )', "line 1, column 14", "expected a rule"),
    ("root ::= []", "line 1, column 10", "matches nothing"),
]


@pytest.mark.parametrize(("text", "place", "words"), MALFORMED, ids=[repr(row[0]) for row in MALFORMED])
def test_malformed(text, place, words):
    with pytest.raises(gd.InvalidGuideError) as caught:
        gd.Guide.ebnf(text)
    assert caught.value.pointer == place
    assert str(caught.value).startswith(place + ": ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ['root ::= (= "a") "b"', 'root ::= A - "b"\nA ::= "a"', 'root ::= TagDispatch(("a", b))', "root ::= <think>"],
)
def test_unsupported(text):
    with pytest.raises(gd.UnsupportedGuideError) as caught:
        gd.Guide.ebnf(text)
    assert caught.value.pointer.startswith("line 1, column ")


@pytest.mark.parametrize("text", ['root ::= root "a"', 'root ::= "a" b\nb ::= "c" b', "root ::= a\na ::= root"])
def test_empty_language(text):
    with pytest.raises(gd.UnsatisfiableGuideError):
        gd.Guide.ebnf(text)


@pytest.mark.parametrize(
    "text",
    ["root ::= " + "(" * 20_000, "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000, 'root ::= "a"{900000000}'],
    ids=["open", "deep", "repeat"],
)
def test_too_large(text):
    with pytest.raises(gd.GuideTooLargeError):
        gd.Guide.ebnf(text)
