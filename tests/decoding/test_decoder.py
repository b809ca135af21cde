"""Batches over time: guards, isolation, idempotence, late tokens, chunked prefill, resume, bad input."""

import dataclasses
import random

import numpy as np
import pytest
import torch

import gd_plugin as gd

TABLES = {
    "abc": {"start": {8: "a"}, "a": {9: "ab"}, "ab": {10: "abc"}, "abc": {15: "$"}},
    "a": {"start": {8: "a"}, "a": {15: "$"}},
}
ABC, A = gd.Guide.regex("abc"), gd.Guide.regex("a")


class Fault:
    """Raises at every call of one kind from the chosen one on."""

    def __init__(self, kind, at=0):
        self.kind, self.at, self.seen = kind, at, 0

    def __call__(self, kind):
        if kind == self.kind:
            self.seen += 1
            if self.seen > self.at:
                raise RuntimeError(f"{kind} broke")


def factory_with_fault_in_a(kit, kind, at=0):
    factory, fault = kit.TableFactory(TABLES), Fault(kind, at)

    def create(guide):
        if guide == A:
            fault("create")
        return kit.TableMatcher(TABLES[guide.guide], fault if guide == A else None)

    factory.create = create
    return factory


# guards -----------------------------------------------------------------------------------------------------------


def test_a_request_whose_matcher_could_not_be_made_is_unguided_from_then_on(kit):
    decoder = kit.decoder(factory_with_fault_in_a(kit, "create"))
    failed = kit.step(decoder, kit.context(A, request_id="x"))
    assert [request_id for request_id, _ in failed] == ["x"]
    assert "create broke" in failed[0][1] and "Traceback" not in failed[0][1]
    assert decoder.grammar_matchers == [None, None]
    assert kit.settle(decoder, 1) == []
    assert kit.step(decoder, kit.generation(A, "aaa", request_id="x")) == []
    assert kit.switches(decoder) == [0, 0, 0, 0]


def test_a_failed_request_does_not_see_the_matcher_of_the_one_before(kit):
    decoder = kit.decoder(factory_with_fault_in_a(kit, "create"))
    kit.step(decoder, kit.context(ABC, request_id="old"))
    kit.step(decoder, kit.context(A, request_id="new"))
    assert decoder.grammar_matchers[0] is None
    assert kit.step(decoder, kit.generation(A, "a", request_id="new")) == []
    assert kit.switches(decoder) == [0, 0, 0, 0]


def test_a_stranger_in_a_slot_is_told_so(kit):
    decoder = kit.decoder(kit.TableFactory(TABLES))
    kit.step(decoder, kit.context(ABC, request_id="old"))
    failed = kit.step(decoder, kit.generation(ABC, "a", request_id="new"))
    assert [request_id for request_id, _ in failed] == ["new"]
    assert "holds no matcher of this request" in failed[0][1]
    assert decoder.grammar_matchers[0].num_tokens == 0


def test_a_matcher_that_the_caller_puts_in_is_used(kit):
    decoder = kit.decoder(kit.TableFactory(TABLES))
    decoder.grammar_matchers[1] = kit.TableMatcher(TABLES["abc"])
    assert kit.step(decoder, kit.generation(ABC, "ab", slot=1)) == []
    assert decoder.num_advanced_tokens == [0, 2]
    decoder.grammar_matchers[1] = kit.TableMatcher(TABLES["a"])
    assert kit.step(decoder, kit.generation(A, "a", slot=1, request_id="other")) == []
    assert kit.legal(decoder, 0) == {"</s>"}


def test_a_terminated_request_one_step_ahead_is_left_alone(kit):
    decoder = kit.decoder(kit.TableFactory(TABLES), drafts=0)
    kit.step(decoder, kit.context(A))
    kit.step(decoder, kit.generation(A, "a"))
    for text in "$aa":
        assert kit.step(decoder, kit.generation(A, text)) == []
        assert kit.switches(decoder, 1) == [0]
    assert decoder.grammar_matchers[0].num_tokens == 2


def test_building_a_batch_again_changes_nothing(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON))
    matcher = decoder.grammar_matchers[0]
    assert decoder.build() == [] and decoder.grammar_matchers[0] is matcher
    kit.settle(decoder, 1)
    logits = torch.zeros(4, kit.PADDED)
    decoder.add_batch([kit.generation(kit.JSON, '{"a"')])
    for _ in range(3):
        assert decoder.execute(logits.zero_()) == []
        assert decoder.num_advanced_tokens[0] == 4
        assert logits[0].isfinite().sum() == 3
    failed = kit.step(decoder, kit.generation(kit.JSON, "}"))
    assert len(failed) == 1 and decoder.build() == failed


def test_nothing_added_nothing_built(kit):
    decoder = kit.decoder(kit.TableFactory(TABLES))
    assert decoder.build() == []
    assert decoder.execute(torch.zeros(0, kit.PADDED)) == []
    decoder.add_batch([])
    assert decoder.execute(torch.zeros(0, kit.PADDED)) == []


def test_later_changes_of_the_engines_request_do_not_reach_the_decoder(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON))
    kit.settle(decoder, 1)
    request = kit.generation(kit.JSON, '{"a"')
    decoder.add_batch([request])
    request.new_token = kit.ids("}")[0]
    request.draft_tokens.clear()
    assert decoder.build() == []
    assert decoder.num_advanced_tokens[0] == 4


def test_chunked_prefill_guides_the_last_chunk_only(kit, factory):
    decoder = kit.decoder(factory)
    chunk = gd.GuidedRequest(guide=kit.JSON, request_id=0, seq_slot=0, is_context_init_state=True)
    for _ in range(2):
        assert kit.step(decoder, chunk) == []
        assert kit.switches(decoder, 1) == [0] and decoder.grammar_matchers[0] is None
    assert kit.step(decoder, kit.context(kit.JSON)) == []
    assert kit.switches(decoder, 1) == [1]


def test_a_chunk_does_not_disturb_the_slots_next_to_it(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON))
    kit.settle(decoder, 1)
    chunk = gd.GuidedRequest(guide=kit.JSON, request_id=1, seq_slot=1, is_context_init_state=True)
    assert kit.step(decoder, chunk, kit.generation(kit.JSON, "{}$")) == []
    assert kit.switches(decoder, 5) == [0, 1, 1, 0, 0]


# isolation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["create", "accept", "fill", "rollback"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_a_fault_of_one_matcher_stays_with_its_request(kit, kind, at, first):
    def run(decoder):
        """The healthy request's rows and what failed, over a context, a verification and a second one."""
        seen, failed = [], []
        order = (lambda a, b: [a, b]) if first else (lambda a, b: [b, a])
        steps = [
            order(kit.context(A, slot=0, request_id="a"), kit.context(ABC, slot=1, request_id="abc")),
            order(
                kit.generation(A, "a$a", slot=0, request_id="a"), kit.generation(ABC, "abb", slot=1, request_id="abc")
            ),
            order(kit.generation(A, "$", slot=0, request_id="a"), kit.generation(ABC, "bc$", slot=1, request_id="abc")),
        ]
        for index, requests in enumerate(steps):
            failed += kit.step(decoder, *requests)
            row = 0 if not first else (1 if index == 0 else 4)
            width = 1 if index == 0 else 4
            switches = decoder.token_mask_host[row : row + width].clone()
            # a row that is switched off may hold anything
            seen.append((switches, decoder.bitmask_host[row : row + width] * switches[:, None]))
            failed += kit.settle(decoder, 1, 1)
        return seen, failed

    healthy, none_failed = run(kit.decoder(kit.TableFactory(TABLES)))
    assert none_failed == []
    seen, failed = run(kit.decoder(factory_with_fault_in_a(kit, kind, at)))
    assert {request_id for request_id, _ in failed} <= {"a"}
    for want, got in zip(healthy, seen, strict=True):
        assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


class Unreliable(gd.GrammarMatcher):
    """A real matcher that raises at random, before or behind what it is asked to do."""

    def __init__(self, real, rng):
        self.real, self.rng = real, rng

    def _do(self, name, *args):
        when = self.rng.choice(["before", "behind"] + 10 * ["never"])
        if when == "before":
            raise RuntimeError(f"{name} broke")
        result = getattr(self.real, name)(*args)
        if when == "behind":
            raise RuntimeError(f"{name} broke")
        return result

    def accept_token(self, token_id):
        return self._do("accept_token", token_id)

    def rollback(self, num_tokens):
        self._do("rollback", num_tokens)

    def fill_next_token_bitmask(self, bitmask, index):
        self._do("fill_next_token_bitmask", bitmask, index)

    def is_terminated(self):
        return self._do("is_terminated")

    def is_accepting(self):
        return self._do("is_accepting")

    def fork(self):
        return Unreliable(self._do("fork"), self.rng)

    def reset(self):
        self._do("reset")

    @property
    def num_tokens(self):
        return self.real.num_tokens


def random_turns(rng, text, num_steps):
    """What a request of `text` does in each step: (its first token, golden token and drafts, tokens it emits)."""
    at, turns = -1, []
    for _ in range(num_steps):
        if at < 0:
            turns.append((True, "", 1))
            at = 0
            continue
        legal = text[at + 1 : at + 1 + rng.randint(0, 3)]
        emitted = rng.randint(0, len(legal)) + 1
        turns.append((False, (text[at] + legal + rng.choice(["", "c"]))[:4], emitted))
        at = at + emitted if at + emitted < len(text) else -1
    return turns


@pytest.mark.parametrize("seed", range(12))
def test_faults_at_random_never_reach_another_request(kit, factory, seed):
    """Slot 1 is unreliable; what slots 0 and 2 see does not change, over verifications, rollbacks and draft loops."""
    num_steps = 12
    guides = [kit.JSON, gd.Guide.json(root="object"), kit.JSON]
    texts = ['{"a":1}$', '{"b":[2,1]}$', "[1,2,1]$"]

    def run(is_reliable):
        schedule, rng = random.Random(seed), random.Random(seed)
        turns = [random_turns(schedule, text, num_steps) for text in texts]
        decoder, names, failed, seen = kit.decoder(factory, slots=3), [0, 1, 2], set(), []
        create = factory.create
        decoder._attaching._factory = gd_factory = type("Factory", (), {})()
        gd_factory.create = lambda guide: (
            create(guide) if is_reliable or guide != guides[1] else Unreliable(create(guide), rng)
        )

        def look(failures, rows):
            failed.update(request_id % 3 for request_id, _ in failures)
            for slot, first, num_rows in rows:
                if slot != 1:
                    switches = decoder.token_mask_host[first : first + num_rows]
                    masks = decoder.bitmask_host[first : first + num_rows] * switches[:, None]
                    seen.append((switches.tolist(), masks.tolist()))

        for step in range(num_steps):
            order, rows, batch, row = schedule.sample(range(3), 3), [], [], 0
            for slot in order:
                starts, text, _ = turns[slot][step]
                if starts:
                    names[slot] += 3
                    batch.append(kit.context(guides[slot], slot=slot, request_id=names[slot]))
                else:
                    batch.append(kit.generation(guides[slot], text, slot=slot, request_id=names[slot]))
                rows.append((slot, row, 1 if starts else 4))
                row += rows[-1][2]
            look(kit.step(decoder, *batch), rows)
            counts = [turns[slot][step][2] for slot in order]
            if schedule.random() < 0.5:
                failed.update(request_id % 3 for request_id, _ in kit.settle(decoder, *counts))
                continue
            for draft_step in range(3):
                tokens = torch.tensor([schedule.randrange(15) for _ in order], dtype=torch.int32)
                decoder.add_draft_batch(tokens, torch.tensor(counts, dtype=torch.int32), draft_step)
                failures = decoder.execute_draft_batch(torch.zeros(3, kit.PADDED), draft_step=draft_step)
                look(failures, [(slot, position, 1) for position, slot in enumerate(order)])
        return seen, failed

    expected, none_failed = run(is_reliable=True)
    assert none_failed == set()
    seen, failed = run(is_reliable=False)
    assert failed <= {1}
    assert seen == expected


def test_logits_of_unguided_and_failed_rows_keep_every_bit(kit):
    decoder = kit.decoder(factory_with_fault_in_a(kit, "fill"), slots=3, drafts=0)
    logits = torch.full((3, kit.PADDED), float("nan"))
    decoder.add_batch([gd.GuidedRequest(request_id="free"), kit.context(A, slot=0), kit.context(ABC, slot=2)])
    assert [request_id for request_id, _ in decoder.execute(logits)] == [0]
    assert logits[:2].isnan().all()
    assert logits[2].isnan().nonzero().flatten().tolist() == kit.ids("a")


# tokens from the device --------------------------------------------------------------------------------------------


def test_tokens_of_the_device_by_slot(kit, factory):
    decoder = kit.decoder(factory, slots=3)
    kit.step(decoder, kit.context(kit.JSON, slot=2), kit.context(kit.JSON, slot=0))
    kit.settle(decoder, 1, 1)
    tokens = torch.full((4, 3), -1, dtype=torch.int32)
    tokens[:, 2] = torch.tensor(kit.ids('{"a"'))
    tokens[:, 0] = torch.tensor(kit.ids("[[[["))
    late = kit.generation(kit.JSON, "{", slot=2, prev_seq_slot=2)
    own = kit.generation(kit.JSON, "{}", slot=0)
    decoder.add_batch([late, own], new_tokens=tokens)
    tokens.fill_(-1)
    assert decoder.build() == []
    assert (decoder.num_advanced_tokens[2], decoder.num_advanced_tokens[0]) == (4, 2)


def test_tokens_of_the_device_are_cut_to_the_runtime_draft_length(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON))
    kit.settle(decoder, 1)
    tokens = torch.tensor([[token, -1] for token in kit.ids('{"a"')], dtype=torch.int32)
    decoder.add_batch([kit.generation(kit.JSON, "{", prev_seq_slot=0)], new_tokens=tokens, runtime_draft_len=1)
    assert decoder.build() == []
    assert decoder.num_advanced_tokens[0] == 2 and decoder.requests.num_bitmask_tokens == 2


# arrivals and returns ---------------------------------------------------------------------------------------------


def test_prefill_elsewhere(kit, factory):
    decoder = kit.decoder(factory)
    arrival = kit.generation(kit.JSON, '{"a"', is_generation_only_first_iteration=True)
    decoder.add_batch([arrival])
    decoder.init_disagg_gen_requests()
    matcher = decoder.grammar_matchers[0]
    assert matcher.num_tokens == 0
    decoder.init_disagg_gen_requests()
    assert decoder.grammar_matchers[0] is matcher
    assert decoder.build() == []
    assert decoder.num_advanced_tokens[0] == 4 and decoder.grammar_matchers[0] is matcher
    decoder.init_disagg_gen_requests()
    assert decoder.grammar_matchers[0].num_tokens == 4


def test_prefill_elsewhere_in_a_used_slot_and_without_the_separate_call(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON, request_id="old"))
    arrival = kit.generation(kit.JSON, '{"a"', request_id="new", is_generation_only_first_iteration=True)
    assert kit.step(decoder, arrival) == []
    assert decoder.num_advanced_tokens[0] == 4


def test_prefill_elsewhere_whose_guide_cannot_be_made(kit):
    decoder = kit.decoder(factory_with_fault_in_a(kit, "create"))
    arrival = kit.generation(A, "a", request_id="x", is_generation_only_first_iteration=True)
    decoder.add_batch([arrival])
    decoder.init_disagg_gen_requests()
    assert [request_id for request_id, _ in decoder.build()] == ["x"]


def test_an_arrival_whose_history_cannot_be_replayed_fails_alone(kit):
    decoder = kit.decoder(factory_with_fault_in_a(kit, "accept"))
    arrivals = [
        kit.generation(A, "$", request_id="x", history=kit.ids("a")),
        kit.generation(ABC, "b", slot=1, request_id="y", history=kit.ids("a")),
    ]
    decoder.add_batch(arrivals)
    decoder.init_disagg_gen_requests()
    failed = decoder.build()
    assert [request_id for request_id, _ in failed] == ["x"] and "accept broke" in failed[0][1]
    assert kit.switches(decoder, 8) == [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("context", [True, False])
def test_a_request_comes_back_with_its_history(kit, factory, context):
    decoder = kit.decoder(factory)
    history = kit.ids('{"a"')
    if context:
        assert kit.step(decoder, kit.context(kit.JSON, history=history)) == []
        assert kit.legal(decoder, 0) == {":", " "}
        kit.settle(decoder, 1)
        history = None
    assert kit.step(decoder, kit.generation(kit.JSON, ":1}$", history=history)) == []
    assert decoder.num_advanced_tokens[0] == 4 and decoder.grammar_matchers[0].is_terminated()
    assert decoder.grammar_matchers[0].num_tokens == 8


def test_a_request_preempted_in_mid_verification_starts_from_its_history(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON))
    kit.settle(decoder, 1)
    kit.step(decoder, kit.generation(kit.JSON, '{"a"'))
    matcher = decoder.grammar_matchers[0]
    # preempted before the rejected drafts were undone; its prompt is processed again, into the same slot
    assert kit.step(decoder, kit.context(kit.JSON, history=kit.ids('{"'))) == []
    assert decoder.grammar_matchers[0] is matcher and matcher.num_tokens == 2


def test_a_history_is_checked(kit, factory):
    decoder = kit.decoder(factory)
    failed = kit.step(decoder, kit.context(kit.JSON, history=kit.ids("{}}")))
    assert [request_id for request_id, _ in failed] == [0]
    assert "position 2" in failed[0][1] and "{}" in failed[0][1]
    kit.step(decoder, kit.context(kit.JSON, slot=1))
    kit.settle(decoder, 1)
    assert kit.step(decoder, kit.generation(kit.JSON, "{", slot=1, history=[])) == []
    # the engine says that other tokens were emitted than this decoder saw
    assert kit.step(decoder, kit.generation(kit.JSON, "[", slot=1, history=kit.ids("["))) == []
    assert decoder.grammar_matchers[1].num_tokens == 2


def test_the_same_id_with_another_guide_starts_anew(kit):
    decoder = kit.decoder(kit.TableFactory(TABLES))
    kit.step(decoder, kit.context(ABC))
    assert kit.step(decoder, kit.context(A)) == []
    assert kit.step(decoder, kit.generation(A, "a")) == []
    assert kit.legal(decoder, 0) == {"</s>"}


# bad input --------------------------------------------------------------------------------------------------------


BAD_BATCHES = [
    (lambda kit: ([kit.context(A, slot=2)], {}), r"slot 2 is not in \[0, 2\)"),
    (lambda kit: ([kit.context(A, slot=2)], {}), r"not in \[0, 2\); raise max_num_sequences"),
    (lambda kit: ([kit.context(A, slot=-1)], {}), r"slot -1 is not in \[0, 2\); slots count from 0"),
    (lambda kit: ([kit.generation(A, "a", prev_seq_slot=-1)], {}), r"slot -1 is not in \[0, 2\); slots count from 0"),
    (lambda kit: (None, {}), "requests must be a list of GuidedRequest, got NoneType"),
    (lambda kit: (kit.context(A), {}), "requests must be a list of GuidedRequest, got GuidedRequest"),
    (lambda kit: ("ab", {}), "requests must be a list of GuidedRequest, got str"),
    (lambda kit: ([kit.context(A), None], {}), r"requests\[1\] must be a GuidedRequest, got NoneType"),
    (lambda kit: ([A], {}), r"requests\[0\] must be a GuidedRequest, got Guide"),
    (lambda kit: ([], {"new_tokens": [[0, 0]] * 4}), "new_tokens must be an int32 tensor, got list"),
    (lambda kit: ([], {"runtime_draft_len": 1.0}), "runtime_draft_len must be an int, got 1.0"),
    (lambda kit: ([], {"runtime_draft_len": True}), "runtime_draft_len must be an int, got True"),
    (lambda kit: ([gd.GuidedRequest(guide=A, request_id="x")], {}), "request 'x': slot None"),
    (lambda kit: ([kit.context(A, request_id=1), kit.context(A, request_id=2)], {}), "1 and 2 are both in slot 0"),
    (lambda kit: ([kit.generation(A, "a", prev_seq_slot=9)], {}), "slot 9"),
    (lambda kit: ([gd.GuidedRequest() for _ in range(3)], {}), "12 rows but 8 are reserved"),
    (lambda kit: ([], {"runtime_draft_len": 4}), r"runtime_draft_len must be in \[0, 3\], got 4"),
    (lambda kit: ([], {"runtime_draft_len": -1}), "runtime_draft_len"),
    (lambda kit: ([], {"new_tokens": torch.zeros(3, 2, dtype=torch.int32)}), r"int32 \[4, 2\]"),
    (lambda kit: ([], {"new_tokens": torch.zeros(4, 2, dtype=torch.int64)}), "torch.int64"),
    (lambda kit: ([kit.draft(A, "a"), kit.context(A, slot=1)], {}), "cannot share"),
    (lambda kit: ([kit.generation(A, "aa", draft_tree=([1], [-1]))], {}), "slot 0: node 1"),
    (lambda kit: ([kit.generation(A, "aa", draft_tree=([1, 0], [-1, -1]))], {}), "node 0"),
    (lambda kit: ([kit.generation(A, "aa", draft_tree=([1, -1, -1], [-1] * 3))], {}), "only 2 of"),
    (lambda kit: ([kit.generation(A, "a", draft_tree=([1, -1], [-1, -1]))], {}), "2 nodes need 1 draft_tokens"),
    (lambda kit: ([kit.generation(A, "aaaaa", draft_tree=([1, 2, 3, 4, -1], [-1] * 5))], {}), "draft length of 4"),
    (lambda kit: ([kit.generation(A, "aaaaa", slot=1)], {}), "request 1 in slot 1: 4 draft_tokens, but .* is 3"),
    (lambda kit: ([kit.context(A, slot, "x") for slot in (1, 0)], {}), "request 'x' is in slots 1 and 0 of one batch"),
    (lambda kit: ([kit.context(A, slot="0")], {}), "request '0': a slot must be an int, got '0'"),
    (lambda kit: ([kit.generation(A, "a", prev_seq_slot="0")], {}), "request 0: a slot must be an int, got '0'"),
    (lambda kit: ([kit.context(A, request_id=[1])], {}), "slot 0: its request_id must be hashable"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_BATCHES)
def test_a_bad_batch_is_refused_and_the_one_before_kept(kit, bad, message):
    decoder = kit.decoder(kit.TableFactory(TABLES))
    decoder.add_batch([kit.context(ABC)])
    requests, options = bad(kit)
    with pytest.raises((ValueError, TypeError), match=message):
        decoder.add_batch(requests, **options)
    assert decoder.build() == []
    assert kit.switches(decoder) == [1, 0, 0, 0]


def test_token_ids_may_come_in_tensors_and_arrays(kit):
    """Of one dimension, on the host or not: they are read when the batch is added."""
    decoder = kit.decoder(kit.TableFactory(TABLES))
    drafts, golden = torch.tensor(kit.ids("bc")), np.int64(kit.ids("a")[0])
    kit.step(decoder, kit.context(ABC))
    assert kit.step(decoder, dataclasses.replace(kit.generation(ABC, "a"), new_token=golden, draft_tokens=drafts)) == []
    assert decoder.num_advanced_tokens[0] == 3
    request = dataclasses.replace(kit.generation(ABC, "a"), new_token=2**70)
    kit.settle(decoder, 3)
    assert [request_id for request_id, _ in kit.step(decoder, request)] == [0]


def test_requests_without_an_id_are_told_apart_by_their_slots(kit):
    decoder = kit.decoder(kit.TableFactory(TABLES))
    requests = [dataclasses.replace(kit.context(ABC, slot), request_id=None) for slot in (0, 1)]
    assert kit.step(decoder, *requests) == [] and kit.switches(decoder, 2) == [1, 1]


@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1]])
def test_counts_that_are_not_the_batch(kit, factory, counts):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON), kit.context(kit.JSON, slot=1))
    kit.settle(decoder, 1, 1)
    kit.step(decoder, kit.generation(kit.JSON, '{"'), kit.generation(kit.JSON, '{"', slot=1))
    with pytest.raises(ValueError, match=r"num_accepted_tokens must be int32 \[2\]"):
        kit.settle(decoder, *counts)
    assert decoder.num_advanced_tokens == [2, 2]
    with pytest.raises(ValueError, match=r"torch.int64"):
        decoder.rollback_rejected_batch(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="new_tokens must be int32"):
        decoder.add_draft_batch(torch.ones(3, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="needs num_accepted_tokens"):
        decoder.add_draft_batch(torch.ones(2, dtype=torch.int32), None)
    with pytest.raises(ValueError, match="was not added"):
        decoder.execute_draft_batch(torch.zeros(2, kit.PADDED), draft_step=1)


@pytest.mark.parametrize("counts", [None, 1, [1], (1,), np.ones(1, dtype=np.int32)])
def test_counts_and_nodes_that_are_no_tensors(kit, factory, counts):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON))
    with pytest.raises(TypeError, match="num_accepted_tokens must be an int32 tensor, got"):
        decoder.rollback_rejected_batch(counts)
    with pytest.raises((TypeError, ValueError), match="num_accepted_tokens"):
        decoder.add_draft_batch(torch.zeros(1, dtype=torch.int32), counts)
    with pytest.raises(TypeError, match="new_tokens must be an int32 tensor, got"):
        decoder.add_draft_batch(counts, torch.ones(1, dtype=torch.int32))
    for nodes in ([[1]], np.ones((1, 1), dtype=np.int32)):
        with pytest.raises(TypeError, match="accepted_nodes must be an int32 tensor, got"):
            decoder.rollback_rejected_batch(torch.ones(1, dtype=torch.int32), nodes)
    with pytest.raises(ValueError, match=r"accepted_nodes must be int32 \[1, L\], got torch.float32"):
        decoder.rollback_rejected_batch(torch.ones(1, dtype=torch.int32), torch.ones(1, 1))


@pytest.mark.parametrize("requests", [None, [None], "x"])
def test_what_is_no_request_is_not_submitted(kit, factory, requests):
    with pytest.raises(TypeError, match="GuidedRequest"):
        kit.decoder(factory).submit(requests)


def test_a_rollback_beyond_the_matchers_history_fails_its_request_alone(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON), kit.context(kit.JSON, slot=1))
    kit.settle(decoder, 1, 1)
    kit.step(decoder, kit.generation(kit.JSON, '{"'), kit.generation(kit.JSON, '{"', slot=1))
    decoder.num_advanced_tokens[0] = 9
    failed = kit.settle(decoder, 1, 1)
    assert [request_id for request_id, _ in failed] == [0]
    assert "roll back" in failed[0][1]
    assert decoder.grammar_matchers[1].num_tokens == 1


def test_a_missing_golden_token_fails_its_request_alone(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON), kit.context(kit.JSON, slot=1))
    failed = kit.step(decoder, kit.generation(kit.JSON, [None]), kit.generation(kit.JSON, "{", slot=1))
    assert [(request_id, "new_token is missing" in message) for request_id, message in failed] == [(0, True)]
    failed = kit.step(decoder, kit.generation(kit.JSON, [10**12]), kit.generation(kit.JSON, "}", slot=1))
    assert [request_id for request_id, _ in failed] == [0]


UNREADABLE = [
    ({"draft_tokens": ["x"]}, "draft_tokens must be a sequence of int or None, got list ('str' object"),
    ({"draft_tokens": [None]}, "draft_tokens must be a sequence of int or None, got list ('NoneType' object"),
    ({"draft_tokens": [4, None]}, "draft_tokens"),
    ({"draft_tokens": [{}]}, "draft_tokens"),
    ({"draft_tokens": "abc"}, "draft_tokens must be a sequence of int or None, got str"),
    ({"draft_tokens": 8}, "draft_tokens must be a sequence of int or None, got int"),
    ({"draft_tokens": torch.ones(2)}, "draft_tokens must be a sequence of int or None, got Tensor"),
    ({"draft_tokens": torch.ones(2, 2, dtype=torch.int32)}, "draft_tokens"),
    ({"new_token": "a"}, "new_token must be an int or None, got str"),
    ({"new_token": 8.0}, "new_token must be an int or None, got float"),
    ({"history": "a"}, "history must be a sequence of int or None, got str"),
    ({"num_accepted_draft_tokens": "1"}, "num_accepted_draft_tokens must be an int or None, got str"),
    ({"draft_tree": 5}, "draft_tree must be a DraftTree, (first_child, next_sibling) or None, got 5"),
    ({"draft_tree": ([-1],)}, "draft_tree must be a DraftTree, (first_child, next_sibling) or None, got ([-1],)"),
    ({"draft_tree": ([-1], [-1], [-1])}, "draft_tree must be a DraftTree"),
    ({"draft_tree": (5, 5)}, "draft_tree must be a sequence of int or None, got int"),
    ({"draft_tree": (["1"], [-1])}, "draft_tree must be a sequence of int or None, got list"),
]


@pytest.mark.parametrize(("fields", "message"), UNREADABLE)
def test_what_is_no_token_fails_its_request_alone(kit, factory, fields, message):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON), kit.context(kit.JSON, slot=1))
    broken = dataclasses.replace(kit.generation(kit.JSON, "{"), **fields)
    [(request_id, told)] = kit.step(decoder, broken, kit.generation(kit.JSON, "{}", slot=1))
    assert request_id == 0 and told.startswith(f"request 0 in slot 0: {message}")
    assert kit.switches(decoder, 8) == [0, 0, 0, 0, 1, 1, 0, 0]
    # an unguided one may hold anything
    assert kit.step(decoder, dataclasses.replace(broken, guide=None)) == []


def test_logits_of_the_wrong_shape(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON))
    decoder.copy_bitmask()
    for logits in (torch.zeros(0, kit.PADDED), torch.zeros(kit.PADDED)):
        with pytest.raises(ValueError, match="at least 1 rows"):
            decoder.apply_bitmask(logits)
    with pytest.raises(ValueError, match="num_bitmask_tokens"):
        decoder.copy_bitmask(99)


@pytest.mark.parametrize("columns", [40, 63, 65, 200])
def test_logits_of_another_width_than_the_model(kit, factory, columns):
    decoder = kit.decoder(factory)
    decoder.add_batch([kit.context(kit.JSON)])
    logits = torch.zeros(1, columns)
    with pytest.raises(ValueError, match=f"{columns} columns but must have {kit.PADDED}"):
        decoder.execute(logits)
    assert not logits.any()


def test_logits_narrower_than_their_shard(kit, factory):
    decoder = kit.decoder(factory, shard=gd.VocabShard(0, 2, kit.PADDED))
    decoder.add_batch([kit.context(kit.JSON)])
    with pytest.raises(ValueError, match="31 columns but must have at least 32"):
        decoder.execute(torch.zeros(1, 31))
    decoder.execute(torch.zeros(1, 40))  # padded behind the shard


@pytest.mark.parametrize(
    "sizes", [{"max_num_sequences": 0}, {"vocab_size_padded": 0}, {"max_num_draft_tokens": -1}, {"max_look_ahead": -1}]
)
def test_sizes_out_of_range(kit, factory, sizes):
    with pytest.raises(ValueError, match=next(iter(sizes))):
        gd.GuidedDecoder(factory, **{"max_num_sequences": 1, "vocab_size_padded": 64, "device": "cpu"} | sizes)


@pytest.mark.parametrize("decoder_class", [gd.GuidedDecoder, gd.CapturableGuidedDecoder])
@pytest.mark.parametrize("value", [True, 2.0, "2", None])
@pytest.mark.parametrize("name", ["max_num_sequences", "vocab_size_padded", "max_num_draft_tokens", "max_look_ahead"])
def test_sizes_that_are_no_integers(factory, decoder_class, name, value):
    with pytest.raises(TypeError, match=f"{name} must be an int, got {value!r}"):
        decoder_class(factory, **{"max_num_sequences": 1, "vocab_size_padded": 64, "device": "cpu"} | {name: value})


@pytest.mark.parametrize("decoder_class", [gd.GuidedDecoder, gd.CapturableGuidedDecoder])
@pytest.mark.parametrize("shard", [(0, 2, 257), 0, "0/2", gd.VocabShard])
@pytest.mark.parametrize("name", ["shard", "draft_shard"])
def test_what_is_no_shard(factory, decoder_class, name, shard):
    with pytest.raises(TypeError, match=f"{name} must be a VocabShard or None, got"):
        decoder_class(factory, max_num_sequences=1, vocab_size_padded=64, device="cpu", **{name: shard})


def test_a_vocabulary_wider_than_the_logits(kit, factory):
    with pytest.raises(ValueError, match="the vocabulary has 16 tokens but vocab_size_padded is 8"):
        gd.GuidedDecoder(factory, max_num_sequences=1, vocab_size_padded=8, device="cpu")


@pytest.mark.parametrize("decoder_class", [gd.GuidedDecoder, gd.CapturableGuidedDecoder])
def test_what_is_no_factory_and_what_is_no_config(kit, factory, decoder_class):
    sizes = {"max_num_sequences": 1, "vocab_size_padded": 64, "device": "cpu"}
    with pytest.raises(TypeError, match=r"got Vocabulary; use GrammarMatcherFactory\(vocabulary\)"):
        decoder_class(factory.vocabulary, **sizes)
    for config in ({}, {"backend": "xgrammar"}, "xgrammar"):
        with pytest.raises(TypeError, match="config must be a GuidedDecodingConfig, got"):
            decoder_class(factory, config=config, **sizes)
        with pytest.raises(TypeError, match="config must be a GuidedDecodingConfig, got"):
            gd.GrammarMatcherFactory(factory.vocabulary, config=config)


# rows -------------------------------------------------------------------------------------------------------------


def test_host_memory_is_as_computed(kit, factory):
    decoder = gd.GuidedDecoder(
        factory, max_num_sequences=8, vocab_size_padded=128_256, max_num_draft_tokens=4, device="cpu"
    )
    assert decoder.bitmask_host.shape == (8 * 5, 128_256 // 32)
    assert decoder.token_mask_host.shape == (40,)
    first, second = decoder._buffers.host
    # and two rows, in front of each buffer's rows, for its switches
    assert first.matrix is second.matrix and first.matrix.shape == (2 * (8 * 5 + 1), 128_256 // 32)


def test_stray_bits_are_no_legal_tokens(kit):
    class Stray(kit.TableMatcher):
        def fill_next_token_bitmask(self, bitmask, index):
            bitmask[index] = 0
            bitmask.numpy()[index].view(np.uint32)[:] = [0xFFFF0000, 0xFFFFFFFF]

    decoder = kit.decoder(kit.TableFactory(TABLES))
    decoder.grammar_matchers[0] = Stray(TABLES["abc"])
    failed = kit.step(decoder, kit.generation(ABC, "a"))
    assert [request_id for request_id, _ in failed] == [0]


def test_padding_columns_are_banned_in_guided_rows(kit, factory):
    decoder = kit.decoder(factory)
    logits = torch.zeros(1, kit.PADDED)
    decoder.add_batch([kit.context(kit.JSON)])
    decoder.execute(logits)
    assert logits[0, 16:].isinf().all() and logits[0, 0] == 0
