"""Masks travel to a GPU, and ids from it, beside the forward pass.

`generate` calls a processor when the forward pass of the step has been enqueued, and the matchers need only the ids from
before it. An ordinary copy of the ids would wait behind that forward pass. With `overlap=True` they are copied on a side
stream, so that matching, filling and uploading happen while the pass runs; the main stream waits by event for the rows.

Why the ids are there: the loops of transformers 5.24 read `unfinished_sequences.max() == 0` at their head, which holds
the host until everything enqueued before the forward pass has run, the `cat` that made the ids included
(generation/utils.py, `StopCheck`). That is a fact about that version and not a promise, so every step is checked: the
ids that were used are compared with the real ones on the main stream, and the answer is read at the next step.

    host    read ids | match, fill | wait for nothing
    side    ids down ............... rows up, record ----+
    main    forward pass of this step ................... wait, apply, record, sample

tests/hf/test_overlap.py holds this order on a simulated device: no schedule of it changes a token, nothing but the first
step waits for a forward pass, and a loop that does not wait at its head is told. It has not been run on a GPU.
"""

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.masks.apply import apply_token_bitmask_, open_banned_rows_
from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.masks.device import MaskDevice

__all__ = ["OverlappedStep"]


class OverlappedStep:
    """Ids down and rows up for one batch of `generate`. Not thread-safe.

    Args:
        device: the device of the logits, with its side stream.
        num_rows: rows of the batch, B.
        vocab_size: width of the masks in tokens.
    """

    def __init__(self, device: MaskDevice, num_rows: int, vocab_size: int) -> None:
        self._device = device
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._buffers = MaskBuffers(device, num_rows, vocab_size)
        self._ids_host = device.empty_host(0)
        self._ids_event = device.event()
        # the last tokens that were read, up again for the check; and the check's answers: [stale, banned row 0, ...]
        self._last_host = device.empty_host(num_rows)
        self._last = device.empty(num_rows)
        self._answers_host = device.empty_host(1 + num_rows)
        self._answers = device.empty(1 + num_rows)
        self._has_answers = False
        self._answers_event = device.event()

    def serves(self, input_ids: torch.Tensor) -> bool:
        """Tell whether this is for batches of that size on that device."""
        return input_ids.shape[0] == self._num_rows and input_ids.device == self._device.device

    def fetch(self, input_ids: torch.Tensor, *, early: bool) -> npt.NDArray[np.int64]:
        """Return int64 [B, L] on the host.

        Args:
            input_ids: int64 [B, L] on the device.
            early: do not wait for what the main stream has been given (the forward pass).

        Raises:
            RuntimeError: the ids of the last step were read before they were there.
        """
        device = self._device
        # int64 copied as pairs of int32, the only kind of memory a MaskDevice hands out
        flat = input_ids.contiguous().view(torch.int32).reshape(-1)
        # ids with gaps have just been brought together on the main stream, behind the forward pass
        if not (early and input_ids.is_contiguous()):
            device.record(self._ids_event, device.main())
            device.wait(self._ids_event, device.side)
        if self._ids_host.numel() < flat.numel():
            self._ids_host = device.empty_host(2 * flat.numel())
        device.copy(self._ids_host[: flat.numel()], flat, device.side)
        if self._has_answers:
            # recorded before this step's forward pass, so this wait is over by now or soon
            device.wait(self._answers_event, device.side)
            device.copy(self._answers_host, self._answers, device.side)
        device.record(self._ids_event, device.side)
        device.synchronize(self._ids_event)
        if self._has_answers and bool(self._answers_host[0]):
            raise RuntimeError(
                "overlap=True read token ids before they were ready, so the last step's mask may be wrong: this version "
                "of transformers, or this way of generating, does not wait at the head of its loop; pass overlap=False"
            )
        # a copy: the buffer is written again at the next step
        ids: npt.NDArray[np.int64] = self._ids_host[: flat.numel()].view(torch.int64).numpy().copy()
        return ids.reshape(tuple(input_ids.shape))

    def banned_rows(self) -> bool:
        """Tell whether, at the last step that was read back, everything legal had been banned before the guide."""
        return self._has_answers and bool(self._answers_host[1:].any())

    def apply(
        self,
        input_ids: torch.Tensor,
        ids: npt.NDArray[np.int64],
        bitmask: torch.Tensor,
        row_index: npt.NDArray[np.int32],
        scores: torch.Tensor,
    ) -> torch.Tensor:
        """Return guided scores; nothing here holds the host.

        Args:
            input_ids: int64 [B, L] on the device.
            ids: the same, as `fetch` read it.
            bitmask: int32 [*, W] on the host.
            row_index: row of `bitmask` for each row of `scores`, -1 leaves a row alone.
            scores: [B, N] on the device, last stride 1; not written.
        """
        device = self._device
        rows, switches = self._buffers.next_rows()
        host = bitmask.numpy()
        switches[: self._num_rows] = row_index >= 0
        for row, index in enumerate(row_index.tolist()):
            if index >= 0:
                rows[row] = host[index]
        self._last_host.numpy()[:] = ids[:, -1] if ids.shape[1] else 0
        device.copy(self._last, self._last_host, device.side)
        self._buffers.copy(self._num_rows)
        out = torch.empty_like(scores, memory_format=torch.contiguous_format)
        device.wait(self._buffers.bitmask_event, device.main())
        bitmask, token_mask = self._buffers.bitmask[: self._num_rows], self._buffers.token_mask[: self._num_rows]
        device.launch(
            partial(self._apply_and_check, input_ids, scores, bitmask, token_mask, out),
            device.main(),
            reads=(input_ids, scores, bitmask, token_mask, self._last),
            writes=(out, self._answers),
        )
        device.record(self._buffers.token_event, device.main())
        device.record(self._answers_event, device.main())
        self._has_answers = True
        return out

    def _apply_and_check(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        bitmask: torch.Tensor,
        token_mask: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        apply_token_bitmask_(scores, bitmask, token_mask, vocab_size=self._vocab_size, out=out)
        arguments = {"token_mask": token_mask, "vocab_size": self._vocab_size}
        self._answers[1:] = open_banned_rows_(out, bitmask, token_mask != 0, **arguments)
        if input_ids.shape[1]:
            self._answers[0] = (input_ids[:, -1].to(torch.int32) != self._last).any()
