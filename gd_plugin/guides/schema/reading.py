"""Keywords -> terms: what a subschema says, and what its complement says.

In:  a `Subschema`.
Out: a conjunction of terms that equals it (`assertion`) or its complement (`negation`).
Kept here: the drafts' differences; what cannot be said becomes `Refuse`, never silence.
Source: JSON Schema core and validation, drafts 4, 6, 7, 2019-09, 2020-12.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from gd_plugin.errors import InvalidGuideError
from gd_plugin.guides.schema.document import Document, Subschema, escape_pointer
from gd_plugin.guides.schema.formats import COMPLEMENTED, REFUSED, format_language
from gd_plugin.guides.schema.languages import ANY_CHAR, Language, both, negate, repeat, words
from gd_plugin.guides.schema.numbers import ANY_NUMBER, Numbers, read_number
from gd_plugin.guides.schema.patterns import Pattern, PatternError, compile_pattern
from gd_plugin.guides.schema.terms import (
    ALL_TYPES,
    NEVER,
    Bools,
    Choice,
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
    SchemaTerm,
    Term,
    Text,
    Types,
    Unevaluated,
    Unique,
    without_type,
)

__all__ = ["Reader", "known_keywords"]

_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if",), 7),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$recursiveRef"), 2019
    ),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
_UNTIL = {"dependencies": 7, "$recursiveRef": 2019}
# a count that no output of a model reaches says nothing
_UNREACHABLE = 1 << 24
_LONGEST = 1 << 20
# parts of an anyOf that are also tried together
_MAX_JOINED = 5


def known_keywords() -> tuple[str, ...]:
    """The keywords that are read, beside those read together with another."""
    return (*_READERS, *_INPLACE)


def scalar_type(value: Any) -> str:
    """The JSON type of a value, integers being numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def value_terms(values: list[Any]) -> Conjunction:
    """The terms for a value that equals one of `values`."""
    scalars = [value for value in values if not isinstance(value, list | dict)]
    options: list[Conjunction] = []
    if scalars:
        options.append(
            (
                Types(frozenset(map(scalar_type, scalars))),
                Bools(frozenset(value for value in scalars if isinstance(value, bool))),
                Num(Numbers(values=_numbers(scalars))),
                Text(words(value for value in scalars if isinstance(value, str))),
            )
        )
    for value in values:
        if isinstance(value, list):
            items = Items(tuple(value_terms([item]) for item in value), NEVER)
            options.append((Types(frozenset({"array"})), items, ItemCount(len(value), len(value))))
        elif isinstance(value, dict):
            named = tuple((key, value_terms([item])) for key, item in value.items())
            members = Members(named, additional=NEVER, declares=False)
            options.append((Types(frozenset({"object"})), members, Required(tuple(value))))
    return options[0] if len(options) == 1 else (Choice(tuple(options)),)


def other_value_terms(values: list[Any], pointer: str, keyword: str) -> Conjunction:
    """The terms for a value that equals none of `values`."""
    scalars = [value for value in values if not isinstance(value, list | dict)]
    terms: list[Term] = []
    if None in scalars:
        terms.append(without_type("null"))
    terms.append(Bools(frozenset({True, False}) - {value for value in scalars if isinstance(value, bool)}))
    terms.append(Num(Numbers(excluded=_numbers(scalars))))
    terms.append(Text(negate(words(value for value in scalars if isinstance(value, str)))))
    for value in values:
        options: list[Conjunction] = []
        if isinstance(value, list):
            options = [(without_type("array"),), (ItemCount(len(value) + 1),)]
            if value:
                options.append((ItemCount(0, len(value) - 1),))
            for place, item in enumerate(value):
                other = other_value_terms([item], pointer, keyword)
                options.append((ItemCount(place + 1), Items((*((),) * place, other), None)))
        elif isinstance(value, dict):
            options = [(without_type("object"),), (KeyOutside(negate(words(value)), pointer, keyword),)]
            for key, item in value.items():
                other = other_value_terms([item], pointer, keyword)
                options.append((Members(((key, NEVER),), declares=False),))
                options.append((Required((key,)), Members(((key, other),), declares=False)))
        if options:
            terms.append(Choice(tuple(options)))
    return tuple(terms)


def _numbers(values: list[Any]) -> frozenset[Fraction]:
    return frozenset(read_number(value) for value in values if scalar_type(value) == "number")


class Reader:
    """Reads the subschemas of one document, each once.

    Attributes:
        dropped: pointers of keywords that are left out.
    """

    def __init__(self, document: Document, dropped: frozenset[str], overlap: Callable[[Conjunction], bool]) -> None:
        self.document = document
        self.dropped = dropped
        self._overlap = overlap
        self._places: list[Subschema] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._read: dict[SchemaTerm, Conjunction] = {}

    def term(self, place: Subschema) -> Conjunction:
        """The term for a subschema; nothing for one that says nothing."""
        value = place.value
        if value is True or value == {}:
            return ()
        if value is False:
            return NEVER
        key = (place.pointer, place.base)
        if key not in self._numbers:
            self._numbers[key] = len(self._places)
            self._places.append(place)
        return (SchemaTerm(self._numbers[key]),)

    def terms(self, term: SchemaTerm) -> Conjunction:
        """What a subschema, or its complement, says."""
        if term not in self._read:
            place = self._places[term.index]
            self._read[term] = self._assertion(place, term) if term.positive else self._negation(place)
        return self._read[term]

    def inplace(self, term: SchemaTerm) -> list[SchemaTerm]:
        """The subschemas that apply to the same value; for finding cycles."""
        place = self._places[term.index]
        found: list[SchemaTerm] = []
        for keyword in self._keywords(place):
            if keyword in _INPLACE or keyword in ("then", "else"):
                value = place.value[keyword]
                parts: list[Conjunction] = []
                if keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                    parts = [self.term(self.document.resolve(place, keyword, value))]
                elif isinstance(value, list):
                    parts = [self.child(place, item, keyword, index) for index, item in enumerate(value)]
                elif keyword in ("dependentSchemas", "dependencies"):
                    if isinstance(value, dict):
                        parts = [
                            self.child(place, item, keyword, key)
                            for key, item in value.items()
                            if not isinstance(item, list)
                        ]
                else:
                    parts = [self.child(place, value, keyword)]
                found.extend(part for terms in parts for part in terms if isinstance(part, SchemaTerm))
        return found

    def child(self, place: Subschema, value: Any, *path: str | int) -> Conjunction:
        """The term for the subschema at `path` below `place`."""
        return self.term(self.document.child(place, value, *path))

    def _keywords(self, place: Subschema) -> list[str]:
        """Keywords of the schema that its draft knows and that are not left out."""
        value = place.value
        if place.draft <= 7 and "$ref" in value:
            return ["$ref"] if f"{place.pointer}/$ref" not in self.dropped else []
        return [
            key
            for key in value
            if (key in _READERS or key in _INPLACE or key in ("then", "else"))
            and _SINCE.get(key, 0) <= place.draft <= _UNTIL.get(key, 9999)
            and (f"{place.pointer}/{key}" not in self.dropped or key == "oneOf")
        ]

    def _assertion(self, place: Subschema, term: SchemaTerm) -> Conjunction:
        keywords = self._keywords(place)
        scopes = term.scopes
        if "unevaluatedProperties" in keywords or "unevaluatedItems" in keywords:
            scopes = (*scopes, term.index)
        found: list[Term] = []
        for keyword in keywords:
            if keyword in _READERS:
                found.extend(_READERS[keyword](self, place, scopes))
            elif keyword in _INPLACE:
                found.extend(_INPLACE[keyword](self, place, scopes))
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in keywords:
                conjunction = self.child(place, place.value[keyword], keyword)
                found.append(Unevaluated(keyword, term.index, conjunction, f"{place.pointer}/{keyword}"))
        return tuple(found)

    def _negation(self, place: Subschema) -> Conjunction:
        options: list[Conjunction] = []
        for keyword in self._keywords(place):
            if keyword in _NEGATIONS:
                options.extend(_NEGATIONS[keyword](self, place))
            elif keyword in ("unevaluatedProperties", "unevaluatedItems"):
                kind = "object" if keyword == "unevaluatedProperties" else "array"
                options.append(self._refusal(kind, place, keyword, "has no complement that can be written"))
        return (Choice(tuple(options)),)

    def _refuse(self, kind: str, place: Subschema, keyword: str, message: str) -> Refuse:
        return Refuse(kind, f"{place.pointer}/{keyword}", keyword, message)

    def _refusal(self, kind: str, place: Subschema, keyword: str, message: str) -> Conjunction:
        """A value of the type `kind`, refused: the complement of a keyword that speaks of that type alone."""
        return (Types(frozenset({kind})), self._refuse(kind, place, keyword, message))

    def invert(self, conjunction: Conjunction) -> Conjunction:
        """The complement of a subschema's term."""
        if conjunction == ():
            return NEVER
        if conjunction == NEVER:
            return ()
        (term,) = conjunction
        if not isinstance(term, SchemaTerm):
            raise TypeError(f"not a subschema: {term!r}")
        return (SchemaTerm(term.index, not term.positive),)

    def pattern(self, place: Subschema, value: Any, *path: str) -> Pattern | Refuse:
        """The languages of a pattern, or why there are none.

        Raises:
            InvalidGuideError: not an ECMA-262 expression.
        """
        pointer = "/".join([place.pointer, *map(escape_pointer, path)])
        if not isinstance(value, str):
            raise InvalidGuideError(
                f"{pointer}: a pattern is text", pointer=pointer, keyword=path[0], hint="write the pattern as a string"
            )
        try:
            return compile_pattern(value)
        except PatternError as error:
            if error.unsupported:
                kind = "string" if path[0] == "pattern" else "object"
                return Refuse(kind, f"{place.pointer}/{path[0]}", path[0], str(error))
            raise InvalidGuideError(
                f"{pointer}: {error}",
                pointer=pointer,
                keyword=path[0],
                hint="correct the pattern; patterns in a schema are ECMA-262 expressions",
            ) from error

    def overlap(self, *terms: Conjunction) -> bool:
        """Whether a value may satisfy all of them; False is a proof that none does."""
        return self._overlap(tuple(term for conjunction in terms for term in conjunction))


def _fail(place: Subschema, keyword: str, needed: str) -> InvalidGuideError:
    pointer = f"{place.pointer}/{keyword}"
    found = place.value[keyword]
    return InvalidGuideError(
        f"{pointer}: {needed}, got {str(found)[:40]!r}",
        pointer=pointer,
        keyword=keyword,
        hint=f"correct the value of {keyword}, or remove the keyword",
    )


def _number(place: Subschema, keyword: str) -> Fraction:
    value = place.value[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fail(place, keyword, "a number is needed")
    return read_number(value)


def _count(place: Subschema, keyword: str) -> int:
    value = _number(place, keyword)
    if value < 0 or value.denominator != 1:
        raise _fail(place, keyword, "a whole number that is not negative is needed")
    return int(value)


def _list(place: Subschema, keyword: str) -> list[Any]:
    value = place.value[keyword]
    if not isinstance(value, list):
        raise _fail(place, keyword, "an array is needed")
    return value


def _dict(place: Subschema, keyword: str) -> dict[str, Any]:
    value = place.value[keyword]
    if not isinstance(value, dict):
        raise _fail(place, keyword, "an object is needed")
    return value


def _names(place: Subschema, keyword: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _fail(place, keyword, "an array of texts is needed")
    return tuple(dict.fromkeys(value))


_Scopes = tuple[int, ...]


def _type_terms(names: set[str], negative: bool, draft: int) -> Conjunction:
    """Types by name; "integer" is a kind of number."""
    plain = frozenset(names - {"integer"})
    if negative:
        if "integer" in names and "number" not in names:
            return (Types(ALL_TYPES - plain), Num(ANY_NUMBER.of_kind(False)))
        return (Types(ALL_TYPES - plain),)
    if "integer" in names and "number" not in names:
        # up to draft 4, 1.0 is no integer
        return (Types(plain | {"number"}), Num(replace(ANY_NUMBER.of_kind(True), digits_only=draft == 4)))
    return (Types(plain),)


def _type_names(place: Subschema) -> set[str]:
    value = place.value["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or name not in ALL_TYPES | {"integer"}:
            raise _fail(place, "type", "a type is null, boolean, integer, number, string, array or object")
    return set(names)


def _values(place: Subschema, keyword: str) -> list[Any]:
    if keyword == "const":
        return [place.value["const"]]
    return _list(place, "enum")


def _bounds(place: Subschema, keyword: str) -> Numbers:
    bound = place.value[keyword]
    if place.draft == 4 and keyword.startswith("exclusive"):
        if not isinstance(bound, bool):
            raise _fail(place, keyword, "draft 4 has a boolean here")
        return ANY_NUMBER
    bound = _number(place, keyword)
    is_open = keyword.startswith("exclusive")
    if keyword in ("minimum", "exclusiveMinimum"):
        if place.draft == 4:
            is_open = place.value.get("exclusiveMinimum") is True
        return ANY_NUMBER.at_least(bound, is_open)
    if place.draft == 4:
        is_open = place.value.get("exclusiveMaximum") is True
    return ANY_NUMBER.at_most(bound, is_open)


def _not_bounds(place: Subschema, keyword: str) -> list[Conjunction]:
    numbers = _bounds(place, keyword)
    if numbers.low is not None:
        outside = ANY_NUMBER.at_most(numbers.low, not numbers.low_open)
    elif numbers.high is not None:
        outside = ANY_NUMBER.at_least(numbers.high, not numbers.high_open)
    else:
        return []
    return [(Types(frozenset({"number"})), Num(outside))]


def _step(place: Subschema) -> Fraction:
    step = _number(place, "multipleOf")
    if step <= 0:
        raise _fail(place, "multipleOf", "a number over 0 is needed")
    return step


def _length(place: Subschema, keyword: str) -> Language:
    count = _count(place, keyword)
    if keyword == "minLength":
        return repeat(ANY_CHAR, count, None)
    return repeat(ANY_CHAR, 0, None if count >= _UNREACHABLE else count)


def _read_min_length(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    if _count(place, "minLength") > _LONGEST:
        return (reader._refuse("string", place, "minLength", f"a text of over {_LONGEST} characters is needed"),)
    return (Text(_length(place, "minLength")),)


def _not_length(keyword: str) -> Callable[[Reader, Subschema], list[Conjunction]]:
    return lambda reader, place: [(Types(frozenset({"string"})), Text(negate(_length(place, keyword))))]


def _read_pattern(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    pattern = reader.pattern(place, place.value["pattern"], "pattern")
    return (pattern if isinstance(pattern, Refuse) else Text(pattern.narrow),)


def _not_pattern(reader: Reader, place: Subschema) -> list[Conjunction]:
    pattern = reader.pattern(place, place.value["pattern"], "pattern")
    outside: Term = pattern if isinstance(pattern, Refuse) else Text(negate(pattern.wide))
    return [(Types(frozenset({"string"})), outside)]


def _read_format(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    name = place.value["format"]
    if not isinstance(name, str):
        raise _fail(place, "format", "a format's name is needed")
    if name in REFUSED:
        return (reader._refuse("string", place, "format", f"what {name!r} asks is not regular"),)
    language = format_language(name)
    return () if language is None else (Text(language),)


def _not_format(reader: Reader, place: Subschema) -> list[Conjunction]:
    terms = _read_format(reader, place, ())
    if not terms:
        return []
    name, term = place.value["format"], terms[0]
    if isinstance(term, Text) and name in COMPLEMENTED:
        return [(Types(frozenset({"string"})), Text(negate(term.language)))]
    return [reader._refusal("string", place, "format", f"{name!r} has no complement that can be written")]


def _read_items(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    value = place.value
    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction | None = None
    tuple_key = "prefixItems" if "prefixItems" in value and place.draft >= 2020 else "items"
    if isinstance(value.get(tuple_key), list):
        if f"{place.pointer}/{tuple_key}" not in reader.dropped:
            prefix = tuple(reader.child(place, item, tuple_key, i) for i, item in enumerate(value[tuple_key]))
        rest_key = "items" if tuple_key == "prefixItems" else "additionalItems"
    else:
        rest_key = "items"
    if rest_key in value and f"{place.pointer}/{rest_key}" not in reader.dropped:
        rest = reader.child(place, value[rest_key], rest_key)
    return (Items(prefix, rest, scopes),)


def _read_items_once(keyword: str) -> Callable[[Reader, Subschema, _Scopes], Conjunction]:
    """`prefixItems`, `items` and `additionalItems` are read together, with the first of them."""

    def read(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
        first = next(key for key in reader._keywords(place) if key in ("prefixItems", "items", "additionalItems"))
        return _read_items(reader, place, scopes) if keyword == first else ()

    return read


def _not_items(keyword: str) -> Callable[[Reader, Subschema], list[Conjunction]]:
    def negation(reader: Reader, place: Subschema) -> list[Conjunction]:
        terms = _read_items_once(keyword)(reader, place, ())
        options: list[Conjunction] = []
        for term in terms:
            if not isinstance(term, Items):
                continue
            array = Types(frozenset({"array"}))
            for index, item in enumerate(term.prefix):
                wrong = Items((*((),) * index, reader.invert(item)), None)
                options.append((array, ItemCount(index + 1), wrong))
            if term.rest == NEVER:
                options.append((array, ItemCount(len(term.prefix) + 1)))
            elif term.rest:
                if term.prefix:
                    options.append(reader._refusal("array", place, "items", "behind fixed items has no complement"))
                else:
                    other = reader.invert(term.rest)
                    options.append((array, ContainsItem(other, (), 1, None, f"{place.pointer}/items")))
        return options

    return negation


def _read_contains(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    item = reader.child(place, place.value["contains"], "contains")
    modern = place.draft >= 2019
    low = _count(place, "minContains") if modern and "minContains" in place.value else 1
    high = _count(place, "maxContains") if modern and "maxContains" in place.value else None
    if low == 0 and high is None:
        return ()
    other = reader.invert(item) if high is not None else ()
    return (ContainsItem(item, other, low, high, f"{place.pointer}/contains"),)


def _not_contains(reader: Reader, place: Subschema) -> list[Conjunction]:
    array = Types(frozenset({"array"}))
    options: list[Conjunction] = []
    for term in _read_contains(reader, place, ()):
        if isinstance(term, ContainsItem):
            outside = reader.invert(term.item)
            if term.low == 1:
                options.append((array, Items((), outside)))
            elif term.low:
                options.append((array, ContainsItem(term.item, outside, 0, term.low - 1, term.pointer)))
            if term.high is not None:
                options.append((array, ContainsItem(term.item, (), term.high + 1, None, term.pointer)))
    return options


def _read_members(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    value, refused = place.value, []
    keywords = reader._keywords(place)
    named: tuple[tuple[str, Conjunction], ...] = ()
    if "properties" in keywords:
        named = tuple(
            (key, reader.child(place, item, "properties", key)) for key, item in _dict(place, "properties").items()
        )
    patterns: list[tuple[str, Conjunction]] = []
    if "patternProperties" in keywords:
        for key, item in _dict(place, "patternProperties").items():
            pattern = reader.pattern(place, key, "patternProperties", key)
            if isinstance(pattern, Refuse):
                refused.append(pattern)
            patterns.append((key, reader.child(place, item, "patternProperties", key)))
    additional = None
    if "additionalProperties" in keywords:
        additional = reader.child(place, value["additionalProperties"], "additionalProperties")
    if refused:
        return tuple(refused)
    declares = bool(named or patterns)
    pointer = f"{place.pointer}/properties" if named else place.pointer
    return (Members(named, tuple(patterns), additional, scopes, declares, pointer),)


_MEMBERS = ("properties", "patternProperties", "additionalProperties")


def _read_members_once(keyword: str) -> Callable[[Reader, Subschema, _Scopes], Conjunction]:
    """The three keywords that give an object's values are read together, with the first of them."""

    def read(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
        first = next(key for key in reader._keywords(place) if key in _MEMBERS)
        return _read_members(reader, place, scopes) if keyword == first else ()

    return read


def _not_members(keyword: str) -> Callable[[Reader, Subschema], list[Conjunction]]:
    def negation(reader: Reader, place: Subschema) -> list[Conjunction]:
        options: list[Conjunction] = []
        for term in _read_members_once(keyword)(reader, place, ()):
            kind = Types(frozenset({"object"}))
            if not isinstance(term, Members):
                return [(kind, term)]
            for key, item in term.named:
                other = Members(((key, reader.invert(item)),), declares=False)
                options.append((kind, Required((key,)), other))
            for pattern, item in term.patterns:
                # a key written twice counts by its last value, so a wrong value cannot be held fast
                if item == NEVER:
                    language = compile_pattern(pattern).narrow
                    options.append((kind, KeyOutside(language, place.pointer, "patternProperties")))
                elif item != ():
                    options.append(reader._refusal("object", place, "patternProperties", "has no complement"))
            if term.additional == NEVER:
                outside = [negate(words(key for key, _ in term.named))]
                outside.extend(negate(compile_pattern(pattern).wide) for pattern, _ in term.patterns)
                language = outside[0]
                for part in outside[1:]:
                    language = both(language, part)
                options.append((kind, KeyOutside(language, place.pointer, "additionalProperties")))
            elif term.additional:
                options.append(reader._refusal("object", place, "additionalProperties", "has no complement"))
        return options

    return negation


def _read_dependencies(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    found: list[Term] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if keyword in reader._keywords(place):
            for key, value in _dict(place, keyword).items():
                terms = _dependency(reader, place, keyword, key, value, scopes)
                absent = Members(((key, NEVER),), declares=False)
                found.append(Choice(((without_type("object"),), (absent,), (Required((key,)), *terms))))
    return tuple(found)


def _dependency(reader: Reader, place: Subschema, keyword: str, key: str, value: Any, scopes: _Scopes) -> Conjunction:
    if keyword != "dependentSchemas" and isinstance(value, list):
        return (Required(_names(place, keyword, value)),)
    return _scoped(reader.child(place, value, keyword, key), scopes)


def _read_dependencies_once(keyword: str) -> Callable[[Reader, Subschema, _Scopes], Conjunction]:
    def read(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
        names = ("dependentRequired", "dependentSchemas", "dependencies")
        first = next(key for key in reader._keywords(place) if key in names)
        return _read_dependencies(reader, place, scopes) if keyword == first else ()

    return read


def _not_dependencies(keyword: str) -> Callable[[Reader, Subschema], list[Conjunction]]:
    def negation(reader: Reader, place: Subschema) -> list[Conjunction]:
        options: list[Conjunction] = []
        for key, value in _dict(place, keyword).items():
            start: Conjunction = (Types(frozenset({"object"})), Required((key,)))
            if keyword != "dependentSchemas" and isinstance(value, list):
                for name in _names(place, keyword, value):
                    options.append((*start, Members(((name, NEVER),), declares=False)))
            else:
                options.append((*start, *reader.invert(reader.child(place, value, keyword, key))))
        return options

    return negation


def _scoped(conjunction: Conjunction, scopes: _Scopes) -> Conjunction:
    if not scopes:
        return conjunction
    return tuple(
        SchemaTerm(term.index, term.positive, scopes) if isinstance(term, SchemaTerm) else term for term in conjunction
    )


def _parts(reader: Reader, place: Subschema, keyword: str) -> list[Conjunction]:
    parts = _list(place, keyword)
    if not parts:
        raise _fail(place, keyword, "an array with at least one schema is needed")
    return [reader.child(place, item, keyword, index) for index, item in enumerate(parts)]


def _read_any_of(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    parts = [_scoped(part, scopes) for part in _parts(reader, place, "anyOf")]
    if not scopes:
        return (Choice(tuple(parts)),)
    # each part that holds has evaluated something, so more than one may have to
    most = len(parts) if len(parts) <= _MAX_JOINED else 1
    options = [
        tuple(term for part in chosen for term in part)
        for count in range(1, most + 1)
        for chosen in combinations(parts, count)
    ]
    return (Choice(tuple(options)),)


def _read_one_of(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    parts = _parts(reader, place, "oneOf")
    if f"{place.pointer}/oneOf" in reader.dropped:
        return (Choice(tuple(_scoped(part, scopes) for part in parts)),)
    # keywords beside oneOf help to prove that its parts exclude each other
    beside: list[Term] = []
    for keyword in reader._keywords(place):
        if keyword in _READERS:
            beside.extend(_READERS[keyword](reader, place, ()))
    options = [list(_scoped(part, scopes)) for part in parts]
    for index, part in enumerate(parts):
        for other in range(index):
            if reader.overlap(tuple(beside), part, parts[other]):
                options[index].extend(reader.invert(parts[other]))
                options[other].extend(reader.invert(part))
    return (Choice(tuple(map(tuple, options))),)


def _not_one_of(reader: Reader, place: Subschema) -> list[Conjunction]:
    parts = _parts(reader, place, "oneOf")
    options = [tuple(term for part in parts for term in reader.invert(part))]
    for index, part in enumerate(parts):
        for rival in parts[index + 1 :]:
            if reader.overlap(part, rival):
                options.append((*part, *rival))
    return options


def _conditions(reader: Reader, place: Subschema) -> tuple[Conjunction, Conjunction, Conjunction]:
    return tuple(  # type: ignore[return-value]
        reader.child(place, place.value[key], key)
        if key in place.value and f"{place.pointer}/{key}" not in reader.dropped
        else ()
        for key in ("if", "then", "else")
    )


def _read_if(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    test, then, otherwise = _conditions(reader, place)
    if not then and not otherwise and not scopes:
        return ()
    yes = (*_scoped(test, scopes), *_scoped(then, scopes))
    return (Choice((yes, (*reader.invert(test), *_scoped(otherwise, scopes)))),)


def _not_if(reader: Reader, place: Subschema) -> list[Conjunction]:
    test, then, otherwise = _conditions(reader, place)
    return [(*test, *reader.invert(then)), (*reader.invert(test), *reader.invert(otherwise))]


def _reference(keyword: str) -> Callable[[Reader, Subschema, _Scopes], Conjunction]:
    return lambda reader, place, scopes: _scoped(
        reader.term(reader.document.resolve(place, keyword, place.value[keyword])), scopes
    )


def _not_reference(keyword: str) -> Callable[[Reader, Subschema], list[Conjunction]]:
    return lambda reader, place: [reader.invert(_reference(keyword)(reader, place, ()))]


def _counts(place: Subschema, keyword: str, negative: bool = False) -> Conjunction | None:
    """Terms of minItems, maxItems, minProperties, maxProperties or their complement; None where there is none."""
    count = _count(place, keyword)
    is_low = keyword.startswith("min") ^ negative
    if negative:
        count += 1 if is_low else -1
        if count < 0:
            return None
    low, high = (count, None) if is_low else (0, None if count >= _UNREACHABLE else count)
    pointer = f"{place.pointer}/{keyword}"
    if low > 10_000:
        kind = "array" if "Items" in keyword else "object"
        return (Refuse(kind, pointer, keyword, f"over 10000 members are needed, got {count}"),)
    return (ItemCount(low, high),) if "Items" in keyword else (MemberCount(low, high, pointer),)


def _read_unique(reader: Reader, place: Subschema, scopes: _Scopes) -> Conjunction:
    return (Unique(f"{place.pointer}/uniqueItems"),) if place.value["uniqueItems"] is True else ()


def _not_unique(reader: Reader, place: Subschema) -> list[Conjunction]:
    if place.value["uniqueItems"] is not True:
        return []
    return [reader._refusal("array", place, "uniqueItems", "has no complement that can be written")]


def _not_counts(keyword: str) -> Callable[[Reader, Subschema], list[Conjunction]]:
    def negation(reader: Reader, place: Subschema) -> list[Conjunction]:
        terms = _counts(place, keyword, negative=True)
        kind = "array" if "Items" in keyword else "object"
        return [] if terms is None else [(Types(frozenset({kind})), *terms)]

    return negation


def _not_property_names(reader: Reader, place: Subschema) -> list[Conjunction]:
    names = reader.child(place, place.value["propertyNames"], "propertyNames")
    if names == ():
        return []
    if names == NEVER:
        return [(Types(frozenset({"object"})), MemberCount(1))]
    outside = KeyOutside(None, f"{place.pointer}/propertyNames", "propertyNames", reader.invert(names))
    return [(Types(frozenset({"object"})), outside)]


_READERS: dict[str, Callable[[Reader, Subschema, _Scopes], Conjunction]] = {
    "type": lambda reader, place, scopes: _type_terms(_type_names(place), False, place.draft),
    "enum": lambda reader, place, scopes: value_terms(_values(place, "enum")),
    "const": lambda reader, place, scopes: value_terms(_values(place, "const")),
    "minimum": lambda reader, place, scopes: (Num(_bounds(place, "minimum")),),
    "maximum": lambda reader, place, scopes: (Num(_bounds(place, "maximum")),),
    "exclusiveMinimum": lambda reader, place, scopes: (Num(_bounds(place, "exclusiveMinimum")),),
    "exclusiveMaximum": lambda reader, place, scopes: (Num(_bounds(place, "exclusiveMaximum")),),
    "multipleOf": lambda reader, place, scopes: (
        Num(ANY_NUMBER.multiples_of(_step(place)), f"{place.pointer}/multipleOf"),
    ),
    "minLength": _read_min_length,
    "maxLength": lambda reader, place, scopes: (Text(_length(place, "maxLength")),),
    "pattern": _read_pattern,
    "format": _read_format,
    "prefixItems": _read_items_once("prefixItems"),
    "items": _read_items_once("items"),
    "additionalItems": _read_items_once("additionalItems"),
    "minItems": lambda reader, place, scopes: _counts(place, "minItems") or (),
    "maxItems": lambda reader, place, scopes: _counts(place, "maxItems") or (),
    "contains": _read_contains,
    "uniqueItems": _read_unique,
    "properties": _read_members_once("properties"),
    "patternProperties": _read_members_once("patternProperties"),
    "additionalProperties": _read_members_once("additionalProperties"),
    "required": lambda reader, place, scopes: (
        # draft 3 had a boolean here, which later drafts do not read
        (Required(_names(place, "required", place.value["required"])),)
        if not isinstance(place.value["required"], bool)
        else ()
    ),
    "minProperties": lambda reader, place, scopes: _counts(place, "minProperties") or (),
    "maxProperties": lambda reader, place, scopes: _counts(place, "maxProperties") or (),
    "propertyNames": lambda reader, place, scopes: (
        Keys(reader.child(place, place.value["propertyNames"], "propertyNames")),
    ),
    "unevaluatedProperties": lambda reader, place, scopes: (),
    "unevaluatedItems": lambda reader, place, scopes: (),
}
_INPLACE: dict[str, Callable[[Reader, Subschema, _Scopes], Conjunction]] = {
    "$ref": _reference("$ref"),
    "$dynamicRef": _reference("$dynamicRef"),
    "$recursiveRef": _reference("$recursiveRef"),
    "allOf": lambda reader, place, scopes: tuple(
        term for part in _parts(reader, place, "allOf") for term in _scoped(part, scopes)
    ),
    "anyOf": _read_any_of,
    "oneOf": _read_one_of,
    "not": lambda reader, place, scopes: reader.invert(reader.child(place, place.value["not"], "not")),
    "if": _read_if,
    "dependentRequired": _read_dependencies_once("dependentRequired"),
    "dependentSchemas": _read_dependencies_once("dependentSchemas"),
    "dependencies": _read_dependencies_once("dependencies"),
}
_NEGATIONS: dict[str, Callable[[Reader, Subschema], list[Conjunction]]] = {
    "type": lambda reader, place: [_type_terms(_type_names(place), True, place.draft)],
    "enum": lambda reader, place: [other_value_terms(_values(place, "enum"), place.pointer, "enum")],
    "const": lambda reader, place: [other_value_terms(_values(place, "const"), place.pointer, "const")],
    "minimum": lambda reader, place: _not_bounds(place, "minimum"),
    "maximum": lambda reader, place: _not_bounds(place, "maximum"),
    "exclusiveMinimum": lambda reader, place: _not_bounds(place, "exclusiveMinimum"),
    "exclusiveMaximum": lambda reader, place: _not_bounds(place, "exclusiveMaximum"),
    "multipleOf": lambda reader, place: [
        (
            Types(frozenset({"number"})),
            Num(Numbers(not_multiples=(_step(place),)), f"{place.pointer}/multipleOf"),
        )
    ],
    "minLength": _not_length("minLength"),
    "maxLength": _not_length("maxLength"),
    "pattern": _not_pattern,
    "format": _not_format,
    "prefixItems": _not_items("prefixItems"),
    "items": _not_items("items"),
    "additionalItems": _not_items("additionalItems"),
    "minItems": _not_counts("minItems"),
    "maxItems": _not_counts("maxItems"),
    "contains": _not_contains,
    "uniqueItems": _not_unique,
    "properties": _not_members("properties"),
    "patternProperties": _not_members("patternProperties"),
    "additionalProperties": _not_members("additionalProperties"),
    "required": lambda reader, place: [
        (Types(frozenset({"object"})), Members(((name, NEVER),), declares=False))
        for name in _names(place, "required", place.value["required"])
    ],
    "minProperties": _not_counts("minProperties"),
    "maxProperties": _not_counts("maxProperties"),
    "propertyNames": _not_property_names,
    "$ref": _not_reference("$ref"),
    "$dynamicRef": _not_reference("$dynamicRef"),
    "$recursiveRef": _not_reference("$recursiveRef"),
    "allOf": lambda reader, place: [reader.invert(part) for part in _parts(reader, place, "allOf")],
    "anyOf": lambda reader, place: [
        tuple(term for part in _parts(reader, place, "anyOf") for term in reader.invert(part))
    ],
    "oneOf": _not_one_of,
    "not": lambda reader, place: [reader.child(place, place.value["not"], "not")],
    "if": _not_if,
    "dependentRequired": _not_dependencies("dependentRequired"),
    "dependentSchemas": _not_dependencies("dependentSchemas"),
    "dependencies": _not_dependencies("dependencies"),
}
