"""A row without a legal token: it ends alone, ends the call, or goes on unguided, as the caller asked; and it is named."""

from typing import Any

import pytest
import torch

import gd_plugin as gd
from tests.hf.models import EOS, PAD, Kit

# SmolLM2 has no token that spells the byte 0x04 and none that holds it, so "q" leads nowhere and "r" does not
DEAD = gd.Guide.regex("(?:q\x04|r)st")
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True},
    "beams": {"num_beams": 3},
    "beam_sample": {"num_beams": 3, "do_sample": True},
}


def towards(kit: Kit, text: str) -> dict[str, Any]:
    """Options that make the model begin with `text`, without banning anything."""
    return {"sequence_bias": {(kit.tokenizer.convert_tokens_to_ids(text),): 1000.0}}


def guided(kit: Kit, guide: Any, **fields: Any) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model, **fields)


@pytest.mark.parametrize("search", SEARCHES)
def test_stop_ends_the_row_alone(kit: Kit, search: str) -> None:
    processor = guided(kit, [DEAD, gd.Guide.regex("[a-z]{6}")])
    output = kit.model.generate(
        **kit.prompts(["a", "b"]),
        max_new_tokens=8,
        pad_token_id=PAD,
        logits_processor=processor,
        **towards(kit, "q"),
        **SEARCHES[search],
    )
    dead, other = processor.results(output)
    if search in ("greedy", "sample"):
        assert output[0, 2] == EOS and (output[0, 3:] == PAD).all()
    assert (dead.status, dead.text, dead.num_tokens) == ("dead_end", "q", 1)
    assert isinstance(dead.error, gd.DeadEndError)
    assert (dead.error.row, dead.error.num_tokens, dead.error.text) == (0, 1, "q")
    assert "on_dead_end" in str(dead.error)
    assert (other.status, other.error, len(other.text or "")) == ("complete", None, 6)


def test_the_rest_of_the_batch_is_as_without_the_dead_row(kit: Kit) -> None:
    inputs = kit.prompts(["a", "b", "c"])
    sound = gd.Guide.regex("[a-z]{12}")
    with_dead = kit.model.generate(
        **inputs, max_new_tokens=14, logits_processor=guided(kit, [sound, DEAD, None]), **towards(kit, "q")
    )
    without = kit.model.generate(
        **inputs, max_new_tokens=14, logits_processor=guided(kit, [sound, None, None]), **towards(kit, "q")
    )
    assert torch.equal(with_dead[0], without[0])
    assert torch.equal(with_dead[2], without[2])


@pytest.mark.parametrize("search", SEARCHES)
def test_raise_ends_the_call(kit: Kit, search: str) -> None:
    processor = guided(kit, [gd.Guide.regex("[a-z]{6}"), DEAD], on_dead_end="raise")
    inputs = kit.prompts(["a", "b"])
    with pytest.raises(gd.DeadEndError) as caught:
        kit.model.generate(
            **inputs, max_new_tokens=8, logits_processor=processor, **towards(kit, "q"), **SEARCHES[search]
        )
    assert caught.value.num_tokens == 1
    assert caught.value.text == "q"
    assert caught.value.row is not None and caught.value.row >= inputs["input_ids"].shape[0] // 2
    # and the processor serves the next call
    output = kit.model.generate(**inputs, max_new_tokens=8, logits_processor=processor, **towards(kit, "r"))
    assert [result.status for result in processor.results(output)] == ["complete", "complete"]


def test_release_lets_the_row_go_on_unguided(kit: Kit) -> None:
    processor = guided(kit, [DEAD, gd.Guide.regex("[a-z]{6}")], on_dead_end="release")
    ids = torch.tensor([[5], [6]])
    scores = torch.randn(2, 49152)
    processor(ids, scores)
    dead_ids = torch.cat([ids, torch.tensor([[kit.tokenizer.convert_tokens_to_ids("q")]] * 2)], dim=1)
    out = processor(dead_ids, scores)
    assert torch.equal(out[0], scores[0])
    assert not torch.equal(out[1], scores[1])
    again = torch.cat([dead_ids, torch.tensor([[77], [kit.tokenizer.convert_tokens_to_ids("b")]])], dim=1)
    out = processor(again, scores)
    assert torch.equal(out[0], scores[0])
    assert processor.results()[0].status == "dead_end"
    assert processor.results(again)[0].status == "dead_end"


def test_release_in_generate(kit: Kit) -> None:
    processor = guided(kit, DEAD, on_dead_end="release")
    output = kit.model.generate(**kit.prompts(["a"]), max_new_tokens=8, logits_processor=processor, **towards(kit, "q"))
    [result] = processor.results(output)
    assert (result.status, result.text) == ("dead_end", "q")
    assert output[0, -7:].tolist() != [EOS] * 7
