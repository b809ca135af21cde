"""A GPU's streams, events and graphs in plain Python, for proving an order of work on a machine without one.

In:  work put on streams by a decoder or an engine, through the methods of `gd_plugin.masks.device.MaskDevice`.
Out: the same results as a device would give under one of its possible schedules, chosen by a seed, and what is wrong
with the order under any: races, forks that a capture leaves open, deadlocks on the interpreter lock.

What is kept from a real device:

    work on a stream runs in order; across streams only events order it       a copy reads its source when it runs
    a capture records work and runs none; replays run it again                host functions need the interpreter lock
    in a capture the host cannot wait, work from outside cannot be waited     and may not call the device
    for, and every stream that was forked off must be joined

Nothing runs on another thread: each call into the device lets a random number of pieces run whose turn it could be, and
a host wait runs them until it is over. The same seed gives the same run. Time is not simulated. Races are found in what
work says it reads and writes (copies say it by themselves), whatever order the run has taken.

Source: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution" and "CUDA Graphs".
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gd_plugin.decoding.hostfunc import HostFunctionHandle, HostFunctions
from gd_plugin.testing.simulated_device_memory import AccessLog

__all__ = [
    "SimulatedDeadlock",
    "SimulatedDevice",
    "SimulatedDeviceError",
    "SimulatedEvent",
    "SimulatedGraph",
    "SimulatedStream",
    "Step",
]

# lane of the calling thread
_CALLER = "the calling thread"
_LOCK = "the interpreter lock"


class SimulatedDeviceError(RuntimeError):
    """The device was used in a way that a real one refuses, or that goes wrong on it."""


class SimulatedDeadlock(SimulatedDeviceError):
    """Everything waits for something that waits for it."""


class Step(NamedTuple):
    """A piece of work that has run: "copy", "kernel" or "host function", its name, its stream's name."""

    kind: str
    name: str
    stream: str


@dataclass(eq=False, slots=True)
class _Work:
    step: Step
    function: Callable[[], object]
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    behind: tuple["_Work", ...]
    lane: str
    clock: Mapping[str, int]
    is_done: bool = False

    def __str__(self) -> str:
        return f"{self.step.kind} {self.step.name} on {self.step.stream}"


@dataclass(eq=False, slots=True)
class _Capture:
    graph: "SimulatedGraph"
    origin: "SimulatedStream"
    # streams that take part, with what they were behind before
    outside: dict["SimulatedStream", frozenset[_Work]] = field(default_factory=dict)


@dataclass(eq=False)
class SimulatedStream:
    """A stream. `cuda_stream` is its address, as in torch."""

    name: str
    cuda_stream: int
    _frontier: frozenset[_Work] = frozenset()
    _capture: _Capture | None = None


@dataclass(eq=False)
class SimulatedEvent:
    """An event: what its stream was behind when it was recorded; None if it never was."""

    _frontier: frozenset[_Work] | None = None
    _capture: _Capture | None = None


class SimulatedGraph:
    """What one capture recorded."""

    def __init__(self, device: "SimulatedDevice", name: str) -> None:
        self._device = device
        self._name = name
        self._work: list[_Work] = []
        self._last: frozenset[_Work] = frozenset()
        self._is_ready = False

    @property
    def steps(self) -> list[Step]:
        """The captured work, in the order of capture."""
        return [work.step for work in self._work]

    def replay(self) -> None:
        """Put all of the work on the current stream once more.

        Raises:
            SimulatedDeviceError: the capture failed or the graph was destroyed, or another capture is under way.
        """
        if not self._is_ready:
            raise SimulatedDeviceError(f"{self._name} cannot be replayed: its capture failed or it was destroyed")
        self._device._replay(self)

    def destroy(self) -> None:
        """Give the graph up. Replays that are under way finish, as on a device."""
        self._is_ready = False
        self._work.clear()


class SimulatedDevice:
    """A device that runs its work in a random order among those that its streams and events allow.

    Fits everything that takes a `MaskDevice`, so `GuidedDecoder(..., device=SimulatedDevice(seed))`.

    Args:
        seed: chooses the schedule.
        pace: probability that a call lets one more piece of work run: 0 lets everything wait until somebody waits for
            it, 1 runs all at once; None has the seed choose.
        launch_keeps_lock: launching a host function keeps the interpreter lock, as a call through `ctypes.PyDLL` does.

    Attributes:
        device, shares_memory, side: see `MaskDevice`.
        trace: what has run, in order.
        races: accesses to the same memory that nothing orders.
        misuses: what the device refused inside host functions, which cannot raise.
    """

    shares_memory = False

    def __init__(self, seed: int = 0, *, pace: float | None = None, launch_keeps_lock: bool = False) -> None:
        self.device = torch.device("cpu")
        self.trace: list[Step] = []
        self.races: list[str] = []
        self.misuses: list[str] = []
        self._random = random.Random(seed)
        self._pace = self._random.choice((0.0, 0.2, 0.5, 0.8, 0.95)) if pace is None else pace
        self._launch_keeps_lock = launch_keeps_lock
        self._streams: dict[int, SimulatedStream] = {}
        self._current = self.stream("main")
        self.side = self.stream("side")
        self._capture_stream = self.stream("capture")
        self._capture: _Capture | None = None
        self._num_graphs = 0
        self._waiting: list[_Work] = []
        self._log = AccessLog()
        self._host_functions = HostFunctions(_Driver(self._enqueue_host_function))
        self._declared: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], str] = ((), (), "")
        self._caller_holds_lock = False
        self._is_in_host_function = False
        self._caller_clock: dict[str, int] = {_CALLER: 0}
        self._lane_counts: dict[str, int] = {}
        # memory handed out, by address; holding it keeps the address from being used again
        self._host_memory: dict[int, torch.Tensor] = {}
        self._device_memory: dict[int, torch.Tensor] = {}

    # what MaskDevice asks for ---------------------------------------------------------------------------------------

    def main(self) -> SimulatedStream:
        """See `MaskDevice.main`."""
        return self._current

    def empty_host(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty_host`."""
        return self._allocate(size, self._host_memory)

    def empty(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty`."""
        return self._allocate(size, self._device_memory)

    def _allocate(self, size: int, memory: dict[int, torch.Tensor]) -> torch.Tensor:
        self._refuse_in_host_function("allocate")
        with torch.inference_mode(False):
            tensor = torch.zeros(size, dtype=torch.int32)
        memory[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def event(self) -> SimulatedEvent:
        """See `MaskDevice.event`."""
        self._refuse_in_host_function("make an event")
        return SimulatedEvent()

    def record(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        """See `MaskDevice.record`."""
        self._refuse_in_host_function("record an event")
        event._frontier, event._capture = stream._frontier, stream._capture
        self._progress()

    def wait(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        """See `MaskDevice.wait`.

        Raises:
            SimulatedDeviceError: the wait would lead into a capture or out of one.
        """
        self._refuse_in_host_function("wait for an event")
        capture = event._capture
        if event._frontier is None:
            return
        if capture is None and stream._capture is not None:
            raise SimulatedDeviceError(
                f"{stream.name} is being captured and cannot wait for work from outside the capture; record the "
                "event inside it"
            )
        if capture is not None and capture is not self._capture:
            raise SimulatedDeviceError(
                f"{stream.name} cannot wait for an event that was last recorded in a capture which has ended"
            )
        if capture is not None and stream._capture is None:
            capture.outside[stream] = stream._frontier
            stream._frontier, stream._capture = frozenset(), capture
        stream._frontier |= event._frontier
        self._progress()

    def synchronize(self, event: SimulatedEvent) -> None:
        """See `MaskDevice.synchronize`.

        Raises:
            SimulatedDeviceError: a capture is under way, or the event was recorded in one.
            SimulatedDeadlock: what the event is behind can never run.
        """
        self._refuse_in_host_function("wait for the device")
        if self._capture is not None or event._capture is not None:
            raise SimulatedDeviceError("the host cannot wait for a stream that is being captured")
        self._progress()
        self._run_until(event._frontier or ())
        for work in event._frontier or ():
            _merge(self._caller_clock, work.clock)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: SimulatedStream) -> None:
        """See `MaskDevice.copy`."""
        kinds = (self._kind(source), self._kind(target))
        step = Step("copy", "from {} to {}".format(*kinds), stream.name)
        self._enqueue(step, lambda: target.copy_(source), stream, (source,), (target,))

    def launch(
        self,
        function: Callable[[], Any],
        stream: SimulatedStream,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """See `MaskDevice.launch`.

        Raises:
            SimulatedDeviceError: it touches host memory.
        """
        if any(self._kind(tensor) == "host" for tensor in (*reads, *writes)):
            raise SimulatedDeviceError(f"kernel {_name(function)} would touch host memory")
        self._enqueue(Step("kernel", _name(function), stream.name), function, stream, reads, writes)

    def launch_host(
        self,
        function: Callable[[], Any],
        stream: SimulatedStream,
        *,
        on_error: Callable[[BaseException], Any],
        handle: HostFunctionHandle | None = None,
        orphan: Callable[[], Any] | None = None,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """See `HostFunctionDevice.launch_host`.

        Raises:
            SimulatedDeviceError: it touches device memory.
            SimulatedDeadlock: the lock is kept by the launch and needed by a host function in front of it.
        """
        self._refuse_in_host_function("launch a host function")
        if any(self._kind(tensor) == "device" for tensor in (*reads, *writes)):
            raise SimulatedDeviceError(f"host function {_name(function)} would touch device memory")
        if self._launch_keeps_lock:
            # the driver lets no launch pass while it calls a host function
            in_flight = [work for work in self._ready() if work.step.kind == "host function"]
            with self.holding_lock():
                self._run_until(in_flight)
        self._declared = (reads, writes, _name(function))
        self._host_functions.launch(function, stream.cuda_stream, on_error=on_error, handle=handle, orphan=orphan)

    def is_capturing(self) -> bool:
        """See `MaskDevice.is_capturing`."""
        return self._capture is not None

    # what an engine does besides ------------------------------------------------------------------------------------

    def stream(self, name: str) -> SimulatedStream:
        """Return a new stream."""
        stream = SimulatedStream(name, len(self._streams) + 1)
        self._streams[stream.cuda_stream] = stream
        return stream

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Make `stream` the one that `main` returns."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def capture(self) -> Iterator[SimulatedGraph]:
        """Capture what the block puts on the current stream, a fresh one, and on the streams it forks to.

        Raises:
            SimulatedDeviceError: a capture is under way already, or the block leaves a fork open.
        """
        if self._capture is not None:
            raise SimulatedDeviceError("a capture is under way")
        self._num_graphs += 1
        graph, origin = SimulatedGraph(self, f"graph {self._num_graphs}"), self._capture_stream
        capture = self._capture = _Capture(graph, origin, {origin: origin._frontier})
        origin._frontier, origin._capture = frozenset(), capture
        try:
            with self.on(origin):
                yield graph
            joined = _with_ancestors(origin._frontier)
            for work in graph._work:
                if work not in joined:
                    raise SimulatedDeviceError(
                        f"the capture leaves a fork open: {origin.name} does not wait for {work}; record an event "
                        "behind it and wait for that"
                    )
            graph._is_ready = True
        finally:
            for stream, frontier in capture.outside.items():
                stream._frontier, stream._capture = frontier, None
            self._capture = None

    @contextmanager
    def holding_lock(self) -> Iterator[None]:
        """Make the block one that keeps the interpreter lock, as native code does that forgets to give it up."""
        before, self._caller_holds_lock = self._caller_holds_lock, True
        try:
            yield
        finally:
            self._caller_holds_lock = before

    def synchronize_all(self) -> None:
        """Hold the calling thread until everything has run.

        Raises:
            SimulatedDeadlock: something can never run.
        """
        everything = list(self._waiting)
        self._run_until(everything)
        for work in everything:
            _merge(self._caller_clock, work.clock)

    def host_access(self, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()) -> None:
        """Say that the calling thread touches memory now, so that races with it are found."""
        self._caller_clock[_CALLER] += 1
        self._note(_CALLER, _CALLER, self._caller_clock, reads, writes)

    def check(self) -> None:
        """Let everything run and judge it.

        Raises:
            SimulatedDeadlock: something can never run.
            SimulatedDeviceError: there were races, or host functions called the device.
        """
        self.synchronize_all()
        if self.races or self.misuses:
            raise SimulatedDeviceError("; ".join(self.races + self.misuses))

    # order ----------------------------------------------------------------------------------------------------------

    def _enqueue(
        self,
        step: Step,
        function: Callable[[], object],
        stream: SimulatedStream,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        self._refuse_in_host_function(f"put {step.kind} {step.name} on a stream")
        behind = tuple(stream._frontier)
        if stream._capture is not None:
            work = _Work(step, function, tuple(reads), tuple(writes), behind, stream.name, {})
            stream._capture.graph._work.append(work)
        else:
            work = self._add(step, function, tuple(reads), tuple(writes), behind, stream.name)
        stream._frontier = frozenset((work,))
        self._progress()

    def _add(
        self,
        step: Step,
        function: Callable[[], object],
        reads: tuple[torch.Tensor, ...],
        writes: tuple[torch.Tensor, ...],
        behind: tuple[_Work, ...],
        lane: str,
    ) -> _Work:
        clock = dict(self._caller_clock)
        for work in behind:
            _merge(clock, work.clock)
        clock[lane] = self._lane_counts[lane] = self._lane_counts.get(lane, 0) + 1
        work = _Work(step, function, reads, writes, behind, lane, clock)
        self._waiting.append(work)
        return work

    def _enqueue_host_function(self, stream: int, function: Callable[[int], object], key: int) -> None:
        reads, writes, name = self._declared
        on = self._streams[stream]
        self._enqueue(Step("host function", name, on.name), lambda: function(key), on, reads, writes)

    def _replay(self, graph: SimulatedGraph) -> None:
        self._refuse_in_host_function("replay a graph")
        if self._capture is not None:
            raise SimulatedDeviceError("a graph cannot be replayed while another is captured")
        # a graph does not run beside itself, whatever streams it is put on
        before = tuple(self._current._frontier | graph._last)
        new: dict[_Work, _Work] = {}
        for work in graph._work:
            behind = tuple(new[one] for one in work.behind) or before
            lane = f"{graph._name}, {work.lane}"
            new[work] = self._add(work.step, work.function, work.reads, work.writes, behind, lane)
        if new:
            graph._last = self._current._frontier = frozenset(new.values())
        self._progress()

    def _ready(self) -> list[_Work]:
        return [
            work
            for work in self._waiting
            if all(one.is_done for one in work.behind)
            and not (self._caller_holds_lock and work.step.kind == "host function")
        ]

    def _progress(self) -> None:
        """Let some work run, as it does beside the calling thread."""
        while self._waiting and self._random.random() < self._pace:
            ready = self._ready()
            if not ready:
                return
            self._run(self._random.choice(ready))

    def _run_until(self, goal: Collection[_Work]) -> None:
        while any(not work.is_done for work in goal):
            ready = self._ready()
            if not ready:
                raise SimulatedDeadlock(self._cycle(goal))
            self._run(self._random.choice(ready))

    def _run(self, work: _Work) -> None:
        self._waiting.remove(work)
        self._note(str(work), work.lane, work.clock, work.reads, work.writes)
        self._is_in_host_function = work.step.kind == "host function"
        try:
            work.function()
        finally:
            self._is_in_host_function = False
            work.is_done = True
            work.behind = ()
            self.trace.append(work.step)

    def _note(
        self,
        who: str,
        lane: str,
        clock: Mapping[str, int],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self.races += self._log.note(who, lane, clock, tensor, is_write=is_write)

    # what is refused ------------------------------------------------------------------------------------------------

    def _kind(self, tensor: torch.Tensor) -> str:
        """Where a tensor is; what was not allocated here is taken for the device's."""
        return "host" if tensor.untyped_storage().data_ptr() in self._host_memory else "device"

    def _refuse_in_host_function(self, what: str) -> None:
        if self._is_in_host_function:
            self.misuses.append(f"a host function tried to {what}; host functions may not call the device")
            raise SimulatedDeviceError(self.misuses[-1])

    def _cycle(self, goal: Collection[_Work]) -> str:
        """Describe the circle of waits, found in the graph of who waits for whom."""
        waits_for: dict[object, list[object]] = {_CALLER: [work for work in goal if not work.is_done], _LOCK: [_CALLER]}
        for work in self._waiting:
            waits_for[work] = [one for one in work.behind if not one.is_done]
            if work.step.kind == "host function" and self._caller_holds_lock:
                waits_for[work].append(_LOCK)
        path = _find_cycle(waits_for, _CALLER)
        return "deadlock: " + " waits for ".join(str(node) for node in path)


class _Driver:
    """The one function of a driver library that `HostFunctions` calls."""

    def __init__(self, enqueue: Callable[[int, Callable[[int], object], int], None]) -> None:
        self._enqueue = enqueue

    def cuLaunchHostFunc(self, stream: int, function: Callable[[int], object], key: int) -> int:
        self._enqueue(stream, function, key)
        return 0


def _merge(clock: dict[str, int], other: Mapping[str, int]) -> None:
    for lane, count in other.items():
        if count > clock.get(lane, 0):
            clock[lane] = count


def _with_ancestors(frontier: Collection[_Work]) -> set[_Work]:
    found, left = set(frontier), list(frontier)
    while left:
        for work in left.pop().behind:
            if work not in found:
                found.add(work)
                left.append(work)
    return found


def _find_cycle(edges: Mapping[object, Sequence[object]], start: object) -> list[object]:
    """Return a path from `start` back to itself, or as far as the first dead end if there is none."""
    left: list[list[object]] = [[start]]
    seen: set[object] = set()
    path = left[0]
    while left:
        path = left.pop()
        for node in edges.get(path[-1], ()):
            if node == start:
                return [*path, start]
            if node not in seen:
                seen.add(node)
                left.append([*path, node])
    return path


def _name(function: Callable[..., object]) -> str:
    """The function's own name, of a partial the function inside."""
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", type(function).__name__).removesuffix(".<locals>.<lambda>")
