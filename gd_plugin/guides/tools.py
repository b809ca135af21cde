# ruff: noqa: RUF001, RUF002 - DeepSeek writes its markers with these characters
r"""Tools: OpenAI tool definitions -> a structural tag, in the styles that chat models write calls in.

In:  `[{"type": "function", "function": {"name": ..., "parameters": {...}}}]`, `tool_choice` and a style.
Out: `tools_to_structural_tag(...)`, a spec that guides/structural_tag.py reads.

    hermes      <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>      Hermes, Qwen 2.5 and 3
    llama       {"name": "f", "parameters": {...}}                                Llama 3.1 and later, JSON calls
    function    <function=f>{...}</function>                                      Llama 3.1 custom tags
    list        [{"name": "f", "arguments": {...}}, ...]                          xLAM; Mistral behind its [TOOL_CALLS]
    deepseek    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{...}\n```<｜tool▁call▁end｜>
                ...<｜tool▁calls▁end｜>                                             DeepSeek V3 and R1
    deepseek31  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
                ...<｜tool▁calls▁end｜>                                             DeepSeek V3.1

`auto` is free text with any number of calls, `required` one call or more and nothing else, a name exactly one call of that
tool, `none` free text in which no call begins. Markers are text: where a tokenizer holds one as a special token that has no
text (Mistral's [TOOL_CALLS]), it belongs to the prompt. Arguments are JSON: styles that write them as XML are not there.
Sources: the models' chat templates; OpenAI's API reference for `tools` and `tool_choice`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from gd_plugin.errors import InvalidGuideError

__all__ = ["STYLES", "tools_to_structural_tag"]


class _Style(NamedTuple):
    """How calls are written.

    Attributes:
        begin: text before the arguments, with {name} as JSON or {plain}.
        end: text behind them.
        trigger: text that begins a call, or the first of several.
        separator: text between two calls.
        open: text before the first call.
        close: text behind the last.
    """

    begin: str
    end: str
    trigger: str
    separator: str
    open: str = ""
    close: str = ""


STYLES: dict[str, _Style] = {
    "hermes": _Style('<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>", "<tool_call>", "\n"),
    "llama": _Style('{{"name": {name}, "parameters": ', "}", '{"name": ', "; "),
    "function": _Style("<function={plain}>", "</function>", "<function=", "\n"),
    "list": _Style('{name}, "arguments": ', "}", '[{"name": ', ', {"name": ', '[{"name": ', "]"),
    "deepseek": _Style(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{plain}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    # cut where what follows a call begins to differ, so that one character tells another call from the close
    "deepseek31": _Style(
        "{plain}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁call",
        "<｜tool▁calls▁begin｜>",
        "▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "s▁end｜>",
    ),
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_A_TOOL = 'write {"type": "function", "function": {"name": ..., "parameters": {...}}}'
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def tools_to_structural_tag(tools: Any, tool_choice: Any = "auto", style: str = "hermes") -> dict[str, Any]:
    """Return the structural tag of a set of tools.

    Raises:
        InvalidGuideError: a tool is not well formed, two share a name, the choice names none of them, or the style is
            unknown; the message names the tool and its JSON pointer.
    """
    if not isinstance(style, str) or style not in STYLES:
        raise InvalidGuideError(
            f"#/style: unknown tool style {style!r}",
            pointer="#/style",
            keyword="style",
            hint=f"there are {', '.join(STYLES)}",
        )
    form = STYLES[style]
    parsed = _read_tools(tools)
    mode, forced = _read_choice(tool_choice, list(parsed))
    tags = [_tag(form, name, schema) for name, schema in parsed.items() if forced in (None, name)]
    if mode == "none":
        return _structural({"type": "any_text", "excludes": [form.trigger] if tags else []})
    calls = {"type": "tags_with_separator", "tags": tags, "separator": form.separator, "at_least_one": True}
    if mode == "auto":
        if form.open:
            tags = [{"type": "tag", "begin": form.open, "content": calls, "end": form.close}]
        return _structural({"type": "triggered_tags", "triggers": [form.trigger], "tags": tags})
    wanted = calls if mode == "required" else tags[0]
    if form.open:
        texts = [{"type": "const_string", "value": text} for text in (form.open, form.close)]
        wanted = {"type": "sequence", "elements": [texts[0], wanted, texts[1]]}
    return _structural(wanted)


def _structural(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def _tag(form: _Style, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": form.begin.format(name=json.dumps(name), plain=name),
        "content": {"type": "json_schema", "json_schema": schema},
        "end": form.end,
    }


def _read_tools(tools: Any) -> dict[str, dict[str, Any]]:
    """Return parameters by name, in order."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Iterable):
        raise InvalidGuideError(
            f"#: tools is a list of tool definitions, got {type(tools).__name__}",
            pointer="#",
            hint="pass a list, also of one tool",
        )
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        pointer = f"#/{index}"
        if not isinstance(tool, Mapping):
            raise InvalidGuideError(
                f"{pointer}: a tool is an object, got {type(tool).__name__}", pointer=pointer, hint=_A_TOOL
            )
        function = tool.get("function", tool)
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise InvalidGuideError(f"{pointer}: this is no function tool", pointer=pointer, hint=_A_TOOL)
        inner = f"{pointer}/function" if "function" in tool else pointer
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidGuideError(
                f"{inner}/name: {name!r} is no name of a tool",
                pointer=f"{inner}/name",
                keyword="name",
                hint="use up to 128 letters, digits, '_', '-' and '.'",
            )
        if name in found:
            raise InvalidGuideError(
                f"{inner}/name: two tools are called {name!r}", pointer=f"{inner}/name", hint="rename one of them"
            )
        schema = function.get("parameters")
        if schema is None or schema == {}:
            schema = _NO_PARAMETERS
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise InvalidGuideError(
                f'{inner}/parameters: tool {name!r}: parameters is not a JSON Schema of type "object"',
                pointer=f"{inner}/parameters",
                keyword="parameters",
                hint='write {"type": "object", "properties": {...}}',
            )
        found[name] = {"type": "object", **schema}
    return found


def _read_choice(tool_choice: Any, names: list[str]) -> tuple[Literal["auto", "required", "none", "tool"], str | None]:
    """Return the mode, and the name of the tool if it is "tool": a tool may be called like a mode."""
    choice = tool_choice
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
    elif choice in ("none", None):
        return "none", None
    elif choice in ("auto", "required"):
        if not names:
            raise InvalidGuideError(
                f"#/tool_choice: tool_choice is {choice!r}, but there are no tools",
                pointer="#/tool_choice",
                keyword="tool_choice",
                hint="pass tools, or tool_choice='none'",
            )
        return choice, None
    if choice not in names:
        raise InvalidGuideError(
            f"#/tool_choice: tool_choice names {choice!r}; the tools are {', '.join(names) or 'none'}",
            pointer="#/tool_choice",
            keyword="tool_choice",
            hint="name one of them, or use 'auto', 'required' or 'none'",
        )
    return "tool", str(choice)
