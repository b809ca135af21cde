"""What each backend can and cannot enforce in a guide, without a model.

In:  a Guide, and a tokenizer if its own limits are asked for.      Out: a LintReport.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import BackendNotInstalledError, GuideError, UnsatisfiableGuideError
from gd_plugin.grammars.backends.registry import Backend, backend_names, create_backend
from gd_plugin.grammars.closing import completion_bound, minimum_tokens
from gd_plugin.grammars.compiler import GrammarMatcherFactory
from gd_plugin.grammars.spelling import Speller
from gd_plugin.grammars.validation import byte_vocabulary
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.expression import NOTHING, CharSet, Literal, Node, char_set, num_positions
from gd_plugin.guides.guide import Guide
from gd_plugin.guides.language import TEXT_KINDS, language_of
from gd_plugin.guides.report import Problem
from gd_plugin.masks.bitmask import allocate_token_bitmask, row_has_valid_token

__all__ = ["LintReport", "lint"]

_LAST_LATIN = 0x24F
_PRINTABLE = frozenset(range(0x20, 0x7F))


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
    problems, backends = _ask_backends(guide, vocabulary)
    chosen, satisfiable, shortest = None, None, None
    try:
        compiled = GrammarMatcherFactory(vocabulary).compile(guide)
    except UnsatisfiableGuideError as error:
        satisfiable = False
        problems.append(_problem(error, ""))
    except GuideError as error:
        if not problems:
            problems.append(_problem(error, ""))
    else:
        chosen, satisfiable = compiled.backend, True
        shortest = minimum_tokens(compiled, vocabulary)
    spellable = None
    if tokenizer is not None and satisfiable:
        spellable = _is_spellable(guide, vocabulary)
        if spellable is False:
            problems.append(
                Problem("#", "tokenizer", "", "no tokens of this vocabulary spell a text that the guide allows")
            )
    return LintReport(
        ok=chosen is not None and spellable is not False,
        backend=chosen,
        problems=problems,
        backends=backends,
        satisfiable=satisfiable,
        spellable=spellable,
        shortest=shortest,
        completion_bound=completion_bound(guide, vocabulary, GuidedDecodingConfig()) if satisfiable else None,
        size=_size(guide),
    )


def _ask_backends(guide: Guide, vocabulary: Vocabulary) -> tuple[list[Problem], dict[str, str]]:
    """Return every backend's problems, and one line for each backend."""
    plain = Guide(guide.guide_type, guide.guide, guide.start)
    problems: list[Problem] = []
    lines: dict[str, str] = {}
    for name in backend_names():
        try:
            found = _problems(create_backend(name, vocabulary, GuidedDecodingConfig()), plain)
        except BackendNotInstalledError as error:
            lines[name] = str(error)
            continue
        problems.extend(found)
        lines[name] = f"{found[0].pointer}: {found[0].message}" if found else "enforces all of it"
    return problems, lines


def _problems(backend: Backend, guide: Guide) -> list[Problem]:
    try:
        return backend.problems(guide)
    except GuideError as error:
        return [_problem(error, backend.name)]


def _problem(error: GuideError, backend: str) -> Problem:
    return Problem(error.pointer or "#", error.keyword or type(error).__name__, backend, str(error))


def _size(guide: Guide) -> int | None:
    if guide.guide_type not in TEXT_KINDS:
        return None
    return sum(num_positions(node) for node in language_of(guide).rules.values())


def _is_spellable(guide: Guide, vocabulary: Vocabulary) -> bool | None:
    """Tell whether tokens can spell a text of the guide; None if that is not known."""
    speller = Speller.of(vocabulary)
    if guide.guide_type in TEXT_KINDS:
        # with all that cannot be spelled made impossible, is anything left?
        left = language_of(guide).mapped(lambda leaf: _spelled(leaf, speller)).productive()
        if left.rules[left.start] != NOTHING:
            return True
    elif all(speller.spell(bytes([byte])) is not None for byte in _PRINTABLE | set(guide.guide.encode())):
        # JSON needs no more than these, and what the guide itself writes out
        return True
    # tokens may spell together what they cannot apart
    row = allocate_token_bitmask(1, vocabulary.vocab_size)
    GrammarMatcherFactory(vocabulary).create(guide).fill_next_token_bitmask(row, 0)
    return None if row_has_valid_token(row[0], vocabulary.vocab_size) else False


def _spelled(leaf: Node, speller: Speller) -> Node:
    """Return the part of a leaf that tokens can spell."""
    if isinstance(leaf, Literal):
        return leaf if speller.spell(leaf.text.encode()) is not None else NOTHING
    if isinstance(leaf, CharSet):
        kept: list[tuple[int, int]] = []
        for low, high in leaf.ranges:
            # Latin letters one by one; of the rest of a large range, a few characters tell
            step = max(1, (high - low) // 256)
            latin = range(low, min(high, _LAST_LATIN) + 1)
            kept.extend((code, code) for code in {*latin, *range(low, high + 1, step)} if _spells(speller, code))
        return char_set(kept)
    return leaf


def _spells(speller: Speller, code: int) -> bool:
    return not 0xD800 <= code <= 0xDFFF and speller.spell(chr(code).encode()) is not None
