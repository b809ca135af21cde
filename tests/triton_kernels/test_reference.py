"""The definitions themselves, against a double loop over single bits."""

import math

import numpy as np
import torch
from gd_plugin.triton_kernels.reference import (
    apply_token_bitmask_reference,
    argmax_under_bitmask_reference,
    legal_columns,
)


def random_case(rng):
    rows, columns, words = int(rng.integers(0, 4)), int(rng.integers(0, 80)), int(rng.integers(0, 4))
    mask_rows = rows + int(rng.integers(0, 2))
    bits = rng.random((mask_rows, 32 * words)) < rng.choice([0, 0.1, 0.5, 1])
    bitmask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(mask_rows, words))
    token_mask = torch.from_numpy(rng.integers(0, 2, rows).astype(np.int32)) if rng.random() < 0.4 else None
    row_index = torch.from_numpy(rng.integers(-1, mask_rows + 1, rows).astype(np.int32)) if rng.random() < 0.4 else None
    d2t = torch.from_numpy(rng.integers(-50, 50, int(rng.integers(0, columns + 1)))) if rng.random() < 0.4 else None
    col_start, limit = int(rng.integers(0, 40)), int(rng.integers(0, 32 * words + 1))
    logits = torch.from_numpy(rng.integers(-2, 3, (rows, columns))).float()
    for value in (float("nan"), float("-inf"), -0.0):
        logits[torch.from_numpy(rng.random((rows, columns)) < 0.05)] = value
    return logits, bits, (bitmask, token_mask, d2t, row_index, col_start, limit)


def is_legal(bits, row, column, token_mask, d2t, row_index, col_start, limit):
    mask_row = row if row_index is None else int(row_index[row])
    if mask_row < 0 or (token_mask is not None and token_mask[row] == 0):
        return True
    token = col_start + column
    if d2t is not None:
        if column >= len(d2t):
            return False
        token += int(d2t[column])
    return mask_row < len(bits) and 0 <= token < limit and bool(bits[mask_row, token])


def test_definitions_equal_the_double_loop():
    rng = np.random.default_rng(5)
    for _ in range(300):
        logits, bits, arguments = random_case(rng)
        rows, columns = logits.shape
        legal = [[is_legal(bits, r, c, *arguments[1:]) for c in range(columns)] for r in range(rows)]
        assert legal_columns(rows, columns, *arguments).tolist() == legal
        masked = apply_token_bitmask_reference(logits, *arguments)
        best = argmax_under_bitmask_reference(logits, *arguments).tolist()
        for row in range(rows):
            for column in range(columns):
                kept = masked[row, column].item()
                assert kept == -math.inf or legal[row][column]
                value = logits[row, column].item()
                assert not legal[row][column] or kept == value or (math.isnan(kept) and math.isnan(value))
            assert best[row] == greatest(logits[row].tolist(), legal[row])


def greatest(values, legal):
    """NaN above all numbers, the first of equals, -1 for nothing."""
    best = -1
    for column, value in enumerate(values):
        if not legal[column]:
            continue
        if best < 0 or value > values[best] or (math.isnan(value) and not math.isnan(values[best])):
            best = column
    return best
