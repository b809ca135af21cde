"""`max_new_tokens`: whatever the scores say, every guided row is complete within its budget."""

import random
from typing import Any

import pytest
import torch

import gd_plugin as gd
from gd_plugin.grammars.closing import minimum_tokens
from gd_plugin.grammars.reasoning import ReasoningMatcher
from gd_plugin.hf.budget import Budget
from tests.fuzz import LONG
from tests.hf.models import EOS, MODES, PAD, PROMPTS, Kit
from tests.judges import CASES

MODE = {mode.name: mode for mode in MODES}
CASE = {case.name: case for case in CASES}
WALKS = 10_000 if LONG else 32
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
}


def processor_for(kit: Kit, guide: Any, budget: int) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model, max_new_tokens=budget)


@pytest.fixture(scope="module")
def minima(kit: Kit) -> dict[str, int]:
    """Tokens of the shortest completion known, by case."""
    factory = gd.GrammarMatcherFactory(gd.Vocabulary.from_tokenizer(kit.tokenizer))
    found = {case.name: minimum_tokens(factory.compile(case.guide), factory.vocabulary) for case in CASES}
    assert all(found.values())
    return {name: tokens for name, tokens in found.items() if tokens is not None}


def walk(processor: gd.GuidedLogitsProcessor, budget: int, seed: int) -> list[int]:
    """Sample from random scores that love opening things, as no model would."""
    generator = torch.Generator().manual_seed(seed)
    ids = [7, 8, 9]
    while len(ids) - 3 < budget and ids[-1] != EOS:
        scores = 6 * torch.randn(1, 49152, generator=generator)
        scores[0, EOS] = -30
        scores = processor(torch.tensor([ids]), scores)
        ids.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
    return ids[3:]


def test_random_walks_close_within_any_budget_from_the_minimum_up(kit: Kit, minima: dict[str, int]) -> None:
    rng, vocabulary = random.Random(0), gd.Vocabulary.from_tokenizer(kit.tokenizer)
    for seed in range(WALKS):
        case = CASES[seed % len(CASES)]
        budget = minima[case.name] + rng.choice([0, 0, 1, 2, 5])
        tokens = walk(processor_for(kit, case.guide, budget), budget, seed)
        assert tokens[-1] == EOS, (case, budget, seed)
        text = vocabulary.decode(tokens[:-1]).decode()
        assert case.is_complete(text), (case, budget, text)


@pytest.mark.parametrize(
    "name", ["greedy", "sample_returns_3", "beams", "beam_sample_hot", "assisted", "prompt_lookup"]
)
def test_every_mode_closes(kit: Kit, name: str, minima: dict[str, int]) -> None:
    mode = MODE[name]
    case = CASE["schema_array"]
    for budget in (minima[case.name], minima[case.name] + 5):
        processor = processor_for(kit, case.guide if mode.single else [case.guide, None], budget)
        output = mode.run(kit, processor, max_new_tokens=budget)
        for result in processor.results(output):
            if result.status != "unguided":
                assert result.status == "complete"
                assert result.num_tokens <= budget
                assert case.is_complete(result.text or "")


def test_a_budget_too_small_is_refused_with_the_number_needed(kit: Kit) -> None:
    guide = gd.Guide.json_schema(PERSON)
    inputs = kit.prompts(PROMPTS[:1])
    with pytest.raises(ValueError, match=r"max_new_tokens=1 is too small.* at least max_new_tokens=\d+") as refused:
        kit.model.generate(**inputs, max_new_tokens=1, logits_processor=processor_for(kit, guide, 1))
    needed = int(str(refused.value).rsplit("=", 1)[1])
    with pytest.raises(ValueError, match=f"needs {needed} tokens"):
        kit.model.generate(**inputs, max_new_tokens=50, logits_processor=processor_for(kit, guide, needed - 1))
    processor = processor_for(kit, guide, needed)
    output = kit.model.generate(**inputs, max_new_tokens=needed, logits_processor=processor, do_sample=False)
    (result,) = processor.results(output)
    assert (result.status, result.num_tokens, result.intervened) == ("complete", needed, True)


def test_a_roomy_budget_changes_no_greedy_choice(kit: Kit) -> None:
    case = CASE["choice"]
    plain = gd.GuidedLogitsProcessor(case.guide, tokenizer=kit.tokenizer, model=kit.model)
    roomy = processor_for(kit, case.guide, 60)
    outputs = [MODE["greedy"].run(kit, processor, max_new_tokens=60).sequences for processor in (plain, roomy)]
    assert outputs[0].tolist() == outputs[1].tolist()
    assert not any(result.intervened for result in roomy.results(outputs[1]))


def test_mixed_rows_keep_their_own_budgets_worth(kit: Kit, minima: dict[str, int]) -> None:
    guides = [CASE["schema_array"].guide, None, CASE["choice"].guide, CASE["regex"].guide]
    budget = max(minima["schema_array"], minima["choice"], minima["regex"]) + 1
    for custom in (None, gd.grammar_drafting()):
        processor = processor_for(kit, guides, budget)
        torch.manual_seed(3)
        output = kit.model.generate(
            **kit.prompts((*PROMPTS, *PROMPTS)),
            max_new_tokens=budget,
            logits_processor=[processor],
            custom_generate=custom,
            do_sample=True,
            temperature=3.0,
            top_k=0,
            pad_token_id=PAD,
        )
        results = processor.results(output)
        assert [result.status for result in results] == ["complete", "unguided", "complete", "complete"]
        for result, name in zip(results, ("schema_array", None, "choice", "regex"), strict=True):
            assert name is None or CASE[name].is_complete(result.text or "")


@pytest.mark.parametrize("budget", [0, -3, 2.5, "9"])
def test_a_budget_that_is_no_number_of_tokens_is_refused(kit: Kit, budget: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        processor_for(kit, CASE["choice"].guide, budget)


def test_padding_behind_the_end_is_left_alone(kit: Kit, minima: dict[str, int]) -> None:
    guides = [CASE["choice"].guide, gd.Guide.json_schema(PERSON)]
    processor = processor_for(kit, guides, 30)
    output = kit.model.generate(
        **kit.prompts(PROMPTS), max_new_tokens=30, logits_processor=processor, pad_token_id=PAD, do_sample=False
    )
    assert [result.status for result in processor.results(output)] == ["complete", "complete"]


def test_steps_far_from_the_limit_are_not_touched(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = gd.Guide.regex("[a-z]{3,30}")
    processor = processor_for(kit, guide, 300)
    monkeypatch.setattr(Budget, "_allowed", None)  # would fail
    ids = torch.tensor([[7, 8, 9]])
    scores = torch.randn(1, 49152, generator=torch.Generator().manual_seed(0))
    plain = gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model)
    assert torch.equal(processor(ids, scores), plain(ids, scores))


def test_lint_says_what_a_budget_can_rely_on() -> None:
    regular = gd.lint(gd.Guide.regex("[0-9]{4}"))
    assert (regular.shortest, regular.completion_bound) == (5, 5)
    schema = gd.lint(gd.Guide.json_schema(PERSON))
    assert schema.shortest is not None
    assert schema.completion_bound is not None
    assert schema.shortest <= schema.completion_bound
    assert gd.lint(gd.Guide.json()).completion_bound is None
    assert gd.lint(gd.Guide.choice(["yes", "no"])).shortest == 3


@pytest.mark.parametrize("name", ["choice", "schema_array"])
def test_a_budget_holds_under_canonical_forcing(kit: Kit, name: str, minima: dict[str, int]) -> None:
    budget = minima[name] + 2
    processor = gd.GuidedLogitsProcessor(
        CASE[name].guide, tokenizer=kit.tokenizer, model=kit.model, max_new_tokens=budget, canonical_forcing=True
    )
    tokens = walk(processor, budget, 5)
    assert tokens[-1] == EOS
    assert CASE[name].is_complete(processor.vocabulary.decode(tokens[:-1]).decode())


def test_free_text_is_closed_by_its_end_marker(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    accepts = 0
    accept_token = ReasoningMatcher.accept_token

    def counted(matcher: ReasoningMatcher, token_id: int) -> bool:
        nonlocal accepts
        accepts += 1
        return accept_token(matcher, token_id)

    monkeypatch.setattr(ReasoningMatcher, "accept_token", counted)
    guide = gd.Guide.choice(["yes", "no"]).with_reasoning()
    tokens = walk(processor_for(kit, guide, 7), 7, seed=0)
    assert tokens[-1] == EOS
    assert accepts < 100_000
