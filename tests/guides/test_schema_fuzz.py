"""Random schemas: what is admitted is valid, and every random walk ends in a valid instance. A refusal is allowed."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gd_plugin as gd
from tests.fuzz import pick
from tests.schemas import Texts, hints, is_valid, schemas, spellings, values, walk

pytest.importorskip("llguidance")


@settings(max_examples=pick(ci=40, long=5000))
@given(
    schema=schemas(),
    instances=st.lists(values(), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 32),
    order=st.sampled_from(["declared", "any"]),
)
def test_nothing_invalid_is_admitted(schema, instances, seed, order):
    try:
        texts = Texts(schema, property_order=order)
    except gd.GuideError:
        return
    for instance in instances:
        for text in spellings(instance):
            assert not texts.admits(text) or is_valid(schema, instance), text
    rng = random.Random(seed)
    for _ in range(3):
        texts.matcher.reset()
        text = walk(texts.matcher, rng, hints=hints(schema))
        assert text is not None, "a dead end"
        assert not text or is_valid(schema, json.loads(text)), text
