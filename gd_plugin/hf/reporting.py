"""The report of a call of `generate`, from what its session recorded.

In:  what `generate` returned, or nothing yet; the session and the results of the call.      Out: a Report.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.hf.results import RowResult
from gd_plugin.hf.session import Session, guide_of_row
from gd_plugin.reports.recorder import RowFacts
from gd_plugin.reports.report import Report

__all__ = ["read_report"]


def read_report(
    output: Any,
    session: Session,
    results: Sequence[RowResult],
    compiled: Sequence[CompiledGrammar | None],
    num_guides: int | None,
) -> Report:
    """Return the report of each row of `output`, or without it, of the rows before their last, unseen token.

    Raises:
        RuntimeError: the session recorded nothing.
    """
    if session.recorder is None:
        raise RuntimeError("nothing was recorded: pass report=True to GuidedLogitsProcessor")
    if output is None:
        sequences = np.concatenate([session.prompt, session.generated], axis=1)
    else:
        sequences = getattr(output, "sequences", output).cpu().numpy()
    facts = []
    for row, result in enumerate(results):
        grammar = compiled[guide_of_row(row, len(sequences), num_guides)]
        facts.append(
            RowFacts(
                status=result.status,
                text=result.text or "",
                guide=None if grammar is None else grammar.guide.guide_type.value,
                backend=None if grammar is None else grammar.backend,
                reason=None if grammar is None else grammar.reason,
            )
        )
    return session.recorder.report(sequences, session.prompt_len, facts, final=output is not None)
