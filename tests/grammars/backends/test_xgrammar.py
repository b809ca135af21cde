"""The xgrammar adapter: what it takes, what it refuses, and how it says so."""

import pytest

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import GuideError, InvalidGuideError, UnsatisfiableGuideError, UnsupportedGuideError
from gd_plugin.grammars.backends.registry import create_backend
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide

STOP = 256


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokens: list[bytes | None] = [bytes([byte]) for byte in range(256)]
    return Vocabulary.from_bytes([*tokens, None, None], stop_token_ids=[STOP, 257], vocab_size=300)


def matches(vocabulary: Vocabulary, guide: Guide, text: str, **fields: object) -> bool:
    backend = create_backend("xgrammar", vocabulary, GuidedDecodingConfig().replace_fields(**fields))
    matcher = backend.compile(guide).create_matcher()
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(STOP)


OPTIONS = ["a", "", "ab", 'é"\\\n\0😀', "\x7f", "\u200b", "]", "[", "\\u0041", "--", "|"]


@pytest.mark.parametrize("option", OPTIONS)
def test_choice_takes_each_option_literally(vocabulary: Vocabulary, option: str) -> None:
    assert matches(vocabulary, Guide.choice(OPTIONS), option)


@pytest.mark.parametrize("text", ["b", "abb", "A", "x", "\\"])
def test_choice_takes_nothing_else(vocabulary: Vocabulary, text: str) -> None:
    assert not matches(vocabulary, Guide.choice(OPTIONS), text)


JSON_CASES = [
    # text, whitespace, matches
    ("1", "bounded", True),
    ('"x"', "bounded", True),
    ("null", "compact", True),
    ('{"a": [1, 2]}', "bounded", True),
    ('{"a": [1, 2]}', "compact", False),
    ('{"a":[1,2]}', "compact", True),
    ("[" + " " * 16 + "]", "bounded", True),
    ("[" + " " * 17 + "]", "bounded", False),
    ("[" + " " * 17 + "]", "any", True),
    (" 1", "any", False),
    ("1 ", "any", False),
    ("01", "any", False),
    ('"\t"', "any", False),
]


@pytest.mark.parametrize(("text", "whitespace", "expected"), JSON_CASES)
def test_json(vocabulary: Vocabulary, text: str, whitespace: str, expected: bool) -> None:
    assert matches(vocabulary, Guide.json(), text, whitespace=whitespace) is expected


REFUSED = [
    # guide, error, start of the message
    (Guide.json_schema(False), UnsatisfiableGuideError, "#: "),
    (
        Guide.json_schema({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1}),
        UnsatisfiableGuideError,
        "#: ",
    ),
    (Guide.json_schema({"$ref": "#/a"}), InvalidGuideError, "#/$ref: "),
    (Guide.regex("a").with_reasoning(), UnsupportedGuideError, "#: "),
]


@pytest.mark.parametrize(("guide", "error", "place"), REFUSED)
def test_refusals_name_the_place(
    vocabulary: Vocabulary, guide: Guide, error: type[GuideError], place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = create_backend("xgrammar", vocabulary, GuidedDecodingConfig())
    with pytest.raises(error) as caught:
        backend.compile(guide)
    assert str(caught.value).startswith(place)
    assert "/cpp/" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
