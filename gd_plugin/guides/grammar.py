"""Grammar: named rules over expressions, what is wrong with them, and their text for each engine.

In:  rules from guides/ebnf.py and guides/lark.py, or one expression.
Out: `to_xgrammar_ebnf` (xgrammar's EBNF), `to_lark` (llguidance's Lark). Both mean the context-free language of the
     rules over characters: no longest match, no lexer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gd_plugin.errors import UnsupportedGuideError
from gd_plugin.guides.expression import (
    EMPTY,
    NOTHING,
    CharSet,
    Either,
    Literal,
    Node,
    Ranges,
    Reference,
    Repeat,
    Sequence,
    class_text,
    either,
    is_plain,
    num_positions,
    repeat,
    repeat_text,
    sequence,
    to_rust_regex,
)

__all__ = ["Grammar", "one_rule", "to_lark", "to_regular", "to_xgrammar_ebnf"]

_LAST_ASCII = 0x7F
# A grammar without recursion becomes one regex up to this many characters written out: engines then need no parser.
_MAX_REGULAR_POSITIONS = 20_000
# Rules written into one another: expressions are compared and hashed by recursion.
_MAX_REGULAR_HEIGHT = 40
# llguidance 1.9.1 ends the process with a segmentation fault on a chain of about 2,000 rules.
_MAX_LARK_RULES = 500


@dataclass(frozen=True)
class Grammar:
    """Rules by name, in the order they were written; every reference names one of them."""

    rules: dict[str, Node]
    start: str

    def productive(self) -> "Grammar":
        """Return the grammar without what no text can match and without rules the start never reaches.

        If nothing matches at all, the start rule is NOTHING.
        """
        alive = _deriving(self.rules)
        rules = {name: _prune(node, alive) for name, node in self.rules.items() if name in alive}
        rules.setdefault(self.start, NOTHING)
        kept: dict[str, Node] = {}
        stack = [self.start]
        while stack:
            name = stack.pop()
            if name not in kept:
                kept[name] = rules[name]
                stack.extend(references(rules[name]))
        return Grammar(kept, self.start)

    def mapped(self, change: Callable[[Node], Node]) -> "Grammar":
        """Return the grammar with every leaf of its expressions changed."""
        return Grammar({name: _rewrite(node, change) for name, node in self.rules.items()}, self.start)

    def recursive_rules(self) -> frozenset[str]:
        """Return the rules that can reach themselves."""
        found: set[str] = set()
        for group in _leaves_first(self):
            if len(group) > 1 or group[0] in references(self.rules[group[0]]):
                found.update(group)
        return frozenset(found)


def one_rule(node: Node) -> Grammar:
    """Return the grammar of a single expression."""
    return Grammar({"root": node}, "root")


def references(node: Node) -> Iterator[str]:
    """Yield the names of the rules that `node` refers to, repeats included."""
    stack = [node]
    while stack:
        item = stack.pop()
        if isinstance(item, Reference):
            yield item.name
        elif isinstance(item, Sequence):
            stack.extend(item.parts)
        elif isinstance(item, Either):
            stack.extend(item.options)
        elif isinstance(item, Repeat):
            stack.append(item.item)


@dataclass(slots=True)
class _Gate:
    """An expression that derives a text once `missing` of its parts do; then it tells `parent`, or its rule does."""

    missing: int
    parent: "_Gate | str"


def _deriving(rules: dict[str, Node]) -> set[str]:
    """Return the rules from which a text can be derived, in a time that grows with the size of the grammar alone."""
    found: set[str] = set()
    waiting: dict[str, list[_Gate]] = {}

    def settle(parent: _Gate | str) -> None:
        """One more part of `parent` derives a text."""
        stack = [parent]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                if item not in found:
                    found.add(item)
                    stack.extend(waiting.pop(item, ()))
            else:
                item.missing -= 1
                if item.missing == 0:
                    stack.append(item.parent)

    def enter(node: Node, parent: _Gate | str) -> None:
        if isinstance(node, Sequence):
            gate = _Gate(len(node.parts), parent)
            for part in node.parts:
                enter(part, gate)
        elif isinstance(node, Either):
            gate = _Gate(1, parent)
            for option in node.options:
                enter(option, gate)
        elif isinstance(node, Repeat) and node.low:
            enter(node.item, parent)
        elif isinstance(node, Reference) and node.name not in found:
            waiting.setdefault(node.name, []).append(_Gate(1, parent))
        elif node != NOTHING:
            settle(parent)

    for name, node in rules.items():
        enter(node, name)
    return found


def _prune(node: Node, alive: set[str]) -> Node:
    """Return `node` with references to rules outside `alive` made impossible."""
    return _rewrite(node, lambda leaf: NOTHING if isinstance(leaf, Reference) and leaf.name not in alive else leaf)


def _rewrite(node: Node, change: Callable[[Node], Node]) -> Node:
    """Rebuild `node` with every leaf changed."""
    if isinstance(node, Sequence):
        return sequence(_rewrite(part, change) for part in node.parts)
    if isinstance(node, Either):
        return either(_rewrite(option, change) for option in node.options)
    if isinstance(node, Repeat):
        return repeat(_rewrite(node.item, change), node.low, node.high)
    return change(node)


def to_regular(grammar: Grammar) -> Node | None:
    """Return one expression for a grammar without recursion, or None if it has some or would grow too large."""
    if grammar.recursive_rules():
        return None
    if len(grammar.rules) == 1:
        # nothing is written into anything
        return grammar.rules[grammar.start]
    flat: dict[str, Node] = {}
    sizes: dict[str, int] = {}
    heights: dict[str, int] = {}

    def size(node: Node) -> int:
        if isinstance(node, Reference):
            return sizes[node.name]
        if isinstance(node, Sequence):
            return sum(size(part) for part in node.parts)
        if isinstance(node, Either):
            return sum(size(option) for option in node.options)
        if isinstance(node, Repeat):
            return max(node.low, node.high or 1, 1) * size(node.item)
        return num_positions(node)

    for [name] in _leaves_first(grammar):
        sizes[name] = size(grammar.rules[name])
        heights[name] = 1 + max((heights[target] for target in references(grammar.rules[name])), default=0)
        if sizes[name] > _MAX_REGULAR_POSITIONS or heights[name] > _MAX_REGULAR_HEIGHT:
            return None
        flat[name] = _rewrite(
            grammar.rules[name], lambda leaf: flat[leaf.name] if isinstance(leaf, Reference) else leaf
        )
    return flat[grammar.start]


def _leaves_first(grammar: Grammar) -> list[list[str]]:
    """Return the rules so that each comes behind those it refers to; rules that reach each other are one group.

    Source: Tarjan, Depth-first search and linear graph algorithms (1972), without recursion.
    """
    groups: list[list[str]] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_rules: list[str] = []
    grouped: set[str] = set()

    def enter(name: str) -> tuple[str, Iterator[str]]:
        order[name] = lowest[name] = len(order)
        open_rules.append(name)
        return name, references(grammar.rules[name])

    for root in grammar.rules:
        path = [] if root in order else [enter(root)]
        while path:
            name, targets = path[-1]
            target = next(targets, None)
            if target is None:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[name])
                if lowest[name] == order[name]:
                    group = [open_rules.pop()]
                    while group[-1] != name:
                        group.append(open_rules.pop())
                    groups.append(group)
                    grouped.update(group)
            elif target not in order:
                path.append(enter(target))
            elif target not in grouped:
                lowest[name] = min(lowest[name], order[target])
    return groups


def to_xgrammar_ebnf(grammar: Grammar, *, alone: bool = False) -> str:
    """Return the grammar as xgrammar's EBNF with the root rule `root`, to which nothing refers.

    A set with characters past ASCII is a rule of its own: where such a set follows a rule, xgrammar 0.2.9 compares its
    code points cut to eight bits with the next byte and sets bits of tokens it then refuses. No set is written negated:
    a negated one would take the bytes of surrogates, which are not UTF-8. Where no rule stands before a set, it is
    written in its place: behind the end of a rule, every token that crosses it is tried anew at each step (50 us against
    6 us for a row of 151,936 columns inside `[^"]*`).

    Args:
        grammar: the grammar.
        alone: whether nothing stands before, behind or beside its text.
    """
    names = {name: f"rule{index}" for index, name in enumerate(grammar.rules)}
    sets: dict[Ranges, str] = {}

    def spell(node: Node) -> str:
        if isinstance(node, Literal):
            return '"' + "".join(_ebnf_code(ord(character)) for character in node.text) + '"'
        if isinstance(node, CharSet):
            return spell_set(node.ranges)
        if isinstance(node, Reference):
            return names[node.name]
        if isinstance(node, Sequence):
            return "(" + " ".join(map(spell, node.parts)) + ")"
        if isinstance(node, Either):
            return "(" + " | ".join(map(spell, node.options)) + ")"
        item = spell(node.item)
        return (f"({item})" if isinstance(node.item, Repeat) else item) + repeat_text(node)

    def spell_set(ranges: Ranges) -> str:
        if ranges[-1][1] <= _LAST_ASCII:
            return class_text(ranges, _ebnf_code)
        return sets.setdefault(ranges, f"set{len(sets)}")

    def spell_root(node: Node) -> str:
        texts: list[str] = []
        behind_rule = False
        for part in node.parts if isinstance(node, Sequence) else (node,):
            item = part.item if isinstance(part, Repeat) and part.low <= 1 and part.high is None else part
            if isinstance(item, CharSet) and not behind_rule:
                texts.extend([class_text(item.ranges, _ebnf_code)] * (part.low if isinstance(part, Repeat) else 1))
                if isinstance(part, Repeat):
                    texts.append(class_text(item.ranges, _ebnf_code) + "*")
            else:
                behind_rule = behind_rule or not isinstance(part, Literal)
                texts.append(spell(part))
        return " ".join(texts)

    rules = dict(grammar.rules)
    start = names[grammar.start]
    if alone and not any(grammar.start in references(node) for node in rules.values()):
        start = spell_root(rules.pop(grammar.start))
    lines = [f"root ::= {start}", *(f"{names[name]} ::= {spell(node)}" for name, node in rules.items())]
    lines.extend(f"{name} ::= {class_text(ranges, _ebnf_code)}" for ranges, name in sets.items())
    return "\n".join(lines) + "\n"


def _ebnf_code(code: int) -> str:
    if is_plain(code):
        return chr(code)
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def to_lark(grammar: Grammar, *, alone: bool = True) -> str:
    """Return the grammar as llguidance's Lark with the rule `start`, without any `%` directive.

    llguidance's lexer takes the longest match and never goes back, so a terminal may only be what cannot be continued:
    the whole grammar where it has no recursion and is all there is, and single characters elsewhere.

    Args:
        grammar: the grammar.
        alone: whether nothing stands before, behind or beside its text.
    """
    regular = to_regular(grammar) if alone else None
    if regular is not None:
        return f"start: /{to_rust_regex(regular)}/\n"
    if len(grammar.rules) > _MAX_LARK_RULES:
        raise UnsupportedGuideError(
            f"#: the grammar has {len(grammar.rules)} rules, llguidance takes {_MAX_LARK_RULES} safely",
            pointer="#",
            keyword="rules",
            hint="write rules into one another, or use another backend",
        )
    names = {name: f"rule{index}" for index, name in enumerate(grammar.rules)}
    sets: dict[Ranges, str] = {}

    def terminal(ranges: Ranges) -> str:
        return sets.setdefault(ranges, f"SET{len(sets)}")

    def spell(node: Node) -> str:
        if node == EMPTY:
            return '""'
        if isinstance(node, Literal):
            return "(" + " ".join(terminal(((ord(c), ord(c)),)) for c in node.text) + ")"
        if isinstance(node, CharSet):
            return terminal(node.ranges)
        if isinstance(node, Reference):
            return names[node.name]
        if isinstance(node, Sequence):
            return "(" + " ".join(map(spell, node.parts)) + ")"
        if isinstance(node, Either):
            return "(" + " | ".join(map(spell, node.options)) + ")"
        return f"({spell(node.item)}){repeat_text(node)}"

    lines = [f"{names[name]}: {spell(node)}" for name, node in grammar.rules.items()]
    lines.insert(0, f"start: {names[grammar.start]}")
    lines.extend(f"{name}: /{to_rust_regex(CharSet(ranges))}/" for ranges, name in sets.items())
    return "\n".join(lines) + "\n"
