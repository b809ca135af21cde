"""Forward passes and time of grammar drafting on SmolLM2, greedy: unguided, plain guidance, drafts, canonical forcing.

python benchmarks/drafting.py [--tasks person ...] [--policies ...] [--schema with] [--repeats 3] [--json FILE]
python benchmarks/drafting.py --from FILE ...
A drafted output is compared with the plain one under the same masks before anything is printed. Forward passes are exact;
times are CPU seconds an output token, once with the prompt's pass and once behind it, as ratios within one run: the
policies of a task take turns, and the median of the repeats counts. Guides are compiled before the clock starts. Unguided
runs generate as many tokens as plain guidance does. Five tasks, one model of 135M parameters: no statement about others.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder

MAX_NEW_TOKENS = 200


def record(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 40}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
LONG_KEYS = [
    "customer_identification",
    "delivery_street_address",
    "delivery_postal_code",
    "preferred_contact_method",
    "emergency_telephone",
    "insurance_policy_number",
    "registration_timestamp",
    "responsible_department",
    "technical_specification",
    "manufacturing_country",
    "warranty_expiration",
    "additional_information",
]
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Describe Maria Keller, 34, a nurse from Vienna.",
        record({"name": SHORT, "age": NUMBER, "job": SHORT, "city": SHORT, "email": SHORT}),
    ),
    "invoice": (
        "Write the invoice of ACME for 2 chairs at 40 and 1 table at 120.",
        record(
            {
                "seller": record({"name": SHORT, "country": SHORT}),
                "items": {
                    "type": "array",
                    "items": record({"description": SHORT, "quantity": NUMBER, "unit_price": NUMBER}),
                    "minItems": 2,
                    "maxItems": 2,
                },
                "total": NUMBER,
            }
        ),
    ),
    "long_keys": ("Fill the form for a washing machine.", record(dict.fromkeys(LONG_KEYS, SHORT))),
    "enums": (
        "Classify: the washing machine leaks, the customer is angry.",
        record(
            {
                "department": {"enum": ["household_appliances", "garden_furniture", "consumer_electronics"]},
                "priority": {"enum": ["urgent_attention", "normal_processing", "no_action_required"]},
                "sentiment": {"enum": ["very_negative", "somewhat_negative", "neutral", "positive"]},
                "language": {"enum": ["english", "german", "italian"]},
                "channel": {"enum": ["telephone_call", "electronic_mail", "web_form"]},
                "resolved": {"type": "boolean"},
            }
        ),
    ),
    "tool_call": (
        "Find a hotel in Graz for two people on 3 May.",
        record(
            {
                "name": {"enum": ["book_hotel_room", "search_flights"]},
                "arguments": record({"city": SHORT, "number_of_guests": NUMBER, "arrival_date": SHORT}),
            }
        ),
    ),
}
# masks, drafts; None is no guide, and no drafts
POLICIES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "unguided": (None, None),
    "plain": ({}, None),
    "forced": ({}, {"prompt_lookup": False}),
    "forced+lookup": ({}, {}),
    "canonical": ({"canonical_forcing": True}, None),
    "canonical+lookup": ({"canonical_forcing": True}, {}),
}


def run(
    model: Any, tokenizer: Any, prompt: str, guide: gd.Guide, policy: str, num_tokens: int | None
) -> dict[str, Any]:
    """Generate; unguided, as many tokens as plain guidance has."""
    masks, drafts = POLICIES[policy]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(text, return_tensors="pt")
    options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS}
    if masks is None:
        options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    else:
        processor = gd.GuidedLogitsProcessor(guide, tokenizer=tokenizer, model=model, whitespace="compact", **masks)
        options["logits_processor"] = [processor]
    drafting: Any = None if drafts is None else gd.grammar_drafting(**drafts)
    if drafting is not None:
        options["custom_generate"] = drafting
    passes: list[float] = []
    hook = model.register_forward_hook(lambda *_: passes.append(time.process_time()))
    started = time.process_time()
    output = model.generate(**inputs, do_sample=False, **options)
    ended = time.process_time()
    hook.remove()
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "tokens": tokens,
        "forwards": len(passes),
        "seconds": ended - started,
        "seconds_behind_prompt": ended - passes[0],
    }


def measure(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line for each task, prompt and policy."""
    lines: list[dict[str, Any]] = []
    policies = sorted(arguments.policies, key=lambda policy: policy == "unguided")
    for name in arguments.tasks:
        prompt, schema = TASKS[name]
        guide = gd.Guide.json_schema(schema)
        for with_schema in {"with": [True], "without": [False], "both": [False, True]}[arguments.schema]:
            asked = f"{prompt} Answer in JSON" + (
                f" that obeys this schema: {json.dumps(schema)}" if with_schema else "."
            )
            runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in policies}
            for _ in range(arguments.repeats):
                for policy in policies:
                    known = next((len(r[0]["tokens"]) for r in runs.values() if r), 60)
                    runs[policy].append(run(model, tokenizer, asked, guide, policy, known))
            for drafted, plain in (("forced", "plain"), ("forced+lookup", "plain"), ("canonical+lookup", "canonical")):
                if runs.get(drafted) and runs.get(plain) and runs[drafted][0]["tokens"] != runs[plain][0]["tokens"]:
                    raise SystemExit(f"{name}: {drafted} differs from {plain}")
            for policy, repeats in runs.items():
                times = {key: [r[key] for r in repeats] for key in ("seconds", "seconds_behind_prompt")}
                lines.append(
                    {
                        "task": name,
                        "schema_in_prompt": with_schema,
                        "policy": policy,
                        "tokens": len(repeats[0]["tokens"]),
                        "forwards": repeats[0]["forwards"],
                        **{key: statistics.median(values) for key, values in times.items()},
                        "spread": (max(times["seconds"]) - min(times["seconds"])) / statistics.median(times["seconds"]),
                    }
                )
            print(f"{name}, schema in the prompt: {with_schema}", flush=True)
    return lines


def print_table(lines: list[dict[str, Any]]) -> None:
    """Print passes and times against unguided ones: all tasks, the slowest task, and how far repeats lie apart."""
    base = {(x["task"], x["schema_in_prompt"]): x for x in lines if x["policy"] == "unguided"}

    def per_token(of: list[dict[str, Any]], key: str) -> float:
        return float(sum(x[key] for x in of) / sum(x["tokens"] for x in of))

    for with_schema in (False, True):
        print(f"\nschema in the prompt: {with_schema}")
        print("| policy | tokens | passes | tokens a pass | times unguided, behind the prompt (slowest) | whole call |")
        for policy in POLICIES:
            own = [x for x in lines if x["policy"] == policy and x["schema_in_prompt"] == with_schema]
            if not own:
                continue
            tokens, forwards = sum(x["tokens"] for x in own), sum(x["forwards"] for x in own)
            cells = [policy, str(tokens), str(forwards), f"{tokens / forwards:.2f}"]
            for key in ("seconds_behind_prompt", "seconds"):
                peers = [base[x["task"], with_schema] for x in own if (x["task"], with_schema) in base]
                if len(peers) == len(own):
                    worst, task = min(
                        (per_token([b], key) / per_token([x], key), x["task"]) for b, x in zip(peers, own, strict=True)
                    )
                    total = per_token(peers, key) / per_token(own, key)
                    cells.append(f"{total:.2f} ({worst:.2f} {task})")
            spread = max(x["spread"] for x in own)
            print(f"| {' | '.join(cells)} | repeats lie up to {spread:.0%} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--schema", choices=["with", "without", "both"], default="both")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the lines here")
    parser.add_argument(
        "--from", dest="sources", nargs="+", type=Path, help="measure nothing, print these files' lines"
    )
    arguments = parser.parse_args()
    if arguments.sources:
        print_table([line for source in arguments.sources for line in json.loads(source.read_text())])
        return
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    run(model, tokenizer, "Hello.", gd.Guide.choice(["yes"]), "unguided", 2)  # the first call sets things up
    lines = measure(model, tokenizer, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1))
    print_table(lines)


if __name__ == "__main__":
    main()
