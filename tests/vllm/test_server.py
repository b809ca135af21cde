"""`vllm serve` on the loopback interface, asked with the OpenAI client: guides in `vllm_xargs`."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm builds an environment that has it")

import jsonschema
import openai

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
DATE = r"[0-9]{4}-[0-9]{2}"
START_S = 600
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def client(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--logits-processors", "gd_plugin.vllm:GuidedLogitsProcessor"]
    # as users run it: the engine in a process of its own
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait(f"http://127.0.0.1:{port}/health", server, log)
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as opened:
            yield opened
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(30)


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(2 * START_S):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")


def _complete(client: openai.OpenAI, xargs: dict[str, Any] | None, **arguments: Any) -> Any:
    extra_body = {} if xargs is None else {"vllm_xargs": xargs}
    arguments = {"max_tokens": 120, "seed": 1} | arguments
    return client.completions.create(model="tiny", prompt="hello", extra_body=extra_body, **arguments).choices[0]


def test_flat_keys(client: openai.OpenAI) -> None:
    choice = _complete(client, {"guide_json_schema": json.dumps(SCHEMA)}, max_tokens=200)
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.text), SCHEMA)
    assert re.fullmatch(DATE, _complete(client, {"guide_regex": DATE}).text)
    assert _complete(client, {"guide_choice": ["yes", "no"]}).text in {"yes", "no"}
    assert re.fullmatch("a[0-9]b", _complete(client, {"guide_ebnf": 'root ::= "a" [0-9] "b"'}).text)
    assert re.fullmatch(DATE, _complete(client, {"guide": json.dumps({"regex": DATE})}).text)


def test_chat_and_streaming(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "when?"}],
        stream=True,
        max_tokens=60,
        extra_body={"vllm_xargs": {"guide_regex": DATE}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert re.fullmatch(DATE, text)


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"guide_regex": "("}, "position 0"),
        ({"guide_json_schema": "{"}, "line 1, column 2"),
        ({"guide_regexp": "a"}, "did you mean 'guide_regex'"),
        ({"guide_json_schema": json.dumps({"type": "object", "properties": {"a": {"type": "nonsense"}}})}, "nonsense"),
        ({"guide_regex": "a", "guide_backend": "none such"}, "unknown backend"),
    ],
    ids=["regex", "json", "key", "schema", "backend"],
)
def test_bad_guide_is_a_400(client: openai.OpenAI, xargs: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        _complete(client, xargs)


def test_example(client: openai.OpenAI) -> None:
    """The README of a server: each answer fits its guide, and the bad guide is told why."""
    command = [sys.executable, str(EXAMPLES / "vllm_server.py"), "--url", str(client.base_url)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout.splitlines()
    city, water, date, _, refused = (line.strip() for line in lines[1::2])
    assert set(json.loads(ast.literal_eval(city))) == {"city", "population"}
    assert ast.literal_eval(water) in {"yes", "no"}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", ast.literal_eval(date))
    assert "position 0" in refused


def test_twenty_requests_at_once(client: openai.OpenAI) -> None:
    """Guided, unguided and bad ones together: each gets its own answer."""

    def ask(number: int) -> None:
        kind = number % 4
        if kind == 0:
            text = _complete(client, {"guide_regex": f"{number}-[a-z]{{3}}"}, seed=number).text
            assert re.fullmatch(f"{number}-[a-z]{{3}}", text)
        elif kind == 1:
            choice = _complete(client, {"guide_json_schema": json.dumps(SCHEMA)}, seed=number, max_tokens=200)
            jsonschema.validate(json.loads(choice.text), SCHEMA)
        elif kind == 2:
            assert _complete(client, None, max_tokens=7).finish_reason == "length"
        else:
            with pytest.raises(openai.BadRequestError):
                _complete(client, {"guide_regex": "["})

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(ask, range(20)))
