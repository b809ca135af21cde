"""An object's members -> rules: a chain through the declared keys, or each of them once in any order.

In:  an `ObjectShape`, a writer of rules.
Out: what stands behind the opening brace. Extra keys stand anywhere between the declared ones.
Kept here: from every place that a rule leads to the object can end, so that no mask leads nowhere. What was counted, and
which keys were written, is in a rule's parameter of 63 bits: rules are not multiplied by it.
Source: llguidance, docs/parametric.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gd_plugin.errors import GuideTooLargeError
from gd_plugin.guides.schema.shapes import ObjectShape

__all__ = ["MAX_UNORDERED", "PropertyOrder", "RuleWriter", "is_orderable", "members", "when"]

PropertyOrder = Literal["declared", "any"]
# bits of a parameter: one for each key, and some where members are counted
MAX_UNORDERED = 63
_ALWAYS = "ge(_, 0)"
# chains of rules: the engine recurses into them
_MAX_COUNTED = 200


class RuleWriter(Protocol):
    """What is asked of the writer of the grammar."""

    def fresh(self) -> str:
        """A name for a rule that is written later."""

    def rule(self, name: str, options: list[str], *, parametric: bool = False) -> str:
        """Add a rule; its name."""

    def new_rule(self, options: list[str]) -> str:
        """Add a rule without a parameter; its name."""

    def key(self, language_or_key: object) -> str:
        """The terminal of a key and its colon."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """On the members that need not be there; the others are there in the end in any case.

    Attributes:
        low, high: how many of them there are, beside those that are wanted.
        wanted: marks that extra keys must have among them; the first of each is not counted.
        first: the first bit of the parameter that holds their marks; the count stands behind them.
    """

    low: int
    high: int | None
    wanted: int
    first: int = 0

    @property
    def top(self) -> int:
        """Counts from here on are the same; 0 where nothing need be counted."""
        return max(self.low, 0 if self.high is None else self.high + 1)

    @property
    def num_bits(self) -> int:
        """Bits of the parameter that are used."""
        return self.top.bit_length() + self.wanted.bit_length()

    @property
    def bits(self) -> str:
        start = self.first + self.wanted.bit_length()
        return f"[{start}:{start + self.top.bit_length()}]"

    @property
    def one(self) -> int:
        """The parameter of a count of 1."""
        return 1 << (self.first + self.wanted.bit_length()) if self.top else 0

    @property
    def more(self) -> str:
        """The parameter with one more counted."""
        return f"incr({self.bits})" if self.top else "_"

    @property
    def room(self) -> str:
        """The condition under which one more is allowed."""
        return "" if self.high is None else f"lt({self.bits}, {self.high})"

    def at_least(self, count: int) -> str:
        """The condition that so many were counted."""
        return f"ge({self.bits}, {count})" if count > 0 else ""

    @property
    def met(self) -> list[str]:
        """The conditions under which the object may end."""
        marks = [f"bit_set({self.first + bit})" for bit in range(self.wanted.bit_length()) if self.wanted >> bit & 1]
        return [*marks, self.at_least(self.low)]

    def after_extra(self, marks: int) -> int | None:
        """The parameter behind an extra key that is the first member; None where it cannot be."""
        if marks:
            return marks << self.first
        return self.one if self.high != 0 else None

    def extra(self, member: str, marks: int, rule: str) -> list[str]:
        """An extra key as a later member, `rule` behind it."""
        counted = f"COMMA {member} {rule}::{self.more}"
        if not marks:
            return [when(counted, self.room)]
        found = marks << self.first
        marked = f"COMMA {member} {rule}::bit_or({found})"
        if self.high is None:
            return [marked]
        # one bit, see `Branch`
        bit = found.bit_length() - 1
        return [when(marked, f"bit_clear({bit})"), when(counted, f"bit_set({bit})", self.room)]


def _bounds(shape: ObjectShape, first: int = 0) -> _Bounds:
    required = sum(must for _, _, must in shape.declared)
    passable = shape.high is not None and (shape.extras or shape.high < len(shape.declared))
    high = shape.high - required - shape.wanted.bit_count() if shape.high is not None and passable else None
    # a key that is wanted is one more than those required, and no more than one is asked for beside extra keys
    low = 0 if shape.wanted else max(shape.low - required, 0)
    return _Bounds(low, high, shape.wanted, first)


def is_orderable(shape: ObjectShape) -> bool:
    """Whether the members of an object can be written in any order: its keys, and their count, fit into a parameter."""
    return len(shape.declared) + _bounds(shape).num_bits <= MAX_UNORDERED


def when(option: str, *conditions: str) -> str:
    """An option of a rule, for parameters that meet all conditions; an empty one is always met."""
    needed = [condition for condition in conditions if condition]
    if not needed:
        return option
    joined = needed[0]
    for condition in needed[1:]:
        joined = f"and({joined}, {condition})"
    return f"{option} %if {joined}"


def members(writer: RuleWriter, shape: ObjectShape, order: PropertyOrder) -> str:
    """Everything behind the opening brace.

    Raises:
        GuideTooLargeError: the members of an object with too many declared keys are counted.
    """
    extras: dict[int, list[str]] = {}
    for extra in shape.extras:
        extras.setdefault(extra.marks & shape.wanted, []).append(f"{writer.key(extra.keys)} n{extra.node}")
    free = [(writer.new_rule(texts) if len(texts) > 1 else texts[0], marks) for marks, texts in extras.items()]
    fields = [f"{writer.key(key)} n{node}" for key, node, _ in shape.declared]
    if order == "any" and len(fields) > 1 and is_orderable(shape):
        return _unordered(writer, shape, fields, free)
    if _bounds(shape).num_bits == 0:
        return _chain(writer, shape, fields, free[0][0] if free else "")
    if len(fields) > _MAX_COUNTED:
        raise GuideTooLargeError(
            f"{shape.pointer}: members of an object with over {_MAX_COUNTED} declared keys cannot be counted",
            pointer=shape.pointer,
            limit="max_schema_rules",
            hint="leave minProperties and maxProperties out, or declare fewer keys",
        )
    return _counted_chain(writer, shape, fields, free)


# extra members, and which marks they have
_Free = list[tuple[str, int]]


def _unordered(writer: RuleWriter, shape: ObjectShape, fields: Sequence[str], free: _Free) -> str:
    """Each declared key once, in any order: bit k of the parameter is set behind the key of place k."""
    # required keys first: that all of them were written is then one range of bits
    places = sorted(range(len(fields)), key=lambda place: not shape.declared[place][2])
    num_required = sum(must for _, _, must in shape.declared)
    bounds = _bounds(shape, first=len(fields))
    behind = writer.fresh()
    # without bounds, extra keys need no step of their own: steps nest, and the engine's work grows with their depth
    others = f" {writer.new_rule([f'(COMMA {free[0][0]})*'])}" if free and not bounds.num_bits else ""
    first, later = [], []
    for bit, place in enumerate(places):
        member, must = fields[place] + others, bit < num_required
        if must or bounds.high != 0:
            first.append(f"{member} {behind}::{(1 << bit) | (0 if must else bounds.one)}")
        following = f"{member} {behind}::set_bit({bit})"
        if bounds.top and not must:
            # a parameter changes in one way at a time
            following = _Target.rule(writer, [following]).at(bounds.more)
        later.append(when(f"COMMA {following}", f"bit_clear({bit})", "" if must else bounds.room))
    for extra, marks in free:
        if (value := bounds.after_extra(marks)) is not None:
            first.append(f"{extra}{others} {behind}::{value}")
        if bounds.num_bits:
            later.extend(bounds.extra(extra, marks, behind))
    complete = f"is_ones([0:{num_required}])" if num_required else ""
    later.append(when("CLOSE_OBJECT", complete, *bounds.met))
    if num_required == 0 and not any(bounds.met):
        first.append('"}"')
    writer.rule(behind, later, parametric=True)
    return writer.new_rule(first)


def _chain(writer: RuleWriter, shape: ObjectShape, fields: Sequence[str], extra: str) -> str:
    """Declared keys in order; halves of halves, because the engine recurses into nested rules."""
    others = f" {writer.new_rule([f'(COMMA {extra})*'])}" if extra else ""
    fields = [f"{member}{others}" for member in fields]
    later = [
        f"COMMA {member}" if must else f"(COMMA {member})?"
        for member, (_, _, must) in zip(fields, shape.declared, strict=True)
    ]
    spans: dict[tuple[int, int], str] = {}

    def span(low: int, high: int) -> str:
        """The members `low` to `high`, each behind a comma."""
        if (low, high) not in spans:
            if high - low <= 4:
                spans[low, high] = writer.new_rule([" ".join(later[low:high])])
            else:
                middle = (low + high) // 2
                spans[low, high] = writer.new_rule([f"{span(low, middle)} {span(middle, high)}"])
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
    return writer.new_rule(options)


def _counted_chain(writer: RuleWriter, shape: ObjectShape, fields: Sequence[str], free: _Free) -> str:
    """Declared keys in order, and the parameter counts members that need not be there, or holds their marks.

    Per place three rules: nothing was written yet; a declared key or the end is next; or an extra key before that.
    """
    bounds = _bounds(shape)
    start = "" if any(bounds.met) else '"}"'
    declared = _Target.rule(writer, [when("CLOSE_OBJECT", *bounds.met)])
    open_to_extras = _with_extras(writer, declared, free, bounds)
    still_optional = 0
    for member, (_, _, must) in reversed(list(zip(fields, shape.declared, strict=True))):
        step = open_to_extras.at("_" if must else bounds.more)
        later = [when(f"COMMA {member} {step}", "" if must else bounds.room)]
        first = [f"{member} {open_to_extras.at(0 if must else bounds.one)}"] if must or bounds.high != 0 else []
        if not must:
            # extra keys can always make up for one that is left out
            needed = 0 if free else bounds.low - still_optional
            later.append(when(declared.at("_"), bounds.at_least(needed)))
            if start and needed <= 0:
                first.append(start)
            still_optional += 1
        declared = _Target.rule(writer, later)
        open_to_extras = _with_extras(writer, declared, free, bounds)
        start = writer.new_rule(first) if first else ""
    options = [start] if start else []
    for extra, marks in free:
        if (value := bounds.after_extra(marks)) is not None:
            options.append(f"{extra} {open_to_extras.at(value)}")
    return writer.new_rule(options)


@dataclass(frozen=True, slots=True)
class _Target:
    """A rule that has a parameter only if something in it asks for one: the engine refuses others."""

    name: str
    parametric: bool

    @classmethod
    def rule(cls, writer: RuleWriter, options: list[str]) -> "_Target":
        parametric = any("::" in option or "%if" in option for option in options)
        if parametric and len(options) == 1:
            # the engine writes rules with one unconditional option into their user, but not their parameter (1.9.1)
            options = [when(options[0], "" if "%if" in options[0] else _ALWAYS)]
        return cls(writer.rule(writer.fresh(), options, parametric=parametric), parametric)

    def at(self, parameter: str | int) -> str:
        """Its use with a parameter."""
        return f"{self.name}::{parameter}" if self.parametric else self.name


def _with_extras(writer: RuleWriter, declared: _Target, free: _Free, bounds: _Bounds) -> _Target:
    if not free:
        return declared
    name = writer.fresh()
    more = [option for extra, marks in free for option in bounds.extra(extra, marks, name)]
    return _Target(writer.rule(name, [declared.at("_"), *more], parametric=True), True)
