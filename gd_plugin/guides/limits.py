"""Limits on what strangers send, checked before any engine sees it, and an estimate of what compiling costs.

In:  a Guide and the configuration.
Out: `check_limits`: nothing, or a GuideTooLargeError that names the limit and the value. `compile_weight`: a number that
     compile time grows with.
"""

import json
from typing import Any

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import GuideTooLargeError
from gd_plugin.guides.expression import num_positions, weight
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.language import TEXT_KINDS, language_of

__all__ = ["check_limits", "compile_weight", "num_written_positions"]

_JSON_KINDS = frozenset({GuideType.JSON_SCHEMA, GuideType.STRUCTURAL_TAG})


_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})


def check_limits(guide: Guide, config: GuidedDecodingConfig) -> None:
    """Refuse a guide over `max_guide_bytes` or `max_depth`.

    Raises:
        GuideTooLargeError: names the limit, what was found, and for depth the place.
    """
    size = len(guide.guide.encode())
    if size > config.max_guide_bytes:
        raise GuideTooLargeError(
            f"#: the {guide.guide_type.value} guide has {size} bytes, over max_guide_bytes={config.max_guide_bytes}",
            pointer="#",
            limit="max_guide_bytes",
            value=size,
            hint="name repeated parts with $defs and $ref, or raise max_guide_bytes",
        )
    if guide.guide_type in _JSON_KINDS:
        value = json.loads(guide.guide)
        if isinstance(value, dict):
            _check_depth(value, config.max_depth)


def num_written_positions(guide: Guide) -> int:
    """Return the characters of a guide over characters with its repeats written out; 0 for JSON kinds."""
    if guide.guide_type not in TEXT_KINDS:
        return 0
    return sum(map(num_positions, language_of(guide).rules.values()))


def compile_weight(guide: Guide) -> int:
    """Estimate compile cost: ranges of characters with repeats written out, or bytes and counts of a schema."""
    if guide.guide_type in TEXT_KINDS:
        return sum(map(weight, language_of(guide).rules.values()))
    if guide.guide_type not in _JSON_KINDS:
        return 0
    total = len(guide.guide)
    stack: list[Any] = [value for value in [json.loads(guide.guide)] if isinstance(value, dict)]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            total += sum(int(value) for key, value in item.items() if key in _COUNTS and _is_count(value))
            stack.extend(part for part in item.values() if isinstance(part, dict | list))
        else:
            stack.extend(part for part in item if isinstance(part, dict | list))
    return total


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_depth(value: Any, max_depth: int) -> None:
    """Walk containers without recursion; a leaf has no depth of its own."""
    stack: list[tuple[Any, str, int]] = [(value, "#", 1)]
    while stack:
        item, pointer, depth = stack.pop()
        if depth > max_depth:
            place = pointer if len(pointer) <= 120 else pointer[:117] + "..."
            raise GuideTooLargeError(
                f"{place}: nested {depth} levels deep, over max_depth={max_depth}",
                pointer=pointer,
                limit="max_depth",
                value=depth,
                hint="name the inner parts with $defs and $ref, or raise max_depth",
            )
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        for key, part in pairs:
            if isinstance(part, dict | list):
                escaped = str(key).replace("~", "~0").replace("/", "~1")
                stack.append((part, f"{pointer}/{escaped}", depth + 1))
