"""State by slot: whose it is, and what has been consumed."""

import random

import pytest

import gd_plugin as gd
from gd_plugin.decoding.slots import SlotStates

TABLE = {"start": {8: "start", 9: "start", 10: "c"}, "c": {15: "$"}}
GUIDE = gd.Guide.regex("[ab]*c")


def states(kit, matcher=None):
    slots = SlotStates(2, kit.TableFactory({}).vocabulary)
    slots.attach(1, "mine", GUIDE, matcher or kit.TableMatcher(TABLE))
    return slots


def test_a_slot_knows_its_owner(kit):
    slots = states(kit)
    assert not slots.owner_matches(0, "mine") and not slots.owner_matches(0, None)
    assert slots.owner_matches(1, "mine") and not slots.owner_matches(1, "yours")
    assert slots.is_live(1, "mine", GUIDE) and not slots.is_live(1, "mine", gd.Guide.regex("a"))
    slots.fail(1)
    # a request that has failed keeps its slot
    assert slots.owner_matches(1, "mine") and not slots.is_live(1, "mine", GUIDE)
    slots.attach(1, "yours", GUIDE, None)
    assert slots.owner_matches(1, "yours") and not slots.owner_matches(1, "mine")


def test_a_matcher_of_the_callers_belongs_to_whoever_asks_first(kit):
    slots = states(kit)
    slots.accept(1, 8)
    slots.matchers[1] = kit.TableMatcher(TABLE)
    assert slots.owner_matches(1, "new") and not slots.owner_matches(1, "mine")
    assert slots.tokens(1) == []


def test_nothing_of_the_one_before_is_left_behind(kit):
    slots = states(kit)
    slots.accept(1, 8)
    for counter in (slots.num_advanced, slots.num_guided, slots.num_advanced_draft):
        counter[1] = 3
    slots.draft_terminated[1], slots.errors[1], slots.drafts[1] = True, "broken", [4]
    slots.attach(1, "new", GUIDE, kit.TableMatcher(TABLE))
    assert (slots.num_advanced[1], slots.num_guided[1], slots.num_advanced_draft[1]) == (0, 0, 0)
    assert (slots.draft_terminated[1], slots.errors[1], slots.drafts[1], slots.tokens(1)) == (False, None, (), [])


def test_a_replay_ends_behind_the_history_from_wherever_it_starts(kit):
    rng = random.Random(0)
    for _ in range(200):
        slots = states(kit)
        for _ in range(rng.randrange(6)):
            slots.accept(1, rng.choice([8, 9]))
        history = [rng.choice([8, 9]) for _ in range(rng.randrange(6))] + rng.choice([[], [10], [10, 15]])
        assert slots.replay(1, history) is None
        assert slots.tokens(1) == history and slots.matchers[1].num_tokens == len(history)
        assert slots.matchers[1].is_terminated() == (history[-1:] == [15])


def test_a_replay_undoes_no_more_than_it_must(kit):
    slots, undone = states(kit), []
    matcher = slots.matchers[1]
    matcher.fault = lambda call: undone.append(call) if call == "rollback" else None
    for token in [8, 9, 8]:
        slots.accept(1, token)
    assert slots.replay(1, [8, 9, 8, 8]) is None and undone == []
    assert slots.replay(1, [8, 9]) is None and matcher.num_tokens == 2
    assert slots.replay(1, [8, 15, 8]) == 1


def test_a_matcher_with_a_past_of_its_own_is_started_anew_by_a_replay(kit):
    matcher = kit.TableMatcher(TABLE)
    assert matcher.accept_token(9)
    slots = states(kit, matcher)
    assert slots.replay(1, [8]) is None
    assert matcher.num_tokens == 1


def test_a_rollback_too_far_changes_nothing(kit):
    slots = states(kit)
    slots.accept(1, 8)
    with pytest.raises(gd.RollbackError):
        slots.rollback(1, 2)
    assert slots.tokens(1) == [8] and slots.matchers[1].num_tokens == 1
    slots.num_advanced_draft[1], slots.draft_terminated[1] = 5, True
    with pytest.raises(gd.RollbackError):
        slots.rollback_drafts(1)
    assert (slots.num_advanced_draft[1], slots.draft_terminated[1]) == (0, False)


def test_messages_show_the_end_of_the_text(kit):
    slots = states(kit)
    for _ in range(100):
        slots.accept(1, 8)
    assert slots.text(1) == "..." + 64 * "a"
    slots = SlotStates(1)
    slots.attach(0, "mine", GUIDE, kit.TableMatcher(TABLE))
    slots.accept(0, 9)
    assert slots.text(0) == "9"
