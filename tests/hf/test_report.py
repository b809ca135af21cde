"""report(): figures of every step, judged by a softmax over logits that were captured apart from it."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch
from transformers import LogitsProcessor

import gd_plugin as gd
from tests.hf.models import EOS, MODES, Kit

GUIDE = gd.Guide.json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
DIGITS = gd.Guide.regex("[0-9]{6}")
BY_NAME = {mode.name: mode for mode in MODES}


class Capture(LogitsProcessor):
    """Keeps a copy of the last scores of each row's histories: a draft model's come before the model's own."""

    def __init__(self) -> None:
        self.scores: dict[tuple[int, ...], torch.Tensor] = {}
        # where rows do not change places: several may have the same ids, but inputs of other kinds
        self.by_row: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}

    def of(self, row: int, ids: list[int]) -> torch.Tensor:
        return self.by_row.get((row, tuple(ids)), self.scores[tuple(ids)])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(input_ids.tolist()):
            self.scores[tuple(ids)] = self.by_row[row, tuple(ids)] = scores[row].double().clone()
        return scores


def processor_of(kit: Kit, guide: Any, **options: Any) -> gd.GuidedLogitsProcessor:
    return gd.GuidedLogitsProcessor(guide, tokenizer=kit.tokenizer, model=kit.model, report=True, **options)


def judge_step(step: dict[str, Any], before: torch.Tensor, after: torch.Tensor, legal: bool) -> None:
    """Compare one step of the JSON with what plain torch says."""
    p = before.softmax(-1)
    kept = after > float("-inf")
    left = after.softmax(-1)
    token = step["token_id"]
    assert step["num_allowed"] == int(kept.sum())
    assert step["removed_mass"] == pytest.approx(float(p[~kept].sum()), abs=1e-5)
    assert step["entropy_before"] == pytest.approx(float(torch.special.entr(p).sum()), abs=1e-4)
    assert step["entropy_after"] == pytest.approx(float(torch.special.entr(left).sum()), abs=1e-4)
    assert step["probability"] == pytest.approx(float(p[token]), rel=1e-4, abs=1e-9)
    assert step["rank"] == int((before > before[token]).sum()) + 1
    assert step["probability_after"] == pytest.approx(float(left[token]), rel=1e-3, abs=1e-6)
    assert step["overruled"] == bool(before.masked_fill(kept, -1e9).max() > before[kept].max())
    assert (step["num_legal"] is not None) == legal
    if legal:
        assert step["num_legal"] == step["num_allowed"]
    for name, mask in (("banned", ~kept), ("allowed", kept)):
        expected = p.masked_fill(~mask, -1).topk(5).values
        shown = [item["probability"] for item in step[name]]
        assert shown == pytest.approx([value for value in expected.tolist() if value >= 0], rel=1e-4, abs=1e-9)
        assert all(bool(mask[item["token_id"]]) for item in step[name])


def check_rows(
    kit: Kit, processor: gd.GuidedLogitsProcessor, run: Callable[[list[Any]], Any], guided: list[bool]
) -> dict[str, Any]:
    """Run `generate` with captures on both sides and judge every step; return the JSON."""
    raw, masked = Capture(), Capture()
    output = run([raw, processor, masked])
    sequences = getattr(output, "sequences", output).tolist()
    report = processor.report(output)
    record: dict[str, Any] = json.loads(report.to_json())
    jsonschema.validate(record, gd.Report.json_schema())
    assert (record["schema"], record["version"], record["final"]) == ("gd_plugin.report", 1, True)
    assert len(record["rows"]) == len(sequences)
    prompt_len = len(sequences[0]) - max(len(row["steps"]) for row in record["rows"])
    for ids, row in zip(sequences, record["rows"], strict=True):
        prompt_len = next(length for length in range(len(ids)) if tuple(ids[:length]) in raw.scores)
        stop = ids.index(EOS, prompt_len) + 1 if EOS in ids[prompt_len:] else len(ids)
        assert [step["token_id"] for step in row["steps"]] == ids[prompt_len:stop]
        for step in row["steps"]:
            assert step["scored"], "every token had scores of its own"
            history = ids[: prompt_len + step["position"]]
            judge_step(step, raw.of(row["row"], history), masked.of(row["row"], history), guided[row["row"]])
    return record


@pytest.mark.parametrize(
    "name", ["greedy", "sample", "sample_returns_3", "prompt_lookup", "assisted", "several_stops", "wide", "t5"]
)
def test_the_figures_are_those_of_a_plain_softmax(kit: Kit, name: str) -> None:
    mode = BY_NAME[name]
    processor = gd.GuidedLogitsProcessor(DIGITS, tokenizer=kit.tokenizer, model=getattr(kit, mode.model), report=True)
    rows = (1 if mode.single else 2) * mode.options.get("num_return_sequences", 1)
    record = check_rows(kit, processor, lambda processors: mode.run(kit, processors), [True] * rows)
    # the stop token behind six digits, unless one of the random models' own stops
    assert all(row["status"] in ("complete", "truncated") for row in record["rows"])
    assert record["totals"]["num_scored"] == sum(len(row["steps"]) for row in record["rows"])


@pytest.mark.parametrize("name", ["beams", "beams_early", "beam_sample"])
def test_beams_are_read_by_the_history_of_each_returned_row(kit: Kit, name: str) -> None:
    mode = BY_NAME[name]
    rows = 2 * mode.options.get("num_return_sequences", 1)
    check_rows(kit, processor_of(kit, DIGITS), lambda processors: mode.run(kit, processors), [True] * rows)


def test_unguided_rows_and_rows_that_end_early(kit: Kit) -> None:
    processor = processor_of(kit, [gd.Guide.regex("[0-9]"), None, DIGITS])
    inputs = kit.prompts(["a", "b", "c"])

    def run(processors: list[Any]) -> Any:
        return kit.model.generate(**inputs, max_new_tokens=9, do_sample=False, logits_processor=processors)

    record = check_rows(kit, processor, run, [True, False, True])
    short, free, long = record["rows"]
    assert len(short["steps"]) == 2 and short["steps"][-1]["special"]
    assert (free["guide"], free["backend"], free["status"]) == (None, None, "unguided")
    assert free["totals"]["max_removed_mass"] == pytest.approx(0, abs=1e-6)
    assert len(long["steps"]) == 7
    # the short row was not looked at any more once it had ended
    assert [call["num_rows"] for call in record["calls"]][2:4] == [2, 2]


def test_drafted_decoding_reports_the_same_tokens_and_figures(kit: Kit) -> None:
    inputs = kit.prompts(["a", "b"])
    records = []
    for options in ({}, {"custom_generate": gd.grammar_drafting()}):
        processor = processor_of(kit, [GUIDE, DIGITS])
        output = kit.model.generate(**inputs, max_new_tokens=10, do_sample=False, logits_processor=processor, **options)
        records.append(json.loads(processor.report(output).to_json()))
    for plain, drafted in zip(records[0]["rows"], records[1]["rows"], strict=True):
        assert [step["token_id"] for step in plain["steps"]] == [step["token_id"] for step in drafted["steps"]]
        for one, other in zip(plain["steps"], drafted["steps"], strict=True):
            if other["scored"]:
                assert other["rank"] == one["rank"]
                assert other["removed_mass"] == pytest.approx(one["removed_mass"], abs=1e-4)
            else:
                assert one["num_legal"] == 1, "only what is forced goes without scores"


def test_a_budget_shows_as_fewer_allowed_than_legal(kit: Kit) -> None:
    processor = processor_of(kit, gd.Guide.regex("[a-z]{1,200}"), max_new_tokens=4)
    output = kit.model.generate(**kit.prompts(["a"]), max_new_tokens=4, do_sample=False, logits_processor=processor)
    [row] = processor.report(output).rows
    assert row.status == "complete"
    assert any(step.num_allowed < step.num_legal for step in row.steps if step.num_legal and step.num_allowed)


def test_a_dead_end_is_a_step_without_legal_tokens(kit: Kit) -> None:
    # the vocabulary has no token for what the guide wants behind "a"
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=[2])
    processor = gd.GuidedLogitsProcessor(gd.Guide.regex("ac|b"), vocabulary=vocabulary, report=True)
    ids = torch.tensor([[1]])
    for token in (0, 2):
        scores = processor(ids, torch.tensor([[2.0, 1.0, 3.0]]))
        assert int(scores.argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    [row] = processor.report(ids).rows
    assert row.status == "dead_end"
    assert [step.num_legal for step in row.steps] == [2, 0]


def test_without_the_output_the_report_ends_before_the_last_token(kit: Kit) -> None:
    processor = processor_of(kit, DIGITS)
    kit.model.generate(**kit.prompts(["a"]), max_new_tokens=4, do_sample=False, logits_processor=processor)
    report = processor.report()
    assert not report.final
    assert len(report.rows[0].steps) == 3
    assert all(step.rank for step in report.rows[0].steps)


def test_off_by_default_and_said_so(kit: Kit) -> None:
    processor = gd.GuidedLogitsProcessor(DIGITS, tokenizer=kit.tokenizer, model=kit.model)
    kit.model.generate(**kit.prompts(["a"]), max_new_tokens=2, logits_processor=processor)
    with pytest.raises(RuntimeError, match="report=True"):
        processor.report()
    with pytest.raises(RuntimeError, match="not been called"):
        processor_of(kit, DIGITS).report()


def test_recording_changes_no_score(kit: Kit) -> None:
    inputs = kit.prompts(["a", "b"])
    outputs = [
        kit.model.generate(
            **inputs,
            max_new_tokens=8,
            do_sample=False,
            logits_processor=gd.GuidedLogitsProcessor(
                [DIGITS, None], tokenizer=kit.tokenizer, model=kit.model, report=report
            ),
            output_scores=True,
            return_dict_in_generate=True,
        )
        for report in (False, True)
    ]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(outputs[0].scores, outputs[1].scores, strict=True))


def test_scores_that_are_written_over_afterwards_do_no_harm() -> None:
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=[2])
    processor = gd.GuidedLogitsProcessor(gd.Guide.regex("[ab]{2}"), vocabulary=vocabulary, report=True)
    buffer = torch.empty(1, 3)
    ids = torch.tensor([[1]])
    for token, scores in ((1, [0.0, 1.0, 2.0]), (0, [3.0, 1.0, 9.0])):
        buffer.copy_(torch.tensor([scores]))
        processor(ids, buffer)
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    buffer.zero_()
    [row] = processor.report(ids).rows
    assert [(step.text, step.rank) for step in row.steps] == [("b", 2), ("a", 2)]
    assert [step.overruled for step in row.steps] == [True, True]


def test_scores_without_a_number_leave_null_in_the_json() -> None:
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=[2])
    processor = gd.GuidedLogitsProcessor(gd.Guide.regex("a"), vocabulary=vocabulary, report=True)
    ids = torch.tensor([[1]])
    with pytest.warns(UserWarning, match="banned every token"):
        processor(ids, torch.tensor([[float("-inf"), 1.0, 2.0]]))
    record = json.loads(processor.report(torch.tensor([[1, 0]])).to_json())
    [step] = record["rows"][0]["steps"]
    # everything legal had been banned before: the guide lets it through, and its probability before was nothing
    assert step["removed_mass"] == pytest.approx(1)
    assert step["probability"] == 0
    assert step["probability_after"] == 1
    processor.reset()
    processor(ids, torch.full((1, 3), float("nan")))
    [step] = json.loads(processor.report(torch.tensor([[1, 0]])).to_json())["rows"][0]["steps"]
    assert step["entropy_before"] is None


def test_times_add_up(kit: Kit) -> None:
    processor = processor_of(kit, DIGITS)
    output = kit.model.generate(**kit.prompts(["a"]), max_new_tokens=8, do_sample=False, logits_processor=processor)
    report = processor.report(output)
    totals = report.totals()
    assert totals["num_calls"] == len(report.calls) == 7
    for name in ("model", "build", "apply", "record"):
        assert totals[f"{name}_s"] == pytest.approx(sum(getattr(call, name) or 0.0 for call in report.calls))
        assert totals[f"{name}_s"] > 0
    # a CPU copies nothing
    assert totals["copy_s"] == 0
    assert [call.model is None for call in report.calls] == [True] + [False] * 6
