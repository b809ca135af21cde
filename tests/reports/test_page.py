"""The report's page: what a hostile model writes stays text, in a parser and in a real browser, in light and in dark."""

import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gd_plugin as gd
from gd_plugin.reports.report import Alternative, CallTimes, RowReport, StepReport

HOSTILE = [
    "</script><script>document.title='stolen'</script>",
    "<img src=x onerror=\"document.title='stolen'\">",
    "</style><style>body{display:none}</style>",
    '"><svg onload=alert(1)>',
    "--><b>bold</b><!--",
    "]]>&lt;script&gt;",
    "\x00\x1b[31m\u202eright to left\u2066",
    "javascript:alert(1)",
    "</title></span></div></section></main>",
    "日本語 ünïcode 👍🏽",
    " \n\t\r\n",
    "' onfocus='alert(1)",
]


def step(position: int, text: str, **changes: object) -> StepReport:
    fields: dict[str, object] = {
        "position": position,
        "token_id": 7,
        "text": text,
        "special": False,
        "scored": True,
        "call": position,
        "num_legal": 12,
        "num_allowed": 12,
        "removed_mass": position / 12,
        "probability": 0.25,
        "probability_after": 0.5,
        "rank": 3,
        "entropy_before": 2.0,
        "entropy_after": 1.0,
        "overruled": position % 2 == 0,
        "banned": (Alternative(1, text, 0.5),),
        "allowed": (Alternative(2, text, 0.25),),
    }
    return StepReport(**{**fields, **changes})  # type: ignore[arg-type]


def report_of(texts: list[str], rows: int = 2) -> gd.Report:
    calls = tuple(
        CallTimes(0.1 * i, 4 + i, rows, 0.08 if i else None, 1e-3, 0.0, 1e-4, 1e-3) for i in range(len(texts))
    )
    steps = tuple(step(i, text) for i, text in enumerate(texts))
    reports = tuple(
        RowReport(row, texts[0], texts[0], texts[0], "complete" if row == 0 else texts[1], "".join(texts), steps)
        for row in range(rows)
    )
    return gd.Report(True, 100, reports, calls, 0, {"gd_plugin": texts[0]})


class Elements(HTMLParser):
    """The elements, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input", "br", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "polyline"):
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def test_hostile_texts_make_no_element_and_no_attribute() -> None:
    plain, hostile = Elements(report_of(["a"] * 12).to_html()), Elements(report_of(HOSTILE).to_html())
    # line ends in tokens are marked by an element of ours
    assert [tag for tag in hostile.tags if tag != "span"] == [tag for tag in plain.tags if tag != "span"]
    assert "script" not in hostile.tags
    assert {name for name, _ in hostile.attributes} - {"aria-hidden"} == {name for name, _ in plain.attributes}
    assert not [name for name, _ in hostile.attributes if name.startswith("on") or name in ("src", "href")]
    assert not hostile.open
    for text in HOSTILE[:6]:
        assert text in hostile.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", hostile.text)


def test_the_page_asks_nothing_of_the_network_and_forbids_scripts() -> None:
    page = report_of(["a", "b"]).to_html()
    assert "://" not in page and "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_steps_without_figures_and_empty_reports() -> None:
    unscored = StepReport(0, 3, "x", False, scored=False)
    row = RowReport(0, None, None, None, "unguided", "x", (unscored,))
    page = gd.Report(False, 10, (row,), (), 5).to_html()
    assert "The model was not asked" in page and "5 steps were not kept" in page
    assert "What the guide did" in gd.Report(True, 10, (), ()).to_html()


def test_long_outputs_are_cut_in_the_page_and_said_so() -> None:
    page = report_of(["tok"] * 2100, rows=1).to_html()
    assert "100 more are in the JSON" in page
    assert len(page) < 8_000_000


def test_rows_can_be_chosen_by_keyboard() -> None:
    elements = Elements(report_of(["a", "b"], rows=3).to_html())
    assert elements.tags.count("fieldset") == 1 and elements.tags.count("legend") == 1
    assert [value for name, value in elements.attributes if name == "type"] == ["radio"] * 3
    # every token can be focused, and so tells of its alternatives without a mouse
    assert [value for name, value in elements.attributes if name == "tabindex"].count("0") == 3 * 2


@pytest.fixture(scope="session")
def browser() -> str:
    found = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no headless browser: apt-get install chromium")
    return found


def browse(browser: str, folder: Path, *options: str) -> bytes:
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", "--window-size=900,1400", *options, (folder / "page.html").as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout


def test_a_browser_shows_the_hostile_texts_as_texts(browser: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(report_of(HOSTILE).to_html(), encoding="utf-8")
    seen = Elements(browse(browser, tmp_path, "--dump-dom").decode())
    assert "script" not in seen.tags and "img" not in seen.tags
    assert "Guided decoding report" in seen.text and "stolen" in seen.text
    assert seen.tags.count("section") == 3, "two rows and the times"


def corner(png: bytes) -> int:
    """Brightness of the first pixel, 0 to 255: no filter of a PNG changes it, for nothing lies before it."""
    position, data = 8, b""
    while position < len(png):
        length, kind = struct.unpack(">I4s", png[position : position + 8])
        data += png[position + 8 : position + 8 + length] if kind == b"IDAT" else b""
        position += 12 + length
    return sum(zlib.decompress(data)[1:4]) // 3


def test_it_is_drawn_in_light_and_in_dark(browser: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(report_of(HOSTILE).to_html(), encoding="utf-8")
    corners = []
    for options in ((), ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")):
        shot = tmp_path / "shot.png"
        browse(browser, tmp_path, f"--screenshot={shot}", "--window-size=500,700", *options)
        png = shot.read_bytes()
        assert len(png) > 20_000, "a blank page is smaller"
        corners.append(corner(png))
    assert corners[0] > 200 > 60 > corners[1]
