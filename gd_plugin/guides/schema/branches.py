"""One way of satisfying a conjunction: per JSON type, what is left of it -> its shapes.

In:  atoms (terms.py), one after the other.
Out: `Branch.shapes`, with children as conjunctions that the graph turns into nodes.
Kept here: merging is intersection, type by type; a key or item that nothing allows is left out of the shape.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gd_plugin.errors import GuideTooLargeError, UnsupportedGuideError
from gd_plugin.guides.schema.digits import TooComplexError
from gd_plugin.guides.schema.languages import EMPTY, Language, Words, alt, both, is_empty, matches, negate, words
from gd_plugin.guides.schema.number_language import number_language
from gd_plugin.guides.schema.numbers import ANY_NUMBER, Numbers
from gd_plugin.guides.schema.patterns import compile_pattern
from gd_plugin.guides.schema.shapes import (
    ArrayShape,
    Contains,
    Extra,
    Literal,
    NumberShape,
    ObjectShape,
    Shape,
    TextShape,
)
from gd_plugin.guides.schema.terms import (
    ALL_TYPES,
    NEVER,
    Bools,
    Conjunction,
    ContainsItem,
    ItemCount,
    Items,
    KeyOutside,
    Keys,
    MemberCount,
    Members,
    Num,
    Refuse,
    Required,
    Term,
    Text,
    Types,
    Unevaluated,
    Unique,
)

__all__ = ["MAX_UNIQUE", "MAX_WANTED", "Branch", "GraphView", "least", "refusal"]

_MAX_KEY_CLASSES = 24
_MAX_PREFIX = 300
# bits of the parameter that says which items were written
MAX_UNIQUE = 63
# complements in one object that ask for a key that is not named
MAX_WANTED = 4


@dataclass
class GraphView:
    """What a branch asks of the graph.

    Attributes:
        node: the number of a conjunction's node.
        key_language: the texts for which a conjunction holds.
        finite_values: conjunctions of one value each that together equal a conjunction, or None.
    """

    node: Callable[[Conjunction], int]
    key_language: Callable[[Conjunction], Language]
    finite_values: Callable[[Conjunction], list[Conjunction] | None]


def refusal(pointer: str, keyword: str, message: str) -> UnsupportedGuideError:
    """The error for a keyword that has no normal form."""
    return UnsupportedGuideError(
        f"{pointer}: {message}",
        pointer=pointer,
        keyword=keyword,
        hint="remove it, or pass strict=False to have it dropped and listed",
    )


_Field = tuple[str, int, bool]


class _Wanting(NamedTuple):
    """Members of an object, and the marks that its extra keys must have among them."""

    fields: list[_Field]
    extras: list[Extra]
    wanted: int


def _split(extras: list[Extra], language: Language, mark: int) -> list[Extra]:
    """The same extra keys; those of `language` stand alone and have the mark."""
    found = []
    for extra in extras:
        inside, outside = both(extra.keys, language), both(extra.keys, negate(language))
        if is_empty(inside) is not True:
            found.append(Extra(inside, extra.node, extra.marks | mark))
        if is_empty(outside) is not True:
            found.append(Extra(outside, extra.node, extra.marks))
    return found


@dataclass
class Branch:
    """A conjunction of atoms, by type. `copy` before a choice.

    Attributes:
        is_loose: texts that only some dialects take may be left, where none is that all take.
        tags: of members that are fixed texts, those that are allowed (None: all) and those that are not.
    """

    types: frozenset[str] = ALL_TYPES
    bools: frozenset[bool] = frozenset({True, False})
    numbers: Numbers = ANY_NUMBER
    number_pointer: str = ""
    texts: list[Language] = field(default_factory=list)
    wide_texts: list[Language] = field(default_factory=list)
    is_loose: bool = False
    items: list[Items] = field(default_factory=list)
    item_count: ItemCount = field(default_factory=ItemCount)
    contains: list[ContainsItem] = field(default_factory=list)
    unique: Unique | None = None
    members: list[Members] = field(default_factory=list)
    required: dict[str, None] = field(default_factory=dict)
    tags: dict[str, tuple[frozenset[str] | None, frozenset[str]]] = field(default_factory=dict)
    member_count: MemberCount = field(default_factory=MemberCount)
    keys: list[Conjunction] = field(default_factory=list)
    keys_outside: list[KeyOutside] = field(default_factory=list)
    unevaluated: list[Unevaluated] = field(default_factory=list)
    refused: list[Refuse] = field(default_factory=list)
    closes: bool = False

    def copy(self) -> "Branch":
        """An independent branch with the same atoms."""
        return Branch(
            self.types, self.bools, self.numbers, self.number_pointer, list(self.texts), list(self.wide_texts),
            self.is_loose, list(self.items), self.item_count, list(self.contains), self.unique, list(self.members),
            dict(self.required), dict(self.tags),
            self.member_count, list(self.keys), list(self.keys_outside), list(self.unevaluated), list(self.refused),
            self.closes,
        )  # fmt: skip

    def narrow(self, term: Term) -> bool:
        """Add an atom; False when nothing is left."""
        if isinstance(term, Types):
            self.types &= term.names
        elif isinstance(term, Bools):
            self.bools &= term.values
            self._drop_if("boolean", not self.bools)
        elif isinstance(term, Num):
            self.numbers = _intersect(self.numbers, term.numbers)
            self.number_pointer = term.pointer or self.number_pointer
            self._drop_if("number", self.numbers.is_empty())
        elif isinstance(term, Text):
            self.texts.append(term.language)
            if term.wide is not None or self.wide_texts:
                self.wide_texts = [*(self.wide_texts or self.texts[:-1]), term.wide or term.language]
            # others meet once, when the branch is complete: there may be hundreds
            if any(isinstance(language, Words) for language in (self.texts[0], term.language)):
                self.texts = [both(*self.texts)]
                if "string" in self.types and self.texts[0] == EMPTY:
                    self._drop_texts()
        elif isinstance(term, ItemCount):
            self.item_count = ItemCount(max(self.item_count.low, term.low), least(self.item_count.high, term.high))
            self._drop_if("array", _crossed(self.item_count))
        elif isinstance(term, MemberCount):
            count = self.member_count
            pointer = term.pointer if term.low > count.low else count.pointer
            self.member_count = MemberCount(max(count.low, term.low), least(count.high, term.high), pointer)
            self._drop_if("object", _crossed(self.member_count))
        elif isinstance(term, Required):
            self.required.update(dict.fromkeys(term.keys))
            self._drop_if("object", any(map(self._is_wrongly_tagged, term.keys)))
        elif isinstance(term, Unique):
            self.unique = term
        elif isinstance(term, Items):
            self.items.append(term)
        elif isinstance(term, Members):
            self.members.append(term)
            self._drop_if("object", any(self._is_wrongly_tagged(key) for key, _ in term.named))
        elif isinstance(term, ContainsItem):
            self.contains.append(term)
        elif isinstance(term, Keys):
            self.keys.append(term.conjunction)
        elif isinstance(term, KeyOutside):
            self.keys_outside.append(term)
        elif isinstance(term, Unevaluated):
            self.unevaluated.append(term)
        elif isinstance(term, Refuse):
            self.refused.append(term)
        return bool(self.types)

    def tag(self, key: str, texts: frozenset[str], holds: bool) -> None:
        """Learn that the value of a member, if there is one, is among fixed texts (`holds`), or is none of them."""
        allowed, excluded = self.tags.get(key, (None, frozenset()))
        if holds:
            allowed = texts if allowed is None else allowed & texts
        self.tags[key] = (allowed, excluded if holds else excluded | texts)

    def _is_wrongly_tagged(self, key: str) -> bool:
        """Whether a member must be there and has no value. The graph would find out too, for each way of its own."""
        allowed, excluded = self.tags.get(key, (None, frozenset()))
        return key in self.required and allowed is not None and allowed <= excluded

    def _drop_texts(self) -> None:
        self.types -= {"string"}
        self.is_loose |= bool(self.wide_texts) and is_empty(both(*self.wide_texts)) is not True

    def _drop_if(self, name: str, dead: bool) -> None:
        if dead:
            self.types -= {name}

    def shapes(self, graph: GraphView) -> Iterator[Shape]:
        """The shapes of all types that are left.

        Raises:
            UnsupportedGuideError: a keyword that cannot be said matters here.
        """
        for refused in self.refused:
            if refused.type_name in self.types:
                raise refusal(refused.pointer, refused.keyword, refused.message)
        if "null" in self.types:
            yield Literal("null")
        if "boolean" in self.types:
            for value in sorted(self.bools):
                yield Literal("true" if value else "false")
        if "number" in self.types:
            yield from self._number_shape()
        if "string" in self.types:
            language = both(*self.texts)
            if is_empty(language) is not True:
                yield TextShape(language)
            else:
                self._drop_texts()
        if "array" in self.types:
            shape = self._array_shape(graph)
            if shape is not None:
                yield shape
        if "object" in self.types:
            yield from self._object_shapes(graph)

    def _number_shape(self) -> Iterator[NumberShape]:
        numbers = self.numbers.settled()
        if numbers.values == frozenset():
            return
        try:
            language = number_language(numbers)
        except TooComplexError as error:
            pointer = self.number_pointer or "#"
            raise refusal(pointer, pointer.rsplit("/", 1)[-1], f"cannot be written as a language: {error}") from error
        if language != EMPTY:
            yield NumberShape(numbers)

    def _array_shape(self, graph: GraphView) -> ArrayShape | None:
        entries = self.items
        length = max((len(entry.prefix) for entry in entries), default=0)
        if length > _MAX_PREFIX:
            raise GuideTooLargeError(
                f"#: over {_MAX_PREFIX} fixed items",
                pointer="#",
                keyword="prefixItems",
                value=length,
                hint="describe the items that are alike with items, minItems and maxItems",
            )
        prefix = [_join(self._item(entry, place) for entry in entries) for place in range(length)]
        rest = _join(entry.rest or () for entry in entries)
        for term in self._left("unevaluatedItems"):
            seen = [entry for entry in entries if term.scope in entry.scopes]
            if any(entry.rest is not None for entry in seen):
                continue
            if self.contains:
                raise refusal(term.pointer, term.keyword, "beside contains has no normal form")
            known = max((len(entry.prefix) for entry in seen), default=0)
            prefix[known:] = [_join((items, term.conjunction)) for items in prefix[known:]]
            rest = _join((rest, term.conjunction))
        low, high = self.item_count.low, self.item_count.high
        if NEVER[0] in rest:
            high = least(high, len(prefix))
        if high is not None:
            prefix = prefix[:high]
            if low > high:
                return None
        contains = self._contains(graph, prefix, rest)
        if contains is not None and any(top is not None and contains.low > top for top in (high, contains.high)):
            return None
        choices = self._choices(graph, prefix, rest, high)
        closed = NEVER[0] in rest or (high is not None and high <= len(prefix))
        return ArrayShape(
            tuple(map(graph.node, prefix)),
            None if closed else graph.node(rest),
            low,
            high,
            contains,
            choices,
        )

    @staticmethod
    def _item(entry: Items, place: int) -> Conjunction:
        return entry.prefix[place] if place < len(entry.prefix) else entry.rest or ()

    def _contains(self, graph: GraphView, prefix: list[Conjunction], rest: Conjunction) -> Contains | None:
        if not self.contains:
            return None
        term = self.contains[0]
        if len(self.contains) > 1 or prefix or self.unique:
            raise refusal(term.pointer, "contains", "beside fixed or unique items, or twice, has no normal form")
        return Contains(
            graph.node(_join((rest, term.item))), term.low, term.high, graph.node(_join((rest, term.other)))
        )

    def _choices(
        self, graph: GraphView, prefix: list[Conjunction], rest: Conjunction, high: int | None
    ) -> tuple[int, ...] | None:
        if self.unique is None or (high is not None and high <= 1):
            return None
        values = None if prefix else graph.finite_values(rest)
        if values is None or len(values) > MAX_UNIQUE:
            raise refusal(
                self.unique.pointer,
                "uniqueItems",
                f"is enforced only where an item is one of at most {MAX_UNIQUE} known values",
            )
        return tuple(graph.node(value) for value in values)

    def _object_shapes(self, graph: GraphView) -> Iterator[ObjectShape]:
        count = self.member_count
        names = both(*(graph.key_language(keys) for keys in self.keys))
        declared = dict.fromkeys(key for entry in self.members for key, _ in entry.named)
        declared.update(self.required)
        maps = [dict(entry.named) for entry in self.members]
        values = {key: self._value(key, maps) if matches(names, key) else NEVER for key in declared}
        if any(NEVER[0] in values[key] for key in self.required):
            return
        extras = [
            Extra(language, graph.node(conjunction)) for language, conjunction in self._key_classes(declared, names)
        ]
        fields = [
            (key, graph.node(values[key]), key in self.required) for key in declared if NEVER[0] not in values[key]
        ]
        low = 0 if count.low <= len(self.required) else count.low
        if count.high is not None and len(self.required) > count.high:
            return
        if low - len(self.required) > 1 and extras:
            raise refusal(
                count.pointer, "minProperties", "cannot be counted over free keys, which may be written twice"
            )
        pointer = next((entry.pointer for entry in self.members if entry.declares and entry.named), "#")
        for kept, marked, wanted in self._with_keys_outside(graph, fields, extras):
            if wanted and count.high is not None:
                if count.high - sum(must for _, _, must in kept) == 1:
                    # one key has to be all that is asked for
                    marked = [replace(extra, marks=1) for extra in marked if extra.marks & wanted == wanted]
                    wanted = 1
                if any((extra.marks & wanted).bit_count() > 1 for extra in marked):
                    term = self.keys_outside[0]
                    raise refusal(term.pointer, term.keyword, "asks for keys that are not named, beside maxProperties")
                if sum(must for _, _, must in kept) + wanted.bit_count() > count.high:
                    continue
            yield ObjectShape(tuple(kept), tuple(marked), low, count.high, wanted, pointer)

    def _with_keys_outside(self, graph: GraphView, fields: list[_Field], extras: list[Extra]) -> list[_Wanting]:
        """The members, in every way in which the languages of `keys_outside` have a key: a declared one, or another."""
        if len(self.keys_outside) > MAX_WANTED:
            term = self.keys_outside[0]
            raise refusal(term.pointer, term.keyword, f"over {MAX_WANTED} complements ask for keys that are not named")
        options = [_Wanting(fields, extras, 0)]
        for bit, term in enumerate(self.keys_outside):
            language = term.language or graph.key_language(term.conjunction)
            found = []
            for option in options:
                for wanted in (key for key, _, _ in option.fields if matches(language, key)):
                    kept = [(key, node, must or key == wanted) for key, node, must in option.fields]
                    found.append(option._replace(fields=kept))
                split = _split(option.extras, language, 1 << bit)
                if any(extra.marks >> bit & 1 for extra in split):
                    found.append(option._replace(extras=split, wanted=option.wanted | 1 << bit))
            options = found
        return options

    def _value(self, key: str, maps: list[dict[str, Conjunction]]) -> Conjunction:
        """What holds for the value of a declared key."""
        parts: list[Conjunction] = []
        evaluated: set[int] = set()
        mentioned = False
        for entry, named in zip(self.members, maps, strict=True):
            found = key in named
            if found:
                parts.append(named[key])
            sure = found
            for pattern, conjunction in entry.patterns:
                languages = compile_pattern(pattern)
                if matches(languages.wide, key):
                    parts.append(conjunction)
                    # where the dialects differ both readings hold
                    sure |= matches(languages.narrow, key)
            mentioned |= sure and entry.declares
            if not sure and entry.additional is not None:
                parts.append(entry.additional)
            if sure or entry.additional is not None:
                evaluated.update(entry.scopes)
        for term in self._left("unevaluatedProperties"):
            if term.scope not in evaluated:
                parts.append(term.conjunction)
        if not mentioned and key not in self.required and self._is_closed():
            parts.append(NEVER)
        return _join(parts)

    def _left(self, keyword: str) -> list[Unevaluated]:
        """The terms of a keyword, but for those to which another of them has left nothing."""
        terms = [term for term in self.unevaluated if term.keyword == keyword]
        done = {scope for term in terms for scope in term.scopes}
        return [term for term in terms if term.scope not in done]

    def _is_closed(self) -> bool:
        return (
            self.closes
            and any(entry.declares for entry in self.members)
            and not (
                any(entry.additional is not None for entry in self.members)
                or any(term.keyword == "unevaluatedProperties" for term in self.unevaluated)
            )
        )

    def _key_classes(self, declared: dict[str, None], names: Language) -> list[tuple[Language, Conjunction]]:
        """Languages of undeclared keys, told apart by the patterns they match, and what holds for their values."""
        patterns = list(dict.fromkeys(pattern for entry in self.members for pattern, _ in entry.patterns))
        classes: list[tuple[Language, frozenset[str]]] = [(both(names, negate(words(declared))), frozenset())]
        for pattern in patterns:
            languages = compile_pattern(pattern)
            split = []
            for language, matched in classes:
                for part, found in (
                    (both(language, languages.narrow), matched | {pattern}),
                    (both(language, negate(languages.wide)), matched),
                ):
                    if part != EMPTY and is_empty(part, 100) is not True:
                        split.append((part, found))
            classes = split
            if len(classes) > _MAX_KEY_CLASSES:
                raise GuideTooLargeError(
                    f"#: {len(patterns)} patternProperties overlap in over {_MAX_KEY_CLASSES} ways",
                    pointer="#",
                    keyword="patternProperties",
                    value=len(classes),
                    hint="use fewer patterns, or patterns that do not overlap",
                )
        merged: dict[Conjunction, Language] = {}
        for language, matched in classes:
            conjunction = self._class_value(matched)
            if NEVER[0] not in conjunction and is_empty(language) is not True:
                merged[conjunction] = alt(merged.get(conjunction, EMPTY), language)
        return [(language, conjunction) for conjunction, language in merged.items()]

    def _class_value(self, matched: frozenset[str]) -> Conjunction:
        parts: list[Conjunction] = []
        evaluated: set[int] = set()
        for entry in self.members:
            found = [conjunction for pattern, conjunction in entry.patterns if pattern in matched]
            parts.extend(found)
            if not found and entry.additional is not None:
                parts.append(entry.additional)
            if found or entry.additional is not None:
                evaluated.update(entry.scopes)
        for term in self._left("unevaluatedProperties"):
            if term.scope not in evaluated:
                parts.append(term.conjunction)
        if not matched and self._is_closed():
            parts.append(NEVER)
        return _join(parts)


def _join(parts: "Iterator[Conjunction] | list[Conjunction] | tuple[Conjunction, ...]") -> Conjunction:
    """All terms, each once."""
    return tuple(dict.fromkeys(term for part in parts for term in part))


def least(a: int | None, b: int | None) -> int | None:
    """The lower of two limits; None is no limit."""
    return b if a is None else a if b is None else min(a, b)


def _crossed(count: ItemCount | MemberCount) -> bool:
    return count.high is not None and count.low > count.high


def _intersect(a: Numbers, b: Numbers) -> Numbers:
    if b.integer is not None:
        a = a.of_kind(b.integer)
    if b.low is not None:
        a = a.at_least(b.low, b.low_open)
    if b.high is not None:
        a = a.at_most(b.high, b.high_open)
    if b.multiple is not None:
        a = a.multiples_of(b.multiple)
    if b.values is not None:
        a = a.among(b.values)
    if b.excluded:
        a = a.without(b.excluded)
    if b.digits_only:
        a = replace(a, digits_only=True)
    if b.not_multiples:
        a = replace(a, not_multiples=(*a.not_multiples, *b.not_multiples))
    return a
