"""Large guides compile in a process that is really ended when its time is over."""

import pytest

import gd_plugin as gd
from gd_plugin.grammars.compiler import GrammarMatcherFactory

LARGE = gd.Guide.regex(r"(ab|[^c]){300}x")


@pytest.fixture(scope="module")
def vocabulary():
    tokens = [bytes([value]) for value in range(256)] + [b"ab", b"abab", None]
    return gd.Vocabulary.from_bytes(tokens, stop_token_ids=[258])


def test_a_worker_lives_between_guides_and_ends_with_its_time(vocabulary, monkeypatch):
    # one test: a process takes seconds to start
    monkeypatch.setattr("gd_plugin.grammars.compiler._WORKER_WEIGHT", 100)
    config = gd.GuidedDecodingConfig(compile_timeout_s=60.0)
    factory = GrammarMatcherFactory(vocabulary, backend="xgrammar", config=config)
    matcher = factory.create(LARGE)
    worker = factory._workers["xgrammar"]
    process = worker._process
    ids = [256] * 300 + [ord("x")]
    assert matcher.validate_tokens(ids) == len(ids)
    assert matcher.validate_tokens([ord("x")] * 4) == 4
    assert matcher.validate_tokens([ord("c")]) == 0

    # errors cross with their class and place, and the process is kept
    with pytest.raises(gd.UnsatisfiableGuideError) as caught:
        worker.compile(gd.Guide.json_schema({"type": "integer", "minimum": 5, "maximum": 3}))
    assert caught.value.pointer
    assert worker._process is process

    # when the time is over it is really ended
    worker._config = gd.GuidedDecodingConfig(compile_timeout_s=0.0001)
    with pytest.raises(gd.CompileTimeoutError):
        worker.compile(gd.Guide.regex(r"(ab|[^c]){3000}x"))
    assert process.poll() is not None
    assert worker._process is None

    # and the next guide has a new one
    worker._config = config
    assert worker.compile(gd.Guide.regex("a"))
    worker.close()


LIMITS = [
    (gd.Guide.choice(["a" * 2000]), "max_guide_bytes"),
    (gd.Guide.json_schema({"not": {"not": {"not": {"not": {}}}}}), "max_depth"),
]


@pytest.mark.parametrize(("guide", "limit"), LIMITS)
def test_limits_come_before_any_engine(vocabulary, guide, limit):
    config = gd.GuidedDecodingConfig(max_guide_bytes=1000, max_depth=4)
    with pytest.raises(gd.GuideTooLargeError) as caught:
        GrammarMatcherFactory(vocabulary, config=config).compile(guide)
    assert caught.value.limit == limit
    assert caught.value.value > getattr(config, limit)


def test_auto_takes_the_cheaper_backend(vocabulary):
    factory = GrammarMatcherFactory(vocabulary)
    assert factory.compile(gd.Guide.regex("[ab]{3}")).backend == "xgrammar"
    assert factory.compile(gd.Guide.regex("[ab]{1000}")).backend == "llguidance"
