"""A typed record from a paragraph: the schema is a pydantic model, and so is the answer."""

from typing import Literal

from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder


class Person(BaseModel):
    """The record to extract."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=130)
    job: Literal["nurse", "teacher", "cook"]


def main() -> None:
    folder = smollm2_folder()  # or any folder or hub name of a causal model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    guide = gd.Guide.json_schema(Person)  # a dataclass, a TypedDict, a dict or JSON text serve as well
    processor = gd.GuidedLogitsProcessor(guide, tokenizer=tokenizer, model=model, whitespace="compact")

    question = "Maria Keller, 34, works as a nurse in Vienna. Give her name, age and job as JSON."
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False, logits_processor=processor)

    result = processor.results(output)[0]
    print(result.status, result.text)
    if result.status == "complete":
        print(repr(Person.model_validate_json(result.text or "")))


if __name__ == "__main__":
    main()
