"""The report as one HTML page: coloured tokens, what was banned at each, plots, a time line.

In:  a Report, whose texts a model wrote and so may say anything.      Out: HTML that needs no network and nothing beside it.
Kept here: every text is escaped, and the page holds no script at all; a policy in its head forbids scripts, images and
requests even if an escape were missing.
"""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from gd_plugin.reports.plots import calls_plot, steps_plot, time_line
from gd_plugin.reports.printable import printable
from gd_plugin.reports.report import Alternative, Report, RowReport, StepReport

__all__ = ["render_page"]

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
# steps of a row and rows that a page shows; the JSON has all of them
_MAX_STEPS: Final = 2000
_MAX_ROWS: Final = 64


def render_page(report: Report) -> str:
    """Return the page."""
    style = files("gd_plugin.reports").joinpath("page.css").read_text(encoding="utf-8")
    rows = report.rows[:_MAX_ROWS]
    # which row is shown is a matter of style alone; browsers without :has show all of them
    chosen = "".join(f"body:has(#pick-{row.row}:checked) #row-{row.row}{{display:block}}" for row in rows)
    picks = "".join(_pick(row, checked=place == 0) for place, row in enumerate(rows))
    picker = f'<fieldset class="picker"><legend>Row</legend>{picks}</fieldset>' if len(rows) > 1 else ""
    sections = "".join(_row(row) for row in rows)
    left_out = len(report.rows) - len(rows)
    note = f"<p>{left_out} more rows are in the JSON alone.</p>" if left_out else ""
    if report.num_not_kept:
        note += f"<p>The report had grown too large: {report.num_not_kept} steps were not kept.</p>"
    if not report.final:
        note += "<p>Made while generating: each row's last token is not here yet.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>Guided decoding report</title>'
        f"<style>{style}@supports selector(:has(a)){{{chosen}}}</style></head><body>"
        f"<header><h1>What the guide did</h1>{_facts(_totals(report))}</header>"
        f"<main>{note}{picker}{sections}{_times(report)}</main><footer>{_versions(report)}</footer></body></html>\n"
    )


def _totals(report: Report) -> list[tuple[str, str]]:
    totals = report.totals()
    guide = totals["build_s"] + totals["copy_s"] + totals["apply_s"]
    return [
        ("rows", str(totals["num_rows"])),
        ("tokens", str(totals["num_tokens"])),
        ("model overruled", f"{totals['num_overruled']} times"),
        ("model and sampling", _seconds(totals["model_s"])),
        ("guide", f"{_seconds(guide)} (build {_seconds(totals['build_s'])}, copy {_seconds(totals['copy_s'])}, "
                  f"apply {_seconds(totals['apply_s'])})"),
        ("this report", _seconds(totals["record_s"])),
    ]  # fmt: skip


def _pick(row: RowReport, *, checked: bool) -> str:
    state = " checked" if checked else ""
    return (
        f'<label class="pick"><input type="radio" name="row" id="pick-{row.row}"{state}> {row.row} '
        f'<span class="status {_status(row)}">{escape(row.status)}</span></label>'
    )


def _row(row: RowReport) -> str:
    guide = f"{row.guide} guide, {row.backend}" if row.guide else "no guide"
    totals = row.totals()
    facts = [
        ("guide", f"{guide}" + (f": {row.reason}" if row.reason else "")),
        ("tokens", f"{totals['num_tokens']}, {totals['num_scored']} of them scored by the model"),
        ("model overruled", f"{totals['num_overruled']} times"),
        (
            "removed mass",
            f"{_figure(totals['mean_removed_mass'])} a step, {_figure(totals['max_removed_mass'])} at most",
        ),
        (
            "entropy",
            f"{_figure(totals['mean_entropy_before'])} nats before, {_figure(totals['mean_entropy_after'])} after",
        ),
        ("rank of the chosen token", f"{_figure(totals['mean_rank'])} on average"),
    ]
    steps = row.steps[:_MAX_STEPS]
    left_out = len(row.steps) - len(steps)
    note = f"<p>The first {_MAX_STEPS} steps; {left_out} more are in the JSON.</p>" if left_out else ""
    name = f"Row {row.row}"
    return (
        f'<section class="row" id="row-{row.row}"><h2>{name}: <span class="status {_status(row)}">{escape(row.status)}'
        f"</span></h2>{_facts(facts)}{note}"
        '<p class="legend"><span class="t" style="--m:0">nothing removed</span> '
        '<span class="t" style="--m:50%">half</span> <span class="t" style="--m:100%">everything removed</span> '
        '<span class="t over" style="--m:50%">model overruled</span> '
        '<span class="t unscored">not scored</span> point at a token, or focus it, for what was banned</p>'
        f'<div class="output" tabindex="-1" aria-label="{name}, token by token">{"".join(map(_token, steps))}</div>'
        f'<figure>{steps_plot(steps, name)}<figcaption><span class="key bar"></span>removed mass '
        '<span class="key overruled"></span>the model overruled <span class="key before"></span>entropy before '
        '<span class="key after"></span>entropy after</figcaption></figure>'
        f"<details><summary>All figures as a table</summary>{_table(steps)}</details></section>"
    )


def _token(step: StepReport) -> str:
    """One token; what is known of it unfolds at the page's foot when it is pointed at or focused."""
    shown = escape(printable(step.text, keep="\n")).replace(
        "\n", '<span class="mark" aria-hidden="true">\u21b5</span>\n'
    )
    kinds = ["t"]
    kinds += ["special"] if step.special else []
    kinds += ["over"] if step.overruled else []
    kinds += [] if step.scored else ["unscored"]
    strength = round(100 * (step.removed_mass or 0.0))
    return (
        f'<span class="{" ".join(kinds)}" tabindex="0" style="--m:{strength}%">{shown}'
        f'<span class="inspector" role="status">{_inspector(step)}</span></span>'
    )


def _inspector(step: StepReport) -> str:
    title = (
        f'<b>step {step.position}: <code>{_shown(step.text)}</code></b> <span class="dim">token {step.token_id}</span>'
    )
    if not step.scored:
        return f"{title}<br>The model was not asked: this token alone was legal."
    facts = [
        ("rank before", _figure(step.rank)),
        ("probability", f"{_figure(step.probability)} &rarr; {_figure(step.probability_after)}"),
        ("removed mass", _figure(step.removed_mass)),
        ("entropy", f"{_figure(step.entropy_before)} &rarr; {_figure(step.entropy_after)} nats"),
        ("legal tokens", "not guided" if step.num_legal is None else str(step.num_legal)),
    ]
    if step.num_legal is not None and step.num_allowed is not None and step.num_allowed < step.num_legal:
        facts.append(("left by the budget", str(step.num_allowed)))
    listed = " ".join(f"<span>{name} <b>{value}</b></span>" for name, value in facts)
    banned = _alternatives("banned", step.banned) if step.banned else ""
    return f'{title}<span class="facts">{listed}</span>{banned}{_alternatives("left", step.allowed)}'


def _alternatives(name: str, alternatives: Iterable[Alternative]) -> str:
    items = " ".join(
        f'<span class="alternative"><code>{_shown(item.text)}</code> {_figure(item.probability)}</span>'
        for item in alternatives
    )
    return f'<span class="alternatives {name}"><b>{name}</b> {items}</span>'


def _table(steps: Sequence[StepReport]) -> str:
    heads = (
        "step", "token", "rank", "probability", "after", "removed mass", "entropy", "after", "legal", "banned, likeliest",
    )  # fmt: skip
    lines = []
    for step in steps:
        banned = (
            f"<code>{_shown(step.banned[0].text)}</code> {_figure(step.banned[0].probability)}" if step.banned else ""
        )
        cells = [
            str(step.position), f"<code>{_shown(step.text)}</code>", _figure(step.rank), _figure(step.probability),
            _figure(step.probability_after), _figure(step.removed_mass), _figure(step.entropy_before),
            _figure(step.entropy_after), "" if step.num_legal is None else str(step.num_legal), banned,
        ]  # fmt: skip
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _times(report: Report) -> str:
    calls = report.calls[:_MAX_STEPS]
    note = f"<p>The first {_MAX_STEPS} calls of {len(report.calls)}.</p>" if len(calls) < len(report.calls) else ""
    return (
        f'<section><h2>Time</h2>{note}<figure>{time_line(calls)}<figcaption><span class="key model"></span>model and '
        'sampling <span class="key build"></span>guide <span class="key record"></span>this report</figcaption></figure>'
        f'<figure>{calls_plot(calls)}<figcaption><span class="key build"></span>build the masks <span class="key copy">'
        '</span>copy them to the device <span class="key apply"></span>apply them</figcaption></figure></section>'
    )


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(printable(value))}</dd></div>" for name, value in facts)
    return f"<dl>{items}</dl>"


def _versions(report: Report) -> str:
    named = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f"<p>{escape(named)}; masks {report.vocab_size} tokens wide</p>"


def _status(row: RowReport) -> str:
    return row.status if row.status in ("complete", "truncated", "dead_end") else "unguided"


def _shown(text: str) -> str:
    """A token's text in one line, its blanks visible."""
    return escape(printable(text).replace(" ", "\u2423"))


def _figure(value: float | int | None) -> str:
    if value is None:
        return "not known"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.2f} ms"
