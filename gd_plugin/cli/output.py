"""What the command writes: consoles that know a terminal from a pipe, JSON for machines, text that can harm no terminal.

In:  results.      Out: standard output for answers, standard error for progress and complaints.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any, Final, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gd_plugin.reports.printable import printable

__all__ = ["excerpt", "print_json", "printable", "stderr", "stdout"]

# lines are not folded where no terminal is
_PIPE_WIDTH: Final = 1 << 16
# code points before and behind the position that an excerpt shows
_BEFORE, _BEHIND = 60, 20


def stdout() -> Console:
    """Return the console for answers; no colour in a pipe or under NO_COLOR, and no line is cut there."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Return the console for progress and complaints."""
    return _console(sys.stderr)


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object to standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def excerpt(text: str, position: int) -> tuple[Text, Text]:
    """Return the part of a line around `position` and the line that underlines it."""
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    end = len(text) if end < 0 else end
    left, right = max(start, position - _BEFORE), min(end, position + _BEHIND)
    before = ("..." if left > start else "") + printable(text[left:position])
    bad = printable(text[position : position + 1]) if position < len(text) else ""
    behind = printable(text[position + 1 : right]) + ("..." if right < end else "")
    width = max(1, cell_len(bad))
    line = Text.assemble("  ", before, (bad, "bold red"), behind)
    return line, Text.assemble("  ", " " * cell_len(before), ("^" * width, "bold red"))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command's own end of it see that the reader has gone away."""
        raise BrokenPipeError


def _console(file: TextIO) -> Console:
    return _Console(file=file, highlight=False, width=None if file.isatty() else _PIPE_WIDTH)
