"""The normal form -> a grammar for llguidance, in its Lark dialect.

In:  `Normal`, the white space policy.
Out: grammar text. Rule `n<k>` is node k; terminals carry their white space, so that none stands at either end.
Kept here: arrays, and what a JSON document is made of; members.py writes objects.
"""

from dataclasses import dataclass, field
from typing import Literal as OneOf

from gd_plugin.errors import GuideTooLargeError
from gd_plugin.guides.problem import Problem
from gd_plugin.guides.schema.languages import text
from gd_plugin.guides.schema.members import MAX_UNORDERED, PropertyOrder, is_orderable, members, when
from gd_plugin.guides.schema.number_language import number_language
from gd_plugin.guides.schema.shapes import ArrayShape, Literal, Normal, NumberShape, ObjectShape, Shape, TextShape
from gd_plugin.guides.schema.spelling import Spelling

__all__ = ["Whitespace", "to_llguidance", "unordered_problems"]

Whitespace = OneOf["bounded", "compact", "any"]
_MAX_RULES = 120_000


def to_llguidance(
    normal: Normal,
    *,
    whitespace: Whitespace = "bounded",
    max_whitespace: int = 16,
    property_order: PropertyOrder = "declared",
) -> str:
    """Return the grammar.

    Args:
        normal: a schema in normal form.
        whitespace: between the tokens of the document: "bounded" by `max_whitespace`, "compact" or "any".
        max_whitespace: characters at one place.
        property_order: declared keys in declared order, or in any; objects that `unordered_problems` names keep theirs.

    Raises:
        GuideTooLargeError: counting members needs too many rules.
    """
    space = {"compact": "", "any": "[ \\n\\r\\t]*"}.get(whitespace, f"[ \\n\\r\\t]{{0,{max_whitespace}}}")
    if whitespace == "bounded" and max_whitespace == 0:
        space = ""
    return _Writer(normal, space, property_order).write()


def unordered_problems(normal: Normal) -> list[Problem]:
    """Objects whose keys cannot be written in any order."""
    found: dict[str, Problem] = {}
    for shape in (shape for shapes in normal.nodes for shape in shapes):
        if isinstance(shape, ObjectShape) and not is_orderable(shape):
            message = (
                f"{len(shape.declared)} keys in any order cannot be enforced, up to {MAX_UNORDERED} can; "
                "use property_order='declared'"
            )
            found.setdefault(shape.pointer, Problem(shape.pointer, "property_order", "", message))
    return list(found.values())


@dataclass
class _Writer:
    normal: Normal
    space: str
    order: PropertyOrder
    rules: list[str] = field(default_factory=list)
    terminals: dict[str, str] = field(default_factory=dict)
    spelling: Spelling = field(default_factory=Spelling)
    num_names: int = 0

    def write(self) -> str:
        space = self.space
        for number, shapes in enumerate(self.normal.nodes):
            self.rule(f"n{number}", [self.shape(shape) for shape in shapes])
        fixed = {
            "OPEN_OBJECT": f"/\\{{{space}/",
            "CLOSE_OBJECT": f"/{space}\\}}/",
            "OPEN_ARRAY": f"/\\[{space}/",
            "CLOSE_ARRAY": f"/{space}\\]/",
            "COMMA": f"/{space},{space}/",
        }
        terminals = [f"{name}: {body}" for name, body in fixed.items()]
        for bodies in (self.spelling.shared, self.terminals):
            terminals.extend(f"{name}: {body}" for body, name in bodies.items())
        return "\n".join(["start: n0", *self.rules, *terminals, ""])

    def fresh(self) -> str:
        """A name for a rule that is written later."""
        self.num_names += 1
        return f"r{self.num_names}"

    def rule(self, name: str, options: list[str], *, parametric: bool = False) -> str:
        """Add a rule; its name. Where it is `parametric`, `name::value` uses it."""
        head = f"{name}::_" if parametric else name
        self.rules.append(f"{head}: {' | '.join(dict.fromkeys(options))}")
        if len(self.rules) > _MAX_RULES:
            raise GuideTooLargeError(
                f"#: the grammar needs over {_MAX_RULES} rules",
                pointer="#",
                limit="max_schema_rules",
                hint="share repeated parts with $defs, or leave parts out",
            )
        return name

    def new_rule(self, options: list[str]) -> str:
        """Add a rule without a parameter; its name."""
        return self.rule(self.fresh(), options)

    def terminal(self, body: str) -> str:
        return self.terminals.setdefault(body, f"T{len(self.terminals)}")

    def key(self, language_or_key: object) -> str:
        """The terminal of a key and its colon."""
        language = text(language_or_key) if isinstance(language_or_key, str) else language_or_key
        return self.terminal(self.spelling.json_key(language, f"{self.space}:{self.space}"))  # type: ignore[arg-type]

    def shape(self, shape: Shape) -> str:
        if isinstance(shape, Literal):
            return f'"{shape.word}"'
        if isinstance(shape, NumberShape):
            return self.terminal(self.spelling.number(number_language(shape.numbers)))
        if isinstance(shape, TextShape):
            return self.terminal(self.spelling.json_text(shape.language))
        if isinstance(shape, ArrayShape):
            return self.array(shape)
        return self.object(shape)

    def array(self, shape: ArrayShape) -> str:
        if shape.choices is not None:
            body = self.unique_items(shape)
        elif shape.contains is not None:
            body = self.counted_items(shape)
        else:
            body = self.items(shape)
        empty = ['OPEN_ARRAY "]"'] if shape.low == 0 and (shape.contains is None or shape.contains.low == 0) else []
        full = [f"OPEN_ARRAY {body}"] if body else []
        return self.new_rule(empty + full)

    def items(self, shape: ArrayShape) -> str:
        """One or more items and the closing bracket; empty if there can be none."""
        places = len(shape.prefix)
        low, high = max(shape.low - places, 0), None if shape.high is None else shape.high - places
        tail = "CLOSE_ARRAY"
        if shape.rest is not None and high != 0:
            tail = f"(COMMA n{shape.rest}){_times(low, high)} CLOSE_ARRAY"
        if not shape.prefix:
            if shape.rest is None or high == 0:
                return ""
            rest_high = None if high is None else high - 1
            more = f"(COMMA n{shape.rest}){_times(max(low - 1, 0), rest_high)} " if rest_high != 0 else ""
            return f"n{shape.rest} {more}CLOSE_ARRAY"
        following = tail
        for place in range(places - 1, 0, -1):
            options = [f"COMMA n{shape.prefix[place]} {following}"]
            if place >= shape.low:
                options.append("CLOSE_ARRAY")
            following = self.new_rule(options)
        return f"n{shape.prefix[0]} {following}"

    def unique_items(self, shape: ArrayShape) -> str:
        """Items of a finite set, each once: bit k of the parameter is set behind the item of choice k."""
        choices = shape.choices or ()
        if not choices or shape.high == 0:
            return ""
        every = f"[0:{len(choices)}]"
        room = "" if shape.high is None else f"bit_count_lt({every}, {shape.high})"
        behind = self.fresh()
        later = [
            when(f"COMMA n{node} {behind}::set_bit({bit})", f"bit_clear({bit})", room)
            for bit, node in enumerate(choices)
        ]
        later.append(when("CLOSE_ARRAY", f"bit_count_ge({every}, {shape.low})" if shape.low > 1 else ""))
        self.rule(behind, later, parametric=True)
        return self.new_rule([f"n{node} {behind}::{1 << bit}" for bit, node in enumerate(choices)])

    def counted_items(self, shape: ArrayShape) -> str:
        """Items of which some are counted: those that are hits, and all, both only as far as they matter."""
        contains = shape.contains
        if contains is None:
            return ""
        high = shape.high
        top_hits = contains.low if contains.high is None else contains.high + 1
        top_length = max(shape.low, 1) if high is None else high + 1
        width = top_hits + 1
        if width * (top_length + 1) > 5_000:
            raise GuideTooLargeError(
                f"#: counting up to {top_hits} of {top_length} items takes too many rules",
                pointer="#",
                keyword="contains",
                hint="lower minContains and maxContains, or minItems and maxItems",
            )
        prefix = f"{self.fresh()}c"

        def fits(count: int, found: int) -> bool:
            """Whether the array may end here."""
            enough = count >= max(shape.low, 1) and found >= contains.low
            return enough and (high is None or count <= high) and (contains.high is None or found <= contains.high)

        def steps(count: int, found: int) -> list[tuple[int, int, int]]:
            """Nodes of a next item, and the state behind it."""
            if high is not None and count >= high:
                return []
            more = min(count + 1, top_length)
            following = [(contains.others, more, found)]
            if contains.high is None or found < contains.high:
                following.append((contains.node, more, min(found + 1, top_hits)))
            return following

        states = [(count, found) for count in range(top_length, -1, -1) for found in range(width - 1, -1, -1)]
        # a state from which the array cannot end has no rule
        alive: set[tuple[int, int]] = set()
        grown = -1
        while grown < len(alive):
            grown = len(alive)
            for state in states:
                if fits(*state) or any(step[1:] in alive for step in steps(*state)):
                    alive.add(state)
        if (0, 0) not in alive:
            return ""
        for count, found in states:
            if (count, found) in alive:
                comma = "COMMA " if count else ""
                options = [
                    f"{comma}n{node} {prefix}x{more}x{hit}"
                    for node, more, hit in steps(count, found)
                    if (more, hit) in alive
                ]
                self.rule(f"{prefix}x{count}x{found}", options + ["CLOSE_ARRAY"] * fits(count, found))
        return f"{prefix}x0x0"

    def object(self, shape: ObjectShape) -> str:
        return f"OPEN_OBJECT {members(self, shape, self.order)}"


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return f"{{{low},{high}}}"
