"""Ids down and rows up beside the forward pass: the data on the CPU device; the order on a simulated device."""

import numpy as np
import pytest
import torch

from gd_plugin.hf.overlap import OverlappedStep
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns
from gd_plugin.masks.device import CpuDevice

WIDTH = 70


def make_rows(seed: int, rows: int) -> torch.Tensor:
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, size=(rows, 3), dtype=np.int64).astype(np.int32)
    return torch.from_numpy(words)


def expect(scores: torch.Tensor, bitmask: torch.Tensor, row_index: np.ndarray) -> torch.Tensor:
    wanted = scores.clone()
    for row, index in enumerate(row_index.tolist()):
        if index >= 0:
            legal = torch.from_numpy(legal_columns(bitmask[index], WIDTH))
            wanted[row, ~legal] = float("-inf")
    return wanted


def test_steps_equal_the_plain_way():
    step = OverlappedStep(CpuDevice(), 3, WIDTH)
    ids = torch.arange(12).reshape(3, 4)
    for number in range(5):
        fetched = step.fetch(ids, early=number > 0)
        assert fetched.tolist() == ids.tolist()
        bitmask, scores = make_rows(number, 6), torch.randn(3, WIDTH)
        row_index = np.array([5, -1, number], dtype=np.int32)
        kept = scores.clone()
        out = step.apply(ids, fetched, bitmask, row_index, scores)
        assert torch.equal(out, expect(scores, bitmask, row_index))
        assert torch.equal(scores, kept)
        ids = torch.cat([ids, torch.full((3, 1), 20 + number)], dim=1)
    assert not step.banned_rows()


def test_rows_banned_before_the_guide_are_mended_and_told_at_the_next_step():
    step = OverlappedStep(CpuDevice(), 1, WIDTH)
    ids = torch.tensor([[1, 2]])
    bitmask = allocate_token_bitmask(1, WIDTH)
    bitmask[0, 0] = 0b110
    scores = torch.randn(1, WIDTH)
    scores[0, 1:3] = float("-inf")
    out = step.apply(ids, step.fetch(ids, early=False), bitmask, np.array([0], dtype=np.int32), scores)
    assert torch.isfinite(out[0]).nonzero().flatten().tolist() == [1, 2]
    step.fetch(ids, early=True)
    assert step.banned_rows()


def test_ids_that_were_read_too_early_are_noticed_at_the_next_step():
    step = OverlappedStep(CpuDevice(), 1, WIDTH)
    ids = torch.tensor([[1, 2]])
    wrong = step.fetch(ids, early=True)
    wrong[0, -1] = 9
    step.apply(ids, wrong, make_rows(0, 1), np.array([0], dtype=np.int32), torch.randn(1, WIDTH))
    with pytest.raises(RuntimeError, match="overlap=False"):
        step.fetch(ids, early=True)


def test_no_generated_token_yet():
    step = OverlappedStep(CpuDevice(), 2, WIDTH)
    ids = torch.empty((2, 0), dtype=torch.int64)
    fetched = step.fetch(ids, early=False)
    assert fetched.shape == (2, 0)
    bitmask, scores = make_rows(1, 2), torch.randn(2, WIDTH)
    row_index = np.array([0, 1], dtype=np.int32)
    assert torch.equal(step.apply(ids, fetched, bitmask, row_index, scores), expect(scores, bitmask, row_index))
