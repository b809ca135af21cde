"""What the compiler makes of the mask kernel, told without a GPU: `python -m gd_plugin.triton_kernels.aot [--json]`.

In: nothing but the kernels.   Out: for each target, dtype and variant the global loads and stores by width in bits (static
counts in the assembly), registers, spilled bytes and shared memory, beside the same figures for xgrammar's published
Triton kernel compiled in the same run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

# The interpreter replaces kernels when they are defined; nothing could be compiled then.
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from gd_plugin.triton_kernels import logits_bitmask
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["report"]

_TARGETS: Final = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_VARIANTS: Final = {
    "aligned": logits_bitmask.ALIGNED,
    "shifted": logits_bitmask.SHIFTED,
    "d2t": logits_bitmask.D2T,
}
# what Triton learns of arguments at run time where widths and strides are multiples of 16
_DIVISIBLE: Final = ("logits_ptr", "out_ptr", "bitmask_ptr", "d2t_ptr", "logits_stride", "out_stride", "num_columns")
_PTX_ACCESS: Final = re.compile(r"\b(ld|st)\.global[.\w:]*?(?:\.v(\d))?\.[bfsu](\d+)\s")
_AMD_ACCESS: Final = re.compile(r"\b(?:global|flat|buffer)_(load|store)_(\w+)")
_AMD_BITS: Final = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128, "b128": 128}


def report(targets: Sequence[str] = tuple(_TARGETS), directory: Path | None = None) -> list[dict[str, Any]]:
    """Compile every variant for `targets` and return one record each, assembly written to `directory`.

    Raises:
        ValueError: an unknown target.
    """
    unknown = sorted(set(targets) - set(_TARGETS))
    if unknown:
        raise ValueError(f"unknown target {', '.join(unknown)}; known are {', '.join(_TARGETS)}")
    directory = Path(tempfile.mkdtemp(prefix="gd_plugin_aot_")) if directory is None else directory
    directory.mkdir(parents=True, exist_ok=True)
    records = []
    for target in targets:
        for dtype in _DTYPES:
            peer = _compile_peer(target, dtype)
            for variant in _VARIANTS:
                compiled = _compile(target, dtype, variant)
                path = directory / f"{target}-{dtype}-{variant}.{'ptx' if 'ptx' in compiled.asm else 'amdgcn'}"
                path.write_text(_assembly(compiled))
                records.append(
                    {"target": target, "dtype": dtype, "variant": variant, **_figures(compiled), "ptx": str(path)}
                    | {"xgrammar": None if peer is None else _figures(peer)}
                )
    return records


def _compile(target: str, dtype: str, variant: str) -> Any:
    integer, minus_inf = logits_bitmask.AS_INTEGERS[_DTYPES[dtype]]
    chunk = 16 // integer.itemsize
    constants = {
        "MINUS_INF": minus_inf,
        "VARIANT": _VARIANTS[variant],
        "CHUNK": chunk,
        "NUM_CHUNKS": 4 * logits_bitmask.THREADS,
        "IN_PLACE": True,
        "HAS_TOKEN_MASK": True,
        "HAS_ROW_INDEX": True,
        "STORE_ONLY": False,
    }
    logits = f"*i{8 * integer.itemsize}"
    pointers = {"logits_ptr": logits, "out_ptr": logits}
    return _compile_kernel(
        logits_bitmask.logits_bitmask_kernel, pointers, constants, _DIVISIBLE, target, logits_bitmask.THREADS // 32
    )


def _compile_peer(target: str, dtype: str) -> Any:
    """Compile xgrammar's kernel as its launcher would, or return None if xgrammar is not installed."""
    try:
        module = import_module("xgrammar.kernels.apply_token_bitmask_inplace_triton")
    except ImportError:
        return None
    constants = {"NUM_SMS": 132, "BLOCK_SIZE": 4096, "indices_ptr": None}
    num_warps = 4096 // 32 // (16 // _DTYPES[dtype].itemsize)
    divisible = ("logits_ptr", "bitmask_ptr", "vocab_size", "logits_strides")
    return _compile_kernel(
        module.apply_token_bitmask_inplace_kernel, {"logits_ptr": f"*{dtype}"}, constants, divisible, target, num_warps
    )


def _compile_kernel(
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    divisible: Sequence[str],
    target: str,
    num_warps: int,
) -> Any:
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    return triton.compile(source, target=_TARGETS[target], options=options)


def _assembly(compiled: Any) -> str:
    return str(compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"])


def _figures(compiled: Any) -> dict[str, Any]:
    loads, stores = _accesses(_assembly(compiled))
    registers, spills = _registers(compiled)
    return {
        "loads": loads,
        "stores": stores,
        "registers": registers,
        "spills": spills,
        "shared_bytes": compiled.metadata.shared,
    }


def _accesses(assembly: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return static counts of (global loads, global stores) by width in bits."""
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    for kind, lanes, bits in _PTX_ACCESS.findall(assembly):
        (loads if kind == "ld" else stores)[str(int(lanes or 1) * int(bits))] += 1
    for kind, width in _AMD_ACCESS.findall(assembly):
        name = re.sub(r"^[us](?=byte|short)|_d16.*", "", width)
        (loads if kind == "load" else stores)[str(_AMD_BITS.get(name, width))] += 1
    return dict(loads), dict(stores)


def _registers(compiled: Any) -> tuple[int, int]:
    """Return (registers a thread, bytes a thread spills)."""
    if "amdgcn" in compiled.asm:
        found = dict(re.findall(r"\.((?:vgpr|sgpr)(?:_spill)?_count):\s+(\d+)", compiled.asm["amdgcn"]))
        spills = 4 * (int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"]))
        return int(found["vgpr_count"]), spills
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])


def _table(records: Sequence[dict[str, Any]]) -> str:
    def row(name: str, figures: dict[str, Any]) -> str:
        def counts(found: dict[str, int]) -> str:
            return " ".join(f"{bits}b:{count}" for bits, count in sorted(found.items(), key=lambda item: -int(item[0])))

        return (
            f"{name:24} loads {counts(figures['loads']):20} stores {counts(figures['stores']):20} "
            f"registers {figures['registers']:3} spilled {figures['spills']} shared {figures['shared_bytes']}"
        )

    lines = []
    for record in records:
        name = f"{record['target']} {record['dtype']}"
        lines.append(row(f"{name} {record['variant']}", record))
        if record["variant"] == "d2t":
            peer = record["xgrammar"]
            lines.append(row(f"{name} xgrammar", peer) if peer else f"{name} xgrammar is not installed")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description="Compile the mask kernels ahead of time and report what came out.")
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    parser.add_argument("--target", action="append", choices=list(_TARGETS), help="default: all of them")
    parser.add_argument("--dir", type=Path, help="where the assembly goes; default: a fresh temporary folder")
    options = parser.parse_args(arguments)
    records = report(options.target or tuple(_TARGETS), options.dir)
    sys.stdout.write((json.dumps(records, indent=1) if options.json else _table(records)) + "\n")


if __name__ == "__main__":
    main()
