import pytest

import gd_plugin as gd


def test_a_good_guide():
    report = gd.lint(gd.Guide.regex(r"[ab]{3}"))
    assert report.ok
    assert report.backend in report.backends
    assert report.backends[report.backend] == "enforces all of it"
    assert report.satisfiable
    assert report.spellable is None
    assert report.size == 3
    assert report.problems == []


def test_unsatisfiable():
    report = gd.lint(gd.Guide.json_schema({"type": "integer", "minimum": 5, "maximum": 3}))
    assert not report.ok


SPELLINGS = [
    ("[ab]+", True),
    ("c", False),
    ("ca|b", True),
    ("(?:bc)+", True),
    (".", True),
    ("é", False),
]


@pytest.mark.parametrize(("pattern", "spellable"), SPELLINGS)
def test_what_this_tokenizer_can_spell(pattern, spellable):
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", b"bc", None], stop_token_ids=[3])
    report = gd.lint(gd.Guide.regex(pattern), tokenizer=vocabulary)
    assert report.spellable is spellable
    assert report.ok == spellable


def test_reasoning_is_no_problem():
    assert gd.lint(gd.Guide.choice(["a"]).with_reasoning()).ok


def test_wrong_argument():
    with pytest.raises(TypeError, match="Guide"):
        gd.lint({"type": "object"})


JSON_SPELLINGS = [
    (gd.Guide.json(), True),
    (gd.Guide.json_schema({"type": "object", "properties": {"é": {"type": "integer"}}}), True),
    (gd.Guide.tools([{"type": "function", "function": {"name": "f"}}]), True),
]


@pytest.mark.parametrize(("guide", "spellable"), JSON_SPELLINGS)
def test_bytes_spell_json(guide, spellable):
    tokens = [bytes([value]) for value in range(256)]
    assert (
        gd.lint(guide, tokenizer=gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[256])).spellable is spellable
    )


def test_json_that_cannot_begin_is_not_spellable():
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=[2])
    assert gd.lint(gd.Guide.json_schema({"type": "object"}), tokenizer=vocabulary).spellable is False


BAD_TOOL = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": 5}}}}}
WRONG = [
    (gd.Guide.json_schema({"type": "strnig"}), "#/type", False),
    (gd.Guide.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "#", True),
    (gd.Guide.tools([BAD_TOOL]), "#/format/tags/0", False),
    (gd.Guide.structural_tag({"format": {"type": "json_schema", "json_schema": {"type": "strin"}}}), "#/format", False),
    (gd.Guide(gd.GuideType.REGEX, "("), "position 0", False),
    (gd.Guide(gd.GuideType.JSON_SCHEMA, "{"), "", False),
    (gd.Guide(gd.GuideType.EBNF_GRAMMAR, "root ::= x"), "line 1", False),
]  # fmt: skip


@pytest.mark.parametrize(("guide", "place", "no_text"), WRONG)
def test_what_is_wrong_with_the_guide_itself_comes_first(guide, place, no_text):
    report = gd.lint(guide)
    assert not report.ok and report.backend is None
    assert report.problems[0].pointer.startswith(place) and report.problems[0].message.startswith(place)
    assert report.problems[0].backend == "" or not no_text
    assert (report.satisfiable is False) == no_text


def test_compile_cost_is_told_before_outlines_core_is_tried():
    vocabulary = gd.Vocabulary.from_bytes([*[bytes([value]) for value in range(256)], None], stop_token_ids=[256])
    short, long, recursive = (
        gd.lint(guide, tokenizer=vocabulary)
        for guide in (gd.Guide.regex("[ab]{3}"), gd.Guide.regex("[ab]{300}"), gd.Guide.ebnf('root ::= "a" root | "b"'))
    )
    assert 0 < short.compile_s["outlines_core"] < long.compile_s["outlines_core"]
    assert "outlines_core" not in recursive.compile_s
    # far over the time it may take: refused by the estimate alone
    refused = gd.lint(gd.Guide.regex("(a|b)*a(a|b){40}"), tokenizer=vocabulary)
    assert "outlines_core" not in refused.compile_s and "compile_timeout_s" in refused.backends["outlines_core"]
