"""Masking on the CPU, as ratios against xgrammar's CPU kernel and a plain fill, interleaved in one run.

    python benchmarks/apply_cpu.py [--json FILE] [--plot FILE.svg] [--rows 1 8 32] [--columns 151936] [--rounds 30]

Every result is compared with xgrammar's before anything is timed. Times are medians of interleaved rounds; on a shared
machine only the ratios mean something, most of all those between the fastest fifths of the rounds ("undisturbed"). It does
not show what a call costs beside a model's own work on the same cores.
"""

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import xgrammar
from line_plot import svg_lines

from gd_plugin import apply_token_bitmask_

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def masks(rows, columns, rng):
    """Yield (name, bool [rows, columns]) from all banned to all legal."""
    for count in (0, 1, 10, 150):
        bits = np.zeros((rows, columns), dtype=bool)
        for row in bits:
            row[rng.choice(columns, count, replace=False)] = True
        yield f"{count} legal", bits
    for density in (0.01, 0.1, 0.5, 0.8, 0.9, 0.99, 0.999):
        yield f"{100 * density:g}% legal", rng.random((rows, columns)) < density
    bits = np.ones((rows, columns), dtype=bool)
    bits[:, rng.choice(columns, 10, replace=False)] = False
    yield "10 banned", bits
    yield "all legal", np.ones((rows, columns), dtype=bool)


def interleaved(functions, rounds):
    """Return the seconds of each round, [functions, rounds]."""
    seconds = np.empty((len(functions), rounds))
    for turn in range(rounds):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            function()
            seconds[index, turn] = time.perf_counter() - start
    return seconds


def measure(rows, columns, dtype, name, bits, rounds):
    packed = np.packbits(bits, axis=1, bitorder="little")
    padded = np.zeros((rows, -(-columns // 32) * 4), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    bitmask = torch.from_numpy(padded.view(np.int32))
    logits = torch.randn(rows, columns).to(dtype)
    theirs, ours = logits.clone(), logits.clone()
    xgrammar.apply_token_bitmask_inplace(theirs, bitmask)
    apply_token_bitmask_(ours, bitmask)
    if not torch.equal(theirs, ours):
        raise SystemExit(f"{name}: results differ; nothing was timed")
    # every contender writes to a tensor of its own, so that none finds what it needs in the cache
    out, filled = torch.empty_like(logits), torch.empty_like(logits)
    seconds = interleaved(
        [
            lambda: xgrammar.apply_token_bitmask_inplace(theirs, bitmask),
            lambda: apply_token_bitmask_(ours, bitmask),
            lambda: apply_token_bitmask_(logits, bitmask, out=out),
            lambda: filled.fill_(float("-inf")),
        ],
        rounds,
    )
    theirs_s, ours_s, out_s, fill_s = np.median(seconds, axis=1)
    low, high = np.quantile(seconds[0] / seconds[1], [0.2, 0.8])
    fast = np.quantile(seconds, 0.2, axis=1)
    return {
        "rows": rows, "columns": columns, "dtype": str(dtype)[6:], "mask": name,
        "xgrammar_us": 1e6 * theirs_s, "ours_us": 1e6 * ours_s, "ours_out_us": 1e6 * out_s, "fill_us": 1e6 * fill_s,
        "speedup": theirs_s / ours_s, "speedup_20": low, "speedup_80": high, "fills": ours_s / fill_s,
        "speedup_fast": fast[0] / fast[1], "fills_fast": fast[1] / fast[3],
        "fast_us": {"xgrammar": 1e6 * fast[0], "gd_plugin": 1e6 * fast[1], "a plain fill": 1e6 * fast[3]},
    }  # fmt: skip


def plot(records):
    """Draw the fastest fifth of the rounds of each mask, a panel for each number of rows and type."""
    panels = {}
    for record in records:
        if record["mask"] == "99.9% legal":
            continue  # for the labels' sake
        lines = panels.setdefault(f"{record['rows']} rows, {record['dtype']}", {})
        for name, value in record["fast_us"].items():
            lines.setdefault(name, []).append((record["mask"].replace(" legal", "").replace("10 banned", "-10"), value))
    return svg_lines(panels, x_label="legal tokens", y_label="us, 20 % quantile")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the records here")
    parser.add_argument("--plot", type=Path, help="draw them here, as SVG")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--columns", type=int, default=151_936)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    machine = {
        "machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "numpy": np.__version__, "xgrammar": version("xgrammar"),
    }  # fmt: skip
    print(" ".join(f"{key} {value}" for key, value in machine.items()))
    records = []
    for rows in options.rows:
        for dtype in options.dtypes:
            for name, bits in masks(rows, options.columns, np.random.default_rng(0)):
                record = measure(rows, options.columns, DTYPES[dtype], name, bits, options.rounds)
                records.append(record)
                print(
                    f"B={rows:<3} {dtype:9} {name:11} xgrammar {record['xgrammar_us']:8.1f} us  ours "
                    f"{record['ours_us']:7.1f} us  {record['speedup']:5.2f}x ({record['speedup_20']:.2f}-"
                    f"{record['speedup_80']:.2f}), undisturbed {record['speedup_fast']:5.2f}x  "
                    f"{record['fills']:5.2f} fills, "
                    f"undisturbed {record['fills_fast']:.2f}  into out {record['ours_out_us']:7.1f} us"
                )
    if options.plot:
        options.plot.write_text(plot(records))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**machine, "records": records}, file, indent=1)


if __name__ == "__main__":
    main()
