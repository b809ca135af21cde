"""Report: what a guide did to the output of one call of `generate`.

In:  what the recorder saw.      Out: rows of steps, totals, JSON with a documented shape; page.py makes it a page.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any, Final

__all__ = ["REPORT_VERSION", "Alternative", "CallTimes", "Report", "RowReport", "StepReport"]

# the shape of `to_json`, as report.schema.json describes it; raised when a field changes its meaning or goes
REPORT_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that might have come: its id, its text, and its probability before the mask."""

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class StepReport:
    r"""One generated token of one row. Figures are None where no scores were seen for it.

    Attributes:
        position: place among the row's generated tokens, from 0.
        token_id: the token that was chosen.
        text: what it spells; bytes that are no whole character as `\xNN`, a special token's name.
        special: the token has no text of its own (a stop token, for example).
        scored: the model's scores were seen. Drafted decoding asks for none where one token alone is legal.
        call: index into `Report.calls`, None where not scored.
        num_legal: tokens that the guide allows; None where the row was not guided.
        num_allowed: tokens that could be chosen: the legal ones, without those that a budget has refused.
        removed_mass: probability that the mask removed, 0 to 1.
        probability: of the chosen token, before the mask.
        probability_after: of the chosen token, after the mask.
        rank: of the chosen token before the mask, 1 for the likeliest.
        entropy_before: of the model's distribution, in nats.
        entropy_after: of what the mask left, in nats.
        overruled: the model's likeliest token was banned.
        banned: the likeliest of the banned tokens.
        allowed: the likeliest of the others.
    """

    position: int
    token_id: int
    text: str
    special: bool
    scored: bool
    call: int | None = None
    num_legal: int | None = None
    num_allowed: int | None = None
    removed_mass: float | None = None
    probability: float | None = None
    probability_after: float | None = None
    rank: int | None = None
    entropy_before: float | None = None
    entropy_after: float | None = None
    overruled: bool = False
    banned: tuple[Alternative, ...] = ()
    allowed: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class CallTimes:
    """One call of the processor, all rows together, in seconds.

    Attributes:
        start: since the first call.
        length: tokens of each row then, its prompt included.
        num_rows: rows that were looked at; finished ones are not.
        model: between the end of the call before and this one: the model's pass, and choosing the token.
        build: following the rows and filling their mask rows; the budget's work too.
        copy: bringing mask rows to the logits' device; 0 on a CPU, None where it runs beside the model (`overlap=True`).
        apply: banning columns.
        record: what the report itself has cost.
    """

    start: float
    length: int
    num_rows: int
    model: float | None
    build: float
    copy: float | None
    apply: float
    record: float


@dataclass(frozen=True, slots=True)
class RowReport:
    """One row of what `generate` returned.

    Attributes:
        row: its place in the batch.
        guide: kind of its guide, or None where it is unguided.
        backend: who enforced it, and `reason`, why.
        status: as in `RowResult`.
        text: the generated text.
        steps: its tokens, the stop token included.
    """

    row: int
    guide: str | None
    backend: str | None
    reason: str | None
    status: str
    text: str
    steps: tuple[StepReport, ...]

    def totals(self) -> dict[str, Any]:
        """Return sums and means over the steps."""
        scored = [step for step in self.steps if step.scored]
        return {
            "num_tokens": len(self.steps),
            "num_scored": len(scored),
            "num_overruled": sum(step.overruled for step in scored),
            "mean_removed_mass": _mean([step.removed_mass for step in scored]),
            "max_removed_mass": max((m for step in scored if (m := step.removed_mass) is not None), default=None),
            "mean_entropy_before": _mean([step.entropy_before for step in scored]),
            "mean_entropy_after": _mean([step.entropy_after for step in scored]),
            "mean_num_allowed": _mean([step.num_allowed for step in scored]),
            "mean_rank": _mean([step.rank for step in scored]),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What a guide did to the output of one call of `generate`.

    Attributes:
        final: False where the last token of each row is not known yet.
        vocab_size: width of the masks.
        rows: one for each row.
        calls: one for each call of the processor; with drafted decoding and with beams there are more than steps.
        num_not_kept: steps that were left out because the report had grown too large.
    """

    final: bool
    vocab_size: int
    rows: tuple[RowReport, ...]
    calls: tuple[CallTimes, ...]
    num_not_kept: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    def totals(self) -> dict[str, Any]:
        """Return sums over the calls, in seconds, and over the rows."""
        rows = [row.totals() for row in self.rows]
        totals: dict[str, Any] = {
            "num_rows": len(rows),
            "num_calls": len(self.calls),
            "num_tokens": sum(row["num_tokens"] for row in rows),
            "num_scored": sum(row["num_scored"] for row in rows),
            "num_overruled": sum(row["num_overruled"] for row in rows),
            "max_removed_mass": max((m for row in rows if (m := row["max_removed_mass"]) is not None), default=None),
        }
        for name in ("model", "build", "copy", "apply", "record"):
            values = [value for call in self.calls if (value := getattr(call, name)) is not None]
            totals[f"{name}_s"] = sum(values)
        return totals

    def to_json(self) -> str:
        """Return the report as one JSON object; `json_schema` describes it, its `version` says which edition it is."""
        record = {
            "schema": "gd_plugin.report",
            "version": REPORT_VERSION,
            "final": self.final,
            "vocab_size": self.vocab_size,
            "versions": self.versions,
            "num_not_kept": self.num_not_kept,
            "totals": self.totals(),
            "calls": [asdict(call) for call in self.calls],
            "rows": [{**asdict(row), "totals": row.totals()} for row in self.rows],
        }
        return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """Return the JSON Schema of what `to_json` writes."""
        text = files("gd_plugin.reports").joinpath("report.schema.json").read_text(encoding="utf-8")
        schema: dict[str, Any] = json.loads(text)
        return schema

    def to_html(self) -> str:
        """Return a page that shows the report; it needs no network, no script, and nothing beside it."""
        from gd_plugin.reports.page import render_page

        return render_page(self)


def _mean(values: "list[float | None] | list[int | None]") -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _finite(value: Any) -> Any:
    """Return `value` with null for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
