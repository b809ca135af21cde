"""Certificates complete what they start from, whatever was generated before; judges know no engine."""

import random

import pytest

import gd_plugin as gd
from gd_plugin.grammars.closing import closing_hints, find_certificate, renew_certificate
from tests.judges import CASES, Case


@pytest.fixture(scope="module")
def factory(smollm2_vocabulary: gd.Vocabulary) -> gd.GrammarMatcherFactory:
    return gd.GrammarMatcherFactory(smollm2_vocabulary)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_certificate_completes_any_state_of_a_random_walk(case: Case, factory: gd.GrammarMatcherFactory) -> None:
    vocabulary = factory.vocabulary
    rng = random.Random(1)
    for _ in range(2):
        matcher = factory.create(case.guide)
        certificate = find_certificate(matcher, vocabulary, closing_hints(case.guide))
        history: list[int] = []
        while certificate is not None and not matcher.is_terminated():
            assert matcher.num_tokens == len(history), "the search has moved the matcher"
            text = vocabulary.decode([*history, *certificate[:-1]]).decode()
            assert case.is_complete(text), text
            assert certificate[-1] in vocabulary.stop_token_set
            mask = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
            matcher.fill_next_token_bitmask(mask, 0)
            legal = [t for t in rng.sample(range(vocabulary.vocab_size), 3000) if mask[0, t // 32] >> (t % 32) & 1]
            token_id = rng.choice([*legal[:3], certificate[0]]) if len(history) < 6 else certificate[0]
            assert matcher.accept_token(token_id)
            history.append(token_id)
            if not matcher.is_terminated():
                old = certificate
                certificate = renew_certificate(matcher, old) or find_certificate(matcher, vocabulary, old=old)
        assert certificate is None or matcher.is_terminated()
        assert certificate is not None


@pytest.mark.parametrize(
    ("guide", "tokens"),
    [
        (gd.Guide.choice(["yes", "no", "a much longer option"]), 2),
        (gd.Guide.json_schema({"type": "boolean"}), 2),
        (gd.Guide.regex("[0-9]{3}"), 4),
    ],
    ids=["choice", "boolean", "digits"],
)
def test_short_completions_are_found(guide: gd.Guide, tokens: int, factory: gd.GrammarMatcherFactory) -> None:
    found = find_certificate(factory.create(guide), factory.vocabulary, closing_hints(guide))
    assert found is not None
    assert len(found) == tokens


def test_a_certificate_needs_no_byte_the_vocabulary_lacks() -> None:
    vocabulary = gd.Vocabulary.from_bytes([b"ab", b"cd", None], stop_token_ids=[2])
    factory = gd.GrammarMatcherFactory(vocabulary)
    assert find_certificate(factory.create(gd.Guide.regex("abcd")), vocabulary) == (0, 1, 2)
