"""Compilations in the background: a few threads, and a queue that is dropped when the interpreter goes.

In:  functions to run, each with another that says that it will not be.     Out: one of the two is called.
A thread of `concurrent.futures` would compile all that is queued before the interpreter may go, however long that takes.
These are daemon threads: who compiles then has a moment to finish, and is left behind if that is not enough.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["BackgroundThreads"]

# seconds that the interpreter waits at its end for those that run
_EXIT_WAIT_S: Final = 2.0


class BackgroundThreads:
    """Threads that end when there is nothing to do, and are started again for what comes. Thread-safe.

    Args:
        num_threads: that run at once.
        name: of the threads.
        at_exit: called when the interpreter goes, to cut short what runs.
    """

    def __init__(self, num_threads: int, name: str, at_exit: Callable[[], object]) -> None:
        self._num_threads = num_threads
        self._name = name
        self.at_exit: Final = at_exit
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()
        self._running: set[threading.Thread] = set()
        _all.add(self)

    def submit(self, run: Callable[[], object], drop: Callable[[], object]) -> None:
        """Have `run` called on a thread, or `drop` if that will not happen.

        Raises:
            RuntimeError: the system gives no thread; then neither is called.
        """
        with self._lock:
            self._waiting.append((run, drop))
            if len(self._running) == self._num_threads:
                return
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._running.add(thread)
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._running.discard(thread)
                if (run, drop) in self._waiting:
                    self._waiting.remove((run, drop))
            raise

    def drop(self) -> None:
        """Give up what has not begun. What comes later is run as ever."""
        with self._lock:
            dropped = list(self._waiting)
            self._waiting.clear()
        for _run, drop in dropped:
            drop()

    def join(self, deadline: float) -> None:
        """Wait until nothing runs or `time.monotonic()` reaches `deadline`."""
        with self._lock:
            running = list(self._running)
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._waiting:
                        self._running.discard(threading.current_thread())
                        return
                    run, _drop = self._waiting.popleft()
                run()
        finally:
            # a `run` that raises takes its thread with it
            with self._lock:
                self._running.discard(threading.current_thread())


_all: "weakref.WeakSet[BackgroundThreads]" = weakref.WeakSet()


def _drop_all() -> None:
    deadline = time.monotonic() + _EXIT_WAIT_S
    for threads in list(_all):
        threads.drop()
        threads.at_exit()
    for threads in list(_all):
        threads.join(deadline)


atexit.register(_drop_all)
