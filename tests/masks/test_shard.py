"""VocabShard: default and free edges, equality, refusals."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from gd_plugin.masks.apply import apply_token_bitmask_
from gd_plugin.masks.argmax import argmax_under_bitmask
from gd_plugin.masks.shard import VocabShard


@pytest.mark.parametrize("total", [0, 1, 5, 31, 128256, 151936, 128001])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16])
def test_default_edges_cover_the_vocabulary_in_order(total, world_size):
    shards = [VocabShard(rank, world_size, total) for rank in range(world_size)]
    columns = [column for shard in shards for column in range(shard.start, shard.stop)] if total < 100 else None
    assert shards[0].start == 0
    assert shards[-1].stop == total
    assert all(left.stop == right.start for left, right in pairwise(shards))
    assert columns is None or columns == list(range(total))
    width = -(-total // world_size)
    assert all(shard.start == min(shard.rank * width, total) for shard in shards)


def test_edges_of_any_kind_compare_equal():
    assert VocabShard(1, 2, 10, [0, 3, 10]) == VocabShard(1, 2, 10, (0, 3, 10))
    assert hash(VocabShard(1, 2, 10, [0, 3, 10])) == hash(VocabShard(1, 2, 10, (0, 3, 10)))
    assert (VocabShard(1, 2, 10, [0, 3, 10]).start, VocabShard(1, 2, 10, [0, 3, 10]).stop) == (3, 10)
    assert VocabShard(1, 3, 10, [0, 4, 4, 10]).num_columns == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((2, 2, 10), "rank"),
        ((-1, 2, 10), "rank"),
        ((0, 0, 10), "world_size"),
        ((0, 1, -1), "total"),
        ((0, 2, 10, [0, 10]), "edges"),
        ((0, 2, 10, [1, 5, 10]), "edges"),
        ((0, 2, 10, [0, 5, 9]), "edges"),
        ((0, 3, 10, [0, 7, 5, 10]), "edges"),
    ],
)
def test_refusals_name_the_argument(arguments, named):
    with pytest.raises(ValueError, match=named):
        VocabShard(*arguments)


def test_shards_of_any_edges_put_together_equal_the_whole():
    rng = np.random.default_rng(2)
    for _ in range(150):
        vocab, world_size = int(rng.integers(1, 300)), int(rng.integers(1, 6))
        bitmask = torch.from_numpy(rng.integers(-(2**31), 2**31, (2, (vocab + 31) // 32)).astype(np.int32))
        d2t, total = None, vocab
        if rng.random() < 0.5:
            total = int(rng.integers(1, vocab + 1))
            d2t = torch.from_numpy(np.sort(rng.choice(vocab, total, replace=False)) - np.arange(total))
        # empty shards, shards of one column, edges inside mask words
        edges = [0, *np.sort(rng.integers(0, total + 1, world_size - 1)).tolist(), total]
        logits = torch.from_numpy(rng.standard_normal((2, total))).float()
        parts = []
        for rank in range(world_size):
            shard = VocabShard(rank, world_size, total, edges)
            part = logits[:, shard.start : shard.stop].clone()
            parts.append(apply_token_bitmask_(part, bitmask, d2t=d2t, shard=shard, vocab_size=vocab))
        assert torch.equal(torch.cat(parts, dim=1), apply_token_bitmask_(logits, bitmask, d2t=d2t, vocab_size=vocab))


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
@pytest.mark.parametrize("name", ["rank", "world_size", "total"])
def test_numbers_that_are_no_integers(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an int, got {value!r}"):
        VocabShard(**{"rank": 0, "world_size": 2, "total": 64} | {name: value})


@pytest.mark.parametrize("edge", [32.0, "32", None, True])
def test_edges_that_are_no_integers(edge: object) -> None:
    with pytest.raises(TypeError, match="edges must be column numbers"):
        VocabShard(0, 2, 64, edges=(0, edge, 64))


def test_what_is_no_shard() -> None:
    logits, bitmask = torch.zeros(1, 64), torch.zeros(1, 2, dtype=torch.int32)
    for operation in (apply_token_bitmask_, argmax_under_bitmask):
        with pytest.raises(TypeError, match="shard must be a VocabShard or None"):
            operation(logits, bitmask, shard=(0, 2, 64))
