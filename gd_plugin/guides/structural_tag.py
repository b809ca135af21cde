"""Structural tags: text with tagged parts that obey guides of their own -> one normal form.

In:  the public shapes, as JSON: `{"type": "structural_tag", "format": {...}}`, or the older
     `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, also inside `{"type": "structural_tag", ...}`.
Out: `parse_structural_tag(spec)`, the first shape with every default written out; `to_engine_format` for xgrammar.
     guides/structural_lark.py spells it for llguidance.

    const_string value        json_schema json_schema        regex pattern        grammar grammar syntax (ebnf or lark)
    any_text excludes         to the end of the text, without `excludes`; inside a tag, to the first `end`
    sequence, or elements     optional, star, plus content   repeat content min max
    tag begin content end     tags_with_separator tags separator at_least_one stop_after_first
    triggered_tags triggers tags at_least_one stop_after_first    free text; where a trigger occurs, one of the tags that
                              begin with it must stand; at_least_one: the text begins with a tag
A `type` may be left out where the fields tell it. Kept here: errors carry JSON pointers; formats that speak of single
tokens are refused by name.
"""

from collections.abc import Callable
from typing import Any

from gd_plugin.errors import (
    GuideError,
    GuideTooLargeError,
    InvalidGuideError,
    UnsatisfiableGuideError,
    UnsupportedGuideError,
)
from gd_plugin.guides.ebnf import parse_ebnf
from gd_plugin.guides.grammar import Grammar, one_rule, to_xgrammar_ebnf
from gd_plugin.guides.lark import parse_lark
from gd_plugin.guides.regex import parse_regex

__all__ = [
    "embedded_schemas",
    "formats",
    "grammar_of",
    "has_inner_free_text",
    "parse_structural_tag",
    "tag_begin",
    "to_engine_format",
]

_MAX_DEPTH = 32
# they are compared with one another
_MAX_TRIGGERS = 1_000
# field -> (type, default or ... where it must be given); every format takes no other field
_FIELDS: dict[str, dict[str, tuple[type | tuple[type, ...], Any]]] = {
    "const_string": {"value": (str, ...)},
    "json_schema": {"json_schema": ((dict, bool), ...), "style": (str, "json")},
    "regex": {"pattern": (str, ...)},
    "grammar": {"grammar": (str, ...), "syntax": (str, "ebnf")},
    "any_text": {"excludes": (list, [])},
    "sequence": {"elements": (list, ...)},
    "or": {"elements": (list, ...)},
    "optional": {"content": (dict, ...)},
    "star": {"content": (dict, ...)},
    "plus": {"content": (dict, ...)},
    "repeat": {"content": (dict, ...), "min": (int, ...), "max": ((int, type(None)), None)},
    "tag": {"begin": (str, ...), "content": (dict, ...), "end": ((str, list), ...)},
    "triggered_tags": {
        "triggers": (list, ...),
        "tags": (list, ...),
        "at_least_one": (bool, False),
        "stop_after_first": (bool, False),
    },
    "tags_with_separator": {
        "tags": (list, ...),
        "separator": (str, ...),
        "at_least_one": (bool, False),
        "stop_after_first": (bool, False),
    },
}
_JSON_NAMES = {
    str: "text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a number",
    type(None): "null",
}
_TWO_SHAPES = 'write {"type": "structural_tag", "format": {...}}, or {"structures": [...], "triggers": [...]}'
_A_STRUCTURE = 'write {"begin": "...", "schema": {...}, "end": "..."}'
_WRITE_ITS_TEXT = "write the token's text as const_string, begin, end or trigger: a guide speaks of text"
_REFUSED_FORMATS = {
    **dict.fromkeys(
        ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"), _WRITE_ITS_TEXT
    ),
    "dispatch": "write triggered_tags",
    "qwen_xml_parameter": "use a style whose arguments are JSON: as XML, a schema has no exact meaning",
}
# fields that may be there with this value: xgrammar's own classes write them out
_IDLE_FIELDS: dict[str, dict[str, Any]] = {
    "json_schema": {"any_order": False, "max_whitespace_cnt": None, "excludes": []},
    "any_text": {"max_tokens": None, "max_chars": None},
    "triggered_tags": {"excludes": []},
}


def parse_structural_tag(spec: Any) -> dict[str, Any]:
    """Return the normal form of a structural tag.

    Raises:
        InvalidGuideError: an unknown or missing field, a tag that no trigger begins, an empty list; with a JSON pointer.
        UnsupportedGuideError: a format that speaks of tokens, or an XML style.
        GuideTooLargeError: nested too deeply.
    """
    if not isinstance(spec, dict):
        raise InvalidGuideError(
            f"#: a structural tag is an object, got {type(spec).__name__}", pointer="#", hint=_TWO_SHAPES
        )
    if "structures" in spec or "triggers" in spec:
        return {"type": "structural_tag", "format": _parse(_from_older_shape(spec), "#", 0)}
    if spec.get("type", "structural_tag") != "structural_tag" or not isinstance(spec.get("format"), dict):
        raise InvalidGuideError(
            "#: this is neither shape of a structural tag", pointer="#", keyword="format", hint=_TWO_SHAPES
        )
    _refuse_unknown(spec, {"type", "format"}, "#", "a structural tag")
    return {"type": "structural_tag", "format": _parse(spec["format"], "#/format", 0)}


def embedded_schemas(node: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the JSON Schemas inside a normal form's format, with their pointers."""
    found = [(pointer, item) for pointer, item in _placed_formats(node) if item["type"] == "json_schema"]
    return [(f"{pointer}/json_schema", item["json_schema"]) for pointer, item in found]


def formats(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a normal form's format and all those inside it."""
    return [item for _, item in _placed_formats(node)]


def grammar_of(node: dict[str, Any]) -> Grammar:
    """Return what a format of the type grammar means."""
    return parse_lark(node["grammar"]) if node["syntax"] == "lark" else parse_ebnf(node["grammar"])


def tag_begin(node: Any, pointer: str) -> str:
    """Return how the innermost tag around a pointer into a normal form's format begins, "" if there is none."""
    begin = ""
    for step in pointer.removeprefix("#/format").split("/")[1:]:
        if isinstance(node, dict) and node.get("type") == "tag":
            begin = node["begin"]
        node = node[int(step)] if isinstance(node, list) else node[step]
    return begin


def has_inner_free_text(node: dict[str, Any]) -> bool:
    """Tell whether a tag has free text inside that is not all of its content, or text without a bound and no end."""
    for tag in formats(node):
        if tag["type"] == "tag":
            kinds = {item["type"] for item in formats(tag["content"])}
            if kinds & {"any_text", "triggered_tags"} and tag["content"]["type"] != "any_text":
                return True
            if "" in tag["end"] and kinds & {"star", "plus", "repeat", "tags_with_separator"}:
                return True
    return False


def _placed_formats(node: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    stack = [("#/format", node)]
    while stack:
        pointer, item = stack.pop()
        found.append((pointer, item))
        below = [("content", item["content"])] if isinstance(item.get("content"), dict) else []
        for field in ("elements", "tags"):
            below.extend((f"{field}/{index}", part) for index, part in enumerate(item.get(field, ())))
        # the last is taken first
        stack.extend((f"{pointer}/{step}", part) for step, part in reversed(below))
    return found


def _from_older_shape(spec: dict[str, Any]) -> dict[str, Any]:
    _refuse_unknown(spec, {"type", "structures", "triggers"}, "#", "a structural tag")
    for field in ("structures", "triggers"):
        if not isinstance(spec.get(field), list):
            raise InvalidGuideError(
                f"#/{field}: a list is needed", pointer=f"#/{field}", keyword=field, hint=_TWO_SHAPES
            )
    tags = []
    for index, structure in enumerate(spec["structures"]):
        pointer = f"#/structures/{index}"
        if not isinstance(structure, dict):
            raise InvalidGuideError(
                f"{pointer}: a structure is an object, got {type(structure).__name__}",
                pointer=pointer,
                hint=_A_STRUCTURE,
            )
        _refuse_unknown(structure, {"begin", "schema", "end"}, pointer, "a structure")
        if set(structure) != {"begin", "schema", "end"}:
            missing = ", ".join(sorted({"begin", "schema", "end"} - set(structure)))
            raise InvalidGuideError(f"{pointer}: {missing} is missing", pointer=pointer, hint=_A_STRUCTURE)
        content = {"type": "json_schema", "json_schema": structure["schema"]}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": spec["triggers"], "tags": tags}


def _refuse_unknown(record: dict[str, Any], known: set[str], pointer: str, what: str) -> None:
    for key in record:
        if key not in known:
            raise InvalidGuideError(
                f"{pointer}/{key}: {what} has no field {key!r}",
                pointer=f"{pointer}/{key}",
                keyword=str(key),
                hint=f"there are {', '.join(sorted(known))}",
            )


def _parse(node: Any, pointer: str, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise GuideTooLargeError(
            f"{pointer}: formats nest over {_MAX_DEPTH} levels deep",
            pointer=pointer,
            limit="max_nesting",
            value=depth,
            hint="flatten them, or write the inner part as a grammar",
        )
    kind = _kind_of(node)
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and kind in _REFUSED_FORMATS:
        raise _unsupported(pointer, kind, f"the format {kind}", _REFUSED_FORMATS[kind])
    if fields is None:
        raise InvalidGuideError(
            f"{pointer}: unknown format {kind!r}" if kind is not None else f"{pointer}: a format without a type",
            pointer=pointer,
            keyword="type",
            hint=f"the types are {', '.join(_FIELDS)}",
        )
    idle = _IDLE_FIELDS.get(str(kind), {})
    _refuse_unknown(node, {"type", *fields, *idle}, pointer, f"the format {kind}")
    for name, default in idle.items():
        if node.get(name, default) != default:
            raise _unsupported(f"{pointer}/{name}", name, f"{name} of the format {kind}", f"leave {name} out")
    parsed: dict[str, Any] = {"type": kind}
    for name, (types, default) in fields.items():
        value = node.get(name, default)
        if isinstance(value, dict) and value.get("type") == "token" and name in ("begin", "end"):
            raise _unsupported(f"{pointer}/{name}", "token", "a token", _WRITE_ITS_TEXT)
        if value is ...:
            raise InvalidGuideError(
                f"{pointer}: the format {kind} has no {name}", pointer=pointer, keyword=name, hint=f"add {name}"
            )
        if not isinstance(value, types) or (isinstance(value, bool) and types is int):
            raise InvalidGuideError(
                f"{pointer}/{name}: {name} has the wrong type {type(value).__name__}",
                pointer=f"{pointer}/{name}",
                keyword=name,
                hint=f"write {_type_names(types)}",
            )
        parsed[name] = value
    _CHECKS.get(str(kind), _check_nothing)(parsed, pointer)
    for name in ("elements", "tags"):
        if name in parsed:
            if not parsed[name]:
                raise UnsatisfiableGuideError(
                    f"{pointer}/{name}: the list is empty", pointer=f"{pointer}/{name}", hint="add at least one"
                )
            parsed[name] = [_parse(item, f"{pointer}/{name}/{i}", depth + 1) for i, item in enumerate(parsed[name])]
    if "tags" in parsed:
        _check_tags(parsed, pointer)
    if "content" in parsed:
        parsed["content"] = _parse(parsed["content"], f"{pointer}/content", depth + 1)
        if kind == "tag":
            _check_content(parsed, pointer)
    return parsed


def _kind_of(node: Any) -> Any:
    """Return the type of a format; where it is not written, the only one that its fields fit, as xgrammar has it."""
    if not isinstance(node, dict) or "type" in node:
        return node.get("type") if isinstance(node, dict) else None
    fitting = [
        kind
        for kind, fields in _FIELDS.items()
        if node
        and node.keys() <= {*fields, *_IDLE_FIELDS.get(kind, {})}
        and {name for name, (_, default) in fields.items() if default is ...} <= node.keys()
    ]
    return fitting[0] if len(fitting) == 1 else None


def _unsupported(pointer: str, keyword: str, what: str, hint: str) -> UnsupportedGuideError:
    return UnsupportedGuideError(f"{pointer}: {what} cannot be enforced", pointer=pointer, keyword=keyword, hint=hint)


def _type_names(types: type | tuple[type, ...]) -> str:
    return " or ".join(_JSON_NAMES[kind] for kind in (types if isinstance(types, tuple) else (types,)))


def _check_nothing(node: dict[str, Any], pointer: str) -> None:
    pass


def _check_style(node: dict[str, Any], pointer: str) -> None:
    if node["style"] != "json":
        raise _unsupported(
            f"{pointer}/style", "style", f"the style {node['style']!r}", "only json can; leave style out"
        )


def _check_grammar(node: dict[str, Any], pointer: str) -> None:
    if node["syntax"] not in ("ebnf", "lark"):
        raise InvalidGuideError(
            f"{pointer}/syntax: unknown syntax {node['syntax']!r}",
            pointer=f"{pointer}/syntax",
            keyword="syntax",
            hint='write "ebnf" or "lark"',
        )
    _within(pointer + "/grammar", lambda: grammar_of(node))


def _within(pointer: str, read: Callable[[], object]) -> None:
    """Read a guide inside this one, and put its place in front of its errors."""
    try:
        read()
    except GuideError as error:
        raise error.placed(f"{pointer}: {error.message}", pointer) from error


def _check_repeat(node: dict[str, Any], pointer: str) -> None:
    if node["max"] == -1:
        # no limit, as xgrammar writes it
        node["max"] = None
    if node["min"] < 0 or (node["max"] is not None and node["max"] < node["min"]):
        raise UnsatisfiableGuideError(
            f"{pointer}: min is negative or over max",
            pointer=pointer,
            keyword="min",
            hint="write 0 <= min <= max; leave max out where there is no limit",
        )


def _check_tag(node: dict[str, Any], pointer: str) -> None:
    ends = [node["end"]] if isinstance(node["end"], str) else node["end"]
    if not ends or not all(isinstance(end, str) for end in ends):
        raise InvalidGuideError(
            f"{pointer}/end: this is neither text nor a list of texts",
            pointer=f"{pointer}/end",
            hint='write "end": "..."',
        )
    node["end"] = ends


def _check_text(node: dict[str, Any], pointer: str) -> None:
    if not all(isinstance(text, str) and text for text in node["excludes"]):
        raise InvalidGuideError(
            f"{pointer}/excludes: something in the list is no text, or empty",
            pointer=f"{pointer}/excludes",
            hint="write a list of texts that are not empty",
        )


def _check_triggers(node: dict[str, Any], pointer: str) -> None:
    triggers = node["triggers"]
    if not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidGuideError(
            f"{pointer}/triggers: the list is empty, or something in it is no text, or empty",
            pointer=f"{pointer}/triggers",
            hint="write a list of texts that are not empty",
        )
    if len(triggers) > _MAX_TRIGGERS:
        raise GuideTooLargeError(
            f"{pointer}/triggers: {len(triggers)} triggers, {_MAX_TRIGGERS} are the most",
            pointer=f"{pointer}/triggers",
            limit="max_triggers",
            value=len(triggers),
            hint="name what the begins of the tags have in common",
        )
    for trigger in triggers:
        for other in triggers:
            if trigger != other and trigger in other:
                raise InvalidGuideError(
                    f"{pointer}/triggers: {trigger!r} is part of {other!r}, which could never be reached",
                    pointer=f"{pointer}/triggers",
                    hint="drop one of them",
                )


def _check_content(tag: dict[str, Any], pointer: str) -> None:
    if tag["content"]["type"] != "any_text":
        return
    if "" in tag["end"]:
        raise InvalidGuideError(
            f"{pointer}/end: any_text has no end to stop at",
            pointer=f"{pointer}/end",
            hint="give the tag an end that is not empty",
        )
    if tag["content"]["excludes"]:
        what = "excludes inside a tag, whose text goes to the tag's end,"
        hint = "leave excludes out, or write the content as a regex"
        raise _unsupported(f"{pointer}/content/excludes", "excludes", what, hint)


def _check_tags(node: dict[str, Any], pointer: str) -> None:
    for index, tag in enumerate(node["tags"]):
        place = f"{pointer}/tags/{index}"
        if tag["type"] != "tag":
            raise InvalidGuideError(
                f"{place}: a tag is needed, found {tag['type']}",
                pointer=place,
                hint='write "type": "tag", or leave it out',
            )
        if node["type"] == "triggered_tags" and not any(tag["begin"].startswith(t) for t in node["triggers"]):
            raise InvalidGuideError(
                f"{place}/begin: no trigger begins {tag['begin']!r}; triggers are {node['triggers']}",
                pointer=f"{place}/begin",
                keyword="begin",
                hint="add a trigger that it begins with",
            )


_CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "any_text": _check_text,
    "json_schema": _check_style,
    "grammar": _check_grammar,
    "regex": lambda node, pointer: _within(pointer + "/pattern", lambda: parse_regex(node["pattern"])),
    "repeat": _check_repeat,
    "tag": _check_tag,
    "triggered_tags": _check_triggers,
}


def to_engine_format(node: dict[str, Any], schema_ebnf: Callable[[Any], str]) -> dict[str, Any]:
    """Return a normal form's format for xgrammar, with every leaf as EBNF text.

    Args:
        node: the format.
        schema_ebnf: JSON Schema -> xgrammar's EBNF with the rule `root`.
    """
    kind = node["type"]
    if kind == "json_schema":
        return {"type": "grammar", "grammar": schema_ebnf(node["json_schema"])}
    if kind == "regex":
        return {"type": "grammar", "grammar": to_xgrammar_ebnf(one_rule(parse_regex(node["pattern"])))}
    if kind == "grammar":
        return {"type": "grammar", "grammar": to_xgrammar_ebnf(grammar_of(node))}
    written = {
        name: [to_engine_format(item, schema_ebnf) for item in value] if name in ("elements", "tags") else value
        for name, value in node.items()
    }
    if "content" in written:
        written["content"] = to_engine_format(node["content"], schema_ebnf)
    if kind == "repeat":
        written["max"] = -1 if node["max"] is None else node["max"]
    return written
