"""Tokens that come from the device: copied to the host in the order of the main stream, read when a build begins.

In:  the engine's token tensors; a step that says which of them it needs.
Out: the step's snapshots with their tokens in them, and how many tokens the target emitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gd_plugin.decoding.requests import GuidedRequest, GuidedRequests
from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.masks.device import MaskDevice

__all__ = ["Step", "TokenBuffers", "check_by_position", "check_verified"]


@dataclass(slots=True)
class Step:
    """What one build is about.

    Attributes:
        requests: the batch that is built.
        target: the target's batch: the same, or the one that a draft loop drafts for.
        has_new_tokens: requests with a `prev_seq_slot` get their tokens from the device.
        draft_step: number of the step in its draft loop; None outside one.
    """

    requests: GuidedRequests
    target: GuidedRequests
    has_new_tokens: bool = False
    draft_step: int | None = None

    @property
    def ends_draft_loop(self) -> bool:
        """Tell whether it is the last step of a draft loop, which is as long as the layout of this step."""
        return self.draft_step == self.requests.max_num_draft_tokens - 1

    def reads_new_tokens(self, request: GuidedRequest) -> bool:
        """Tell whether the request's tokens come from the device."""
        return self.has_new_tokens and request.prev_seq_slot is not None


class TokenBuffers:
    """Host copies of the engine's token tensors.

    Args:
        device: where those are.
        num_slots: slots there are.
        max_num_draft_tokens: K.
        buffers: has the `token_event` that is recorded on the main stream behind each copy.

    Attributes:
        host: all of their memory.
    """

    def __init__(self, device: MaskDevice, num_slots: int, max_num_draft_tokens: int, buffers: MaskBuffers) -> None:
        self._device = device
        self._num_slots = num_slots
        self._num_tokens = max_num_draft_tokens + 1
        self._buffers = buffers
        self._new_tokens = device.empty_host(num_slots * self._num_tokens)
        # token of each batch position, then what the target emitted there
        self._draft_tokens = device.empty_host(num_slots)
        self._num_emitted = device.empty_host(num_slots)
        self._accepted_nodes = device.empty_host(num_slots * max_num_draft_tokens)
        self.host = (self._new_tokens, self._draft_tokens, self._num_emitted, self._accepted_nodes)

    def copy_new_tokens(self, new_tokens: torch.Tensor) -> None:
        """Put a copy of int32 [K + 1, slots] on the main stream.

        Raises:
            ValueError: wrong dtype or shape.
        """
        shape = (self._num_tokens, self._num_slots)
        _check_tensor("new_tokens", new_tokens)
        if new_tokens.dtype != torch.int32 or tuple(new_tokens.shape) != shape:
            raise ValueError(
                f"new_tokens must be int32 {list(shape)} (golden and drafts, by slot), got {new_tokens.dtype} "
                f"{list(new_tokens.shape)}"
            )
        self._copy(self._new_tokens, new_tokens.reshape(-1))

    def copy_draft_tokens(self, new_tokens: torch.Tensor, num_emitted: torch.Tensor | None) -> None:
        """Put copies of int32 [batch] tensors on the main stream; None leaves what is there."""
        self._copy(self._draft_tokens, new_tokens)
        if num_emitted is not None:
            self._copy(self._num_emitted, num_emitted)

    def copy_num_emitted(self, num_emitted: torch.Tensor, accepted_nodes: torch.Tensor | None) -> None:
        """Put copies of int32 [batch] and int32 [batch, L] on the main stream, L at most K."""
        self._copy(self._num_emitted, num_emitted)
        if accepted_nodes is not None:
            self._copy(self._accepted_nodes, accepted_nodes.reshape(-1))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        main = self._device.main()
        self._device.copy(target[: source.numel()], source, main)
        self._device.record(self._buffers.token_event, main)

    def synchronize(self) -> None:
        """Hold the calling thread until the copies have arrived."""
        self._device.synchronize(self._buffers.token_event)

    def read(self, step: Step) -> None:
        """Put the tokens that have arrived into the step's snapshots."""
        if step.draft_step is not None:
            tokens = self._draft_tokens[: len(step.requests)].tolist()
            for request, token_id in zip(step.requests.requests, tokens, strict=True):
                request.new_token = token_id
        elif step.has_new_tokens:
            columns = self._new_tokens.view(-1, self._num_slots).t().tolist()
            for request in step.requests.valid_requests():
                if step.reads_new_tokens(request):
                    request.new_token, *drafts = columns[request.prev_seq_slot or 0]
                    if not request.is_draft:
                        request.draft_tokens = drafts

    def num_emitted(self, batch_size: int) -> Sequence[int]:
        """Return the tokens the target emitted, bonus included, by batch position."""
        num_emitted: list[int] = self._num_emitted[:batch_size].tolist()
        return num_emitted

    def accepted_nodes(self, batch_size: int, num_nodes: int) -> Sequence[Sequence[int]]:
        """Return the accepted nodes of draft trees, L = `num_nodes` a batch position."""
        used = self._accepted_nodes[: batch_size * num_nodes]
        accepted_nodes: list[list[int]] = used.view(batch_size, num_nodes).tolist()
        return accepted_nodes


def check_by_position(name: str, tensor: torch.Tensor, batch_size: int) -> None:
    """Check a tensor that has one number a request of the batch.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not int32 [batch_size].
    """
    _check_tensor(name, tensor)
    if tensor.dtype != torch.int32 or tuple(tensor.shape) != (batch_size,):
        raise ValueError(
            f"{name} must be int32 [{batch_size}], one number a request of the batch, got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )


def check_verified(num_emitted: torch.Tensor, accepted_nodes: torch.Tensor | None, batch_size: int) -> None:
    """Check what a target's verification has come to.

    Raises:
        TypeError: one of them is no tensor.
        ValueError: `num_emitted` is not int32 [batch_size], or `accepted_nodes` not int32 [batch_size, L].
    """
    check_by_position("num_accepted_tokens", num_emitted, batch_size)
    if accepted_nodes is None:
        return
    _check_tensor("accepted_nodes", accepted_nodes)
    wrong_shape = accepted_nodes.dim() != 2 or accepted_nodes.shape[0] != batch_size
    if wrong_shape or accepted_nodes.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"accepted_nodes must be int32 [{batch_size}, L], got {accepted_nodes.dtype} {list(accepted_nodes.shape)}"
        )


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be an int32 tensor, got {type(tensor).__name__}")
