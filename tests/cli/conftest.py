"""Files to point the command at, and ways to run it: in this process for speed, in one of its own where pipes matter."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'


@dataclass
class Answer:
    """What a run of the command came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with guides and texts, which is the current one."""
    (tmp_path / "age.json").write_text(SCHEMA + "\n")
    (tmp_path / "word.regex").write_text("[a-z]{2,4}\n")
    (tmp_path / "sum.ebnf").write_text('root ::= [0-9] ("+" [0-9])*\n')
    (tmp_path / "sum.gbnf").write_text('root ::= [0-9] ("+" [0-9])*\n')
    (tmp_path / "sum.lark").write_text('start: /[0-9]/ ("+" /[0-9]/)*\n')
    (tmp_path / "choice.json").write_text('{"choice": ["yes", "no"]}\n')
    (tmp_path / "good.txt").write_text('{"age": 3}\n')
    (tmp_path / "bad.txt").write_text('{\n  "age": "x"\n}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model over single bytes, and its tokenizer."""
    from tests.hf.models import foreign_tokenizer, tiny_llama

    folder = tmp_path_factory.mktemp("model")
    tokenizer = foreign_tokenizer()
    model = tiny_llama(len(tokenizer), seed=7, layers=1)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Put bytes on this process's standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put


@pytest.fixture
def gd_plugin_command(files: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run the command in this process."""
    from gd_plugin.cli.app import run

    def call(*arguments: str) -> Answer:
        capfd.readouterr()
        code = run(arguments)
        out, err = capfd.readouterr()
        return Answer(code, out, err)

    return call


@pytest.fixture
def spawn(files: Path) -> Iterator[Callable[..., Any]]:
    """Start the command in a process of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", **options.pop("env", {})}
        process = subprocess.Popen(
            [sys.executable, "-m", "gd_plugin.cli", *arguments],
            cwd=files,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # a background job of a shell ignores interrupts, and so would what it starts
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
