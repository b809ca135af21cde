"""The public surface: names, what importing costs, what is packaged, and that `python -O` changes nothing."""

import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import gd_plugin

ROOT = Path(__file__).parent.parent
# the contract: more may be added, nothing renamed
NAMES = {
    "BackendNotInstalledError",
    "CompileTimeoutError",
    "CompiledGrammar",
    "DeadEndError",
    "GrammarMatcher",
    "GrammarMatcherFactory",
    "Guide",
    "GuideError",
    "GuideTooLargeError",
    "GuideType",
    "GuidedDecodingConfig",
    "GuidedDecodingError",
    "GuidedLogitsProcessor",
    "InvalidGuideError",
    "RollbackError",
    "RowResult",
    "TokenRejectedError",
    "UnsatisfiableGuideError",
    "UnsupportedGuideError",
    "Vocabulary",
    "VocabularyError",
    "allocate_token_bitmask",
    "apply_token_bitmask_",
    "register_backend",
    "row_has_valid_token",
}
HEAVY = ["torch", "numpy", "transformers", "triton", "xgrammar", "llguidance", "outlines_core", "vllm", "pydantic"]


def run(code: str, *flags: str, cwd: str | Path = "/") -> str:
    """Run Python outside the checkout, as a user would."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_names_of_the_contract_are_there() -> None:
    assert set(gd_plugin.__all__) >= NAMES
    assert list(gd_plugin.__all__) == sorted(gd_plugin.__all__)
    assert set(gd_plugin._HOMES) == set(gd_plugin.__all__) - {"__version__"}


@pytest.mark.parametrize("name", gd_plugin.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(gd_plugin, name)
    assert name in dir(gd_plugin)
    if isinstance(value, type) or callable(value):
        assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonesuch"):
        gd_plugin.nonesuch  # noqa: B018


def test_every_error_is_public() -> None:
    from gd_plugin import errors

    assert set(errors.__all__) <= set(gd_plugin.__all__)


def test_importing_loads_nothing_heavy() -> None:
    code = f"import sys, gd_plugin; print([m for m in {HEAVY} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_a_guide_needs_no_torch_and_no_engine() -> None:
    code = (
        "import sys, gd_plugin as gd; gd.Guide.regex('a'); gd.Guide.json_schema({'type': 'object'}).to_json();"
        f"print([m for m in {HEAVY[:-1]} if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_triton_kernels_is_no_top_level_package() -> None:
    """That name belongs to another distribution; ours is gd_plugin.triton_kernels."""
    code = (
        "from importlib.util import find_spec as f;"
        "print(f('triton_kernels') is None, f('gd_plugin.triton_kernels') is not None)"
    )
    assert run(code).strip() == "True True"


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "gd_plugin").rglob("__init__.py")
        if "__pycache__" not in path.parts
    }
    found |= {
        "gd_plugin." + ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "triton_kernels").rglob("__init__.py")
    }
    # metadata of a distribution, no modules
    found.add("gd_plugin.vllm.opt_in")
    assert found == set(settings["packages"])


def test_versions_agree() -> None:
    assert gd_plugin.__version__ == version("gd_plugin")


def test_no_assert_carries_work() -> None:
    for path in [*(ROOT / "gd_plugin").rglob("*.py"), *(ROOT / "triton_kernels").rglob("*.py")]:
        lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert not lines, f"{path}: {lines}"


@pytest.mark.slow
def test_python_o_changes_nothing() -> None:
    code = """
import gd_plugin as gd, torch
vocabulary = gd.Vocabulary.from_bytes([bytes([b]) for b in range(256)] + [None], stop_token_ids=[256])
p = gd.GuidedLogitsProcessor(gd.Guide.choice(["yes", "no"]), vocabulary=vocabulary)
ids = [1]
for token in (None, 121, 101, 115, 256, 7):
    ids = ids if token is None else [*ids, token]
    out = p(torch.tensor([ids]), torch.zeros(1, 257))
    print((out[0] > float("-inf")).nonzero()[:, 0].tolist())
for make in (lambda: gd.Guide.regex("("), lambda: gd.GuidedLogitsProcessor([], vocabulary=vocabulary)):
    try:
        make()
    except ValueError as error:
        print(type(error).__name__)
"""
    expected = ["[110, 121]", "[101]", "[115]", "[256]", "[256]", "[256]", "InvalidGuideError", "ValueError"]
    assert run(code, "-O").splitlines() == expected
