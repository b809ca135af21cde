"""Which engines a processor found by entry point refuses to guide, and how it is found. Engines: test_engine.py."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm builds an environment that has it")

from vllm import SamplingParams

from gd_plugin.vllm.entry_point import EntryPointLogitsProcessor, refusal
from gd_plugin.vllm.processor import GuidedLogitsProcessor

NAME = "gd_plugin.vllm:GuidedLogitsProcessor"


def _config(
    named: list[Any] | None = None, v2: bool = False, speculative: Any = None, asynchronous: bool = False
) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=named),
        use_v2_model_runner=v2,
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_config(), None),
        (None, "does not tell"),
        (_config(speculative=object()), "speculative decoding"),
        (_config(asynchronous=True), "--no-async-scheduling"),
        (_config(v2=True, speculative=object(), asynchronous=True), None),
        (_config(named=[NAME], asynchronous=True), None),
        (_config(named=[GuidedLogitsProcessor], asynchronous=True), None),
        (_config(named=["other:Processor"], speculative=object()), "speculative decoding"),
    ],
    ids=["plain", "unknown", "drafts", "async", "V2", "named", "named class", "other"],
)
def test_refusal(config: Any, reason: str | None) -> None:
    found = refusal(config)
    assert found is None if reason is None else reason in str(found)


class Frontend:
    """Calls as vLLM's InputProcessor does: the configuration is its own, the check is a function in between."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def check(self, params: SamplingParams) -> None:
        def validate() -> None:
            EntryPointLogitsProcessor.validate_params(params)

        validate()


def test_requests_are_judged_by_the_engine_that_asks() -> None:
    guided = SamplingParams(extra_args={"guide": {"regex": "a"}})
    unguided = SamplingParams(extra_args={"session_id": "1"})
    Frontend(_config()).check(guided)
    drafting = Frontend(_config(speculative=object()))
    with pytest.raises(ValueError, match="passes over"):
        drafting.check(guided)
    drafting.check(unguided)


def test_folder_registers_the_processor() -> None:
    folder = subprocess.run(
        [sys.executable, "-m", "gd_plugin.vllm"], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()
    (found,) = importlib.metadata.Distribution.discover(name="gd_plugin_vllm", path=[folder])
    (entry,) = found.entry_points.select(group="vllm.logits_processors")
    assert entry.load() is EntryPointLogitsProcessor
