"""Mask rows on their way to the device: two host buffers, one device buffer, and the events between them.

In:  rows and row switches that the grammar code writes into `bitmask_host` and `token_mask_host`.
Out: the same in `bitmask` and `token_mask` on the device, ready when `bitmask_event` is.

A buffer is one piece of int32: the switches of all rows, then the rows, so that a step is one copy. There are two on
the host: while one is being copied the next step is written into the other, and a buffer is written again only when
its own copy is over.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.masks.bitmask import num_mask_words
from gd_plugin.masks.device import MaskDevice

__all__ = ["HostRows", "MaskBuffers"]

# int32 words: rows start on a boundary of 128 bytes, whatever the number of switches in front of them
_ALIGNMENT = 32


class _Rows:
    """Views of one buffer: `token_mask` int32 [rows], `bitmask` int32 [rows, W]."""

    def __init__(self, flat: torch.Tensor, rows: int, num_words: int) -> None:
        self.flat = flat
        self.token_mask = flat[:rows]
        self.bitmask = flat[_first_row(rows) :].view(rows, num_words)


class HostRows(_Rows):
    """The same in host memory, with numpy views: making one takes longer than filling a row.

    Attributes:
        matrix: int32 [all rows, W], one for all buffers: what fills rows looks at a tensor once, if it stays the same.
        first: this buffer's first row in `matrix`.
        switches: view of `token_mask`.
        words: view of `bitmask`.
    """

    def __init__(self, matrix: torch.Tensor, first: int, rows: int) -> None:
        num_words = matrix.shape[1]
        start = first * num_words - _first_row(rows)
        super().__init__(matrix.view(-1)[start : (first + rows) * num_words], rows, num_words)
        self.matrix = matrix
        self.first = first
        self.switches: npt.NDArray[np.int32] = self.token_mask.numpy()
        self.words: npt.NDArray[np.int32] = self.bitmask.numpy()


def _first_row(rows: int) -> int:
    return -(-rows // _ALIGNMENT) * _ALIGNMENT


class MaskBuffers:
    """Host and device rows of one decoder.

    Attributes:
        num_rows: rows there is room for.
        host: the host buffers.
        current: index of the one that is being written.
    """

    def __init__(self, device: MaskDevice, num_rows: int, vocab_size: int, *, num_host_buffers: int = 2) -> None:
        self._device = device
        self.num_rows = num_rows
        num_words = num_mask_words(vocab_size)
        size = _first_row(num_rows) + num_rows * num_words
        self._num_words = num_words
        # in front of a buffer's rows stand whole rows that its switches take the end of
        lead = -(-_first_row(num_rows) // num_words)
        matrix = device.empty_host(num_host_buffers * (lead + num_rows) * num_words).view(-1, num_words)
        self.host = [HostRows(matrix, index * (lead + num_rows) + lead, num_rows) for index in range(num_host_buffers)]
        self._copied = [device.event() for _ in self.host]
        self.current = 0
        self._rows: _Rows = self.host[0] if device.shares_memory else _Rows(device.empty(size), num_rows, num_words)
        # a device refuses to mix events of a capture with others, so that inside one there are two of their own
        self._token_events = (device.event(), device.event())
        self._bitmask_events = (device.event(), device.event())

    @property
    def token_event(self) -> Any:
        """Recorded on the main stream when the device rows may be overwritten and the tokens have arrived."""
        return self._token_events[self._device.is_capturing()]

    @property
    def bitmask_event(self) -> Any:
        """Recorded on the side stream when the device rows are there."""
        return self._bitmask_events[self._device.is_capturing()]

    @property
    def bitmask_host(self) -> torch.Tensor:
        """Rows being written, int32 [num_rows, W] on the host."""
        return self.host[self.current].bitmask

    @property
    def token_mask_host(self) -> torch.Tensor:
        """Switches of the rows being written, int32 [num_rows] on the host; 0 leaves a row alone."""
        return self.host[self.current].token_mask

    @property
    def bitmask(self) -> torch.Tensor:
        """Rows on the device, int32 [num_rows, W]."""
        return self._rows.bitmask

    @property
    def token_mask(self) -> torch.Tensor:
        """Switches on the device, int32 [num_rows]."""
        return self._rows.token_mask

    def next_rows(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Turn to the other host buffer, wait until its last copy is over, and return (bitmask, token_mask) views."""
        self.current = (self.current + 1) % len(self.host)
        self._device.synchronize(self._copied[self.current])
        return self.host[self.current].words, self.host[self.current].switches

    def copy(self, num_rows: int) -> None:
        """Put the copy of the first `num_rows` rows on the side stream, behind the last reader of the device rows."""
        self._device.wait(self.token_event, self._device.side)
        self.copy_in_turn(num_rows)
        self._device.record(self._copied[self.current], self._device.side)

    def copy_in_turn(self, num_rows: int) -> None:
        """The same on a side stream that waits already, and whose next work alone rewrites the host buffer."""
        device = self._device
        rows = self.host[self.current]
        if device.shares_memory:
            self._rows = rows
        else:
            used = _first_row(self.num_rows) + num_rows * self._num_words
            device.copy(self._rows.flat[:used], rows.flat[:used], device.side)
        device.record(self.bitmask_event, device.side)
