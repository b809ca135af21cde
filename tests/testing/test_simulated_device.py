"""The simulated device against hand-made orders of work: right ones pass under every seed, each wrong one is told."""

import itertools

import pytest
import torch

import gd_plugin as gd
from gd_plugin.decoding.hostfunc import HostFunctionHandle, num_registered
from gd_plugin.testing import SimulatedDeadlock, SimulatedDevice, SimulatedDeviceError

SEEDS = range(40)


def fail(error):
    raise error


def numbers(device, *, host=False):
    return (device.empty_host if host else device.empty)(4)


def test_work_on_one_stream_runs_in_order():
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        memory = numbers(device)
        for factor in (2, 3, 5):
            device.launch(lambda f=factor, m=memory: m.add_(1).mul_(f), device.main(), reads=[memory], writes=[memory])
        device.check()
        assert memory.tolist() == [((2 + 1) * 3 + 1) * 5] * 4


def test_streams_run_in_any_order_unless_an_event_orders_them():
    orders = set()
    for seed, is_ordered in itertools.product(SEEDS, (False, True)):
        device = SimulatedDevice(seed)
        event, seen = device.event(), []
        device.launch(lambda seen=seen: seen.append("main"), device.main())
        if is_ordered:
            device.record(event, device.main())
            device.wait(event, device.side)
        device.launch(lambda seen=seen: seen.append("side"), device.side)
        device.check()
        orders.add((is_ordered, *seen))
        assert [step.stream for step in device.trace] == seen
    assert orders == {(True, "main", "side"), (False, "main", "side"), (False, "side", "main")}


def test_an_event_that_was_never_recorded_holds_nothing():
    device = SimulatedDevice(pace=1)
    event = device.event()
    device.wait(event, device.side)
    device.launch(lambda: None, device.side)
    device.synchronize(event)
    device.check()


def test_a_copy_reads_when_it_runs():
    values = set()
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        source, target = numbers(device, host=True), numbers(device)
        source.fill_(1)
        device.copy(target, source, device.side)
        source.fill_(2)  # too early
        device.synchronize_all()
        values.add(target[0].item())
    assert values == {1, 2}


def copy_after(device, wait_on_host):
    source, target, event = numbers(device, host=True), numbers(device), device.event()
    device.host_access(writes=[source])
    device.copy(target, source, device.side)
    device.record(event, device.side)
    if wait_on_host:
        device.synchronize(event)
    device.host_access(writes=[source])
    device.synchronize_all()


def test_host_memory_rewritten_too_early_is_a_race_whatever_the_schedule():
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        copy_after(device, wait_on_host=True)
        device.check()
        device = SimulatedDevice(seed)
        copy_after(device, wait_on_host=False)
        assert len(device.races) == 1 and "the calling thread" in device.races[0]
        with pytest.raises(SimulatedDeviceError, match="nothing orders the two"):
            device.check()


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [
        ((slice(0, 2), True), (slice(2, 4), True), False),
        ((slice(0, 3), True), (slice(2, 4), True), True),
        ((slice(0, 4), False), (slice(0, 4), False), False),
        ((slice(0, 1), False), (slice(0, 4), True), True),
        ((slice(0, 0), True), (slice(0, 4), True), False),
    ],
    ids=["apart", "overlapping writes", "two reads", "a read and a write", "nothing"],
)
def test_what_is_a_race(first, second, is_race):
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        memory = numbers(device)
        for stream, (part, is_write) in ((device.main(), first), (device.side, second)):
            device.launch(lambda: None, stream, **{"writes" if is_write else "reads": [memory[part]]})
        device.synchronize_all()
        assert bool(device.races) is is_race


def test_order_is_passed_on_from_stream_to_stream():
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        memory, streams = numbers(device), [device.stream(name) for name in "abc"]
        for number, stream in enumerate(streams):
            device.launch(lambda: None, stream, writes=[memory])
            if number < 2:
                event = device.event()
                device.record(event, stream)
                device.wait(event, streams[number + 1])
        device.check()


# capture and replay ------------------------------------------------------------------------------------------------


def forked(device, join, seen):
    """A fork to the side stream and back, with a host function on the way."""
    begin, end, memory = device.event(), device.event(), numbers(device)
    handle = HostFunctionHandle()
    with device.capture() as graph:
        main = device.main()
        device.launch(lambda: seen.append("start"), main, writes=[memory])
        device.record(begin, main)
        device.wait(begin, device.side)
        device.launch_host(lambda: seen.append("host"), device.side, on_error=fail, handle=handle)
        device.launch(lambda: seen.append("side"), device.side, writes=[memory])
        device.record(end, device.side)
        if join:
            device.wait(end, main)
        device.launch(lambda: seen.append("end"), main, **({"writes": [memory]} if join else {}))
    return graph, handle


def test_a_capture_runs_nothing_and_each_replay_runs_all_of_it():
    for seed in SEEDS:
        device, seen = SimulatedDevice(seed), []
        graph, _handle = forked(device, True, seen)
        assert device.main().name == "main" and not device.is_capturing()
        device.synchronize_all()
        assert seen == [] and len(graph.steps) == 4
        for _ in range(3):
            graph.replay()
        device.check()
        assert seen == ["start", "host", "side", "end"] * 3


def test_a_fork_that_is_not_joined_is_refused_and_the_streams_can_be_used_again():
    device = SimulatedDevice()
    with pytest.raises(SimulatedDeviceError, match="leaves a fork open"):
        forked(device, False, [])
    device.launch(lambda: None, device.side)
    assert [step.name for step in forked(device, True, [])[0].steps if step.kind == "host function"]
    device.check()


def test_what_a_capture_refuses():
    device = SimulatedDevice()
    outside, inside = device.event(), device.event()
    device.launch(lambda: None, device.main())
    device.record(outside, device.main())
    with device.capture() as graph:
        assert device.is_capturing()
        with pytest.raises(SimulatedDeviceError, match="cannot wait for a stream that is being captured"):
            device.synchronize(outside)
        with pytest.raises(SimulatedDeviceError, match="from outside the capture"):
            device.wait(outside, device.main())
        with pytest.raises(SimulatedDeviceError, match="under way"), device.capture():
            pass
        with pytest.raises(SimulatedDeviceError, match="cannot be replayed"):
            graph.replay()
        device.record(inside, device.main())
    with pytest.raises(SimulatedDeviceError, match="which has ended"):
        device.wait(inside, device.side)
    with pytest.raises(SimulatedDeviceError, match="cannot wait"):
        device.synchronize(inside)
    graph.destroy()
    with pytest.raises(SimulatedDeviceError, match="destroyed"):
        graph.replay()


def test_a_capture_that_raises_leaves_the_device_usable():
    device = SimulatedDevice()
    with pytest.raises(KeyError), device.capture() as graph:
        raise KeyError("model")
    with pytest.raises(SimulatedDeviceError, match="cannot be replayed"):
        graph.replay()
    forked(device, True, [])[0].replay()
    device.check()


def test_replays_on_two_streams_do_not_overlap():
    for seed in SEEDS:
        device, seen = SimulatedDevice(seed), []
        graph, _handle = forked(device, True, seen)
        other = device.stream("other")
        graph.replay()
        with device.on(other):
            graph.replay()
        device.check()
        assert seen == ["start", "host", "side", "end"] * 2


# host functions and the interpreter lock -----------------------------------------------------------------------------


def test_a_host_function_may_not_call_the_device():
    device, errors = SimulatedDevice(), []
    calls = [
        lambda: device.empty(1),
        lambda: device.event(),
        lambda: device.record(device.side, device.side),
        lambda: device.synchronize(device.side),
        lambda: device.copy(torch.zeros(1), torch.zeros(1), device.side),
        lambda: device.launch(lambda: None, device.side),
        lambda: device.launch_host(lambda: None, device.side, on_error=fail),
    ]
    for call in calls:
        device.launch_host(call, device.side, on_error=errors.append)
    device.synchronize_all()
    assert len(errors) == len(device.misuses) == len(calls)
    with pytest.raises(SimulatedDeviceError, match="may not call the device"):
        device.check()


def test_memory_of_the_wrong_side():
    device = SimulatedDevice()
    with pytest.raises(SimulatedDeviceError, match="would touch host memory"):
        device.launch(lambda: None, device.side, reads=[numbers(device, host=True)])
    with pytest.raises(SimulatedDeviceError, match="would touch device memory"):
        device.launch_host(lambda: None, device.side, on_error=fail, writes=[numbers(device)])


def test_host_functions_are_registered_as_on_a_real_driver():
    device, before, errors = SimulatedDevice(pace=0), num_registered(), []
    device.launch_host(lambda: 1 / 0, device.side, on_error=errors.append)
    assert num_registered() == before + 1
    device.check()
    assert num_registered() == before and [type(error) for error in errors] == [ZeroDivisionError]
    _graph, handle = forked(device, True, [])
    assert num_registered() == before + 1
    handle.release()
    assert num_registered() == before


def test_waiting_with_the_lock_behind_a_host_function_is_a_deadlock():
    for pace, deadlocks in ((0, True), (1, False)):
        device = SimulatedDevice(pace=pace)
        event = event_behind_a_host_function(device)
        if deadlocks:
            with device.holding_lock(), pytest.raises(SimulatedDeadlock) as told:
                device.synchronize(event)
            assert str(told.value) == (
                "deadlock: the calling thread waits for copy from host to device on main waits for host function "
                "build on side waits for the interpreter lock waits for the calling thread"
            )
        # without the lock, or when the function has run already, nothing is wrong
        device.synchronize(event)
        with device.holding_lock():
            device.synchronize(event)
        device.check()


def event_behind_a_host_function(device):
    def build():
        pass

    build.__qualname__ = "build"
    built, copied = device.event(), device.event()
    device.launch_host(build, device.side, on_error=fail)
    device.record(built, device.side)
    device.wait(built, device.main())
    device.copy(numbers(device), numbers(device, host=True), device.main())
    device.record(copied, device.main())
    return copied


def test_launching_with_the_lock_behind_a_function_in_flight_is_a_deadlock():
    outcomes = set()
    for seed, keeps in itertools.product(SEEDS, (False, True)):
        device = SimulatedDevice(seed, launch_keeps_lock=keeps)
        try:
            for _ in range(2):
                device.launch_host(lambda: None, device.side, on_error=fail)
            device.check()
            outcomes.add((keeps, "passes"))
        except SimulatedDeadlock:
            outcomes.add((keeps, "deadlock"))
    # as with a real driver it depends on luck whether the first function is over in time
    assert outcomes == {(False, "passes"), (True, "passes"), (True, "deadlock")}


# the decoder runs on it unchanged ------------------------------------------------------------------------------------


def decoder_on(device):
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=[2])
    return gd.GuidedDecoder(
        gd.GrammarMatcherFactory(vocabulary), max_num_sequences=1, vocab_size_padded=32, device=device
    )


def run_eagerly(decoder, forward=lambda: None):
    """Logits of six steps over (ab)+."""
    guide, all_logits = gd.Guide.regex("(ab)+"), []
    for step in range(6):
        request = gd.GuidedRequest(guide, 0, 0, is_context_init_state=step == 0, is_last_context_chunk=step == 0)
        request.is_generation_in_progress_state, request.new_token = step > 0, (step - 1) % 2
        decoder.add_batch([request])
        forward()
        all_logits.append(torch.zeros(1, 32))
        assert decoder.execute(all_logits[-1]) == []
    return all_logits


def test_the_eager_decoder_gives_the_same_under_every_schedule():
    expected = run_eagerly(decoder_on("cpu"))
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        logits = run_eagerly(decoder_on(device))
        device.check()
        assert all(map(torch.equal, logits, expected))


def test_the_copy_overlaps_the_forward_pass():
    overlapping = 0
    for seed in SEEDS:
        device = SimulatedDevice(seed)
        run_eagerly(decoder_on(device), lambda device=device: device.launch(forward, device.main()))
        device.check()
        names = [step.kind if step.kind == "copy" else step.name for step in device.trace]
        applied = [position for position, name in enumerate(names) if "apply_bitmask" in name]
        # the mask is applied behind the forward pass and the copy of its own step, in whichever order those ran
        for start, stop in itertools.pairwise([-1, *applied]):
            assert {"copy", "forward"} <= set(names[start + 1 : stop])
            overlapping += names[start + 1 : stop] == ["copy", "forward"]
    assert overlapping


def forward():
    pass
