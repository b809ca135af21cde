"""What xgrammar enforces exactly in a JSON Schema; it ignores or narrows the rest in silence.

In:  a schema.      Out: a Problem for each construct that is not on the list.
The list is what was found exact in xgrammar 0.2.9. Left out although it compiles: lengths (escapes are lost, control
characters let in), `pattern` (anchored, and quotes not escaped), `format` (2024-02-30 is a date), bounds of `number`
(no exponents), tuples, `enum` of containers (one spelling), several branches of `allOf`, and keywords without their type.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from gd_plugin.guides.report import Problem

__all__ = ["xgrammar_schema_problems"]

_ANNOTATIONS: Final = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)
_CONTAINERS: Final = frozenset({"$defs", "definitions"})
# keyword -> the type it must stand beside
_BESIDE: Final = {
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "items": "array",
    "minItems": "array",
    "maxItems": "array",
    "minimum": "integer",
    "maximum": "integer",
    "exclusiveMinimum": "integer",
    "exclusiveMaximum": "integer",
}
_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
# keywords that must stand alone among those which decide something
_ALONE: Final = frozenset({"$ref", "anyOf", "const", "enum"})


def xgrammar_schema_problems(text: str, backend: str) -> list[Problem]:
    """Return what xgrammar cannot enforce in the schema `text`, JSON; each with its pointer."""
    found: list[Problem] = []
    stack: list[tuple[Any, str]] = [(json.loads(text), "#")]
    while stack:
        schema, pointer = stack.pop()
        if not isinstance(schema, dict):
            continue
        for place, keyword, message in _faults(schema):
            found.append(Problem(f"{pointer}/{place}", keyword, backend, f"xgrammar does not enforce {message}"))
        stack.extend((child, f"{pointer}/{place}") for place, child in _children(schema))
    return found


def _faults(schema: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (place, keyword, what is not enforced) of one schema, its children aside."""
    deciding = [key for key in schema if key not in _ANNOTATIONS and key not in _CONTAINERS]
    kind = schema.get("type")
    for key in deciding:
        if key == "type":
            if kind not in _TYPES:
                yield key, key, f"{key} {json.dumps(kind)} exactly"
        elif key in _ALONE:
            if [other for other in deciding if other not in (key, "type")] or (
                kind is not None and key in ("$ref", "anyOf")
            ):
                yield key, key, f'"{key}" beside other keywords'
            elif key == "$ref" and not str(schema[key]).startswith("#"):
                yield key, key, "references to other documents"
            elif key in ("const", "enum") and not _plain(schema[key] if key == "enum" else [schema[key]], kind):
                yield key, key, f'"{key}" of these values exactly'
        elif key not in _BESIDE:
            yield key, key, f'"{key}" exactly'
        elif kind != _BESIDE[key]:
            yield key, key, f'"{key}" where the type is not "{_BESIDE[key]}"'
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    if isinstance(required, list) and any(name not in known for name in required):
        yield "required", "required", 'names in "required" that are not in "properties"'


def _plain(values: Any, kind: Any) -> bool:
    """Tell whether all values are scalars, with no second spelling, of the type that stands beside them."""
    classes = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
    if not isinstance(values, list) or (kind is not None and kind not in classes):
        return False
    for value in values:
        if not isinstance(value, str | int | type(None)):
            return False
        if kind is not None and (
            not isinstance(value, classes[kind]) or (kind == "integer" and isinstance(value, bool))
        ):
            return False
    return True


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("properties", *_CONTAINERS):
        if isinstance(schema.get(key), dict):
            for name, child in schema[key].items():
                yield f"{key}/{name.replace('~', '~0').replace('/', '~1')}", child
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    if isinstance(schema.get("anyOf"), list):
        for position, child in enumerate(schema["anyOf"]):
            yield f"anyOf/{position}", child
