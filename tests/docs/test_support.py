"""docs/support.md says what the code says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_code_says() -> None:
    page = runpy.run_path(str(ROOT / ".ci" / "support_page.py"))["page"]()
    shown = (ROOT / "docs" / "support.md").read_text()
    assert shown == page, "write it anew: python .ci/support_page.py > docs/support.md"
