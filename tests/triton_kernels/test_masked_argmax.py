"""Mask and argmax in one pass, in Triton's interpreter, against its definition."""

import numpy as np
import pytest
import torch
from gd_plugin.triton_kernels.masked_argmax import launch_argmax
from gd_plugin.triton_kernels.reference import argmax_under_bitmask_reference

from gd_plugin.masks.arguments import check_arguments

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition(dtype):
    rng = np.random.default_rng(2)
    for columns in (1, 8, 33, 200, 1303):
        for density in (0, 0.01, 0.5, 1):
            rows, words = 3, columns // 32 + 1
            bits = rng.random((rows, 32 * words)) < density
            mask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())
            # few different values, so that ties abound
            logits = torch.from_numpy(rng.integers(-2, 3, (rows, columns))).to(dtype)
            for value in (float("nan"), float("inf"), float("-inf"), -0.0):
                logits[torch.from_numpy(rng.random((rows, columns)) < rng.choice([0, 0.05]))] = value
            token_mask = torch.from_numpy(rng.integers(0, 2, rows)).int() if rng.random() < 0.3 else None
            row_index = torch.from_numpy(rng.integers(-1, rows + 1, rows)).int() if rng.random() < 0.3 else None
            d2t = torch.from_numpy(rng.integers(-9, 40, int(columns * 0.9))) if rng.random() < 0.3 else None
            col_start = int(rng.choice([0, 5, 8, 33]))
            arguments = check_arguments(logits, mask, token_mask, d2t, row_index, col_start, None)
            before = logits.clone()
            got = launch_argmax(logits, arguments)
            assert got.tolist() == argmax_under_bitmask_reference(logits, *arguments).tolist()
            assert torch.equal(logits.nan_to_num(7), before.nan_to_num(7))


def test_a_legal_minus_infinity_beats_every_banned_column():
    logits = torch.tensor([[9.0, float("-inf"), 3.0, float("-inf")]])
    arguments = check_arguments(logits, torch.tensor([[0b1010]], dtype=torch.int32), None, None, None, 0, None)
    assert launch_argmax(logits, arguments).tolist() == [1]
