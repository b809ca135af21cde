"""Drafting changes the number of forward passes and nothing else."""

import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import gd_plugin as gd
from tests.fuzz import pick
from tests.hf.models import EOS, PAD, PROMPTS, Kit
from tests.judges import CASES, Case

CASE = {case.name: case for case in CASES}
LONG_KEYS = {
    "type": "object",
    "properties": {
        "identification_number": {"type": "integer"},
        "description_of_item": {"type": "string", "maxLength": 12},
        "category": {"enum": ["household_appliance", "garden_furniture"]},
    },
    "required": ["identification_number", "description_of_item", "category"],
}
GUIDE = gd.Guide.json_schema(LONG_KEYS)


def processor_for(kit: Kit, guide: Any, **fields: Any) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model, **fields)


def generate(kit: Kit, texts: tuple[str, ...], processor: Any, **options: Any) -> Any:
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, **options}
    with torch.no_grad():
        return kit.model.generate(**kit.prompts(texts), logits_processor=processor, **options)


def both(kit: Kit, texts: tuple[str, ...], guide: Any, **options: Any) -> tuple[list[Any], int]:
    """Generate plainly and with drafts; check that they agree, and return the results and the forward passes."""
    fields = {"whitespace": "compact", **options.pop("fields", {})}
    drafting = gd.grammar_drafting(**options.pop("drafting", {}))
    plain = generate(kit, texts, processor_for(kit, guide, **fields), **options)
    processor = processor_for(kit, guide, **fields)
    drafted = generate(kit, texts, processor, custom_generate=drafting, **options)
    assert drafted.tolist() == plain.tolist()
    return processor.results(drafted), drafting.num_forwards  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS], ids=["one row", "two rows, left padding"])
def test_greedy_is_token_for_token_the_same(kit: Kit, case: Case, texts: tuple[str, ...]) -> None:
    for canonical in (False, True):
        results, _ = both(kit, texts, case.guide, fields={"canonical_forcing": canonical}, max_new_tokens=10)
        for result in results:
            if result.status == "complete":
                assert case.is_complete(result.text or "")


@pytest.mark.parametrize("canonical", [False, True], ids=["byte by byte", "canonical"])
def test_random_guides_rows_and_drafts_change_nothing(kit: Kit, canonical: bool) -> None:
    rng = random.Random(7)
    words = ["one", "two", "red", "{", '"n":', "identification_number", "household"]
    for _ in range(pick(5, 300)):
        count = rng.randint(1, 3)
        texts = tuple(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(count))
        kinds = [*(case.guide for case in CASES), GUIDE, None]
        guides = [rng.choice(kinds) for _ in range(count)]
        drafting = {"num_draft_tokens": rng.choice([1, 3, 15]), "prompt_lookup": rng.random() < 0.7}
        fields = {"canonical_forcing": canonical, "whitespace": rng.choice(["compact", "bounded"])}
        if any(guides):
            both(kit, texts, guides, fields=fields, drafting=drafting, max_new_tokens=rng.randint(1, 16))


@pytest.mark.parametrize("whitespace", ["compact", "bounded"])
def test_mixed_guides_and_unguided_rows(kit: Kit, whitespace: str) -> None:
    guides = [GUIDE, None, CASE["choice"].guide]
    texts = (*PROMPTS, "one two three one two three")
    both(kit, texts, guides, fields={"whitespace": whitespace}, max_new_tokens=20)


def test_forced_text_saves_forward_passes(kit: Kit) -> None:
    results, forwards = both(kit, ('A prompt with "identification_number": and "description_of_item":',), GUIDE)
    assert forwards < results[0].num_tokens


def test_a_choice_behind_its_first_token_needs_one_pass(kit: Kit) -> None:
    text = "seventeen thousand three hundred and forty two little ducks"
    results, forwards = both(kit, PROMPTS[:1], gd.Guide.choice([text]), max_new_tokens=70)
    assert results[0].text == text
    assert forwards < results[0].num_tokens


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"min_new_tokens": 9}, {"no_repeat_ngram_size": 4}])
def test_other_processors_see_what_they_would_have_seen(kit: Kit, options: dict[str, Any]) -> None:
    # the penalty keeps a number for each row of the batch
    texts = PROMPTS[:1] if "repetition_penalty" in options else PROMPTS
    both(kit, texts, GUIDE, max_new_tokens=12, **options)


def test_a_processor_that_may_tell_rows_apart_is_called_with_all_of_them(kit: Kit) -> None:
    with pytest.warns(UserWarning, match="RepetitionPenalty"):
        both(kit, PROMPTS, GUIDE, max_new_tokens=6, repetition_penalty=1.3)


@pytest.mark.parametrize("canonical", [False, True], ids=["byte by byte", "canonical"])
def test_a_budget_holds_under_drafts(kit: Kit, canonical: bool) -> None:
    fields = {"max_new_tokens": 40, "canonical_forcing": canonical}
    results, _ = both(kit, PROMPTS, [GUIDE, CASE["choice"].guide], fields=fields, max_new_tokens=40)
    assert [result.status for result in results] == ["complete", "complete"]


def test_sampling_follows_the_same_distribution(kit: Kit) -> None:
    guide = gd.Guide.choice(["red", "green", "blue", "black", "orange"])
    draws = pick(100, 2000)
    counts: list[dict[str, int]] = []
    for custom in (None, gd.grammar_drafting()):
        processor = processor_for(kit, guide)
        torch.manual_seed(11)
        output = generate(
            kit,
            ("Colour:",) * draws,
            processor,
            do_sample=True,
            temperature=1.5,
            max_new_tokens=8,
            custom_generate=custom,
        )
        texts = [result.text or "" for result in processor.results(output)]
        counts.append({text: texts.count(text) for text in guide.options()})
        assert sum(counts[-1].values()) == draws
    cells = [(counts[0][text], counts[1][text]) for text in guide.options() if counts[0][text] + counts[1][text]]
    # two samples of the same size: chi-square with cells - 1 degrees of freedom; 18.5 is its 0.999 quantile at 4
    assert sum((a - b) ** 2 / (a + b) for a, b in cells) < 18.5


def test_sampling_follows_the_exact_distribution_over_a_small_vocabulary() -> None:
    """Every sequence of tokens has a probability that plain arithmetic tells."""
    texts = [b"a", b"b", b"c", b"ab", b"bc", b"abc"]
    vocabulary = gd.Vocabulary.from_bytes([*texts, None], stop_token_ids=[6])
    options = ["abcabc", "abcab", "acb", "bcabcc", "c"]
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=7, bos_token_id=0, eos_token_id=6, pad_token_id=6, **size)).eval()
    for parameter in model.parameters():
        parameter.data *= 3  # far from uniform
    prompt = [0, 1, 5, 2, 0, 1]

    exact: dict[tuple[int, ...], float] = {}

    def spread(tokens: tuple[int, ...], likelihood: float) -> None:
        written = b"".join(texts[token] for token in tokens).decode()
        legal = [i for i, text in enumerate(texts) if any(o.startswith(written + text.decode()) for o in options)]
        legal += [6] * (written in options)
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1, legal]
        for token, share in zip(legal, scores.softmax(-1).tolist(), strict=True):
            if token == 6:
                exact[tokens] = likelihood * share
            else:
                spread((*tokens, token), likelihood * share)

    spread((), 1.0)
    assert sum(exact.values()) == pytest.approx(1, abs=1e-4)
    draws = pick(1500, 30_000)
    counts: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(12)
    for _ in range(draws // 250):
        processor = gd.GuidedLogitsProcessor(gd.Guide.choice(options), vocabulary=vocabulary)
        ids = torch.tensor([prompt] * 250)
        drafting = gd.grammar_drafting()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        output = model.generate(
            **inputs,
            logits_processor=[processor],
            custom_generate=drafting,
            do_sample=True,
            top_k=0,
            max_new_tokens=8,
        )
        for row in output[:, len(prompt) :].tolist():
            counts[tuple(row[: row.index(6)])] += 1
    assert set(counts) <= set(exact)
    # cells below five expected draws are taken together
    rare = [key for key, share in exact.items() if share * draws < 5]
    cells = [(counts[key], share * draws) for key, share in exact.items() if key not in rare]
    if rare:
        cells.append((sum(counts[key] for key in rare), sum(exact[key] for key in rare) * draws))
    assert len(cells) > 4
    freedom = len(cells) - 1
    # Wilson and Hilferty: the 0.999 quantile of chi-square
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert sum((seen - expected) ** 2 / expected for seen, expected in cells) < quantile


def test_what_cannot_be_served_is_generated_plainly_and_said_once(kit: Kit) -> None:
    drafting = gd.grammar_drafting()
    for attempt in range(2):
        processor = processor_for(kit, CASE["choice"].guide)
        options = {"num_beams": 2, "custom_generate": drafting}
        if attempt == 0:
            with pytest.warns(UserWarning, match="beams"):
                output = generate(kit, PROMPTS[:1], processor, **options)
        else:
            output = generate(kit, PROMPTS[:1], processor, **options)
        (result,) = processor.results(output)
        assert CASE["choice"].is_complete(result.text or "")
        assert drafting.num_forwards > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["options", "config"])
def test_without_a_cache_the_option_is_named(kit: Kit, where: str) -> None:
    options: dict[str, Any] = {"use_cache": False}
    if where == "config":
        options = {"generation_config": GenerationConfig(use_cache=False, eos_token_id=EOS)}
    with pytest.warns(UserWarning, match="plainly here: use_cache=False leaves no cache") as caught:
        processor = processor_for(kit, CASE["choice"].guide)
        output = generate(kit, PROMPTS[:1], processor, custom_generate=gd.grammar_drafting(), **options)
    assert "cache_implementation" not in str(caught[0].message)
    # where `generate` is called: here that is done in a function above
    assert caught[0].filename == __file__
    (result,) = processor.results(output)
    assert CASE["choice"].is_complete(result.text or "")


def test_output_forms_and_a_streamer(kit: Kit) -> None:
    class Collector:
        def __init__(self) -> None:
            self.put_ids: list[int] = []
            self.ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.put_ids += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    collector = Collector()
    drafting = gd.grammar_drafting(streamer=collector)
    output = generate(
        kit, PROMPTS[:1], processor_for(kit, GUIDE), custom_generate=drafting, return_dict_in_generate=True
    )
    assert output.sequences[0].tolist() == collector.put_ids
    assert collector.ended == 1
    with pytest.raises(ValueError, match="streamer"):
        generate(kit, PROMPTS, processor_for(kit, GUIDE), custom_generate=drafting)


def test_wrong_arguments_are_refused_before_any_forward_pass(kit: Kit) -> None:
    with pytest.raises(ValueError, match="num_draft_tokens"):
        gd.grammar_drafting(num_draft_tokens=0)
    with pytest.raises(ValueError, match="GuidedLogitsProcessor"):
        generate(kit, PROMPTS, [], custom_generate=gd.grammar_drafting())


def test_a_small_budget_is_refused_before_any_forward_pass(kit: Kit) -> None:
    drafting = gd.grammar_drafting()
    processor = processor_for(kit, [CASE["choice"].guide, GUIDE], max_new_tokens=3)
    with pytest.raises(ValueError, match=r"row 1: max_new_tokens=3 is too small.* at least max_new_tokens=\d+"):
        generate(kit, PROMPTS, processor, custom_generate=drafting)
    assert drafting.num_forwards == 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="streamer"):
        gd.grammar_drafting(streamer=5)


def test_threads_share_a_callable(kit: Kit) -> None:
    drafting = gd.grammar_drafting()
    plain = generate(kit, PROMPTS[:1], processor_for(kit, GUIDE)).tolist()
    outputs: list[Any] = []

    def run() -> None:
        outputs.append(generate(kit, PROMPTS[:1], processor_for(kit, GUIDE), custom_generate=drafting).tolist())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [plain] * 3


def test_rows_end_with_their_stop_token(kit: Kit) -> None:
    processor = processor_for(kit, [CASE["choice"].guide, GUIDE], whitespace="compact")
    output = generate(kit, PROMPTS, processor, custom_generate=gd.grammar_drafting(), max_new_tokens=60)
    first = output[0].tolist()
    end = first.index(EOS, kit.prompts(PROMPTS)["input_ids"].shape[1])
    assert set(first[end + 1 :]) <= {PAD}
