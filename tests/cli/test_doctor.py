"""gd-plugin doctor: what is here is tried, what is missing comes with its command."""

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest

from gd_plugin.cli import doctor
from tests.cli.conftest import Answer

Run = Callable[..., Answer]


def test_the_versions_are_those_of_the_packages(gd_plugin_command: Run) -> None:
    answer = gd_plugin_command("doctor", "--json")
    record = json.loads(answer.out)
    assert answer.code == 0 and record["ok"]
    found = {(item["topic"], item["name"]): item for item in record["findings"]}
    for package in ("torch", "transformers", "numpy"):
        assert found["version", package]["detail"] == version(package)
    assert found["engine", "xgrammar"]["state"] == "ok"
    assert found["kernel", "cpu"]["state"] == "ok"


def test_what_is_missing_comes_with_its_command(gd_plugin_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(package: str) -> str:
        if package in ("llguidance", "xgrammar", "outlines-core", "triton"):
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor, "version", without)
    answer = gd_plugin_command("doctor")
    assert answer.code == 1, "no engine at all"
    assert "pip install 'gd_plugin[llguidance]'" in answer.out
    assert "pip install triton" in answer.out


def test_what_fails_is_a_finding_and_no_crash(gd_plugin_command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(backend: str) -> None:
        raise OSError("undefined symbol")

    monkeypatch.setattr(doctor, "_try_engine", broken)
    answer = gd_plugin_command("doctor")
    assert answer.code == 1
    assert "broken" in answer.out and "undefined symbol" in answer.out
