"""Which backend enforces which keyword, and how: one table, from which routing and docs/schemas.md are made.

`via rewrite`: llguidance enforces it through the normal form. `exact`: xgrammar is given the schema as it is, where it
enforces every keyword in it (measured on 0.2.9). `refused`: a schema that has it is refused; "auto" takes another backend.
"""

import json
import re
from typing import Any, Final

from gd_plugin.guides.problem import Problem, escape_pointer

__all__ = ["SUPPORT", "support_table", "xgrammar_problems"]

_REWRITTEN: Final = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "$anchor",
    "$id",
    "$defs",
    "definitions",
    "type",
    "enum",
    "const",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
    "prefixItems",
    "items",
    "additionalItems",
    "contains",
    "minContains",
    "maxContains",
    "minItems",
    "maxItems",
    "uniqueItems",
    "unevaluatedItems",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
]
_XGRAMMAR: Final = frozenset(
    [
        "$ref",
        "$defs",
        "definitions",
        "type",
        "enum",
        "const",
        "anyOf",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "minItems",
        "maxItems",
    ]
)
_ANNOTATIONS: Final = frozenset(
    [
        "$schema",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
    ]
)

SUPPORT: Final[dict[str, dict[str, str]]] = {
    keyword: {"llguidance": "via rewrite", "xgrammar": "exact" if keyword in _XGRAMMAR else "refused"}
    for keyword in _REWRITTEN
}


def xgrammar_problems(text: str, additional_properties: bool, property_order: str = "declared") -> list[Problem]:
    """What xgrammar does not enforce exactly in a schema given as JSON text."""
    found: list[Problem] = []

    def add(pointer: str, keyword: str, message: str) -> None:
        found.append(Problem(f"{pointer}/{keyword}", keyword, "xgrammar", f"xgrammar {message}; use backend='auto'"))

    stack: list[tuple[Any, str]] = [(json.loads(text), "#")]
    while stack:
        schema, pointer = stack.pop()
        if not isinstance(schema, dict):
            if schema is False:
                add(pointer, "false", "has no empty schema")
            continue
        keywords = [key for key in schema if key not in _ANNOTATIONS]
        for key in keywords:
            if key in SUPPORT and SUPPORT[key]["xgrammar"] == "refused":
                add(pointer, key, "does not enforce this keyword exactly")
        alone = [key for key in ("$ref", "anyOf", "enum", "const") if key in schema]
        values = [schema["const"]] if "const" in schema else schema.get("enum", ())
        if not all(isinstance(value, str | bool | None) for value in values):
            add(pointer, alone[0], "takes one spelling only of such a value")
        if "$ref" in schema and not re.fullmatch(r"#/(\$defs|definitions)/[A-Za-z0-9_]+", str(schema["$ref"])):
            add(pointer, "$ref", "resolves only plain names under $defs")
        beside = set(keywords) - {"$defs", "definitions", "$ref", "anyOf", "enum", "const"} - {"type"}
        if len(alone) > 1 or (alone and beside & set(SUPPORT)) or (alone and "type" in schema and not _agrees(schema)):
            add(pointer, alone[0], "ignores what stands beside it")
        if not alone and keywords and not isinstance(schema.get("type"), str):
            add(pointer, "type", "needs one type where other keywords are")
        if schema.get("type") == "object" and not alone:
            extra = schema.get("additionalProperties", additional_properties or "properties" not in schema)
            if "properties" in schema and extra is not False:
                add(pointer, "additionalProperties", "takes other keys only behind the declared ones")
            elif "properties" not in schema and "additionalProperties" not in schema:
                add(pointer, "type", "does not enforce an object without properties")
            elif not set(schema.get("required", ())) <= set(schema.get("properties", ())):
                add(pointer, "required", "does not enforce keys that are not declared")
        declared = schema.get("properties")
        if property_order == "any" and isinstance(declared, dict) and len(declared) > 1:
            message = "xgrammar repeats keys and leaves out required ones in any order; use backend='auto'"
            found.append(Problem(f"{pointer}/properties", "property_order", "xgrammar", message))
        if schema.get("type") == "array" and not isinstance(schema.get("items"), dict):
            add(
                pointer,
                "type" if "items" not in schema else "items",
                "does not enforce an array without one schema of items",
            )
        stack.extend(_below(schema, pointer))
    return found


def _agrees(schema: dict[str, Any]) -> bool:
    """Whether enum or const values all have the type that stands beside them: text only, where nothing can differ."""
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return schema["type"] == "string" and bool(values) and all(isinstance(value, str) for value in values)


def _below(schema: dict[str, Any], pointer: str) -> list[tuple[Any, str]]:
    below: list[tuple[Any, str]] = []
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), dict):
            below.extend((item, f"{pointer}/{key}/{escape_pointer(name)}") for name, item in schema[key].items())
    if isinstance(schema.get("anyOf"), list):
        below.extend((item, f"{pointer}/anyOf/{index}") for index, item in enumerate(schema["anyOf"]))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            below.append((schema[key], f"{pointer}/{key}"))
    return below


def support_table() -> str:
    """The table of docs/schemas.md."""
    rows = ["| keyword | llguidance | xgrammar |", "|---|---|---|"]
    rows.extend(f"| `{key}` | {row['llguidance']} | {row['xgrammar']} |" for key, row in SUPPORT.items())
    return "\n".join(rows) + "\n"
