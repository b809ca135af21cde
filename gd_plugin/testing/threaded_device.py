"""A CUDA driver for machines without a GPU: a C library that runs host functions on a thread of its own.

In:  the system's C compiler, a folder; then launches through the library, and work put on a device that uses it.
Out: the way through ctypes, the change of threads and the interpreter lock as they are on a real device; all of the work in
one queue. Orders of work are not tried out here: `SimulatedDevice` does that.
"""

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from gd_plugin.decoding.hostfunc import HostFunctionHandle, HostFunctions
from gd_plugin.errors import GuidedDecodingError

__all__ = ["ThreadedDevice", "build_fake_driver"]

# A launch waits while a function is in flight, as the driver's own lock does: with the interpreter lock held that hangs.
# Who waits looks for 2 ms before it sleeps: a driver's event synchronisation does not sleep at all.
_SOURCE: Final = r"""
#include <pthread.h>
#include <sched.h>
#include <time.h>
typedef void (*host_fn)(void *);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static host_fn functions[4096]; static void *data[4096];
static long head, tail; static int running, started, capturing;
static host_fn nodes[64]; static void *node_data[64]; static int num_nodes;
static int is_empty(void) {
    return __atomic_load_n(&head, __ATOMIC_ACQUIRE) == __atomic_load_n(&tail, __ATOMIC_ACQUIRE);
}
static void look(int until_empty) {
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    do {
        if (is_empty() == until_empty) return;
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - begun.tv_sec) * 1000000000L + now.tv_nsec - begun.tv_nsec < 2000000);
}
static void *worker(void *unused) {
    for (;;) {
        look(0);
        pthread_mutex_lock(&lock);
        while (head == tail) pthread_cond_wait(&changed, &lock);
        host_fn f = functions[head % 4096]; void *d = data[head % 4096]; running = 1;
        pthread_mutex_unlock(&lock);
        f(d);
        pthread_mutex_lock(&lock);
        head++; running = 0;
        pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock);
    }
    return 0;
}
static void push(host_fn f, void *d) { functions[tail % 4096] = f; data[tail % 4096] = d; tail++; }
int cuLaunchHostFunc(void *stream, host_fn f, void *d) {
    if (stream == (void *)99) return 400;
    pthread_mutex_lock(&lock);
    if (capturing) { nodes[num_nodes] = f; node_data[num_nodes++] = d; pthread_mutex_unlock(&lock); return 0; }
    if (!started) { pthread_t t; pthread_create(&t, 0, worker, 0); pthread_detach(t); started = 1; }
    while (running) pthread_cond_wait(&changed, &lock);
    push(f, d);
    pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock);
    return 0;
}
static int spinning;
int cuLaunchHostFunc_v2(void *stream, host_fn f, void *d, unsigned int mode) {
    if (mode == 1) spinning++;
    return cuLaunchHostFunc(stream, f, d);
}
int num_spinning(void) { return spinning; }
void begin_capture(void) { num_nodes = 0; capturing = 1; }
void end_capture(void) { capturing = 0; }
void replay(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_nodes; i++) push(nodes[i], node_data[i]);
    pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock);
}
void synchronize(void) {
    look(1);
    pthread_mutex_lock(&lock);
    while (head != tail) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}
"""


def build_fake_driver(folder: str | Path) -> Path:
    """Compile the library in `folder` and return its path, for `gd_plugin.decoding.hostfunc.load_driver`.

    Besides `cuLaunchHostFunc` and `cuLaunchHostFunc_v2` it has `begin_capture`, `end_capture`, `replay`, `synchronize` and
    `num_spinning`. It has one graph and one queue, whatever the stream; a launch on stream 99 is refused.

    Raises:
        GuidedDecodingError: there is no C compiler called cc, or it fails.
    """
    folder = Path(folder)
    compiler = shutil.which("cc")
    if compiler is None:
        raise GuidedDecodingError("the fake driver needs a C compiler called cc, and there is none on the PATH")
    (folder / "driver.c").write_text(_SOURCE)
    command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", "libdriver.so", "driver.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GuidedDecodingError(f"the C compiler {compiler} failed on the fake driver: {done.stderr[-1000:]}")
    return folder / "libdriver.so"


class ThreadedDevice:
    """A `MaskDevice` and `HostFunctionDevice` whose work runs on the fake driver's thread, in the order it was put there.

    Args:
        driver: what `load_driver` makes of `build_fake_driver`.
        only_host: run copies and kernels at once, on the calling thread, and host functions alone on the driver's.

    Attributes:
        num_synchronized: host waits so far.
        errors: what copies and kernels have raised.
    """

    shares_memory = False

    def __init__(self, driver: Any, *, only_host: bool = False) -> None:
        self.device = torch.device("cpu")
        self.side = SimpleNamespace(cuda_stream=2)
        self.num_synchronized = 0
        self.errors: list[BaseException] = []
        self._driver = driver
        self._only_host = only_host
        self._main = SimpleNamespace(cuda_stream=1)
        self._host_functions = HostFunctions(driver)
        self._is_capturing = False
        self._handle: HostFunctionHandle | None = None

    def main(self) -> Any:
        """See `MaskDevice.main`."""
        return self._main

    def empty_host(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty_host`."""
        # kept out of inference mode, whose tensors other threads may not write
        with torch.inference_mode(False):
            return torch.zeros(size, dtype=torch.int32)

    def empty(self, size: int) -> torch.Tensor:
        """See `MaskDevice.empty`."""
        return self.empty_host(size)

    def event(self) -> Any:
        """See `MaskDevice.event`."""
        return None

    def record(self, event: Any, stream: Any) -> None:
        """See `MaskDevice.record`. One queue is in order by itself."""

    def wait(self, event: Any, stream: Any) -> None:
        """See `MaskDevice.wait`."""

    def synchronize(self, event: Any) -> None:
        """Wait for all of the queue, without the interpreter lock."""
        self.num_synchronized += 1
        self._driver.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """See `MaskDevice.copy`."""
        self._put(lambda: target.copy_(source), stream)

    def launch(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """See `MaskDevice.launch`."""
        self._put(function, stream)

    def _put(self, function: Callable[[], Any], stream: Any) -> None:
        if self._only_host:
            function()
            return
        handle = self._handle if self._is_capturing else None
        self._host_functions.launch(function, stream.cuda_stream, on_error=self.errors.append, handle=handle)

    def launch_host(
        self,
        function: Callable[[], Any],
        stream: Any,
        *,
        on_error: Callable[[BaseException], Any],
        handle: HostFunctionHandle | None = None,
        orphan: Callable[[], Any] | None = None,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """See `HostFunctionDevice.launch_host`."""
        self._host_functions.launch(function, stream.cuda_stream, on_error=on_error, handle=handle, orphan=orphan)

    def is_capturing(self) -> bool:
        """See `MaskDevice.is_capturing`."""
        return self._is_capturing

    @contextmanager
    def capture(self) -> "Iterator[ThreadedGraph]":
        """Capture what the block puts on the streams, in place of the graph captured before."""
        self._handle, self._is_capturing = HostFunctionHandle(), True
        self._driver.begin_capture()
        try:
            yield ThreadedGraph(self._driver, self._handle)
        finally:
            self._driver.end_capture()
            self._is_capturing = False


class ThreadedGraph:
    """What a `ThreadedDevice` has captured; it keeps the copies and kernels, not the host functions of others."""

    def __init__(self, driver: Any, handle: HostFunctionHandle) -> None:
        self._driver = driver
        self._handle = handle

    def replay(self) -> None:
        """Put the captured work into the queue once more."""
        self._driver.replay()
