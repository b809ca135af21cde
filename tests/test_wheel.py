"""The wheel: what is in it, and that it imports under every interpreter at hand, with nothing but itself on the path."""

import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# guides and their errors need neither torch nor an engine; everything public has a home that exists
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import gd_plugin as gd
guides = [gd.Guide.regex("a+"), gd.Guide.choice(["a"]), gd.Guide.json(), gd.Guide.ebnf('root ::= "a"')]
assert all(gd.Guide.from_json(guide.to_json()) == guide for guide in guides)
try:
    gd.Guide.regex("(")
except gd.GuideError:
    print("ok")
"""


@pytest.fixture(scope="module")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # not in the checkout: setuptools leaves a build folder
    for name in ("gd_plugin", "triton_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in [*ROOT.glob("*.md"), ROOT / "pyproject.toml", *ROOT.glob("LICENSE*")]:
        shutil.copy(file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_contents(wheel_folder: Path) -> None:
    assert (wheel_folder / "gd_plugin/py.typed").is_file()
    assert (wheel_folder / "gd_plugin/triton_kernels/logits_bitmask.py").is_file()
    folders = {path.name for path in wheel_folder.iterdir() if not path.name.endswith(".dist-info")}
    assert folders == {"gd_plugin"}, "a top-level package here would shadow somebody else's"
    sources = {path.relative_to(ROOT) for path in (ROOT / "gd_plugin").rglob("*.py")}
    packed = {path.relative_to(wheel_folder) for path in (wheel_folder / "gd_plugin").rglob("*.py")}
    assert sources <= packed


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_imports_under(version: str, wheel_folder: Path) -> None:
    python = runpy.run_path(str(ROOT / ".ci" / "release.py"))["interpreter"](version)
    if python is None:
        pytest.skip(f"no python{version} here")
    # isolated: no site-packages of the test environment
    command = [python, "-I", "-S", "-W", "error", "-c", PROGRAM, str(wheel_folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.stdout == "ok\n", run.stderr
