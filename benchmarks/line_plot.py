"""Panels of lines as an SVG file, without a plotting library.

In:  panels of named lines, each a list of (place, value > 0).     Out: SVG text, values on a logarithmic axis.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["svg_lines"]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
WIDTH, HEIGHT, MARGIN = 280, 220, 48


def svg_lines(panels: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]], *, x_label: str, y_label: str) -> str:
    """Return an SVG with one panel a title; `panels` maps titles to lines, lines to their points, left to right.

    Raises:
        ValueError: a value that has no place on a logarithmic axis.
    """
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    values = [value for lines in panels.values() for points in lines.values() for _, value in points]
    if any(not 0 < value < math.inf for value in values):
        raise ValueError("values must be positive and finite: the axis is logarithmic")
    low, high = (math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))) if values else (0, 1)
    high = max(high, low + 1)
    parts = []
    for number, (title, lines) in enumerate(panels.items()):
        left = number * (WIDTH + MARGIN) + MARGIN
        places = list(dict.fromkeys(place for points in lines.values() for place, _ in points))
        parts.append(_text(left + WIDTH / 2, 14, title))
        parts.append(
            f'<rect x="{left}" y="{MARGIN // 2}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
        )

        def x_of(place: str, left: int = left, places: list[str] = places) -> float:
            return left + WIDTH * (places.index(place) + 0.5) / len(places)

        for power in range(low, high + 1):
            parts.append(_text(left - 4, _y_of(10.0**power, low, high) + 4, f"{10.0**power:g}", anchor="end"))
        parts += [_text(x_of(place), MARGIN // 2 + HEIGHT + 12, place) for place in places]
        parts.append(_text(left + WIDTH / 2, MARGIN // 2 + HEIGHT + 26, x_label))
        for name, points in lines.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            track = " ".join(f"{x_of(place):.1f},{_y_of(value, low, high):.1f}" for place, value in points)
            parts.append(f'<polyline points="{track}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    parts.append(_text(4, 14, y_label, anchor="start"))
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_text(MARGIN + 140 * number, HEIGHT + 74, name, anchor="start", colour=colour))
    width = max(len(panels) * (WIDTH + MARGIN), len(names) * 140) + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 90}" width="{width}" '
        f'height="{HEIGHT + 90}" font-family="sans-serif" '
        f'font-size="10"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _y_of(value: float, low: int, high: int) -> float:
    return MARGIN // 2 + HEIGHT * (1 - (math.log10(value) - low) / (high - low))


def _text(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = "#000") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
