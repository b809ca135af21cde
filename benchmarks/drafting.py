"""Forward passes and time of grammar drafting on SmolLM2, greedy: unguided, plain guidance, drafts, canonical forcing.

python benchmarks/drafting.py [--tasks person ...] [--policies ...] [--json]
A drafted output is compared with the plain one under the same masks before anything is printed. Forward passes are exact;
times are CPU seconds an output token, as ratios within one run. Five tasks, one model of 135M parameters: no statement
about others.
"""

import argparse
import json
import os
import time
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
    started = time.process_time()
    output = model.generate(**inputs, do_sample=False, **options)
    seconds = time.process_time() - started
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "tokens": tokens,
        "forwards": len(tokens) if drafting is None else drafting.num_forwards,
        "seconds_per_token": seconds / len(tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--schema", choices=["with", "without", "both"], default="both")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lines: list[dict[str, Any]] = []
    for name in arguments.tasks:
        prompt, schema = TASKS[name]
        guide = gd.Guide.json_schema(schema)
        for with_schema in {"with": [True], "without": [False], "both": [False, True]}[arguments.schema]:
            asked = f"{prompt} Answer in JSON" + (
                f" that obeys this schema: {json.dumps(schema)}" if with_schema else "."
            )
            results: dict[str, dict[str, Any]] = {}
            for policy in sorted(arguments.policies, key=lambda policy: policy == "unguided"):
                known = next((len(r["tokens"]) for r in results.values()), 60)
                results[policy] = run(model, tokenizer, asked, guide, policy, known)
            for drafted, plain in (("forced", "plain"), ("forced+lookup", "plain"), ("canonical+lookup", "canonical")):
                if drafted in results and plain in results and results[drafted]["tokens"] != results[plain]["tokens"]:
                    raise SystemExit(f"{name}: {drafted} differs from {plain}")
            for policy, result in results.items():
                line = {
                    "task": name,
                    "schema_in_prompt": with_schema,
                    "policy": policy,
                    "tokens": len(result["tokens"]),
                    "forwards": result["forwards"],
                    "tokens_per_forward": round(len(result["tokens"]) / result["forwards"], 2),
                }
                for base in ("unguided", "plain"):
                    if base in results:
                        ratio = results[base]["seconds_per_token"] / result["seconds_per_token"]
                        line[f"times_{base}"] = round(ratio, 2)
                lines.append(line)
                if not arguments.json:
                    print(line, flush=True)
    if arguments.json:
        print(json.dumps(lines, indent=1))
        return
    for policy in arguments.policies:
        for with_schema in (False, True):
            own = [x for x in lines if x["policy"] == policy and x["schema_in_prompt"] == with_schema]
            if own:
                tokens, forwards = sum(x["tokens"] for x in own), sum(x["forwards"] for x in own)
                print(f"{policy}, schema in prompt {with_schema}: {tokens} / {forwards} = {tokens / forwards:.2f}")


if __name__ == "__main__":
    main()
