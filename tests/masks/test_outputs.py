"""OutputBuffers: memory is used again when, and only when, no tensor holds it."""

import pytest
import torch

from gd_plugin.masks.outputs import OutputBuffers

LIKE = torch.zeros(4, 50_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_shape_dtype_and_layout(dtype: torch.dtype) -> None:
    like = torch.zeros(50_000, 4, dtype=dtype).t()
    result = OutputBuffers().empty_like(like)
    assert (result.shape, result.dtype) == (like.shape, dtype)
    assert result.is_contiguous() and result.data_ptr() % 64 == 0


def test_memory_is_used_again() -> None:
    buffers = OutputBuffers()
    first = buffers.empty_like(LIKE)
    address = first.data_ptr()
    del first
    assert buffers.empty_like(LIKE).data_ptr() == address


@pytest.mark.parametrize("hold", [lambda t: t, lambda t: t[1:2, 3:], lambda t: t.detach(), lambda t: t.numpy()])
def test_what_is_held_is_left_alone(hold: object) -> None:
    buffers = OutputBuffers()
    held = []
    for step in range(8):
        result = buffers.empty_like(LIKE)
        result.fill_(step)
        held.append(hold(result))  # type: ignore[operator]
        del result
    for step, kept in enumerate(held):
        assert (torch.as_tensor(kept) == step).all()


def test_another_size_gets_memory_of_its_own() -> None:
    buffers = OutputBuffers()
    small = buffers.empty_like(LIKE[:3])
    large = buffers.empty_like(LIKE)
    small.fill_(1)
    large.fill_(2)
    assert (small == 1).all() and (large == 2).all()
    assert OutputBuffers().empty_like(LIKE[:0]).shape == (0, 50_000)
