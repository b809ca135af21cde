"""Host functions through a fake driver: a C library that runs them on a thread of its own, as CUDA does."""

import ctypes.util
import gc
import subprocess
import sys
import threading

import pytest

import gd_plugin as gd
from gd_plugin.decoding.hostfunc import HostFunctionHandle, HostFunctions, load_driver
from gd_plugin.testing import build_fake_driver
from tests.decoding.capture_engine import num_registered

pytestmark = pytest.mark.timeout(60)


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


def test_a_fake_driver_that_cannot_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(gd.GuidedDecodingError, match="needs a C compiler called cc"):
        build_fake_driver(tmp_path)
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(gd.GuidedDecodingError, match="failed on the fake driver: no such target"):
        build_fake_driver(tmp_path)


def test_the_drivers_thread_keeps_its_python_state(driver):
    """Made anew for each callback it costs more than the rest of a launch."""
    host, local, seen = HostFunctions(driver), threading.local(), []

    def count():
        local.calls = getattr(local, "calls", 0) + 1
        seen.append(local.calls)

    for _ in range(3):
        host.launch(count, 1, on_error=fail)
        driver.synchronize()
    assert seen == [1, 2, 3]


def test_both_ways_to_wait_for_a_function(driver):
    seen = []
    HostFunctions(driver).launch(lambda: seen.append("asleep"), 1, on_error=fail)
    spinning = driver.num_spinning()
    HostFunctions(driver, spin=True).launch(lambda: seen.append("spinning"), 1, on_error=fail)
    driver.synchronize()
    assert seen == ["asleep", "spinning"] and driver.num_spinning() == spinning + 1


def test_a_driver_that_cannot_spin():
    class Old:
        def cuLaunchHostFunc(self, stream, function, key):
            return 0

    with pytest.raises(gd.GuidedDecodingError, match="pass spin=False"):
        HostFunctions(Old(), spin=True)


def test_a_dropped_handle_forgets_its_functions(driver):
    host, handle, before = HostFunctions(driver), HostFunctionHandle(), num_registered()
    driver.begin_capture()
    host.launch(lambda: None, 1, on_error=fail, handle=handle)
    driver.end_capture()
    assert num_registered() == before + 1
    del handle
    gc.collect()
    assert num_registered() == before


def test_replays_behind_a_release_call_orphans_until_their_launcher_is_gone(driver):
    host, handle, seen, before = HostFunctions(driver), HostFunctionHandle(), [], num_registered()
    entered, go_on = threading.Event(), threading.Event()
    driver.begin_capture()
    host.launch(lambda: seen.append("ran"), 1, on_error=fail, handle=handle, orphan=lambda: seen.append("orphan"))
    host.launch(lambda: seen.append("ran"), 1, on_error=fail, handle=handle)
    driver.end_capture()
    driver.replay()
    driver.synchronize()
    host.launch(lambda: entered.set() or go_on.wait(30), 1, on_error=fail)
    assert entered.wait(30)
    driver.replay()  # pending
    handle.release()
    go_on.set()
    driver.synchronize()
    assert seen == ["ran", "ran", "orphan"]
    assert num_registered() == before + 1
    del host
    gc.collect()
    assert num_registered() == before
    driver.replay()
    driver.synchronize()
    assert len(seen) == 3


LOCK_SCRIPT = """
import ctypes, sys, threading, time
from gd_plugin.decoding import hostfunc
library = getattr(ctypes, sys.argv[2])(sys.argv[1])
library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, hostfunc._TRAMPOLINE_TYPE, ctypes.c_void_p]
library.synchronize.restype = None
entered, host = threading.Event(), hostfunc.HostFunctions(library)
host.launch(lambda: (entered.set(), time.sleep(0.3)), 1, on_error=print)
entered.wait()
print("in flight", flush=True)
host.launch(lambda: print("second", flush=True), 1, on_error=print)
ctypes.CDLL(sys.argv[1]).synchronize()
print("done", flush=True)
"""


@pytest.mark.parametrize(("loader", "passes"), [("CDLL", True), ("PyDLL", False)])
def test_only_a_library_that_gives_up_the_lock_can_launch_behind_a_function_in_flight(driver_library, loader, passes):
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK_SCRIPT, driver_library, loader], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "in flight\n"
        if passes:
            assert process.communicate(timeout=30)[0] == "second\ndone\n" and process.returncode == 0
        else:
            # the lock is kept by the launch, the launch waits for the function, the function waits for the lock
            with pytest.raises(subprocess.TimeoutExpired):
                process.communicate(timeout=3)
    finally:
        process.kill()
        process.communicate()
