"""Canonical forcing: the contract holds, texts stay the same, forced text has the tokenizer's spelling."""

import json
import random
import re
from typing import Any

import pytest

import gd_plugin as gd
from gd_plugin.grammars.closing import find_certificate
from tests.judges import CASES, Case

CONFIG = gd.GuidedDecodingConfig(canonical_forcing=True, whitespace="compact")
LONG_KEYS = {
    "type": "object",
    "properties": {
        "identification_number": {"enum": ["seventeen"]},
        "description_of_item": {"type": "string", "maxLength": 9},
    },
    "required": ["identification_number", "description_of_item"],
}


@pytest.fixture(scope="module")
def factory(smollm2_vocabulary: gd.Vocabulary) -> gd.GrammarMatcherFactory:
    return gd.GrammarMatcherFactory(smollm2_vocabulary, config=CONFIG)


def legal_tokens(matcher: gd.GrammarMatcher, vocabulary: gd.Vocabulary) -> list[int]:
    row = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
    matcher.fill_next_token_bitmask(row, 0)
    words = row[0].tolist()
    return [i for i in range(vocabulary.vocab_size) if words[i >> 5] >> (i & 31) & 1]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_mask_is_the_accept_set_and_texts_obey_the_guide(case: Case, factory: gd.GrammarMatcherFactory) -> None:
    vocabulary = factory.vocabulary
    rng = random.Random(3)
    matcher = factory.create(case.guide)
    history: list[int] = []
    while not matcher.is_terminated() and len(history) < 12:
        legal = legal_tokens(matcher, vocabulary)
        banned = [token_id for token_id in rng.sample(range(vocabulary.vocab_size), 200) if token_id not in legal]
        assert not any(matcher.fork().accept_token(token_id) for token_id in banned)
        twin = matcher.fork()
        assert twin.accept_token(rng.choice(legal))
        twin.rollback(1)
        assert legal_tokens(twin, vocabulary) == legal
        history.append(rng.choice(legal))
        assert matcher.accept_token(history[-1])
        text = vocabulary.decode([t for t in history if t not in vocabulary.stop_token_set])
        assert case.is_prefix(text.decode(errors="ignore")), text
    if matcher.is_terminated():
        assert case.is_complete(text.decode())
    else:
        replayed = factory.create(case.guide)
        assert replayed.validate_tokens(history) == len(history)


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "outlines_core"])
def test_every_backend_has_the_same_rule_and_every_text_stays(backend: str, smollm2_vocabulary: Any) -> None:
    factory = gd.GrammarMatcherFactory(smollm2_vocabulary, config=CONFIG.replace_fields(backend=backend))
    guide = gd.Guide.regex("(identification|identity) number [0-9]{1,2}, approximately")
    matcher = factory.create(guide)
    masks = []
    for _ in range(3):
        legal = legal_tokens(matcher, smollm2_vocabulary)
        masks.append(legal)
        matcher.accept_token(legal[0])
    assert [len(mask) for mask in masks[:1]] == [1]
    for text in ("identity number 7, approximately", "identification number 42, approximately"):
        # some spelling of every text is left
        assert reachable(factory.create(guide), smollm2_vocabulary, text.encode())


def reachable(matcher: gd.GrammarMatcher, vocabulary: gd.Vocabulary, text: bytes) -> bool:
    """Search the tokens that spell `text` by trying every legal one that fits."""
    if not text:
        return matcher.is_accepting()
    fitting = [i for i in legal_tokens(matcher, vocabulary) if text.startswith(vocabulary.tokens[i] or b"\0")]
    for token_id in sorted(fitting, key=lambda i: -len(vocabulary.tokens[i])):
        matcher.accept_token(token_id)
        if reachable(matcher, vocabulary, text[len(vocabulary.tokens[token_id]) :]):
            return True
        matcher.rollback(1)
    return False


def test_forced_keys_have_the_tokenizers_spelling(factory: gd.GrammarMatcherFactory, smollm2_tokenizer: Any) -> None:
    matcher = factory.create(gd.Guide.json_schema(LONG_KEYS))
    history: list[int] = []
    while len(legal := legal_tokens(matcher, factory.vocabulary)) == 1:
        matcher.accept_token(legal[0])
        history += legal
    text = factory.vocabulary.decode(history).decode()
    assert re.match(r'\{"identification_number":"seventeen","description_of_item', text)
    assert history == smollm2_tokenizer.encode(text, add_special_tokens=False)
    certificate = find_certificate(matcher, factory.vocabulary)
    assert certificate is not None
    assert matcher.validate_tokens(certificate) == len(certificate)
    whole = json.loads(factory.vocabulary.decode([*history, *certificate[:-1]]))
    assert whole == {"identification_number": "seventeen", "description_of_item": ""}


def test_a_vocabulary_without_tokenizer_is_spelled_with_few_tokens() -> None:
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", b"ab", b"c", None], stop_token_ids=[4])
    factory = gd.GrammarMatcherFactory(vocabulary, config=CONFIG)
    matcher = factory.create(gd.Guide.regex("ababc"))
    assert legal_tokens(matcher, vocabulary) == [2]
    assert not matcher.accept_token(0)
    assert matcher.accept_token(2)
    assert legal_tokens(matcher, vocabulary) == [2]
    assert matcher.accept_token(2)
    assert legal_tokens(matcher, vocabulary) == [3]
