"""The bound on completions of JSON documents: no state of random walks through random schemas needs more."""

import json
import random
from typing import Any

import jsonschema
import pytest

import gd_plugin as gd
from gd_plugin.grammars.closing import completion_bound, find_certificate
from tests.fuzz import pick

# every byte, so that any legal text can be walked through, and tokens that open or close several things at once
TOKENS = [bytes([byte]) for byte in range(256)] + [
    b'{"',
    b'":',
    b'","',
    b'"}',
    b"[[",
    b"]]",
    b'":[',
    b"},{",
    b"12",
    b"00",
]
VOCABULARY = gd.Vocabulary.from_bytes([*TOKENS, None], stop_token_ids=[len(TOKENS)])
KEYS = ["a", "ab", "name", "two words", "é", "b"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(["object", "object", "array", "leaf", "leaf"] if depth < 3 else ["leaf"])
    if kind == "object":
        keys = rng.sample(KEYS, rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {key: random_schema(rng, depth + 1) for key in keys},
            "required": [key for key in keys if rng.random() < 0.6],
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
    return rng.choice(
        [
            {"type": "string"},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "integer"},
            {"type": "integer", "minimum": -5, "maximum": 1234},
            {"type": "integer", "minimum": 100},
            {"type": "number"},
            {"type": ["boolean", "null"]},
            {"enum": ["red", "reddish", "green", 'q"uote', None]},
            {
                "anyOf": [
                    {"type": "null"},
                    {"type": "string", "maxLength": 3},
                    {"type": "array", "items": {"type": "integer"}},
                ]
            },
            {"type": "object", "additionalProperties": {"type": "integer"}},
        ]
    )


@pytest.fixture(scope="module")
def factory() -> gd.GrammarMatcherFactory:
    return gd.GrammarMatcherFactory(VOCABULARY)


def legal_tokens(matcher: gd.GrammarMatcher) -> list[int]:
    mask = gd.allocate_token_bitmask(1, VOCABULARY.vocab_size)
    matcher.fill_next_token_bitmask(mask, 0)
    words = mask[0].tolist()
    return [i for i in range(len(TOKENS)) if words[i >> 5] >> (i & 31) & 1]


def test_no_state_needs_more_than_the_bound(factory: gd.GrammarMatcherFactory) -> None:
    rng = random.Random(1)
    for _ in range(pick(12, 2000)):
        schema = random_schema(rng)
        guide = gd.Guide.json_schema(schema)
        bound = completion_bound(guide, VOCABULARY, factory.config)
        assert bound is not None, schema
        matcher = factory.create(guide)
        written: list[int] = []
        while len(written) < 60 and (legal := legal_tokens(matcher)):
            if rng.random() < 0.3:
                found = find_certificate(matcher, VOCABULARY)
                assert found is not None
                assert len(found) <= bound, (schema, VOCABULARY.decode(written))
                text = VOCABULARY.decode([*written, *found[:-1]]).decode("utf-8", "replace")
                jsonschema.validate(json.loads(text), schema)
            # rare beginnings first: escapes, points, exponents, parts of characters
            odd = [token for token in legal if TOKENS[token][:1] in b"\\u.eE-" or token > 127]
            written.append(rng.choice(odd if odd and rng.random() < 0.3 else legal))
            assert matcher.accept_token(written[-1])


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "string", "format": "date"},
        {"type": "number", "minimum": 0.5},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 4}},
        {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["a"]},
        {"type": "object", "patternProperties": {"^a": {"type": "null"}, "^b": {"type": "null"}}, "minProperties": 2},
    ],
    ids=[
        "anything",
        "any object",
        "pattern",
        "format",
        "number range",
        "itself",
        "contains",
        "a key of many",
        "members",
    ],
)
def test_what_is_not_proven_has_no_bound(schema: dict[str, Any], factory: gd.GrammarMatcherFactory) -> None:
    assert completion_bound(gd.Guide.json_schema(schema), VOCABULARY, factory.config) is None


def test_bounds_count_what_must_still_be_there(factory: gd.GrammarMatcherFactory) -> None:
    def bound(schema: dict[str, Any]) -> int:
        found = completion_bound(gd.Guide.json_schema(schema), VOCABULARY, factory.config)
        assert found is not None
        return found

    short = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    longer = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a", "b"]}
    assert 8 < bound(short) < bound(longer) < 60
    assert bound({"type": "string", "minLength": 40}) > 40
    canonical = factory.config.replace_fields(canonical_forcing=True)
    assert completion_bound(gd.Guide.json_schema(short), VOCABULARY, canonical) is None
