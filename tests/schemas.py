"""JSON Schemas for tests: strategies that make them, random walks through their guides, and a judge that knows no engine.

The judge is `jsonschema` with the `FormatChecker` of the draft, by the draft that a schema names.
"""

import json
import random
from functools import lru_cache
from typing import Any

import jsonschema
import numpy as np
from hypothesis import strategies as st

import gd_plugin as gd
from gd_plugin.masks.bitmask import legal_columns

__all__ = ["BYTES", "Texts", "hints", "is_valid", "schemas", "spellings", "values", "walk"]

BYTES = gd.Vocabulary.from_bytes([bytes([value]) for value in range(256)] + [None], stop_token_ids=[256])

_KINDS = [b'"', b"{[", b"}]", b",:", b"0123456789", b"-.eE+", b" \n\r\t", b"\\", b"abtfnu", bytes(range(33, 256))]
_CLOSERS = b'"}]0123456789ntf'
_LONGEST = 2000
_KEYS = ["a", "b", "ab", "c1", "é"]
_TEXTS = ["", "a", "ab", "b", "c1", "é", "aab", "2024-02-29", "\n", "a\n", "😀", "x y", "1"]
_NUMBERS: list[Any] = [0, 1, -1, 2, 3, 5, 6, 10, 12, 100, 0.5, 1.5, -2.5, 2.0, 1e2, 7.25, 2**53 + 1]
_PATTERNS = [
    "^a",
    "b$",
    "^[ab]+$",
    "a|b",
    "^(?!ab)",
    "[0-9]",
    "^.{2}$",
    "a{2,}",
    r"^\w+$",
    r"\d$",
    "^(a|é)?$",
    r"[^a]",
    r"\s",
]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "uri", "duration", "nothing-known"]


def is_valid(schema: Any, instance: Any) -> bool:
    """Whether the judge accepts `instance`, or has no verdict: it cannot divide numbers past those of binary floats."""
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    # the checker of the draft: the one of no draft reads "time" as draft 3 did
    try:
        return bool(cls(schema, format_checker=cls.FORMAT_CHECKER).is_valid(instance))
    except OverflowError:
        return True


def spellings(instance: Any) -> list[str]:
    """An instance as programs write it."""
    return [
        json.dumps(instance),
        json.dumps(instance, separators=(",", ":"), ensure_ascii=False),
        json.dumps(instance, indent=2),
    ]


class Texts:
    """Asks one compiled guide about texts, byte by byte."""

    def __init__(self, schema: Any, backend: str = "llguidance", **options: Any) -> None:
        options = {"whitespace": "any", "additional_properties": True, **options}
        factory = gd.GrammarMatcherFactory(BYTES, backend=backend, config=gd.GuidedDecodingConfig(**options))
        self.compiled = factory.compile(gd.Guide.json_schema(schema))
        self.matcher = self.compiled.create_matcher()

    def admits(self, text: str) -> bool:
        """Whether the guide allows the whole text."""
        self.matcher.reset()
        return all(self.matcher.accept_token(byte) for byte in text.encode()) and self.matcher.is_accepting()


def walk(matcher: gd.GrammarMatcher, rng: random.Random, free: int = 60, hints: tuple[bytes, ...] = ()) -> bytes | None:
    """A text of the guide: `free` random legal bytes or until it ends by chance, then mostly bytes that lead to an end.

    None is a dead end, nothing is an end that was not found. Bytes are drawn by kind first, so that quotes and brackets
    are not lost among letters. `hints` are texts that may lead to an end.
    """
    text = bytearray()
    row = gd.allocate_token_bitmask(1, BYTES.vocab_size)
    while len(text) < _LONGEST:
        matcher.fill_next_token_bitmask(row, 0)
        legal = set(np.flatnonzero(legal_columns(row[0], BYTES.vocab_size)).tolist())
        if not legal:
            return None
        closing = len(text) >= free and rng.random() < 0.7
        if 256 in legal and (closing or len(legal) == 1 or rng.random() < 0.3):
            return bytes(text)
        kinds = [kind for kind in (legal.intersection(kind) for kind in _KINDS) if kind]
        taken = bytes([rng.choice(sorted(rng.choice(kinds)))])
        if closing:
            whole = [hint for hint in hints if matcher.validate_tokens(list(hint)) == len(hint)]
            ends = [bytes([byte]) for byte in _CLOSERS if byte in legal]
            taken = rng.choice(whole) if whole and rng.random() < 0.6 else (ends or [taken])[0]
        for byte in taken:
            matcher.accept_token(byte)
        text += taken
    return b""


def hints(schema: Any) -> tuple[bytes, ...]:
    """Every text in a schema, as JSON."""
    found: set[str] = set()
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend([*value, *value.values()])
        elif isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, str):
            found.add(json.dumps(value))
    return tuple(text.encode() for text in sorted(found))


def values() -> st.SearchStrategy[Any]:
    """JSON values that are small and collide often with what `schemas` speak of."""
    scalars = st.one_of(st.none(), st.booleans(), st.sampled_from(_NUMBERS), st.sampled_from(_TEXTS))
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
        ),
        max_leaves=6,
    )


def _keywords(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Keyword -> strategy of its value."""
    count = st.integers(0, 3)
    named = st.dictionaries(st.sampled_from(_KEYS), inner, min_size=1, max_size=3)
    several = st.lists(inner, min_size=1, max_size=3)
    name = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
    keys = st.lists(st.sampled_from(_KEYS), unique=True, max_size=2)
    return {
        "type": st.one_of(name, st.lists(name, min_size=1, max_size=3, unique=True)),
        "enum": st.lists(values(), min_size=1, max_size=4),
        "const": values(),
        "minimum": st.sampled_from(_NUMBERS),
        "maximum": st.sampled_from(_NUMBERS),
        "exclusiveMinimum": st.sampled_from(_NUMBERS),
        "exclusiveMaximum": st.sampled_from(_NUMBERS),
        # binary fractions: the judge divides floats, and says that 0.29 is no multiple of 0.01
        "multipleOf": st.sampled_from([1, 2, 3, 5, 6, 0.5, 2.5, 0.25, 10]),
        "minLength": count,
        "maxLength": count,
        "pattern": st.sampled_from(_PATTERNS),
        "format": st.sampled_from(_FORMATS),
        "items": inner,
        "prefixItems": several,
        "contains": inner,
        "minContains": count,
        "maxContains": count,
        "minItems": count,
        "maxItems": count,
        "uniqueItems": st.booleans(),
        "properties": named,
        "patternProperties": st.dictionaries(st.sampled_from(_PATTERNS), inner, min_size=1, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "required": keys,
        "minProperties": count,
        "maxProperties": count,
        "dependentRequired": st.dictionaries(st.sampled_from(_KEYS), keys, min_size=1, max_size=2),
        "dependentSchemas": named,
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "$ref": st.just("#/$defs/d"),
    }


@lru_cache
def schemas(depth: int = 2, definition: bool = False) -> st.SearchStrategy[Any]:
    """Schemas of draft 2020-12 with every keyword, whether they make sense or not.

    Args:
        depth: levels of subschemas.
        definition: the schema is under `$defs`: without references, because the judge does not end on loops.
    """
    leaves = st.sampled_from([True, False, {}, {"type": "integer"}, {"type": "string"}])
    table = _keywords(schemas(depth - 1, definition) if depth else leaves)
    if definition:
        del table["$ref"]
    names = st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=4 if depth else 2, unique=True)
    plain = names.flatmap(lambda chosen: st.fixed_dictionaries({name: table[name] for name in chosen}))
    if depth == 2 and not definition:
        return st.tuples(plain, schemas(1, True)).map(lambda pair: {**pair[0], "$defs": {"d": pair[1]}})
    return plain if depth else st.one_of(plain, leaves)
