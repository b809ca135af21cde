"""Regex guides against `re.fullmatch`, on every backend, with generated patterns and texts."""

import os
import random
import re
import warnings

import pytest

import gd_plugin as gd
from gd_plugin.guides.expression import CharSet, Either, Literal, Sequence
from gd_plugin.guides.regex import parse_regex

NUM_PATTERNS = {"ci": 60, "long": 3000}[os.environ.get("GD_PLUGIN_FUZZ", "ci")]

ATOMS = [
    "a",
    "b",
    "ab",
    "1",
    r"\d",
    r"\w",
    r"\s",
    ".",
    "[ab]",
    "[^a]",
    "é",
    "[à-ü]",
    r"\n",
    r"[^\n]",
    '"',
    r"\\",
    "/",
    "-",
    r"\x00",
    "日",
    "😀",
    "\u017f",
    r"\W",
    r"\S",
    r"\D",
    "(?i:k)",
    "(?s:.)",
    r"[\]a-]",
    r"(?a:\w)",
    "(?i:[^k])",
    r"\$",
    r"\U0001F600",
    "(?i:ß)",
]
REPEATS = ["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?", "+?", "??"]
CHARACTERS = 'ab1 é\n"\\/-\x00日😀\u017fKkKsS٤x_$\u2028\x85'


def make_pattern(rnd, depth):
    roll = rnd.random()
    if depth == 0 or roll < 0.3:
        return rnd.choice(ATOMS)
    if roll < 0.55:
        return make_pattern(rnd, depth - 1) + make_pattern(rnd, depth - 1)
    if roll < 0.75:
        return f"({make_pattern(rnd, depth - 1)}|{make_pattern(rnd, depth - 1)})"
    return f"(?:{make_pattern(rnd, depth - 1)}){rnd.choice(REPEATS)}"


def make_text(rnd, node):
    """A text that the expression derives; only a source of likely texts, never a judge."""
    if isinstance(node, Literal):
        return node.text
    if isinstance(node, CharSet):
        low, high = rnd.choice(node.ranges)
        return chr(rnd.choice([low, high, rnd.randint(low, high)]))
    if isinstance(node, Sequence):
        return "".join(make_text(rnd, part) for part in node.parts)
    if isinstance(node, Either):
        return make_text(rnd, rnd.choice(node.options))
    high = node.low + 2 if node.high is None else node.high
    return "".join(make_text(rnd, node.item) for _ in range(rnd.randint(node.low, high)))


def make_texts(rnd, pattern):
    texts = {"".join(rnd.choice(CHARACTERS) for _ in range(rnd.randint(0, 5))) for _ in range(12)}
    for _ in range(6):
        text = make_text(rnd, parse_regex(pattern))
        cut = rnd.randrange(len(text) + 1)
        texts |= {text, text[:cut] + text[cut + 1 :], text[:cut] + rnd.choice(CHARACTERS) + text[cut:]}
    return sorted(texts)


def test_language_is_fullmatch(backend, judge):
    rnd = random.Random(1)
    for _ in range(NUM_PATTERNS):
        pattern = make_pattern(rnd, 4)
        guide = gd.Guide.regex(pattern)
        if backend.problems(guide):
            continue
        asked = judge(guide)
        for text in make_texts(rnd, pattern):
            assert asked.accepts(text) == bool(re.fullmatch(pattern, text)), (backend.name, pattern, text)


def test_mask_is_accept_set(backend, judge):
    rnd = random.Random(2)
    for _ in range(NUM_PATTERNS // 4):
        pattern = make_pattern(rnd, 3)
        guide = gd.Guide.regex(pattern)
        if backend.problems(guide):
            continue
        asked = judge(guide)
        for text in make_texts(rnd, pattern)[:4]:
            assert asked.mask_differs(text) is None, (backend.name, pattern, text)


ACCEPTED = [
    # pattern, matching, not matching
    (r"^\d{3}$", ["123", "٤٢1"], ["12", "1234", "123\n"]),
    (r"^on$|^off$", ["on", "off"], ["onoff", "o"]),
    (r"\Aa\Z", ["a"], ["aa", "a\n"]),
    (r"(^a|b)c", ["ac", "bc"], ["c"]),
    (r"a|ab", ["a", "ab"], ["b"]),
    (r"a(bc)?", ["a", "abc"], ["ab"]),
    (r"(?i)straße", ["STRAßE", "\u017ftraẞe"], ["STRASSE"]),
    (r"(?i)[à-ç]", ["Á", "á"], ["A"]),
    (r"(?x) a b  # comment with ( and ^", ["ab"], ["a b"]),
    (r"(?P<y>\d+)-(?P<m>\d)", ["20-1"], ["20"]),
    (r"<.+?>", ["<a>", "<a>b>"], ["<>", "<a"]),
    (r"[^\W\d_]+", ["é", "ab"], ["1", "_"]),
    (r"(?s).", ["\n"], [""]),
    (r".", ["😀"], ["\n"]),
    ("", [""], ["a"]),
    (r"[]a^$]", ["]", "^", "$"], ["b"]),
    (r"((a*)*)*b", ["b", "aab"], ["a"]),
    (r"\.\*\"\\/", ['.*"\\/'], [""]),
    (r"(?:a{0}b){2,3}", ["bb", "bbb"], ["b", "bbbb"]),
    (r"(?m)^a$", ["a"], ["a\n"]),
    # the set behind a counted repeat has characters past ASCII whose low byte is another character
    (r"[a-z]{2}[\u3001-\u3050]-", ["aa\u3001-"], ["ab\n", "aa-"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), ACCEPTED, ids=[row[0] for row in ACCEPTED])
def test_dialect(backend, judge, pattern, good, bad):
    guide = gd.Guide.regex(pattern)
    if backend.problems(guide):
        pytest.skip(f"{backend.name} refuses it: {backend.problems(guide)[0].message}")
    asked = judge(guide)
    for text in good:
        assert re.fullmatch(pattern, text)
        assert asked.accepts(text), text
    for text in bad:
        assert not re.fullmatch(pattern, text)
        assert not asked.accepts(text), text
    assert asked.mask_differs(good[0]) is None


REFUSED = [
    # pattern, feature, position
    (r"(?=a)b", "look-around", 0),
    (r"x(?!a)b", "look-around", 1),
    (r"x(?<=x)b", "look-around", 1),
    (r"x(?<!a)b", "look-around", 1),
    (r"(a)\1", "back-reference", 3),
    (r"(?P<q>a)(?P=q)", "back-reference", 8),
    (r"(?P<n>a)?(?(n)b|c)", "conditional group", 9),
    (r"\bfoo", "word boundary", 0),
    (r"[\b]fo\Bo", "word boundary", 6),
    (r"a^b", "anchor inside the pattern", 1),
    (r"[]^$a]\^x$|y$z", "anchor inside the pattern", 12),
    (r"(^a)+", "anchor inside the pattern", 1),
    ("(?x) a # ^ is a comment\n ^", "anchor inside the pattern", 25),
    (r"a\Zb", "anchor inside the pattern", 1),
    (r"ab++", "possessive quantifier", 2),
    (r"(?>ab)c", "atomic group", 0),
]


@pytest.mark.parametrize(("pattern", "feature", "position"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_by_name_and_position(pattern, feature, position):
    with pytest.raises(gd.UnsupportedGuideError, match=feature) as caught:
        gd.Guide.regex(pattern)
    assert caught.value.keyword == feature
    assert caught.value.pointer == f"position {position}"
    assert caught.value.reasons


@pytest.mark.parametrize("pattern", ["(ab", "^+[a-z]$", "a**", "[b-a]", r"\q", "(?P<1>a)", "a{2,1}", "(?z)a", "*"])
def test_malformed(pattern):
    with pytest.raises(gd.InvalidGuideError):
        gd.Guide.regex(pattern)


LARGE = ["(" * 20_000, "(" * 20_000 + ")" * 20_000, "a{1000000000}", "(a{1000}){2000}", "(?:" * 300 + "a" + ")" * 300]


@pytest.mark.parametrize("pattern", LARGE, ids=range(len(LARGE)))
def test_too_large(pattern):
    with pytest.raises(gd.GuideTooLargeError):
        gd.Guide.regex(pattern)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a[^\s\S]b", "\\ud800"])
def test_unsatisfiable(pattern):
    with pytest.raises(gd.UnsatisfiableGuideError):
        gd.Guide.regex(pattern)


def test_choices(backend, judge):
    # one option is a prefix of another; quotes, line ends and other scripts; the empty option
    options = ["a", "ab", "", 'say "hi"\n', "日本", "a\\b", "😀", "\x01", "ab1", "a-b]", "/"]
    asked = judge(gd.Guide.choice(options))
    for option in options:
        assert asked.accepts(option), option
    for text in ["b", "abc", "日", "say", " a", "a\\", "aa"]:
        assert not asked.accepts(text), text
        assert asked.mask_differs(text) is None


@pytest.mark.parametrize("pattern", ["[!--]", "[!--a]", "[[a]", "[a&&b]", "[a~~b]", "[a||b]"])
def test_sets_that_re_warns_of_are_refused_where_warnings_are_errors(pattern):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(gd.InvalidGuideError, match=r"Possible .*escape the characters"):
            gd.Guide.regex(pattern)
    # not remembered: else the guide is what `re` makes of it now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert gd.validate(gd.Guide.regex(pattern), "a").ok == bool(re.fullmatch(pattern, "a"))
