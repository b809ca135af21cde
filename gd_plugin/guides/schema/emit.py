"""The normal form -> a grammar for llguidance, in its Lark dialect.

In:  `Normal`, the white space policy.
Out: grammar text. Rule `n<k>` is node k; terminals carry their white space, so that none stands at either end.
Kept here: an object's members are a chain through its declared keys; extra keys stand anywhere between them.
"""

from dataclasses import dataclass, field
from typing import Literal as OneOf

from gd_plugin.errors import GuideTooLargeError
from gd_plugin.guides.schema.languages import text
from gd_plugin.guides.schema.shapes import ArrayShape, Literal, Normal, NumberShape, ObjectShape, Shape, TextShape
from gd_plugin.guides.schema.spelling import Spelling

__all__ = ["Whitespace", "to_llguidance"]

Whitespace = OneOf["bounded", "compact", "any"]
_MAX_RULES = 120_000
# chains of rules: the engine recurses into them
_MAX_COUNTED = 200


def to_llguidance(normal: Normal, *, whitespace: Whitespace = "bounded", max_whitespace: int = 16) -> str:
    """Return the grammar.

    Args:
        normal: a schema in normal form.
        whitespace: between the tokens of the document: "bounded" by `max_whitespace`, "compact" or "any".
        max_whitespace: characters at one place.

    Raises:
        GuideTooLargeError: counting members needs too many rules.
    """
    space = {"compact": "", "any": "[ \\n\\r\\t]*"}.get(whitespace, f"[ \\n\\r\\t]{{0,{max_whitespace}}}")
    if whitespace == "bounded" and max_whitespace == 0:
        space = ""
    return _Writer(normal, space).write()


@dataclass
class _Writer:
    normal: Normal
    space: str
    rules: list[str] = field(default_factory=list)
    terminals: dict[str, str] = field(default_factory=dict)
    names: dict[tuple[object, ...], str] = field(default_factory=dict)
    spelling: Spelling = field(default_factory=Spelling)

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

    def rule(self, name: str, options: list[str]) -> str:
        self.rules.append(f"{name}: {' | '.join(dict.fromkeys(options))}")
        if len(self.rules) > _MAX_RULES:
            raise GuideTooLargeError(
                f"#: the grammar needs over {_MAX_RULES} rules",
                pointer="#",
                limit="max_guide_bytes",
                hint="share repeated parts with $defs, or leave parts out",
            )
        return name

    def new_rule(self, options: list[str]) -> str:
        return self.rule(f"r{len(self.rules)}", options)

    def terminal(self, body: str) -> str:
        return self.terminals.setdefault(body, f"T{len(self.terminals)}")

    def key(self, language_or_key: object) -> str:
        language = text(language_or_key) if isinstance(language_or_key, str) else language_or_key
        return self.terminal(self.spelling.json_text(language, f"{self.space}:{self.space}"))  # type: ignore[arg-type]

    def shape(self, shape: Shape) -> str:
        if isinstance(shape, Literal):
            return f'"{shape.word}"'
        if isinstance(shape, NumberShape):
            return self.terminal(self.spelling.number(shape.numbers.language()))
        if isinstance(shape, TextShape):
            return self.terminal(self.spelling.json_text(shape.language))
        if isinstance(shape, ArrayShape):
            return self.array(shape)
        return self.object(shape)

    def array(self, shape: ArrayShape) -> str:
        if shape.choices is not None:
            body = self.unique_items(shape, 0)
        elif shape.contains is not None:
            body = self.counted_items(shape, 0, 0)
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

    def unique_items(self, shape: ArrayShape, used: int) -> str:
        """Items of a finite set, each once; `used` has a bit for each that was written."""
        key = ("unique", id(shape), used)
        if key not in self.names:
            choices = shape.choices or ()
            options = []
            comma = "COMMA " if used else ""
            if shape.high is None or used.bit_count() < shape.high:
                for place, node in enumerate(choices):
                    if not used >> place & 1:
                        options.append(f"{comma}n{node} {self.unique_items(shape, used | 1 << place)}")
            if used and used.bit_count() >= shape.low:
                options.append("CLOSE_ARRAY")
            self.names[key] = self.new_rule(options) if options else ""
        return self.names[key]

    def counted_items(self, shape: ArrayShape, hits: int, length: int) -> str:
        """Items of which some are counted: `hits` so far, `length` in all, both only as far as they matter."""
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
        prefix = f"c{len(self.rules)}"

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
        extras = [f"{self.key(extra.keys)} n{extra.node}" for extra in shape.extras]
        extra = self.new_rule(extras) if len(extras) > 1 else extras[0] if extras else ""
        # members are counted only where a bound can be passed
        most = None if not extras and shape.high is not None and shape.high >= len(shape.declared) else shape.high
        top = 0 if most is None and shape.low == 0 else max(shape.low, 0 if most is None else most + 1)
        if (len(shape.declared) + 1) * (top + 1) > 20_000:
            raise GuideTooLargeError(
                f"#: counting {top} of {len(shape.declared)} members takes too many rules",
                pointer="#",
                hint="lower minProperties and maxProperties, or declare fewer keys",
            )
        if top == 0:
            body = self.members(shape, extra)
        elif len(shape.declared) > _MAX_COUNTED:
            raise GuideTooLargeError(
                f"#: members of an object with over {_MAX_COUNTED} declared keys cannot be counted",
                pointer="#",
                limit="max_guide_bytes",
                hint="leave minProperties and maxProperties out, or declare fewer keys",
            )
        else:
            body = _CountedMembers(self, shape, extra, most, top).first()
        return f"OPEN_OBJECT {body}"

    def members(self, shape: ObjectShape, extra: str) -> str:
        """Everything behind the opening brace; halves of halves, because the engine recurses into nested rules."""
        others = f" {self.new_rule([f'(COMMA {extra})*'])}" if extra else ""
        fields = [f"{self.key(key)} n{node}{others}" for key, node, _ in shape.declared]
        later = [
            f"COMMA {member}" if must else f"(COMMA {member})?"
            for member, (_, _, must) in zip(fields, shape.declared, strict=True)
        ]
        spans: dict[tuple[int, int], str] = {}

        def span(low: int, high: int) -> str:
            """The members `low` to `high`, each behind a comma."""
            if (low, high) not in spans:
                if high - low <= 4:
                    spans[low, high] = self.new_rule([" ".join(later[low:high])])
                else:
                    middle = (low + high) // 2
                    spans[low, high] = self.new_rule([f"{span(low, middle)} {span(middle, high)}"])
            return spans[low, high]

        def suffix(start: int, low: int, high: int) -> list[str]:
            if start <= low:
                return [span(low, high)] if low < high else []
            if start >= high:
                return []
            if high - low <= 4:
                return later[start:high]
            middle = (low + high) // 2
            return [*suffix(start, low, middle), *suffix(start, middle, high)]

        count = len(fields)
        options = []
        for place, (_, _, must) in enumerate(shape.declared):
            options.append(" ".join([fields[place], *suffix(place + 1, 0, count), "CLOSE_OBJECT"]))
            if must:
                break
        else:
            options.append('"}"')
        if extra:
            options.append(" ".join([f"{extra}{others}", *suffix(0, 0, count), "CLOSE_OBJECT"]))
        return self.new_rule(options)


@dataclass
class _CountedMembers:
    """The chain of one object: rules for "behind declared key i, with c members written"."""

    writer: _Writer
    shape: ObjectShape
    extra: str
    most: int | None
    top: int
    made: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def first(self) -> str:
        """Everything behind the opening brace."""
        for place in range(len(self.shape.declared), -1, -1):
            for count in range(self.top, -1, -1):
                self._make("s", place, count)
                self._make("r", place, count)
        for place in range(len(self.shape.declared), -1, -1):
            self._make("f", place, 0)
        options = [self.made["f", 0, 0]]
        if self.extra and self._room(0) and self.made["r", 0, self._more(0)]:
            options.append(f"{self.extra} {self.made['r', 0, self._more(0)]}")
        return self.writer.new_rule([option for option in options if option])

    def _room(self, count: int) -> bool:
        return self.most is None or count < self.most

    def _more(self, count: int) -> int:
        return min(count + 1, self.top)

    def _make(self, kind: str, place: int, count: int) -> None:
        """`f`: nothing is written yet; `s`: the next is a declared key or the end; `r`: or an extra key.

        A state from which the object cannot end has no rule: its name is empty.
        """
        name = f"{kind}{len(self.writer.rules)}"
        options = self._extra_options(name, place, count) if kind == "r" else self._options(kind, place, count)
        if options == [self.made.get(("s", place, count))]:
            self.made[kind, place, count] = options[0]
        else:
            self.made[kind, place, count] = self.writer.rule(name, options) if options else ""

    def _extra_options(self, name: str, place: int, count: int) -> list[str]:
        options = [self.made["s", place, count]] if self.made["s", place, count] else []
        more = self._more(count)
        following = self.made["r", place, more] if more != count else name if options else ""
        if self.extra and self._room(count) and following:
            options.append(f"COMMA {self.extra} {following}")
        return options

    def _options(self, kind: str, place: int, count: int) -> list[str]:
        declared = self.shape.declared
        if place == len(declared):
            return ['"}"' if kind == "f" else "CLOSE_OBJECT"] if count >= self.shape.low else []
        key, node, must = declared[place]
        options = []
        behind = self.made["r", place + 1, self._more(count)]
        if self._room(count) and behind:
            comma = "" if kind == "f" else "COMMA "
            options.append(f"{comma}{self.writer.key(key)} n{node} {behind}")
        if not must and self.made[kind, place + 1, count]:
            options.append(self.made[kind, place + 1, count])
        return options


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return f"{{{low},{high}}}"
