"""Limits on what strangers send, checked before any engine sees it, and an estimate of what compiling costs.

In:  a Guide and the configuration.
Out: `check_limits`: nothing, or a GuideTooLargeError that names the limit and the value. `compile_weight` and
     `num_written_positions`: numbers that compile time grows with. Rules are not written into one another for them: no
     engine is given more than is counted here.
"""

import json
from collections.abc import Iterator
from typing import Any

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import GuideTooLargeError
from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.expression import num_positions, weight
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.language import TEXT_KINDS, WRITTEN_IN_JSON, language_of
from gd_plugin.guides.problem import escape_pointer
from gd_plugin.guides.structural_tag import formats

__all__ = ["check_limits", "compile_weight", "num_written_positions"]

# lengths of texts cost nothing: xgrammar is given none, and llguidance builds the states that a text reaches
_COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"})

_SHORTEN = {
    GuideType.JSON_SCHEMA: "name repeated parts with $defs and $ref",
    GuideType.STRUCTURAL_TAG: "name repeated parts of its schemas with $defs and $ref",
    GuideType.CHOICE: "pass fewer or shorter options",
}

# A rule more is as much as this many ranges: through rules, one character can have very many derivations.
_RULE_WEIGHT = 50


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
            hint=f"{_SHORTEN.get(guide.guide_type, 'shorten it')}, or raise max_guide_bytes",
        )
    if guide.guide_type in WRITTEN_IN_JSON:
        value = json.loads(guide.guide)
        if isinstance(value, dict):
            _check_depth(value, config.max_depth)


def num_written_positions(guide: Guide) -> int:
    """Return the characters of a guide over characters with its repeats written out; 0 for JSON kinds."""
    if guide.guide_type not in TEXT_KINDS:
        return 0
    return sum(map(num_positions, language_of(guide).rules.values()))


@text_cache
def compile_weight(guide: Guide) -> int:
    """Estimate compile cost.

    Of a guide over characters: its ranges of characters with its repeats written out, and its rules. Of a JSON kind: its
    bytes and counts, and what the regexes and grammars inside a structural tag weigh.
    """
    if guide.guide_type in TEXT_KINDS:
        rules = language_of(guide).rules.values()
        return sum(map(weight, rules)) + _RULE_WEIGHT * (len(rules) - 1)
    if guide.guide_type not in WRITTEN_IN_JSON:
        return 0
    value = json.loads(guide.guide)
    total = len(guide.guide)
    for item in _objects(value):
        total += sum(int(count) for key, count in item.items() if key in _COUNTS and _is_count(count))
    if guide.guide_type is GuideType.STRUCTURAL_TAG:
        total += sum(map(_format_weight, formats(value["format"])))
    return total


def _format_weight(node: dict[str, Any]) -> int:
    """Return what a format of a structural tag weighs beside the bytes it is written in."""
    if node["type"] == "regex":
        return compile_weight(Guide(GuideType.REGEX, node["pattern"]))
    if node["type"] == "grammar":
        kind = GuideType.LARK_GRAMMAR if node["syntax"] == "lark" else GuideType.EBNF_GRAMMAR
        return compile_weight(Guide(kind, node["grammar"]))
    return int(node["max"] or node["min"]) if node["type"] == "repeat" else 0


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object inside a JSON value, without recursion."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack.extend(part for part in item.values() if isinstance(part, dict | list))
        elif isinstance(item, list):
            stack.extend(part for part in item if isinstance(part, dict | list))


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
                stack.append((part, f"{pointer}/{escape_pointer(key)}", depth + 1))
