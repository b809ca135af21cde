"""Every setting, its default, and its environment variable `GD_PLUGIN_<FIELD>`."""

import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

__all__ = ["GuidedDecodingConfig", "checked_config"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class GuidedDecodingConfig:
    """Settings shared by every front end. Immutable; `replace_fields` gives a changed copy.

    Attributes:
        backend: "auto", or the name of a registered backend, which is then never replaced by another.
        whitespace: between the tokens of a JSON document: "bounded" (at most `max_whitespace` characters at each
            place), "compact" (none) or "any". Never before the first or after the last character.
        max_whitespace: characters of white space at one place under "bounded".
        additional_properties: the value of `additionalProperties` where a schema is silent.
        property_order: the declared keys of an object come in declared order ("declared", so that a schema makes a
            model think before it answers), or each once in any order ("any"; at most 63 of them).
        strict: refuse what a backend cannot enforce; False drops it and lists it in `CompiledGrammar.not_enforced`.
        on_dead_end: a row without a legal token ends alone ("stop"), ends the whole call ("raise"), or goes on
            unguided ("release").
        canonical_forcing: where the guide forces text, only the tokenizer's own spelling of it is legal, its last token
            left open. The texts a guide allows stay the same, but for JSON's escapes of forced characters.
        overlap: on a GPU, read ids and upload masks beside the forward pass (see gd_plugin.hf.overlap).
        rows_behind_refused_draft: rows behind a draft the guide refuses repeat the last legal row ("repeat") or are
            left open ("open").
        pin_memory: pin host rows; None pins where there is a CUDA device.
        cache_bytes: compiled grammars kept, in bytes.
        compile_timeout_s: seconds one guide may compile.
        compile_memory_bytes: memory that the process which compiles large guides may take for one, in bytes.
        max_guide_bytes: UTF-8 bytes of a guide's text.
        max_depth: nesting depth of a guide.
        fill_threads: threads that fill rows of one step; None chooses from the machine, 1 never starts one.

    Raises:
        ValueError: a value is not allowed; the message names the field and what it takes.
    """

    backend: str = "auto"
    whitespace: Literal["bounded", "compact", "any"] = "bounded"
    max_whitespace: int = 16
    additional_properties: bool = False
    property_order: Literal["declared", "any"] = "declared"
    strict: bool = True
    on_dead_end: Literal["stop", "raise", "release"] = "stop"
    canonical_forcing: bool = False
    overlap: bool = False
    rows_behind_refused_draft: Literal["repeat", "open"] = "repeat"
    pin_memory: bool | None = None
    cache_bytes: int = 1 << 30
    compile_timeout_s: float = 10.0
    compile_memory_bytes: int = 4 << 30
    max_guide_bytes: int = 1 << 20
    max_depth: int = 64
    fill_threads: int | None = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in fields(self):
            _check_value(field.name, getattr(self, field.name), hints[field.name])
        for name in ("max_whitespace", "cache_bytes", "compile_memory_bytes", "max_guide_bytes", "max_depth"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not self.compile_timeout_s > 0:
            raise ValueError(f"compile_timeout_s must be positive, got {self.compile_timeout_s}")
        if self.fill_threads is not None and self.fill_threads < 1:
            raise ValueError(f"fill_threads must be at least 1 or None, got {self.fill_threads}")

    def replace_fields(self, **changes: Any) -> "GuidedDecodingConfig":
        """Return a copy with `changes`.

        Raises:
            TypeError: a name is not a field; the message names the nearest one.
            ValueError: a value is not allowed.
        """
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
                raise TypeError(f"unknown option {name!r}: {advice}")
        return replace(self, **changes)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "GuidedDecodingConfig":
        """Read `GD_PLUGIN_<FIELD>` variables; fields without one keep their default.

        Raises:
            ValueError: a variable cannot be read as its field's type, or its name is nearly a field's; the message names it.
        """
        environ = os.environ if environ is None else environ
        variables = [f"GD_PLUGIN_{field.name.upper()}" for field in fields(cls)]
        for variable in environ:
            # other names are left alone: tests and tools of this project have variables of their own
            if variable.startswith("GD_PLUGIN_") and variable not in variables:
                near = get_close_matches(variable.removeprefix("GD_PLUGIN_"), [v[10:] for v in variables], 1, 0.8)
                if near:
                    raise ValueError(
                        f"environment variable {variable} is no setting: did you mean GD_PLUGIN_{near[0]}?"
                    )
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for field in fields(cls):
            variable = f"GD_PLUGIN_{field.name.upper()}"
            if variable in environ:
                try:
                    values[field.name] = _parse_value(environ[variable], hints[field.name])
                    _check_value(field.name, values[field.name], hints[field.name])
                except ValueError as error:
                    raise ValueError(f"environment variable {variable}={environ[variable]!r}: {error}") from None
        return cls(**values)


def checked_config(config: GuidedDecodingConfig | None) -> GuidedDecodingConfig:
    """Return the settings, the defaults for None.

    Raises:
        TypeError: a `config` of another class.
    """
    if config is None:
        return GuidedDecodingConfig()
    if not isinstance(config, GuidedDecodingConfig):
        raise TypeError(
            f"config must be a GuidedDecodingConfig, got {type(config).__name__}; use GuidedDecodingConfig(...)"
        )
    return config


def _members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a field's type: `int | None` -> (int, NoneType)."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _check_value(name: str, value: Any, hint: Any) -> None:
    for member in _members(hint):
        if typing.get_origin(member) is Literal:
            if isinstance(value, str) and value in typing.get_args(member):
                return
        elif member is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return
        elif member is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return
        elif isinstance(value, member):
            return
    raise ValueError(f"{name} must be {_describe(hint)}, got {value!r}")


def _describe(hint: Any) -> str:
    words: list[str] = []
    for member in _members(hint):
        if typing.get_origin(member) is Literal:
            words.extend(repr(choice) for choice in typing.get_args(member))
        else:
            words.append("None" if member is type(None) else member.__name__)
    return " or ".join(words)


def _parse_value(text: str, hint: Any) -> Any:
    members = _members(hint)
    if type(None) in members and text.strip().lower() in {"", "none"}:
        return None
    kind = members[0]
    if kind is bool:
        if text.strip().lower() in _TRUE:
            return True
        if text.strip().lower() in _FALSE:
            return False
        raise ValueError("expected a boolean such as 1 or 0")
    if kind is int:
        return int(text)
    if kind is float:
        return float(text)
    return text
