"""The package without vLLM. Runs in every environment."""

import subprocess
import sys

# makes `import vllm` and `find_spec("vllm")` fail as if it were not installed
_HIDE = """
import importlib.abc, importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] == "vllm" else real(name, package)
"""


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_without_vllm_names_the_extra() -> None:
    out = _run(
        _HIDE + "from gd_plugin import BackendNotInstalledError\n"
        "try:\n    import gd_plugin.vllm\n"
        "except BackendNotInstalledError as error:\n    print(isinstance(error, ImportError), error)\n"
    )
    assert out.startswith("True") and "pip install 'gd_plugin[vllm]'" in out


def test_package_does_not_import_vllm() -> None:
    assert _run("import sys, gd_plugin; print('vllm' in sys.modules)").strip() == "False"


def test_installing_registers_no_entry_point() -> None:
    code = (
        "from importlib.metadata import entry_points as e; print(*(p.value for p in e(group='vllm.logits_processors')))"
    )
    assert "gd_plugin" not in _run(code)
