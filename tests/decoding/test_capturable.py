"""CapturableGuidedDecoder's own promises: queue, drains, failures, attaching, handles, bad input. Orders of work are in
test_capturable_schedules.py, real threads and the real interpreter lock at the end of this file."""

import gc
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import Future

import pytest
import torch
from hypothesis import settings

import gd_plugin as gd
from gd_plugin.masks.device import CpuDevice
from gd_plugin.testing import SimulatedDevice, ThreadedDevice
from tests.decoding.capture_engine import num_registered
from tests.decoding.test_state_machine import Schedules
from tests.fuzz import LONG, pick

pytestmark = pytest.mark.timeout(pick(120, 3600))
TABLES = {"abc": {"start": {8: "a"}, "a": {9: "b", 8: "a"}, "b": {10: "c", 15: "$"}, "c": {}}}
GUIDE = gd.Guide.regex("abc")


def capturable(kit, factory, *, slots=2, drafts=3, rows="repeat", **options):
    options.setdefault("config", gd.GuidedDecodingConfig(rows_behind_refused_draft=rows))
    options.setdefault("device", "cpu")
    return gd.CapturableGuidedDecoder(
        factory, max_num_sequences=slots, vocab_size_padded=kit.PADDED, max_num_draft_tokens=drafts, **options
    )


class Submitting(gd.CapturableGuidedDecoder):
    """Submits what it is given, so that it can stand in for GuidedDecoder in that one's tests."""

    def add_batch(self, requests, new_tokens=None, runtime_draft_len=None):
        self.submit(requests)
        super().add_batch(requests, new_tokens, runtime_draft_len)


class CountingDevice(SimulatedDevice):
    """Counts what the decoder asks for."""

    def __init__(self, seed=0, **options):
        super().__init__(seed, **options)
        self.calls = []

    def record(self, event, stream):
        self.calls.append(("record", event))
        super().record(event, stream)

    def wait(self, event, stream):
        self.calls.append(("wait", event))
        super().wait(event, stream)

    def synchronize(self, event):
        self.calls.append(("synchronize", event))
        super().synchronize(event)

    def launch_host(self, function, stream, **options):
        self.calls.append(("launch_host", None))
        super().launch_host(function, stream, **options)

    def named(self, decoder):
        """The calls since the last time, events by name."""
        names = {id(event): "token" for event in decoder._buffers._token_events}
        names |= {id(event): "bitmask" for event in decoder._buffers._bitmask_events}
        calls, self.calls = [(call, names.get(id(event), "")) for call, event in self.calls], []
        return calls


def started(kit, device, *, drafts=3, text="a", **options):
    """A decoder whose request 0 has run its context step; its golden token is `text`, not yet consumed."""
    decoder = capturable(kit, kit.TableFactory(TABLES), drafts=drafts, device=device, **options)
    decoder.submit([kit.context(GUIDE)])
    decoder.add_batch([kit.context(GUIDE)])
    assert decoder.execute(torch.zeros(1, kit.PADDED)) == []
    return decoder


def finite(kit, logits):
    return [{kit.STRINGS[i] for i in range(len(kit.STRINGS)) if row[i].isfinite()} for row in logits]


def test_random_schedules_of_the_eager_decoders_own_test(kit, factory):
    class Kit(kit):
        @staticmethod
        def decoder(factory, *, slots, drafts, rows):
            return Submitting(
                factory,
                max_num_sequences=slots,
                vocab_size_padded=kit.PADDED,
                max_num_draft_tokens=drafts,
                device=SimulatedDevice(),
                config=gd.GuidedDecodingConfig(rows_behind_refused_draft=rows),
            )

    machine = type("Machine", (Schedules,), {"factory": factory, "kit": Kit})
    test = machine.TestCase
    test.settings = settings(
        derandomize=not LONG, max_examples=pick(20, 1000), stateful_step_count=15, deadline=None, database=None
    )
    test().runTest()


# replays and warm-up -------------------------------------------------------------------------------------------------


def captured_step(decoder, device, kit, rows=4):
    logits = torch.zeros(rows, kit.PADDED)
    with decoder.capturing() as handle, device.capture() as graph:
        device.launch(logits.zero_, device.main(), writes=[logits])
        assert decoder.execute(logits) == []
    return graph, handle, logits


def test_a_replay_without_a_batch_changes_nothing_and_repeats_the_rows(kit):
    device = SimulatedDevice(pace=0)
    decoder = started(kit, device)
    decoder.add_batch([kit.generation(GUIDE, "abc")])
    graph, _handle, logits = captured_step(decoder, device, kit)
    for _ in range(3):
        graph.replay()
    device.check()
    # c leads nowhere: refused, and the last legal row repeated
    assert finite(kit, logits[:3]) == [{"a", "b"}, {"c", "</s>"}, {"c", "</s>"}]
    assert decoder.num_advanced_tokens[0] == 2 and decoder.take_failures([0]) == []


def test_a_pending_warm_up_replay_does_not_take_the_next_batch(kit):
    for seed in range(30):
        device = SimulatedDevice(seed)
        decoder = started(kit, device, drafts=0)
        decoder.add_batch([kit.generation(GUIDE, "a")])
        graph, _handle, logits = captured_step(decoder, device, kit, rows=1)
        seen = []
        for text in "ab":
            if text == "b":
                decoder.add_batch([kit.generation(GUIDE, text)])
            for _ in range(2):
                graph.replay()
                device.launch(lambda s=seen, x=logits: s.append(finite(kit, x)[0]), device.main(), reads=[logits])
        device.check()
        assert seen == [{"a", "b"}] * 2 + [{"c", "</s>"}] * 2


def test_a_batch_that_nobody_runs_is_skipped(kit):
    device = SimulatedDevice()
    decoder = started(kit, device, drafts=0)
    for text in "ca":
        decoder.add_batch([kit.generation(GUIDE, text)])
    logits = torch.zeros(1, kit.PADDED)
    assert decoder.execute(logits) == []
    device.check()
    assert finite(kit, logits) == [{"a", "b"}]


def test_tickets_begin_anew(kit):
    device = CpuDevice()
    decoder = started(kit, device, drafts=0)
    decoder._callbacks._last_ticket = 1015
    for _ in range(20):
        decoder.add_batch([kit.generation(GUIDE, "a")])
        logits = torch.zeros(1, kit.PADDED)
        assert decoder.execute(logits) == [] and finite(kit, logits) == [{"a", "b"}]
        decoder.add_batch([kit.generation(None, "a")])
        assert decoder.execute(logits) == []
    assert len(decoder._callbacks._queue) == 0


def test_a_graph_for_longer_drafts_than_the_step_has(kit):
    device = SimulatedDevice(pace=1)
    decoder = started(kit, device)
    tokens, counts = device.empty(1), device.empty(1)
    decoder.add_batch([kit.generation(GUIDE, "ab")], runtime_draft_len=3)
    logits, drafts = torch.zeros(4, kit.PADDED), torch.zeros(3, 1, kit.PADDED)
    with decoder.capturing() as _handle, device.capture() as graph:
        decoder.execute(logits)
        for step in range(3):
            decoder.add_draft_batch(tokens, counts if step == 0 else None, step)
            decoder.execute_draft_batch(drafts[step], draft_step=step)
    for draft_len, guided in ((3, [True] * 3), (1, [True, False, False]), (0, [False] * 3)):
        decoder.add_batch([kit.generation(GUIDE, "ab")], runtime_draft_len=draft_len)
        tokens.fill_(8), counts.fill_(1), drafts.zero_()
        graph.replay()
        device.check()
        assert decoder.take_failures([0]) == []
        assert [bool(draft.isinf().any()) for draft in drafts] == guided
        decoder.rollback_rejected_batch(torch.ones(1, dtype=torch.int32))
        # undone, so that the same golden token is accepted again
        decoder.grammar_matchers[0].reset()


def test_rollback_under_capture(kit):
    """S4: the side stream is joined, and the matcher is where the accepted tokens are."""
    for seed in range(20):
        device = SimulatedDevice(seed)
        decoder = started(kit, device)
        decoder.add_batch([kit.generation(GUIDE, "aab")])
        logits, counts = torch.zeros(4, kit.PADDED), device.empty(1)
        counts.fill_(2)
        with decoder.capturing() as _handle, device.capture() as graph:
            decoder.execute(logits)
            assert decoder.rollback_rejected_batch(counts) == []
        for _ in range(3):
            graph.replay()
        device.check()
        assert decoder.grammar_matchers[0].num_tokens == 2 and decoder.num_advanced_tokens[0] == 0


def test_trees_under_capture(kit, factory):
    for seed in range(10):
        device = SimulatedDevice(seed)
        decoder = capturable(kit, factory, device=device)
        decoder.submit([kit.context(kit.JSON)])
        decoder.add_batch([kit.context(kit.JSON)])
        assert decoder.execute(torch.zeros(1, kit.PADDED)) == []
        tree = gd.DraftTree.from_parents([-1, 0, 0, 2])
        decoder.add_batch([kit.generation(kit.JSON, '{}"a', draft_tree=tree)])
        logits, counts = torch.zeros(4, kit.PADDED), torch.tensor([3], dtype=torch.int32)
        nodes = torch.tensor([[2, 3]], dtype=torch.int32)
        with decoder.capturing() as _handle, device.capture() as graph:
            decoder.execute(logits)
            decoder.rollback_rejected_batch(counts, nodes)
        graph.replay()
        device.check()
        assert decoder.take_failures([0]) == []
        fresh = factory.create(kit.JSON)
        assert all(map(fresh.accept_token, kit.ids('{"a')))
        rows = gd.allocate_token_bitmask(2, 16)
        fresh.fill_next_token_bitmask(rows, 0)
        decoder.grammar_matchers[0].fill_next_token_bitmask(rows, 1)
        assert torch.equal(rows[0], rows[1])


def test_a_stage_without_logits_under_capture(kit):
    device = SimulatedDevice()
    decoder = started(kit, device)
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    with decoder.capturing() as _handle, device.capture() as graph:
        decoder.execute(None)
    graph.replay()
    device.check()
    assert decoder.grammar_matchers[0].num_tokens == 2


def test_phases_one_by_one(kit):
    device = SimulatedDevice()
    decoder = started(kit, device)
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    logits = torch.zeros(4, kit.PADDED)
    assert decoder.build() == [] and kit.switches(decoder) == [1, 1, 0, 0]
    decoder.copy_bitmask()
    decoder.apply_bitmask(logits)
    device.check()
    assert finite(kit, logits[:2]) == [{"a", "b"}, {"c", "</s>"}]


# drains and the active flag ------------------------------------------------------------------------------------------


def test_each_eager_call_ends_with_one_wait_without_the_lock(kit):
    """G1: exactly one, behind its record, none under capture."""
    device = CountingDevice()
    decoder = started(kit, device)
    counts, tokens = torch.ones(1, dtype=torch.int32), torch.full((1,), 8, dtype=torch.int32)
    logits = torch.zeros(4, kit.PADDED)

    def draft():
        decoder.add_draft_batch(tokens, counts, 0)
        decoder.execute_draft_batch(logits)

    decoder.add_batch([kit.generation(GUIDE, "ab")])
    device.named(decoder)
    for call in (lambda: decoder.execute(logits), lambda: decoder.rollback_rejected_batch(counts), draft):
        call()
        calls = device.named(decoder)
        assert [name for name in calls if name[0] == "synchronize"] == [("synchronize", "bitmask")]
        assert calls[-1] == ("synchronize", "bitmask") and ("record", "bitmask") in calls
        assert sum(name == "launch_host" for name, _ in calls) == 1
        with decoder.capturing() as _handle, device.capture():
            call()
        assert "synchronize" not in [name for name, _ in device.named(decoder)]


def test_the_plain_decoder_launches_and_drains_nothing(kit):
    """G2: it waits for its tokens and its own buffers alone."""
    device = CountingDevice()
    decoder = kit.decoder(kit.TableFactory(TABLES), device=device)
    decoder.add_batch([kit.context(GUIDE)])
    decoder.execute(torch.zeros(1, kit.PADDED))
    calls = device.named(decoder)
    assert ("synchronize", "bitmask") not in calls and ("launch_host", "") not in calls


def test_an_eager_step_without_a_guided_request_enqueues_nothing(kit):
    """G5: no host function, no event, no copy; a captured one is there for whatever batch comes."""
    device = CountingDevice()
    decoder = started(kit, device)
    logits, counts = torch.zeros(4, kit.PADDED), torch.ones(1, dtype=torch.int32)
    decoder.add_batch([kit.generation(None, "ab")])
    assert not decoder.active
    device.named(decoder)
    num_run = len(device.trace)
    assert decoder.execute(logits) == decoder.rollback_rejected_batch(counts) == decoder.build() == []
    device.synchronize_all()
    assert device.named(decoder) == [] and [step.kind for step in device.trace[num_run:]] in ([], ["copy"])
    graph, _handle, logits = captured_step(decoder, device, kit)
    for guide, is_guided in ((None, False), (GUIDE, True), (None, False)):
        decoder.add_batch([kit.generation(guide, "ab")])
        graph.replay()
        device.synchronize_all()
        assert bool(logits.isinf().any()) is is_guided
    device.check()


def test_waits_before_others_that_keep_the_lock(kit):
    """G6: only if a graph holds host functions, and not while capturing."""
    device = CountingDevice(pace=0)
    decoder = started(kit, device)
    device.named(decoder)
    decoder.drain_captured_host_functions()
    assert device.named(decoder) == []
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    graph, handle, _logits = captured_step(decoder, device, kit)
    graph.replay()
    event = device.event()
    device.record(event, device.main())
    with device.capture():
        decoder.drain_captured_host_functions()
        decoder.drain()
    decoder.drain_captured_host_functions()
    with device.holding_lock():
        device.synchronize(event)
    device.check()
    handle.release()
    device.named(decoder)
    decoder.drain_captured_host_functions()
    assert device.named(decoder) == []


# failures ------------------------------------------------------------------------------------------------------------


def test_failures_of_replays_wait_for_their_batch(kit):
    """A5: allowed ids are returned, active ones kept, dead ones dropped, those of whole batches always returned."""
    decoder = capturable(kit, kit.TableFactory(TABLES))
    failures = [(1, "one"), (2, "two"), (3, "three"), (None, "all"), (1, "again")]
    decoder._callbacks._failures.extend(failures)
    assert decoder.take_failures([1], active=[1, 2]) == [(1, "one"), (None, "all"), (1, "again")]
    assert decoder.take_failures([1]) == []
    assert decoder.take_failures([2, 3]) == [(2, "two")]
    decoder._callbacks._failures.extend(failures)
    assert decoder.take_failures([]) == [(None, "all")]
    assert decoder.take_failures([1, 2, 3]) == [failure for failure in failures if failure[0]]


def test_a_replays_failure_is_told_once_and_is_its_requests_alone(kit):
    device = SimulatedDevice(pace=0)
    decoder = started(kit, device, slots=2)
    decoder.submit([kit.context(GUIDE, slot=1)])
    decoder.add_batch([kit.context(GUIDE, slot=1)])
    assert decoder.execute(torch.zeros(1, kit.PADDED)) == []
    batch = [kit.generation(GUIDE, "a"), kit.generation(GUIDE, "b", slot=1)]
    decoder.add_batch(batch, runtime_draft_len=0)
    graph, _handle, logits = captured_step(decoder, device, kit, rows=2)
    graph.replay()
    assert decoder.take_failures([0, 1]) == []
    device.check()
    failed = decoder.take_failures([0, 1])
    assert [request_id for request_id, _ in failed] == [1] and "is refused by the guide" in failed[0][1]
    assert [len(row) for row in finite(kit, logits)] == [2, 16]
    assert decoder.take_failures([0, 1]) == []


def test_eager_calls_return_their_failures_as_the_plain_decoder_does(kit):
    decoder = started(kit, SimulatedDevice())
    decoder.add_batch([kit.generation(GUIDE, "b")])
    failed = decoder.execute(torch.zeros(4, kit.PADDED))
    assert [request_id for request_id, _ in failed] == [0]
    assert decoder.execute(torch.zeros(4, kit.PADDED)) == failed


def test_what_a_callback_raises_fails_its_whole_batch(kit):
    """H4: recorded with the id None, without a traceback, rows left alone; the next batch goes on."""
    device = SimulatedDevice()
    decoder = started(kit, device)
    build, decoder._callbacks._build_step = decoder._callbacks._build_step, lambda step, words: 1 / 0
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    logits = torch.zeros(4, kit.PADDED)
    assert decoder.execute(logits) == [(None, "division by zero")]
    assert logits.isfinite().all()
    decoder._callbacks._build_step = build
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    assert decoder.execute(logits) == [] and not logits.isfinite().all()


def test_a_rollback_that_goes_wrong_is_recorded(kit):
    """A4: never raised; without a matcher it does nothing."""
    device = SimulatedDevice()
    decoder = started(kit, device)
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    decoder.execute(torch.zeros(4, kit.PADDED))
    failed = decoder.rollback_rejected_batch(torch.tensor([4], dtype=torch.int32))
    assert [request_id for request_id, _ in failed] == [0] and "the guide allows 2" in failed[0][1]
    assert decoder.grammar_matchers[0] is None
    assert decoder.rollback_rejected_batch(torch.tensor([4], dtype=torch.int32)) == []


def test_a_missing_count_is_a_failure_of_the_batch(kit):
    decoder = started(kit, SimulatedDevice())
    decoder.add_batch([kit.generation(GUIDE, "aab")])
    decoder.execute(torch.zeros(4, kit.PADDED))
    failed = decoder.rollback_rejected_tokens()
    assert [request_id for request_id, _ in failed] == [None] and "num_accepted_draft_tokens is missing" in failed[0][1]


def test_two_models_with_batches_of_their_own(kit):
    for captures in (False, True):
        device = SimulatedDevice()
        decoder = started(kit, device)
        logits = torch.zeros(4, kit.PADDED)
        decoder.add_batch([kit.generation(GUIDE, "aab")])
        assert decoder.execute(logits) == []
        request = kit.generation(GUIDE, "a")
        request.num_accepted_draft_tokens = 0
        decoder.add_batch([request])
        if captures:
            with decoder.capturing() as _handle, device.capture() as graph:
                decoder.rollback_rejected_tokens()
                decoder.execute(logits)
            graph.replay()
            device.check()
            assert decoder.take_failures([0]) == []
        else:
            assert decoder.rollback_rejected_tokens() == []
            assert decoder.grammar_matchers[0].num_tokens == 1
            assert decoder.execute(logits) == []
        assert decoder.grammar_matchers[0].num_tokens == 2
        decoder.add_batch([kit.draft(GUIDE, "a")])
        assert decoder.execute(torch.zeros(1, kit.PADDED)) == []
        assert decoder.grammar_matchers[0].num_tokens == 3
        decoder.rollback_draft_tokens()
        assert decoder.grammar_matchers[0].num_tokens == 2


# attaching -----------------------------------------------------------------------------------------------------------


class Compiling:
    """A factory that compiles when the test says so, and counts."""

    def __init__(self, kit):
        self.tables = kit.TableFactory(TABLES)
        self.vocabulary, self.futures, self.num_created = self.tables.vocabulary, {}, 0

    def submit(self, guide):
        assert guide not in self.futures, "compiled twice"
        self.futures[guide] = Future()
        return self.futures[guide]

    def create(self, guide):
        self.num_created += 1
        raise AssertionError("compiled by a batch")

    @property
    def create_matcher(self):
        return lambda: self.tables.create(GUIDE)


def test_submitted_twice_is_compiled_once_and_attached_by_the_host_function(kit):
    """A1, A3: replays attach nothing anew."""
    factory, device = Compiling(kit), SimulatedDevice(pace=0)
    decoder = capturable(kit, factory, device=device, drafts=0)
    for _ in range(3):
        decoder.submit([kit.context(GUIDE)])
    factory.futures[GUIDE].set_result(factory)
    decoder.add_batch([kit.context(GUIDE)])
    graph, _handle, logits = captured_step(decoder, device, kit, rows=1)
    assert decoder.grammar_matchers[0] is None
    graph.replay()
    device.check()
    matcher = decoder.grammar_matchers[0]
    assert finite(kit, logits) == [{"a"}] and matcher is factory.tables.made[0]
    graph.replay()
    device.check()
    assert decoder.grammar_matchers[0] is matcher and factory.num_created == 0


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_guide_that_was_not_submitted_fails_and_nothing_is_compiled(kit, device):
    """A2, and A3: the slot is claimed, so that what was there before is not seen."""
    factory = Compiling(kit)
    decoder = capturable(kit, factory, device=SimulatedDevice() if device == "simulated" else device, drafts=0)
    decoder.grammar_matchers[0] = factory.tables.create(GUIDE)
    for _ in range(2):
        decoder.add_batch([kit.context(GUIDE, request_id="late")])
        failed = decoder.execute(torch.zeros(1, kit.PADDED))
        assert [request_id for request_id, _ in failed] == ["late"] and "no precompiled grammar" in failed[0][1]
        assert decoder.grammar_matchers[0] is None and factory.num_created == 0
    decoder.add_batch([kit.generation(GUIDE, "a", request_id="late")])
    assert decoder.execute(torch.zeros(1, kit.PADDED)) == []
    assert kit.switches(decoder, 1) == [0]


def test_polling(kit):
    """A1: pending, ready, failed; what was never submitted counts as ready, and attaching tells."""
    for decoder_class in (gd.GuidedDecoder, gd.CapturableGuidedDecoder):
        factory = Compiling(kit)
        decoder = decoder_class(factory, max_num_sequences=1, vocab_size_padded=kit.PADDED, device="cpu")
        assert decoder.poll("never") == "ready"
        decoder.submit([kit.context(GUIDE)])
        assert decoder.poll(0) == "pending"
        factory.futures[GUIDE].set_result(factory)
        assert decoder.poll(0) == "ready"
        factory.futures.clear()
        decoder.submit([kit.context(GUIDE, request_id="bad")])
        factory.futures[GUIDE].set_exception(gd.InvalidGuideError("#: no"))
        assert decoder.poll("bad") == "failed"
    # taken by the batch that attaches it
    decoder.add_batch([kit.context(GUIDE)])
    assert decoder.execute(torch.zeros(1, kit.PADDED)) == [] and len(decoder._preparing._submitted) == 1


def test_waiting_deferring_and_giving_up_stay_on_the_callers_thread(kit):
    """A6: bounded waits, and never in a host function."""
    config = gd.GuidedDecodingConfig(compile_timeout_s=0.05)
    factory = Compiling(kit)
    decoder = capturable(kit, factory, device=SimulatedDevice(), drafts=0, config=config)
    decoder.submit([kit.context(GUIDE)])
    decoder.add_batch([kit.context(GUIDE)])
    failed = decoder.execute(torch.zeros(1, kit.PADDED))
    assert [request_id for request_id, _ in failed] == [0] and "not compiled within 0.05 s" in failed[0][1]

    factory = Compiling(kit)
    decoder = capturable(kit, factory, device=SimulatedDevice(), drafts=0, defer=True)
    decoder.submit([kit.context(GUIDE)])
    logits = torch.zeros(1, kit.PADDED)
    for is_ready in (False, True):
        decoder.add_batch([kit.context(GUIDE)])
        assert decoder.execute(logits) == [] and decoder.deferred == ([] if is_ready else [0])
        assert bool(logits.isinf().any()) is is_ready
        if not is_ready:
            factory.futures[GUIDE].set_result(factory)

    factory = Compiling(kit)
    decoder = capturable(kit, factory, drafts=0)
    decoder.submit([kit.context(GUIDE)])
    factory.futures[GUIDE].set_exception(gd.InvalidGuideError("#: no"))
    decoder.add_batch([kit.context(GUIDE)])
    assert decoder.execute(logits) == [(0, "request 0 in slot 0: #: no")]


def test_an_engine_that_runs_ahead_may_resend_a_prompt_and_bring_requests_back(kit):
    device = SimulatedDevice(pace=0)
    decoder = started(kit, device, drafts=0)
    matcher = decoder.grammar_matchers[0]
    # preempted: the same request in a context step, with its history, and no second submit
    decoder.add_batch([kit.context(GUIDE, history=kit.ids("ab"))])
    assert decoder.execute(torch.zeros(1, kit.PADDED)) == []
    assert decoder.grammar_matchers[0] is matcher and matcher.num_tokens == 2
    # from elsewhere, before drafting
    arrival = kit.generation(
        GUIDE, "b", request_id="new", is_generation_only_first_iteration=True, history=kit.ids("a")
    )
    decoder.submit([arrival])
    decoder.add_batch([arrival])
    for _ in range(2):
        decoder.init_disagg_gen_requests()
        assert decoder.grammar_matchers[0] is not matcher and decoder.grammar_matchers[0].num_tokens == 1
    logits = torch.zeros(1, kit.PADDED)
    assert decoder.execute(logits) == []
    device.check()
    assert finite(kit, logits) == [{"c", "</s>"}]


# bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_where_there_is_none(kit):
    with pytest.raises(gd.GuidedDecodingError, match="no CUDA device here"):
        capturable(kit, kit.TableFactory(TABLES), device="cuda")


def test_a_device_with_streams_and_no_driver_library(kit, monkeypatch):
    class Streams(CpuDevice):
        side = object()

    monkeypatch.setattr("gd_plugin.decoding.hostfunc._LIBRARIES", ("libnowhere.so",))
    with pytest.raises(gd.GuidedDecodingError, match="libnowhere"):
        capturable(kit, kit.TableFactory(TABLES), device=Streams())


def test_a_batch_larger_than_reserved(kit):
    """Refused by add_batch; larger than its graph: recorded, its rows left alone, and the next one goes on."""
    device = SimulatedDevice()
    decoder = started(kit, device, slots=2)
    with pytest.raises(ValueError, match="rows but 8 are reserved"):
        decoder.add_batch([kit.generation(None, "abca", slot) for slot in range(3)])
    decoder.add_batch([kit.generation(GUIDE, "a")], runtime_draft_len=0)
    graph, _handle, logits = captured_step(decoder, device, kit, rows=1)
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    graph.replay()
    device.check()
    failed = decoder.take_failures([])
    assert [request_id for request_id, _ in failed] == [None]
    assert "needs 4 rows but the graph was captured for 1" in failed[0][1]
    assert logits.isfinite().all() and decoder.grammar_matchers[0].num_tokens == 0
    decoder.add_batch([kit.generation(GUIDE, "a")], runtime_draft_len=0)
    graph.replay()
    device.check()
    assert decoder.take_failures([0]) == [] and finite(kit, logits) == [{"a", "b"}]


def test_what_does_not_belong_into_a_capture(kit):
    device = SimulatedDevice()
    decoder = started(kit, device)
    tokens, counts = torch.full((1,), 8, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    d2t, logits = torch.zeros(16, dtype=torch.int32), torch.zeros(1, 16)
    before = num_registered()

    def draft():
        decoder.add_draft_batch(tokens, counts)
        decoder.execute_draft_batch(logits, d2t)

    calls = [
        (lambda: decoder.add_batch([kit.generation(GUIDE, "a")]), "ahead of each replay"),
        (decoder.close, "end the capture first"),
        (draft, "has to be read before the capture"),
    ]
    for call, told in calls:
        with pytest.raises(gd.GuidedDecodingError, match=told), decoder.capturing() as handle, device.capture():
            call()
        # what a failed capture has registered is forgotten
        assert len(handle) == 0 and num_registered() == before
    draft()
    with decoder.capturing() as handle, device.capture():
        draft()
    device.check()


def test_tensors_of_the_wrong_shape_leave_nothing_behind(kit):
    device = SimulatedDevice()
    decoder = started(kit, device)
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    for call in (
        lambda: decoder.execute(torch.zeros(3, kit.PADDED)),
        lambda: decoder.execute(torch.zeros(kit.PADDED)),
        lambda: decoder.rollback_rejected_batch(torch.ones(2, dtype=torch.int32)),
        lambda: decoder.rollback_rejected_batch(torch.ones(1)),
        lambda: decoder.rollback_rejected_batch(torch.ones(1, dtype=torch.int32), torch.zeros(1, 4)),
        lambda: decoder.execute_draft_batch(torch.zeros(1, kit.PADDED)),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError):
        decoder.execute(torch.zeros(4, kit.PADDED, dtype=torch.int64))
    logits = torch.zeros(4, kit.PADDED)
    assert decoder.execute(logits) == []
    device.check()
    assert finite(kit, logits[:1]) == [{"a", "b"}]


# lifetimes -----------------------------------------------------------------------------------------------------------


def test_a_graph_given_up_with_a_replay_pending(kit):
    """Its batch fails, recorded; the next batch is not mistaken for it, and nothing hangs."""
    device = SimulatedDevice(pace=0)
    decoder = started(kit, device, drafts=0)
    decoder.add_batch([kit.generation(GUIDE, "a")])
    graph, handle, logits = captured_step(decoder, device, kit, rows=1)
    graph.replay()
    graph.destroy()
    handle.release()
    del handle
    device.check()
    failed = decoder.take_failures([])
    assert [request_id for request_id, _ in failed] == [None] and "given up" in failed[0][1]
    assert logits.isfinite().all()
    decoder.add_batch([kit.generation(GUIDE, "a")])
    assert decoder.execute(logits) == []
    device.check()
    assert finite(kit, logits) == [{"a", "b"}]


def test_handles_closing_and_what_is_registered(kit):
    before = num_registered()
    device = SimulatedDevice()
    decoder = started(kit, device)
    decoder.add_batch([kit.generation(GUIDE, "ab")])
    graph, handle, _logits = captured_step(decoder, device, kit)
    assert num_registered() == before + 1 == before + len(handle)
    # without `capturing` the decoder itself is the owner
    with device.capture() as other:
        decoder.execute(torch.zeros(4, kit.PADDED))
    assert num_registered() == before + 2
    graph.replay(), other.replay()
    decoder.close()
    # what was pending has run
    assert len(handle) == 0 and sum(step.kind == "host function" for step in device.trace) == 3
    del decoder, graph, other, handle, device
    gc.collect()
    assert num_registered() == before


def test_compiled_code_is_made_eager_only_if_asked_and_until_closed(kit):
    from torch._dynamo import eval_frame

    before = eval_frame._stance.stance
    decoder = capturable(kit, kit.TableFactory(TABLES))
    assert eval_frame._stance.stance == before == "default"
    decoder.close()
    decoder = capturable(kit, kit.TableFactory(TABLES), force_eager=True)
    assert eval_frame._stance.stance == "force_eager"
    decoder.close()
    decoder.close()
    assert eval_frame._stance.stance == before


# real threads, the real interpreter lock -----------------------------------------------------------------------------


def threaded_step(decoder, device, kit):
    """A captured step of one generation request without drafts, on the driver's thread."""
    logits = torch.zeros(1, kit.PADDED)
    decoder.add_batch([kit.generation(GUIDE, "a")])
    with decoder.capturing() as handle, device.capture() as graph:
        device.launch(logits.zero_, device.main())
        decoder.execute(logits)
    return graph, handle, logits


def test_eager_steps_and_replays_on_the_drivers_thread(kit, driver):
    device = ThreadedDevice(driver)
    decoder = started(kit, device, drafts=0)
    threads = set()
    build = decoder._callbacks._build_step
    decoder._callbacks._build_step = lambda *step: threads.add(threading.get_ident()) or build(*step)
    graph, _handle, logits = threaded_step(decoder, device, kit)
    seen = []
    for text in "aab":
        if seen:
            decoder.add_batch([kit.generation(GUIDE, text)])
        graph.replay()
        decoder.drain_captured_host_functions()
        seen.append(finite(kit, logits)[0])
    assert seen == [{"a", "b"}, {"a", "b"}, {"c", "</s>"}] and decoder.take_failures([0]) == []
    decoder.add_batch([kit.generation(GUIDE, "a")])
    assert [request_id for request_id, _ in decoder.execute(logits)] == [0]
    assert device.errors == [] and threading.get_ident() not in threads and threads


def test_memory_made_in_inference_mode_can_be_written_by_the_drivers_thread(kit, driver):
    with torch.inference_mode():
        device = ThreadedDevice(driver, only_host=True)
        decoder = started(kit, CpuDevice(), drafts=0)
        assert not decoder.bitmask_host.is_inference()
    decoder.add_batch([kit.generation(GUIDE, "a")])
    failed = []
    device.launch_host(
        lambda: failed.append(decoder.execute(torch.zeros(1, kit.PADDED))), device.side, on_error=failed.append
    )
    device.synchronize(None)
    assert failed == [[]]


def test_ten_thousand_replays_leave_nothing_behind(kit, driver):
    device = ThreadedDevice(driver, only_host=True)
    decoder = started(kit, device, drafts=0)
    graph, _handle, _logits = threaded_step(decoder, device, kit)
    tokens = kit.generation(GUIDE, "a")

    def steps(number):
        for _ in range(number):
            decoder.add_batch([tokens])
            graph.replay()
            device.synchronize(None)
            assert decoder.take_failures([0]) == []
        # the guide's a+ grows with its text, which is not the decoder's to forget
        decoder.add_batch([kit.context(GUIDE, history=[])])
        assert decoder.execute(torch.zeros(1, kit.PADDED)) == []
        gc.collect()

    steps(500)
    registered = num_registered()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        steps(10_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # less than a byte a replay
    assert grown < 10_000 and num_registered() == registered


EXIT_SCRIPT = """
import sys, time, torch
import gd_plugin as gd
from gd_plugin.decoding.hostfunc import load_driver
from gd_plugin.testing.fake import FakeMatcher
from gd_plugin.testing import ThreadedDevice

device = ThreadedDevice(load_driver(sys.argv[1]))
vocabulary = gd.Vocabulary.from_bytes([b"a", None], stop_token_ids=[1])

class Factory:
    def create(self, guide):
        return FakeMatcher.of_texts(vocabulary, ["a"])

decoder = gd.CapturableGuidedDecoder(Factory(), max_num_sequences=1, vocab_size_padded=32, device=device)
request = gd.GuidedRequest(gd.Guide.regex("a"), 0, 0, is_context_init_state=True, is_last_context_chunk=True)
decoder.submit([request])
decoder.add_batch([request])
logits = torch.zeros(1, 32)
with device.capture() as graph:
    device.launch(lambda: time.sleep(0.3), device.main())
    decoder.execute(logits)
    device.launch(lambda: print(int(logits.isfinite().sum()), flush=True), device.main())
graph.replay()
"""


def test_the_interpreter_waits_for_pending_host_functions_before_it_goes(driver_library):
    done = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, driver_library], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
