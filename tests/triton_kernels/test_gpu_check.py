"""The script for a day with a GPU: it fits its time, runs to its end, and draws what it measured."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu_check")
    for name in ("gpu_check", "line_plot"):
        sys.modules.pop(name, None)


def run(*arguments, **environment):
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), *arguments]
    # as `make gpu-check` runs it: the folder of the script is on its path
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**inherited, **environment}, check=False
    )


def test_without_a_gpu_it_says_so_and_succeeds(tmp_path):
    finished = run("--json", str(tmp_path / "a.json"), CUDA_VISIBLE_DEVICES="")
    assert (finished.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "no GPU" in finished.stdout


def test_a_rehearsal_runs_to_the_end_and_writes_figures_and_plot(tmp_path):
    figures, picture = tmp_path / "a.json", tmp_path / "a.svg"
    # PYTHONSAFEPATH keeps the script's folder, with its neighbours, off the path
    finished = run("--rehearse", "--json", str(figures), "--plot", str(picture), PYTHONPATH=str(BENCHMARKS))
    assert finished.returncode == 0, finished.stderr
    result = json.loads(figures.read_text())
    assert len(result["records"]) == 8 and not result["not_measured"]
    for record in result["records"]:
        assert {"ours", "ours, store only", "masked_fill", "fill"} <= set(record["us"])
        assert 0 <= record["least_bytes"] <= 2 * record["logits_bytes"]
    assert result["worst_ratios"]["restrictive, of a fill's speed"] > 0
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_it_is_planned_to_take_under_four_minutes(gpu_check):
    sizes = gpu_check.all_sizes()
    assert {size.rows for size in sizes} == {1, 8, 64, 256, 1024}
    assert {size.columns for size in sizes} == {32_000, 128_256, 151_936, 128_001}
    assert len(sizes) == 5 * 4 * 3 * 7 == len(set(sizes))
    compiling = gpu_check.kernels_to_compile() * gpu_check.COMPILE_SECONDS
    assert gpu_check.TESTS_SECONDS + compiling + sum(size.estimated_seconds() for size in sizes) < 240


def test_least_bytes_is_what_a_loop_over_chunks_counts(gpu_check):
    legal = torch.rand(3, 32, generator=torch.Generator().manual_seed(1)) < 0.5
    legal[0], legal[1, :16] = True, False
    for item_bytes in (2, 4):
        width, total = 16 // item_bytes, 0
        for row in legal.tolist():
            for start in range(0, 32, width):
                chunk = row[start : start + width]
                total += 0 if all(chunk) else 32 if any(chunk) else 16
        assert gpu_check.least_bytes(legal, item_bytes) == total


def record(rows, density, **us):
    return {"rows": rows, "columns": 64, "dtype": "bf16", "density": density, "us": us}


def test_verdicts_are_the_worst_ratios_of_their_kind(gpu_check):
    records = [
        record(1, 0.0, ours=10.0, fill=9.0),
        record(8, 0.001, ours=10.0, fill=8.0),
        record(8, 0.5, ours=10.0, fill=1.0, **{"xgrammar triton": 20.0}),
    ]
    found = gpu_check.verdicts(records)
    assert found["restrictive, of a fill's speed"] == 0.8
    assert found["mixed, times xgrammar's Triton kernel"] == 2.0
    assert found["all, times xgrammar's CUDA kernel"] is None


def test_the_plot_has_a_panel_for_each_number_of_rows_and_a_line_for_each_contestant(gpu_check):
    records = [record(rows, p, ours=1.0 + p, fill=0.5) for rows in (1, 8) for p in (0.0, 0.5, 1.0)]
    root = ElementTree.fromstring(gpu_check.plot(records))
    lines = [element for element in root if element.tag.endswith("polyline")]
    assert len(lines) == 2 * 2
    points = [tuple(map(float, point.split(","))) for point in lines[0].get("points").split()]
    # further right means more legal columns, further up means slower
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[0][1] > points[2][1]
    assert gpu_check.plot([])
