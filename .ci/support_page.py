"""Write docs/support.md: what each backend says about sample guides, and every setting, asked of the code.

In:  the installed backends, GuidedDecodingConfig.      Out: the page; a test holds docs/support.md equal to it.

    python .ci/support_page.py > docs/support.md
"""

import re
from dataclasses import fields

import gd_plugin as gd
from gd_plugin.guides.tools import STYLES

BACKENDS = ("xgrammar", "llguidance", "outlines_core")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
RECORD = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
BOUNDED = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
SAMPLES = {
    "`Guide.json()`": gd.Guide.json(),
    "`Guide.json_schema`, types, enums, nesting": gd.Guide.json_schema(RECORD),
    "`Guide.json_schema`, bounds, lengths, patterns, formats, combinations": gd.Guide.json_schema(BOUNDED),
    "`Guide.regex`": gd.Guide.regex("[a-z]{2,4}"),
    "`Guide.choice`": gd.Guide.choice(["yes", "no"]),
    "`Guide.ebnf`, without recursion": gd.Guide.ebnf('root ::= "a" | "b"'),
    "`Guide.ebnf`, with recursion": gd.Guide.ebnf('root ::= "(" root ")" | "x"'),
    "`Guide.lark`, with recursion": gd.Guide.lark('start: "(" start ")" | "x"'),
    **{
        f'`Guide.tools(..., style="{style}")`': gd.Guide.tools(TOOLS, tool_choice="required", style=style)
        for style in STYLES
    },
    "`Guide.tools`, free text around calls": gd.Guide.tools(TOOLS),
    "`with_reasoning`, over a choice": gd.Guide.choice(["yes", "no"]).with_reasoning(),
}


def page() -> str:
    """Return the page."""
    lines = [
        "# What is supported",
        "",
        "Made by `.ci/support_page.py` from what the code says; a test holds the page equal to it.",
        "",
        "## Guides by backend",
        "",
        'Each row is a sample guide that every backend was asked about (`gd.lint`). "yes" is: all of it, exactly. What a',
        'backend cannot enforce exactly it refuses, and `backend="auto"` takes the next one.',
        "",
        "| guide | " + " | ".join(BACKENDS) + ' | "auto" takes |',
        "|---|" + "---|" * (len(BACKENDS) + 1),
    ]
    for name, guide in SAMPLES.items():
        report = gd.lint(guide)
        cells = ["yes" if report.backends[backend] == "enforces all of it" else "refused" for backend in BACKENDS]
        lines.append(f"| {name} | {' | '.join(cells)} | {report.backend} |")
    lines += [
        "",
        "JSON Schema, keyword by keyword: [the table](schemas.md). What a kind of guide means: [One language](language.md).",
        "",
        "## Settings",
        "",
        "Fields of [`GuidedDecodingConfig`][gd_plugin.GuidedDecodingConfig], which `GuidedLogitsProcessor` also takes as",
        "keywords, and the environment variables that `GuidedDecodingConfig.from_env()` and the vLLM plugin read.",
        "",
        "| field | default | environment variable | |",
        "|---|---|---|---|",
    ]
    meanings = attributes(gd.GuidedDecodingConfig.__doc__ or "")
    for field in fields(gd.GuidedDecodingConfig):
        lines.append(
            f"| `{field.name}` | `{field.default!r}` | `GD_PLUGIN_{field.name.upper()}` | {meanings[field.name]} |"
        )
    return "\n".join(lines) + "\n"


def attributes(docstring: str) -> dict[str, str]:
    """Read the Attributes section of a Google docstring."""
    section = docstring.partition("Attributes:\n")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("|", "\\|") for name, text in found}


if __name__ == "__main__":
    print(page(), end="")
