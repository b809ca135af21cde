"""A grammar engine that fails in any one of its calls: one request's trouble, told and over, whatever the call.

The same run is made once without a fault, to count the engine's calls for one of two guides, then once for each of them
with a fault there.
"""

import pytest
import torch

import gd_plugin as gd
from gd_plugin.grammars.backends import registry
from gd_plugin.grammars.backends.registry import Backend, CompiledGrammar, create_backend
from tests.fuzz import pick

pytestmark = pytest.mark.timeout(pick(120, 3600))
BROKEN, SOUND = gd.Guide.regex("(ab)+c?"), gd.Guide.regex("(a|bc)+")
STOP, WIDTH = 4, 32
ERRORS = [RuntimeError, KeyError, MemoryError]


class Faults:
    """Counts the engine's calls and raises in one of them."""

    def __init__(self):
        self.calls, self.at, self.error = [], None, None

    def __call__(self, name):
        self.calls.append(name)
        if self.at == len(self.calls) - 1:
            raise self.error("the engine broke")


FAULTS = Faults()


class FaultyMatcher(gd.GrammarMatcher):
    """A real matcher whose calls may fail, before or, where they change something, behind their work."""

    def __init__(self, inner):
        self.inner = inner

    def accept_token(self, token_id):
        FAULTS("accept_token")
        accepted = self.inner.accept_token(token_id)
        FAULTS("accept_token, done")
        return accepted

    def rollback(self, num_tokens):
        FAULTS("rollback")
        self.inner.rollback(num_tokens)
        FAULTS("rollback, done")

    def fill_next_token_bitmask(self, bitmask, index):
        FAULTS("fill_next_token_bitmask")
        self.inner.fill_next_token_bitmask(bitmask, index)
        FAULTS("fill_next_token_bitmask, done")

    def is_terminated(self):
        FAULTS("is_terminated")
        return self.inner.is_terminated()

    def is_accepting(self):
        FAULTS("is_accepting")
        return self.inner.is_accepting()

    def fork(self):
        FAULTS("fork")
        return FaultyMatcher(self.inner.fork())

    def reset(self):
        FAULTS("reset")
        self.inner.reset()

    @property
    def num_tokens(self):
        FAULTS("num_tokens")
        return self.inner.num_tokens

    def validate_tokens(self, token_ids):
        FAULTS("validate_tokens")
        return self.inner.validate_tokens(token_ids)

    def forced_text(self):
        FAULTS("forced_text")
        return self.inner.forced_text()


class FaultyGrammar(CompiledGrammar):
    backend = "faulty"

    def __init__(self, inner):
        self.guide, self.inner = inner.guide, inner

    def create_matcher(self):
        if self.guide != BROKEN:
            return self.inner.create_matcher()
        FAULTS("create_matcher")
        return FaultyMatcher(self.inner.create_matcher())


class FaultyBackend(Backend):
    name = "faulty"

    def __init__(self, vocabulary, config):
        self.inner = create_backend("xgrammar", vocabulary, config)

    def problems(self, guide):
        if guide == BROKEN:
            FAULTS("problems")
        return self.inner.problems(guide)

    def is_large(self, guide):
        if guide == BROKEN:
            FAULTS("is_large")
        return False

    def compile(self, guide):
        if guide == BROKEN:
            FAULTS("compile")
        return FaultyGrammar(self.inner.compile(guide))


@pytest.fixture(scope="module")
def vocabulary():
    before = dict(registry._factories)
    gd.register_backend("faulty", FaultyBackend)
    yield gd.Vocabulary.from_bytes([b"a", b"b", b"c", b"ab", None], stop_token_ids=[STOP])
    registry._factories.clear()
    registry._factories.update(before)


def each_fault(run):
    """Yield the result without a fault, then (call, error, result) for each call that `run` makes."""
    FAULTS.__init__()
    yield run()
    calls = list(FAULTS.calls)
    for position, name in enumerate(calls):
        for error in ERRORS[: pick(1, 3)]:
            FAULTS.__init__()
            FAULTS.at, FAULTS.error = position, error
            result = run()
            FAULTS.__init__()
            yield name, error, result


# engines -------------------------------------------------------------------------------------------------------------

# tokens of both requests in each step: golden, then drafts
STEPS = [([0, 1, 0], [0, 1, 2]), ([1, 0, 0], [1, 2, 0]), ([2, 4, 0], [2, 0, 0]), ([4, 1, 1], [0, 1, 1])]


def run_decoder(decoder_class, vocabulary):
    """Rows and failures of both requests step by step; then, without a fault, the first rows of two others."""
    factory = gd.GrammarMatcherFactory(vocabulary, backend="faulty")
    decoder = decoder_class(factory, max_num_sequences=2, vocab_size_padded=WIDTH, max_num_draft_tokens=2, device="cpu")
    rows, failed = {0: [], 1: []}, set()

    def step(num_rows, tokens=(None, None), suffix="", **fields):
        batch = []
        for slot, guide in enumerate((BROKEN, SOUND)):
            golden, *drafts = tokens[slot] or (None,)
            batch.append(
                gd.GuidedRequest(guide, f"r{slot}{suffix}", slot, new_token=golden, draft_tokens=drafts, **fields)
            )
        decoder.submit(batch)
        decoder.add_batch(batch)
        logits = torch.zeros(2 * num_rows, WIDTH)
        failures = decoder.execute(logits)
        assert logits.isfinite().any(dim=1).all() and all(message for _, message in failures)
        failed.update(request_id for request_id, _ in failures)
        for slot in (0, 1):
            span = slice(slot * num_rows, (slot + 1) * num_rows)
            switches = decoder.token_mask_host[span].clone()
            rows[slot].append((decoder.bitmask_host[span] * switches[:, None]).tolist())

    starts = {"is_context_init_state": True, "is_last_context_chunk": True}
    step(1, **starts)
    for tokens in STEPS:
        step(3, tokens, is_generation_in_progress_state=True)
        failures = decoder.rollback_rejected_batch(torch.ones(2, dtype=torch.int32))
        failed.update(request_id for request_id, _ in failures)
    FAULTS.at = None
    step(1, suffix=" again", **starts)
    return rows, failed


@pytest.mark.parametrize("decoder_class", [gd.GuidedDecoder, gd.CapturableGuidedDecoder])
def test_a_decoder(vocabulary, decoder_class):
    faults = each_fault(lambda: run_decoder(decoder_class, vocabulary))
    clean, failed = next(faults)
    assert failed == set() and clean[0][0] == clean[0][-1]
    seen = set()
    for name, error, (rows, failed) in faults:
        seen.add(name)
        # the other request never sees it, and neither does the next one in the slot
        assert rows[1] == clean[1] and rows[0][-1] == clean[0][-1], name
        assert failed <= {"r0"}, name
        # a step's rows are as ever, or left alone
        told = "r0" in failed
        for mine, ours in zip(rows[0], clean[0], strict=True):
            assert mine == ours or (told and not any(map(any, mine))), (name, error)
    assert {"problems", "compile", "create_matcher", "accept_token", "rollback, done", "is_terminated"} <= seen
    assert {"fill_next_token_bitmask", "fill_next_token_bitmask, done", "accept_token, done", "rollback"} <= seen


# transformers --------------------------------------------------------------------------------------------------------


def run_processor(vocabulary, options):
    """Generate greedily from made-up scores; return ids, results and where a construction was refused."""
    try:
        processor = gd.GuidedLogitsProcessor([BROKEN, SOUND], vocabulary=vocabulary, backend="faulty", **options)
    except (gd.GuidedDecodingError, *ERRORS) as error:
        return None, error
    ids, ended = torch.zeros((2, 1), dtype=torch.int64), [False, False]
    for step in range(8):
        # columns beyond the vocabulary are not there to be chosen
        scores = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        chosen = processor(ids, scores).argmax(dim=1)
        for row in (0, 1):
            chosen[row] = STOP if ended[row] else chosen[row]
            ended[row] |= int(chosen[row]) == STOP
        ids = torch.cat([ids, chosen[:, None]], dim=1)
    return ids.tolist(), processor.results(ids)


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 8}], ids=["plain", "budget"])
def test_a_processor(vocabulary, options):
    from gd_plugin.grammars import compiler

    def run():
        # compiled guides are shared between processors, and here each is to be compiled
        compiler._shared.clear()
        return run_processor(vocabulary, options)

    faults = each_fault(run)
    clean, results = next(faults)
    assert [result.status for result in results] and clean is not None
    num_refused = num_ended = 0
    for name, error, (ids, results) in faults:
        if ids is None:
            # at construction, and then the next one can be constructed
            assert name in ("problems", "is_large", "compile", "create_matcher") or options, (name, error)
            num_refused += 1
            continue
        assert ids[1] == clean[1], name
        if results[0].status == "dead_end":
            assert results[0].error is not None
            num_ended += 1
        else:
            assert ids[0] == clean[0], name
    assert num_refused and num_ended
    assert run()[0] == clean
