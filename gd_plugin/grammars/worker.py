"""A process that compiles large guides, and can be ended: a thread cannot.

In:  a vocabulary, a configuration; then a backend's name and a guide that passes the limits and whose estimate is large.
Out: what the backend cannot enforce, and what it makes its compiled grammar from; or the worker's error; or, when the time
     or the memory is over, an error and no worker. The next guide starts a new one; otherwise it is kept between guides.
Both sides speak frames over the worker's pipes: two lengths of 8 bytes, JSON text, bytes. Nothing is pickled. The limits
on time and memory are for a guide alone: what importing the engine and reading the vocabulary take comes before them.
"""

import base64
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from typing import IO, Any, NamedTuple

from gd_plugin import errors
from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import CompileTimeoutError, GuidedDecodingError, GuideError, GuideTooLargeError
from gd_plugin.grammars.backends.registry import Backend, CompiledGrammar, create_backend
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.guides.problem import Problem
from gd_plugin.masks.bitmask import allocate_token_bitmask

__all__ = ["CompileWorker", "WorkerAnswer", "fill_first_row", "main"]

_log = logging.getLogger(__name__)

# importing the engine and reading a vocabulary; not part of a guide's own time
_START_S = 120.0
_ERROR_FIELDS = ("pointer", "keyword", "hint", "limit", "value", "reasons", "seconds")


class WorkerAnswer(NamedTuple):
    """What a worker found.

    Attributes:
        problems: what the backend cannot enforce in the guide.
        compiled: what `Backend.load` takes, or None where the problems forbid compiling.
    """

    problems: list[Problem]
    compiled: bytes | None


class CompileWorker:
    """Compiles for one vocabulary in a process of its own. Thread-safe; one guide at a time."""

    def __init__(self, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self._vocabulary = vocabulary
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        # those that the process has created
        self._backends: set[str] = set()
        self._lock = threading.Lock()
        self._is_stopped = False

    def compile(self, backend: str, guide: Guide) -> WorkerAnswer:
        """Compile a guide there.

        Raises:
            CompileTimeoutError: it took longer than `compile_timeout_s`; the process has been ended.
            GuideTooLargeError: the process ran out of memory, or broke down.
            GuideError: what the backend says about the guide.
            GuidedDecodingError: `stop` was called meanwhile.
        """
        with self._lock:
            self._is_stopped = False
            try:
                process = self._started()
                if backend not in self._backends:
                    self._ask(process, {"backend": backend}, _START_S)
                    self._backends.add(backend)
                question = {"backend": backend, "guide": guide.to_json()}
                head, compiled = self._ask(process, question, self._config.compile_timeout_s)
            except GuidedDecodingError:
                raise
            except BaseException:
                # interrupted: an answer may be on its way, which the next question must not get
                self.close()
                raise
        return WorkerAnswer([Problem(*fields) for fields in head["problems"]], compiled if head["compiled"] else None)

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        self._backends.clear()
        if process is not None:
            _end(process)

    def stop(self) -> None:
        """The same from any thread. A compilation under way fails; the next guide starts a new process."""
        self._is_stopped = True
        if self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()
        elif (process := self._process) is not None:
            # who reads its answer comes to the end of the pipe, and closes it
            process.kill()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._backends.clear()
        process = subprocess.Popen(
            [sys.executable, "-c", "from gd_plugin.grammars.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._process = process
        _log.info("compile worker started: process %d", process.pid)
        weakref.finalize(self, _end, process)
        tokens = [base64.b64encode(token).decode() for token in self._vocabulary.tokens]
        stops = list(self._vocabulary.stop_token_ids)
        self._ask(process, {"config": asdict(self._config), "tokens": tokens, "stops": stops}, _START_S)
        return process

    def _ask(
        self, process: "subprocess.Popen[bytes]", message: dict[str, Any], seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        deadline = time.monotonic() + seconds
        if process.stdin is None or process.stdout is None:
            raise GuidedDecodingError("the compile worker has no pipes")
        try:
            _send(process.stdin, message)
            head, body = _receive(process.stdout, deadline)
        except TimeoutError:
            _log.warning("compile worker ended: %s took longer than %g s", message.get("backend"), seconds)
            self.close()
            text = (
                f"compiling with {message['backend']} took longer than compile_timeout_s={seconds:g}; simplify the guide "
                "(shorter repeats, fewer options) or raise the limit"
                if "backend" in message
                else f"the process that compiles large guides did not start within {seconds:g} s; this machine may have too "
                "much to do, or too little memory"
            )
            raise CompileTimeoutError(text, seconds=seconds) from None
        except (EOFError, OSError) as error:
            _log.warning("compile worker broke down, most likely out of memory; the next guide starts another")
            self.close()
            if self._is_stopped:
                raise GuidedDecodingError("the compilation was given up: its factory was closed") from error
            raise GuideTooLargeError(
                f"#: compiling with {message.get('backend')} broke its process down, most likely over "
                f"compile_memory_bytes={self._config.compile_memory_bytes}",
                pointer="#",
                limit="compile_memory_bytes",
                hint="simplify the guide (shorter repeats, fewer options), or raise the limit",
            ) from error
        if "error" in head:
            raise _rebuilt(head)
        return head, body


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _rebuilt(head: dict[str, Any]) -> GuidedDecodingError:
    """Return the worker's error as the class it was there."""
    kind = getattr(errors, str(head["error"]), GuidedDecodingError)
    if not (isinstance(kind, type) and issubclass(kind, GuidedDecodingError)):
        kind = GuidedDecodingError
    error = kind(str(head["message"]))
    for name, value in head["fields"].items():
        setattr(error, name, value)
    return error


def _send(pipe: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(head).encode()
    pipe.write(len(text).to_bytes(8, "little") + len(body).to_bytes(8, "little") + text)
    pipe.write(body)
    pipe.flush()


def _receive(pipe: IO[bytes], deadline: float) -> tuple[dict[str, Any], bytes]:
    """Read one frame.

    Raises:
        TimeoutError: the deadline passed first.
        EOFError: the other side is gone.
    """
    lengths = _read(pipe, 16, deadline)
    head: dict[str, Any] = json.loads(_read(pipe, int.from_bytes(lengths[:8], "little"), deadline))
    return head, _read(pipe, int.from_bytes(lengths[8:], "little"), deadline)


def _read(pipe: IO[bytes], length: int, deadline: float) -> bytes:
    descriptor = pipe.fileno()
    parts: list[bytes] = []
    while length:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def fill_first_row(compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
    """Build the mask that a matcher of this grammar begins with."""
    compiled.create_matcher().fill_next_token_bitmask(allocate_token_bitmask(1, vocabulary.vocab_size), 0)


def main() -> None:
    """Be the worker: read a vocabulary, then guides, until the pipe closes."""
    # an interrupt at the terminal goes to all of its processes; whether this one ends is for the other side to say
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # engines print; their words must not end up among the frames
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    questions = sys.stdin.buffer
    start = _next_question(questions)
    if start is None:
        return
    tokens: list[bytes | None] = [base64.b64decode(token) for token in start["tokens"]]
    vocabulary = Vocabulary.from_bytes(tokens, stop_token_ids=start["stops"])
    config = GuidedDecodingConfig(**start["config"])
    backends: dict[str, Backend] = {}
    _send(answers, {})
    while (question := _next_question(questions)) is not None:
        head: dict[str, Any] = {}
        body = b""
        try:
            name = question["backend"]
            if "guide" in question:
                head, body = _tried(backends[name], Guide.from_json(question["guide"]), vocabulary, config.strict)
            else:
                _limit_memory(None)
                backends[name] = create_backend(name, vocabulary, config)
                # the engine's own view of the vocabulary is built here, not in the first guide's time
                backends[name].compile(Guide.choice(["a"]))
                _limit_memory(config.compile_memory_bytes)
        except GuidedDecodingError as error:
            if _is_out_of_memory(error):
                # nothing this process says from here on can be relied on
                return
            head = _as_head(error)
        _send(answers, head, body)


def _tried(backend: Backend, guide: Guide, vocabulary: Vocabulary, strict: bool) -> tuple[dict[str, Any], bytes]:
    problems = [[item.pointer, item.keyword, item.backend, item.message] for item in backend.problems(guide)]
    if problems and strict:
        return {"problems": problems, "compiled": False}, b""
    compiled = backend.compile(guide)
    # an engine that compiles lazily does its work here
    fill_first_row(compiled, vocabulary)
    return {"problems": problems, "compiled": True}, backend.dump(compiled)


def _next_question(pipe: IO[bytes]) -> dict[str, Any] | None:
    lengths = pipe.read(16)
    if len(lengths) < 16:
        return None
    question: dict[str, Any] = json.loads(pipe.read(int.from_bytes(lengths[:8], "little")))
    return question


def _as_head(error: GuidedDecodingError) -> dict[str, Any]:
    fields = {name: getattr(error, name) for name in _ERROR_FIELDS if getattr(error, name, None) is not None}
    message = error.message if isinstance(error, GuideError) else str(error)
    return {"error": type(error).__name__, "message": message, "fields": fields}


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an engine's error, or what caused it, is a failed allocation."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "bad_alloc" in str(cause) or "memory allocation" in str(cause):
            return True
        cause = cause.__cause__
    return False


def _limit_memory(num_bytes: int | None) -> None:
    """Let the process grow by `num_bytes` over what it has now, where the system can hold it to that; None: by any."""
    try:
        import resource
    except ImportError:
        return
    # the soft limit is the one that counts, and can be raised again for the next backend
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard
    if num_bytes is not None:
        try:
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
        except OSError:
            return
        limit = pages * resource.getpagesize() + num_bytes
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
