"""Tools and reasoning on the real SmolLM2, judged by `json`, `jsonschema` and plain string search."""

import json
import re
from typing import Any

import jsonschema
import pytest

import gd_plugin as gd

END = 2
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
CALL = re.compile(r'<tool_call>\n\{"name": "(\w+)", "arguments": (.*?)\}\n</tool_call>', re.S)


@pytest.fixture(scope="module")
def chat(smollm2_tokenizer: Any) -> Any:
    """Question and guide -> result."""
    from transformers import AutoModelForCausalLM

    from gd_plugin.testing.real_model import smollm2_folder

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder()).eval()

    def ask(question: str, guide: gd.Guide, max_new_tokens: int) -> gd.RowResult:
        messages = [{"role": "user", "content": question}]
        prompt = smollm2_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = smollm2_tokenizer(prompt, return_tensors="pt")
        processor = gd.GuidedLogitsProcessor(guide, tokenizer=smollm2_tokenizer, model=model, whitespace="compact")
        output = model.generate(
            **inputs, logits_processor=[processor], max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=END
        )
        [result] = processor.results(output)
        return result

    return ask


def check_call(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_free_text_with_or_without_calls(chat: Any) -> None:
    question = 'Answer with this text alone: <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    result = chat(question, gd.Guide.tools(TOOLS, "auto"), 40)
    # whatever begins as a call is one
    assert result.text.count("<tool_call>") - len(CALL.findall(result.text)) <= (result.status == "truncated")
    for call in CALL.findall(result.text):
        check_call(*call)
    assert "<tool_call>" not in chat(question, gd.Guide.tools(TOOLS, "none"), 40).text


def test_required_and_named_calls(chat: Any) -> None:
    result = chat("What is the weather in Oslo for 3 days?", gd.Guide.tools(TOOLS, "weather"), 150)
    assert result.status == "complete"
    match = CALL.fullmatch(result.text)
    assert match and match[1] == "weather", result.text
    check_call(*match.groups())
    # calls may go on, so the budget may end within one
    result = chat("What time is it?", gd.Guide.tools(TOOLS, "required"), 80)
    calls = CALL.findall(result.text)
    assert calls and result.text.startswith("<tool_call>\n")
    for call in calls:
        check_call(*call)


def test_reasoning_then_a_choice(chat: Any) -> None:
    guide = gd.Guide.choice(["yes", "no"]).with_reasoning(start="<think>", end="</think>", max_tokens=8)
    result = chat("Is Rome in Italy?", guide, 40)
    assert result.status == "complete"
    # the model may skip the thought: then the guide applies at once
    thought, _, answer = result.text.rpartition("</think>")
    assert answer in ("yes", "no")
    assert not thought or thought.lstrip().startswith("<think>")


def test_reasoning_then_a_call(chat: Any) -> None:
    guide = gd.Guide.tools(TOOLS, "weather").with_reasoning(end="</think>", max_tokens=12)
    result = chat("Think, then ask for the weather in Rome for 2 days.", guide, 180)
    assert result.status == "complete", result.text
    _, end, call = result.text.partition("</think>")
    assert end and "</think>" not in call
    match = CALL.fullmatch(call)
    assert match, result.text
    check_call(*match.groups())
