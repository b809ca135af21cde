"""Every adapter under the published contract, on made-up vocabularies of odd widths and on real ones."""

import random
from collections.abc import Callable

import pytest

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.grammars.backends.registry import Backend, backend_names, create_backend
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.testing import CONTRACT_CHECKS, FakeMatcher, check_same_masks

ENGINES = ("xgrammar", "llguidance", "outlines_core")
OPTIONS = ["yes", "yesterday", "no", "né", "", "[1]", "🙂"]

GUIDES: dict[str, Guide] = {
    "any JSON": Guide.json(),
    "object": Guide.json("object"),
    "schema": Guide.json_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}, "c": {"type": "array"}},
            "required": ["a"],
        }
    ),
    "recursive schema": Guide.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}}),
    "choice": Guide.choice(OPTIONS),
    "one choice": Guide.choice(["yes"]),
    "date": Guide.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "prefixes": Guide.regex("(foo|foobar|f)"),
    "number": Guide.regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"),
    "text": Guide.regex('"[^"\\\\\\x00-\\x1f]*"'),
    "loop": Guide.regex("(a|b)*c"),
    "lazy": Guide.regex("<.+?>"),
    "optional": Guide.regex("x?"),
    "emoji": Guide.regex("[😀-🙏]{2}"),
    "nested": Guide.ebnf('root ::= "(" root ")" | "[" (root ("," root)*)? "]" | "x"'),
    "left recursion": Guide.ebnf('root ::= root "+" item | item\nitem ::= [0-9]+ | "(" root ")"'),
}


def make(engine: str, vocabulary: Vocabulary) -> Backend:
    if engine not in backend_names():
        pytest.skip(f"{engine} is not registered")
    return create_backend(engine, vocabulary, GuidedDecodingConfig())


def toy(vocab_size: int) -> Vocabulary:
    """Single bytes but one, pairs, closers of two levels, duplicates, holes, two stop ids (one with text), padding."""
    tokens: list[bytes | None] = [bytes([byte]) if byte != 6 else None for byte in range(256)]
    tokens += [
        b"))",
        b"]]",
        b"}}",
        b"]}",
        b'"}',
        b'":',
        b'",',
        b"((",
        b"[[",
        b'{"',
        b'{"a":',
        b"ye",
        b"yes",
        b"foo",
        b"bar",
    ]
    tokens += [
        b"a",
        b"\xc3\xa9",
        b"\xf0\x9f",
        b"\x98\x80",
        b"<>",
        b"x)",
        b"1,",
        b"  ",
        b"20",
        b"-0",
        None,
        b"</s>",
        b"x",
    ]
    return Vocabulary.from_bytes(tokens, stop_token_ids=[282, 281], special_token_ids=[282], vocab_size=vocab_size)


@pytest.fixture(scope="module", params=[289, 320], ids=lambda size: f"width {size}")
def toy_vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return toy(request.param)


def matchers(backend: Backend, guide: Guide) -> Callable[[], GrammarMatcher]:
    problems = backend.problems(guide)
    if problems:
        pytest.skip(f"refused: {problems[0].message}")
    return backend.compile(guide).create_matcher


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("engine", ENGINES)
def test_contract_on_small_vocabularies(engine: str, name: str, toy_vocabulary: Vocabulary) -> None:
    create = matchers(make(engine, toy_vocabulary), GUIDES[name])
    for check in CONTRACT_CHECKS:
        check(create, toy_vocabulary, random.Random(f"{engine} {name} {check.__name__}"))


REAL = [
    ("smollm2", 49153),
    ("smollm2", 49170),
    ("deepseek", 129280),
    ("qwen", 151936),
    ("tekken", None),
    ("spm", 32001),
]


@pytest.mark.parametrize(("tokenizer", "vocab_size"), REAL)
@pytest.mark.parametrize("engine", ENGINES)
def test_contract_on_real_vocabularies(
    engine: str, tokenizer: str, vocab_size: int | None, real_vocabulary: Callable[[str, int | None], Vocabulary]
) -> None:
    vocabulary = real_vocabulary(tokenizer, vocab_size)
    backend = make(engine, vocabulary)
    # outlines-core builds an index for minutes where the others take milliseconds
    for name in ("choice",) if engine == "outlines_core" else ("any JSON", "choice"):
        if not backend.problems(GUIDES[name]):
            create = backend.compile(GUIDES[name]).create_matcher
            for check in CONTRACT_CHECKS:
                check(create, vocabulary, random.Random(f"{engine} {name} {check.__name__}"))


@pytest.mark.parametrize("engine", ENGINES)
def test_choices_against_a_matcher_without_an_engine(engine: str, toy_vocabulary: Vocabulary) -> None:
    create = matchers(make(engine, toy_vocabulary), GUIDES["choice"])
    for seed in range(8):
        judge = lambda: FakeMatcher.of_texts(toy_vocabulary, OPTIONS)  # noqa: E731
        check_same_masks(judge, create, toy_vocabulary, random.Random(seed))


def random_regex(rng: random.Random, depth: int = 0) -> str:
    """A regex of constructs that mean the same everywhere."""
    if depth == 3 or rng.random() < 0.3:
        return rng.choice(["a", "b", "x", "ye", "1", "[ab]", "[^x\\x00-\\x1f]", "é", "[a-z]", "[0-9]", "\\)", '"'])
    kind = rng.randrange(5)
    parts = [random_regex(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    if kind == 0:
        return f"({'|'.join(parts)})"
    if kind == 1:
        low = rng.randrange(3)
        return f"({parts[0]}){{{low},{low + rng.randrange(1, 4)}}}"
    if kind == 2:
        return f"({parts[0]}){rng.choice('*+?')}"
    return "".join(parts)


@pytest.mark.parametrize("width", [289, 306])
def test_engines_agree_on_random_regexes(width: int) -> None:
    vocabulary = toy(width)
    engines = [make(engine, vocabulary) for engine in ENGINES if engine in backend_names()]
    rng = random.Random(width)
    for _ in range(40):
        guide = Guide.regex(random_regex(rng))
        first, *others = [backend.compile(guide).create_matcher for backend in engines if not backend.problems(guide)]
        for other in others:
            check_same_masks(first, other, vocabulary, random.Random(guide.guide))
