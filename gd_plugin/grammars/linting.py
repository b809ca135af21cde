"""What each backend can and cannot enforce in a guide, without a model.

In:  a Guide, and a tokenizer if its own limits are asked for.      Out: a LintReport.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import (
    BackendNotInstalledError,
    CompileTimeoutError,
    GuideError,
    GuideTooLargeError,
    UnsatisfiableGuideError,
    UnsupportedGuideError,
)
from gd_plugin.grammars.backends.registry import Backend, backend_names, create_backend
from gd_plugin.grammars.closing import completion_bound, minimum_tokens
from gd_plugin.grammars.compiler import GrammarMatcherFactory, check_sound
from gd_plugin.grammars.spellable import is_spellable
from gd_plugin.grammars.validation import byte_vocabulary
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.guides.language import TEXT_KINDS
from gd_plugin.guides.limits import num_written_positions
from gd_plugin.guides.problem import Problem

__all__ = ["LintReport", "lint"]


@dataclass(frozen=True)
class LintReport:
    """What `lint` found.

    Attributes:
        ok: some backend enforces all of the guide, and it can be satisfied and spelled.
        backend: the backend "auto" would choose, or None.
        problems: everything that stands against the guide; `Problem.backend` is "" where it holds for all.
        backends: per backend, "enforces all of it", or why not.
        satisfiable: whether any text matches, or None if that is not known.
        spellable: whether this tokenizer can spell a text that matches; None without a tokenizer, or if not known.
        shortest: tokens of the shortest completion known, its stop token included (of this tokenizer, or bytes without
            one); None if none is known, and then no `max_new_tokens` can be guaranteed.
        completion_bound: tokens that complete the guide from anywhere; None if no such bound is proven, and then under
            `max_new_tokens` every step is checked as if it were near the limit.
        size: characters of the guide with its repeats written out, what compile cost grows with; None for JSON guides.
        compile_s: per backend that can tell without trying (outlines-core), about how long compiling takes at most;
            nothing for a backend that refuses the guide, also because it would take longer than `compile_timeout_s`.
    """

    ok: bool
    backend: str | None
    problems: list[Problem] = field(default_factory=list)
    backends: Mapping[str, str] = field(default_factory=dict)
    satisfiable: bool | None = None
    spellable: bool | None = None
    shortest: int | None = None
    completion_bound: int | None = None
    size: int | None = None
    compile_s: Mapping[str, float] = field(default_factory=dict)


def lint(guide: Guide, *, tokenizer: Any = None) -> LintReport:
    """Report what each installed backend can enforce in `guide`, and whether it can be satisfied and spelled.

    Args:
        guide: the guide.
        tokenizer: any tokenizer `Vocabulary.from_tokenizer` reads, or a Vocabulary.

    Raises:
        TypeError: `guide` is no Guide.
        VocabularyError: the tokenizer cannot be read.
    """
    if not isinstance(guide, Guide):
        raise TypeError(f"guide must be a Guide, got {type(guide).__name__}; use Guide.json_schema(...) and so on")
    if tokenizer is None or isinstance(tokenizer, Vocabulary):
        vocabulary = tokenizer or byte_vocabulary()
    else:
        vocabulary = Vocabulary.from_tokenizer(tokenizer)
    try:
        check_sound(guide, GuidedDecodingConfig())
    except GuideError as error:
        # engines would be asked about something that they cannot read
        unsatisfiable = isinstance(error, UnsatisfiableGuideError)
        return LintReport(
            ok=False,
            backend=None,
            problems=[_problem(error, "")],
            satisfiable=False if unsatisfiable else None,
            size=None if isinstance(error, GuideTooLargeError) else _size(guide),
        )
    problems, backends, compile_s = _ask_backends(guide, vocabulary)
    chosen, satisfiable, shortest = None, None, None
    spellable = None
    try:
        compiled = GrammarMatcherFactory(vocabulary).compile(guide)
    except UnsatisfiableGuideError as error:
        satisfiable = tokenizer is not None and _is_satisfiable(guide)
        spellable = False if satisfiable else None
        problems.insert(0, _problem(error, ""))
    except UnsupportedGuideError as error:
        # the backends have said so, unless none is installed
        if not problems:
            problems.append(_problem(error, ""))
    except (GuideError, CompileTimeoutError) as error:
        problems.insert(0, _problem(error, ""))
    else:
        chosen, satisfiable = compiled.backend, True
        shortest = minimum_tokens(compiled, vocabulary)
        if tokenizer is not None:
            spellable = True if shortest is not None else is_spellable(compiled, vocabulary)
    return LintReport(
        ok=chosen is not None,
        backend=chosen,
        problems=problems,
        backends=backends,
        satisfiable=satisfiable,
        spellable=spellable,
        shortest=shortest,
        completion_bound=completion_bound(guide, vocabulary, GuidedDecodingConfig()) if chosen else None,
        compile_s=compile_s,
        size=_size(guide),
    )


def _ask_backends(guide: Guide, vocabulary: Vocabulary) -> tuple[list[Problem], dict[str, str], dict[str, float]]:
    """Return every backend's problems, one line for each backend, and what compiling is estimated to take."""
    plain = Guide(guide.guide_type, guide.guide, guide.start)
    problems: list[Problem] = []
    lines: dict[str, str] = {}
    compile_s: dict[str, float] = {}
    for name in backend_names():
        try:
            backend = create_backend(name, vocabulary, GuidedDecodingConfig())
        except BackendNotInstalledError as error:
            lines[name] = str(error)
            continue
        found = _problems(backend, plain)
        estimate = None if found else backend.estimate_compile_s(plain)
        if estimate is not None:
            compile_s[name] = estimate
        problems.extend(found)
        lines[name] = f"{found[0].pointer}: {found[0].message}" if found else "enforces all of it"
    return problems, lines, compile_s


def _problems(backend: Backend, guide: Guide) -> list[Problem]:
    try:
        return backend.problems(guide)
    except GuideError as error:
        return [_problem(error, backend.name)]


def _problem(error: GuideError | CompileTimeoutError, backend: str) -> Problem:
    if isinstance(error, CompileTimeoutError):
        return Problem("#", "compile_timeout_s", backend, str(error))
    return Problem(error.pointer or "#", error.keyword or type(error).__name__, backend, str(error))


def _is_satisfiable(guide: Guide) -> bool:
    """Tell whether a guide that a tokenizer's tokens do not spell has a text that bytes do."""
    try:
        GrammarMatcherFactory(byte_vocabulary()).compile(guide)
    except GuideError:
        return False
    return True


def _size(guide: Guide) -> int | None:
    try:
        return num_written_positions(guide) if guide.guide_type in TEXT_KINDS else None
    except GuideError:
        return None
