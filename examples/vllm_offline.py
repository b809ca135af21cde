"""Guided batches in a vLLM engine: one guide per request, unguided ones beside them.

python examples/vllm_offline.py [--model MODEL] [--tensor-parallel-size N]
"""

import argparse
import json
import os
from typing import Literal

from pydantic import BaseModel
from vllm import LLM, SamplingParams

import gd_plugin as gd


class Review(BaseModel):
    """What the first request must fill in."""

    stars: Literal[1, 2, 3, 4, 5]
    positive: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model's name or folder (default: the small model that the tests use)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices to split the model over")
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        from gd_plugin.testing.real_model import smollm2_folder

        model = str(smollm2_folder())

    # settings of the plugin are environment variables, read when the engine starts: small models wander in white space
    os.environ.setdefault("GD_PLUGIN_WHITESPACE", "compact")
    engine = LLM(
        model,
        logits_processors=["gd_plugin.vllm:GuidedLogitsProcessor"],
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=512,
        # compiling the model pays in a server, not in a run of four requests
        enforce_eager=True,
        dtype="float32" if arguments.model is None else "auto",
    )
    requests: list[tuple[str, gd.Guide | None]] = [
        (
            "Great food, slow service. The review as JSON with the keys stars and positive:",
            gd.Guide.json_schema(Review),
        ),
        ("Is Vienna in Austria? Answer yes or no:", gd.Guide.choice(["yes", "no"])),
        ("The first day of 2024, as YYYY-MM-DD:", gd.Guide.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")),
        ("Write one sentence about rivers.", None),
    ]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=100,
            extra_args=None if guide is None else {"guide": json.loads(guide.to_json())},
        )
        for _, guide in requests
    ]
    conversations = [[{"role": "user", "content": prompt}] for prompt, _ in requests]
    for (prompt, _), result in zip(requests, engine.chat(conversations, params, use_tqdm=False), strict=True):
        print(f"{prompt}\n    {result.outputs[0].text!r}")


if __name__ == "__main__":
    main()
