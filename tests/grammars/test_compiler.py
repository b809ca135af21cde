"""GrammarMatcherFactory: one compile per key, bounded by bytes, errors not kept, interruptions survived."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends import registry
from gd_plugin.grammars.backends.registry import Backend, CompiledGrammar, create_backend


@pytest.fixture(scope="module")
def vocabulary() -> gd.Vocabulary:
    return gd.Vocabulary.from_bytes([*(bytes([b]) for b in range(256)), None], stop_token_ids=[256])


class Recorder(Backend):
    """xgrammar, counting what it is asked to compile; raises what it is told to."""

    name = "recorder"

    def __init__(self, vocabulary: gd.Vocabulary, config: gd.GuidedDecodingConfig) -> None:
        self._inner = create_backend("xgrammar", vocabulary, config)
        self.compiled: Counter[str] = Counter()
        self.raises: list[BaseException] = []
        self.delay = 0.0
        _recorders.append(self)

    def problems(self, guide: gd.Guide) -> list[gd.Problem]:
        return self._inner.problems(guide)

    def compile(self, guide: gd.Guide) -> CompiledGrammar:
        self.compiled[guide.guide] += 1
        time.sleep(self.delay)
        if self.raises:
            raise self.raises.pop(0)
        return self._inner.compile(guide)


_recorders: list[Recorder] = []


@pytest.fixture
def recorder(vocabulary: gd.Vocabulary) -> Iterator[tuple[gd.GrammarMatcherFactory, Recorder]]:
    before = dict(registry._factories)
    gd.register_backend("recorder", Recorder)
    _recorders.clear()
    factory = gd.GrammarMatcherFactory(vocabulary, backend="recorder")
    yield factory, _recorders[0]
    registry._factories.clear()
    registry._factories.update(before)


def test_eight_threads_compile_each_guide_once(recorder: Any) -> None:
    factory, backend = recorder
    backend.delay = 0.02
    guides = [gd.Guide.regex(f"[a-z]{{{n}}}") for n in range(1, 5)]
    barrier = threading.Barrier(8)

    def work(number: int) -> list[CompiledGrammar]:
        barrier.wait()
        return [factory.compile(guides[(number + n) % 4]) for n in range(4)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(8)))
    assert set(backend.compiled.values()) == {1}
    for number, row in enumerate(found):
        for n, grammar in enumerate(row):
            assert grammar is factory.compile(guides[(number + n) % 4])
    info = factory.cache_info()
    assert (info.entries, info.misses) == (4, 4)


def test_threads_match_independently(vocabulary: gd.Vocabulary) -> None:
    """One compiled grammar, a matcher each: the same result as one after the other."""
    factory = gd.GrammarMatcherFactory(vocabulary)
    guide = gd.Guide.json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    texts = [f'{{"n": {n}}}' if n % 2 else f'{{"n": "{n}"}}' for n in range(64)]

    def match(text: str) -> int:
        return factory.create(guide).validate_tokens([*text.encode(), 256])

    serial = [match(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(match, texts)) == serial
    assert serial[1] == len(texts[1]) + 1 and serial[2] == 6


def test_the_cache_is_bounded_by_bytes(vocabulary: gd.Vocabulary) -> None:
    one = gd.GrammarMatcherFactory(vocabulary).compile(gd.Guide.choice([f"00 option {n}" for n in range(50)])).nbytes
    limit = 5 * one
    factory = gd.GrammarMatcherFactory(vocabulary, config=gd.GuidedDecodingConfig(cache_bytes=limit))
    for number in range(40):
        factory.compile(gd.Guide.choice([f"{number:02} option {n}" for n in range(50)]))
        info = factory.cache_info()
        assert info.bytes <= limit and info.limit_bytes == limit
    assert 2 <= info.entries <= 6
    # the newest are kept
    before = info.misses
    factory.compile(gd.Guide.choice([f"39 option {n}" for n in range(50)]))
    assert factory.cache_info().misses == before
    factory.compile(gd.Guide.choice([f"00 option {n}" for n in range(50)]))
    assert factory.cache_info().misses == before + 1


def test_a_guide_larger_than_the_cache_compiles(vocabulary: gd.Vocabulary) -> None:
    factory = gd.GrammarMatcherFactory(vocabulary, config=gd.GuidedDecodingConfig(cache_bytes=1))
    for _ in range(2):
        assert factory.create(gd.Guide.regex("a+")).accept_token(97)
    assert factory.cache_info().entries <= 1


def test_clear_cache_keeps_what_is_in_use(vocabulary: gd.Vocabulary) -> None:
    factory = gd.GrammarMatcherFactory(vocabulary)
    compiled = factory.compile(gd.Guide.regex("a+"))
    factory.clear_cache()
    assert factory.cache_info()[:2] == (0, 0)
    assert compiled.create_matcher().accept_token(97)
    assert factory.compile(gd.Guide.regex("a+")) is not compiled


def test_errors_are_not_kept(recorder: Any) -> None:
    factory, backend = recorder
    guide = gd.Guide.regex("b+")
    backend.raises = [gd.InvalidGuideError("line 1, column 1: no")]
    with pytest.raises(gd.InvalidGuideError, match="line 1"):
        factory.compile(guide)
    assert factory.cache_info().entries == 0
    assert factory.compile(guide).guide == guide


def test_all_waiting_threads_see_the_error(recorder: Any) -> None:
    factory, backend = recorder
    guide = gd.Guide.regex("c+")
    backend.delay = 0.3
    backend.raises = [gd.InvalidGuideError("no")]
    futures = [factory.submit(guide) for _ in range(4)]
    assert [type(future.exception()) for future in futures] == [gd.InvalidGuideError] * 4
    assert backend.compiled[guide.guide] == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_the_factory_usable(recorder: Any, interruption: type[BaseException]) -> None:
    factory, backend = recorder
    guide = gd.Guide.regex("d+")
    backend.delay = 0.2
    backend.raises = [interruption()]
    raised: list[BaseException] = []
    compiled: list[CompiledGrammar] = []

    def interrupted() -> None:
        try:
            factory.compile(guide)
        except BaseException as error:
            raised.append(error)

    first = threading.Thread(target=interrupted)
    first.start()
    time.sleep(0.05)
    # waits for the first, and compiles itself when that one is interrupted
    second = threading.Thread(target=lambda: compiled.append(factory.compile(guide)))
    second.start()
    first.join(30)
    second.join(30)
    assert [type(error) for error in raised] == [interruption]
    assert compiled and factory.compile(guide) is compiled[0]


def test_submit_returns_a_future_of_the_same_grammar(vocabulary: gd.Vocabulary) -> None:
    factory = gd.GrammarMatcherFactory(vocabulary)
    guide = gd.Guide.regex("e+")
    future = factory.submit(guide)
    assert future.result(30) is factory.compile(guide)
    assert factory.submit(guide).done()


def test_equal_guides_share_an_entry(recorder: Any) -> None:
    factory, backend = recorder
    spaced, compact = '{ "type" : "integer" }', '{"type":"integer"}'
    assert factory.compile(gd.Guide.json_schema(spaced)) is factory.compile(gd.Guide.json_schema(compact))
    assert factory.compile(gd.Guide.json_schema(json.loads(spaced))) is factory.compile(gd.Guide.json_schema(compact))
    assert sum(backend.compiled.values()) == 1


def test_the_choice_of_a_backend_is_reported(vocabulary: gd.Vocabulary) -> None:
    auto = gd.GrammarMatcherFactory(vocabulary).compile(gd.Guide.regex("f"))
    assert auto.backend in registry.backend_names() and auto.reason
    chosen = gd.GrammarMatcherFactory(vocabulary, backend="xgrammar").compile(gd.Guide.regex("f"))
    assert (chosen.backend, chosen.reason) == ("xgrammar", "chosen by the caller")
    assert chosen.not_enforced == ()


def test_without_strict_nothing_is_dropped_that_a_backend_enforces(vocabulary: gd.Vocabulary) -> None:
    factory = gd.GrammarMatcherFactory(vocabulary, config=gd.GuidedDecodingConfig(strict=False))
    only_llguidance = {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "string", "pattern": "^a+$"}]}
    whole = factory.compile(gd.Guide.json_schema(only_llguidance))
    assert (whole.backend, whole.not_enforced) == ("llguidance", ())
    unique = {"type": "array", "uniqueItems": True, "items": {"type": "string"}}
    both = factory.compile(gd.Guide.json_schema({"anyOf": [only_llguidance, unique]}))
    assert both.backend == "llguidance"
    assert [problem.keyword for problem in both.not_enforced] == ["uniqueItems"]


def test_an_explicit_choice_never_falls_back(vocabulary: gd.Vocabulary) -> None:
    with pytest.raises(ValueError, match=r"nonesuch.*xgrammar"):
        gd.GrammarMatcherFactory(vocabulary, backend="nonesuch")


def test_a_missing_backend_names_the_pip_command(vocabulary: gd.Vocabulary) -> None:
    before = dict(registry._factories)
    try:
        registry._factories["ghost"] = registry._builtin("gd_plugin.no_such_adapter", "ghost", "ghost>=1")
        with pytest.raises(gd.BackendNotInstalledError, match=r"pip install 'ghost>=1'"):
            gd.GrammarMatcherFactory(vocabulary, backend="ghost")
        # "auto" goes on to the next
        assert gd.GrammarMatcherFactory(vocabulary).compile(gd.Guide.regex("g")).backend != "ghost"
    finally:
        registry._factories.clear()
        registry._factories.update(before)


@pytest.mark.parametrize("bad", ["x", 1, None, {"type": "string"}])
def test_what_is_no_guide_is_refused(vocabulary: gd.Vocabulary, bad: Any) -> None:
    factory = gd.GrammarMatcherFactory(vocabulary)
    for method in (factory.compile, factory.create, factory.submit):
        with pytest.raises(TypeError, match="Guide"):
            method(bad)


def test_what_is_no_vocabulary_is_refused() -> None:
    with pytest.raises(TypeError, match="from_tokenizer"):
        gd.GrammarMatcherFactory("tokenizer.json")  # type: ignore[arg-type]
