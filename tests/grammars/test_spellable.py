"""What a vocabulary can spell of a guide, judged by listing its token sequences."""

import re
from itertools import product

import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import backend_names
from gd_plugin.grammars.spellable import has_every_byte, is_spellable

TOKENS: list[bytes | None] = [b"a", b"b", b"bc", b"\xc3", b"\xa9x", None]
STOP = 5
# every text of up to six tokens
TEXTS = {
    b"".join(parts)
    for count in range(7)
    for parts in product([token for token in TOKENS if token], repeat=count)
}  # fmt: skip

PATTERNS = ["c", "ca|b", "ac", "a*c", "a*bc", "(ab)*bc", "b?c", "a*d", "é", "éx", "a*éx", "é|ab"]
PATTERNS += ["[c-z]", ".", "c?", "[一-龥]|a"]


@pytest.fixture(scope="module", params=["auto", *backend_names()])
def factory(request: pytest.FixtureRequest) -> gd.GrammarMatcherFactory:
    vocabulary = gd.Vocabulary.from_bytes(TOKENS, stop_token_ids=[STOP])
    try:
        return gd.GrammarMatcherFactory(vocabulary, backend=request.param)
    except gd.BackendNotInstalledError as error:
        pytest.skip(str(error))


def texts_of(pattern: str) -> list[bytes]:
    found = []
    for text in TEXTS:
        try:
            if re.fullmatch(pattern, text.decode()):
                found.append(text)
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regex_is_refused_if_no_tokens_spell_it(factory: gd.GrammarMatcherFactory, pattern: str) -> None:
    guide = gd.Guide.regex(pattern)
    report = gd.lint(guide, tokenizer=factory.vocabulary)
    assert report.satisfiable
    if texts_of(pattern):
        assert is_spellable(factory.compile(guide), factory.vocabulary)
        assert report.ok and report.spellable
        return
    with pytest.raises(gd.UnsatisfiableGuideError, match="no tokens of this vocabulary") as caught:
        factory.create(guide)
    assert caught.value.pointer == "#" and caught.value.hint
    assert not report.ok and report.spellable is False and report.backend is None


OTHERS = [
    (gd.Guide.choice(["c", "ab"]), True),
    (gd.Guide.choice(["xy", "d"]), False),
    (gd.Guide.ebnf('root ::= "a" root "d" | "d"'), False),
    (gd.Guide.ebnf('root ::= "a" root "b" | "bc"'), True),
    (gd.Guide.lark("start: /d/"), False),
    (gd.Guide.json(), False),
    (gd.Guide.json_schema({"type": "boolean"}), False),
    (gd.Guide.json_schema({"type": "object"}), False),
    (gd.Guide.tools([{"function": {"name": "f"}}]), True),
    (gd.Guide.tools([{"function": {"name": "f"}}], "required"), False),
    (gd.Guide.choice(["c"]).with_reasoning(end="ab"), False),
    (gd.Guide.choice(["b"]).with_reasoning(end="ab"), True),
    (gd.Guide.choice(["b"]).with_reasoning(end="d"), False),
]


@pytest.mark.parametrize(("guide", "spelled"), OTHERS)
def test_every_kind_of_guide(factory: gd.GrammarMatcherFactory, guide: gd.Guide, spelled: bool) -> None:
    try:
        factory.create(guide)
    except gd.UnsupportedGuideError as error:
        pytest.skip(f"{factory.config.backend} refuses the kind: {error}")
    except gd.UnsatisfiableGuideError:
        assert not spelled
    else:
        assert spelled
    assert gd.lint(guide, tokenizer=factory.vocabulary).spellable is spelled


def test_bytes_that_have_tokens_of_their_own() -> None:
    tokens: list[bytes | None] = [bytes([byte]) for byte in range(256)]
    assert has_every_byte(gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[256]))
    # a stop token spells nothing
    assert not has_every_byte(gd.Vocabulary.from_bytes(tokens, stop_token_ids=[97]))
