"""Can the tokens of a vocabulary spell any text that a guide allows?

In:  a compiled guide and its vocabulary.      Out: True, False, or None where that is not known.
Most vocabularies have a token for every byte, and then they can. Elsewhere the characters that a guide needs are looked at
first, then what its matcher allows is followed, no state twice, until one accepts (True), none is left (False), or too
many have been seen.
"""

import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.spelling import Speller
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.completion import completion_of
from gd_plugin.guides.expression import NOTHING, CharSet, Literal, Node
from gd_plugin.guides.grammar import Grammar, one_rule
from gd_plugin.guides.guide import Guide, GuideType
from gd_plugin.guides.language import TEXT_KINDS, language_of
from gd_plugin.guides.regex import parse_regex
from gd_plugin.guides.structural_tag import formats, grammar_of
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns

__all__ = ["has_every_byte", "is_spellable"]

# all bytes that UTF-8 can hold
_TEXT_BYTES = frozenset(bytes([byte]) for byte in (*range(0xC0), *range(0xC2, 0xF5)))
# what JSON is written with; its strings can name every other character
_JSON_BYTES = frozenset(range(0x20, 0x7F))
# characters of a set that are tried, the Latin ones among them
_MAX_TRIED = 1_000
# masks that a search fills, and tokens it follows
_MAX_MASKS = 100
_MAX_FORKS = 2_000

_with_every_byte: "weakref.WeakKeyDictionary[Vocabulary, bool]" = weakref.WeakKeyDictionary()


def has_every_byte(vocabulary: Vocabulary) -> bool:
    """Tell whether each byte of text has a token of its own."""
    known = _with_every_byte.get(vocabulary)
    if known is None:
        stops = vocabulary.stop_token_set
        single = {token for i, token in enumerate(vocabulary.tokens) if len(token) == 1 and i not in stops}
        known = _with_every_byte[vocabulary] = single >= _TEXT_BYTES
    return known


def is_spellable(compiled: CompiledGrammar, vocabulary: Vocabulary) -> bool | None:
    """Tell whether tokens spell a text of a guide, its free text left aside; None if that is not known."""
    guide = compiled.guide
    if has_every_byte(vocabulary) or _has_spelled_characters(guide, Speller.of(vocabulary)):
        return True
    known = _bytes_inside(vocabulary)
    if guide.guide_type in TEXT_KINDS and not _allows(language_of(guide), known.issuperset, untried=True):
        return False
    return _search(compiled.create_matcher(), vocabulary, guide)


def _has_spelled_characters(guide: Guide, speller: Speller) -> bool:
    """Tell whether a text of the guide can be written with characters that tokens spell one by one."""
    single = frozenset(byte for byte in range(256) if bytes([byte]) in speller.token_ids)

    def has(text: bytes) -> bool:
        return single.issuperset(text) or speller.spell(text) is not None

    if guide.guide_type in TEXT_KINDS:
        return _allows(language_of(guide), has, untried=False)
    # what a guide writes out, it may need
    if not single.issuperset(_JSON_BYTES) or not single.issuperset(guide.guide.encode()):
        return False
    return all(_allows(grammar, has, untried=False) for grammar in _grammars_inside(guide))


def _grammars_inside(guide: Guide) -> Iterator[Grammar]:
    if guide.guide_type is GuideType.STRUCTURAL_TAG:
        for node in formats(json.loads(guide.guide)["format"]):
            if node["type"] == "regex":
                yield one_rule(parse_regex(node["pattern"]))
            elif node["type"] == "grammar":
                yield grammar_of(node)


def _bytes_inside(vocabulary: Vocabulary) -> frozenset[int]:
    """Return the bytes that tokens of text hold anywhere."""
    stops = vocabulary.stop_token_set
    return frozenset(byte for i, token in enumerate(vocabulary.tokens) if i not in stops for byte in token)


def _allows(grammar: Grammar, has: Callable[[bytes], bool], *, untried: bool) -> bool:
    """Tell whether a grammar has a text of literals and characters for which `has` is true.

    Args:
        grammar: the grammar.
        has: asked for UTF-8.
        untried: the answer for those characters of large sets that are not tried.
    """

    def kept(leaf: Node) -> Node:
        if isinstance(leaf, Literal):
            return leaf if has(leaf.text.encode()) else NOTHING
        if not isinstance(leaf, CharSet):
            return leaf
        per_range = max(1, _MAX_TRIED // max(1, len(leaf.ranges)))
        for low, high in leaf.ranges:
            if untried and high - low >= per_range:
                return leaf
            if any(has(chr(code).encode()) for code in range(low, min(high + 1, low + per_range))):
                return leaf
        return NOTHING

    left = grammar.mapped(kept).productive()
    return left.rules[left.start] != NOTHING


def _search(start: GrammarMatcher, vocabulary: Vocabulary, guide: Guide) -> bool | None:
    """Follow the tokens that a matcher allows."""
    completion = completion_of(guide)
    row = allocate_token_bitmask(1, vocabulary.vocab_size)
    # texts of a regular guide that end in one state have one future; elsewhere a text is its own state
    seen: set[object] = {b""}
    pending = deque([(start, b"")])
    num_forks = 0
    for _ in range(_MAX_MASKS):
        if not pending:
            return False
        matcher, text = pending.popleft()
        if matcher.is_accepting():
            return True
        matcher.fill_next_token_bitmask(row, 0)
        for token_id in legal_columns(row[0], vocabulary.vocab_size).nonzero()[0].tolist():
            longer = text + vocabulary.tokens[token_id]
            state = longer if completion is None else completion.state(longer)
            if state in seen:
                continue
            if num_forks == _MAX_FORKS:
                return None
            num_forks += 1
            twin = matcher.fork()
            if twin.accept_token(token_id):
                seen.add(state)
                pending.append((twin, longer))
    return None
