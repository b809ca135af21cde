"""What the benchmarks share: interleaved rounds, quantiles, tables.

In:  contenders, functions that return what one measurement costs.     Out: for each its median and 20-80 % spread.
A machine's speed drifts, so contenders take turns within a round, and ratios are formed within rounds.
"""

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["Quantiles", "interleave", "machine", "print_table", "quantiles", "ratios", "write_json"]


@dataclass(frozen=True)
class Quantiles:
    """Median and the 20 % and 80 % quantiles of one quantity over the rounds."""

    median: float
    low: float
    high: float

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Write the median with its spread, every number multiplied by `scale`."""
        low, median, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} ({low}-{high})"


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return the quantiles of one value a round."""
    if len(values) == 1:
        return Quantiles(values[0], values[0], values[0])
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Quantiles(statistics.median(values), fifths[0], fifths[3])


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure every contender once a round, in turn, after one round that does not count."""
    measured: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, measure in contenders.items():
            value = measure()
            if number:
                measured[name].append(value)
    return measured


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Quantiles:
    """Return the quantiles of the ratios within each round."""
    return quantiles([a / b for a, b in zip(numerators, denominators, strict=True)])


def machine(packages: Sequence[str]) -> str:
    """Describe the machine and the versions of `packages`; a missing package is named."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    processor = platform.processor() or platform.machine()
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return f"{processor}, Python {platform.python_version()}; {', '.join(found)}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for number, row in enumerate([header, *rows]):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def write_json(path: str | None, records: Sequence[Mapping[str, object]]) -> None:
    """Write the measurements, if a path was given."""
    if path:
        plain = [
            {key: asdict(value) if isinstance(value, Quantiles) else value for key, value in record.items()}
            for record in records
        ]
        Path(path).write_text(json.dumps(plain, indent=1) + "\n")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
