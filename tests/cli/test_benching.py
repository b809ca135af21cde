"""gd-plugin bench: every figure is there, ratios are formed where a bare engine can be compared."""

import json
from collections.abc import Callable

from tests.cli.conftest import Answer

Run = Callable[..., Answer]


def test_figures_and_ratios(gd_plugin_command: Run, model_folder: str) -> None:
    answer = gd_plugin_command(
        "bench", "word.regex", "--tokenizer", model_folder, "--rounds", "1", "--rows", "2", "--json"
    )
    record = json.loads(answer.out)
    assert answer.code == 0
    backends = {item["backend"]: item for item in record["backends"]}
    for name in ("xgrammar", "llguidance"):
        for part in ("compile", "mask", "apply"):
            assert backends[name][f"{part}_s"] > 0
            # the ratio of one round is that of its medians
            assert backends[name][f"{part}_ratio"] * backends[name][f"raw_{part}_s"] > 0
    assert backends["outlines_core"]["raw_mask_s"] is None


def test_a_table_for_people(gd_plugin_command: Run, model_folder: str) -> None:
    answer = gd_plugin_command("bench", "age.json", "--tokenizer", model_folder, "--rounds", "1", "--rows", "1")
    assert answer.code == 0
    assert "backend" in answer.out and "ms" in answer.out and "outlines_core: " in answer.out
