"""VocabShard: default and free edges, equality, refusals."""

from itertools import pairwise

import pytest

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
