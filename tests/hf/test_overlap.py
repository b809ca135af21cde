"""Ids down and rows up beside the forward pass: the data on the CPU device; the order on a simulated device."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from gd_plugin.hf.overlap import OverlappedStep
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns
from gd_plugin.masks.device import CpuDevice
from gd_plugin.testing import SimulatedDevice, SimulatedDeviceError

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


# the order of work, on a simulated device -----------------------------------------------------------------------------

ROWS, STEPS = 2, 6
FORWARD = torch.from_numpy(np.random.default_rng(7).standard_normal((WIDTH, WIDTH))).float()


def allowed_after(ids: np.ndarray) -> torch.Tensor:
    """A guide: which tokens may come next depends on all the tokens so far."""
    return torch.cat([make_rows(abs(hash(tuple(row))) % 2**32, 1) for row in ids.tolist()])


def forward(ids: torch.Tensor, scores: torch.Tensor) -> None:
    scores.copy_(FORWARD[ids[:, -1] % WIDTH])


def sample(ids: torch.Tensor, scores: torch.Tensor, longer: torch.Tensor) -> None:
    longer[:, :-1] = ids
    longer[:, -1] = scores.argmax(dim=-1)


def plain_loop() -> torch.Tensor:
    ids = torch.arange(2 * ROWS).reshape(ROWS, 2)
    for _ in range(STEPS):
        scores, longer = torch.empty(ROWS, WIDTH), torch.empty((ROWS, ids.shape[1] + 1), dtype=torch.int64)
        forward(ids, scores)
        scores = expect(scores, allowed_after(ids.numpy()), np.arange(ROWS))
        sample(ids, scores, longer)
        ids = longer
    return ids


def overlapped_loop(device: SimulatedDevice, *, waits_at_head: bool = True) -> tuple[torch.Tensor, set[int]]:
    """What `generate` does with a GPU. Return its ids and the steps where the host was done before the forward pass."""
    step, head = OverlappedStep(device, ROWS, WIDTH), device.event()
    ids, ahead = torch.arange(2 * ROWS).reshape(ROWS, 2), set()
    for number in range(STEPS):
        device.record(head, device.main())
        if waits_at_head:
            device.synchronize(head)
        scores = torch.full((ROWS, WIDTH), float("nan"))
        longer = torch.full((ROWS, ids.shape[1] + 1), -7, dtype=torch.int64)
        device.launch(partial(forward, ids, scores), device.main(), reads=[ids], writes=[scores])
        read = step.fetch(ids, early=number > 0)
        out = step.apply(ids, read, allowed_after(read), np.arange(ROWS, dtype=np.int32), scores)
        if sum(done.name == "forward" for done in device.trace) <= number:
            ahead.add(number)
        device.launch(partial(sample, ids, out, longer), device.main(), reads=[ids, out], writes=[longer])
        ids = longer
    device.synchronize_all()
    return ids, ahead


def test_every_schedule_gives_what_the_plain_loop_gives():
    wanted = plain_loop()
    for seed in range(60):
        device = SimulatedDevice(seed)
        assert torch.equal(overlapped_loop(device)[0], wanted)
        device.check()


def test_nothing_waits_for_the_forward_pass_but_the_first_step():
    """What can come first under some schedule waits for nothing: the host's part, and the rows on the device."""
    ahead, with_rows = set(), 0
    for seed in range(60):
        device = SimulatedDevice(seed, pace=0.05)
        ahead |= overlapped_loop(device)[1]
        names = [done.name for done in device.trace]
        starts = [at for at, name in enumerate(names) if name == "forward"]
        # last ids and rows of one step go up behind one forward pass, those of the next in front of the next
        with_rows += any(names[a:b].count("from host to device") == 4 for a, b in pairwise(starts))
    assert ahead == set(range(1, STEPS))
    assert with_rows


def test_a_loop_that_does_not_wait_is_noticed_under_every_schedule():
    wanted, num_noticed = plain_loop(), 0
    for seed in range(60):
        device = SimulatedDevice(seed)
        try:
            ids, _ = overlapped_loop(device, waits_at_head=False)
        except RuntimeError as error:
            assert "overlap=False" in str(error)
            num_noticed += 1
        else:
            # the ids of the last step would be judged at the next one
            assert torch.equal(ids[:, :-1], wanted[:, :-1])
        with pytest.raises(SimulatedDeviceError, match="nothing orders the two"):
            device.check()
    assert num_noticed
