"""What CI holds of the compiled kernel, without a GPU: whole 16-byte accesses to the logits and no spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def report(*arguments, environment=None):
    # its own process: here the kernels are interpreted
    command = [sys.executable, "-m", "gd_plugin.triton_kernels.aot", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, **(environment or {})}, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_variant_moves_logits_16_bytes_at_a_time(target, tmp_path):
    finished = report("--json", "--target", target, "--dir", str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    records = json.loads(finished.stdout)
    found = {(record["dtype"], record["variant"]) for record in records}
    assert found == {(d, v) for d in ("fp32", "fp16", "bf16") for v in ("aligned", "shifted", "d2t")}
    for record in records:
        name = (record["dtype"], record["variant"])
        assert record["target"] == target
        # logits are all that is stored, and all that is loaded wider than a word or narrower than one
        assert set(record["stores"]) == {"128"}, name
        assert set(record["loads"]) <= {"128", "64", "32"}, name
        assert record["loads"]["128"] > 0, name
        assert record["spills"] == 0, name
        assert record["registers"] > 0
        assembly = Path(record["ptx"]).read_text()
        assert ("st.global.v4" in assembly) or ("global_store_dwordx4" in assembly), name
        if record["xgrammar"]:
            assert "128" not in record["xgrammar"]["stores"]


def test_unknown_target_is_refused_by_name():
    finished = report("--target", "sm_1")
    assert finished.returncode == 2
    assert "sm_1" in finished.stderr


@pytest.mark.slow
def test_argmax_and_the_other_forms_compile_too():
    program = """
from gd_plugin.triton_kernels import aot, logits_bitmask, masked_argmax
for variant in range(3):
    for chunk, flags in ((8, True), (2, True), (1, False)):
        common = {"VARIANT": variant, "CHUNK": chunk, "NUM_CHUNKS": 128}
        common |= {"HAS_TOKEN_MASK": flags, "HAS_ROW_INDEX": flags}
        pointers = {"logits_ptr": "*bf16", "keys_ptr": "*i64"}
        compiled = aot._compile_kernel(masked_argmax.masked_argmax_kernel, pointers, common, (), "sm_90", 4)
        loads, _ = aot._accesses(aot._assembly(compiled))
        assert str(16 * chunk) in loads, (variant, chunk, loads)
        pointers = {"logits_ptr": "*i16", "out_ptr": "*i16"}
        for in_place, store_only in ((True, True), (False, False)):
            more = {"MINUS_INF": -128, "IN_PLACE": in_place, "STORE_ONLY": store_only}
            aot._compile_kernel(logits_bitmask.logits_bitmask_kernel, pointers, common | more, (), "sm_90", 4)
"""
    finished = subprocess.run(
        [sys.executable, "-c", "import os; os.environ.pop('TRITON_INTERPRET', None)\n" + program],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
