"""What engines raise, print or panic with never reaches a user as it is."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.errors import BackendNotInstalledError, GuidedDecodingError, GuideError, MatcherError
from gd_plugin.grammars.backends.registry import Backend, create_backend
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import allocate_token_bitmask

ENGINES = ("xgrammar", "llguidance", "outlines_core")
STOP = 256
VOCABULARY = Vocabulary.from_bytes([*(bytes([byte]) for byte in range(256)), None], stop_token_ids=[STOP])


def make(engine: str, vocabulary: Vocabulary = VOCABULARY) -> Backend:
    pytest.importorskip(engine, reason=f"needs the package {engine}")
    return create_backend(engine, vocabulary, GuidedDecodingConfig())


def exception_classes(module_name: str) -> list[type[Exception]]:
    """Every exception class that an engine's package shows, and the built-in ones it is known to raise."""
    module = import_module(module_name)
    names = [module_name, *(f"{module_name}.{name}" for name in getattr(module, "__all__", []))]
    found: set[type[Exception]] = {RuntimeError, ValueError, TypeError, OverflowError, KeyError, IndexError, OSError}
    for name in names:
        holder = sys.modules.get(name, module)
        for value in vars(holder).values():
            if inspect.isclass(value) and issubclass(value, Exception):
                found.add(value)
    for submodule in [value for value in vars(module).values() if inspect.ismodule(value)]:
        found |= {v for v in vars(submodule).values() if inspect.isclass(v) and issubclass(v, Exception)}
    return sorted(found, key=lambda kind: kind.__qualname__)


def raised(kind: type[Exception]) -> Exception:
    """One of a kind, whatever its constructor asks for."""
    try:
        return kind("engine says no")
    except TypeError:
        return kind.__new__(kind)


class Raising:
    """An engine's object all of whose methods raise."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:
            raise self._error

        return call


@pytest.mark.parametrize("engine", ENGINES)
def test_every_class_is_translated_while_matching(engine: str) -> None:
    for kind in exception_classes(engine):
        for call in (
            lambda m: m.accept_token(ord("a")),
            lambda m: m.fill_next_token_bitmask(allocate_token_bitmask(1, 257), 0),
        ):
            matcher = make(engine).compile(Guide.regex("ab")).create_matcher()
            name = "_index" if engine == "outlines_core" else "_engine"
            real = getattr(matcher, name)
            setattr(matcher, name, Raising(raised(kind)))
            with pytest.raises(MatcherError) as caught:
                call(matcher)  # type: ignore[no-untyped-call]
            assert isinstance(caught.value.__cause__, kind)
            # nothing happened, and nothing is held
            setattr(matcher, name, real)
            assert matcher.num_tokens == 0
            assert matcher.accept_token(ord("a"))


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

        def fail(*args: object, kind: type[Exception] = kind, **kwargs: object) -> Any:
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
    lambda: Guide.regex("a(?=b)"),
    lambda: Guide.regex(r"(a)\1"),
    lambda: Guide.regex("[^\\x00-\\U0010ffff]"),
    lambda: Guide.ebnf('root ::= "a'),
    lambda: Guide.ebnf("root ::= missing"),
    lambda: Guide.ebnf('root ::= root "a"'),
    lambda: Guide.ebnf('other ::= "a"'),
    lambda: Guide.choice([]),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_guides_are_refused_in_silence(engine: str, capfd: pytest.CaptureFixture[str]) -> None:
    backend = make(engine)
    capfd.readouterr()
    for build in BAD_GUIDES:
        try:
            guide = build()
            if not backend.problems(guide):
                backend.compile(guide).create_matcher()
        except GuidedDecodingError as error:
            text = str(error)
            assert text
            assert "/cpp/" not in text
            assert "<state>" not in text
    assert capfd.readouterr() == ("", "")


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
