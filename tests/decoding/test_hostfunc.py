"""Host functions through a fake driver: a C library that runs them on a thread of its own, as CUDA does."""

import ctypes.util
import shutil
import subprocess
import threading

import pytest

import gd_plugin as gd
from gd_plugin.decoding.hostfunc import HostFunctionHandle, HostFunctions, load_driver, num_registered

# A launch waits while a function is in flight, as the driver's own lock does: with the interpreter lock held that hangs.
SOURCE = r"""
#include <pthread.h>
#include <unistd.h>
typedef void (*host_fn)(void *);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static host_fn functions[4096]; static void *data[4096];
static long head, tail; static int running, started, capturing;
static host_fn nodes[64]; static void *node_data[64]; static int num_nodes;
static void *worker(void *unused) {
    for (;;) {
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
void begin_capture(void) { num_nodes = 0; capturing = 1; }
void end_capture(void) { capturing = 0; }
void replay(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_nodes; i++) push(nodes[i], node_data[i]);
    pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock);
}
void synchronize(void) {
    pthread_mutex_lock(&lock);
    while (head != tail) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}
"""

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the fake driver needs a C compiler called cc"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(SOURCE)
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", "libdriver.so", "driver.c"], cwd=folder, check=True
    )
    return load_driver(str(folder / "libdriver.so"))


def fail(error):
    raise AssertionError(error)


def test_eager_functions_and_replays_of_a_graph(driver):
    host, handle, counter = HostFunctions(driver), HostFunctionHandle(), []
    before = num_registered()
    for _ in range(5):
        host.launch(lambda: counter.append(1), 1, on_error=fail)
    driver.synchronize()
    driver.begin_capture()
    for _ in range(2):
        host.launch(lambda: counter.append(1), 1, on_error=fail, handle=handle)
    driver.end_capture()
    for _ in range(10):
        driver.replay()
    driver.synchronize()
    assert len(counter) == 25
    # eager ones have freed themselves
    assert num_registered() - before == len(handle) == 2
    handle.release()
    assert num_registered() == before
    driver.replay()
    driver.synchronize()
    assert len(counter) == 25


def test_a_launch_behind_a_function_in_flight_does_not_deadlock(driver):
    host, entered, done = HostFunctions(driver), threading.Event(), []

    def slow():
        entered.set()
        threading.Event().wait(0.1)
        done.append("first")

    host.launch(slow, 1, on_error=fail)
    assert entered.wait(30)
    second = threading.Thread(target=host.launch, args=(lambda: done.append("second"), 1), kwargs={"on_error": fail})
    second.start()
    second.join(30)
    assert not second.is_alive()
    driver.synchronize()
    assert done == ["first", "second"]


def test_what_a_function_raises_is_recorded_and_never_leaves(driver, capfd):
    host, errors = HostFunctions(driver), []

    def broken():
        raise KeyError("gone")

    host.launch(broken, 1, on_error=errors.append)
    host.launch(broken, 1, on_error=fail)
    driver.synchronize()
    assert [type(error) for error in errors] == [KeyError]
    assert capfd.readouterr() == ("", "")


def test_a_refused_launch_leaves_nothing_behind(driver):
    host, handle, before = HostFunctions(driver), HostFunctionHandle(), num_registered()
    for owner in (None, handle):
        with pytest.raises(gd.GuidedDecodingError, match="CUDA error 400"):
            host.launch(lambda: None, 99, on_error=fail, handle=owner)
    assert num_registered() == before and len(handle) == 0


def test_no_driver_library(tmp_path):
    with pytest.raises(gd.GuidedDecodingError, match="cannot be loaded"):
        load_driver(str(tmp_path / "libnowhere.so"))
    with pytest.raises(gd.GuidedDecodingError, match="cuLaunchHostFunc"):
        load_driver(ctypes.util.find_library("m") or "libm.so.6")
