"""OutputBuffers: CPU memory for results, used again once nobody holds them.

In:  a tensor to be like.      Out: an uninitialised contiguous tensor that shares memory with no tensor alive.
Why: a result of many megabytes comes in fresh pages each time, and touching these costs more than masking does.
"""

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["OutputBuffers"]

# smaller results come from memory that the allocator has at hand
_FROM_BYTES: Final = 1 << 17
# a loop holds the last step's result while it asks for the next; one more for what is computed from it
_MAX_KEPT: Final = 3
_ALIGNMENT: Final = 64


def _references_when_free() -> int:
    """What `_free` counts of an array that only its list holds: the interpreter's own share differs by version."""
    kept = [np.empty(1)]
    for memory in kept:
        return sys.getrefcount(memory)
    return 0


_REFERENCES_WHEN_FREE: Final = _references_when_free()


class OutputBuffers:
    """Hands out tensors; one caller at a time. Keeps at most three results' memory."""

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[Any]] = []

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised contiguous tensor of the shape and dtype of `tensor`, which is on the CPU."""
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < _FROM_BYTES:
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        memory = self._free(num_bytes)
        # the tensor's storage, and with it every view of it, holds a reference to this array
        return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)

    def _free(self, num_bytes: int) -> npt.NDArray[Any]:
        for memory in self._kept:
            if memory.nbytes == num_bytes and sys.getrefcount(memory) == _REFERENCES_WHEN_FREE:
                return memory
        base = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -base.ctypes.data % _ALIGNMENT
        fresh: npt.NDArray[Any] = base[start : start + num_bytes]
        self._kept.append(fresh)
        # what is still held elsewhere lives on there
        del self._kept[:-_MAX_KEPT]
        return fresh
