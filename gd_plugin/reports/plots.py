"""The page's plots, as SVG text that takes its colours from the page.

In:  steps of a row, calls of a processor.      Out: SVG with a title and a description, and a note at every mark.
"""

from collections.abc import Sequence
from html import escape

from gd_plugin.reports.printable import printable
from gd_plugin.reports.report import CallTimes, StepReport

__all__ = ["calls_plot", "steps_plot", "time_line"]

_WIDTH, _LEFT, _RIGHT = 960, 56, 12
_PLOT = _WIDTH - _LEFT - _RIGHT
_PANEL = 96
_PARTS = ("build", "copy", "apply")


def steps_plot(steps: Sequence[StepReport], name: str) -> str:
    """Return two panels over the steps of a row: removed probability mass; entropy before and after the mask."""
    highest = max((s.entropy_before or 0.0 for s in steps), default=0.0)
    highest = max([highest, 1.0, *(s.entropy_after or 0.0 for s in steps)])
    width = _PLOT / max(1, len(steps))
    top, bottom = 18, 18 + _PANEL + 34
    parts = [_axis(top, "removed mass", ["1", "0"]), _axis(bottom, "entropy, nats", [f"{highest:.1f}", "0"])]
    for place, step in enumerate(steps):
        if step.removed_mass is None:
            continue
        height = max(_PANEL * min(1.0, step.removed_mass), 0.5)
        note = f"step {step.position}, {printable(step.text)}: the mask removed {step.removed_mass:.3f}"
        kind = "bar overruled" if step.overruled else "bar"
        parts.append(_bar(_LEFT + place * width, top + _PANEL - height, width, height, kind, note))
    for field in ("entropy_before", "entropy_after"):
        points = [
            f"{_LEFT + (place + 0.5) * width:.1f},{bottom + _PANEL * (1 - value / highest):.1f}"
            for place, step in enumerate(steps)
            if (value := getattr(step, field)) is not None
        ]
        parts.append(f'<polyline class="{field}" points="{" ".join(points)}"/>')
    end = bottom + _PANEL
    parts.append(_text(_LEFT, end + 16, "step 0", "start"))
    parts.append(_text(_WIDTH - _RIGHT, end + 16, f"step {max(0, len(steps) - 1)}", "end"))
    return _svg(end + 24, f"{name}: removed probability mass and entropy at each step", "".join(parts))


def calls_plot(calls: Sequence[CallTimes]) -> str:
    """Return what building, copying and applying the masks took in each call, as stacked bars."""
    highest = max((sum(getattr(call, part) or 0.0 for part in _PARTS) for call in calls), default=0.0) or 1e-6
    width = _PLOT / max(1, len(calls))
    top = 18
    parts = [_axis(top, "guide, ms a call", [f"{1e3 * highest:.2f}", "0"])]
    for place, call in enumerate(calls):
        floor = float(top + _PANEL)
        for part in _PARTS:
            seconds = getattr(call, part) or 0.0
            height = _PANEL * seconds / highest
            floor -= height
            if height > 0:
                note = f"call {place}, {call.num_rows} rows: {part} {1e3 * seconds:.3f} ms"
                parts.append(_bar(_LEFT + place * width, floor, width, height, part, note))
    end = top + _PANEL
    parts.append(_text(_LEFT, end + 16, "call 0", "start"))
    parts.append(_text(_WIDTH - _RIGHT, end + 16, f"call {max(0, len(calls) - 1)}", "end"))
    return _svg(end + 24, "Time that building, copying and applying the masks took in each call", "".join(parts))


def time_line(calls: Sequence[CallTimes]) -> str:
    """Return the calls along the clock: the model between them, the guide in them."""
    spans = [
        (call, sum(getattr(call, part) or 0.0 for part in _PARTS)) for call in sorted(calls, key=lambda c: c.start)
    ]
    total = max((call.start + guide + call.record for call, guide in spans), default=0.0) or 1e-6
    scale = _PLOT / total
    parts = []
    for call, guide in spans:
        start = _LEFT + call.start * scale
        if call.model:
            note = f"model and sampling: {1e3 * call.model:.2f} ms"
            parts.append(_bar(start - call.model * scale, 18, call.model * scale, 22, "model", note))
        parts.append(_bar(start, 18, max(guide * scale, 0.4), 22, "build", f"guide: {1e3 * guide:.3f} ms"))
        record = f"this report: {1e3 * call.record:.3f} ms"
        parts.append(_bar(start + guide * scale, 18, max(call.record * scale, 0.2), 22, "record", record))
    parts += [_text(_LEFT, 56, "0 s", "start"), _text(_WIDTH - _RIGHT, 56, f"{total:.3f} s", "end")]
    return _svg(64, "Time line: the model, the guide, and this report", "".join(parts))


def _axis(top: float, name: str, labels: Sequence[str]) -> str:
    high, low = labels
    return (
        f'<rect class="frame" x="{_LEFT}" y="{top}" width="{_PLOT}" height="{_PANEL}"/>'
        + _text(_LEFT, top - 6, name, "start")
        + _text(_LEFT - 6, top + 10, high, "end")
        + _text(_LEFT - 6, top + _PANEL, low, "end")
    )


def _bar(x: float, y: float, width: float, height: float, kind: str, note: str) -> str:
    # a hair's breadth of the neighbour shows between bars that are wide enough
    width = width - 1 if width > 3 else width
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}">'
        f"<title>{escape(note)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, title: str, body: str) -> str:
    label = escape(title)
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{label}">{body}</svg>'
