"""A process that compiles large guides, and can be ended: a thread cannot.

In:  a guide that passes the limits and whose estimate is large, a vocabulary, a configuration, a backend's name.
Out: the compiled grammar, as the engine's own serialisation; or the worker's error; or, when the time is over, a
     CompileTimeoutError and no worker. The next guide starts a new one; otherwise it is kept between guides.
Both sides speak frames of JSON over the worker's pipes: a length of 8 bytes, then the text. Nothing is pickled.
"""

import base64
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from typing import IO, Any

from gd_plugin import errors
from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import CompileTimeoutError, GuidedDecodingError, GuideError, GuideTooLargeError
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide

__all__ = ["CompileWorker", "main"]

# importing the engine and reading a vocabulary; not part of a guide's own time
_START_S = 120.0
_MEMORY_BYTES = 4 << 30
_ERROR_FIELDS = ("pointer", "keyword", "hint", "limit", "value")


class CompileWorker:
    """Compiles for one backend and vocabulary in a process of its own. Thread-safe; one guide at a time."""

    def __init__(self, backend: str, vocabulary: Vocabulary, config: GuidedDecodingConfig) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def compile(self, guide: Guide) -> bytes:
        """Return the engine's serialisation of the compiled guide.

        Raises:
            CompileTimeoutError: it took longer than `compile_timeout_s`; the process has been ended.
            GuideTooLargeError: the process ran out of memory.
            GuideError: what the backend says about the guide.
        """
        with self._lock:
            process = self._started()
            answer = self._ask(process, {"guide": guide.to_json()}, self._config.compile_timeout_s)
        if "error" in answer:
            raise _rebuilt(answer)
        return base64.b64decode(answer["compiled"])

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        process = subprocess.Popen(
            [sys.executable, "-c", "from gd_plugin.grammars.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._process = process
        weakref.finalize(self, _end, process)
        tokens = [base64.b64encode(token).decode() for token in self._vocabulary.tokens]
        start = {
            "backend": self._backend,
            "config": asdict(self._config),
            "tokens": tokens,
            "stops": list(self._vocabulary.stop_token_ids),
        }
        self._ask(process, start, _START_S)
        return process

    def _ask(self, process: "subprocess.Popen[bytes]", message: dict[str, Any], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        if process.stdin is None or process.stdout is None:
            raise GuidedDecodingError("the compile worker has no pipes")
        try:
            _send(process.stdin, message)
            return _receive(process.stdout, deadline)
        except TimeoutError:
            self.close()
            raise CompileTimeoutError(
                f"compiling took longer than compile_timeout_s={seconds:g}; simplify the guide or raise the limit",
                seconds=seconds,
            ) from None
        except (EOFError, OSError) as error:
            self.close()
            raise GuideTooLargeError(
                f"#: the compile worker ended while compiling, most likely over its {_MEMORY_BYTES >> 30} GiB of memory",
                pointer="#",
                limit="memory",
                hint="simplify the guide: shorter repeats, fewer options",
            ) from error


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _rebuilt(answer: dict[str, Any]) -> GuidedDecodingError:
    """Return the worker's error as the class it was there."""
    kind = getattr(errors, str(answer["error"]), GuidedDecodingError)
    if isinstance(kind, type) and issubclass(kind, GuideError):
        error: GuidedDecodingError = kind(str(answer["message"]))
        for name in _ERROR_FIELDS:
            if answer.get(name) is not None:
                setattr(error, name, answer[name])
        return error
    return GuidedDecodingError(str(answer["message"]))


def _send(pipe: IO[bytes], message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    pipe.write(len(data).to_bytes(8, "little") + data)
    pipe.flush()


def _receive(pipe: IO[bytes], deadline: float) -> dict[str, Any]:
    """Read one frame.

    Raises:
        TimeoutError: the deadline passed first.
        EOFError: the other side is gone.
    """
    length = int.from_bytes(_read(pipe, 8, deadline), "little")
    answer: dict[str, Any] = json.loads(_read(pipe, length, deadline))
    return answer


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


def main() -> None:
    """Be the worker: read a vocabulary, then guides, until the pipe closes."""
    answers = os.fdopen(os.dup(1), "wb")
    # engines print; their words must not end up among the frames
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    questions = sys.stdin.buffer
    start = _next_question(questions)
    if start is None:
        return
    from gd_plugin.grammars.backends.registry import create_backend

    tokens: list[bytes | None] = [base64.b64decode(token) for token in start["tokens"]]
    vocabulary = Vocabulary.from_bytes(tokens, stop_token_ids=start["stops"])
    backend = create_backend(start["backend"], vocabulary, GuidedDecodingConfig(**start["config"]))
    _limit_memory()
    _send(answers, {"ready": True})
    while (question := _next_question(questions)) is not None:
        try:
            compiled = backend.compile(Guide.from_json(question["guide"]))
            answer: dict[str, Any] = {"compiled": base64.b64encode(backend.dump(compiled)).decode()}
        except MemoryError:
            return
        except GuidedDecodingError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
            answer |= {name: getattr(error, name, None) for name in _ERROR_FIELDS}
        _send(answers, answer)


def _next_question(pipe: IO[bytes]) -> dict[str, Any] | None:
    head = pipe.read(8)
    if len(head) < 8:
        return None
    question: dict[str, Any] = json.loads(pipe.read(int.from_bytes(head, "little")))
    return question


def _limit_memory() -> None:
    """Let the process grow by `_MEMORY_BYTES` over what it has now, where the system can hold it to that."""
    try:
        import resource
    except ImportError:
        return
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
