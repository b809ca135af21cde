"""Keywords -> terms: what a subschema says, and what its complement says.

In:  a `Subschema`.
Out: a conjunction of terms that equals it (`assertion`) or its complement (`negation`).
Kept here: the drafts' differences; what cannot be said becomes `Refuse`, never silence.
Source: JSON Schema core and validation, drafts 4, 6, 7, 2019-09, 2020-12.
"""

from collections.abc import Callable
from typing import Any

from gd_plugin.errors import InvalidGuideError
from gd_plugin.guides.problem import escape_pointer
from gd_plugin.guides.schema import arrays, combining, objects, scalars
from gd_plugin.guides.schema.document import Document, Subschema
from gd_plugin.guides.schema.patterns import Pattern, PatternError, compile_pattern
from gd_plugin.guides.schema.terms import (
    NEVER,
    Choice,
    Conjunction,
    Refuse,
    SchemaTerm,
    Term,
    Types,
    Unevaluated,
)

__all__ = ["Reader", "known_keywords"]

# what a keyword says of the type it is for, of the value as a whole through other schemas, and what its complement says
_READERS = scalars.ASSERTIONS | arrays.ASSERTIONS | objects.ASSERTIONS
_INPLACE = combining.ASSERTIONS
_NEGATIONS = scalars.NEGATIONS | arrays.NEGATIONS | objects.NEGATIONS | combining.NEGATIONS
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if",), 7),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$recursiveRef"), 2019
    ),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
_UNTIL = {"dependencies": 7, "$recursiveRef": 2019}
# references in a row, from the part of a oneOf to what it says
_MOST_REFERENCES = 8


def known_keywords() -> tuple[str, ...]:
    """The keywords that are read, beside those read together with another."""
    return (*_READERS, *_INPLACE)


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
        self._fixed: dict[int, frozenset[str] | None] = {}

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
        for keyword in self.keywords(place):
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

    def keywords(self, place: Subschema) -> list[str]:
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
        keywords = self.keywords(place)
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
                pointer = f"{place.pointer}/{keyword}"
                found.append(Unevaluated(keyword, term.index, conjunction, pointer, term.scopes))
        return tuple(found)

    def _negation(self, place: Subschema) -> Conjunction:
        options: list[Conjunction] = []
        for keyword in self.keywords(place):
            if keyword in _NEGATIONS:
                options.extend(_NEGATIONS[keyword](self, place))
            elif keyword in ("unevaluatedProperties", "unevaluatedItems"):
                kind = "object" if keyword == "unevaluatedProperties" else "array"
                options.append(self.refusal(kind, place, keyword, "has no complement that can be written"))
        return (Choice(tuple(options)),)

    def plain_terms(self, place: Subschema) -> Conjunction:
        """What the keywords say that do not apply other schemas to the same value."""
        keywords = [keyword for keyword in self.keywords(place) if keyword in _READERS]
        return tuple(term for keyword in keywords for term in _READERS[keyword](self, place, ()))

    def refuse(self, kind: str, place: Subschema, keyword: str, message: str) -> Refuse:
        """The term for a keyword that has none, of values of the type `kind`."""
        return Refuse(kind, f"{place.pointer}/{keyword}", keyword, message)

    def refusal(self, kind: str, place: Subschema, keyword: str, message: str) -> Conjunction:
        """A value of the type `kind`, refused: the complement of a keyword that speaks of that type alone."""
        return (Types(frozenset({kind})), self.refuse(kind, place, keyword, message))

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

    def fixed_texts(self, conjunction: Conjunction) -> tuple[frozenset[str], bool] | None:
        """Of a subschema that lists texts and says nothing else: the texts, and whether it is to hold."""
        if conjunction == NEVER:
            return frozenset(), True
        if len(conjunction) != 1 or not isinstance(conjunction[0], SchemaTerm):
            return None
        term = conjunction[0]
        if term.index not in self._fixed:
            self._fixed[term.index] = self._listed_texts(self._places[term.index])
        texts = self._fixed[term.index]
        return None if texts is None else (texts, term.positive)

    def _listed_texts(self, place: Subschema) -> frozenset[str] | None:
        keywords = set(self.keywords(place)) - {"type"}
        if len(keywords) != 1 or not keywords <= {"const", "enum"} or place.value.get("type", "string") != "string":
            return None
        values = [place.value["const"]] if keywords == {"const"} else place.value["enum"]
        listed = isinstance(values, list) and all(isinstance(value, str) for value in values)
        return frozenset(values) if listed else None

    def tags(self, conjunction: Conjunction) -> dict[str, frozenset[str]]:
        """The members that an object of a subschema must have, and that are fixed texts; none where others may be."""
        if len(conjunction) != 1 or not isinstance(conjunction[0], SchemaTerm) or not conjunction[0].positive:
            return {}
        place = self._places[conjunction[0].index]
        for _ in range(_MOST_REFERENCES):
            if self.keywords(place) != ["$ref"]:
                break
            place = self.document.resolve(place, "$ref", place.value["$ref"])
        value = place.value
        if not isinstance(value, dict) or not {"type", "properties", "required"} <= set(self.keywords(place)):
            return {}
        named, required = value["properties"], value["required"]
        if value["type"] != "object" or not isinstance(named, dict) or not isinstance(required, list):
            return {}
        found = {}
        for key in required:
            if isinstance(key, str) and key in named:
                fixed = self.fixed_texts(self.child(place, named[key], "properties", key))
                if fixed is not None:
                    found[key] = fixed[0]
        return found

    def overlap(self, *terms: Conjunction) -> bool:
        """Whether a value may satisfy all of them; False is a proof that none does."""
        return self._overlap(tuple(term for conjunction in terms for term in conjunction))
