"""Large guides compile in a process that is really ended when its time or its memory is over."""

import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import backend_names, create_backend
from gd_plugin.grammars.compiler import GrammarMatcherFactory

LARGE = r"(ab|[^c]){3000}x"
# every rule may be the one below it: xgrammar takes a time for it that grows with the square of their number
CHAIN = gd.Guide.ebnf(
    "\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} | "x{i}"' for i in range(3000)), 'r3000 ::= "c"'])
)


@pytest.fixture(scope="module")
def vocabulary():
    tokens = [bytes([value]) for value in range(256)] + [b"ab", b"abab", None]
    return gd.Vocabulary.from_bytes(tokens, stop_token_ids=[258])


def test_a_worker_lives_between_guides_and_ends_with_its_time(vocabulary):
    # one test: a process takes seconds to start
    config = gd.GuidedDecodingConfig(compile_timeout_s=60.0)
    factory = GrammarMatcherFactory(vocabulary, backend="xgrammar", config=config)
    matcher = factory.create(gd.Guide.regex(LARGE))
    worker = factory._worker
    process = worker._process
    ids = [256] * 3000 + [ord("x")]
    assert matcher.validate_tokens(ids) == len(ids)
    assert matcher.validate_tokens([ord("x")] * 4) == 4
    assert matcher.validate_tokens([ord("c")]) == 0

    # errors cross with their class and place, and the process is kept
    with pytest.raises(gd.UnsatisfiableGuideError) as caught:
        worker.compile("xgrammar", gd.Guide.json_schema({"type": "integer", "minimum": 5, "maximum": 3}))
    assert caught.value.pointer
    [problem, *_] = worker.compile("xgrammar", gd.Guide.json_schema({"type": "string", "format": "email"})).problems
    assert problem.backend == "xgrammar" and problem.pointer == "#/format"
    assert worker._process is process

    # when the time is over it is really ended
    worker._config = gd.GuidedDecodingConfig(compile_timeout_s=0.2)
    with pytest.raises(gd.CompileTimeoutError) as late:
        worker.compile("xgrammar", CHAIN)
    assert late.value.seconds == 0.2
    assert process.poll() is not None
    assert worker._process is None

    # and the next guide has a new one
    worker._config = config
    assert worker.compile("xgrammar", gd.Guide.regex("a")).compiled is not None
    worker.close()


HUNGRY = [("xgrammar", 12_000), ("llguidance", 6_000)]


@pytest.mark.parametrize(("backend", "num_options"), HUNGRY)
def test_memory_is_limited(vocabulary, backend, num_options):
    config = gd.GuidedDecodingConfig(compile_timeout_s=120.0, compile_memory_bytes=1 << 25)
    factory = GrammarMatcherFactory(vocabulary, backend=backend, config=config)
    with pytest.raises(gd.GuideTooLargeError) as caught:
        factory.compile(gd.Guide.choice([f"{i * 7919 % 100_003} value {i}" * 4 for i in range(num_options)]))
    assert caught.value.limit == "compile_memory_bytes"
    assert factory._worker._process is None
    # the next guide has a process of its own
    matcher = factory.create(gd.Guide.regex("a{40000}b{20000}c"))
    assert matcher.validate_tokens(b"ab") == 1
    factory._worker.close()


LIMITS = [
    (gd.Guide.choice(["a" * 2000]), "max_guide_bytes"),
    (gd.Guide.regex("a" * 2000), "max_guide_bytes"),
    (gd.Guide.json_schema({"const": "a" * 2000}), "max_guide_bytes"),
    (gd.Guide.json_schema({"not": {"not": {"not": {"not": {}}}}}), "max_depth"),
]


@pytest.mark.parametrize(("guide", "limit"), LIMITS)
def test_limits_come_before_any_engine(vocabulary, guide, limit):
    config = gd.GuidedDecodingConfig(max_guide_bytes=1000, max_depth=4)
    with pytest.raises(gd.GuideTooLargeError) as caught:
        GrammarMatcherFactory(vocabulary, config=config).compile(guide)
    assert caught.value.limit == limit
    assert caught.value.value > getattr(config, limit)
    # only schemas have definitions
    assert ("$defs" in str(caught.value)) == (guide.guide_type is gd.GuideType.JSON_SCHEMA)


def test_auto_takes_the_cheaper_backend(vocabulary):
    factory = GrammarMatcherFactory(vocabulary)
    assert factory.compile(gd.Guide.regex("[ab]{3}")).backend == "xgrammar"
    assert factory.compile(gd.Guide.regex("[ab]{1000}")).backend == "llguidance"


CROSSING = [
    (gd.Guide.regex(r"(ab|[^c]){3}x?"), ["abzé", "zzz", "ababx"]),
    (gd.Guide.choice(["a", "ab", "é"]), ["a", "ab", "é", "b", "abb"]),
]


@pytest.mark.parametrize(("guide", "texts"), CROSSING)
@pytest.mark.parametrize("name", backend_names())
def test_what_crosses_means_the_same(vocabulary, name, guide, texts):
    try:
        backend = create_backend(name, vocabulary, gd.GuidedDecodingConfig())
    except gd.BackendNotInstalledError as error:
        pytest.skip(str(error))
    assert not backend.is_large(guide)
    compiled = backend.compile(guide)
    crossed = backend.load(guide, backend.dump(compiled))
    assert crossed.nbytes > 0
    here, there = compiled.create_matcher(), crossed.create_matcher()
    rows = gd.allocate_token_bitmask(2, vocabulary.vocab_size)
    for text in texts:
        here.reset()
        there.reset()
        for byte in text.encode():
            here.fill_next_token_bitmask(rows, 0)
            there.fill_next_token_bitmask(rows, 1)
            assert rows[0].equal(rows[1])
            assert here.accept_token(byte) == there.accept_token(byte)
        assert here.is_accepting() == there.is_accepting()
