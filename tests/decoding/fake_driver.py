"""A driver for machines without a GPU: a C library that runs host functions on a thread of its own, as CUDA does.

And a device that puts all of its work there, so that decoders run with real threads and the real interpreter lock.
"""

import gc
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from gd_plugin.decoding import hostfunc
from gd_plugin.decoding.hostfunc import HostFunctionHandle, HostFunctions

# A launch waits while a function is in flight, as the driver's own lock does: with the interpreter lock held that hangs.
# Who waits looks for a tenth of a millisecond before it sleeps, as a driver's event synchronisation does.
SOURCE = r"""
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
    } while ((now.tv_sec - begun.tv_sec) * 1000000000L + now.tv_nsec - begun.tv_nsec < 100000);
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

MISSING = None if shutil.which("cc") else "the fake driver needs a C compiler called cc"


def build_driver(folder):
    """Compile the library in `folder`; return its path."""
    folder = Path(folder)
    (folder / "driver.c").write_text(SOURCE)
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", "libdriver.so", "driver.c"], cwd=folder, check=True
    )
    return folder / "libdriver.so"


def num_registered():
    """Host functions that are registered, without those that only wait to be collected."""
    gc.collect()
    return hostfunc.num_registered()


class ThreadedDevice:
    """One queue of work on the driver's thread: copies and kernels too, or, with `only_host`, host functions alone."""

    shares_memory = False

    def __init__(self, driver, *, only_host=False):
        self.device, self.driver, self.only_host = torch.device("cpu"), driver, only_host
        self.side, self._main = SimpleNamespace(cuda_stream=2), SimpleNamespace(cuda_stream=1)
        self.host_functions, self.errors = HostFunctions(driver), []
        self.num_synchronized, self._capturing, self._handle = 0, False, None

    def main(self):
        return self._main

    def empty_host(self, size):
        return torch.zeros(size, dtype=torch.int32)

    empty = empty_host

    def event(self):
        return None

    def record(self, event, stream):
        pass

    wait = record

    def synchronize(self, event):
        self.num_synchronized += 1
        self.driver.synchronize()

    def copy(self, target, source, stream):
        self._put(lambda: target.copy_(source), stream)

    def launch(self, function, stream, *, reads=(), writes=()):
        self._put(function, stream)

    def _put(self, function, stream):
        if self.only_host:
            function()
            return
        handle = self._handle if self._capturing else None
        self.host_functions.launch(function, stream.cuda_stream, on_error=self.errors.append, handle=handle)

    def launch_host(self, function, stream, *, on_error, handle=None, orphan=None, reads=(), writes=()):
        self.host_functions.launch(function, stream.cuda_stream, on_error=on_error, handle=handle, orphan=orphan)

    def is_capturing(self):
        return self._capturing

    @contextmanager
    def capture(self):
        """Yield a function that replays what the block has put on the streams."""
        self._handle, self._capturing = HostFunctionHandle(), True
        self.driver.begin_capture()
        try:
            yield SimpleNamespace(replay=self.driver.replay, handle=self._handle)
        finally:
            self.driver.end_capture()
            self._capturing = False
