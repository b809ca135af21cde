"""`gd-plugin bench`: what this guide costs with this tokenizer on this machine, beside the bare engines.

In:  a guide, a tokenizer.      Out: a table of medians, and ratios formed within each round.
A machine's speed drifts, so ours and the bare engine take turns; a walk is one text of the guide, the same for both.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from rich.table import Table

from gd_plugin.cli.inputs import load_tokenizer
from gd_plugin.cli.output import print_json, printable, stdout
from gd_plugin.cli.raw_engines import RawEngine, raw_engine
from gd_plugin.errors import GuidedDecodingError
from gd_plugin.grammars.backends.registry import CompiledGrammar, backend_names
from gd_plugin.grammars.closing import find_certificate
from gd_plugin.grammars.compiler import GrammarMatcherFactory
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.apply import apply_token_bitmask_
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns

__all__ = ["bench_guide"]

_MAX_STEPS: Final = 200


@dataclass
class Measured:
    """Seconds of one backend, one value a round; `raw_*` are the bare engine's, empty where it cannot be compared."""

    backend: str
    num_steps: int = 0
    compile: list[float] = field(default_factory=list)
    raw_compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    raw_mask: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    raw_apply: list[float] = field(default_factory=list)
    note: str = ""


def bench_guide(guide: Guide, guide_name: str, tokenizer_name: str, *, rounds: int, rows: int, as_json: bool) -> int:
    """Measure, print, and return the exit code: 1 if no backend takes the guide.

    Raises:
        UserError: the tokenizer cannot be read.
    """
    vocabulary = Vocabulary.from_tokenizer(load_tokenizer(tokenizer_name))
    found = [_measure(name, guide, vocabulary, rounds, rows) for name in backend_names()]
    if as_json:
        print_json(
            {
                "guide": guide_name,
                "vocab_size": vocabulary.vocab_size,
                "rounds": rounds,
                "rows": rows,
                "threads": torch.get_num_threads(),
                "backends": [_record(measured) for measured in found],
            }
        )
    else:
        _print_table(guide_name, vocabulary, found, rounds, rows)
    return 0 if any(measured.compile for measured in found) else 1


def _measure(name: str, guide: Guide, vocabulary: Vocabulary, rounds: int, rows: int) -> Measured:
    measured = Measured(name)
    try:
        # what is done once a vocabulary comes before the first measured compile
        compiled = GrammarMatcherFactory(vocabulary, backend=name).compile(guide)
        walk = _walk(compiled, vocabulary)
    except GuidedDecodingError as error:
        measured.note = str(error).splitlines()[0]
        return measured
    measured.num_steps = len(walk)
    raw = raw_engine(name, guide, vocabulary)
    raw_compiled: Any = None
    if raw is not None:
        try:
            raw_compiled = raw.compile()
        except Exception as error:  # an engine refuses in ways of its own; then there is nothing to compare
            measured.note = f"the bare engine refuses it: {(str(error).splitlines() or [''])[0]}"
            raw = None
    for number in range(rounds + 1):
        if number == 1:
            # what only a first call pays for is not counted
            measured = Measured(name, measured.num_steps, note=measured.note)
        factory = GrammarMatcherFactory(vocabulary, backend=name)
        measured.compile.append(_seconds(partial(factory.compile, guide)))
        if raw is not None:
            measured.raw_compile.append(_seconds(raw.compile))
        bitmask = allocate_token_bitmask(rows, vocabulary.vocab_size)
        measured.mask.append(_walk_seconds(compiled, walk, bitmask))
        if raw is not None and (seconds := _raw_walk_seconds(raw, raw_compiled, walk, bitmask)) is not None:
            measured.raw_mask.append(seconds)
        _apply_round(measured, raw, bitmask, vocabulary.vocab_size)
    if raw is not None and not measured.raw_mask and not measured.note:
        measured.note = "the bare engine's language is another one: it refuses the text that was walked"
    return measured


def _walk(compiled: CompiledGrammar, vocabulary: Vocabulary) -> list[int]:
    """Return one text of the guide: tokens drawn by a fixed seed, completed by the shortest way known."""
    generator = torch.Generator().manual_seed(0)
    matcher = compiled.create_matcher()
    bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)
    tokens: list[int] = []
    while len(tokens) < _MAX_STEPS:
        matcher.fill_next_token_bitmask(bitmask, 0)
        legal = torch.from_numpy(legal_columns(bitmask[0], vocabulary.vocab_size)).nonzero()[:, 0]
        text = [i for i in legal.tolist() if i not in vocabulary.stop_token_set] if len(legal) < 64 else legal.tolist()
        if not text:
            break
        token_id = text[int(torch.randint(len(text), (1,), generator=generator))]
        if token_id in vocabulary.stop_token_set or not matcher.accept_token(token_id):
            break
        tokens.append(token_id)
    if len(tokens) < _MAX_STEPS:
        return tokens
    return tokens if matcher.is_accepting() else [*tokens, *(find_certificate(matcher, vocabulary) or ())[:-1]]


def _walk_seconds(compiled: CompiledGrammar, walk: list[int], bitmask: torch.Tensor) -> float:
    """Return seconds a step: one mask row and one accepted token."""
    matcher = compiled.create_matcher()
    start = time.perf_counter()
    for token_id in walk:
        matcher.fill_next_token_bitmask(bitmask, 0)
        matcher.accept_token(token_id)
    return (time.perf_counter() - start) / max(1, len(walk))


def _raw_walk_seconds(raw: RawEngine, compiled: Any, walk: list[int], bitmask: torch.Tensor) -> float | None:
    fill, accept = raw.start(compiled)
    start = time.perf_counter()
    for token_id in walk:
        fill(bitmask)
        if not accept(token_id):
            return None
    return (time.perf_counter() - start) / max(1, len(walk))


def _apply_round(measured: Measured, raw: RawEngine | None, bitmask: torch.Tensor, vocab_size: int) -> None:
    """Apply the walk's last row to every row of a batch."""
    bitmask[:] = bitmask[0].clone()
    logits = torch.zeros(len(bitmask), vocab_size)
    ours = logits.clone()
    measured.apply.append(_seconds(lambda: apply_token_bitmask_(ours, bitmask)))
    if raw is not None and raw.apply is not None:
        theirs, apply = logits.clone(), raw.apply
        measured.raw_apply.append(_seconds(lambda: apply(theirs, bitmask)))


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Return the median of the ratios within each round."""
    if not ours or len(ours) != len(theirs):
        return None
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True) if b > 0)


def _record(measured: Measured) -> dict[str, Any]:
    record: dict[str, Any] = {"backend": measured.backend, "num_steps": measured.num_steps, "note": measured.note}
    for part in ("compile", "mask", "apply"):
        ours, theirs = getattr(measured, part), getattr(measured, f"raw_{part}")
        record[f"{part}_s"] = statistics.median(ours) if ours else None
        record[f"raw_{part}_s"] = statistics.median(theirs) if theirs else None
        record[f"{part}_ratio"] = _ratio(ours, theirs)
    return record


def _print_table(name: str, vocabulary: Vocabulary, found: list[Measured], rounds: int, rows: int) -> None:
    console = stdout()
    console.print(
        f"{printable(name)}: {vocabulary.vocab_size} tokens, {torch.get_num_threads()} threads, medians of {rounds} "
        "rounds; in brackets the ratio to the bare engine in the same run",
        markup=False,
    )
    table = Table(
        "backend", "compile", "mask and accept, a step", f"apply, {rows} rows", "steps", box=None, pad_edge=False
    )
    for measured in found:
        cells = [
            _cell(measured.compile, measured.raw_compile, 1e3, "ms"),
            _cell(measured.mask, measured.raw_mask, 1e6, "us"),
            _cell(measured.apply, measured.raw_apply, 1e6, "us"),
        ]
        table.add_row(measured.backend, *cells, str(measured.num_steps or "-"))
    console.print(table, markup=False)
    for measured in found:
        if measured.note:
            console.print(f"{measured.backend}: {printable(measured.note)}", markup=False)
    console.print("compile: a fresh cache each time, the engine's view of the vocabulary built before", style="dim")


def _cell(ours: list[float], theirs: list[float], scale: float, unit: str) -> str:
    if not ours:
        return "-"
    ratio = _ratio(ours, theirs)
    return f"{statistics.median(ours) * scale:.3g} {unit}" + ("" if ratio is None else f" ({ratio:.2g}x)")
