"""Drafts: what the matcher accepts, the more the likelier they are right, and no longer than they pay."""

import random
from typing import Any

import pytest

import gd_plugin as gd
from tests.judges import CASES, Case

GUIDE = gd.Guide.json_schema(
    {
        "type": "object",
        "properties": {"first_name": {"type": "string"}, "second_name": {"type": "string"}},
        "required": ["first_name", "second_name"],
        "additionalProperties": False,
    }
)
DEAR = gd.PassCost(second=100.0, further=0.0)


@pytest.fixture(scope="module")
def factory(smollm2_vocabulary: gd.Vocabulary) -> gd.GrammarMatcherFactory:
    return gd.GrammarMatcherFactory(smollm2_vocabulary, config=gd.GuidedDecodingConfig(whitespace="compact"))


def text_of(factory: gd.GrammarMatcherFactory, tokens: list[int]) -> str:
    return factory.vocabulary.decode(tokens).decode()


@pytest.mark.parametrize("cost", [gd.PassCost(), gd.PassCost(0.6, 0.05)], ids=["flat", "dear"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_drafts_are_accepted_and_leave_the_matcher(
    case: Case, cost: gd.PassCost, factory: gd.GrammarMatcherFactory
) -> None:
    rng = random.Random(2)
    vocabulary = factory.vocabulary
    matcher = factory.create(case.guide)
    drafter = gd.Drafter(vocabulary, pass_cost=cost)
    drafter.extend(rng.sample(range(1000), 40))
    mask = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
    for _ in range(8):
        before = matcher.num_tokens
        draft = drafter.propose(matcher, 7, num_pending=rng.choice([1, 4]))
        assert matcher.num_tokens == before
        assert len(draft) <= 7
        assert matcher.validate_tokens(draft) == len(draft)
        matcher.fill_next_token_bitmask(mask, 0)
        legal = [i for i in rng.sample(range(vocabulary.vocab_size), 3000) if mask[0, i // 32] >> (i % 32) & 1]
        chosen = [*draft[: rng.randint(0, len(draft))], *legal[:1]]
        kept = matcher.validate_tokens(chosen)
        if not kept or matcher.is_terminated():
            break
        for token_id in chosen[:kept]:
            assert matcher.accept_token(token_id)
        drafter.extend(chosen[:kept])


def test_what_a_draft_adds_to_a_pass() -> None:
    cost = gd.PassCost(second=0.6, further=0.1)
    assert cost.added(1, 0) == 0
    assert cost.added(1, 1) == pytest.approx(0.6)
    assert cost.added(1, 4) == pytest.approx(0.9)
    assert cost.added(5, 4) == pytest.approx(0.4)
    assert gd.PassCost().added(1, 15) == 0


def test_a_draft_that_costs_more_than_it_can_save_is_not_made(factory: gd.GrammarMatcherFactory) -> None:
    matcher = factory.create(GUIDE)
    assert text_of(factory, gd.Drafter(factory.vocabulary).propose(matcher, 15)).startswith('{"first_name":"')
    dear = gd.Drafter(factory.vocabulary, pass_cost=DEAR)
    assert dear.propose(matcher, 15) == []
    # a pass that is wide anyway costs nothing more here
    assert dear.propose(matcher, 15, num_pending=2) != []


def test_tokens_that_alone_are_legal_save_no_pass(smollm2_vocabulary: gd.Vocabulary) -> None:
    canonical = gd.GuidedDecodingConfig(whitespace="compact", canonical_forcing=True)
    factory = gd.GrammarMatcherFactory(smollm2_vocabulary, config=canonical)
    matcher = factory.create(GUIDE)
    cost = gd.PassCost(second=1.5, further=0.0)
    assert gd.Drafter(factory.vocabulary, pass_cost=cost).propose(matcher, 15) != []
    assert gd.Drafter(factory.vocabulary, pass_cost=cost, skips_alone=True).propose(matcher, 15) == []


def test_guesses_that_were_wrong_are_not_sent_again(factory: gd.GrammarMatcherFactory, smollm2_tokenizer: Any) -> None:
    # the same words again and again, each time followed by others: a copy is never right
    words = [smollm2_tokenizer.encode(f" {word}")[0] for word in ("alpha", "beta", "gamma", "delta", "house", "tree")]
    rng = random.Random(4)
    matcher = factory.create(GUIDE)
    drafter = gd.Drafter(factory.vocabulary, pass_cost=gd.PassCost(0.6, 0.05))
    start = smollm2_tokenizer.encode('{"first_name":"')
    assert all(matcher.accept_token(token_id) for token_id in start)
    drafter.extend(start)
    sent = []
    for _ in range(60):
        sent.append(len(drafter.propose(matcher, 15)))
        chosen = rng.choice(words)
        assert matcher.accept_token(chosen)
        drafter.extend([chosen])
    # it is still right once in a while
    assert sum(map(bool, sent[30:])) <= 10


def test_punctuation_is_spelled_as_in_the_prompt(factory: gd.GrammarMatcherFactory, smollm2_tokenizer: Any) -> None:
    colon, joined = smollm2_tokenizer.encode('":')[0], smollm2_tokenizer.encode('":"')[0]
    assert colon != joined
    plain = gd.Drafter(factory.vocabulary)
    told = gd.Drafter(factory.vocabulary)
    told.extend(smollm2_tokenizer.encode('{"name": {"type": "string"}}'))
    drafts = [drafter.propose(factory.create(GUIDE), 15) for drafter in (plain, told)]
    assert joined in drafts[0]
    assert joined not in drafts[1]
    assert colon in drafts[1]
