"""Language: the grammar that a regex, EBNF, Lark or choice guide means, for the adapters to spell in their engine's words.

In:  a Guide.
Out: `language_of(guide) -> Grammar`, ready for `to_xgrammar_ebnf`, `to_lark`, or `to_regular` and `to_rust_regex`
     (outlines-core takes regexes only; `unused_character` finds it a character that no text of the guide holds).
"""

from gd_plugin.guides.caching import text_cache
from gd_plugin.guides.ebnf import parse_ebnf
from gd_plugin.guides.expression import Literal, Node, either, used_ranges
from gd_plugin.guides.grammar import Grammar, one_rule, to_regular
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.lark import parse_lark
from gd_plugin.guides.regex import parse_regex

__all__ = ["JSON_DOCUMENTS", "TEXT_KINDS", "WRITTEN_IN_JSON", "is_regular", "language_of", "unused_character"]

TEXT_KINDS = frozenset({GuideType.REGEX, GuideType.CHOICE, GuideType.EBNF_GRAMMAR, GuideType.LARK_GRAMMAR})
# every text that they allow is JSON
JSON_DOCUMENTS = frozenset({GuideType.JSON, GuideType.JSON_SCHEMA})
# the guide itself is written in JSON
WRITTEN_IN_JSON = frozenset({GuideType.JSON_SCHEMA, GuideType.STRUCTURAL_TAG})
_LAST_ASCII = 0x7F


@text_cache
def language_of(guide: Guide) -> Grammar:
    """Return what `guide` means, its reasoning left aside.

    Raises:
        GuideError: the guide is wrong; the message has the place in front.
        TypeError: a kind whose meaning is no grammar over characters.
    """
    if guide.guide_type is GuideType.REGEX:
        return one_rule(parse_regex(guide.guide))
    if guide.guide_type is GuideType.CHOICE:
        return one_rule(either(Literal(option) for option in guide.options()))
    if guide.guide_type is GuideType.EBNF_GRAMMAR:
        return parse_ebnf(guide.guide, guide.start)
    if guide.guide_type is GuideType.LARK_GRAMMAR:
        return parse_lark(guide.guide)
    raise TypeError(f"a {guide.guide_type.value} guide is not a grammar over characters")


@text_cache
def is_regular(guide: Guide) -> bool:
    """Tell whether a guide over characters can be written as one regex."""
    return guide.guide_type in TEXT_KINDS and to_regular(language_of(guide)) is not None


def unused_character(node: Node) -> str | None:
    """Return an ASCII character that no text of `node` holds, or None if it may hold them all."""
    used = used_ranges(node)
    for code in range(_LAST_ASCII + 1):
        if not any(low <= code <= high for low, high in used):
            return chr(code)
    return None
