"""Compiling ahead: waiting, putting off, giving up, and what other requests see of it."""

import threading
from concurrent.futures import Future

import pytest

import gd_plugin as gd

TABLES = {"abc": {"start": {8: "a"}, "a": {15: "$"}}}
GUIDE = gd.Guide.regex("abc")


class SlowFactory:
    """Compiles when the test says so."""

    def __init__(self, kit):
        self.tables = kit.TableFactory(TABLES)
        self.vocabulary = self.tables.vocabulary
        self.futures, self.created = {}, 0

    def submit(self, guide):
        return self.futures.setdefault(guide, Future())

    def create(self, guide):
        self.created += 1
        return self.tables.create(guide)


def impatient(kit, factory, **options):
    config = gd.GuidedDecodingConfig(compile_timeout_s=0.05)
    return kit.decoder(factory, drafts=0, config=config, **options)


def test_submitted_twice_is_compiled_once(kit):
    factory = SlowFactory(kit)
    calls = []
    factory.submit = lambda guide: calls.append(guide) or Future()
    decoder = impatient(kit, factory)
    for _ in range(3):
        decoder.submit([kit.context(GUIDE)])
    decoder.submit([gd.GuidedRequest(request_id="free")])
    assert calls == [GUIDE]


def test_a_batch_waits_for_its_grammar(kit):
    factory = SlowFactory(kit)
    decoder = kit.decoder(factory, drafts=0)
    decoder.submit([kit.context(GUIDE)])
    timer = threading.Timer(0.05, factory.futures[GUIDE].set_result, [None])
    timer.start()
    assert kit.step(decoder, kit.context(GUIDE)) == []
    timer.join()
    assert factory.created == 1 and kit.switches(decoder, 1) == [1]


def test_a_grammar_that_never_comes_fails_its_request_alone(kit):
    factory = SlowFactory(kit)
    decoder = impatient(kit, factory)
    decoder.submit([kit.context(GUIDE)])
    failed = kit.step(decoder, kit.context(GUIDE), kit.context(GUIDE, slot=1, request_id="not submitted"))
    assert [request_id for request_id, _ in failed] == [0]
    assert "not compiled within 0.05 s" in failed[0][1]
    assert decoder.grammar_matchers[0] is None and factory.created == 1
    assert kit.switches(decoder, 2) == [0, 1]


@pytest.mark.parametrize("error", [gd.InvalidGuideError("#: no such thing"), TimeoutError("engine gave up")])
def test_a_grammar_that_cannot_be_compiled_fails_its_request(kit, error):
    factory = SlowFactory(kit)
    decoder = kit.decoder(factory, drafts=0)
    decoder.submit([kit.context(GUIDE)])
    factory.futures[GUIDE].set_exception(error)
    assert [(0, str(error) in message) for _, message in kit.step(decoder, kit.context(GUIDE))] == [(0, True)]
    assert factory.created == 0


def test_a_grammar_whose_compilation_is_cancelled_fails_its_request(kit):
    """As closing the factory does with what is queued."""
    factory = SlowFactory(kit)
    decoder = kit.decoder(factory, drafts=0)
    decoder.submit([kit.context(GUIDE)])
    factory.futures[GUIDE].cancel()
    assert decoder.poll(0) == "failed"
    [(request_id, message)] = kit.step(decoder, kit.context(GUIDE))
    assert request_id == 0 and "its compilation was cancelled; submit the request again" in message


def test_a_submit_that_raises_fails_its_request(kit):
    factory = SlowFactory(kit)

    def submit(guide):
        raise gd.InvalidGuideError("#: no")

    factory.submit = submit
    decoder = impatient(kit, factory)
    decoder.submit([kit.context(GUIDE)])
    assert [message.endswith("#: no") for _, message in kit.step(decoder, kit.context(GUIDE))] == [True]


def test_put_off_until_it_is_there(kit):
    factory = SlowFactory(kit)
    decoder = kit.decoder(factory, drafts=0, defer=True)
    decoder.submit([kit.context(GUIDE)])
    for _ in range(2):
        assert kit.step(decoder, kit.context(GUIDE), kit.context(GUIDE, slot=1)) == []
        assert decoder.deferred == [0]
        assert kit.switches(decoder, 2) == [0, 1]
        assert decoder.grammar_matchers[0] is None
    factory.futures[GUIDE].set_result(None)
    assert kit.step(decoder, kit.context(GUIDE)) == []
    assert decoder.deferred == [] and kit.switches(decoder, 1) == [1]


def test_put_off_too_often(kit):
    factory = SlowFactory(kit)
    decoder = impatient(kit, factory, defer=True)
    decoder.submit([kit.context(GUIDE)])
    decoder._attaching._submitted[0] = (factory.futures[GUIDE], -1e9)
    assert [request_id for request_id, _ in kit.step(decoder, kit.context(GUIDE))] == [0]
    assert decoder.deferred == []


def test_an_arrival_is_put_off_too(kit):
    factory = SlowFactory(kit)
    decoder = kit.decoder(factory, drafts=0, defer=True)
    arrival = kit.generation(GUIDE, "a", is_generation_only_first_iteration=True)
    decoder.submit([arrival])
    decoder.add_batch([arrival])
    decoder.init_disagg_gen_requests()
    assert decoder.deferred == [0]
    assert decoder.build() == [] and decoder.grammar_matchers[0] is None
    factory.futures[GUIDE].set_result(None)
    assert kit.step(decoder, arrival) == []
    assert kit.switches(decoder, 1) == [1]


def test_a_request_that_has_waited_too_long_spoils_its_guide_for_nobody(kit):
    vocabulary = kit.TableFactory(TABLES).vocabulary
    factory = gd.GrammarMatcherFactory(vocabulary, backend="xgrammar")
    compiled, may_compile = factory._compile, threading.Event()
    factory._compile = lambda guide: may_compile.wait(30) and compiled(guide)
    decoder = impatient(kit, factory)
    decoder.submit([kit.context(GUIDE, request_id="first")])
    assert [request_id for request_id, _ in kit.step(decoder, kit.context(GUIDE, request_id="first"))] == ["first"]
    decoder.submit([kit.context(GUIDE, slot=1, request_id="second")])
    may_compile.set()
    factory.create(GUIDE)
    assert kit.step(decoder, kit.context(GUIDE, slot=1, request_id="second")) == []
    assert kit.legal(decoder, 0) == {"a"}


def test_a_cancelled_request_is_forgotten(kit):
    factory = SlowFactory(kit)
    decoder = impatient(kit, factory)
    decoder.submit([kit.context(GUIDE, request_id=name) for name in "ab"])
    decoder.cancel(["a", "nobody"])
    assert not factory.futures[GUIDE].cancelled()
    assert set(decoder._attaching._submitted) == {"b"}


def test_the_real_factory(kit):
    vocabulary = kit.TableFactory({}).vocabulary
    factory = gd.GrammarMatcherFactory(vocabulary)
    decoder = kit.decoder(factory, drafts=0)
    bad = gd.Guide(gd.GuideType.EBNF_GRAMMAR, "root ::= nowhere")
    requests = [kit.context(kit.JSON), kit.context(bad, slot=1)]
    decoder.submit(requests)
    assert [request_id for request_id, _ in kit.step(decoder, *requests)] == [1]
    assert factory.cache_info().entries == 1
    # cached: attached at once
    decoder.submit([kit.context(kit.JSON, request_id="again")])
    assert kit.step(decoder, kit.context(kit.JSON, request_id="again")) == []
