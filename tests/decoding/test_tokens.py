"""Tokens from the device: read when their copy has arrived, whatever the schedule, into the requests that ask for them."""

import pytest
import torch

import gd_plugin as gd
from gd_plugin.decoding.requests import GuidedRequests
from gd_plugin.decoding.tokens import Step, TokenBuffers, check_by_position
from gd_plugin.masks.buffers import MaskBuffers
from gd_plugin.testing import SimulatedDevice

GUIDE = gd.Guide.json()


def device_tensor(device, values):
    tensor = torch.tensor(values, dtype=torch.int32)
    memory = device.empty(tensor.numel()).view(tensor.shape)
    memory.copy_(tensor)
    return memory


def buffers(device):
    return TokenBuffers(device, 3, 2, MaskBuffers(device, 9, 64))


@pytest.mark.parametrize("seed", range(20))
def test_new_tokens_go_by_slot(seed):
    device = SimulatedDevice(seed)
    tokens = buffers(device)
    late = gd.GuidedRequest(guide=GUIDE, seq_slot=0, prev_seq_slot=2, new_token=5, draft_tokens=[6])
    own = gd.GuidedRequest(guide=GUIDE, seq_slot=1, new_token=5, draft_tokens=[6])
    draft = gd.GuidedRequest(guide=GUIDE, seq_slot=1, prev_seq_slot=1, is_draft=True)
    tokens.copy_new_tokens(device_tensor(device, [[10, 11, 12], [20, 21, 22], [30, 31, 32]]))
    tokens.synchronize()
    for requests in ([late, own], [draft]):
        batch = GuidedRequests(requests, 2)
        tokens.read(Step(batch, batch, has_new_tokens=True))
    assert (late.new_token, list(late.draft_tokens)) == (12, [22, 32])
    assert (own.new_token, own.draft_tokens) == (5, [6])
    assert (draft.new_token, draft.draft_tokens) == (11, None)
    device.check()


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_loops_tokens_go_by_position(seed):
    device = SimulatedDevice(seed)
    tokens = buffers(device)
    batch = GuidedRequests([gd.GuidedRequest(is_draft=True, seq_slot=slot) for slot in (2, 0)], 2)
    tokens.copy_draft_tokens(device_tensor(device, [7, 8]), device_tensor(device, [3, 1]))
    tokens.synchronize()
    tokens.read(Step(batch, batch, draft_step=0))
    assert [request.new_token for request in batch.requests] == [7, 8]
    assert list(tokens.num_emitted(2)) == [3, 1]
    tokens.copy_draft_tokens(device_tensor(device, [9, 4]), None)
    tokens.synchronize()
    step = Step(batch, batch, draft_step=1)
    tokens.read(step)
    assert [request.new_token for request in batch.requests] == [9, 4]
    assert list(tokens.num_emitted(2)) == [3, 1]
    assert step.ends_draft_loop
    device.check()


def test_tensors_of_the_wrong_kind():
    tokens = buffers(SimulatedDevice())
    for wrong in (torch.zeros(3, 3), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"new_tokens must be int32 \[3, 3\]"):
            tokens.copy_new_tokens(wrong)
        with pytest.raises(ValueError, match=r"counts must be int32 \[2\], one number a request"):
            check_by_position("counts", wrong, 2)
