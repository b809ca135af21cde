"""Decisions are logged by the module that takes them, and nothing of logging is configured by the package."""

import ast
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gd_plugin as gd

ROOT = Path(__file__).parent.parent
VOCABULARY = gd.Vocabulary.from_bytes([*[bytes([i]) for i in range(256)], None], stop_token_ids=[256])


def messages(caplog: pytest.LogCaptureFixture, name: str, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == name and r.levelno == level]


def test_the_choice_of_a_backend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gd_plugin")
    factory = gd.GrammarMatcherFactory(VOCABULARY)
    compiled = factory.compile(gd.Guide.json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3}))
    [line] = messages(caplog, "gd_plugin.grammars.compiler", logging.INFO)
    assert compiled.backend in line and compiled.reason in line
    # from the cache nothing is decided
    factory.compile(compiled.guide)
    assert len(messages(caplog, "gd_plugin.grammars.compiler", logging.INFO)) == 1


def test_what_leaves_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "gd_plugin")
    factory = gd.GrammarMatcherFactory(VOCABULARY, config=gd.GuidedDecodingConfig(cache_bytes=1))
    factory.compile(gd.Guide.regex("a+"))
    assert any("leaves the cache" in line for line in messages(caplog, "gd_plugin.grammars.compiler", logging.DEBUG))


def test_what_is_dropped_without_strict(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gd_plugin")
    config = gd.GuidedDecodingConfig(strict=False)
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}
    gd.GrammarMatcherFactory(VOCABULARY, config=config).compile(gd.Guide.json_schema(schema))
    assert any("uniqueItems" in r.getMessage() or "#" in r.getMessage() for r in caplog.records)


def test_a_dead_end(caplog: pytest.LogCaptureFixture) -> None:
    vocabulary = gd.Vocabulary.from_bytes([b"a", b"b", None], stop_token_ids=[2])
    processor = gd.GuidedLogitsProcessor(gd.Guide.regex("ac|b"), vocabulary=vocabulary)
    for ids in ([[1]], [[1, 0]]):
        processor(torch.tensor(ids), torch.zeros(1, 3))
    [line] = messages(caplog, "gd_plugin.hf.session", logging.WARNING)
    assert line.startswith("dead end: row 0")


def test_a_loggers_name_is_its_modules() -> None:
    for path in (ROOT / "gd_plugin").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger" and "cli" not in path.parts:
                assert ast.unparse(node.args[0]) == "__name__", path


def test_importing_configures_nothing() -> None:
    code = (
        "import logging, gd_plugin as gd; gd.GuidedLogitsProcessor; gd.GuidedDecoder; gd.lint;"
        "ours = [logging.getLogger(n) for n in logging.root.manager.loggerDict if n.startswith('gd_plugin')];"
        "print(logging.root.handlers, [x for x in ours if x.handlers or x.level or not x.propagate])"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[] []\n", done.stderr
