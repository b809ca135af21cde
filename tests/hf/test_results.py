"""results(): what became of each row, from what generate returned and before it has returned."""

from typing import Any

import pytest
import torch

import gd_plugin as gd
from tests.hf.models import Kit, tiny_llama

GUIDE = gd.Guide.regex("[0-9]{6}")


def guided(kit: Kit, guide: Any = GUIDE) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model)


def test_tensors_and_model_outputs_read_alike(kit: Kit) -> None:
    processor = guided(kit, [GUIDE, None])
    inputs = kit.prompts(["a", "b"])
    output = kit.model.generate(
        **inputs, max_new_tokens=4, logits_processor=processor, return_dict_in_generate=True, output_scores=True
    )
    results = processor.results(output)
    assert results == processor.results(output.sequences)
    assert [result.status for result in results] == ["truncated", "unguided"]
    assert (results[0].num_tokens, len(results[0].text or "")) == (4, 4)
    assert results[1].num_tokens == 4


def test_without_the_output_the_last_token_is_unseen(kit: Kit) -> None:
    processor = guided(kit)
    kit.model.generate(**kit.prompts(["a"]), max_new_tokens=4, logits_processor=processor)
    [result] = processor.results()
    assert (result.final, result.status, result.num_tokens) == (False, "truncated", 3)


def test_before_any_call_there_is_nothing_to_report(kit: Kit) -> None:
    with pytest.raises(RuntimeError, match="not been called"):
        guided(kit).results()


def test_another_output_is_refused(kit: Kit) -> None:
    processor = guided(kit)
    kit.model.generate(**kit.prompts(["a"]), max_new_tokens=3, logits_processor=processor)
    other = kit.model.generate(**kit.prompts(["something else"]), max_new_tokens=3)
    for wrong in (other, "text", [[1]], torch.zeros(3)):
        with pytest.raises(ValueError, match="generate"):
            processor.results(wrong)


def test_only_foreign_scores_were_seen(kit: Kit) -> None:
    processor = gd.GuidedLogitsProcessor(GUIDE, tokenizer=kit.tokenizer, model=kit.model)
    narrow = tiny_llama(40000, layers=1)
    narrow.generate(**kit.prompts(["a"]), max_new_tokens=2, logits_processor=[processor])
    with pytest.raises(RuntimeError, match=r"40000.*49152"):
        processor.results()


def test_a_model_resized_after_the_processor_was_built_is_named(kit: Kit) -> None:
    model = tiny_llama(layers=1)
    processor = gd.GuidedLogitsProcessor(GUIDE, tokenizer=kit.tokenizer, model=model)
    model.resize_token_embeddings(49160)
    output = model.generate(**kit.prompts(["a"]), max_new_tokens=2, logits_processor=processor)
    with pytest.raises(RuntimeError, match=r"49160.*49152"):
        processor.results(output)


@pytest.mark.parametrize("returned", [1, 2])
def test_rows_follow_prompts(kit: Kit, returned: int) -> None:
    processor = guided(kit, [gd.Guide.choice(["yes"]), gd.Guide.choice(["no"])])
    output = kit.model.generate(
        **kit.prompts(["a", "b"]),
        max_new_tokens=6,
        num_beams=3,
        num_return_sequences=returned,
        logits_processor=processor,
    )
    assert [result.text for result in processor.results(output)] == ["yes"] * returned + ["no"] * returned


def test_a_pipeline_with_a_list_of_prompts(kit: Kit) -> None:
    from transformers import pipeline

    model = tiny_llama()
    processor = gd.GuidedLogitsProcessor(gd.Guide.choice(["yes", "no"]), tokenizer=kit.tokenizer, model=model)
    generator = pipeline("text-generation", model=model, tokenizer=kit.tokenizer, device="cpu")
    for wrapped in (processor, [processor]):
        answers = generator(
            ["Is it?", "Another question, and a longer one:", "Is it?"],
            logits_processor=wrapped,
            max_new_tokens=6,
            return_full_text=False,
        )
        assert {answer[0]["generated_text"] for answer in answers} <= {"yes", "no"}
