"""Every way `generate` works x guides x backends x seeds, judged without any grammar engine.

A row that ended must match its guide; a row cut off must be the beginning of a match. Behind a stop token there is
nothing but padding, and `results` says what the judge says.
"""

import random
from typing import Any

import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import backend_names
from tests.fuzz import pick
from tests.hf.models import FORCED_BOS, MODES, PAD, Kit, Mode
from tests.judges import CASES, Case

BACKENDS = ["auto", *backend_names()]
_GUIDES_A_MODE = pick(3, len(CASES))
_SEEDS = pick([0], list(range(6)))
_BATCHED = [mode for mode in MODES if not mode.single and mode.name != "compiled"]


def split_row(tokens: list[int], vocabulary: gd.Vocabulary) -> tuple[list[int], list[int] | None]:
    """Return the text tokens of a row and what follows the stop token, None if there is no stop token."""
    for position, token in enumerate(tokens):
        if token in vocabulary.stop_token_ids:
            return tokens[:position], tokens[position + 1 :]
    return tokens, None


def judge_output(kit: Kit, mode: Mode, processor: Any, output: Any, cases: list[Case | None]) -> None:
    """Check all rows of one output."""
    rows = output.sequences.tolist()
    results = processor.results(output)
    assert len(results) == len(rows)
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        case = cases[index * len(cases) // len(rows)]
        generated = row[mode.prompt_len(kit) :]
        assert result.error is None and result.final, result
        if case is None:
            assert result.status == "unguided"
        else:
            judge_row(kit, mode, processor, generated, result, case)


def judge_row(kit: Kit, mode: Mode, processor: Any, generated: list[int], result: gd.RowResult, case: Case) -> None:
    forced = 1 if mode.model == "bart" and generated[0] == FORCED_BOS else 0
    tokens, behind = split_row(generated[forced:], processor.vocabulary)
    text = kit.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    place = f"{mode.name} {case} {text!r} {generated} {result}"
    assert set(behind or []) <= {PAD, *processor.vocabulary.stop_token_ids}, place
    # a row that a stopping criterion has cut off is padded, and padding may look like a stop token
    cut_off = behind is None or mode.name == "stopping_criteria"
    if case.is_complete(text):
        assert (result.status, result.text) == ("complete", text), place
        assert result.num_tokens == forced + len(tokens) + (behind is not None), place
    else:
        assert cut_off, place
        assert result.status == "truncated", place
        # half a character at the end is not text yet
        assert case.is_prefix(result.text) and text.startswith(result.text), place
        assert text[len(result.text) :].strip("\ufffd") in ("", kit.tokenizer.decode([PAD])), place


def make_processor(kit: Kit, mode: Mode, guide: Any, backend: str = "auto") -> gd.GuidedLogitsProcessor:
    try:
        return gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=getattr(kit, mode.model), backend=backend)
    except gd.UnsupportedGuideError as error:
        pytest.skip(f"{backend}: {error}")
    except gd.BackendNotInstalledError as error:
        pytest.skip(str(error))


def pairs() -> list[tuple[Mode, Case, str]]:
    """Every mode with some guides (all of them in a long run); every guide and every backend in turn."""
    chosen = []
    for number, mode in enumerate(MODES):
        cases = random.Random(mode.name).sample(CASES, _GUIDES_A_MODE if mode.name != "compiled" else 1)
        for offset, case in enumerate(cases):
            backends = BACKENDS if len(CASES) == _GUIDES_A_MODE else [BACKENDS[(number + offset) % len(BACKENDS)]]
            chosen.extend((mode, case, backend) for backend in backends)
    return chosen


@pytest.mark.parametrize(("mode", "case", "backend"), pairs(), ids=repr)
def test_one_guide(kit: Kit, mode: Mode, case: Case, backend: str) -> None:
    processor = make_processor(kit, mode, case.guide, backend)
    for seed in _SEEDS:
        # as `p` and as `[p]`: the same object serves any number of calls
        for wrapped in (processor, [processor]):
            output = mode.run(kit, wrapped, seed=seed)
            judge_output(kit, mode, processor, output, [case])


@pytest.mark.parametrize("mode", _BATCHED, ids=repr)
def test_one_guide_per_prompt(kit: Kit, mode: Mode) -> None:
    for seed in _SEEDS:
        cases: list[Case | None] = list(random.Random(f"{mode.name} {seed}").sample(CASES, 2))
        processor = make_processor(kit, mode, [case and case.guide for case in cases])
        output = mode.run(kit, processor, seed=seed)
        judge_output(kit, mode, processor, output, cases)


@pytest.mark.parametrize("mode", _BATCHED, ids=repr)
def test_guided_and_unguided_prompts(kit: Kit, mode: Mode) -> None:
    case = random.Random(mode.name).choice(CASES)
    for cases in ([case, None], [None, case]):
        processor = make_processor(kit, mode, [c and c.guide for c in cases])
        output = mode.run(kit, processor)
        judge_output(kit, mode, processor, output, cases)
