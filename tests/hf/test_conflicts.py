"""Options that ban every token the guide allows: the guide wins, nothing is NaN, and a warning names the options."""

import linecache
import warnings
from typing import Any

import pytest
import torch

import gd_plugin as gd
from tests.hf.models import EOS, Kit, tiny_llama

SEARCHES = {
    "greedy": {},
    "sample": {"do_sample": True},
    "renormalized": {"do_sample": True, "renormalize_logits": True, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "beam_sample": {"num_beams": 3, "do_sample": True},
}


def _spellings(kit: Kit, text: str) -> list[list[int]]:
    return [[token] for piece, token in kit.tokenizer.get_vocab().items() if text.startswith(piece)]


# name, guide, options of generate, expected status and text (None: any)
CONFLICTS: list[tuple[str, gd.Guide, Any, str, str | None]] = [
    ("min_new_tokens", gd.Guide.choice(["yes"]), lambda kit: {"min_new_tokens": 10}, "complete", "yes"),
    ("min_length", gd.Guide.choice(["yes"]), lambda kit: {"min_length": 16}, "complete", "yes"),
    ("no_repeat_ngram_size", gd.Guide.regex("[0-9]{12}"), lambda kit: {"no_repeat_ngram_size": 1}, "complete", None),
    (
        "bad_words_ids",
        gd.Guide.choice(["yes"]),
        lambda kit: {"bad_words_ids": [*_spellings(kit, "yes")]},
        "complete",
        "yes",
    ),
    (
        "suppress_tokens",
        gd.Guide.choice(["no"]),
        lambda kit: {"suppress_tokens": [ids[0] for ids in _spellings(kit, "no")]},
        "complete",
        "no",
    ),
    (
        "sequence_bias",
        gd.Guide.choice(["no"]),
        lambda kit: {"sequence_bias": {tuple(ids): float("-inf") for ids in _spellings(kit, "no")}},
        "complete",
        "no",
    ),
    (
        "forced_eos_token_id",
        gd.Guide.regex("[0-9]{40}"),
        lambda kit: {"forced_eos_token_id": EOS},
        "truncated",
        None,
    ),
]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("name", "guide", "options", "status", "text"), CONFLICTS, ids=[c[0] for c in CONFLICTS])
def test_the_guide_wins(
    kit: Kit, name: str, guide: gd.Guide, options: Any, status: str, text: str | None, search: str
) -> None:
    processor = gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model)
    inputs = kit.prompts(["Answer:", "Is it so?"])
    with pytest.warns(UserWarning, match=name):
        output = kit.model.generate(
            **inputs, max_new_tokens=16, logits_processor=processor, **options(kit), **SEARCHES[search]
        )
    for row, result in zip(output.tolist(), processor.results(output), strict=True):
        assert result.status == status, (row, result)
        assert text is None or result.text == text
        assert 0 not in row[inputs["input_ids"].shape[1] :][: result.num_tokens]


def test_one_warning_a_call(kit: Kit) -> None:
    processor = gd.GuidedLogitsProcessor(gd.Guide.choice(["yes"]), tokenizer=kit.tokenizer, model=kit.model)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kit.model.generate(
                **kit.prompts(["a", "b"]), max_new_tokens=8, min_new_tokens=8, logits_processor=processor
            )
        assert len([w for w in caught if "before the guide banned" in str(w.message)]) == 1


def test_the_warning_names_the_options_of_the_generation_config(kit: Kit) -> None:
    model = tiny_llama()
    model.generation_config.min_new_tokens = 9
    processor = gd.GuidedLogitsProcessor(gd.Guide.choice(["yes"]), tokenizer=kit.tokenizer, model=model)
    with pytest.warns(UserWarning, match="min_new_tokens=9") as caught:
        model.generate(**kit.prompts(["a"]), max_new_tokens=12, logits_processor=processor)
    assert "bad_words_ids" not in str(caught[0].message)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("wrapped", [True, False])
def test_the_warning_points_at_the_users_line(kit: Kit, search: str, wrapped: bool) -> None:
    processor = gd.GuidedLogitsProcessor(gd.Guide.choice(["yes"]), tokenizer=kit.tokenizer, model=kit.model)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, **SEARCHES[search]}
    with pytest.warns(UserWarning, match="before the guide banned") as caught:
        kit.model.generate(**kit.prompts(["a"]), logits_processor=processor if wrapped else [processor], **options)
    [found] = [w for w in caught if "before the guide banned" in str(w.message)]
    assert found.filename == __file__ and "generate" in linecache.getline(found.filename, found.lineno)


def test_the_warning_of_a_step_by_hand_points_at_its_line(kit: Kit) -> None:
    processor = gd.GuidedLogitsProcessor(gd.Guide.choice(["yes"]), tokenizer=kit.tokenizer, model=kit.model)
    with pytest.warns(UserWarning, match="before the guide banned") as caught:
        processor(torch.tensor([[1]]), torch.full((1, 49152), float("-inf")))
    assert caught[0].filename == __file__ and "processor(" in linecache.getline(__file__, caught[0].lineno)


@pytest.mark.parametrize("search", SEARCHES)
def test_options_that_leave_a_choice_are_no_conflict(kit: Kit, search: str) -> None:
    """Penalties and bans that leave a legal token act as they always do, without a warning."""
    options = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 3, "bad_words_ids": [[kit.tokenizer.encode("no")[0]]]}
    processor = gd.GuidedLogitsProcessor(gd.Guide.choice(["yes", "no"]), tokenizer=kit.tokenizer, model=kit.model)
    output = kit.model.generate(
        **kit.prompts(["Answer:"]), max_new_tokens=8, logits_processor=processor, **options, **SEARCHES[search]
    )
    assert {result.text for result in processor.results(output)} <= {"yes", "no"}


def test_rows_that_have_ended_warn_of_nothing(kit: Kit) -> None:
    """A finished row allows stop tokens alone; that something bans them there too concerns nobody."""
    processor = gd.GuidedLogitsProcessor(
        [gd.Guide.choice(["y"]), gd.Guide.regex("[a-z]{9}")], tokenizer=kit.tokenizer, model=kit.model
    )
    output = kit.model.generate(**kit.prompts(["a", "b"]), max_new_tokens=16, logits_processor=processor)
    assert [result.status for result in processor.results(output)] == ["complete", "complete"]
