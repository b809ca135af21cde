"""Mask rows on their way to the device: the layout of the buffers, and that nothing is overwritten while it is read."""

import pytest
import torch

from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.masks.device import CpuDevice
from gd_plugin.testing import SimulatedDevice

SIZES = [  # rows, tokens
    (1, 1),
    (5, 33),
    (40, 64),
    (3, 128_256),
    (100, 50_257),
]


@pytest.mark.parametrize(("rows", "vocab_size"), SIZES)
@pytest.mark.parametrize("num_host_buffers", [1, 2])
def test_every_view_of_a_buffer_shows_the_same_memory_and_no_other(rows, vocab_size, num_host_buffers):
    device = SimulatedDevice()
    buffers = MaskBuffers(device, rows, vocab_size, num_host_buffers=num_host_buffers)
    words = -(-vocab_size // 32)
    assert buffers.bitmask_host.shape == buffers.bitmask.shape == (rows, words)
    assert buffers.token_mask_host.shape == buffers.token_mask.shape == (rows,)
    assert buffers.bitmask_host.is_contiguous() and buffers.bitmask.is_contiguous()
    assert not buffers.bitmask_host.any() and not buffers.token_mask_host.any()
    for number, host in enumerate(buffers.host):
        host.words[:] = 10 + number
        host.switches[:] = 20 + number
    for number, host in enumerate(buffers.host):
        assert (host.bitmask == 10 + number).all() and (host.token_mask == 20 + number).all()
        assert (host.matrix[host.first : host.first + rows] == 10 + number).all()
        # one copy moves both
        assert (host.flat[:rows] == 20 + number).all() and (host.flat[-rows * words :] == 10 + number).all()


def test_host_buffers_take_turns():
    buffers = MaskBuffers(CpuDevice(), 2, 40)
    seen = []
    for step in range(4):
        words, switches = buffers.next_rows()
        words[:], switches[:] = step, step
        assert (buffers.bitmask_host == step).all() and (buffers.token_mask_host == step).all()
        seen.append(buffers.current)
    assert seen in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_the_cpu_copies_nothing():
    buffers = MaskBuffers(CpuDevice(), 2, 40)
    for step in range(3):
        words, switches = buffers.next_rows()
        words[:], switches[:] = step, 1
        buffers.copy(2)
        assert buffers.bitmask.data_ptr() == buffers.bitmask_host.data_ptr()
        assert buffers.token_mask.data_ptr() == buffers.token_mask_host.data_ptr()


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_copy_moves_the_first_rows_and_all_switches(num_rows):
    device = SimulatedDevice()
    buffers = MaskBuffers(device, 3, 70)
    words, switches = buffers.next_rows()
    words[:], switches[:] = 7, 1
    buffers.copy(num_rows)
    device.synchronize(buffers.bitmask_event)
    assert buffers.bitmask.tolist() == [[7] * 3] * num_rows + [[0] * 3] * (3 - num_rows)
    assert buffers.token_mask[:num_rows].tolist() == [1] * num_rows


@pytest.mark.parametrize("num_host_buffers", [1, 2])
def test_the_device_reads_each_steps_own_rows_on_every_schedule(num_host_buffers):
    for seed in range(60):
        device = SimulatedDevice(seed)
        buffers = MaskBuffers(device, 2, 40, num_host_buffers=num_host_buffers)
        seen = []
        for step in range(1, 6):
            words, switches = buffers.next_rows()
            words[:], switches[:] = step, step
            buffers.copy(2)
            device.wait(buffers.bitmask_event, device.main())
            bitmask, token_mask = buffers.bitmask, buffers.token_mask
            device.launch(
                lambda out=seen, rows=bitmask, on=token_mask: out.append(rows.flatten().tolist() + on.tolist()),
                device.main(),
                reads=[bitmask, token_mask],
            )
            device.record(buffers.token_event, device.main())
        device.check()
        assert seen == [[step] * 6 for step in range(1, 6)]


def test_host_memory_is_asked_for_in_one_piece():
    asked = []

    class Counting(CpuDevice):
        def empty_host(self, size):
            asked.append(size)
            return torch.zeros(size, dtype=torch.int32)

    MaskBuffers(Counting(), 4, 320)
    # one piece for both buffers: 4 rows of 10 words, and whole rows in front that hold the switches
    assert asked == [2 * (4 + 4) * 10]
