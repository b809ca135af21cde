"""A real model answers in valid JSON: extract a typed record from a paragraph, in every way `generate` works.

python examples/quickstart.py [--model FOLDER] [--backend NAME] [--prompt TEXT] [--schema FILE]
"""

import argparse
import json
import os
import time
from enum import Enum
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder

PARAGRAPH = (
    "Maria Keller, 34, moved from Graz to Vienna in 2019. She works as a nurse, speaks German and Italian, "
    "and keeps two pets: a cat called Miez and a dog called Bruno."
)

FIELDS = "name, age, languages (a list), pets (a list, each with its name and animal), email (null if unknown)."


class Animal(str, Enum):
    """Kinds of pet the record knows."""

    cat = "cat"
    dog = "dog"
    bird = "bird"


class Pet(BaseModel):
    """One pet."""

    name: str = Field(max_length=20)
    animal: Animal


class Person(BaseModel):
    """The record to extract."""

    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=130)
    languages: list[str] = Field(max_length=4)
    pets: list[Pet] = Field(max_length=3)
    email: str | None = None


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling x4": {"do_sample": True, "num_return_sequences": 4},
    "beams x4": {"do_sample": False, "num_beams": 4},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 5},
}


def load(folder: str | None, console: Console) -> tuple[Any, Any]:
    """Load model and tokenizer, showing that it takes a while; SmolLM2 is converted on its first use."""
    note = "Loading the model (SmolLM2 is converted once, which takes up to a minute)"
    with console.status(note if folder is None else f"Loading {folder}"):
        path = folder or smollm2_folder()
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path).eval()
    return model, tokenizer


def judge(text: str | None, record: type[BaseModel] | None) -> bool:
    """Tell whether a text is what was asked for, by other means than the guide's."""
    try:
        json.loads(text or "") if record is None else record.model_validate_json(text or "")
    except ValueError:
        return False
    return True


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal model with a chat template; default SmolLM2-135M-Instruct")
    parser.add_argument("--backend", default="auto", help="auto, or the name of a backend")
    parser.add_argument("--prompt", default=PARAGRAPH, help="text to extract from, or any instruction")
    parser.add_argument("--schema", type=Path, help="file with a JSON Schema instead of the built-in record")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    arguments = parser.parse_args()

    console = Console()
    record = Person if arguments.schema is None else None
    guide = gd.Guide.json_schema(Person if arguments.schema is None else arguments.schema.read_text())
    model, tokenizer = load(arguments.model, console)
    task = (
        f"Answer with a JSON record with these fields: {FIELDS}\n\n{arguments.prompt}" if record else arguments.prompt
    )
    chat = [{"role": "user", "content": task}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt_len = inputs["input_ids"].shape[1]
    limit = {"max_new_tokens": arguments.max_new_tokens}

    with console.status("Generating without a guide"):
        free = model.generate(**inputs, **limit, do_sample=False)
    console.rule("without a guide")
    console.print(tokenizer.decode(free[0, prompt_len:], skip_special_tokens=True), markup=False, soft_wrap=True)

    processor = gd.GuidedLogitsProcessor(
        guide, tokenizer=tokenizer, model=model, backend=arguments.backend, whitespace="compact"
    )
    table = Table("mode", "valid", "tokens per second", title="with the guide, in every mode")
    for mode, options in MODES.items():
        with console.status(f"Generating with the guide: {mode}"):
            started = time.perf_counter()
            output = model.generate(**inputs, **limit, **options, logits_processor=processor)
            seconds = time.perf_counter() - started
        results = processor.results(output)
        if mode == "greedy":
            console.rule("with the guide")
            console.print(results[0].text, markup=False, soft_wrap=True)
            if record and results[0].status == "complete":
                console.print("as a pydantic model:", record.model_validate_json(results[0].text or ""))
            console.rule()
        valid = sum(judge(result.text, record) for result in results)
        tokens = sum(result.num_tokens for result in results)
        table.add_row(mode, f"{valid} of {len(results)}", f"{tokens / seconds:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
