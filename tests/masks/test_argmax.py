"""argmax_under_bitmask on the CPU, against a loop."""

import numpy as np
import pytest
import torch

from gd_plugin.masks.argmax import argmax_under_bitmask
from gd_plugin.masks.shard import VocabShard


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_equals_argmax_over_the_legal_columns(dtype):
    rng = np.random.default_rng(4)
    for density in (0, 0.02, 0.5, 1):
        bits = rng.random((5, 128)) < density
        mask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())
        logits = torch.from_numpy(rng.integers(-3, 4, (5, 100))).to(dtype)
        for row, column in enumerate(argmax_under_bitmask(logits, mask).tolist()):
            legal = [c for c in range(100) if bits[row, c]]
            assert column == max(legal, key=lambda c: (float(logits[row, c]), -c), default=-1)


def test_shards_name_their_own_columns():
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    mask = torch.tensor([[0b101000]], dtype=torch.int32)
    assert argmax_under_bitmask(logits, mask, shard=VocabShard(1, 2, 6)).tolist() == [2]


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="bitmask"):
        argmax_under_bitmask(torch.zeros(1, 64), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="row_index"):
        argmax_under_bitmask(
            torch.zeros(1, 64), torch.zeros((1, 2), dtype=torch.int32), row_index=torch.tensor([1], dtype=torch.int32)
        )
