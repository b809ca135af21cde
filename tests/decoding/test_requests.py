"""Snapshots and the layout of rows."""

import dataclasses

import pytest

import gd_plugin as gd

GUIDE = gd.Guide.json()

STATES = [  # context, last chunk, generation, draft -> (init, advance)
    ((True, True, False, False), (True, False)),
    ((True, False, False, False), (False, False)),
    ((False, False, True, False), (False, True)),
    ((False, False, False, False), (False, False)),
    ((False, False, False, True), (False, True)),
    ((True, True, False, True), (False, True)),
    ((True, True, True, False), (True, False)),
    ((True, False, True, False), (False, False)),
]


@pytest.mark.parametrize(("state", "expected"), STATES)
def test_a_step_starts_a_guide_or_advances_it_never_both(state, expected):
    context, last, generation, draft = state
    request = gd.GuidedRequest(
        is_context_init_state=context,
        is_last_context_chunk=last,
        is_generation_in_progress_state=generation,
        is_draft=draft,
    )
    assert (request.require_matcher_init(), request.require_matcher_advance()) == expected


def request_of(kind, name=None):
    fields = {"c": "is_context_init_state", "g": "is_generation_in_progress_state", "d": "is_draft"}
    return gd.GuidedRequest(guide=GUIDE if name else None, request_id=name, **{fields[kind]: True})


LAYOUTS = [  # kinds (capital: guided), K', rows, offsets of the guided
    ("", 3, 0, []),
    ("C", 3, 1, [0]),
    ("cG", 3, 5, [1]),
    ("GcG", 2, 7, [0, 4]),
    ("gGC", 0, 3, [1, 2]),
    ("Ddd", 3, 3, [0]),
    ("ggG", 1, 6, [4]),
]


@pytest.mark.parametrize(("kinds", "draft_len", "num_rows", "offsets"), LAYOUTS)
def test_layout(kinds, draft_len, num_rows, offsets):
    batch = gd.GuidedRequests([request_of(k.lower(), k if k.isupper() else None) for k in kinds], draft_len)
    assert batch.num_bitmask_tokens == num_rows
    assert [offset for _, offset in batch.valid_requests_with_offsets()] == offsets
    assert [request.request_id for request in batch.valid_requests()] == [k for k in kinds if k.isupper()]


def test_drafts_and_targets_do_not_share_a_batch():
    with pytest.raises(ValueError, match="cannot share a batch"):
        gd.GuidedRequests([request_of("g"), request_of("d")], 1)


def test_a_snapshot_holds_every_field_and_no_list_of_the_original():
    values = {field.name: [1, 2] for field in dataclasses.fields(gd.GuidedRequest)}
    values |= {"draft_tree": ([1, -1], [-1, -1]), "guide": GUIDE, "new_token": 3, "num_accepted_draft_tokens": 1}
    request = gd.GuidedRequest(**values)
    snapshot = request.snapshot()
    for name, value in values.items():
        assert getattr(snapshot, name) == value, name
    for name in ("draft_tokens", "history", "accepted_nodes"):
        getattr(request, name).append(3)
        assert getattr(snapshot, name) == [1, 2]


def test_the_record_has_slots():
    with pytest.raises(AttributeError):
        gd.GuidedRequest().seq_slto = 3


def test_tree_from_parents():
    #      0
    #    1   2
    #   3     4 5
    tree = gd.DraftTree.from_parents([-1, 0, 0, 1, 2, 2])
    assert tree.first_child == [1, 3, 4, -1, -1, -1]
    assert tree.next_sibling == [-1, 2, -1, -1, 5, -1]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-1, -1], [-1, 0, 5]])
def test_parents_that_make_no_tree(parents):
    with pytest.raises(ValueError, match="parent"):
        gd.DraftTree.from_parents(parents)
