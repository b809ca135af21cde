"""Host functions on a stream, from plain Python through the driver library; on a capturing stream they become graph nodes.

In:  a Python callable and a stream.
Out: it runs on a thread of the driver when the stream gets there: once, or at each replay of the graph that captured it.

No compiled extension: one immortal ctypes trampoline is what the driver calls, and its user data is an integer key into a
registry, so that nothing is allocated per launch and nothing can be used after it is freed. An eager entry leaves the
registry when it runs; a captured one lives until its handle is released or dropped. What a replay calls after that is the
launch's `orphan`, if it has one.

The library is a `ctypes.CDLL`, which gives up the interpreter lock around the call. With a `PyDLL` a launch behind a
callback that is in flight would wait for the stream with the lock held, while the callback waits for the lock.

A host function must not call CUDA, must not wait without a bound, and cannot raise into the driver: what it raises goes to
`on_error`. Source: CUDA driver API, cuLaunchHostFunc.
"""

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from gd_plugin.errors import GuidedDecodingError

if TYPE_CHECKING:
    import torch

    from gd_plugin.masks.device import MaskDevice

__all__ = ["HostFunctionDevice", "HostFunctionHandle", "HostFunctions", "load_driver", "open_host_functions"]

_TRAMPOLINE_TYPE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_LIBRARIES: Final = ("libcuda.so.1", "nvcuda.dll")
# how the device waits for a host function: asleep, or spinning, which is faster and takes a core
_SPIN: Final = 1


@dataclass(slots=True)
class _Entry:
    function: Callable[[], Any]
    on_error: Callable[[BaseException], Any]
    is_captured: bool
    orphan: Callable[[], Any] | None = None


# All launches of the process share one registry, because they share the trampoline, which must outlive every graph.
_entries: dict[int, _Entry] = {}
_keys = itertools.count(1)
# reentrant: the collector may drop a handle while its own thread holds it
_lock = threading.RLock()


# threads of the driver that keep their Python state: an attribute of it is there as long as the state is
_state = threading.local()


def _keep_thread_state() -> None:
    """Keep this thread's Python state once the callback is over.

    ctypes makes a state for each call from a thread that Python did not start, and drops it behind the call, stack memory
    included, which takes longer than all of a launch. One more holder keeps it until the thread ends: a driver has few.
    Source: Python/C API, PyGILState_Ensure.
    """
    if not hasattr(_state, "is_kept"):
        _state.is_kept = True
        ctypes.pythonapi.PyGILState_Ensure()


def _run(user_data: int | None) -> None:
    """What the driver calls, with the interpreter lock taken by ctypes."""
    entry = None
    try:
        _keep_thread_state()
        with _lock:
            entry = _entries.get(user_data or 0)
            if entry is not None and not entry.is_captured:
                del _entries[user_data or 0]
        if entry is not None:
            entry.function()
    except BaseException as error:
        # nothing may leave: ctypes would print it and the driver cannot know
        try:
            if entry is not None:
                entry.on_error(error)
        except BaseException:
            pass


_trampoline = _TRAMPOLINE_TYPE(_run)


def load_driver(path: str | None = None) -> ctypes.CDLL:
    """Load the CUDA driver library.

    Args:
        path: a library with `cuLaunchHostFunc`; None is the system's CUDA driver.

    Raises:
        GuidedDecodingError: there is none, or it lacks the function.
    """
    problems = []
    for name in _LIBRARIES if path is None else (path,):
        try:
            library = ctypes.CDLL(name)
            launch = library.cuLaunchHostFunc
        except (OSError, AttributeError) as error:
            problems.append(str(error))
            continue
        launch.argtypes = [ctypes.c_void_p, _TRAMPOLINE_TYPE, ctypes.c_void_p]
        launch.restype = ctypes.c_int
        return library
    raise GuidedDecodingError(
        f"host functions need the CUDA driver library, which cannot be loaded ({'; '.join(problems)}); use GuidedDecoder, "
        "which runs outside graphs, on machines without one"
    )


def _forget(keys: Iterable[int]) -> None:
    with _lock:
        for key in keys:
            _entries.pop(key, None)


def _ignore(error: BaseException) -> None:
    """An orphan has nobody left to tell: whatever launched it may be gone, and must not be kept for this."""


def _release(keys: list[tuple[int, list[int]]]) -> None:
    """Replace captured functions by their orphans, whose keys go to the given lists, and forget those without one."""
    with _lock:
        for key, orphans in keys:
            entry = _entries.pop(key, None)
            if entry is not None and entry.orphan is not None:
                _entries[key] = _Entry(entry.orphan, _ignore, True)
                orphans.append(key)
        keys.clear()


class HostFunctionHandle:
    """Keeps the host functions of one captured graph: release or drop it when no replay of the graph is left."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, list[int]]] = []
        self._finalizer = weakref.finalize(self, _release, self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def release(self) -> None:
        """Forget the functions; a replay that still runs calls their orphans."""
        _release(self._keys)


class HostFunctions:
    """Launches host functions through one driver library.

    Args:
        driver: what `load_driver` returns, or an object with its `cuLaunchHostFunc`; None loads the system's.
        spin: have the device spin instead of sleeping while it waits for a function (CUDA 13).

    Raises:
        GuidedDecodingError: there is no driver library, or it cannot spin.
    """

    def __init__(self, driver: Any = None, *, spin: bool = False) -> None:
        self._driver = load_driver() if driver is None else driver
        if spin and not hasattr(self._driver, "cuLaunchHostFunc_v2"):
            raise GuidedDecodingError(
                "this CUDA driver cannot spin for host functions: it needs CUDA 13; pass spin=False"
            )
        if spin:
            launch = self._driver.cuLaunchHostFunc_v2
            launch.argtypes = [ctypes.c_void_p, _TRAMPOLINE_TYPE, ctypes.c_void_p, ctypes.c_uint]
            launch.restype = ctypes.c_int
        self._spin = spin
        # released functions whose orphans can still be called, as long as this object is there
        self._orphans: list[int] = []
        self._finalizer = weakref.finalize(self, _forget, self._orphans)

    def launch(
        self,
        function: Callable[[], Any],
        stream: int,
        *,
        on_error: Callable[[BaseException], Any],
        handle: HostFunctionHandle | None = None,
        orphan: Callable[[], Any] | None = None,
    ) -> None:
        """Put `function` on a stream.

        Args:
            function: called without arguments on a thread of the driver, with the interpreter lock.
            stream: the stream's address, `torch.cuda.Stream.cuda_stream`.
            on_error: called there with whatever `function` raises.
            handle: owner of the entry if the stream is being captured; None is an eager launch.
            orphan: called in place of `function` by replays that come after the handle was released.

        Raises:
            GuidedDecodingError: the driver refused; nothing stays registered.
        """
        with _lock:
            key = next(_keys)
            _entries[key] = _Entry(function, on_error, handle is not None, orphan)
            if handle is not None:
                handle._keys.append((key, self._orphans))
        try:
            if self._spin:
                status = self._driver.cuLaunchHostFunc_v2(stream, _trampoline, key, _SPIN)
            else:
                status = self._driver.cuLaunchHostFunc(stream, _trampoline, key)
            if status != 0:
                raise GuidedDecodingError(f"cuLaunchHostFunc failed with CUDA error {status}")
        except BaseException:
            with _lock:
                _entries.pop(key, None)
                if handle is not None:
                    handle._keys.remove((key, self._orphans))
            raise


class HostFunctionDevice(Protocol):
    """What a `MaskDevice` has besides if it launches host functions in a way of its own."""

    def launch_host(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        on_error: Callable[[BaseException], Any],
        handle: HostFunctionHandle | None = None,
        orphan: Callable[[], Any] | None = None,
        reads: "Sequence[torch.Tensor]" = (),
        writes: "Sequence[torch.Tensor]" = (),
    ) -> None:
        """Put `function` on `stream`, as `HostFunctions.launch` does; it touches `reads` and `writes` in host memory."""


class _AtOnce:
    """Host functions of the CPU, where a stream is the calling thread."""

    def launch_host(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        on_error: Callable[[BaseException], Any],
        handle: HostFunctionHandle | None = None,
        orphan: Callable[[], Any] | None = None,
        reads: "Sequence[torch.Tensor]" = (),
        writes: "Sequence[torch.Tensor]" = (),
    ) -> None:
        try:
            function()
        except Exception as error:
            on_error(error)


class _ThroughDriver:
    """Host functions of CUDA streams."""

    def __init__(self, host_functions: HostFunctions) -> None:
        self._host_functions = host_functions

    def launch_host(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        on_error: Callable[[BaseException], Any],
        handle: HostFunctionHandle | None = None,
        orphan: Callable[[], Any] | None = None,
        reads: "Sequence[torch.Tensor]" = (),
        writes: "Sequence[torch.Tensor]" = (),
    ) -> None:
        self._host_functions.launch(function, stream.cuda_stream, on_error=on_error, handle=handle, orphan=orphan)


def open_host_functions(device: "MaskDevice", *, spin: bool = False) -> HostFunctionDevice:
    """Return what launches host functions on a device: the device itself, the CUDA driver, or, on the CPU, a call.

    Raises:
        GuidedDecodingError: a CUDA device, and no driver library that can be loaded, or none that can `spin`.
    """
    if hasattr(device, "launch_host"):
        return cast(HostFunctionDevice, device)
    if device.side is None:
        # the CPU has no streams
        return _AtOnce()
    return _ThroughDriver(HostFunctions(spin=spin))


def num_registered() -> int:
    """Entries in the registry: launches that have not run yet, and captured functions."""
    with _lock:
        return len(_entries)
