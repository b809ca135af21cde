"""The code blocks of docs/engines.md run, and what they say comes true."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_code_blocks_run(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    torch.manual_seed(0)
    for _ in range(5):
        for number, block in enumerate(blocks):
            exec(compile(block, f"engines.md block {number + 1}", "exec"), {"__name__": "__main__"})
        assert re.fullmatch(r"b'\d{3}-\d{3}'\n", capsys.readouterr().out)
