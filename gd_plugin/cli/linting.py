"""`gd-plugin lint`: what each backend can enforce of a guide, whether it can be met, and what it costs.

In:  a guide, a tokenizer or none.      Out: a table and an exit code.
"""

import time
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gd_plugin.cli.inputs import load_tokenizer, read_guide
from gd_plugin.cli.output import print_json, printable, stdout
from gd_plugin.errors import GuidedDecodingError
from gd_plugin.guides.guide import Guide

if TYPE_CHECKING:
    from gd_plugin.grammars.linting import LintReport
    from gd_plugin.grammars.vocabulary import Vocabulary

__all__ = ["lint_guide"]


def lint_guide(guide_name: str, tokenizer_name: str | None, *, as_json: bool) -> int:
    """Print the report and return the exit code.

    Raises:
        UserError: a file or the tokenizer cannot be read.
        GuideError: the guide is not well formed.
    """
    guide = read_guide(guide_name)
    # what needs torch is imported when the guide has been read: a wrong one is told at once
    from gd_plugin.grammars.linting import lint
    from gd_plugin.grammars.validation import byte_vocabulary
    from gd_plugin.grammars.vocabulary import Vocabulary

    vocabulary = None if tokenizer_name is None else Vocabulary.from_tokenizer(load_tokenizer(tokenizer_name))
    report = lint(guide, tokenizer=vocabulary)
    cost = _cost(guide, vocabulary or byte_vocabulary()) if report.backend is not None else {}
    if as_json:
        print_json(_record(guide_name, guide, report, cost))
    else:
        _print_report(guide_name, guide, report, cost, with_tokenizer=vocabulary is not None)
    return 0 if report.ok else 1


def _cost(guide: Guide, vocabulary: "Vocabulary") -> dict[str, float]:
    """Return seconds of a compile in a fresh cache and bytes that the result holds."""
    from gd_plugin.grammars.compiler import GrammarMatcherFactory

    factory = GrammarMatcherFactory(vocabulary)
    start = time.perf_counter()
    try:
        compiled = factory.compile(guide)
    except GuidedDecodingError:
        return {}
    return {"measured_compile_s": time.perf_counter() - start, "compiled_bytes": compiled.nbytes}


def _record(name: str, guide: Guide, report: "LintReport", cost: dict[str, float]) -> dict[str, Any]:
    problems = [
        {"pointer": p.pointer, "keyword": p.keyword, "backend": p.backend or None, "message": p.message}
        for p in report.problems
    ]
    return {
        "guide": name,
        "type": guide.guide_type.value,
        "ok": report.ok,
        "backend": report.backend,
        "backends": dict(report.backends),
        "problems": problems,
        "satisfiable": report.satisfiable,
        "spellable": report.spellable,
        "shortest": report.shortest,
        "completion_bound": report.completion_bound,
        "size": report.size,
        "compile_s": dict(report.compile_s),
        **cost,
    }


def _print_report(
    name: str, guide: Guide, report: "LintReport", cost: dict[str, float], *, with_tokenizer: bool
) -> None:
    console = stdout()
    verdict = ("can be enforced", "green") if report.ok else ("cannot be enforced", "red")
    chosen = f" by {report.backend}" if report.ok else ""
    console.print(Text.assemble(f"{printable(name)}: a {guide.guide_type.value} guide that ", verdict, chosen))
    table = Table("backend", "support", box=None, pad_edge=False)
    for backend, support in report.backends.items():
        mark = " (chosen)" if backend == report.backend else ""
        table.add_row(Text(backend + mark), Text(printable(support)))
    console.print(table)
    shown = set(report.backends.values())
    for problem in report.problems:
        line = f"{problem.pointer}: {problem.message}"
        if line not in shown:
            owner = f"{problem.backend}: " if problem.backend else ""
            console.print(
                Text.assemble(("problem  ", "red"), printable(f"{owner}{problem.pointer}: {problem.message}"))
            )
    unit = "tokens" if with_tokenizer else "bytes"
    console.print(f"satisfiable: {_answer(report.satisfiable)}")
    if with_tokenizer:
        console.print(f"spellable by this tokenizer: {_answer(report.spellable)}")
    console.print(f"shortest document known: {_number(report.shortest, unit)} (its stop token included)")
    console.print(f"from anywhere it is closed within: {_number(report.completion_bound, unit)}")
    if report.size is not None:
        console.print(f"size with repeats written out: {report.size} characters")
    if cost:
        console.print(
            f"compile: {1e3 * cost['measured_compile_s']:.1f} ms, {cost['compiled_bytes'] / 1024:.0f} KiB kept"
        )
    if not with_tokenizer:
        console.print("(over single bytes; --tokenizer tells of a model's tokens)", style="dim")


def _answer(value: bool | None) -> str:
    return "not known" if value is None else "yes" if value else "no"


def _number(value: int | None, unit: str) -> str:
    return "no bound is known" if value is None else f"{value} {unit}"
