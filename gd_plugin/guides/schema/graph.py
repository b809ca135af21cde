"""Conjunctions -> the graph of nodes: choices multiplied out, recursion closed, what has no value removed.

In:  the root schema.
Out: `Normal`.
Kept here: every step is counted, so that no schema takes unbounded time; a schema without a value is an error.
"""

from collections.abc import Iterator
from dataclasses import replace

from gd_plugin.errors import GuideTooLargeError, UnsatisfiableGuideError, UnsupportedGuideError
from gd_plugin.guides.problem import Problem
from gd_plugin.guides.schema.branches import MAX_UNIQUE, MAX_WANTED, Branch, GraphView, least
from gd_plugin.guides.schema.document import Document
from gd_plugin.guides.schema.languages import EMPTY, Language, Words, alt
from gd_plugin.guides.schema.numbers import Numbers
from gd_plugin.guides.schema.reading import Reader
from gd_plugin.guides.schema.shapes import (
    ArrayShape,
    Contains,
    Literal,
    Normal,
    NumberShape,
    ObjectShape,
    Shape,
    TextShape,
)
from gd_plugin.guides.schema.terms import Bools, Choice, Conjunction, Members, Num, SchemaTerm, Text, Types

__all__ = ["build_graph"]

_MAX_NODES = 3_000
# conjunctions that are looked at, most of them only to prove that alternatives exclude each other
_MAX_CONJUNCTIONS = 60_000
# nodes below nodes: engines recurse into them
_MAX_NESTING = 300
_MAX_STEPS = 60_000
_MAX_BRANCHES = 400
_MAX_TEST_STEPS = 4_000
_MAX_TEST_DEPTH = 4
# what a proof costs beside its own steps
_TEST_STEPS = 6
_MAX_DROPPED = 200


class _TestLimit(Exception):
    """A proof took too long; nothing is proven."""


class _Graph:
    def __init__(self, schema: object, additional_properties: bool, dropped: frozenset[str]) -> None:
        document = Document(schema)
        self.reader = Reader(document, dropped, self._may_overlap)
        self.root = self.reader.term(document.root)
        self._numbers: dict[Conjunction, int] = {}
        self._conjunctions: list[Conjunction] = []
        self._shapes: dict[int, tuple[Shape, ...]] = {}
        # nodes with texts that only some dialects take: no proof that a value is impossible
        self._loose: set[int] = set()
        self._overlaps: dict[Conjunction, bool] = {}
        self._test_limit: int | None = None
        self.steps = 0
        self.closes = not additional_properties
        self._view = GraphView(self.node, self._key_language, self._finite_values)

    def node(self, conjunction: Conjunction) -> int:
        number = self._numbers.setdefault(conjunction, len(self._conjunctions))
        if number == len(self._conjunctions):
            self._conjunctions.append(conjunction)
            if number > _MAX_CONJUNCTIONS:
                raise _too_large("nodes", number)
        return number

    def _step(self, weight: int = 1) -> None:
        self.steps += weight
        if self._test_limit is not None and self.steps > self._test_limit:
            raise _TestLimit
        if self.steps > _MAX_STEPS:
            raise _too_large("steps", self.steps)

    def shapes(self, number: int) -> tuple[Shape, ...]:
        """The alternatives of a node."""
        if number not in self._shapes:
            found: dict[Shape, None] = {}
            for count, branch in enumerate(self._branches(number), 1):
                if count > _MAX_BRANCHES:
                    raise _too_large("alternatives of one value", count)
                for shape in branch.shapes(self._view):
                    found[shape] = None
                if branch.is_loose:
                    self._loose.add(number)
            self._shapes[number] = _merge_texts(list(found))
        return self._shapes[number]

    def _branches(self, number: int) -> Iterator[Branch]:
        conjunction = self._conjunctions[number]
        start = Branch(closes=self.closes)
        Pending = tuple[Branch, list[object], list[Choice], frozenset[SchemaTerm]]
        stack: list[Pending] = [(start, list(reversed(conjunction)), [], frozenset())]
        while stack:
            branch, terms, choices, seen = stack.pop()
            alive = True
            known = set(seen)
            while terms and alive:
                self._step()
                term = terms.pop()
                if isinstance(term, SchemaTerm):
                    if term in known:
                        continue
                    if SchemaTerm(term.index, not term.positive, ()) in known and not term.scopes:
                        alive = False
                        break
                    known.add(term)
                    known.add(SchemaTerm(term.index, term.positive, ()))
                    terms.extend(reversed(self.reader.terms(term)))
                elif isinstance(term, Choice):
                    if len(term.options) == 1:
                        terms.extend(reversed(term.options[0]))
                    elif () not in term.options or any(_has_scopes(option) for option in term.options):
                        choices.append(term)
                else:
                    if isinstance(term, Members):
                        for key, value in term.named:
                            if (fixed := self.reader.fixed_texts(value)) is not None:
                                branch.tag(key, *fixed)
                    alive = branch.narrow(term)  # type: ignore[arg-type]
            if not alive:
                if branch.is_loose:
                    self._loose.add(number)
                continue
            if not choices:
                yield branch
                continue
            choice, *later = choices
            if len(choice.options) > _MAX_BRANCHES:
                raise _too_large("alternatives of one value", len(choice.options))
            self._step(len(choice.options))
            for option in reversed(choice.options):
                stack.append((branch.copy(), list(reversed(option)), list(later), frozenset(known)))

    def _may_overlap(self, conjunction: Conjunction) -> bool:
        """Whether a conjunction may have a value; bounded, and True in doubt."""
        if conjunction not in self._overlaps:
            outer = self._test_limit
            limit = self.steps + _MAX_TEST_STEPS
            self._test_limit = limit if outer is None else min(limit, outer)
            self._overlaps[conjunction] = True
            self.steps += _TEST_STEPS
            try:
                self._overlaps[conjunction] = self._may_hold(self.node(conjunction), _MAX_TEST_DEPTH)
            except (_TestLimit, UnsupportedGuideError):
                if outer is not None and self.steps > outer:
                    raise
            finally:
                self._test_limit = outer
        return self._overlaps[conjunction]

    def _may_hold(self, number: int, depth: int) -> bool:
        if depth == 0:
            return True
        shapes = self.shapes(number)
        return number in self._loose or any(self._shape_may_hold(shape, depth) for shape in shapes)

    def _shape_may_hold(self, shape: Shape, depth: int) -> bool:
        if isinstance(shape, ObjectShape):
            return all(self._may_hold(node, depth - 1) for _, node, must in shape.declared if must)
        if isinstance(shape, ArrayShape):
            return all(self._may_hold(node, depth - 1) for node in shape.prefix[: shape.low])
        return True

    def _key_language(self, conjunction: Conjunction) -> Language:
        texts = [
            shape.language
            for shape in self.shapes(self.node((Types(frozenset({"string"})), *conjunction)))
            if isinstance(shape, TextShape)
        ]
        return alt(EMPTY, *texts)

    def _finite_values(self, conjunction: Conjunction) -> list[Conjunction] | None:
        found: dict[Conjunction, None] = {}
        for shape in self.shapes(self.node(conjunction)):
            if isinstance(shape, Literal):
                if shape.word == "null":
                    found[(Types(frozenset({"null"})),)] = None
                else:
                    found[(Types(frozenset({"boolean"})), Bools(frozenset({shape.word == "true"})))] = None
            elif isinstance(shape, TextShape) and isinstance(shape.language, Words):
                for word in sorted(shape.language.members):
                    found[(Types(frozenset({"string"})), Text(Words(frozenset({word}))))] = None
            elif isinstance(shape, NumberShape) and (values := shape.numbers.few(MAX_UNIQUE)) is not None:
                for value in values:
                    numbers = Numbers(values=frozenset({value}), digits_only=shape.numbers.digits_only)
                    found[(Types(frozenset({"number"})), Num(numbers))] = None
            else:
                return None
        return list(found)

    def build(self) -> tuple[tuple[Shape, ...], ...]:
        root = self.node(self.root)
        reached, stack = {root}, [root]
        without_cycles: set[int] = set()
        while stack:
            number = stack.pop()
            self._check_cycles(self._conjunctions[number], without_cycles)
            for child in _children(self.shapes(number)):
                if child not in reached:
                    reached.add(child)
                    stack.append(child)
            if len(reached) > _MAX_NODES:
                raise _too_large("nodes", len(reached))
        shapes = _prune({number: self._shapes[number] for number in reached})
        if not shapes[root]:
            raise UnsatisfiableGuideError(
                "#: no value satisfies this schema",
                pointer="#",
                hint="look for bounds that contradict each other, and for recursion that nothing optional ends",
            )
        shapes, root = _merge_equal(shapes, root)
        _check_nesting(shapes, root)
        return _renumber(shapes, root)

    def _check_cycles(self, conjunction: Conjunction, visited: set[int]) -> None:
        """Refuse schemas that apply themselves to the same value: they have no meaning."""
        state: dict[int, int] = {}
        for start in conjunction:
            if not isinstance(start, SchemaTerm) or start.index in visited:
                continue
            stack = [(start, iter(self.reader.inplace(start)))]
            state[start.index] = 1
            while stack:
                term, following = stack[-1]
                step = next(following, None)
                if step is None:
                    state[term.index] = 2
                    visited.add(term.index)
                    stack.pop()
                elif state.get(step.index) == 1:
                    pointer = self.reader._places[step.index].pointer
                    raise UnsatisfiableGuideError(
                        f"{pointer}: the schema refers to itself for the same value, so it has no meaning",
                        pointer=pointer,
                        keyword="$ref",
                        hint="let one of the references name a schema that says what the value is",
                    )
                elif state.get(step.index) is None and step.index not in visited:
                    state[step.index] = 1
                    stack.append((step, iter(self.reader.inplace(step))))


def _has_scopes(conjunction: Conjunction) -> bool:
    return any(isinstance(term, SchemaTerm) and term.scopes for term in conjunction)


def _too_large(what: str, value: int) -> GuideTooLargeError:
    return GuideTooLargeError(
        f"#: the schema's normal form has over {value - 1} {what}",
        pointer="#",
        limit="max_schema_steps",
        value=value,
        hint="share repeated parts with $defs, or drop alternatives",
    )


def _merge_texts(shapes: list[Shape]) -> tuple[Shape, ...]:
    """All alternatives, those that are texts as one."""
    texts = [shape.language for shape in shapes if isinstance(shape, TextShape)]
    if len(texts) < 2:
        return tuple(shapes)
    return (*(shape for shape in shapes if not isinstance(shape, TextShape)), TextShape(alt(*texts)))


def _children(shapes: tuple[Shape, ...]) -> Iterator[int]:
    for shape in shapes:
        if isinstance(shape, ObjectShape):
            yield from (node for _, node, _ in shape.declared)
            yield from (extra.node for extra in shape.extras)
        elif isinstance(shape, ArrayShape):
            yield from shape.prefix
            if shape.rest is not None:
                yield shape.rest
            if shape.contains is not None:
                yield from (shape.contains.node, shape.contains.others)
            yield from shape.choices or ()


def _prune(nodes: dict[int, tuple[Shape, ...]]) -> dict[int, tuple[Shape, ...]]:
    """Remove alternatives without a finite value, and keys and items of such nodes."""
    users: dict[int, set[int]] = {}
    for number, shapes in nodes.items():
        for child in _children(shapes):
            users.setdefault(child, set()).add(number)
    alive: set[int] = set()
    stack = list(nodes)
    while stack:
        number = stack.pop()
        if number not in alive and any(_trim(shape, alive) is not None for shape in nodes[number]):
            alive.add(number)
            stack.extend(users.get(number, ()))
    trimmed = {}
    for number, shapes in nodes.items():
        kept = [_trim(shape, alive) for shape in shapes]
        trimmed[number] = tuple(dict.fromkeys(shape for shape in kept if shape is not None))
    return trimmed


def _trim(shape: Shape, alive: set[int]) -> Shape | None:
    if isinstance(shape, ObjectShape):
        if any(must and node not in alive for _, node, must in shape.declared):
            return None
        declared = tuple(item for item in shape.declared if item[1] in alive)
        extras = tuple(extra for extra in shape.extras if extra.node in alive)
        if shape.low > len(declared) and not extras:
            return None
        if any(
            shape.wanted >> bit & 1 and not any(extra.marks >> bit & 1 for extra in extras) for bit in range(MAX_WANTED)
        ):
            return None
        return replace(shape, declared=declared, extras=extras)
    if isinstance(shape, ArrayShape):
        return _trim_array(shape, alive)
    return shape


def _trim_array(shape: ArrayShape, alive: set[int]) -> ArrayShape | None:
    prefix, rest, high = shape.prefix, shape.rest, shape.high
    dead = next((place for place, node in enumerate(prefix) if node not in alive), None)
    if dead is not None:
        prefix, rest = prefix[:dead], None
    if rest is not None and rest not in alive:
        rest = None
    if rest is None:
        high = len(prefix) if high is None else min(high, len(prefix))
    choices = shape.choices
    if choices is not None:
        choices = tuple(choice for choice in choices if choice in alive)
        high = len(choices) if high is None else min(high, len(choices))
    if high is not None and shape.low > high:
        return None
    contains = shape.contains
    if contains is not None:
        if contains.node not in alive:
            if contains.low > 0:
                return None
            contains = Contains(contains.others, 0, None, contains.others) if contains.others in alive else None
            if contains is None:
                rest, high = None, 0
                return None if shape.low else ArrayShape((), None, 0, 0)
        elif contains.others not in alive:
            # every item is one of those that are counted
            low, high = max(shape.low, contains.low), least(high, contains.high)
            return None if high is not None and low > high else ArrayShape((), contains.node, low, high)
        elif rest is None:
            return None if contains.low else ArrayShape(prefix, None, shape.low, high)
    return ArrayShape(prefix, rest, shape.low, high, contains, choices)


def _merge_equal(nodes: dict[int, tuple[Shape, ...]], root: int) -> tuple[dict[int, tuple[Shape, ...]], int]:
    """Make nodes with the same alternatives one, and again those that are the same for it."""
    while True:
        first: dict[tuple[Shape, ...], int] = {}
        same = {number: first.setdefault(shapes, number) for number, shapes in nodes.items()}
        if len(first) == len(nodes):
            return nodes, root
        root = same[root]
        nodes = {number: tuple(_renamed(shape, same) for shape in shapes) for shapes, number in first.items()}


def _check_nesting(nodes: dict[int, tuple[Shape, ...]], root: int) -> None:
    stack, seen = [(root, _children(nodes[root]))], {root}
    while stack:
        child = next(stack[-1][1], None)
        if child is None:
            stack.pop()
        elif child not in seen:
            seen.add(child)
            stack.append((child, _children(nodes[child])))
            if len(stack) > _MAX_NESTING:
                raise GuideTooLargeError(
                    f"#: values nest over {_MAX_NESTING} schemas deep",
                    pointer="#",
                    limit="max_nesting",
                    value=len(stack),
                    hint="flatten the schema",
                )


def _renumber(nodes: dict[int, tuple[Shape, ...]], root: int) -> tuple[tuple[Shape, ...], ...]:
    order, queue = {root: 0}, [root]
    for number in queue:
        for child in _children(nodes[number]):
            if child not in order:
                order[child] = len(order)
                queue.append(child)
    return tuple(tuple(_renamed(shape, order) for shape in nodes[number]) for number in queue)


def _renamed(shape: Shape, order: dict[int, int]) -> Shape:
    if isinstance(shape, ObjectShape):
        declared = tuple((key, order[node], must) for key, node, must in shape.declared)
        extras = tuple(replace(extra, node=order[extra.node]) for extra in shape.extras)
        return replace(shape, declared=declared, extras=extras)
    if isinstance(shape, ArrayShape):
        contains = shape.contains
        if contains is not None:
            contains = Contains(order[contains.node], contains.low, contains.high, order[contains.others])
        return ArrayShape(
            tuple(order[node] for node in shape.prefix),
            None if shape.rest is None else order[shape.rest],
            shape.low,
            shape.high,
            contains,
            None if shape.choices is None else tuple(order[node] for node in shape.choices),
        )
    return shape


def build_graph(schema: object, *, additional_properties: bool, strict: bool) -> Normal:
    """Return the normal form of a schema.

    Args:
        schema: a JSON value.
        additional_properties: the value of that keyword where an object that declares keys is silent.
        strict: refuse what has no normal form; False drops the keyword at fault and lists it.

    Raises:
        InvalidGuideError: not a schema.
        UnsupportedGuideError: a keyword has no normal form.
        UnsatisfiableGuideError: no value satisfies it.
        GuideTooLargeError: its normal form is too large.
    """
    dropped: dict[str, Problem] = {}
    while True:
        try:
            nodes = _Graph(schema, additional_properties, frozenset(dropped)).build()
            return Normal(nodes, tuple(dropped.values()))
        except UnsupportedGuideError as error:
            pointer = error.pointer or "#"
            if strict or pointer in dropped or len(dropped) >= _MAX_DROPPED:
                raise
            message = f"{error.message}; it is not enforced"
            dropped[pointer] = Problem(pointer, error.keyword or "", "", message)
        except RecursionError as error:
            raise GuideTooLargeError(
                "#: the schema is nested too deeply", pointer="#", limit="max_depth", hint="flatten the schema"
            ) from error
