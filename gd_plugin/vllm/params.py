"""Guides from a request's parameters: `SamplingParams.extra_args`, or `vllm_xargs` over HTTP.

In:  a mapping that may hold the keys of other plugins.      Out: the guide and the backend it names, or None.

    {"guide": {"json_schema": {...}}}        what `Guide.to_json` writes, as a mapping or as text
    {"guide_json_schema": "<text>"}          flat, because HTTP takes neither mappings nor nested lists
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from gd_plugin.errors import InvalidGuideError
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.language import WRITTEN_IN_JSON

__all__ = ["GuideParams", "read_guide"]

_FLAT = {f"guide_{kind.value}": kind for kind in GuideType}
_OPTIONS = ("guide_backend", "guide_reasoning", "guide_start")
_KEYS = ("guide", *_FLAT, *_OPTIONS)


class GuideParams(NamedTuple):
    """What a request asks for. `backend` is "auto" where it names none."""

    guide: Guide
    backend: str = "auto"


def read_guide(extra_args: "Mapping[str, Any] | None") -> GuideParams | None:
    """Return the guide that `extra_args` hold; None if the request is unguided.

    Keys that do not begin with "guide" belong to others and are left alone.

    Raises:
        InvalidGuideError: an unknown key, several guides, a value of the wrong type.
        GuideError: the guide itself is wrong.
    """
    own = {key: value for key, value in (extra_args or {}).items() if key.startswith("guide") and value is not None}
    if not own:
        return None
    for key in own:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_KEYS)}"
            raise InvalidGuideError(f"unknown parameter {key!r}", keyword=key, hint=advice)
    backend = own.pop("guide_backend", "auto")
    if not isinstance(backend, str):
        raise InvalidGuideError(
            f"guide_backend must be text, got {type(backend).__name__}",
            keyword="guide_backend",
            hint='pass "auto" or a backend\'s name',
        )
    named = [key for key in own if key == "guide" or key in _FLAT]
    if len(named) != 1:
        found = ", ".join(named) or "none"
        raise InvalidGuideError(
            f"a guided request has exactly one of guide, {', '.join(_FLAT)}; found {found}", hint="pass one of them"
        )
    key = named[0]
    if key == "guide":
        for option in ("guide_reasoning", "guide_start"):
            if option in own:
                raise InvalidGuideError(
                    f"{option} stands beside guide", keyword=option, hint=f"put it inside 'guide', as {option[6:]!r}"
                )
        return GuideParams(_whole_guide(own[key]), backend)
    record: dict[str, Any] = {_FLAT[key].value: _flat_value(_FLAT[key], own[key], key)}
    if "guide_start" in own:
        record["start"] = own["guide_start"]
    if "guide_reasoning" in own:
        record["reasoning"] = _reasoning(own["guide_reasoning"])
    return GuideParams(Guide.from_json(record), backend)


def _whole_guide(value: Any) -> Guide:
    if isinstance(value, Guide):
        return value
    if not isinstance(value, Mapping | str):
        raise InvalidGuideError(
            f"guide must be a mapping such as {{'regex': '...'}} or its JSON text, got {type(value).__name__}",
            keyword="guide",
            hint="guide.to_json() writes it",
        )
    return Guide.from_json(value)


def _flat_value(kind: GuideType, value: Any, key: str) -> Any:
    if kind is GuideType.JSON:
        # true may arrive as 1 or as text
        if value in (True, "true", "1", "any"):
            return "any"
        if value == "object":
            return "object"
        raise InvalidGuideError(f"{key} is {value!r}", keyword=key, hint='pass true, "any" or "object"')
    if kind is GuideType.CHOICE:
        # a lone string would be read letter by letter
        if isinstance(value, str | bytes) or not isinstance(value, list | tuple):
            raise InvalidGuideError(
                f"{key} must be a list of strings, got {type(value).__name__}", keyword=key, hint='pass ["a", "b"]'
            )
        return list(value)
    if kind in WRITTEN_IN_JSON and isinstance(value, Mapping | bool):
        return value
    if not isinstance(value, str):
        raise InvalidGuideError(f"{key} must be text, got {type(value).__name__}", keyword=key, hint="pass a string")
    return value


def _reasoning(value: Any) -> Any:
    if value in (True, "true", "1"):
        return {}
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return {"end": value}
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidGuideError(
                f"guide_reasoning is not JSON: {error}",
                keyword="guide_reasoning",
                hint='pass true, the end marker, or {"end": "</think>"}',
            ) from error
    return value
