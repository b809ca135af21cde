"""What a release writes, and when it refuses. Building and installing is tried by `make release ARGS=--dry-run` itself."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import gd_plugin

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

### Added

- `f`: new.

## [0.1.0] - 2026-01-01

### Added

- Everything.
"""


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "release.py"))


def test_the_entries_move_under_the_version(tool: dict[str, Any]) -> None:
    text = tool["changelog_text"](CHANGELOG, "0.2.0", "2026-02-03")
    assert re.findall(r"^## .*", text, flags=re.MULTILINE) == [
        "## [Unreleased]",
        "## [0.2.0] - 2026-02-03",
        "## [0.1.0] - 2026-01-01",
    ]
    assert text.index("`f`: new") > text.index("[0.2.0]")
    with pytest.raises(tool["ReleaseError"], match="nothing under Unreleased"):
        tool["changelog_text"](text, "0.3.0", "2026-02-04")
    with pytest.raises(tool["ReleaseError"], match="already"):
        tool["changelog_text"](text, "0.2.0", "2026-02-04")


def test_a_version_goes_up(tool: dict[str, Any]) -> None:
    text = '"""The version."""\n\n__version__ = "0.9.1"\n'
    assert '__version__ = "0.10.0"' in tool["version_text"](text, "0.10.0")
    for wrong, why in (("0.9.0", "below"), ("0.9", "three numbers"), ("v1.0.0", "three numbers")):
        with pytest.raises(tool["ReleaseError"], match=why):
            tool["version_text"](text, wrong)


def test_the_projects_own_files_can_be_released(tool: dict[str, Any]) -> None:
    assert tool["version_text"]((ROOT / "gd_plugin" / "version.py").read_text(), "99.0.0")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert changelog.count("## [Unreleased]") == 1
    released = re.findall(r"^## \[(\d.*?)\]", changelog, flags=re.MULTILINE)
    assert not released or released[0] == gd_plugin.__version__, "the newest section is the package's version"
