"""Captured and eager steps under random schedules: always the eager decoder's results, never a race; and every wait, record
and join of the protocol is needed, which taking each of them away shows."""

import sys
from functools import cache

import pytest
import torch

import gd_plugin as gd
from gd_plugin.masks.device import CpuDevice
from gd_plugin.testing import SimulatedDevice, SimulatedDeviceError
from tests.decoding.capture_engine import COLUMNS, GUIDES, SLOTS, Engine, run_program
from tests.fuzz import pick

NUM_PROGRAMS = 40
# device events of the decoder are found by the file that makes the call
PROTOCOL = ("decoding/capturable.py", "decoding/decoder.py", "decoding/tokens.py", "masks/buffers.py")


@pytest.fixture(scope="module")
def matchers():
    texts = ["{", "}", "[", "]", '"', ":", ",", " ", "a", "b", "c", "1", "2", "true", "null"]
    factory = gd.GrammarMatcherFactory(
        gd.Vocabulary.from_bytes([*(text.encode() for text in texts), None], stop_token_ids=[15])
    )
    # ahead, so that no decoder's time limit counts a slow machine's first compilation
    for guide in filter(None, GUIDES):
        factory.compile(guide)
    return factory


def run(decoder_class, matchers, device, program, **options):
    """Run a program to its end; odd ones look ahead, some leave rows behind refused drafts open."""
    drafts = program % 4
    rows = "open" if program % 5 == 0 else "repeat"
    decoder = decoder_class(
        matchers,
        max_num_sequences=SLOTS,
        vocab_size_padded=COLUMNS,
        max_num_draft_tokens=drafts,
        device=device,
        config=gd.GuidedDecodingConfig(rows_behind_refused_draft=rows),
        max_look_ahead=program % 2,
    )
    engine = Engine(decoder, device, drafts, **options)
    run_program(engine, program)
    return engine


@cache
def expected(matchers, program):
    return run(gd.GuidedDecoder, matchers, CpuDevice(), program, captures=False)


def check(matchers, device, program):
    """Raise what is wrong with a run on `device`: a race, a deadlock, another result than the eager decoder's."""

    def with_lock(wait):
        with device.holding_lock():
            wait()

    want = expected(matchers, program)
    got = run(gd.CapturableGuidedDecoder, matchers, device, program, captures=True, keeps_lock=with_lock)
    device.check()
    assert got.failures == want.failures == []
    assert got.emitted == want.emitted
    assert len(got.log) == len(want.log) and all(map(torch.equal, got.log, want.log))
    return got


@pytest.mark.timeout(pick(200, 7200))
def test_every_schedule_gives_the_eager_decoders_results(matchers):
    num_replayed = 0
    for schedule in range(pick(160, 10_000)):
        program = schedule % NUM_PROGRAMS
        got = check(matchers, SimulatedDevice(schedule), program)
        num_replayed += len(got.graphs)
    assert num_replayed > 100


# taking the protocol apart -------------------------------------------------------------------------------------------


class Tampered(SimulatedDevice):
    """Leaves out what one place of the protocol asks for, or does it on another stream."""

    def __init__(self, seed, change=None):
        super().__init__(seed)
        self.change, self.places, self.is_inside = change, set(), False
        self.elsewhere = self.stream("elsewhere")

    def place(self, call):
        frame = sys._getframe(2)
        path = frame.f_code.co_filename.replace("\\", "/")
        name = f"{call} in {frame.f_code.co_qualname}"
        if path.endswith(PROTOCOL):
            self.places.add(name)
        return name

    def record(self, event, stream):
        if self.place("record") != self.change:
            super().record(event, stream)

    def wait(self, event, stream):
        if self.place("wait") != self.change:
            super().wait(event, stream)

    def synchronize(self, event):
        if self.place("synchronize") != self.change:
            super().synchronize(event)

    def copy(self, target, source, stream):
        if self.place("copy") + ", moved" == self.change:
            stream = self.elsewhere
        super().copy(target, source, stream)

    def launch_host(self, function, stream, **options):
        if self.place("launch_host") + ", moved" == self.change:
            stream = self.elsewhere
        super().launch_host(function, stream, **options)


# what is taken away -> (a schedule that shows it, what it shows). Every one has to be here: see the last test
CHANGES = {
    "record in CapturableGuidedDecoder._enqueue": (0, "nothing orders"),
    "record in CapturableGuidedDecoder._join": (1, "nothing orders"),
    "record in CapturableGuidedDecoder._launch": (0, "is being captured"),
    "record in CapturableGuidedDecoder._wait_for_main": (1, "interpreter lock"),
    "record in CapturableGuidedDecoder.record_token_event": (1, "is being captured"),
    "record in GuidedDecoder.apply_bitmask": (0, "nothing orders"),
    "record in MaskBuffers.copy_in_turn": (0, "leaves a fork open"),
    "record in TokenBuffers._copy": (1, "nothing orders"),
    "wait in CapturableGuidedDecoder._join": (3, "leaves a fork open"),
    "wait in CapturableGuidedDecoder._launch": (0, "is being captured"),
    "wait in GuidedDecoder.apply_bitmask": (0, "leaves a fork open"),
    "synchronize in CapturableGuidedDecoder._wait_for_main": (1, "interpreter lock"),
    "synchronize in CapturableGuidedDecoder.drain": (1, "interpreter lock"),
    "copy in CapturableGuidedDecoder._enqueue, moved": (0, "nothing orders"),
    "copy in MaskBuffers.copy_in_turn, moved": (0, "nothing orders"),
    "copy in TokenBuffers._copy, moved": (0, "nothing orders"),
    "launch_host in CapturableGuidedDecoder._launch, moved": (0, "nothing orders"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_protocol_with_one_piece_taken_away_is_caught(matchers, change):
    schedule, told = CHANGES[change]
    with pytest.raises(SimulatedDeviceError, match=told):
        check(matchers, Tampered(schedule, change), schedule % NUM_PROGRAMS)


def test_every_piece_of_the_protocol_is_taken_away_in_turn(matchers):
    found = set()
    for program in range(8):
        device = Tampered(program)
        check(matchers, device, program)
        found |= {f"{place}, moved" if place.startswith(("copy", "launch")) else place for place in device.places}
    assert found == set(CHANGES)
