"""gd-plugin generate: the document alone on standard output, within its budget; a report beside it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Answer

Run = Callable[..., Answer]


def test_a_document_a_stream_and_a_report(gd_plugin_command: Run, model_folder: str, files: Path) -> None:
    answer = gd_plugin_command(
        "generate", "--model", model_folder, "--guide", "age.json", "--prompt", "Age:", "--max-new-tokens", "40",
        "--report", "report.html",
    )  # fmt: skip
    assert answer.code == 0
    assert set(json.loads(answer.out)) == {"age"}
    # the stream holds the same text
    assert answer.out.strip() in answer.err
    assert "complete: " in answer.err
    assert (files / "report.html").read_text().startswith("<!doctype html>")


def test_the_document_is_printed_also_where_the_report_cannot_be_written(
    gd_plugin_command: Run, model_folder: str, files: Path
) -> None:
    (files / "report.html").symlink_to("/dev/full")
    answer = gd_plugin_command(
        "generate", "--model", model_folder, "--guide", "choice.json", "--prompt", "x", "--max-new-tokens", "8",
        "--report", "report.html", "--quiet",
    )  # fmt: skip
    assert answer.code == 2 and "report.html" in answer.err
    assert answer.out in ("yes\n", "no\n")


def test_a_report_that_stands_there_is_kept_until_there_is_a_new_one(gd_plugin_command: Run, files: Path) -> None:
    (files / "old.html").write_text("old")
    for name in ("old.html", "new.html"):
        assert gd_plugin_command(
            "generate", "--model", "nowhere", "--guide", "choice.json", "--prompt", "x", "--report", name
        ).code == 2  # fmt: skip
    assert (files / "old.html").read_text() == "old"
    assert not (files / "new.html").exists()


def test_the_budget_closes_the_document(gd_plugin_command: Run, model_folder: str, files: Path) -> None:
    (files / "long.regex").write_text("[a-z]{1,500}!")
    common = ["generate", "--model", model_folder, "--guide", "long.regex", "--prompt", "x", "--max-new-tokens", "6"]
    answer = gd_plugin_command(*common, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert re.fullmatch("[a-z]{1,500}!\n", answer.out)
    cut = gd_plugin_command(*common, "--quiet", "--cut-off")
    assert cut.code == 1
    assert re.fullmatch("[a-z]*\n", cut.out)


def test_a_budget_that_is_too_small_says_how_much_is_needed(gd_plugin_command: Run, model_folder: str) -> None:
    answer = gd_plugin_command(
        "generate", "--model", model_folder, "--guide", "age.json", "--prompt", "x", "--max-new-tokens", "2"
    )
    assert answer.code == 2
    assert "max_new_tokens=" in answer.err and "Traceback" not in answer.err


def test_sampling_is_repeatable_and_json_tells_all(gd_plugin_command: Run, model_folder: str) -> None:
    records = [
        json.loads(
            gd_plugin_command(
                "generate", "--model", model_folder, "--guide", "word.regex", "--prompt", "x", "--max-new-tokens", "8",
                "--sample", "--seed", seed, "--json", "--report", "report.json",
            ).out
        )
        for seed in ("1", "1", "2")
    ]  # fmt: skip
    assert records[0]["text"] == records[1]["text"]
    assert records[0]["status"] == "complete"
    assert json.loads(Path("report.json").read_text())["rows"][0]["text"] == records[2]["text"]


def test_the_prompt_may_come_from_standard_input(
    gd_plugin_command: Run, model_folder: str, standard_input: Callable[[bytes], None]
) -> None:
    standard_input(b"Say a word\n")
    answer = gd_plugin_command(
        "generate", "--model", model_folder, "--guide", "word.regex", "--max-new-tokens", "8", "--quiet"
    )
    assert (answer.code, answer.err) == (0, "")
    assert re.fullmatch("[a-z]{2,4}\n", answer.out)
