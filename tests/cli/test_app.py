"""How the command fails: exit codes, one line instead of a traceback, pipes, interrupts."""

import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gd_plugin.cli.app import run
from tests.cli.conftest import Answer

Run = Callable[..., Answer]
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "nothing.json", "x"], ["nothing.json", "no such file"]),
        (["check", ".", "x"], ["folder"]),
        (["check", "age.json", "."], ["folder"]),
        (["check", "no_module:Model", "x"], ["no_module"]),
        (["check", "json:Nothing", "x"], ["Nothing"]),
        (["check", "good.txt", "x"], [".json", ".regex", ".lark"]),
        (["check", "empty.json", "x"], ["JSON"]),
        (["check", "empty.regex", "x"], ["empty"]),
        (["check", "latin.regex", "x"], ["UTF-8", "byte 1"]),
        (["check", "age.json", "latin.regex"], ["UTF-8", "byte 1"]),
        (["check", "broken.json", "x"], ["line 1"]),
        (["check", "broken.regex", "x"], ["position"]),
        (["check", "broken.ebnf", "x"], ["line"]),
        (["check", "raises:Model", "x"], ["raises", "ZeroDivisionError"]),
        (["check", "leaves:Model", "x"], ["leaves", "SystemExit", "3"]),
        (["lint", "age.json", "--tokenizer", "nowhere"], ["nowhere"]),
        (["explain", "age.json", "--limit", "0"], ["--limit"]),
        (["explain", "age.json", "--backend", "none"], ["none", "xgrammar"]),
        (["generate", "--guide", "age.json"], ["--model"]),
        (["generate", "--guide", "age.json", "--model", "nowhere", "--prompt", "x"], ["nowhere"]),
        (["generate", "--guide", "age.json", "--model", "m", "--prompt", "x", "--report", "r.pdf"], [".html"]),
        (["generate", "--guide", "age.json", "--model", "m", "--prompt", "x", "--report", "no/r.html"], ["no"]),
        # told before "nowhere" is looked for
        (["generate", "--guide", "age.json", "--model", "nowhere", "--prompt", "x", "--report", "d.html"], ["folder"]),
        (
            ["generate", "--guide", "age.json", "--model", "nowhere", "--prompt", "x", "--report", "away.html"],
            ["No such"],
        ),
        (["nonsense"], ["nonsense"]),
    ],
)
def test_what_cannot_be_used_is_one_message_and_exit_code_2(
    gd_plugin_command: Run, files: Path, arguments: list[str], words: list[str]
) -> None:
    (files / "empty.json").touch()
    (files / "empty.regex").touch()
    (files / "latin.regex").write_bytes(b"a\xe9\n")
    (files / "broken.json").write_text('{"type": ')
    (files / "broken.regex").write_text("(a")
    (files / "broken.ebnf").write_text("root ::= (\n")
    (files / "raises.py").write_text("1 / 0\n")
    (files / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (files / "d.html").mkdir()
    (files / "away.html").symlink_to("no/r.html")
    answer = gd_plugin_command(*arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "broken.json"],
        ["lint", "broken.json"],
        ["explain", "broken.json"],
        ["bench", "broken.json", "--tokenizer", "smollm2"],
        ["generate", "--model", "smollm2", "--guide", "broken.json"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_guide_is_told_before_torch_is_imported(files: Path, arguments: list[str]) -> None:
    (files / "broken.json").write_text('{"type": ')
    program = (
        "import sys\nfrom gd_plugin.cli.app import run\n"
        f"print(run({arguments}), sorted({{'torch', 'numpy', 'transformers'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 []\n", done.stderr


def test_files_without_end_and_huge_ones_are_not_read_whole(gd_plugin_command: Run, files: Path) -> None:
    (files / "zero.regex").symlink_to("/dev/zero")
    assert gd_plugin_command("check", "zero.regex", "x").code == 2
    assert gd_plugin_command("check", "word.regex", "/dev/zero").code == 2
    with (files / "huge.json").open("wb") as file:
        file.truncate(1 << 34)
    answer = gd_plugin_command("check", "huge.json", "x")
    assert answer.code == 2 and "max_guide_bytes" in answer.err
    answer = gd_plugin_command("check", "word.regex", "huge.json")
    assert answer.code == 2 and "--max-bytes" in answer.err


def test_deep_nesting_is_refused(gd_plugin_command: Run, files: Path) -> None:
    (files / "deep.json").write_text('{"items":' * 5000 + "{}" + "}" * 5000)
    answer = gd_plugin_command("lint", "deep.json")
    assert answer.code == 2 and "Traceback" not in answer.err


def test_help_and_version(gd_plugin_command: Run) -> None:
    assert gd_plugin_command("--version").out.startswith("gd-plugin")
    for command in ("check", "lint", "explain", "generate", "bench", "doctor"):
        answer = gd_plugin_command(command, "--help")
        assert answer.code == 0
        assert "Usage" in answer.out


def test_standard_input(spawn: Callable[..., Any]) -> None:
    process = spawn("check", "age.json", "-")
    out, _ = process.communicate(b'{"age": 4}\n', timeout=120)
    assert (process.returncode, out) == (0, b"standard input: matches\n")


def test_bytes_that_are_no_text_on_standard_input(
    gd_plugin_command: Run, standard_input: Callable[[bytes], None]
) -> None:
    standard_input(b"\xff\xfe")
    answer = gd_plugin_command("check", "age.json", "-")
    assert (answer.code, answer.out) == (2, "")
    assert "UTF-8" in answer.err


def test_a_pipe_gets_no_colour_and_a_terminal_none_under_no_color(
    gd_plugin_command: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = gd_plugin_command("check", "age.json", "bad.txt")
    assert answer.code == 1 and "\x1b[" not in answer.out

    assert b"\x1b[" in on_a_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    # bold may stay; colours (3x, 9x) may not
    assert b"\x1b[31m" not in on_a_terminal(monkeypatch)


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Run a check whose standard output is a terminal, and return what that was sent."""
    main, other = pty.openpty()
    with open(other, "w") as terminal, monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setattr(sys, "stdout", terminal)
        assert run(["check", "age.json", "bad.txt"]) == 1
        shown = os.read(main, 1 << 16)
    os.close(main)
    return shown


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize(
    "arguments", [("check", "age.json", "bad.txt"), ("lint", "age.json"), ("lint", "age.json", "--json")]
)
def test_an_output_that_cannot_be_written(
    files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert run(arguments) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: standard output: ") and "Traceback" not in err


def test_a_reader_that_goes_away(
    files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert run(["check", "age.json", "bad.txt"]) == 141
    assert capfd.readouterr().err == ""


def test_an_interrupt(spawn: Callable[..., Any], files: Path) -> None:
    os.mkfifo(files / "slow.txt")
    process = spawn("check", "age.json", "slow.txt")
    # opening waits until the command has opened the other end: from there on it waits for text
    with (files / "slow.txt").open("wb"):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_without_its_packages_the_command_says_how_to_install_them() -> None:
    code = "import importlib.util, sys\nimport gd_plugin.cli as cli\ncli.find_spec = lambda name: None\ncli.main()\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "gd-plugin needs click and rich: pip install 'gd_plugin[cli]'\n"


def test_the_entry_point_is_the_function(gd_plugin_command: Run) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"gd-plugin": "gd_plugin.cli:main"}
    assert {"click", "rich"} <= {item.split(">")[0] for item in project["optional-dependencies"]["cli"]}


def test_verbose_shows_what_was_decided(gd_plugin_command: Run) -> None:
    quiet = gd_plugin_command("lint", "word.regex", "--json")
    assert quiet.err == ""
    assert json.loads(quiet.out)["ok"] is True
