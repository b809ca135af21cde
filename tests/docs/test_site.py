"""What the site promises of itself: every page has a place, every example and public name a page, nothing from elsewhere."""

import re
from pathlib import Path

import gd_plugin

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_every_example_is_on_a_page() -> None:
    shown = {
        example
        for page in DOCS.rglob("*.md")
        for example in re.findall(r'--8<-- "examples/(\w+\.py)"', page.read_text())
    }
    assert shown == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_every_public_name_is_on_one_page() -> None:
    listed = [
        line.removeprefix("::: ")
        for page in (DOCS / "api").glob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith("::: ")
    ]
    assert len(listed) == len(set(listed))
    public = {f"gd_plugin.{name}" for name in gd_plugin.__all__ if name != "__version__"}
    public.add("gd_plugin.testing")  # all its names at once
    assert public <= set(listed), public - set(listed)


def test_pages_load_nothing_from_elsewhere() -> None:
    for path in [*DOCS.rglob("*.md"), *DOCS.rglob("*.css"), *DOCS.rglob("*.svg")]:
        text = path.read_text()
        assert not re.search(r"(src|href)=[\"']https?://|url\([\"']?https?://|@import|!\[[^\]]*\]\(https?://", text), (
            path
        )


def test_every_folder_is_introduced() -> None:
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "gd_plugin").rglob("*.py")}
    folders = {f"{folder}/" for folder in packages if folder.name != "gd_plugin"}
    folders |= {f"{path.name}/" for path in ROOT.iterdir() if any(path.glob("*.py")) and path.name != "gd_plugin"}
    introduced = set(re.findall(r"^\| `([\w/.]+/)` \| \S", (DOCS / "maintainers.md").read_text(), flags=re.MULTILINE))
    assert folders - introduced == set()
