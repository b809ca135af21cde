"""A tool call whose arguments always fit the tool's parameters."""

import json

from transformers import AutoModelForCausalLM, AutoTokenizer

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    }
]


def get_weather(city: str, unit: str) -> str:
    return f"18 degrees {unit} in {city}"


def main() -> None:
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    # "auto": text with any number of calls; "required": calls alone; a name: exactly one call of that tool
    guide = gd.Guide.tools(TOOLS, tool_choice="get_weather", style="hermes")
    processor = gd.GuidedLogitsProcessor(guide, tokenizer=tokenizer, model=model, whitespace="compact")

    question = f"Tools: {json.dumps(TOOLS)}\nCall a tool: how warm is it in Vienna, in celsius?"
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False, logits_processor=processor)

    text = processor.results(output)[0].text or ""
    print(text)
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    print(get_weather(**call["arguments"]))


if __name__ == "__main__":
    main()
