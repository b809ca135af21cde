"""Everything that needs a GPU, in one run of under four minutes: tests/gpu, then the kernels against their peers.

    python benchmarks/gpu_check.py [--json gpu-check.json] [--plot gpu-check.png] [--minutes 3]

Peers: xgrammar's Triton and CUDA kernels, torch's masked_fill on a ready boolean mask, and a pure fill of the same logits
(what the memory can do at best). Caches are cold: each timed call works on the next of several copies of the logits.
Times are medians of CUDA events over calls in alternating order. Without a GPU it says so and exits 0. What it does not
show: launch overhead on the host, which a CUDA graph removes, and the forward pass that would run beside it.
"""

import argparse
import json
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

ROWS = (1, 8, 64, 256, 1024)
WIDTHS = (32_000, 128_256, 151_936, 128_001)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DENSITIES = (0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0)
COLD_BYTES = 256 << 20  # more than any level-two cache holds
ROUNDS = 5


def random_mask(rows, columns, density, seed=0):
    """int32 [rows, W] on the GPU; bit by bit, a few rows repeated so that making it does not take the time."""
    rng = np.random.default_rng(seed)
    words = -(-columns // 32)
    distinct = min(rows, 8)
    bits = rng.random((distinct, 32 * words)) < density
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(packed[np.arange(rows) % distinct].copy()).cuda()


def least_bytes(legal, item_bytes):
    """Bytes of logits that chunks of 16 bytes must move for a bool [rows, columns]: mixed ones twice, empty ones once."""
    width = 16 // item_bytes
    columns = legal.shape[1] // width * width
    chunks = legal[:, :columns].unflatten(1, (-1, width)).sum(dim=2)
    mixed, empty = ((chunks > 0) & (chunks < width)).sum(), (chunks == 0).sum()
    return int(16 * (2 * mixed + empty))


def contestants(logits, bitmask, legal):
    """Name -> function of one [rows, columns] copy of the logits, in place."""
    from gd_plugin.triton_kernels.logits_bitmask import launch

    from gd_plugin import apply_token_bitmask_
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


def measure(rows, columns, name, density, missing):
    dtype = DTYPES[name]
    bitmask = random_mask(rows, columns, density)
    from gd_plugin.triton_kernels.reference import legal_columns

    logits = torch.randn(rows, columns, device="cuda").to(dtype)
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
                raise SystemExit(f"{contestant} is wrong at {rows} x {columns} {name} {density}; nothing was timed")
            missing[contestant] = f"wrong result at {rows} x {columns} {name} density {density}"
            continue
        functions[contestant] = function
    copies = min(64, max(2, -(-COLD_BYTES // want.nbytes)))
    pool = [logits.clone() for _ in range(copies)]
    times = {contestant: [] for contestant in functions}
    for _ in range(ROUNDS):
        for contestant, function in functions.items():
            calls = min(copies, 16)
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for call in range(calls):
                function(pool[call % copies])
            stop.record()
            stop.synchronize()
            times[contestant].append(1e3 * start.elapsed_time(stop) / calls)
    micros = {contestant: float(np.median(values)) for contestant, values in times.items()}
    return {
        "rows": rows, "columns": columns, "dtype": name, "density": density, "us": micros,
        "least_bytes": least_bytes(legal, dtype.itemsize), "logits_bytes": want.nbytes,
        "fill_gb_s": want.nbytes / micros["fill"] / 1e3,
    }  # fmt: skip


def plot(records, path):
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return f"no plot: matplotlib is not installed (the figures are in the JSON file, not {path})"
    widest = [r for r in records if r["columns"] == 151_936 and r["dtype"] == "bf16"]
    figure, axes = pyplot.subplots(1, len(ROWS), figsize=(4 * len(ROWS), 4), squeeze=False)
    for axis, rows in zip(axes[0], ROWS, strict=True):
        of_rows = [record for record in widest if record["rows"] == rows]
        for contestant in sorted({name for record in of_rows for name in record["us"]}):
            points = [(r["density"], r["us"][contestant]) for r in of_rows if contestant in r["us"]]
            axis.plot(*zip(*points, strict=True), marker="o", label=contestant)
        axis.set(title=f"{rows} rows of 151,936 bf16", xlabel="fraction legal", ylabel="microseconds", yscale="log")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    return f"plot: {path}"


def package(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="gpu-check.json")
    parser.add_argument("--plot", default="gpu-check.png")
    parser.add_argument("--minutes", type=float, default=3.0, help="for the timings; sizes left over are listed")
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return 0
    tests = None
    if not options.skip_tests:
        folder = Path(__file__).resolve().parent.parent / "tests" / "gpu"
        tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rP", str(folder)], check=False).returncode
    deadline = time.monotonic() + 60 * options.minutes
    records, missing, left_out = [], {}, []
    # sizes in an order that leaves a picture of everything if time runs out: narrow rows of every kind come last
    for columns in (151_936, 128_256, 128_001, 32_000):
        for rows in ROWS:
            for name in ("bf16", "fp32", "fp16"):
                for density in DENSITIES:
                    if time.monotonic() > deadline:
                        left_out.append((rows, columns, name, density))
                        continue
                    record = measure(rows, columns, name, density, missing)
                    records.append(record)
                    micros = record["us"]
                    peers = {peer: micros[peer] / micros["ours"] for peer in micros if peer != "ours"}
                    print(
                        f"{rows:5} x {columns} {name} {density:5} ours {micros['ours']:8.1f} us  ratios "
                        + "  ".join(f"{peer} {ratio:.2f}" for peer, ratio in peers.items()),
                        flush=True,
                    )
    result = {
        "device": torch.cuda.get_device_name(), "tests_exit_code": tests, "not_measured": left_out, "missing": missing,
        "versions": {name: package(name) for name in ("torch", "triton", "xgrammar", "gd_plugin")}, "records": records,
    }  # fmt: skip
    Path(options.json).write_text(json.dumps(result, indent=1))
    for contestant, reason in missing.items():
        print(f"not measured: {contestant}: {reason}")
    print(f"{len(records)} sizes measured, {len(left_out)} left out for time; figures: {options.json}")
    print(plot(records, options.plot))
    return tests or 0


if __name__ == "__main__":
    sys.exit(main())
