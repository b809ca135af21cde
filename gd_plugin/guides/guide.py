"""Guide: what may be generated, as a frozen, hashable, picklable value.

In:  what a user wrote (JSON text, a schema, a type, a pattern, a grammar, options).
Out: a Guide whose `guide` is canonical text: two guides that differ only in spacing are equal. Key order inside a schema
     is kept, because declared keys are generated in declared order.
Kept here: errors come early and name the place. No torch and no engine is imported.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from gd_plugin.errors import GuideError, GuideTooLargeError, InvalidGuideError, UnsatisfiableGuideError
from gd_plugin.guides.ebnf import parse_ebnf
from gd_plugin.guides.lark import parse_lark
from gd_plugin.guides.problem import escape_pointer
from gd_plugin.guides.regex import parse_regex
from gd_plugin.guides.structural_tag import parse_structural_tag
from gd_plugin.guides.tools import tools_to_structural_tag

__all__ = ["Guide", "GuideType", "Reasoning", "check_guide"]

_A_RECORD = 'write {"json_schema": {...}}, {"regex": "..."} and so on, as Guide.to_json() does'
_FLATTEN = "flatten it, or name the repeated parts with $defs and $ref"
# Deeper JSON than this is refused before it is parsed: the json module recurses once a level, and no engine takes more.
_PARSE_DEPTH = 512


class GuideType(str, Enum):
    """The kinds of guide."""

    JSON = "json"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF_GRAMMAR = "ebnf"
    LARK_GRAMMAR = "lark"
    STRUCTURAL_TAG = "structural_tag"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Free text before the guide.

    Attributes:
        start: marker the output may begin with; None means that the prompt has opened the reasoning.
        end: marker that ends the free text; the guide begins right behind it.
        max_tokens: tokens of free text after which the end marker is forced; None is no limit.
    """

    start: str | None = None
    end: str = "</think>"
    max_tokens: int | None = None


@dataclass(frozen=True)
class Guide:
    """What may be generated. Build one with the class methods; compare and hash it freely.

    Attributes:
        guide_type: the kind of guide.
        guide: canonical text; for JSON kinds compact JSON, for CHOICE a JSON array of strings.
        start: start rule of an EBNF grammar.
        reasoning: free text allowed before the guide, or None.

    Raises:
        TypeError: a field is of another type.
        ValueError: `guide_type` is no GuideType.
    """

    guide_type: GuideType
    guide: str
    start: str = "root"
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "guide_type", GuideType(self.guide_type))
        for name in ("guide", "start"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"Guide.{name} must be text, got {type(getattr(self, name)).__name__}")

    @classmethod
    def json(cls, root: Literal["any", "object"] = "any") -> "Guide":
        """Any JSON value, or any JSON object. Source: RFC 8259.

        Raises:
            InvalidGuideError: `root` is neither "any" nor "object".
        """
        if root not in ("any", "object"):
            raise InvalidGuideError(
                f"#: unknown root {root!r}", pointer="#", keyword="root", hint='pass "any" or "object"'
            )
        return cls(GuideType.JSON, root)

    @classmethod
    def json_schema(cls, schema: Any) -> "Guide":
        """JSON that validates against `schema`.

        Args:
            schema: a dict, a boolean, JSON text, a pydantic model, a dataclass, a TypedDict, or any type pydantic can
                describe.

        Raises:
            InvalidGuideError: not JSON, not a schema, or a type that has no schema; says where.
            GuideTooLargeError: nested too deeply to be read.
        """
        if isinstance(schema, str | bytes | bytearray):
            schema = _load_json(schema, "JSON Schema")
        elif not isinstance(schema, dict | bool):
            from gd_plugin.guides.sources import schema_from_type

            schema = schema_from_type(schema)
        if not isinstance(schema, dict | bool):
            raise InvalidGuideError(
                f"#: a JSON Schema is an object or a boolean, got {_json_kind(schema)}",
                pointer="#",
                hint="pass the schema itself, not a value that should match it",
            )
        return cls(GuideType.JSON_SCHEMA, _dump_json(schema))

    @classmethod
    def regex(cls, pattern: "str | re.Pattern[str]") -> "Guide":
        """Text that `re.fullmatch(pattern, text)` matches.

        Raises:
            InvalidGuideError: `re` refuses the pattern; names the position.
            UnsupportedGuideError: look-around, a back-reference, an anchor inside the pattern; names the position.
            UnsatisfiableGuideError: no text matches.
            GuideTooLargeError: nested or repeated too deeply.
        """
        if isinstance(pattern, re.Pattern):
            if not isinstance(pattern.pattern, str):
                raise InvalidGuideError(
                    "#: a bytes pattern cannot guide text", pointer="#", keyword="bytes", hint="pass a str pattern"
                )
            flags = "".join(
                letter
                for letter, flag in (("i", re.I), ("m", re.M), ("s", re.S), ("x", re.X), ("a", re.A))
                if pattern.flags & flag and not _sets_flag(pattern.pattern, letter)
            )
            pattern = f"(?{flags}){pattern.pattern}" if flags else pattern.pattern
        _require_text(pattern, "a regex")
        parse_regex(pattern)
        return cls(GuideType.REGEX, pattern)

    @classmethod
    def ebnf(cls, text: str, start: str = "root") -> "Guide":
        """Text derived from rule `start` of an EBNF (GBNF or W3C style) grammar.

        Raises:
            InvalidGuideError: syntax, an undefined or duplicate rule, no start rule; names line and column.
            UnsupportedGuideError: look-ahead and other constructs beyond context-free grammars.
            UnsatisfiableGuideError: no text matches.
            GuideTooLargeError: nested or repeated too deeply.
        """
        _require_text(text, "an EBNF grammar")
        _require_text(start, "the start rule's name")
        text = text.replace("\r\n", "\n")
        # before stripping, so that errors name the caller's lines
        parse_ebnf(text, start)
        return cls(GuideType.EBNF_GRAMMAR, text.strip(), start=start)

    @classmethod
    def lark(cls, text: str) -> "Guide":
        """Text derived from the rule `start` of a Lark grammar; guides/lark.py says what is read and what it means.

        Raises:
            InvalidGuideError: syntax, an undefined or duplicate rule, no rule `start`; names line and column.
            UnsupportedGuideError: templates, tokens by name and other extensions.
            UnsatisfiableGuideError: no text matches.
            GuideTooLargeError: nested or repeated too deeply.
        """
        _require_text(text, "a Lark grammar")
        text = text.replace("\r\n", "\n")
        # before stripping, so that errors name the caller's lines
        parse_lark(text)
        return cls(GuideType.LARK_GRAMMAR, text.strip(), start="start")

    @classmethod
    def structural_tag(cls, spec: Any) -> "Guide":
        """Text with tagged parts that obey guides of their own, such as tool calls.

        Args:
            spec: `{"type": "structural_tag", "format": {...}}`, or the older `{"structures": [...], "triggers": [...]}`,
                as a dict or JSON text; guides/structural_tag.py lists the formats.

        Raises:
            InvalidGuideError: an unknown or missing field, a tag that no trigger begins; with a JSON pointer.
            UnsupportedGuideError: a format that speaks of single tokens.
        """
        if isinstance(spec, str | bytes | bytearray):
            spec = _load_json(spec, "a structural tag")
        _check_value(spec)
        return cls(GuideType.STRUCTURAL_TAG, _dump_json(parse_structural_tag(spec)))

    @classmethod
    def tools(cls, tools: Any, tool_choice: Any = "auto", style: str = "hermes") -> "Guide":
        """Calls of tools, as a chat model writes them.

        Args:
            tools: OpenAI tool definitions.
            tool_choice: "auto" (free text and calls), "required" (calls alone), "none" (free text without calls), or one
                tool by name, as text or as `{"type": "function", "function": {"name": ...}}`.
            style: "hermes", "llama", "function", "list", "deepseek" or "deepseek31": how the model writes a call; see
                guides/tools.py.

        Raises:
            InvalidGuideError: a tool is not well formed, or the choice names none; names the tool and its place.
        """
        return cls.structural_tag(tools_to_structural_tag(tools, tool_choice, style))

    @classmethod
    def choice(cls, options: Iterable[str]) -> "Guide":
        """Exactly one of `options`; duplicates count once, order is kept.

        Raises:
            InvalidGuideError: `options` is a single string, or holds something that is not text.
            UnsatisfiableGuideError: there are no options.
        """
        if isinstance(options, str | bytes):
            raise InvalidGuideError(
                "#: choice takes a list of strings, got one string", pointer="#", hint=f"pass [{options!r:.80}]"
            )
        if isinstance(options, Mapping):
            raise InvalidGuideError(
                "#: choice takes a list of strings, got a mapping", pointer="#", hint="pass list(options) for its keys"
            )
        try:
            listed = list(options)
        except TypeError as error:
            raise InvalidGuideError(
                f"#: choice takes a list of strings, got {type(options).__name__}", pointer="#", hint='pass ["a", "b"]'
            ) from error
        for index, option in enumerate(listed):
            if not isinstance(option, str):
                raise InvalidGuideError(
                    f"#/{index}: an option must be text, got {type(option).__name__}",
                    pointer=f"#/{index}",
                    hint="pass str(option)",
                )
            _require_encodable(option, f"#/{index}")
        if not listed:
            raise UnsatisfiableGuideError(
                "#: choice has no options, so nothing can match it", pointer="#", hint="pass at least one option"
            )
        return cls(GuideType.CHOICE, json.dumps(list(dict.fromkeys(listed)), ensure_ascii=False, separators=(",", ":")))

    @classmethod
    def from_type(cls, tp: Any) -> "Guide":
        """JSON that pydantic reads as a value of type `tp`."""
        from gd_plugin.guides.sources import schema_from_type

        return cls.json_schema(schema_from_type(tp))

    def with_reasoning(self, start: str | None = None, end: str = "</think>", max_tokens: int | None = None) -> "Guide":
        """Return this guide behind free text that ends with the marker `end`.

        Args:
            start: marker the output may begin with; None means that the prompt has opened the reasoning.
            end: marker that ends the free text.
            max_tokens: tokens of free text after which the marker is forced.

        Raises:
            InvalidGuideError: a marker is no text, empty or holds a lone surrogate, or `max_tokens` is negative.
        """
        if not isinstance(end, str) or not end:
            raise InvalidGuideError(
                f"#/reasoning/end: the end marker must be text that is not empty, got {end!r:.40}",
                pointer="#/reasoning/end",
                keyword="end",
                hint="pass the model's own marker, for example end='</think>'",
            )
        if start is not None and (not isinstance(start, str) or not start):
            raise InvalidGuideError(
                f"#/reasoning/start: the start marker must be text that is not empty, or None, got {start!r:.40}",
                pointer="#/reasoning/start",
                keyword="start",
                hint="pass the model's own marker, or None where the prompt ends with it",
            )
        if max_tokens is not None and (
            not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 0
        ):
            raise InvalidGuideError(
                f"#/reasoning/max_tokens: a number of tokens or None is needed, got {max_tokens!r:.40}",
                pointer="#/reasoning/max_tokens",
                keyword="max_tokens",
                hint="pass how many tokens of free text may stand before the guide, or None for no limit",
            )
        _require_encodable(end, "#/reasoning/end")
        _require_encodable(start or "", "#/reasoning/start")
        return replace(self, reasoning=Reasoning(start, end, max_tokens))

    def options(self) -> list[str]:
        """The options of a CHOICE guide.

        Raises:
            TypeError: the guide is of another kind.
        """
        if self.guide_type is not GuideType.CHOICE:
            raise TypeError(f"options() is for choice guides, this is a {self.guide_type.value} guide")
        options: list[str] = json.loads(self.guide)
        return options

    def to_json(self) -> str:
        """Return the guide as JSON text with one key named by its type; `from_json` reads it back."""
        key = self.guide_type.value
        value: Any = self.guide
        if self.guide_type in (GuideType.JSON_SCHEMA, GuideType.CHOICE, GuideType.STRUCTURAL_TAG):
            value = json.loads(self.guide)
        record: dict[str, Any] = {key: value}
        if self.guide_type is GuideType.EBNF_GRAMMAR:
            record["start"] = self.start
        if self.reasoning is not None:
            record["reasoning"] = {
                "start": self.reasoning.start,
                "end": self.reasoning.end,
                "max_tokens": self.reasoning.max_tokens,
            }
        return _dump_json(record)

    @classmethod
    def from_json(cls, text: "str | bytes | Mapping[str, Any]") -> "Guide":
        """Read what `to_json` writes: `{"json_schema": {...}}`, `{"regex": "..."}`, `{"choice": [...]}` and so on.

        Raises:
            InvalidGuideError: not JSON, no or several guide keys, an unknown key, or a bad guide.
        """
        if not isinstance(text, str | bytes | bytearray | Mapping):
            raise InvalidGuideError(
                f"#: from_json takes JSON text or a mapping, got {type(text).__name__}", pointer="#", hint=_A_RECORD
            )
        record = dict(text) if isinstance(text, Mapping) else _load_json(text, "a guide")
        if not isinstance(record, dict):
            raise InvalidGuideError(
                f"#: a guide is a JSON object, got {_json_kind(record)}", pointer="#", hint=_A_RECORD
            )
        kinds = [kind for kind in GuideType if kind.value in record]
        if len(kinds) != 1:
            names = ", ".join(kind.value for kind in GuideType)
            found = ", ".join(map(str, record)) or "nothing"
            raise InvalidGuideError(
                f"#: a guide has exactly one of the keys {names}; found {found}", pointer="#", hint=_A_RECORD
            )
        kind = kinds[0]
        allowed = {kind.value, "reasoning"} | ({"start"} if kind is GuideType.EBNF_GRAMMAR else set())
        for key in record:
            if key not in allowed:
                pointer = f"#/{escape_pointer(key)}"
                raise InvalidGuideError(
                    f"{pointer}: unknown key {key!r} in a {kind.value} guide",
                    pointer=pointer,
                    hint=f"remove it; there are {', '.join(sorted(allowed))}",
                )
        builders: dict[GuideType, Any] = {
            GuideType.JSON: cls.json,
            GuideType.JSON_SCHEMA: cls.json_schema,
            GuideType.REGEX: cls.regex,
            GuideType.EBNF_GRAMMAR: lambda value: cls.ebnf(value, start=record.get("start", "root")),
            GuideType.LARK_GRAMMAR: cls.lark,
            GuideType.CHOICE: cls.choice,
            GuideType.STRUCTURAL_TAG: cls.structural_tag,
        }
        guide: Guide = builders[kind](record[kind.value])
        reasoning = record.get("reasoning")
        if reasoning is None:
            return guide
        if not isinstance(reasoning, Mapping) or not set(reasoning) <= {"start", "end", "max_tokens"}:
            raise InvalidGuideError(
                "#/reasoning: this is no object of start, end and max_tokens",
                pointer="#/reasoning",
                hint='write {"end": "</think>"}, with "start" and "max_tokens" where they are needed',
            )
        return guide.with_reasoning(**reasoning)


def check_guide(guide: Guide) -> None:
    """Refuse a guide built without the class methods that they would not have built.

    Regexes and grammars are not read here: compiling reads them and says what is wrong.

    Raises:
        InvalidGuideError: the text or the reasoning is not what its kind holds; says which class method builds it.
    """
    kind, text = guide.guide_type, guide.guide
    if kind is GuideType.JSON and text not in ("any", "object"):
        raise InvalidGuideError(
            f'#: a json guide is "any" or "object", got {text[:80]!r}', pointer="#", hint="use Guide.json()"
        )
    if kind is GuideType.JSON_SCHEMA:
        Guide.json_schema(text)
    elif kind is GuideType.CHOICE:
        options = _load_json(text, "a choice guide")
        if not isinstance(options, list):
            raise InvalidGuideError(
                f"#: a choice guide is a JSON array of strings, got {_json_kind(options)}",
                pointer="#",
                hint="use Guide.choice([...])",
            )
        Guide.choice(options)
    elif kind is GuideType.STRUCTURAL_TAG and json.loads(Guide.structural_tag(text).guide) != json.loads(text):
        raise InvalidGuideError(
            "#: this structural tag is not in the normal form, with every default written out",
            pointer="#",
            hint="use Guide.structural_tag(...), which writes it",
        )
    reasoning = guide.reasoning
    if reasoning is None:
        return
    if not isinstance(reasoning, Reasoning):
        raise InvalidGuideError(
            f"#/reasoning: a Reasoning or None is needed, got {type(reasoning).__name__}",
            pointer="#/reasoning",
            keyword="reasoning",
            hint="use with_reasoning(...)",
        )
    guide.with_reasoning(reasoning.start, reasoning.end, reasoning.max_tokens)


def _load_json(text: "str | bytes | bytearray", what: str) -> Any:
    """Parse JSON strictly: no duplicate keys, no NaN, bounded depth."""
    if isinstance(text, bytes | bytearray):
        try:
            text = bytes(text).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidGuideError(
                f"position {error.start}: {what} is not UTF-8",
                pointer=f"position {error.start}",
                hint="encode the text as UTF-8, or pass it as str",
            ) from error
    _check_text_depth(text, what)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidGuideError(
                f"#: {what} has the key {twice!r} twice in one object",
                pointer="#",
                keyword=twice,
                hint="remove one of them",
            )
        return record

    def refuse(name: str) -> Any:
        raise InvalidGuideError(
            f"#: {what} holds {name}, which is not JSON", pointer="#", keyword=name, hint="write a number"
        )

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except GuideError:  # also a ValueError, and it says all there is to say
        raise
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidGuideError(
            f"{place}: {what} is not JSON: {error.msg}",
            pointer=place,
            hint="correct the JSON there; keys and text stand in double quotes, nothing behind a last comma",
        ) from error
    except RecursionError as error:
        raise GuideTooLargeError(
            f"#: {what} is nested too deeply to be read", pointer="#", limit="max_depth", hint=_FLATTEN
        ) from error
    except ValueError as error:  # integers of thousands of digits
        raise InvalidGuideError(
            f"#: {what} is not JSON that can be read: {error}", pointer="#", hint="write numbers with fewer digits"
        ) from error


# a string, which ends with the text where nothing else ends it: a quote is looked at once; or a bracket
_JSON_NESTING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.S)


def _check_text_depth(text: str, what: str) -> None:
    """Refuse deep nesting before the json module recurses into it. Brackets inside strings do not count."""
    depth = 0
    for match in _JSON_NESTING.finditer(text):
        symbol = match.group()
        if symbol in "[{":
            depth += 1
            if depth > _PARSE_DEPTH:
                raise GuideTooLargeError(
                    f"position {match.start()}: {what} is nested over {_PARSE_DEPTH} levels deep",
                    pointer=f"position {match.start()}",
                    limit="max_depth",
                    value=depth,
                    hint=_FLATTEN,
                )
        elif symbol in "]}":
            depth -= 1


def _dump_json(value: Any) -> str:
    """Return compact JSON text; refuses what is not JSON and names its place."""
    _check_value(value)
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise GuideTooLargeError(
            "#: the guide is nested too deeply to be written", pointer="#", limit="max_depth", hint=_FLATTEN
        ) from error


def _check_value(root: Any) -> None:
    """Walk a JSON value without recursion: types, text that can be encoded, depth, cycles (which have no depth)."""
    stack: list[tuple[Any, str, int]] = [(root, "#", 1)]
    while stack:
        value, pointer, depth = stack.pop()
        if depth > _PARSE_DEPTH:
            raise GuideTooLargeError(
                f"{pointer[:80]}...: nested over {_PARSE_DEPTH} levels deep, or holding itself",
                pointer=pointer[:80],
                limit="max_depth",
                value=depth,
                hint=_FLATTEN,
            )
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InvalidGuideError(
                        f"{pointer}: the key {key!r} is not text, so this is not JSON",
                        pointer=pointer,
                        hint="use str keys",
                    )
                _require_encodable(key, pointer)
                stack.append((item, f"{pointer}/{escape_pointer(key)}", depth + 1))
        elif isinstance(value, list | tuple):
            stack.extend((item, f"{pointer}/{index}", depth + 1) for index, item in enumerate(value))
        elif isinstance(value, str):
            _require_encodable(value, pointer)
        elif isinstance(value, float):
            if value != value or value in (float("inf"), float("-inf")):
                raise InvalidGuideError(
                    f"{pointer}: {value} is not JSON", pointer=pointer, hint="write a finite number"
                )
        elif value is not None and not isinstance(value, bool | int):
            raise InvalidGuideError(
                f"{pointer}: {type(value).__name__} is not JSON",
                pointer=pointer,
                hint="use dict, list, str, int, float, bool and None",
            )


def _require_text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise InvalidGuideError(
            f"#: {what} must be text, got {type(value).__name__}", pointer="#", hint="pass a str; decode bytes first"
        )
    _require_encodable(value, None, what, in_lines="grammar" in what)


def _require_encodable(text: str, pointer: str | None, what: str = "the text", *, in_lines: bool = False) -> None:
    """Refuse lone surrogates; without a pointer, the place is the position in the text itself."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        before = text[: error.start]
        line, column = before.count("\n") + 1, error.start - (before.rfind("\n") + 1) + 1
        pointer = pointer or (f"line {line}, column {column}" if in_lines else f"position {error.start}")
        raise InvalidGuideError(
            f"{pointer}: {what} holds the lone surrogate {text[error.start]!r}, which no tokenizer can spell",
            pointer=pointer,
            hint="remove it; a character past U+FFFF is one character, not two surrogates",
        ) from error


def _sets_flag(pattern: str, letter: str) -> bool:
    match = re.match(r"\(\?([aiLmsux]+)\)", pattern)
    return bool(match and letter in match.group(1))


def _json_kind(value: object) -> str:
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), type(value).__name__)
