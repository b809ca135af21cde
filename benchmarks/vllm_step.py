"""Time a guide adds to a step of a vLLM engine, beside vLLM's own structured outputs with xgrammar.

python benchmarks/vllm_step.py [--requests 1 8 32] [--rounds 5] [--json FILE]

One engine, the same prompts, schema and seeds; three kinds of request in rounds that take turns: unguided, vLLM's own
structured outputs, and ours on the same xgrammar. What a kind adds is its time per step less that of unguided requests.
Guides are compiled before a round is timed. The model is tiny, so that what is compared is not drowned; on a large model
both vanish alike. Outputs are checked before anything is printed. The table says nothing about a GPU.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jsonschema
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version
from vllm.sampling_params import StructuredOutputsParams

from gd_plugin.testing.real_model import smollm2_folder

# long enough that the end of a document falls behind the steps that are timed, and within what xgrammar enforces exactly
SCHEMA = {
    "type": "object",
    "properties": {f"number_{i}": {"type": "integer"} for i in range(40)},
    "required": [f"number_{i}" for i in range(40)],
    "additionalProperties": False,
}
STEPS = 48
KINDS = ("unguided", "vLLM", "gd_plugin")


def _tiny_model(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(tokenizer_only=True))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=640,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _params(kind: str, seed: int, max_tokens: int = STEPS) -> SamplingParams:
    arguments: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed}
    if kind == "vLLM":
        arguments["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
    elif kind == "gd_plugin":
        arguments["extra_args"] = {"guide": {"json_schema": SCHEMA}, "guide_backend": "xgrammar"}
    else:
        arguments["ignore_eos"] = True
    return SamplingParams(**arguments)


def _step_ms(engine: LLM, kind: str, num_requests: int, first_seed: int) -> float:
    """Median time of the steps in which every request decodes."""
    core = engine.llm_engine
    for number in range(num_requests):
        core.add_request(f"{kind}-{first_seed}-{number}", "words:", _params(kind, first_seed + number))
    times = []
    while core.has_unfinished_requests():
        start = time.perf_counter()
        core.step()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[4:-4])


def _check(engine: LLM) -> None:
    for kind in KINDS[1:]:
        (result,) = engine.generate(["words:"], _params(kind, 1, max_tokens=600), use_tqdm=False)
        output = result.outputs[0]
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), SCHEMA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            _tiny_model(Path(folder)),
            logits_processors=["gd_plugin.vllm:GuidedLogitsProcessor"],
            structured_outputs_config={"backend": "xgrammar"},
            dtype="float32",
            max_model_len=640,
            max_num_seqs=max(arguments.requests),
            enforce_eager=True,
            enable_prefix_caching=False,
        )
        _check(engine)
        rows: list[dict[str, Any]] = []
        for num_requests in arguments.requests:
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for number in range(arguments.rounds):
                turn = number % len(KINDS)
                for kind in (*KINDS[turn:], *KINDS[:turn]):
                    times[kind].append(_step_ms(engine, kind, num_requests, 100 * number))
            rows.append({"requests": num_requests, "step_ms": times})
    print(
        f"vLLM {vllm_version}, torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} rounds"
    )
    print(
        "milliseconds a step, median of rounds; what was added; ratio of whole steps, ours to vLLM's, with 20% and 80%"
    )
    print("requests  unguided    vLLM  gd_plugin  vLLM adds  gd_plugin adds  ratio")
    for row in rows:
        base, theirs, ours = (statistics.median(row["step_ms"][kind]) for kind in KINDS)
        pairs = zip(row["step_ms"]["gd_plugin"], row["step_ms"]["vLLM"], strict=True)
        ratios = sorted(mine / other for mine, other in pairs)
        low, high = ratios[len(ratios) // 5], ratios[-1 - len(ratios) // 5]
        print(
            f"{row['requests']:8}  {base:8.2f}  {theirs:6.2f}  {ours:9.2f}  {theirs - base:9.2f}  {ours - base:14.2f}  "
            f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"vllm": vllm_version, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
