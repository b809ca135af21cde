"""Rows of a step: which have a legal token, and how they are switched, repeated and banned. Judges count bits in Python."""

import random

import numpy as np
import pytest
import torch

import gd_plugin as gd
from gd_plugin.decoding.rows import DraftVocabulary, RowWriter
from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.masks.device import CpuDevice

WIDTHS = [1, 31, 32, 33, 64, 128_000, 128_001, 128_031]


def writer(vocab_size, rows=4, width=None, **options):
    """A writer of the second host buffer, whose rows do not begin the memory."""
    return RowWriter(MaskBuffers(CpuDevice(), rows, width or vocab_size).host[1], vocab_size, **options)


def set_bits(rows, row, tokens):
    words = rows._words.view(np.uint32)
    words[row] = 0
    for token in tokens:
        words[row, token // 32] |= np.uint32(1 << (token % 32))


@pytest.mark.parametrize("vocab_size", WIDTHS)
def test_one_real_bit_makes_a_row_alive_and_none_beyond_it_does(vocab_size):
    rows = writer(vocab_size, width=vocab_size + 70)
    width = 32 * rows._words.shape[1]
    beyond = range(vocab_size, width)
    # a neighbour that is full must not count
    set_bits(rows, 0, range(min(width, 4096)))
    set_bits(rows, 2, range(min(width, 4096)))
    set_bits(rows, 1, beyond)
    assert not rows.has_legal_token(1)
    # bit 31 is the sign of its word
    for token in {0, 31, vocab_size - 1, vocab_size - 2, vocab_size - 33, vocab_size - 12_346, vocab_size // 2}:
        if 0 <= token < vocab_size:
            set_bits(rows, 1, [token])
            assert rows.has_legal_token(1), token
            set_bits(rows, 1, [token, *beyond])
            assert rows.has_legal_token(1), token


@pytest.mark.parametrize("vocab_size", [5, 40, 64, 70])
def test_a_pruned_vocabulary_counts_what_it_can_spell(vocab_size):
    rng = random.Random(vocab_size)
    rows = writer(vocab_size)
    for _ in range(200):
        spelled = sorted(rng.sample(range(vocab_size), rng.randint(1, vocab_size)))
        legal = set(rng.sample(range(vocab_size), rng.randint(0, vocab_size)))
        d2t = torch.tensor(spelled) - torch.arange(len(spelled))
        words = DraftVocabulary(None, rows._words.shape[1], vocab_size).words(d2t)
        rows.begin(4, words)
        set_bits(rows, 3, [*legal, *range(vocab_size, 32 * rows._words.shape[1])])
        assert rows.has_legal_token(3) == bool(legal & set(spelled))
        rows.begin(4, None)
        assert rows.has_legal_token(3) == bool(legal)


def test_a_shard_of_a_pruned_vocabulary_does_not_decide():
    shard = gd.VocabShard(1, 2, 10)
    vocabulary = DraftVocabulary(shard, 2, 40)
    assert vocabulary.words(torch.zeros(5, dtype=torch.int32)) is None
    assert vocabulary.words(None) is None
    whole = vocabulary.words(torch.arange(10, dtype=torch.int32))
    assert [token for token in range(64) if int(whole[token // 32]) >> (token % 32) & 1] == list(range(0, 20, 2))


def test_switching_repeating_and_banning():
    rows = writer(70)
    rows._token_mask[:] = 1
    rows.begin(3, None)
    assert rows._token_mask.tolist() == [0, 0, 0, 1]
    set_bits(rows, 0, [31, 32, 69])
    rows.switch_on(0)
    rows.repeat(0, range(1, 3))
    assert rows._token_mask.tolist() == [1, 1, 1, 1]
    assert (rows._words[:3] == rows._words[0]).all()
    rows.repeat(0, range(1, 1))
    rows.ban(1, 31)
    rows.ban(1, 69)
    assert rows._words[1].tolist() == [0, 1, 0] and rows._words[0].tolist() != [0, 1, 0]
    rows.switch_off(1)
    assert rows._token_mask.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("num_matchers", [1, 3])
def test_errors_are_told_by_position_and_the_other_rows_are_filled(kit, factory, num_matchers):
    rows = writer(16, width=kit.PADDED)
    matchers = [factory.create(kit.JSON) for _ in range(num_matchers)]

    class Broken(kit.TableMatcher):
        def fill_next_token_bitmask(self, bitmask, index):
            raise RuntimeError("no row today")

    matchers[0] = Broken({})
    errors = rows.fill(matchers, list(range(num_matchers)))
    assert {position: str(error) for position, error in errors.items()} == {0: "no row today"}
    assert all(rows.has_legal_token(row) for row in range(1, num_matchers))
