"""gd-plugin lint: support per backend, what can be met, what it costs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import Answer

Run = Callable[..., Answer]


def test_every_backend_is_named(gd_plugin_command: Run) -> None:
    answer = gd_plugin_command("lint", "age.json")
    assert answer.code == 0
    for word in ("xgrammar", "llguidance", "outlines_core", "satisfiable: yes", "compile:"):
        assert word in answer.out


def test_a_guide_nothing_enforces(gd_plugin_command: Run, files: Path) -> None:
    (files / "unique.json").write_text('{"type": "array", "uniqueItems": true, "items": {"type": "string"}}')
    answer = gd_plugin_command("lint", "unique.json", "--json")
    record = json.loads(answer.out)
    assert (answer.code, record["ok"], record["backend"]) == (1, False, None)
    assert any(problem["keyword"] == "uniqueItems" for problem in record["problems"])


def test_with_a_tokenizer(gd_plugin_command: Run, smollm2_tokenizer: Any) -> None:
    record = json.loads(gd_plugin_command("lint", "word.regex", "--tokenizer", "smollm2", "--json").out)
    assert (record["satisfiable"], record["spellable"]) == (True, True)
    # one token for the word and one that ends it; at worst four letters and the stop token
    assert (record["shortest"], record["completion_bound"]) == (2, 3)
    assert record["measured_compile_s"] > 0
