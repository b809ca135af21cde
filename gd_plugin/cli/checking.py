"""`gd-plugin check`: do these texts match this guide?

In:  a guide, texts.      Out: one line a text, the first bad position underlined, and an exit code.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from gd_plugin.cli.inputs import NamedText, load_tokenizer, read_guide, read_text
from gd_plugin.cli.output import excerpt, print_json, printable, stdout
from gd_plugin.guides.guide import GuideType
from gd_plugin.guides.problem import Problem

if TYPE_CHECKING:
    from gd_plugin.grammars.linting import LintReport
    from gd_plugin.grammars.validation import Verdict

__all__ = ["check_texts", "expected_text", "print_verdict", "verdict_record"]

_KINDS: Final = frozenset(kind.value for kind in GuideType)


def check_texts(
    guide_name: str,
    arguments: Sequence[str],
    tokenizer_name: str | None,
    *,
    keep_newline: bool,
    max_bytes: int,
    as_json: bool,
) -> int:
    """Check every text and return the exit code.

    Raises:
        UserError: a file cannot be read.
        GuideError: the guide is wrong, or no backend can enforce it.
    """
    guide = read_guide(guide_name)
    # what needs torch is imported when the guide has been read: a wrong one is told at once
    from gd_plugin.grammars.linting import lint
    from gd_plugin.grammars.validation import validate
    from gd_plugin.grammars.vocabulary import Vocabulary

    if not arguments:
        report = lint(guide)
        messages = _deciding_messages(report)
        if as_json:
            print_json({"guide": guide_name, "ok": report.ok, "problems": messages})
        elif report.ok:
            stdout().print(
                f"{printable(guide_name)}: a sound {guide.guide_type.value} guide ({report.backend})", markup=False
            )
        else:
            for message in messages:
                stdout().print(f"{printable(guide_name)}: {printable(message)}", markup=False)
        return 0 if report.ok else 1
    # all are read before the first is judged: a missing file is no answer about the others
    texts = [read_text(a, n, keep_newline=keep_newline, max_bytes=max_bytes) for n, a in enumerate(arguments, 1)]
    vocabulary = None if tokenizer_name is None else Vocabulary.from_tokenizer(load_tokenizer(tokenizer_name))
    verdicts = [validate(guide, text.text, tokenizer=vocabulary) for text in texts]
    if as_json:
        records = [verdict_record(text, verdict) for text, verdict in zip(texts, verdicts, strict=True)]
        print_json({"guide": guide_name, "ok": all(verdicts), "texts": records})
    else:
        for text, verdict in zip(texts, verdicts, strict=True):
            print_verdict(text, verdict)
    return 0 if all(verdicts) else 1


def _deciding_messages(report: "LintReport") -> list[str]:
    """Return why a guide is not sound; nothing about a backend that is not needed, or that takes no guides of its kind."""
    if report.ok:
        return []
    for_all = [problem for problem in report.problems if not problem.backend]
    # a problem of the whole kind (its keyword is the kind) is no fault of this guide, unless there is no other
    own = [problem for problem in report.problems if problem.keyword not in _KINDS]
    return list(dict.fromkeys(_placed(problem) for problem in for_all or own or report.problems))


def _placed(problem: Problem) -> str:
    return problem.message if problem.message.startswith(problem.pointer) else f"{problem.pointer}: {problem.message}"


def verdict_record(text: NamedText, verdict: "Verdict") -> dict[str, Any]:
    """Return a verdict as JSON; `position` counts characters from 0, `line` and `column` from 1."""
    record: dict[str, Any] = {"name": text.name, "ok": verdict.ok, "complete": verdict.complete}
    if verdict.position is not None:
        line, column = _place(text.text, verdict.position)
        record |= {"position": verdict.position, "line": line, "column": column}
        record |= {"expected": list(verdict.expected), "pointer": verdict.pointer}
    return record


def print_verdict(text: NamedText, verdict: "Verdict") -> None:
    """Print one verdict for people."""
    console = stdout()
    name = printable(text.name)
    if verdict.position is None:
        console.print(Text.assemble(name, ": ", ("matches", "green")))
        return
    line, column = _place(text.text, verdict.position)
    ends = verdict.position >= len(text.text)
    problem = "breaks off too early" if ends else "does not match from here"
    console.print(Text.assemble(f"{name}:{line}:{column}: ", (problem, "red")))
    for shown in excerpt(text.text, verdict.position):
        console.print(shown, soft_wrap=True)
    expected = expected_text(verdict.expected) or "nothing: no way on from here"
    where = "" if verdict.pointer is None else f"  (in {printable(verdict.pointer)})"
    console.print(f"  expected: {expected}{where}", markup=False)


def expected_text(expected: Sequence[str]) -> str:
    """Return what may come next in one line."""
    return ", ".join("space" if item == " " else printable(item) for item in expected)


def _place(text: str, position: int) -> tuple[int, int]:
    """Return line and column, both from 1."""
    start = text.rfind("\n", 0, position) + 1
    return text.count("\n", 0, position) + 1, position - start + 1
