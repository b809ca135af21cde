"""Structural tags against a small recogniser of our own with `json` and `jsonschema`, on every backend that takes them."""

import json
import os
import random
import re

import jsonschema
import pytest

import gd_plugin as gd

INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}


NUM_FORMATS = {"ci": 60, "long": 3000}[os.environ.get("GD_PLUGIN_FUZZ", "ci")]
known_ends = {}


def ends(node, text, begin):
    """Where `node` can end when it begins at `begin`."""
    key = (json.dumps(node), text, begin)
    if key not in known_ends:
        known_ends[key] = find_ends(node, text, begin)
    return known_ends[key]


def find_ends(node, text, begin):
    """Where `node` can end when it begins at `begin`."""
    kind = node["type"]
    if kind == "const_string":
        return {begin + len(node["value"])} if text.startswith(node["value"], begin) else set()
    if kind == "json_schema":
        return {end for end in range(begin + 1, len(text) + 1) if is_json(text[begin:end], node["json_schema"])}
    if kind == "regex":
        return {end for end in range(begin, len(text) + 1) if re.fullmatch(node["pattern"], text[begin:end])}
    if kind == "any_text":
        without = range(begin, len(text) + 1)
        return {end for end in without if not any(word in text[begin:end] for word in node.get("excludes", []))}
    if kind == "sequence":
        here = {begin}
        for element in node["elements"]:
            here = set().union(*(ends(element, text, place) for place in here))
        return here
    if kind == "or":
        return set().union(*(ends(element, text, begin) for element in node["elements"]))
    if kind in ("optional", "star", "plus", "repeat"):
        low = {"plus": 1, "repeat": node.get("min")}.get(kind, 0)
        high = {"optional": 1, "repeat": node.get("max")}.get(kind)
        return repeated(lambda place: ends(node["content"], text, place), begin, low, high)
    if kind == "tag":
        return tag_ends(node, text, begin)
    if kind == "tags_with_separator":
        one = [tag_end for tag in node["tags"] for tag_end in tag_ends(tag, text, begin)]
        found = set(one) | (set() if node.get("at_least_one") else {begin})
        if not node.get("stop_after_first"):
            for place in one:
                if text.startswith(node["separator"], place):
                    rest = {**node, "at_least_one": True}
                    found |= ends(rest, text, place + len(node["separator"]))
        return found
    assert kind == "triggered_tags"
    return triggered_ends(node, text, begin, needed=node.get("at_least_one", False))


def triggered_ends(node, text, begin, needed):
    """With `needed` a tag stands at once; without, free text goes up to the first trigger."""
    places = [
        (text.find(trigger, begin) + len(trigger), text.find(trigger, begin), trigger) for trigger in node["triggers"]
    ]
    places = sorted(place for place in places if place[1] >= 0)
    found = set() if needed else set(range(begin, places[0][0] if places else len(text) + 1))
    if needed:
        places = [(0, begin, "")]
    if places:
        _, place, trigger = places[0]
        for tag in node["tags"]:
            if tag["begin"].startswith(trigger):
                for end in tag_ends(tag, text, place):
                    found |= {end} if node.get("stop_after_first") else triggered_ends(node, text, end, False)
    return found


def tag_ends(tag, text, begin):
    if not text.startswith(tag["begin"], begin):
        return set()
    stops = [tag["end"]] if isinstance(tag["end"], str) else tag["end"]
    begin += len(tag["begin"])
    if tag["content"]["type"] == "any_text":
        found = [text.find(stop, begin) + len(stop) for stop in stops if text.find(stop, begin) >= 0]
        return {min(found)} if found else set()
    inner = ends(tag["content"], text, begin)
    return {place + len(stop) for place in inner for stop in stops if text.startswith(stop, place)}


def repeated(step, begin, low, high):
    found, here, rounds = set(), {begin}, 0
    while here and (high is None or rounds <= high) and rounds <= 20:
        if rounds >= low:
            found |= here
        here = set().union(*(step(place) for place in here))
        rounds += 1
    return found


def is_json(text, schema):
    if text != text.strip():
        return False
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def add(schema):
    return {"type": "json_schema", "json_schema": schema}


TAGS = [
    {"type": "tag", "begin": "<fn=add>", "content": add(INTEGER), "end": "</fn>"},
    {"type": "tag", "begin": "<fn=set>", "content": add(FLAG), "end": ["</fn>", "<end>"]},
    {"type": "tag", "begin": "<say>", "content": {"type": "any_text"}, "end": "</say>"},
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<fn=", "<say>"], "tags": TAGS}
FORMATS = {
    "triggered": TRIGGERED,
    "at least one": {**TRIGGERED, "at_least_one": True},
    "one at most": {**TRIGGERED, "stop_after_first": True},
    "exactly one": {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
    "separated": {"type": "tags_with_separator", "tags": TAGS, "separator": ", "},
    "separated, at least one": {"type": "tags_with_separator", "tags": TAGS, "separator": "\n", "at_least_one": True},
    "tag": TAGS[0],
    "text tag": TAGS[2],
    "sequence": {"type": "sequence", "elements": [{"type": "const_string", "value": "a: "}, add(INTEGER), TAGS[2]]},
    "or": {"type": "or", "elements": [{"type": "const_string", "value": "no"}, TAGS[0], add(FLAG)]},
    "repeat": {"type": "repeat", "content": TAGS[0], "min": 1, "max": 2},
    "star": {
        "type": "sequence",
        "elements": [{"type": "star", "content": TAGS[0]}, {"type": "const_string", "value": "."}],
    },
    "optional": {"type": "optional", "content": TAGS[1]},
    "plus": {"type": "plus", "content": {"type": "regex", "pattern": r"[ab]\d"}},
    "grammar": {"type": "tag", "begin": "(", "content": {"type": "regex", "pattern": r"[a-cé]+"}, "end": ")"},
    "no call": {"type": "any_text", "excludes": ["<fn=", "<say>"]},
    "anything": {"type": "any_text"},
}
PIECES = [
    "<fn=add>",
    "<fn=set>",
    "<fn=",
    "<say>",
    "</say>",
    "</fn>",
    "<end>",
    '{"n":1}',
    '{"n": 23}',
    '{"on":true}',
    "a: ",
    "no",
]
PIECES += [", ", "\n", "hello", "<f", "é", "a1", "(", ")", "ab", ".", '{"n":"x"}', "<", "日本"]
CALLS = ['<fn=add>{"n":1}</fn>', '<fn=set>{"on":true}<end>', "<say>hi <fn= é</say>", "<say></say>"]


def texts(rnd):
    for _ in range(25):
        yield "".join(rnd.choice(PIECES) for _ in range(rnd.randint(0, 4)))
    for _ in range(25):
        parts = [rnd.choice(CALLS)] + [rnd.choice(CALLS + PIECES) for _ in range(rnd.randint(0, 2))]
        rnd.shuffle(parts)
        yield rnd.choice(["", "", ", ", "\n", "a: "]).join(parts)
    yield from ['a: {"n":1}<say>x</say>', '{"on":false}', '<fn=add>{"n":1}</fn>.', "a1b2", "(abé)", "no"]


@pytest.mark.parametrize("name", FORMATS)
def test_language(backend, judge, name):
    guide = gd.Guide.structural_tag({"type": "structural_tag", "format": FORMATS[name]})
    if backend.problems(guide):
        pytest.skip(f"{backend.name} refuses it: {backend.problems(guide)[0].message}")
    asked = judge(guide)
    rnd = random.Random(4)
    accepted = 0
    for text in texts(rnd):
        legal = len(text) in ends(FORMATS[name], text, 0)
        accepted += legal
        assert asked.accepts(text) == legal, (backend.name, text)
    assert accepted


@pytest.mark.parametrize("name", ["triggered", "separated", "text tag", "no call"])
def test_mask_is_accept_set(backend, judge, name):
    guide = gd.Guide.structural_tag({"type": "structural_tag", "format": FORMATS[name]})
    if backend.problems(guide):
        pytest.skip(f"{backend.name} refuses it: {backend.problems(guide)[0].message}")
    asked = judge(guide)
    for text in [*CALLS, "é <f<fn=add>", "日<sa<say>é"]:
        assert asked.mask_differs(text) is None, (backend.name, text)


def make_leaf(rnd):
    texts = [{"type": "const_string", "value": text} for text in ("a", "ab", "<a>", "no", ", ", "b")]
    free = [{"type": "any_text", "excludes": excludes} for excludes in ([], ["<a>"], ["ab", "b"])]
    regexes = [{"type": "regex", "pattern": pattern} for pattern in ("[ab]+", "a?b", "a*", "(?s:.)", "[^<]*")]
    return rnd.choice([*texts, *free, *regexes, add(INTEGER), add({"enum": ["a", True]}), add({"type": "integer"})])


def make_tag(rnd, depth):
    content = make_format(rnd, depth - 1)
    end = rnd.choice(["</a>", "b", ["</a>", "</b>"], ["b", "ba"], "ab", ""])
    if content["type"] == "any_text":
        content, end = {"type": "any_text"}, end or "ab"
    return {"type": "tag", "begin": rnd.choice(["<a>", "<ab", "<a"]), "content": content, "end": end}


def make_format(rnd, depth):
    """A format in which free text, JSON, regexes and literals stand beside and behind each other."""
    if depth <= 0 or rnd.random() < 0.25:
        return make_leaf(rnd)
    kind = rnd.choice(["sequence", "or"] * 2 + ["optional", "star", "plus", "repeat", "tag", "triggered", "separated"])
    if kind in ("sequence", "or"):
        return {"type": kind, "elements": [make_format(rnd, depth - 1) for _ in range(rnd.randint(2, 3))]}
    if kind == "repeat":
        return {
            "type": kind,
            "content": make_format(rnd, depth - 1),
            "min": rnd.randint(0, 1),
            "max": rnd.choice([1, 2]),
        }
    if kind in ("optional", "star", "plus"):
        return {"type": kind, "content": make_format(rnd, depth - 1)}
    if kind == "tag":
        return make_tag(rnd, depth)
    tags = [make_tag(rnd, depth) for _ in range(rnd.randint(1, 2))]
    flags = {"at_least_one": rnd.random() < 0.5, "stop_after_first": rnd.random() < 0.5}
    if kind == "triggered":
        return {"type": "triggered_tags", "triggers": ["<a"], "tags": tags, **flags}
    return {"type": "tags_with_separator", "separator": rnd.choice([", ", "a"]), "tags": tags, **flags}


SHORT = ["a", "b", "<a>", "<ab", "<a", "</a>", "</b>", ", ", "no", "x", '{"n":1}', '"a"', "true", "ab", "12", "-3"]


def test_generated_formats(backend, judge):
    """What a backend takes it takes exactly, however its lexer works; refusing is not wrong, refusing most would be."""
    rnd = random.Random(8)
    taken = 0
    for _ in range(NUM_FORMATS):
        form = make_format(rnd, 3)
        texts = sorted({"".join(rnd.choice(SHORT) for _ in range(rnd.randint(0, 5))) for _ in range(25)})
        guide = gd.Guide.structural_tag({"format": form})
        if backend.problems(guide):
            continue
        taken += 1
        asked = judge(guide)
        for text in texts:
            assert asked.accepts(text) == (len(text) in ends(form, text, 0)), (backend.name, text, form)
        known_ends.clear()
    assert backend.name == "outlines_core" or taken > NUM_FORMATS / 3


REFUSED_BY_THE_LEXER = [
    {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "."}]},
    {"type": "or", "elements": [{"type": "any_text"}, add(INTEGER)]},
    {"type": "sequence", "elements": [add({"type": "integer"}), {"type": "regex", "pattern": "[0-9]"}]},
    {"type": "or", "elements": [{"type": "const_string", "value": '{"n":0}'}, add(INTEGER)]},
]


@pytest.mark.parametrize("form", REFUSED_BY_THE_LEXER, ids=range(len(REFUSED_BY_THE_LEXER)))
def test_auto_takes_the_backend_that_is_exact(vocabulary, form):
    guide = gd.Guide.structural_tag({"format": form})
    assert gd.GrammarMatcherFactory(vocabulary).compile(guide).backend == "xgrammar"
    with pytest.raises(gd.UnsupportedGuideError, match="lexer") as caught:
        gd.GrammarMatcherFactory(vocabulary, backend="llguidance").compile(guide)
    assert caught.value.pointer == "#/format"


def test_both_shapes_are_one_guide():
    older = {
        "structures": [
            {"begin": "<fn=add>", "schema": INTEGER, "end": "</fn>"},
            {"begin": "<fn=on>", "schema": FLAG, "end": "</fn>"},
        ],
        "triggers": ["<fn="],
    }
    tags = [
        {"type": "tag", "begin": item["begin"], "content": add(item["schema"]), "end": "</fn>"}
        for item in older["structures"]
    ]
    newer = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<fn="], "tags": tags}}
    guide = gd.Guide.structural_tag(newer)
    assert gd.Guide.structural_tag(older) == guide
    assert gd.Guide.structural_tag({"type": "structural_tag", **older}) == guide
    assert gd.Guide.structural_tag(json.dumps(older)) == guide
    assert gd.Guide.from_json(guide.to_json()) == guide


def tagged(**changes):
    return {"type": "structural_tag", "format": {**TRIGGERED, **changes}}


WRONG = [
    # spec, error, pointer
    ([], gd.InvalidGuideError, "#"),
    ({}, gd.InvalidGuideError, "#"),
    ({"format": {"type": "x"}}, gd.InvalidGuideError, "#/format"),
    ({"format": {"type": "token", "token": "<a>"}}, gd.UnsupportedGuideError, "#/format"),
    ({"format": {"type": "regex"}}, gd.InvalidGuideError, "#/format"),
    ({"format": {"type": "regex", "pattern": "(a"}}, gd.InvalidGuideError, "#/format/pattern"),
    ({"format": {"type": "regex", "pattern": r"(a)\1"}}, gd.UnsupportedGuideError, "#/format/pattern"),
    ({"format": {"type": "grammar", "grammar": "root ::= a"}}, gd.InvalidGuideError, "#/format/grammar"),
    ({"format": {"type": "or", "elements": []}}, gd.UnsatisfiableGuideError, "#/format/elements"),
    ({"format": {"type": "sequence", "elements": [{"type": "x"}]}}, gd.InvalidGuideError, "#/format/elements/0"),
    ({"format": {"type": "const_string", "value": "a", "valeu": "b"}}, gd.InvalidGuideError, "#/format/valeu"),
    ({"format": {"type": "const_string", "value": 5}}, gd.InvalidGuideError, "#/format/value"),
    ({"format": {**add(INTEGER), "style": "qwen_xml"}}, gd.UnsupportedGuideError, "#/format/style"),
    (
        {"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": ""}},
        gd.InvalidGuideError,
        "#/format/end",
    ),
    (tagged(triggers=["<x"]), gd.InvalidGuideError, "#/format/tags/0/begin"),
    (tagged(triggers=[]), gd.InvalidGuideError, "#/format/triggers"),
    (tagged(triggers=["<", "<fn="]), gd.InvalidGuideError, "#/format/triggers"),
    (tagged(tags=[]), gd.UnsatisfiableGuideError, "#/format/tags"),
    ({"structures": [], "triggers": ["<"]}, gd.UnsatisfiableGuideError, "#/tags"),
    ({"structures": [{"begin": "<a"}], "triggers": ["<"]}, gd.InvalidGuideError, "#/structures/0"),
    ({"triggers": ["<"]}, gd.InvalidGuideError, "#/structures"),
]


@pytest.mark.parametrize(("spec", "error", "pointer"), WRONG, ids=range(len(WRONG)))
def test_wrong_specs_name_the_place(spec, error, pointer):
    with pytest.raises(error) as caught:
        gd.Guide.structural_tag(spec)
    assert caught.value.pointer == pointer
    assert str(caught.value).startswith(pointer + ": ")


def test_deep_nesting():
    spec = {"type": "const_string", "value": "a"}
    for _ in range(100):
        spec = {"type": "optional", "content": spec}
    with pytest.raises(gd.GuideTooLargeError):
        gd.Guide.structural_tag({"format": spec})


TAG = {"begin": "<a>", "content": {"json_schema": INTEGER}, "end": "</a>"}
TYPED = {"type": "tag", "begin": "<a>", "content": add(INTEGER), "end": "</a>"}
LEFT_OUT = {
    "a tag": (TAG, TYPED),
    "in tags with a trigger": (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]},
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [TYPED]},
    ),
    "all of it": (
        {"triggers": ["<a"], "tags": [TAG]},
        {"type": "triggered_tags", "triggers": ["<a"], "tags": [TYPED]},
    ),
    "in tags with a separator": (
        {"separator": ", ", "tags": [TAG]},
        {"type": "tags_with_separator", "separator": ", ", "tags": [TYPED]},
    ),
    "leaves": (
        {"type": "sequence", "elements": [{"value": "a"}, {"pattern": "b"}, {"grammar": 'root ::= "c"'}]},
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "regex", "pattern": "b"},
                {"type": "grammar", "grammar": 'root ::= "c"'},
            ],
        },
    ),
    "no limit of a repeat": (
        {"type": "repeat", "content": {"pattern": "b"}, "min": 1, "max": -1},
        {"type": "repeat", "content": {"type": "regex", "pattern": "b"}, "min": 1},
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_types_that_the_fields_tell(name):
    short, written = LEFT_OUT[name]
    assert gd.Guide.structural_tag({"format": short}) == gd.Guide.structural_tag({"format": written})


@pytest.mark.parametrize("form", [{"elements": [{"value": "a"}]}, {"content": {"value": "a"}}, {}, {"begin": "<a>"}])
def test_types_that_they_do_not_tell(form):
    with pytest.raises(gd.InvalidGuideError, match="without a type") as caught:
        gd.Guide.structural_tag({"format": form})
    assert caught.value.pointer == "#/format" and caught.value.hint


def test_specs_written_by_the_classes_of_xgrammar():
    tags = pytest.importorskip("xgrammar.structural_tag", reason="needs xgrammar")
    schema = tags.JSONSchemaFormat(json_schema=INTEGER)
    tag = tags.TagFormat(begin="<a>", content=schema, end="</a>")
    spec = tags.StructuralTag(format=tags.TriggeredTagsFormat(triggers=["<a"], tags=[tag]))
    guide = gd.Guide.structural_tag({"format": LEFT_OUT["in tags with a trigger"][1]})
    assert gd.Guide.structural_tag(spec.model_dump()) == guide
    assert gd.Guide.structural_tag(spec.model_dump_json()) == guide


def test_a_grammar_in_lark(backend, judge):
    form = {"type": "grammar", "grammar": 'start: A "b" start | A\nA: /[xy]/', "syntax": "lark"}
    guide = gd.Guide.structural_tag({"format": {"type": "tag", "begin": "<", "content": form, "end": ">"}})
    if backend.problems(guide):
        pytest.skip(f"{backend.name} refuses it: {backend.problems(guide)[0].message}")
    asked = judge(guide)
    for text in ["<x>", "<xby>", "<xbybx>", "<>", "<xb>", "<xy>", "x"]:
        assert asked.accepts(text) == bool(re.fullmatch("<[xy](b[xy])*>", text)), text


REFUSED = {
    # format: the place of what no guide can say
    "#/format": {"type": "token", "token": "</s>"},
    "#/format/begin": {"type": "tag", "begin": {"type": "token", "token": 3}, "content": {"value": "a"}, "end": "b"},
    "#/format/max_tokens": {"type": "any_text", "max_tokens": 3},
    "#/format/any_order": {"type": "json_schema", "json_schema": INTEGER, "any_order": True},
    "#/format/elements/0": {"type": "sequence", "elements": [{"type": "qwen_xml_parameter", "json_schema": INTEGER}]},
}


@pytest.mark.parametrize("place", REFUSED)
def test_what_a_guide_cannot_say_is_refused_by_name(place):
    with pytest.raises(gd.UnsupportedGuideError) as caught:
        gd.Guide.structural_tag({"format": REFUSED[place]})
    assert caught.value.pointer == place and caught.value.keyword and caught.value.hint
