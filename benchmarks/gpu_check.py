"""Everything that needs a GPU, in one run of under four minutes: tests/gpu, then the kernels against their peers.

    python benchmarks/gpu_check.py [--json gpu-check.json] [--plot gpu-check.svg] [--minutes 3.75] [--rehearse]

Peers: xgrammar's Triton and CUDA kernels, torch's masked_fill on a ready boolean mask, and a pure fill of the same logits
(what the memory can do at best). Caches are cold: each timed call works on the next of several copies of the logits.
Times are medians of CUDA events over calls in alternating order. Without a GPU it says so and exits 0. What it does not
show: launch overhead on the host, which a CUDA graph removes, and the forward pass that would run beside it.

`--rehearse` goes the same way on the CPU with a few tiny sizes, the kernel in Triton's interpreter: it shows that the script
runs to its end, and its figures mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from line_plot import svg_lines

WIDTHS = (151_936, 128_256, 128_001, 32_000)
ROWS = (1, 8, 64, 256, 1024)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
DENSITIES = (0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0)
COLD_BYTES = 256 << 20  # more than any level-two cache holds
ROUNDS = 5
NUM_CONTESTANTS = 6
TESTS_SECONDS = 90
# for planning alone, and on the safe side: what a slow device moves in a second, what compiling a kernel takes
BYTES_A_SECOND = 1e12
COMPILE_SECONDS = 2.0


class Size(NamedTuple):
    columns: int
    rows: int
    dtype: str
    density: float

    @property
    def logits_bytes(self):
        return self.rows * self.columns * DTYPES[self.dtype].itemsize

    @property
    def num_copies(self):
        return min(64, max(2, -(-COLD_BYTES // self.logits_bytes)))

    def estimated_seconds(self):
        """Making masks, logits and copies, then rounds of calls that read and write all of the logits."""
        calls = NUM_CONTESTANTS * ROUNDS * min(self.num_copies, 16)
        passes = 30 + self.num_copies + 3 * calls
        return 0.03 + passes * self.logits_bytes / BYTES_A_SECOND + calls * 20e-6


def all_sizes():
    """In an order that leaves a picture of everything if time runs out: narrow rows of every kind come last."""
    return [Size(c, r, d, density) for c in WIDTHS for r in ROWS for d in DTYPES for density in DENSITIES]


def kernels_to_compile():
    """Ours in two forms, for every dtype, wide or scalar access and program size; a peer's for every dtype."""
    return 2 * len(DTYPES) * 2 * 4 + len(DTYPES)


def random_mask(rows, columns, density, device, seed=0):
    """int32 [rows, W]; bit by bit, a few rows repeated so that making it does not take the time."""
    rng = np.random.default_rng(seed)
    words = -(-columns // 32)
    distinct = min(rows, 8)
    bits = rng.random((distinct, 32 * words)) < density
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(packed[np.arange(rows) % distinct].copy()).to(device)


def least_bytes(legal, item_bytes):
    """Bytes of logits that chunks of 16 bytes must move for a bool [rows, columns]: mixed ones twice, empty ones once."""
    width = 16 // item_bytes
    columns = legal.shape[1] // width * width
    chunks = legal[:, :columns].unflatten(1, (-1, width)).sum(dim=2)
    mixed, empty = ((chunks > 0) & (chunks < width)).sum(), (chunks == 0).sum()
    return int(16 * (2 * mixed + empty))


def contestants(logits, bitmask, legal):
    """Name -> function of one [rows, columns] copy of the logits, in place."""
    from gd_plugin.triton_kernels import apply_token_bitmask_
    from gd_plugin.triton_kernels.logits_bitmask import launch

    from gd_plugin.masks.arguments import check_arguments

    banned = ~legal
    arguments = check_arguments(logits, bitmask, None, None, None, 0, logits.shape[1])
    found = {
        "ours": lambda x: apply_token_bitmask_(x, bitmask),
        "ours, store only": lambda x: launch(x, arguments, x, store_only=True),
        "masked_fill": lambda x: x.masked_fill_(banned, float("-inf")),
        "fill": lambda x: x.fill_(float("-inf")),
    }
    try:
        import xgrammar
    except ImportError:
        return found
    for backend in ("triton", "cuda"):
        found[f"xgrammar {backend}"] = lambda x, backend=backend: xgrammar.apply_token_bitmask_inplace(
            x, bitmask, backend=backend
        )
    return found


def microseconds(function, pool, calls, device):
    """Return what one of `calls` calls takes, each on the next tensor of `pool`."""
    if device == "cpu":
        began = time.perf_counter()
        for call in range(calls):
            function(pool[call % len(pool)])
        return 1e6 * (time.perf_counter() - began) / calls
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in range(calls):
        function(pool[call % len(pool)])
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop) / calls


def measure(size, device, missing, copies, rounds):
    from gd_plugin.triton_kernels.reference import legal_columns

    columns, rows, name, density = size
    dtype = DTYPES[name]
    bitmask = random_mask(rows, columns, density, device)
    logits = torch.randn(rows, columns, device=device).to(dtype)
    legal = legal_columns(rows, columns, bitmask)
    want = logits.masked_fill(~legal, float("-inf"))
    functions = {}
    for contestant, function in contestants(logits, bitmask, legal).items():
        if contestant in missing:
            continue
        got = logits.clone()
        try:
            function(got)
        except Exception as error:
            missing[contestant] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if contestant != "fill" and not torch.equal(got, want):
            if contestant.startswith("ours"):
                raise SystemExit(f"{contestant} is wrong at {size}; nothing was timed")
            missing[contestant] = f"wrong result at {size}"
            continue
        functions[contestant] = function
    pool = [logits.clone() for _ in range(copies)]
    times = {contestant: [] for contestant in functions}
    for turn in range(rounds):
        order = list(functions) if turn % 2 == 0 else list(functions)[::-1]
        for contestant in order:
            times[contestant].append(microseconds(functions[contestant], pool, min(len(pool), 16), device))
    medians = {contestant: float(np.median(values)) for contestant, values in times.items()}
    return {
        "rows": rows, "columns": columns, "dtype": name, "density": density, "us": medians,
        "least_bytes": least_bytes(legal, dtype.itemsize), "logits_bytes": want.nbytes,
        "fill_gb_s": want.nbytes / medians["fill"] / 1e3,
    }  # fmt: skip


def verdicts(records):
    """The worst ratios, which the project's targets are about; None where nothing was measured.

    A restrictive mask should reach 85 % of a fill's speed, a mixed one 1.5 times that of xgrammar's Triton kernel, and
    nothing should be slower than xgrammar's CUDA kernel. Small sizes are bound by the launch and count too.
    """

    def worst(peer, wanted):
        ratios = [r["us"][peer] / r["us"]["ours"] for r in records if wanted(r["density"]) and peer in r["us"]]
        return min(ratios, default=None)

    return {
        "restrictive, of a fill's speed": worst("fill", lambda density: density <= 0.001),
        "mixed, times xgrammar's Triton kernel": worst("xgrammar triton", lambda density: 0.1 <= density <= 0.9),
        "all, times xgrammar's CUDA kernel": worst("xgrammar cuda", lambda density: True),
        "mixed, read and written against stored to": worst("ours, store only", lambda density: 0.1 <= density <= 0.9),
    }


def plot(records):
    """SVG: microseconds over the fraction of legal columns, a panel for each number of rows, of the widest bf16 rows."""
    widest = max((record["columns"] for record in records), default=0)
    shown = [record for record in records if record["columns"] == widest and record["dtype"] == "bf16"]
    panels = {}
    for record in sorted(shown, key=lambda record: (record["rows"], record["density"])):
        lines = panels.setdefault(f"{record['rows']} rows of {widest:,} bf16", {})
        for contestant, micros in record["us"].items():
            lines.setdefault(contestant, []).append((f"{record['density']:g}", micros))
    return svg_lines(panels, x_label="fraction legal", y_label="microseconds")


def run_tests(seconds):
    """Return pytest's exit status for tests/gpu, or why there is none."""
    folder = Path(__file__).resolve().parent.parent / "tests" / "gpu"
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rP", str(folder)], check=False, timeout=seconds
        ).returncode
    except subprocess.TimeoutExpired:
        return f"not finished after {seconds} seconds"


def package(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(arguments=None):
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="gpu-check.json")
    parser.add_argument("--plot", default="gpu-check.svg")
    parser.add_argument("--minutes", type=float, default=3.75, help="for all of it; sizes left over are listed")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, a few tiny sizes, to see that it runs")
    options = parser.parse_args(arguments)
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 0
    device, sizes = "cuda", all_sizes()
    if options.rehearse:
        # before triton is imported, which decides then
        os.environ["TRITON_INTERPRET"] = "1"
        device = "cpu"
        sizes = [Size(c, 2, d, p) for c in (256, 129) for d in ("bf16", "fp32") for p in (0.0, 0.5)]
    tests = None if options.skip_tests or options.rehearse else run_tests(TESTS_SECONDS)
    deadline = began + 60 * options.minutes
    records, missing, left_out = [], {}, []
    for size in sizes:
        if time.monotonic() + size.estimated_seconds() > deadline:
            left_out.append(size)
            continue
        record = measure(size, device, missing, *((1, 1) if options.rehearse else (size.num_copies, ROUNDS)))
        records.append(record)
        micros = record["us"]
        peers = {peer: micros[peer] / micros["ours"] for peer in micros if peer != "ours"}
        print(
            f"{size.rows:5} x {size.columns} {size.dtype} {size.density:5} ours {micros['ours']:8.1f} us  ratios "
            + "  ".join(f"{peer} {ratio:.2f}" for peer, ratio in peers.items()),
            flush=True,
        )
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "none: rehearsed on the CPU",
        "seconds": time.monotonic() - began, "tests": tests, "worst_ratios": verdicts(records),
        "not_measured": left_out, "missing": missing,
        "versions": {name: package(name) for name in ("torch", "triton", "xgrammar", "gd_plugin")}, "records": records,
    }  # fmt: skip
    Path(options.json).write_text(json.dumps(result, indent=1))
    Path(options.plot).write_text(plot(records))
    for contestant, reason in missing.items():
        print(f"not measured: {contestant}: {reason}")
    for name, ratio in result["worst_ratios"].items():
        print(f"worst of {name}: {'not measured' if ratio is None else f'{ratio:.2f}'}")
    print(f"tests/gpu: {'not run' if tests is None else tests}")
    print(f"{len(records)} sizes measured, {len(left_out)} left out for time; {options.json}, {options.plot}")
    return 1 if tests else 0


if __name__ == "__main__":
    sys.exit(main())
