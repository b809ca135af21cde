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
