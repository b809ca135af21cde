"""Tool calls as chat models write them: the texts are written and read back here, with `json` and `jsonschema`."""

import json
import re

import jsonschema
import pytest

import gd_plugin as gd

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "w", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
WRITE = {
    "hermes": lambda name, arguments: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    "llama": lambda name, arguments: f'{{"name": "{name}", "parameters": {arguments}}}',
    "function": lambda name, arguments: f"<function={name}>{arguments}</function>",
    "list": lambda name, arguments: f'[{{"name": "{name}", "arguments": {arguments}}}]',
    "deepseek": lambda name, arguments: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek31": lambda name, arguments: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}
READ = {
    "hermes": r'<tool_call>\n\{"name": "(\w+)", "arguments": (.*)\}\n</tool_call>',
    "llama": r'\{"name": "(\w+)", "parameters": (.*)\}',
    "function": r"<function=(\w+)>(.*)</function>",
    "list": r'\[\{"name": "(\w+)", "arguments": (.*)\}\]',
    "deepseek": r"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>(\w+)\n```json\n(.*)\n```"
    r"<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek31": r"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>(\w+)<｜tool▁sep｜>(.*)"
    r"<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}
TWICE = {
    "hermes": lambda call: f"{call}\n{call}",
    "llama": lambda call: f"{call}; {call}",
    "function": lambda call: f"{call}\n{call}",
    "list": lambda call: f"{call[:-1]}, {call[1:]}",
    "deepseek": lambda call: call[: -len("<｜tool▁calls▁end｜>")] + "\n" + call[len("<｜tool▁calls▁begin｜>") :],
    "deepseek31": lambda call: call[: -len("<｜tool▁calls▁end｜>")] + call[len("<｜tool▁calls▁begin｜>") :],
}
GOOD = '{"city":"Oslo","days":2}'


def is_call(style, text):
    match = re.fullmatch(READ[style], text)
    if match is None or match[1] not in ("weather", "now"):
        return False
    schema = WEATHER if match[1] == "weather" else {"type": "object", "maxProperties": 0}
    try:
        jsonschema.validate(json.loads(match[2]), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def skip_if_refused(backend):
    problems = backend.problems(gd.Guide.tools(TOOLS))
    if problems:
        pytest.skip(f"{backend.name} refuses tools: {problems[0].message}")


@pytest.mark.parametrize("style", WRITE)
def test_one_call(backend, judge, style):
    skip_if_refused(backend)
    calls = [
        WRITE[style](name, arguments)
        for name in ("weather", "now", "other")
        for arguments in (GOOD, "{}", '{"city":1}')
    ]
    for choice in ("auto", "required"):
        asked = judge(gd.Guide.tools(TOOLS, choice, style=style))
        for call in calls:
            assert asked.accepts(call) == is_call(style, call), (choice, call)
    asked = judge(gd.Guide.tools(TOOLS, {"type": "function", "function": {"name": "now"}}, style=style))
    for call in calls:
        assert asked.accepts(call) == (is_call(style, call) and "now" in call), call


@pytest.mark.parametrize("style", WRITE)
def test_choices(backend, judge, style):
    skip_if_refused(backend)
    call = WRITE[style]("weather", GOOD)
    twice = TWICE[style](call)
    table = {
        # text: auto, required, none, named
        "": (True, False, True, False),
        "No tool is needed.": (True, False, True, False),
        call: (True, True, False, True),
        f"I ask.\n{call}": (True, False, False, False),
        twice: (True, True, False, False),
        f"{call} done": (True, False, False, False),
        call[:-3]: (False, False, False, False),
    }
    for index, choice in enumerate(["auto", "required", "none", "weather"]):
        asked = judge(gd.Guide.tools(TOOLS, choice, style=style))
        for text, legal in table.items():
            assert asked.accepts(text) == legal[index], (choice, text)


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_tool_may_be_called_like_a_mode(name, backend, judge):
    skip_if_refused(backend)
    named = [{"type": "function", "function": {"name": name}}, TOOLS[0]]
    call, other = WRITE["hermes"](name, "{}"), WRITE["hermes"]("weather", GOOD)
    forced = judge(gd.Guide.tools(named, {"type": "function", "function": {"name": name}}))
    assert forced.accepts(call)
    assert not any(forced.accepts(text) for text in (other, "free text", "", f"{call}\n{call}"))
    # as a word it is the mode still
    mode = judge(gd.Guide.tools(named, name))
    assert [mode.accepts(text) for text in (call, other, "free text")] == {
        "auto": [True, True, True],
        "none": [False, False, True],
        "required": [True, True, False],
    }[name]


def test_reasoning_before_a_call(vocabulary, backend):
    skip_if_refused(backend)
    guide = gd.Guide.tools(TOOLS, "required").with_reasoning()
    matcher = gd.GrammarMatcherFactory(vocabulary, backend=backend.name).create(guide)
    text = "it asks for <tool_call>s</think>" + WRITE["hermes"]("now", "{}")
    ids = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
    assert matcher.validate_tokens(ids) == len(ids)
    assert matcher.validate_tokens([*ids[:-1], ids[0]]) == len(ids) - 1


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


WRONG = [
    # tools, choice, pointer
    ("f", "auto", "#"),
    ([5], "auto", "#/0"),
    ([{"type": "retrieval"}], "auto", "#/0"),
    ([tool(name="a b")], "auto", "#/0/function/name"),
    ([tool(), tool()], "auto", "#/1/function/name"),
    ([tool(parameters={"type": "string"})], "auto", "#/0/function/parameters"),
    ([tool(parameters=[1])], "auto", "#/0/function/parameters"),
    ([tool()], "g", "#/tool_choice"),
    ([tool()], {"type": "function"}, "#/tool_choice"),
    ([], "required", "#/tool_choice"),
    ([], "auto", "#/tool_choice"),
    ([tool()], ["auto"], "#/tool_choice"),
    *(([tool(parameters=value)], "auto", "#/0/function/parameters") for value in ([], "", 0, False)),
]


@pytest.mark.parametrize(("tools", "choice", "pointer"), WRONG, ids=range(len(WRONG)))
def test_wrong_tools_name_the_place(tools, choice, pointer):
    with pytest.raises(gd.InvalidGuideError) as caught:
        gd.Guide.tools(tools, choice)
    assert caught.value.pointer == pointer


def test_unknown_style():
    with pytest.raises(gd.InvalidGuideError, match="hermes"):
        gd.Guide.tools(TOOLS, style="hermse")
