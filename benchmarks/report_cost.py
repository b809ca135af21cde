"""What `report=True` adds to a call of GuidedLogitsProcessor.

A processor with a report and one without take turns at the steps of the same prepared rows of random scores. What is
measured is the process's time on its cores, which a busy machine changes little. What it does not show: a model's step,
next to which both are small, and a GPU.

    python benchmarks/report_cost.py [--rounds 3] [--steps 20] [--json FILE]
"""

import argparse
import time
from typing import Any

import torch
from harness import interleave, machine, print_table, quantiles, ratios, write_json

import gd_plugin as gd

GUIDE = gd.Guide.regex("[ab]*")
# tokens of SmolLM2 and of Qwen
WIDTHS = (49_152, 151_936)


def vocabulary_of(width: int) -> gd.Vocabulary:
    """A vocabulary of made-up words: what they spell decides how many are legal, and nothing else here."""
    tokens: list[bytes | None] = [bytes([byte]) for byte in range(256)]
    for number in range(len(tokens), width - 1):
        digits = format(number, "b").replace("0", "a").replace("1", "b")
        tokens.append((digits if number % 2 else digits + "c").encode())
    return gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[width - 1])


def seconds_a_call(processor: gd.GuidedLogitsProcessor, scores: torch.Tensor, steps: int) -> float:
    """Return the mean of the calls after the first one, in seconds of all cores together."""
    [fresh] = processor
    ids = torch.ones(len(scores), 1, dtype=torch.int64)
    letter = torch.full_like(ids, ord("a"))
    total = 0.0
    for number in range(steps + 1):
        start = time.process_time()
        fresh(ids, scores)
        total += time.process_time() - start if number else 0.0
        ids = torch.cat([ids, letter], dim=1)
    report: Any = fresh.report() if fresh._reports else None
    if report is not None and any(step.rank is None for row in report.rows for step in row.steps):
        raise SystemExit("the report does not know every token: the figures would not compare")
    return total / steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print(machine(["torch", "transformers"]), f"{torch.get_num_threads()} threads\n")
    records: list[dict[str, Any]] = []
    for width in WIDTHS:
        vocabulary = vocabulary_of(width)
        plain, reported = (
            gd.GuidedLogitsProcessor(GUIDE, vocabulary=vocabulary, report=report) for report in (False, True)
        )
        for rows in (1, 8):
            # other rows are other prompts: none is measured in another's place
            scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
            measured = interleave(
                {
                    "off": lambda p=plain, s=scores: seconds_a_call(p, s, arguments.steps),
                    "on": lambda p=reported, s=scores: seconds_a_call(p, s, arguments.steps),
                },
                arguments.rounds,
            )
            records.append(
                {
                    "tokens": width,
                    "rows": rows,
                    "off": quantiles(measured["off"]),
                    "on": quantiles(measured["on"]),
                    "ratio": ratios(measured["on"], measured["off"]),
                }
            )
    print_table(
        ["tokens", "rows", "off, ms a call", "on, ms a call", "ratio", "added, ms a row"],
        [
            [
                f"{record['tokens']:,}",
                str(record["rows"]),
                record["off"].text(1e3, 3),
                record["on"].text(1e3, 3),
                record["ratio"].text(digits=1),
                f"{1e3 * (record['on'].median - record['off'].median) / record['rows']:.2f}",
            ]
            for record in records
        ],
    )
    write_json(arguments.json, records)


if __name__ == "__main__":
    main()
