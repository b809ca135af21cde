"""The compiled kernels on a GPU, bit for bit against their definitions. Skipped where there is none."""

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted in this process", allow_module_level=True)

from gd_plugin.triton_kernels.reference import argmax_under_bitmask_reference, legal_columns

from gd_plugin.masks.apply import apply_token_bitmask_
from gd_plugin.masks.argmax import argmax_under_bitmask
from gd_plugin.masks.shard import VocabShard

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEG_INF = float("-inf")


def as_integers(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def random_mask(rng, rows, words, density):
    bits = rng.random((rows, 32 * words)) < density
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy()).cuda()


def random_logits(rng, rows, columns, dtype):
    logits = torch.from_numpy(rng.standard_normal((rows, columns))).to(dtype)
    for value in (float("nan"), float("inf"), NEG_INF):
        logits[torch.from_numpy(rng.random((rows, columns)) < 0.02)] = value
    return logits.cuda()


def wanted(logits, *arguments):
    legal = legal_columns(*logits.shape, *arguments)
    return torch.where(legal, as_integers(logits), as_integers(torch.full_like(logits, NEG_INF)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 32_000, 50_257, 128_001, 128_256, 151_936])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_widths_and_densities(dtype, columns, rows):
    rng = np.random.default_rng(columns)
    for density in (0.0, 0.001, 0.5, 0.999, 1.0):
        logits = random_logits(rng, rows, columns, dtype)
        mask = random_mask(rng, rows, (columns + 31) // 32, density)
        want = wanted(logits, mask)
        out = apply_token_bitmask_(logits, mask, out=torch.full_like(logits, float("nan")))
        assert torch.equal(as_integers(out), want)
        best = argmax_under_bitmask(logits, mask)
        assert best.tolist() == argmax_under_bitmask_reference(logits, mask).tolist()
        assert torch.equal(as_integers(apply_token_bitmask_(logits, mask)), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 1, 8, 31, 32, 33, 4096])
def test_shards_strides_and_row_choices(dtype, start):
    rng = np.random.default_rng(start)
    rows, columns, total = 6, 1000, 8000
    mask = random_mask(rng, rows + 1, total // 32, 0.4)
    token_mask = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.int32, device="cuda")
    # the last entry names a row that does not exist
    row_index = torch.tensor([6, 0, -1, 2, 2, 7], dtype=torch.int32, device="cuda")
    shard = VocabShard(1, 3, total, [0, start, start + columns, total])
    for pad in (0, 1, 3, 24):
        logits = random_logits(rng, rows, columns + pad, dtype)[:, :columns]
        want = wanted(logits, mask, token_mask, None, row_index, start, min(total, start + columns))
        apply_token_bitmask_(logits, mask, token_mask, row_index=row_index, shard=shard)
        assert torch.equal(as_integers(logits), want)
        d2t = torch.from_numpy(rng.integers(0, 7, total)).to("cuda", torch.int32 if pad % 2 else torch.int64)
        logits = random_logits(rng, rows, columns + pad, dtype)[:, :columns]
        want = wanted(logits, mask, token_mask, d2t[start : start + columns], row_index, start, total)
        apply_token_bitmask_(logits, mask, token_mask, d2t, row_index=row_index, shard=shard)
        assert torch.equal(as_integers(logits), want)


def test_offsets_past_two_to_the_31():
    columns = 151_936
    rows = (1 << 31) // columns + 2
    if torch.cuda.mem_get_info()[0] < 3 * rows * columns * 2:
        pytest.skip("less than 13 GB of GPU memory are free")
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    mask = torch.tensor([[3] + [0] * (columns // 32 - 1)], dtype=torch.int32, device="cuda")
    apply_token_bitmask_(logits, mask, row_index=torch.zeros(rows, dtype=torch.int32, device="cuda"))
    assert (logits[:, :2] == 0).all()
    assert (logits[:, 2:] == NEG_INF).all()


def test_captured_in_a_graph_and_replayed_with_another_mask():
    rng = np.random.default_rng(0)
    logits, mask = random_logits(rng, 4, 32_000, torch.float16), random_mask(rng, 4, 1000, 0.5)
    out = torch.empty_like(logits)
    apply_token_bitmask_(logits, mask, out=out)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_token_bitmask_(logits, mask, out=out)
    mask.copy_(random_mask(rng, 4, 1000, 0.1))
    graph.replay()
    assert torch.equal(as_integers(out), wanted(logits, mask))


def test_neither_allocates_nor_synchronises():
    logits = torch.zeros(8, 128_256, dtype=torch.bfloat16, device="cuda")
    mask = torch.zeros((8, 4008), dtype=torch.int32, device="cuda")
    apply_token_bitmask_(logits, mask)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        apply_token_bitmask_(logits, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_compiled_without_graph_breaks():
    def step(logits, mask):
        return apply_token_bitmask_(logits * 2, mask).argmax(dim=-1)

    rng = np.random.default_rng(1)
    logits, mask = random_logits(rng, 3, 4096, torch.float32).nan_to_num(0), random_mask(rng, 3, 128, 0.5)
    assert torch.equal(torch.compile(step, fullgraph=True)(logits, mask), step(logits, mask))


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="bitmask is on cpu"):
        apply_token_bitmask_(torch.zeros(1, 32, device="cuda"), torch.zeros((1, 1), dtype=torch.int32))
