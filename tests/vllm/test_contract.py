"""The processor against vLLM's own classes: its batch bookkeeping, its loaders, and hand-made contexts of the V2 runner.

No model runs. Judges are plain Python: a guide of one fixed text allows one token a step, so the mask of every row is
known without an engine.
"""

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm builds an environment that has it")

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import (
    BatchUpdateBuilder,
    LogitsProcessors,
    MoveDirectionality,
    _load_custom_logitsprocs,
    build_logitsprocs,
    validate_logits_processors_parameters,
)

from gd_plugin import GuidedDecodingConfig, Vocabulary
from gd_plugin.vllm import processor as module
from gd_plugin.vllm.processor import GuidedLogitsProcessor
from gd_plugin.vllm.rows import GuidedRow

v2 = pytest.importorskip("vllm.v1.worker.gpu.sample.logits_processor", reason="this vLLM has no V2 model runner")

NAME = "gd_plugin.vllm:GuidedLogitsProcessor"
STOP = 27
ROUNDS = 400 if os.environ.get("GD_PLUGIN_FUZZ", "ci") == "long" else 60
# one token a letter, and a stop token
VOCABULARY = Vocabulary.from_bytes(
    [bytes([97 + i]) for i in range(26)] + [None, None, None], stop_token_ids=[STOP], vocab_size=29
)


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_vocabulary", lambda vllm_config: VOCABULARY)


def _ids(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def _params(text: str | None, **arguments: Any) -> SamplingParams:
    extra_args = None if text is None else {"guide": {"choice": [text]}}
    return SamplingParams(extra_args=extra_args, max_tokens=100, **arguments)


def _legal(row: torch.Tensor) -> set[int]:
    return set(torch.isfinite(row).nonzero().flatten().tolist())


def _expected(text: str | None, output: list[int]) -> set[int]:
    """What may follow `output` under a guide of exactly one text."""
    if text is None:
        return set(range(VOCABULARY.vocab_size))
    if len(output) >= len(text):
        return {STOP}
    return {_ids(text)[len(output)]}


def _v1() -> GuidedLogitsProcessor:
    return GuidedLogitsProcessor(SimpleNamespace(), torch.device("cpu"), False)


class FakeBatch:
    """A persistent batch as vLLM's InputBatch keeps it: refill the lowest hole, condense, now and then swap two rows."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = size
        self.rows: list[tuple[str | None, SamplingParams, list[int]]] = []
        self.builder = BatchUpdateBuilder()

    def step(self) -> Any:
        gone = [row for row in range(len(self.rows)) if self.random.random() < 0.25]
        for row in gone:
            self.builder.removed_append(row)
        holes = sorted(gone)
        for _ in range(self.random.randint(0, 2)):
            if len(self.rows) - len(holes) >= self.size:
                break
            text = self.random.choice([None, "abc", "hello", "q", "zyxwvutsrq"])
            request = self._new(text)
            row = self.builder.pop_removed()
            if row is None:
                row = len(self.rows)
                self.rows.append(request)
            else:
                holes.remove(row)
                self.rows[row] = request
            self.builder.added.append((row, request[1], [1], request[2]))
        while holes:
            last = len(self.rows) - 1
            if last in holes:
                holes.remove(last)
                self.rows.pop()
                continue
            hole = self.builder.pop_removed()
            assert hole == holes.pop(0)
            self.rows[hole] = self.rows.pop()
            self.builder.moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        if len(self.rows) > 1 and self.random.random() < 0.3:
            one, two = self.random.sample(range(len(self.rows)), 2)
            self.rows[one], self.rows[two] = self.rows[two], self.rows[one]
            self.builder.moved.append((one, two, MoveDirectionality.SWAP))
        return self.builder.get_and_reset(len(self.rows))

    def _new(self, text: str | None) -> tuple[str | None, SamplingParams, list[int]]:
        # a third of the requests was preempted and comes back with output
        length = 0 if text is None or self.random.random() < 0.66 else self.random.randint(0, len(text))
        return text, _params(text), _ids(text or "")[:length]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_v1_rows_follow_random_batch_updates(seed: int) -> None:
    processor = _v1()
    batch = FakeBatch(size=5, seed=seed)
    for _ in range(12):
        processor.update_state(batch.step())
        if not batch.rows:
            continue
        logits = torch.randn(len(batch.rows), VOCABULARY.vocab_size)
        before = logits.clone()
        after = processor.apply(logits)
        for row, (text, _, output) in enumerate(batch.rows):
            assert _legal(after[row]) == _expected(text, output), (row, text, output)
            legal = sorted(_expected(text, output))
            assert torch.equal(after[row, legal], before[row, legal])
        for text, _, output in batch.rows:
            if text is None:
                output.append(0)
            elif batch.random.random() < 0.9:  # a prompt read in pieces emits nothing
                output.append(min(_expected(text, output)))


def test_v1_matchers_do_not_advance_on_placeholders() -> None:
    processor = _v1()
    output: list[int] = []
    builder = BatchUpdateBuilder(added=[(0, _params("abc"), [1], output)])
    processor.update_state(builder.get_and_reset(1))
    processor.apply(torch.zeros(1, 29))
    output.append(-1)  # asynchronous scheduling: the token is filled in between update_state and apply
    processor.update_state(None)
    output[-1] = 0
    assert _legal(processor.apply(torch.zeros(1, 29))[0]) == {1}


def test_v1_placeholder_that_stays_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    processor = _v1()
    builder = BatchUpdateBuilder(added=[(0, _params("abc"), [1], [-1]), (1, _params("abc"), [1], [0])])
    processor.update_state(builder.get_and_reset(2))
    logits = processor.apply(torch.zeros(2, 29))
    assert (_legal(logits[0]), _legal(logits[1])) == ({STOP}, {1})
    assert "--no-async-scheduling" in caplog.text


def test_v1_output_taken_back_is_replayed() -> None:
    processor = _v1()
    output = _ids("abcd")
    builder = BatchUpdateBuilder(added=[(0, _params("abcdef"), [1], output)])
    processor.update_state(builder.get_and_reset(1))
    assert _legal(processor.apply(torch.zeros(1, 29))[0]) == set(_ids("e"))
    del output[2:]
    assert _legal(processor.apply(torch.zeros(1, 29))[0]) == set(_ids("c"))


@pytest.mark.parametrize("stop_token_ids", [[28], [25], [28, 25]], ids=["special", "a letter", "both"])
def test_v1_stop_ids_of_the_request(stop_token_ids: list[int]) -> None:
    """They end the text where the guide is complete and are banned inside it, where vLLM would cut the output short."""
    processor = _v1()
    params = SamplingParams(extra_args={"guide": {"regex": "[a-z]{2}"}}, stop_token_ids=stop_token_ids, max_tokens=9)
    params.update_from_generation_config({"eos_token_id": [STOP]}, STOP)
    output: list[int] = []
    processor.update_state(BatchUpdateBuilder(added=[(0, params, [1], output)]).get_and_reset(1))
    letters = set(range(26)) - set(stop_token_ids)
    assert _legal(processor.apply(torch.zeros(1, 29))[0]) == letters
    output += [0, 1]
    assert _legal(processor.apply(torch.zeros(1, 29))[0]) == {STOP, *stop_token_ids}
    output.append(stop_token_ids[0])
    assert _legal(processor.apply(torch.zeros(1, 29))[0]) == {STOP, *stop_token_ids}


def test_v1_bad_guide_that_slips_through_ends_its_row_alone(caplog: pytest.LogCaptureFixture) -> None:
    processor = _v1()
    bad = SamplingParams(extra_args={"guide": {"regex": "("}}, max_tokens=5)
    added = [(0, bad, [1], []), (1, _params("q"), [1], []), (2, _params(None), [1], [])]
    processor.update_state(BatchUpdateBuilder(added=added).get_and_reset(3))
    logits = processor.apply(torch.zeros(3, 29))
    assert [_legal(row) for row in logits] == [{STOP}, {16}, set(range(29))]
    assert "position" in caplog.text


def test_v1_dead_end_may_only_stop(caplog: pytest.LogCaptureFixture) -> None:
    """Behind "a" a capital letter, which this vocabulary cannot spell."""
    processor = _v1()
    params = SamplingParams(extra_args={"guide": {"regex": "a[A-Z]|b"}}, max_tokens=5)
    output: list[int] = []
    processor.update_state(BatchUpdateBuilder(added=[(0, params, [1], output)]).get_and_reset(1))
    assert _legal(processor.apply(torch.zeros(1, 29))[0]) == {0, 1}
    output.append(0)
    for _ in range(2):
        assert _legal(processor.apply(torch.zeros(1, 29))[0]) == {STOP}
    assert caplog.text.count("a guided request ends") == 1


@pytest.mark.parametrize("number", [1, 2], ids=["first token", "stop token"])
def test_v1_something_before_the_guide_banned_all(number: int) -> None:
    """min_tokens bans the stop token of a complete text: the guide wins, and no row is left without a finite logit."""
    processor = _v1()
    output = _ids("a")[: number - 1]
    processor.update_state(BatchUpdateBuilder(added=[(0, _params("a", min_tokens=5), [1], output)]).get_and_reset(1))
    logits = torch.zeros(1, 29)
    logits[0, min(_expected("a", output))] = float("-inf")
    assert _legal(processor.apply(logits)[0]) == _expected("a", output)


def test_v1_unguided_batch_is_not_looked_at() -> None:
    processor = _v1()
    processor.update_state(BatchUpdateBuilder(added=[(0, _params(None), [1], [])]).get_and_reset(1))
    logits = torch.randn(1, 29)
    before, version = logits.clone(), logits._version
    assert processor.apply(logits) is logits
    assert torch.equal(logits, before) and logits._version == version


def test_v1_sharded_logits_are_refused() -> None:
    processor = _v1()
    processor.update_state(BatchUpdateBuilder(added=[(0, _params("a"), [1], [])]).get_and_reset(1))
    with pytest.raises(ValueError, match="gathered"):
        processor.apply(torch.zeros(1, 14))


def test_v1_masks_are_equal_on_every_rank() -> None:
    """Ranks see the same updates and gathered logits; nothing random and nothing of a rank's own goes into a mask."""
    ranks = [_v1(), _v1()]
    results = []
    for processor in ranks:
        output = _ids("he")
        processor.update_state(BatchUpdateBuilder(added=[(0, _params("hello"), [1], output)]).get_and_reset(1))
        results.append(processor.apply(torch.zeros(1, 29)))
    assert torch.equal(*results)


def test_one_class_loads_in_both_runners() -> None:
    assert _load_custom_logitsprocs([NAME]) == [GuidedLogitsProcessor]
    v2.build_custom_logits_processors_params_validator([NAME])(_params("a"))
    states = _states(2)
    source = SimpleNamespace(**vars(states))
    built = v2.build_custom_logits_processors(SimpleNamespace(), source, False, [NAME])
    assert [type(item) for item in built] == [GuidedLogitsProcessor]
    groups = LogitsProcessors([_v1()])
    assert len(list(groups.non_argmax_invariant)) == 1 and not list(groups.argmax_invariant)


def test_speculative_decoding_under_v1_is_refused_at_start() -> None:
    """By vLLM itself, because the processor is named; test_entry_point.py has the case where vLLM says nothing."""
    with pytest.raises(ValueError, match="speculative decoding"):
        build_logitsprocs(SimpleNamespace(speculative_config=object()), torch.device("cpu"), False, False, (NAME,))


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"guide": {"regex": "("}}, "position"),
        ({"guide_regx": "a"}, "did you mean"),
        ({"guide_regex": "a", "guide_backend": "none such"}, "unknown backend"),
        ({"guide": {"json_schema": {"type": "object", "patternProperties": 3}}}, "patternProperties"),
        ({"guide": {"choice": []}}, "no options"),
    ],
    ids=["regex", "key", "backend", "schema", "empty choice"],
)
def test_bad_guides_are_refused_with_their_own_message(extra_args: dict[str, Any], message: str) -> None:
    params = SamplingParams(extra_args=extra_args)
    with pytest.raises(Exception, match=message) as first:
        validate_logits_processors_parameters([NAME], params)
    with pytest.raises(Exception, match=message) as second:
        v2.build_custom_logits_processors_params_validator([NAME])(params)
    assert {type(first.value).__name__, type(second.value).__name__} <= {"VLLMValidationError", "ValueError"}


def test_a_request_has_one_kind_of_guide() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(extra_args={"guide": {"regex": "a"}}, structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ValueError, match="not by both"):
        GuidedLogitsProcessor.validate_params(params)


def test_settings_an_engine_cannot_honour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GD_PLUGIN_ON_DEAD_END", "raise")
    with pytest.raises(ValueError, match="every request of the engine"):
        _v1()


def _states(num_slots: int) -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=num_slots,
        vocab_size=29,
        all_token_ids=SimpleNamespace(gpu=torch.zeros(num_slots, 64, dtype=torch.int32)),
        prompt_len=SimpleNamespace(np=np.zeros(num_slots, dtype=np.int32)),
        prefill_len=SimpleNamespace(np=np.zeros(num_slots, dtype=np.int32)),
        total_len=SimpleNamespace(gpu=torch.zeros(num_slots, dtype=torch.int32)),
    )


class FakeRunner:
    """Slots, token history and contexts as the V2 runner lays them out; a request may bring drafts."""

    def __init__(self, num_slots: int) -> None:
        self.states = _states(num_slots)
        self.processor = GuidedLogitsProcessor(SimpleNamespace(), self.states)
        self.requests: dict[int, tuple[str | None, int]] = {}  # slot -> text, prompt length

    def add(self, slot: int, text: str | None, prompt_len: int, output: list[int], params: Any = None) -> bool:
        tokens = [26] * prompt_len + output
        self.states.all_token_ids.gpu[slot] = 0
        self.states.all_token_ids.gpu[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.states.prompt_len.np[slot] = prompt_len
        self.states.prefill_len.np[slot] = self.states.total_len.gpu[slot] = len(tokens)
        self.requests[slot] = (text, prompt_len)
        return self.processor.add_request(slot, params or _params(text))

    def output(self, slot: int) -> list[int]:
        _, prompt_len = self.requests[slot]
        tokens: list[int] = self.states.all_token_ids.gpu[
            slot, prompt_len : int(self.states.total_len.gpu[slot])
        ].tolist()
        return tokens

    def emit(self, slot: int, tokens: list[int]) -> None:
        total = int(self.states.total_len.gpu[slot])
        self.states.all_token_ids.gpu[slot, total : total + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.states.total_len.gpu[slot] += len(tokens)

    def context(self, batch: list[tuple[int, list[int]]], pieces: frozenset[int] = frozenset()) -> Any:
        """The rows of `batch`, a list of (slot, drafts); slots in `pieces` are in the middle of their prompt."""
        slots, tokens, positions, local = [], [], [], []
        for slot, drafts in batch:
            last = int(self.states.total_len.gpu[slot]) - 1
            if slot in pieces:
                last = 0
            chain = [int(self.states.all_token_ids.gpu[slot, last]), *drafts]
            for offset, token in enumerate(chain):
                slots.append(slot)
                tokens.append(token)
                positions.append(last + offset)
                local.append(offset)
        indices = [slot for slot, _ in batch]
        return v2.LogitsContext(
            expanded_idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping=torch.tensor(indices, dtype=torch.int32),
            idx_mapping_np=np.array(indices, dtype=np.int32),
            expanded_local_pos=torch.tensor(local, dtype=torch.int32),
            input_ids=torch.tensor(tokens, dtype=torch.int32),
            pos=torch.tensor(positions, dtype=torch.int64),
            seq_lens_upper_bound_np=np.array([0] * len(indices), dtype=np.int32),
        )

    def apply(self, ctx: Any) -> torch.Tensor:
        return self.processor.apply(torch.zeros(len(ctx.pos), 29), ctx)


def _random_drafts(rng: random.Random, text: str | None, output: list[int]) -> list[int]:
    """Some of what the guide wants, perhaps with a wrong token in it."""
    rest = [*_ids(text or "abc")[len(output) :], STOP]
    drafts = rest[: rng.randint(0, 3)]
    return [token if rng.random() < 0.8 else rng.randint(0, 28) for token in drafts]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_v2_rows_follow_random_batches(seed: int, speculative: bool) -> None:
    rng = random.Random(seed)
    runner = FakeRunner(num_slots=6)
    fresh: set[int] = set()
    for _ in range(14):
        for slot in range(6):
            if slot not in runner.requests or rng.random() < 0.12:  # a slot is reused without notice
                text = rng.choice([None, "abc", "hello", "q", "zyxwvutsrq"])
                length = 0 if text is None or rng.random() < 0.66 else rng.randint(0, len(text))
                guided = runner.add(slot, text, rng.randint(2, 4), _ids(text or "")[:length])
                assert guided == (text is not None)
                fresh.add(slot)
        slots = rng.sample(range(6), rng.randint(1, 6))
        pieces = frozenset(slot for slot in slots if slot in fresh and rng.random() < 0.2)
        batch = [
            (
                slot,
                _random_drafts(rng, runner.requests[slot][0], runner.output(slot))
                if speculative and slot not in fresh
                else [],
            )
            for slot in slots
        ]
        logits = runner.apply(runner.context(batch, pieces))
        row = 0
        for slot, drafts in batch:
            text, _ = runner.requests[slot]
            output = runner.output(slot)
            accepted: list[int] = []
            for depth in range(len(drafts) + 1):
                expected = _expected(text, [*output, *accepted])
                if slot not in pieces:
                    assert _legal(logits[row + depth]) == expected, (slot, text, output, drafts, depth)
                if depth == len(drafts) or drafts[depth] not in expected or drafts[depth] == STOP:
                    break
                accepted.append(drafts[depth])
            row += len(drafts) + 1
            if slot in pieces:
                continue
            fresh.discard(slot)
            # the target takes some of the legal drafts and puts a token of its own behind them
            taken = accepted[: rng.randint(0, len(accepted))]
            bonus = min(_expected(text, [*output, *taken]))
            runner.emit(slot, [*taken, bonus])


class OnDevice(torch.Tensor):
    """A tensor that counts how often it, or what is computed from it, comes to the host."""

    transfers = 0

    def tolist(self) -> Any:
        OnDevice.transfers += 1
        return super().tolist()


def test_v2_one_transfer_a_step() -> None:
    """One a step, and none where nothing is guided."""
    runner = FakeRunner(num_slots=3)
    for slot, text in enumerate(["hello", "abc", None]):
        runner.add(slot, text, 2, [])
    for batch, expected in (([(0, [7, 4]), (1, []), (2, [])], 1), ([(2, [])], 0)):
        ctx = runner.context(batch)
        for name in ("expanded_idx_mapping", "input_ids", "pos"):
            object.__setattr__(ctx, name, getattr(ctx, name).as_subclass(OnDevice))
        OnDevice.transfers = 0
        runner.apply(ctx)
        assert OnDevice.transfers == expected


def test_v2_failure_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(num_slots=2)
    runner.add(0, "bad", 2, [], SamplingParams(extra_args={"guide": {"regex": "("}}))
    runner.add(1, "abc", 2, [])
    logits = runner.apply(runner.context([(0, []), (1, [])]))
    assert (_legal(logits[0]), _legal(logits[1])) == ({STOP}, {0})
    assert "a guided request ends" in caplog.text


def test_row_reports_a_guide_that_takes_too_long() -> None:
    from concurrent.futures import Future

    config = GuidedDecodingConfig(compile_timeout_s=0.01)
    row = GuidedRow(Future(), VOCABULARY, config, frozenset())
    row.follow([1])
    assert row.error is not None and "not compiled within" in str(row.error)
