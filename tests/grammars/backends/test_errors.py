"""What engines raise, print or panic with never reaches a user as it is."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import (
    BackendNotInstalledError,
    GuidedDecodingError,
    GuideError,
    MatcherError,
    UnsupportedGuideError,
)
from gd_plugin.grammars.backends.registry import Backend, create_backend
from gd_plugin.grammars.batch import fill_next_token_bitmasks
from gd_plugin.grammars.compiler import GrammarMatcherFactory
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import allocate_token_bitmask

ENGINES = ("xgrammar", "llguidance", "outlines_core")
STOP = 256
VOCABULARY = Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), None], stop_token_ids=[STOP])


def make(engine: str, vocabulary: Vocabulary = VOCABULARY) -> Backend:
    pytest.importorskip(engine, reason=f"needs the package {engine}")
    return create_backend(engine, vocabulary, GuidedDecodingConfig())


@cache
def panic_class() -> type[BaseException]:
    """What a panic of an engine in Rust reaches Python as: no Exception, and not to be imported. Provoked for real."""
    llguidance = pytest.importorskip("llguidance", reason="needs the package llguidance")
    tokens = Vocabulary.from_bytes([b"a" * 2000, b"a", None], stop_token_ids=[2])
    adapter = import_module("gd_plugin.grammars.backends.llguidance")
    stderr = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        llguidance.LLTokenizer(llguidance.TokenizerWrapper(adapter._Tokens(tokens)), eos_token=[2])
    except BaseException as error:
        assert not isinstance(error, Exception)
        return type(error)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    raise AssertionError("llguidance takes tokens of 2000 bytes now: the limit in its adapter can go")


def exception_classes(module_name: str) -> list[type[BaseException]]:
    """Every exception class that an engine's package shows, the built-in ones it is known to raise, and panics."""
    module = import_module(module_name)
    names = [module_name, *(f"{module_name}.{name}" for name in getattr(module, "__all__", []))]
    found: set[type[BaseException]] = {
        RuntimeError,
        ValueError,
        TypeError,
        OverflowError,
        KeyError,
        IndexError,
        OSError,
    }
    found |= {MemoryError, RecursionError, UnicodeEncodeError, panic_class()}
    for name in names:
        holder = sys.modules.get(name, module)
        for value in vars(holder).values():
            if inspect.isclass(value) and issubclass(value, Exception):
                found.add(value)
    for submodule in [value for value in vars(module).values() if inspect.ismodule(value)]:
        found |= {v for v in vars(submodule).values() if inspect.isclass(v) and issubclass(v, Exception)}
    return sorted(found, key=lambda kind: kind.__qualname__)


def raised(kind: type[BaseException]) -> BaseException:
    """One of a kind, whatever its constructor asks for."""
    try:
        return kind("engine says no")
    except TypeError:
        return kind.__new__(kind)


class Raising:
    """An engine's object all of whose methods raise."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            raise self._error

        return call


ATTRIBUTES = {"xgrammar": "_engine", "llguidance": "_engine", "outlines_core": "_index"}
CALLS: dict[str, Callable[[Any], object]] = {
    "accept": lambda matcher: matcher.accept_token(ord("b")),
    "stop": lambda matcher: matcher.accept_token(STOP),
    "fill": lambda matcher: matcher.fill_next_token_bitmask(allocate_token_bitmask(1, 257), 0),
    "accepting": lambda matcher: matcher.is_accepting(),
    "validate": lambda matcher: matcher.validate_tokens([ord("b")]),
    "rollback": lambda matcher: matcher.rollback(1),
    "reset": lambda matcher: matcher.reset(),
    "fork": lambda matcher: matcher.fork(),
    "forced text": lambda matcher: matcher.forced_text(),
}
# calls that do not ask the object in use: llguidance moves to another copy, of outlines-core a list of states is kept
KEPT_BY_US: dict[str, set[str]] = {
    "xgrammar": set(),
    "llguidance": {"rollback", "reset", "forced text"},
    "outlines_core": {"rollback", "reset", "fork", "forced text"},
}


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine in ENGINES for name in CALLS if name not in KEPT_BY_US[engine]]
)
def test_every_class_is_translated_while_matching(engine: str, name: str) -> None:
    grammar = make(engine).compile(Guide.regex("abc"))
    for kind in exception_classes(engine):
        matcher = grammar.create_matcher()
        assert matcher.accept_token(ord("a"))
        real = getattr(matcher, ATTRIBUTES[engine])
        setattr(matcher, ATTRIBUTES[engine], Raising(raised(kind)))
        with pytest.raises(MatcherError) as caught:
            CALLS[name](matcher)
        assert isinstance(caught.value.__cause__, kind)
        # nothing happened, and nothing is held
        setattr(matcher, ATTRIBUTES[engine], real)
        assert matcher.num_tokens == 1
        assert matcher.accept_token(ord("b"))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_is_let_through(engine: str, interrupt: type[BaseException]) -> None:
    matcher = make(engine).compile(Guide.regex("ab")).create_matcher()
    real = getattr(matcher, ATTRIBUTES[engine])
    setattr(matcher, ATTRIBUTES[engine], Raising(interrupt()))
    for name in ("accept", "fill", "accepting"):
        with pytest.raises(interrupt):
            CALLS[name](matcher)
    setattr(matcher, ATTRIBUTES[engine], real)
    assert matcher.accept_token(ord("a"))


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
def test_a_batch_survives_every_class(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's call for all rows fails, and one row of the loop that follows."""
    grammar = make(engine).compile(Guide.regex("ab"))
    kinds = exception_classes(engine)
    holder = import_module({"xgrammar": "xgrammar", "llguidance": "gd_plugin.grammars.backends.llguidance"}[engine])
    for kind in kinds:
        matchers = [grammar.create_matcher() for _ in range(300)]
        setattr(matchers[7], ATTRIBUTES[engine], Raising(raised(kind)))
        pool = Raising(raised(kind))
        name = "BatchGrammarMatcher" if engine == "xgrammar" else "_executor"
        monkeypatch.setattr("gd_plugin.grammars.batch._paces", {})
        monkeypatch.setattr(holder, name, lambda *args, pool=pool, **kwargs: pool)
        bitmask = allocate_token_bitmask(300, 257)
        errors = fill_next_token_bitmasks(matchers, bitmask, range(300), num_threads=2)
        assert {row: type(error) for row, error in errors.items()} == {7: MatcherError}
        assert (bitmask[[row for row in range(300) if row != 7], ord("a") >> 5] == 1 << (ord("a") & 31)).all()


def test_tokens_that_llguidance_panics_on_are_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    """The longest real ones have 1 kB; 'auto' takes an engine that can."""
    vocabulary = Vocabulary.from_bytes([b"a" * 2000, b"a", None], stop_token_ids=[2])
    with pytest.raises(UnsupportedGuideError, match=r"a token of the vocabulary has 2000 bytes"):
        make("llguidance", vocabulary).compile(Guide.regex("a+"))
    factory = GrammarMatcherFactory(vocabulary)
    assert factory.create(Guide.regex("a+")).accept_token(0)
    assert capfd.readouterr() == ("", "")


PARTS = {
    "xgrammar": ("xgrammar.Grammar", "from_ebnf"),
    "llguidance": ("llguidance", "LLMatcher"),
    "outlines_core": ("outlines_core", "Index"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_class_is_translated_while_compiling(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(engine)
    module, _, holder = PARTS[engine][0].partition(".")
    target = getattr(import_module(module), holder) if holder else import_module(module)
    for kind in exception_classes(engine):

        def fail(*args: object, kind: type[BaseException] = kind, **kwargs: object) -> Any:
            raise raised(kind)

        monkeypatch.setattr(target, PARTS[engine][1], fail)
        with pytest.raises(GuideError, match=r"#: .* cannot compile this regex guide") as caught:
            backend.compile(Guide.regex("ab"))
        assert isinstance(caught.value.__cause__, kind)


BAD_GUIDES: list[Callable[[], Guide]] = [
    lambda: Guide.json_schema({"type": "foo"}),
    lambda: Guide.json_schema(False),
    lambda: Guide.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
    lambda: Guide.json_schema({"$ref": "#/nowhere"}),
    lambda: Guide.json_schema({"$ref": "http://example.com/x"}),
    lambda: Guide.json_schema({"not": {}}),
    lambda: Guide.json_schema({"type": "string", "format": "no-such-format"}),
    lambda: Guide.json_schema({"allOf": [{"type": "object"}, {"required": ["x"]}], "uniqueItems": True}),
    lambda: Guide.json_schema({"type": "string", "pattern": "(?=a)b"}),
    lambda: Guide.json_schema({"enum": []}),
    lambda: Guide.json_schema({"oneOf": [{"type": "integer"}, {"type": "number", "multipleOf": 0.5}]}),
    lambda: Guide.json_schema({"allOf": [{"type": "object"}, {"required": ["x"]}]}),
    lambda: Guide.json_schema({"type": "number", "multipleOf": 0.25}),
    lambda: Guide.json_schema({"type": "integer", "minimum": 1, "multipleOf": 3}),
    lambda: Guide.json_schema({"type": "object", "patternProperties": {"(?=a)b": {}}}),
    lambda: Guide.json_schema({"type": "object", "propertyNames": {"pattern": "(?=a)b"}}),
    lambda: Guide.json_schema({"type": "object", "minProperties": 1}),
    lambda: Guide.json_schema({"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^a+$"}),
    lambda: Guide.json_schema({"type": "string", "minLength": 2, "format": "date"}),
    lambda: Guide.json_schema({"$ref": "#"}),
    lambda: Guide.json_schema({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "number", "multipleOf": 0.5}}}),
    lambda: Guide.json_schema({"properties": {"a": {"items": [{"not": {"multipleOf": 2}}]}, "b": {"if": {}}}}),
    lambda: Guide.json_schema({"type": "integer", "maximum": 1e400}),
    lambda: Guide.json_schema({"type": "integer", "maximum": 2**70, "minimum": -(2**70)}),
    lambda: Guide.json_schema('{"type": "string", "pattern": "\\ud800"}'),
    lambda: Guide.structural_tag({"format": {"type": "no-such"}}),
    lambda: Guide.structural_tag(
        {"format": {"type": "json_schema", "json_schema": {"type": "number", "multipleOf": 2}}}
    ),
    lambda: Guide.lark("start: missing"),
    lambda: Guide.lark('start: "a" start "a" | '),
    lambda: Guide.regex("a" * 3_000),
    lambda: Guide.regex("(" * 500 + "a" + ")" * 500),
    lambda: Guide.regex("\ud800"),
    lambda: Guide.regex("a(?=b)"),
    lambda: Guide.regex(r"(a)\1"),
    lambda: Guide.regex("[^\\x00-\\U0010ffff]"),
    lambda: Guide.ebnf('root ::= "a'),
    lambda: Guide.ebnf("root ::= missing"),
    lambda: Guide.ebnf('root ::= root "a"'),
    lambda: Guide.ebnf('other ::= "a"'),
    lambda: Guide.choice([]),
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_bad_guides_are_refused_in_silence(engine: str, strict: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Without `strict` what cannot be enforced is dropped, in silence too."""
    pytest.importorskip(engine, reason=f"needs the package {engine}")
    backend = create_backend(engine, VOCABULARY, GuidedDecodingConfig(strict=strict))
    capfd.readouterr()
    for build in BAD_GUIDES:
        try:
            matcher = backend.compile(build()).create_matcher()
            matcher.fill_next_token_bitmask(allocate_token_bitmask(1, 257), 0)
            matcher.validate_tokens(b'{"a": 1')
        except GuidedDecodingError as error:
            text = str(error)
            assert text
            assert "/cpp/" not in text
            assert "<state>" not in text
    assert capfd.readouterr() == ("", "")


def test_what_xgrammar_cannot_enforce_is_dropped_where_it_stands() -> None:
    schema = {
        "type": "object",
        "properties": {
            "n": {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "null"}]},
            "s": {"type": "string", "format": "no-such"},
        },
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    backend = create_backend("xgrammar", VOCABULARY, GuidedDecodingConfig(strict=False))
    dropped = {problem.pointer for problem in backend.problems(Guide.json_schema(schema))}
    assert {"#/properties/n/oneOf", "#/properties/s/format"} <= dropped
    grammar = backend.compile(Guide.json_schema(schema))
    assert json.loads(grammar.guide.guide) == schema
    for text, matches in [('{"n":3,"s":"x"}', True), ('{"n":null,"s":""}', True), ('{"n":"x","s":"x"}', False)]:
        tokens = [*text.encode(), STOP]
        assert (grammar.create_matcher().validate_tokens(tokens) == len(tokens)) is matches


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_calls_are_answered_in_silence(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    matcher = make(engine).compile(Guide.regex("[0-9]{1,3}")).create_matcher()
    capfd.readouterr()
    for token_id in (-1, 257, 2**31, 2**63, 2**70, ord("x"), STOP):
        assert not matcher.accept_token(token_id)
    for wrong in ("1", 1.0, None):
        with pytest.raises(TypeError):
            matcher.accept_token(wrong)  # type: ignore[arg-type]
    for num_tokens in (1, -1, 2**40):
        with pytest.raises(GuidedDecodingError):
            matcher.rollback(num_tokens)
    matcher.accept_token(ord("1"))
    assert matcher.accept_token(STOP)
    for token_id in (STOP, ord("1")):
        assert not matcher.accept_token(token_id)
    matcher.fill_next_token_bitmask(allocate_token_bitmask(1, 257), 0)
    assert matcher.forced_text() == b""
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dead_end_poisons_nothing(engine: str) -> None:
    """The only token that could go on is missing: an empty mask, and the way back is open."""
    tokens: list[bytes | None] = [b"a", b"b", None]
    matcher = make(engine, Vocabulary.from_bytes(tokens, stop_token_ids=[2]))
    try:
        create = matcher.compile(Guide.regex("b|ac")).create_matcher
    except GuideError:
        return  # found when it was compiled
    live = create()
    bitmask = allocate_token_bitmask(1, 3)
    if live.accept_token(0):
        for _ in range(2):
            live.fill_next_token_bitmask(bitmask, 0)
            assert not bitmask.any()
            assert not live.accept_token(1)
        live.rollback(1)
    assert live.accept_token(1)
    assert live.accept_token(2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_engine_names_the_command(engine: str) -> None:
    code = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "import gd_plugin as gd\n"
        "from gd_plugin.grammars.backends.registry import create_backend\n"
        "v = gd.Vocabulary.from_bytes([b'a', None], stop_token_ids=[1])\n"
        "try: create_backend(sys.argv[1], v, gd.GuidedDecodingConfig())\n"
        "except gd.BackendNotInstalledError as e: assert isinstance(e, ImportError) and 'pip install' in str(e), e\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code, engine], check=True, timeout=120)


@pytest.mark.parametrize(
    ("engine", "holder", "name"),
    [
        ("xgrammar", "GrammarMatcher", "fork"),
        ("llguidance", "LLMatcher", "try_consume_tokens"),
        ("outlines_core", "Index", "get_next_state"),
    ],
)
def test_an_engine_that_is_too_old(engine: str, holder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip(engine, reason=f"needs the package {engine}")
    monkeypatch.setattr(module, holder, type(holder, (), {}))
    if engine == "xgrammar":
        # what is looked at first belongs to another class
        assert hasattr(module.GrammarCompiler, "compile_json_schema")
    with pytest.raises(BackendNotInstalledError, match=rf"too old .*{name}.*pip install"):
        create_backend(engine, VOCABULARY, GuidedDecodingConfig())
