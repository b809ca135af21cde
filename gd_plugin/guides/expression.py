r"""Expressions: the one normal form of regexes, EBNF grammars and choices, and how each engine spells it.

In:  nodes built by guides/regex.py, guides/ebnf.py and guides/language.py.
Out: `to_rust_regex` here, what llguidance and outlines-core read; grammars as text come from guides/grammar.py.
Every set of characters is a list of code-point ranges, never a class name: engines disagree about what `\d`, `\w`, `.`
and case mean, but not about code points. Surrogates are in no set, because no text can hold them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = [
    "ANYTHING",
    "EMPTY",
    "NOTHING",
    "CharSet",
    "Either",
    "Literal",
    "Node",
    "Ranges",
    "Reference",
    "Repeat",
    "Sequence",
    "char_set",
    "class_text",
    "complement",
    "either",
    "is_plain",
    "num_positions",
    "repeat",
    "repeat_text",
    "sequence",
    "to_rust_regex",
    "used_ranges",
    "weight",
]

Ranges = tuple[tuple[int, int], ...]
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly `text`."""

    text: str


@dataclass(frozen=True, slots=True)
class CharSet:
    """One character out of `ranges`: sorted, disjoint, inclusive, without surrogates."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """All `parts` in order; at least two."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Either:
    """One of `options`; at least two."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`item` from `low` to `high` times; `high` None is no limit."""

    item: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Reference:
    """What the rule `name` of the grammar derives."""

    name: str


Node = Literal | CharSet | Sequence | Either | Repeat | Reference

EMPTY = Literal("")
NOTHING = CharSet(())
ANYTHING = CharSet(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)))


def char_set(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """Return the set of all code points in `ranges`, which may overlap and hold surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        for start, end in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), min(high, _LAST))):
            if start > end:
                continue
            if merged and start <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
    return CharSet(tuple(merged))


def complement(ranges: Ranges) -> CharSet:
    """Return every code point that is not in `ranges`."""
    gaps = []
    start = 0
    for low, high in ranges:
        gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, _LAST))
    return char_set(gap for gap in gaps if gap[0] <= gap[1])


def sequence(parts: Iterable[Node]) -> Node:
    """Return `parts` in order, flattened; neighbouring literals become one."""
    flat: list[Node] = []
    # the characters of the literal being put together
    text: list[str] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        for piece in part.parts if isinstance(part, Sequence) else (part,):
            if isinstance(piece, Literal):
                text.append(piece.text)
            elif isinstance(piece, CharSet) and len(piece.ranges) == 1 and piece.ranges[0][0] == piece.ranges[0][1]:
                text.append(chr(piece.ranges[0][0]))
            else:
                flat.extend(_literal(text))
                flat.append(piece)
                text.clear()
    flat.extend(_literal(text))
    if not flat:
        return EMPTY
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _literal(text: list[str]) -> list[Node]:
    joined = "".join(text)
    return [Literal(joined)] if joined else []


def either(options: Iterable[Node]) -> Node:
    """Return one of `options`, flattened; impossible ones are dropped and single characters become one set."""
    kept: dict[Node, None] = {}
    ranges: list[tuple[int, int]] = []
    for option in options:
        for choice in option.options if isinstance(option, Either) else (option,):
            if isinstance(choice, CharSet):
                ranges.extend(choice.ranges)
            elif isinstance(choice, Literal) and len(choice.text) == 1:
                ranges.append((ord(choice.text), ord(choice.text)))
            else:
                kept[choice] = None
    if ranges:
        kept[char_set(ranges)] = None
    if not kept:
        return NOTHING
    return next(iter(kept)) if len(kept) == 1 else Either(tuple(kept))


def repeat(item: Node, low: int, high: int | None) -> Node:
    """Return `item` repeated `low` to `high` times; simplified where the language allows it."""
    if item == NOTHING:
        return EMPTY if low == 0 else NOTHING
    if item == EMPTY or high == 0:
        return EMPTY
    if (low, high) == (1, 1):
        return item
    if isinstance(item, Repeat) and item.high is None and item.low <= 1 and high is None and low <= 1:
        # (x*)+ and its kin: engines spend exponential time on them and they are one star
        return Repeat(item.item, min(item.low, low), None)
    return Repeat(item, low, high)


def num_positions(node: Node) -> int:
    """Return the number of characters `node` has when every counted repeat is written out: what automata grow with."""
    return _total(node, lambda _: 1)


def weight(node: Node) -> int:
    """Return the number of character ranges `node` has when every counted repeat is written out."""
    return _total(node, lambda leaf: len(leaf.ranges))


def _total(node: Node, count: Callable[[CharSet], int]) -> int:
    if isinstance(node, Literal):
        return len(node.text)
    if isinstance(node, Sequence):
        return sum(_total(part, count) for part in node.parts)
    if isinstance(node, Either):
        return sum(_total(option, count) for option in node.options)
    if isinstance(node, Repeat):
        return max(node.low, node.high or 1, 1) * _total(node.item, count)
    return count(node) if isinstance(node, CharSet) else 1


def used_ranges(node: Node) -> Ranges:
    """Return every code point that a text of `node` may hold; references are not followed."""
    found: list[tuple[int, int]] = []
    stack = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, Literal):
            found.extend((ord(character), ord(character)) for character in set(item.text))
        elif isinstance(item, CharSet):
            found.extend(item.ranges)
        elif isinstance(item, Sequence):
            stack.extend(item.parts)
        elif isinstance(item, Either):
            stack.extend(item.options)
        elif isinstance(item, Repeat):
            stack.append(item.item)
    return char_set(found).ranges


def to_rust_regex(node: Node) -> str:
    """Return `node` as a regex of Rust's `regex-syntax`, which llguidance and outlines-core read.

    Raises:
        TypeError: `node` holds a reference; a regex has no rules.
    """
    if isinstance(node, Literal):
        if not node.text:
            return "(?:)"
        text = "".join(map(_rust_character, node.text))
        return text if len(node.text) == 1 else f"(?:{text})"
    if isinstance(node, CharSet):
        return class_text(node.ranges, _rust_code)
    if isinstance(node, Sequence):
        return "(?:" + "".join(to_rust_regex(part) for part in node.parts) + ")"
    if isinstance(node, Either):
        return "(?:" + "|".join(to_rust_regex(option) for option in node.options) + ")"
    if isinstance(node, Repeat):
        item = to_rust_regex(node.item)
        return (f"(?:{item})" if isinstance(node.item, Repeat) else item) + repeat_text(node)
    raise TypeError(f"rule {node.name!r} has no place in a regex")


def repeat_text(node: Repeat) -> str:
    """Return the suffix of a repeat: the same in every syntax."""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    if short:
        return short
    if node.low == node.high:
        return f"{{{node.low}}}"
    return f"{{{node.low},{'' if node.high is None else node.high}}}"


def class_text(ranges: Ranges, spell: Callable[[int], str]) -> str:
    """Return a character class whose code points are written by `spell`."""
    return "[" + "".join(spell(low) if low == high else f"{spell(low)}-{spell(high)}" for low, high in ranges) + "]"


def is_plain(code: int) -> bool:
    """Tell whether the character stands for itself in every syntax."""
    return chr(code).isascii() and chr(code).isalnum()


def _rust_code(code: int) -> str:
    return chr(code) if is_plain(code) else f"\\x{{{code:X}}}"


def _rust_character(character: str) -> str:
    return _rust_code(ord(character))
