"""What must be the same with and without something: a guide in another row, an assistant, an earlier call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import gd_plugin as gd
from tests.hf.models import EOS, MODES, PAD, PROMPTS, Kit, Mode
from tests.judges import CASES, Case

MODE = {mode.name: mode for mode in MODES}
CASE = {case.name: case for case in CASES}


class Spy(LogitsProcessor):
    """Calls a processor, and checks at each step what must hold for any scores."""

    def __init__(self, processor: gd.GuidedLogitsProcessor) -> None:
        self.processor = processor
        self.widths: list[int] = []
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        before = scores.clone()
        out: Any = self.processor(input_ids, scores)
        assert torch.equal(bits(scores), bits(before)), "scores were written"
        assert (out.shape, out.dtype, out.device) == (scores.shape, scores.dtype, scores.device)
        self.widths.append(scores.shape[-1])
        self.lengths.append(input_ids.shape[1])
        guides = self.processor.compiled
        for row in range(len(out)):
            kept = out[row] > float("-inf")
            if guides[row * len(guides) // len(out)] is None:
                assert torch.equal(bits(out[row]), bits(scores[row])), "an unguided row has changed"
            else:
                assert kept.any(), "a guided row without a finite score"
                changed = bits(out[row]) != bits(scores[row])
                assert not (changed & kept & (scores[row] > float("-inf"))).any(), "a legal column has changed"
        return out


def bits(scores: torch.Tensor) -> torch.Tensor:
    return scores.view(torch.int16 if scores.element_size() == 2 else torch.int32)


def processor_for(kit: Kit, mode: Mode, guide: Any, **fields: Any) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=getattr(kit, mode.model), **fields)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.name != "compiled"], ids=repr)
def test_scores_are_never_written_and_unguided_rows_leave_bit_identical(kit: Kit, mode: Mode) -> None:
    guides = CASE["json_any"].guide if mode.single else [CASE["json_any"].guide, None]
    spy = Spy(processor_for(kit, mode, guides))
    mode.run(kit, [spy], max_new_tokens=8)
    assert spy.widths


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_unguided_row_keeps_nan_and_infinity(kit: Kit, dtype: torch.dtype) -> None:
    spy = Spy(processor_for(kit, MODE["greedy"], [CASE["choice"].guide, None]))
    scores = torch.randn(2, 49152).to(dtype)
    scores[1, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    spy(torch.tensor([[5, 6], [7, 8]]), scores)


def trimmed(row: list[int]) -> list[int]:
    while row and row[-1] in (PAD, EOS):
        row = row[:-1]
    return row


@pytest.mark.parametrize("name", ["greedy", "sample", "beams", "sample_returns_3", "bf16", "t5"])
def test_unguided_rows_are_the_same_as_without_the_processor(kit: Kit, name: str) -> None:
    mode = MODE[name]
    plain = mode.run(kit, None, max_new_tokens=12).sequences.tolist()
    for guided in (0, 1):
        guides = [None, None]
        guides[guided] = CASE["schema_object"].guide
        mixed = mode.run(kit, processor_for(kit, mode, guides), max_new_tokens=12).sequences.tolist()
        half = len(plain) // 2
        rows = range(half) if guided else range(half, len(plain))
        assert [trimmed(mixed[row]) for row in rows] == [trimmed(plain[row]) for row in rows]


def test_output_logits_stay_raw(kit: Kit) -> None:
    mode = MODE["greedy"]
    output = mode.run(kit, processor_for(kit, mode, CASE["choice"].guide), output_logits=True, output_scores=True)
    assert all(torch.isfinite(step).all() for step in output.logits)
    assert all(torch.isinf(step).any() for step in output.scores)


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("name", ["assisted", "assisted_self", "early_exit", "prompt_lookup", "foreign_assistant"])
def test_assisted_equals_unassisted(kit: Kit, name: str, case: Case) -> None:
    mode = MODE[name]
    spy = Spy(processor_for(kit, mode, case.guide))
    plain = Mode("plain", single=True).run(kit, processor_for(kit, mode, case.guide)).sequences[0].tolist()
    assisted = mode.run(kit, [spy]).sequences[0].tolist()
    assert trimmed(assisted) == trimmed(plain)
    if name == "foreign_assistant":
        assert len(set(spy.widths)) == 2, "the assistant's vocabulary has another width"
    elif name != "prompt_lookup":
        assert any(b <= a for a, b in zip(spy.lengths, spy.lengths[1:], strict=False)), "nothing was drafted"


def test_prompt_lookup_finds_its_drafts_in_the_prompt(kit: Kit) -> None:
    guide = gd.Guide.choice(["one two three four five six seven eight nine"])
    inputs = kit.prompts([" one two three four five six seven eight nine. one two three four five six seven eight:"])
    spy = Spy(gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model))
    output = kit.model.generate(**inputs, max_new_tokens=50, prompt_lookup_num_tokens=5, logits_processor=[spy])
    assert [result.text for result in spy.processor.results(output)] == guide.options()
    assert any(b < a for a, b in zip(spy.lengths, spy.lengths[1:], strict=False)), "no draft was refused"


def greedy_by_hand(
    kit: Kit, prompt: str, is_prefix: Callable[[str], bool], is_complete: Callable[[str], bool], steps: int
) -> list[int]:
    """Argmax over the tokens that keep the text a prefix, decoded by the tokenizer alone; no engine, no cache."""
    ids = kit.prompts([prompt])["input_ids"][0].tolist()
    spelled = [kit.tokenizer.decode([token]) for token in range(49152)]
    generated: list[int] = []
    for _ in range(steps):
        with torch.no_grad():
            logits = kit.model(torch.tensor([ids + generated])).logits[0, -1]
        text = kit.tokenizer.decode(generated)
        special = set(kit.tokenizer.all_special_ids)
        legal = [t for t, piece in enumerate(spelled) if t not in special and piece and is_prefix(text + piece)]
        if is_complete(text):
            legal.append(EOS)
        best = max(legal, key=lambda token: float(logits[token]))
        generated.append(best)
        if best == EOS:
            break
    return generated


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ["regex", "schema_boolean", "ebnf_pairs"])
def test_guided_greedy_is_argmax_under_the_mask(kit: Kit, name: str, prompt: str) -> None:
    case = CASE[name]
    expected = greedy_by_hand(kit, prompt, case.is_prefix, case.is_complete, 6)
    inputs = kit.prompts([prompt])
    processor = gd.GuidedLogitsProcessor(case.guide, tokenizer=kit.tokenizer, model=kit.model)
    output = kit.model.generate(**inputs, max_new_tokens=6, logits_processor=processor)
    assert output[0, inputs["input_ids"].shape[1] :].tolist() == expected


@pytest.mark.parametrize("name", ["greedy", "beams", "assisted", "embeds", "t5"])
def test_a_used_processor_equals_a_fresh_one(kit: Kit, name: str) -> None:
    mode = MODE[name]
    used = processor_for(kit, mode, CASE["schema_object"].guide)
    for seed in range(2):
        for wrapped in (used, [used]):
            fresh = mode.run(kit, processor_for(kit, mode, CASE["schema_object"].guide), seed=seed)
            assert torch.equal(mode.run(kit, wrapped, seed=seed).sequences, fresh.sequences)


def test_rows_do_not_depend_on_their_neighbours(kit: Kit) -> None:
    mode = MODE["greedy"]
    names = ["choice", "schema_array"]
    both = mode.run(kit, processor_for(kit, mode, [CASE[name].guide for name in names])).sequences.tolist()
    for row, name in enumerate(names):
        alone = mode.run(kit, processor_for(kit, mode, CASE[name].guide)).sequences.tolist()
        assert trimmed(alone[row]) == trimmed(both[row])
