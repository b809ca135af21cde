"""The accounting of speculation, example by example. `$` is the stop token; K = 3 unless a test says otherwise."""

import pytest
import torch

import gd_plugin as gd

DEAD_END = {  # "a" "b" "z", and no token spells "z"
    "abz": {"start": {8: "a"}, "a": {9: "ab"}, "ab": {}},
    "a1": {"start": {8: "a"}, "a": {11: "end"}, "end": {15: "$"}},
}
ABZ, A1 = gd.Guide.regex("abz"), gd.Guide.regex("a1")


def started(kit, factory, guide=None, **options):
    """A decoder whose slot 0 has been through its context step."""
    decoder = kit.decoder(factory, **options)
    assert kit.step(decoder, kit.context(guide or kit.JSON)) == []
    kit.settle(decoder, 1)
    return decoder


def counters(decoder, slot=0):
    return decoder.num_advanced_tokens[slot], decoder.num_guided_tokens[slot], decoder.max_acceptable_tokens[slot]


def test_context_step_is_credited_with_a_phantom(kit, factory):
    decoder = kit.decoder(factory)
    assert kit.step(decoder, kit.context(kit.JSON)) == []
    assert counters(decoder) == (1, 1, 1)
    assert (
        {"{", "["} <= kit.legal(decoder, 0) and "}" not in kit.legal(decoder, 0) and "</s>" not in kit.legal(decoder, 0)
    )
    assert decoder.grammar_matchers[0].num_tokens == 0
    assert kit.settle(decoder, 1) == []
    assert decoder.grammar_matchers[0].num_tokens == 0


@pytest.mark.parametrize("rows", ["repeat", "open"])
@pytest.mark.parametrize("emitted", [1, 2, 3, 4])
def test_verification_and_rollback(kit, factory, rows, emitted):
    decoder = started(kit, factory, rows=rows)
    assert kit.step(decoder, kit.generation(kit.JSON, '{"a"')) == []
    assert counters(decoder) == (4, 4, 4)
    assert kit.switches(decoder) == [1, 1, 1, 1]
    assert kit.legal(decoder, 0) == {"}", '"', " "}
    assert kit.legal(decoder, 3) == {":", " "}
    assert kit.settle(decoder, emitted) == []
    assert decoder.requests.requests[0].num_accepted_draft_tokens == emitted - 1
    assert decoder.grammar_matchers[0].num_tokens == emitted
    assert decoder.num_advanced_tokens[0] == 0

    rest = '{"a":1}'[emitted : emitted + 4]
    assert kit.step(decoder, kit.generation(kit.JSON, rest)) == []
    assert counters(decoder) == (4 if len(rest) == 4 else 3, len(rest), len(rest))
    assert "</s>" not in kit.legal(decoder, 0)


def test_a_second_rollback_does_nothing(kit, factory):
    decoder = started(kit, factory)
    kit.step(decoder, kit.generation(kit.JSON, '{"a"'))
    kit.settle(decoder, 2)
    kit.settle(decoder, 1)
    assert decoder.grammar_matchers[0].num_tokens == 2


def test_without_the_rollback_the_next_golden_token_is_refused(kit, factory):
    decoder = started(kit, factory)
    kit.step(decoder, kit.generation(kit.JSON, '{"a"'))
    logits = torch.randn(4, kit.PADDED)
    before = logits.clone()
    decoder.add_batch([kit.generation(kit.JSON, '"a":')])
    failed = decoder.execute(logits)
    assert [request_id for request_id, _ in failed] == [0]
    assert decoder.num_advanced_tokens[0] == 0
    assert torch.equal(logits, before)


@pytest.mark.parametrize(("rows", "switches"), [("repeat", [1, 1, 1, 1]), ("open", [1, 0, 0, 0])])
def test_a_draft_that_the_grammar_refuses(kit, factory, rows, switches):
    decoder = started(kit, factory, rows=rows)
    assert kit.step(decoder, kit.generation(kit.JSON, '{a"a')) == []
    assert counters(decoder) == (1, 1, 1)
    assert kit.switches(decoder) == switches
    if rows == "repeat":
        assert all(kit.legal(decoder, row) == {"}", '"', " "} for row in range(4))
    assert kit.settle(decoder, 1) == []
    assert kit.step(decoder, kit.generation(kit.JSON, '"')) == []


@pytest.mark.parametrize("rows", ["repeat", "open"])
def test_more_accepted_than_the_grammar_allows_is_a_violation(kit, factory, rows):
    decoder = started(kit, factory, rows=rows)
    kit.step(decoder, kit.generation(kit.JSON, '{a"a'))
    failed = kit.settle(decoder, 2)
    assert [request_id for request_id, _ in failed] == [0]
    assert "emitted 2" in failed[0][1] and "slot 0" in failed[0][1]
    # whoever did not look at the rollback hears of it from the next build, once
    assert [request_id for request_id, _ in kit.step(decoder, kit.generation(kit.JSON, '"'))] == [0]
    assert kit.switches(decoder) == [0, 0, 0, 0]
    assert kit.step(decoder, kit.generation(kit.JSON, '"')) == []
    assert kit.switches(decoder) == [0, 0, 0, 0]


@pytest.mark.parametrize("rows", ["repeat", "open"])
@pytest.mark.parametrize(
    ("emitted", "terminated", "accepted"), [(1, False, 0), (2, False, 1), (3, True, 2), (4, True, 2)]
)
def test_stop_token_inside_a_draft(kit, factory, rows, emitted, terminated, accepted):
    decoder = started(kit, factory, rows=rows)
    assert kit.step(decoder, kit.generation(kit.JSON, "{}$a")) == []
    assert counters(decoder) == (3, 2, 3)
    assert kit.switches(decoder) == [1, 1, 0, 0]
    assert decoder.grammar_matchers[0].is_terminated()
    assert kit.settle(decoder, emitted) == []
    assert decoder.grammar_matchers[0].is_terminated() is terminated
    assert decoder.requests.requests[0].num_accepted_draft_tokens == accepted
    if emitted == 1:
        assert kit.step(decoder, kit.generation(kit.JSON, '"a":')) == []
        assert counters(decoder) == (4, 4, 4)
    elif emitted == 2:
        assert kit.step(decoder, kit.generation(kit.JSON, "$")) == []
        assert counters(decoder) == (1, 0, 1)
        assert decoder.grammar_matchers[0].is_terminated()
        assert kit.switches(decoder) == [0, 0, 0, 0]
    else:
        # the engine runs one step ahead of the news that the request is over
        assert kit.step(decoder, kit.generation(kit.JSON, "aaaa")) == []
        assert counters(decoder)[:2] == (0, 0)
        assert kit.switches(decoder) == [0, 0, 0, 0]


def test_dead_end_of_a_target_request(kit):
    decoder = started(kit, kit.TableFactory(DEAD_END), ABZ, drafts=0)
    kit.step(decoder, kit.generation(ABZ, "a"))
    logits = torch.zeros(2, kit.PADDED)
    decoder.add_batch([kit.generation(ABZ, "b"), kit.context(A1, slot=1)])
    failed = decoder.execute(logits)
    assert [request_id for request_id, _ in failed] == [0]
    assert "'ab'" in failed[0][1] and "slot 0" in failed[0][1]
    assert kit.switches(decoder, 2) == [0, 1]
    assert decoder.num_advanced_tokens == [0, 1]
    assert decoder.grammar_matchers[0].num_tokens == 1
    assert torch.equal(logits[0], torch.zeros(kit.PADDED))
    assert logits[1].isfinite().nonzero().flatten().tolist() == [8]


def test_dead_end_in_the_context_step(kit):
    decoder = kit.decoder(kit.TableFactory({"abz": {"start": {}}}))
    assert [request_id for request_id, _ in kit.step(decoder, kit.context(ABZ))] == [0]
    assert counters(decoder) == (0, 0, 1)
    assert kit.settle(decoder, 1) == []


@pytest.mark.parametrize(
    ("rows", "look_ahead", "failed", "advanced", "switches"),
    [
        ("open", 0, [], (2, 1, 2), [1, 0]),
        ("repeat", 0, [], (1, 1, 1), [1, 1]),
        # b is the only token of row 0 and leads to a dead row, so row 0 is one
        ("open", 8, [0], (0, 0, 1), [0, 0]),
        ("repeat", 8, [0], (0, 0, 1), [0, 0]),
    ],
)
def test_dead_end_at_a_draft_position(kit, rows, look_ahead, failed, advanced, switches):
    decoder = kit.decoder(kit.TableFactory(DEAD_END), drafts=1, rows=rows, max_look_ahead=look_ahead)
    kit.step(decoder, kit.context(ABZ, request_id=0))
    if look_ahead:
        # a leads to "ab" only, which is dead, but one step is all that is looked ahead
        assert kit.legal(decoder, 0) == {"a"}
    kit.settle(decoder, 1)
    assert [request_id for request_id, _ in kit.step(decoder, kit.generation(ABZ, "ab"))] == failed
    assert counters(decoder) == advanced
    assert kit.switches(decoder, 2) == switches
    if not failed:
        assert kit.settle(decoder, 1) == []
        assert decoder.grammar_matchers[0].num_tokens == 1


def test_a_token_accepted_behind_an_open_dead_row_fails_one_step_later(kit):
    decoder = started(kit, kit.TableFactory(DEAD_END), ABZ, drafts=1, rows="open")
    kit.step(decoder, kit.generation(ABZ, "ab"))
    assert kit.settle(decoder, 2) == []
    assert [request_id for request_id, _ in kit.step(decoder, kit.generation(ABZ, "c"))] == [0]


def test_look_ahead_removes_only_the_tokens_that_lead_nowhere(kit):
    table = {"start": {8: "a", 9: "b", 11: "end"}, "a": {}, "b": {15: "$"}, "end": {15: "$"}}
    decoder = kit.decoder(kit.TableFactory({"abz": table}), max_look_ahead=8)
    kit.step(decoder, kit.context(ABZ))
    assert kit.legal(decoder, 0) == {"b", "1"}
    assert decoder.grammar_matchers[0].num_tokens == 0


def test_dead_end_of_a_draft_request(kit):
    decoder = started(kit, kit.TableFactory(DEAD_END), ABZ)
    kit.step(decoder, kit.generation(ABZ, "a"))
    kit.settle(decoder, 1)
    assert kit.step(decoder, kit.draft(ABZ, "b")) == []
    assert decoder.is_draft_terminated[0]
    assert decoder.num_advanced_draft_tokens[0] == 1
    assert kit.switches(decoder, 1) == [0]
    decoder.rollback_draft_tokens()
    assert decoder.grammar_matchers[0].num_tokens == 1
    assert (decoder.num_advanced_draft_tokens[0], decoder.is_draft_terminated[0]) == (0, False)


def run_draft_loop(kit, decoder, guide, tokens, emitted, **options):
    """A draft loop over `tokens`; returns (advanced draft tokens, row switch) of each step."""
    seen = []
    for step, token in enumerate(kit.ids(tokens)):
        counts = torch.tensor([emitted], dtype=torch.int32)
        decoder.add_draft_batch(torch.tensor([token], dtype=torch.int32), counts, draft_step=step)
        assert decoder.execute_draft_batch(torch.zeros(1, kit.PADDED), draft_step=step, **options) == []
        seen.append((decoder.num_advanced_draft_tokens[0], kit.switches(decoder, 1)[0]))
    return seen


def test_draft_loop_goes_back_to_the_verified_state(kit, factory):
    decoder = started(kit, factory)
    kit.step(decoder, kit.generation(kit.JSON, '{"a"'))
    # the last step rolls everything back, the golden token of step 0 included
    assert run_draft_loop(kit, decoder, kit.JSON, 'a":', emitted=2) == [(1, 1), (2, 1), (0, 1)]
    assert decoder.grammar_matchers[0].num_tokens == 2
    assert kit.step(decoder, kit.generation(kit.JSON, 'a":1')) == []
    assert counters(decoder) == (4, 4, 4)


def test_draft_loop_behind_a_refused_draft_is_unguided(kit, factory):
    decoder = started(kit, factory)
    assert run_draft_loop(kit, decoder, kit.JSON, "{1a", emitted=1) == [(1, 1), (1, 0), (0, 0)]
    assert decoder.grammar_matchers[0].num_tokens == 0
    assert not decoder.is_draft_terminated[0]
    assert kit.step(decoder, kit.generation(kit.JSON, '{"a"')) == []
    assert counters(decoder) == (4, 4, 4)


def test_draft_loop_of_a_refused_golden_token_leaves_no_trace(kit, factory):
    decoder = started(kit, factory)
    assert run_draft_loop(kit, decoder, kit.JSON, "}aa", emitted=1) == [(0, 0), (0, 0), (0, 0)]
    assert not decoder.is_draft_terminated[0]


def test_draft_loop_as_long_as_the_layout(kit, factory):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON), runtime_draft_len=2)
    assert run_draft_loop(kit, decoder, kit.JSON, '{"', emitted=1) == [(1, 1), (0, 1)]
    with pytest.raises(ValueError, match=r"draft_step must be in \[0, 2\)"):
        decoder.add_draft_batch(torch.zeros(1, dtype=torch.int32), None, draft_step=2)


def test_draft_loop_left_early_does_not_spoil_the_verification(kit, factory):
    decoder = started(kit, factory)
    decoder.add_draft_batch(torch.tensor(kit.ids("{"), dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    decoder.execute_draft_batch(torch.zeros(1, kit.PADDED))
    assert kit.step(decoder, kit.generation(kit.JSON, '{"a"')) == []
    assert counters(decoder) == (4, 4, 4)


def test_draft_loop_with_requests_of_the_engine(kit, factory):
    """Two models, a batch of draft requests a step, no draft batch by position."""
    decoder = started(kit, factory)
    kit.step(decoder, kit.generation(kit.JSON, '{"a"'))
    decoder.add_batch([kit.generation(kit.JSON, "a", num_accepted_draft_tokens=1)])
    decoder.rollback_rejected_tokens()
    for character in 'a":':
        assert kit.step(decoder, kit.draft(kit.JSON, character)) == []
    assert decoder.num_advanced_draft_tokens[0] == 3
    decoder.rollback_draft_tokens()
    assert kit.step(decoder, kit.generation(kit.JSON, 'a":1')) == []
    assert counters(decoder) == (4, 4, 4)


def test_no_drafts_no_rollback(kit, factory):
    decoder = started(kit, factory)
    assert kit.step(decoder, kit.generation(kit.JSON, "{"), runtime_draft_len=0) == []
    assert decoder.requests.num_bitmask_tokens == 1
    assert kit.settle(decoder, 1) == []
    assert decoder.grammar_matchers[0].num_tokens == 1
    with pytest.raises(ValueError, match="draft_step"):
        decoder.add_draft_batch(torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("text", "drafts", "rows"), [([0, 4, -1, 8], 1, [1, 1, 0, 0]), ([0, -1, -1, -1], 0, [1, 0, 0, 0])]
)
def test_drafts_are_cut_at_the_first_placeholder(kit, factory, text, drafts, rows):
    decoder = started(kit, factory)
    assert kit.step(decoder, kit.generation(kit.JSON, text)) == []
    assert counters(decoder) == (1 + drafts, 1 + drafts, 1 + drafts)
    assert kit.switches(decoder) == rows


def test_counts_go_by_batch_position_and_state_by_slot(kit, factory):
    decoder = kit.decoder(factory, slots=4)
    kit.step(decoder, kit.context(kit.JSON, slot=3), gd.GuidedRequest(request_id="free"), kit.context(kit.JSON, slot=1))
    kit.settle(decoder, 1, 9, 1)
    free = gd.GuidedRequest(request_id="free", seq_slot=2, is_generation_in_progress_state=True, new_token=0)
    batch = [kit.generation(kit.JSON, '{"a"', slot=3), free, kit.generation(kit.JSON, "{}$a", slot=1)]
    assert kit.step(decoder, *batch) == []
    assert kit.switches(decoder, 12) == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]
    assert kit.settle(decoder, 3, 77, 2) == []
    assert [matcher and matcher.num_tokens for matcher in decoder.grammar_matchers] == [None, 2, None, 3]


def test_own_counts_leave_the_bonus_out(kit, factory):
    decoder = started(kit, factory)
    kit.step(decoder, kit.generation(kit.JSON, '{"a"'))
    decoder.add_batch([kit.generation(kit.JSON, '"', num_accepted_draft_tokens=0)])
    assert decoder.rollback_rejected_tokens() == []
    assert decoder.grammar_matchers[0].num_tokens == 1
    assert decoder.build() == []
    with pytest.raises(ValueError, match="num_accepted_draft_tokens is missing"):
        kit.step(decoder, kit.generation(kit.JSON, "a"))
        kit.step(decoder, kit.generation(kit.JSON, 'a":1'))
        decoder.rollback_rejected_tokens()


@pytest.mark.parametrize("count", [0, -3])
def test_an_impossible_count_fails_its_request_alone(kit, factory, count):
    decoder = kit.decoder(factory)
    kit.step(decoder, kit.context(kit.JSON), kit.context(kit.JSON, slot=1))
    kit.settle(decoder, 1, 1)
    kit.step(decoder, kit.generation(kit.JSON, '{"a"'), kit.generation(kit.JSON, '{"a"', slot=1))
    assert [request_id for request_id, _ in kit.settle(decoder, count, 2)] == [0]
    assert decoder.grammar_matchers[1].num_tokens == 2


def test_a_pruned_draft_vocabulary_that_cannot_spell_the_guide(kit):
    decoder = started(kit, kit.TableFactory(DEAD_END), A1)
    kit.step(decoder, kit.generation(A1, "a"))
    kit.settle(decoder, 1)
    # draft columns 0..3 stand for tokens 0..3: none of them continues "a"
    d2t = torch.zeros(4, dtype=torch.int32)
    decoder.add_draft_batch(torch.tensor([11], dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    logits = torch.zeros(1, 4)
    assert decoder.execute_draft_batch(logits, d2t) == []
    assert logits.isfinite().all()
    assert decoder.is_draft_terminated[0]
