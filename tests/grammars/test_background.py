"""Background compilation: threads that come and go, and an interpreter that goes when it wants to."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends import registry
from gd_plugin.grammars.backends.registry import create_backend
from gd_plugin.grammars.background import BackgroundThreads

pytestmark = pytest.mark.timeout(120)


def never():
    raise AssertionError


def test_threads_run_what_comes_and_end_when_nothing_does():
    seen, busy = [], threading.Semaphore(0)
    threads = BackgroundThreads(2, "tested", at_exit=never)
    for number in range(20):
        threads.submit(lambda number=number: seen.append(number) or busy.release(), never)
        assert sum(thread.name == "tested" for thread in threading.enumerate()) <= 2
    for _ in range(20):
        assert busy.acquire(timeout=30)
    threads.join(time.monotonic() + 30)
    assert sorted(seen) == list(range(20)) and not any(thread.name == "tested" for thread in threading.enumerate())
    # and again
    threads.submit(busy.release, never)
    assert busy.acquire(timeout=30)


def test_dropped_is_what_has_not_begun():
    began, go_on, seen = threading.Event(), threading.Event(), []
    threads = BackgroundThreads(1, "tested", at_exit=never)
    threads.submit(lambda: began.set() or (go_on.wait(30) and seen.append("run")), never)
    assert began.wait(30)
    for _ in range(3):
        threads.submit(never, lambda: seen.append("dropped"))
    threads.drop()
    assert seen == ["dropped"] * 3
    go_on.set()
    threads.join(time.monotonic() + 30)
    assert seen[3:] == ["run"]


class Slow(registry.Backend):
    """xgrammar, that waits to be let go on."""

    name = "slow"

    def __init__(self, vocabulary, config):
        self.inner, self.began, self.go_on, self.compiled = (
            create_backend("xgrammar", vocabulary, config),
            threading.Event(),
            threading.Event(),
            [],
        )
        Slow.last = self

    def problems(self, guide):
        return []

    def compile(self, guide):
        self.compiled.append(guide.guide)
        self.began.set()
        assert self.go_on.wait(30)
        return self.inner.compile(guide)


@pytest.fixture
def slow(monkeypatch):
    # one thread
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before = dict(registry._factories)
    gd.register_backend("slow", Slow)
    vocabulary = gd.Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), None], stop_token_ids=[256])
    factory = gd.GrammarMatcherFactory(vocabulary, backend="slow")
    yield factory, Slow.last
    Slow.last.go_on.set()
    registry._factories.clear()
    registry._factories.update(before)


def test_a_closed_factory_drops_what_is_queued_and_goes_on(slow):
    factory, backend = slow
    running = factory.submit(gd.Guide.regex("a"))
    assert backend.began.wait(30)
    queued = [factory.submit(gd.Guide.regex(text)) for text in ("b", "c")]
    factory.close()
    for future in queued:
        with pytest.raises(CancelledError):
            future.result(30)
    backend.go_on.set()
    assert running.result(30) is factory.compile(gd.Guide.regex("a"))
    # neither is lost for good
    assert factory.submit(gd.Guide.regex("b")).result(30) is factory.compile(gd.Guide.regex("b"))
    assert backend.compiled == ["a", "b"]


def test_a_future_that_its_owner_cancels_is_nobody_elses(slow):
    factory, backend = slow
    factory.submit(gd.Guide.regex("a"))
    assert backend.began.wait(30)
    assert factory.submit(gd.Guide.regex("b")).cancel()
    again = factory.submit(gd.Guide.regex("b"))
    backend.go_on.set()
    assert again.result(30) is factory.compile(gd.Guide.regex("b"))
    assert factory.create(gd.Guide.regex("b")).accept_token(ord("b"))
    assert backend.compiled == ["a", "b"]


def test_a_guide_that_needs_one_queued_behind_it_compiles_that_itself(slow):
    factory, backend = slow
    plain = gd.Guide.regex("b")
    futures = [factory.submit(guide) for guide in (gd.Guide.regex("a"), plain.with_reasoning(end="</t>"), plain)]
    assert backend.began.wait(30)
    backend.go_on.set()
    for future in futures:
        assert future.result(30).create_matcher() is not None
    assert backend.compiled == ["a", "b"]


def test_who_asks_for_a_queued_guide_does_not_wait_for_the_queue(slow):
    factory, backend = slow
    first, queued = (factory.submit(gd.Guide.regex(text)) for text in "ab")
    assert backend.began.wait(30)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(factory.compile(gd.Guide.regex("b"))))
    asking.start()
    while backend.compiled != ["a", "b"]:
        time.sleep(0.01)
    assert not first.done()
    backend.go_on.set()
    asking.join(30)
    assert answers == [queued.result(30)]
    factory._background.join(time.monotonic() + 30)
    assert backend.compiled == ["a", "b"]


def test_a_system_that_gives_no_thread_is_asked_again(monkeypatch):
    seen = threading.Event()
    threads = BackgroundThreads(1, "tested", at_exit=never)
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no thread"):
                threads.submit(never, never)
    threads.submit(seen.set, never)
    assert seen.wait(30)


EXIT_SCRIPT = """
import threading
import gd_plugin as gd
from gd_plugin.grammars.backends import registry

class Backend(registry.Backend):
    name = "stuck"
    def __init__(self, vocabulary, config):
        self.inner = registry.create_backend("xgrammar", vocabulary, config)
    def problems(self, guide):
        return []
    def compile(self, guide):
        print("compiles", guide.guide[:2], flush=True)
        began.set()
        return self.inner.compile(guide)

began = threading.Event()
gd.register_backend("stuck", Backend)
vocabulary = gd.Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), None], stop_token_ids=[256])
factory = gd.GrammarMatcherFactory(vocabulary, backend="stuck")
# in the engine's own code it takes minutes
large = gd.Guide.ebnf("\\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} | "x{i}"' for i in range(3000)), 'r3000 ::= "c"']))
factory.submit(large)
began.wait()
for text in "bcdefgh":
    factory.submit(gd.Guide.regex(text))
"""


def test_the_interpreter_goes_under_a_compilation_and_drops_the_others():
    done = subprocess.run([sys.executable, "-c", EXIT_SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    num_threads = max(1, (os.cpu_count() or 2) // 2)
    assert done.returncode == 0 and done.stderr == ""
    assert len(done.stdout.splitlines()) <= num_threads and done.stdout.startswith("compiles ro")
