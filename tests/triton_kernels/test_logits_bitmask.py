"""The mask kernel in Triton's interpreter, bit for bit against its definition."""

import numpy as np
import pytest
import torch
from gd_plugin.triton_kernels import apply_token_bitmask_, logits_bitmask
from gd_plugin.triton_kernels.reference import legal_columns

from gd_plugin.masks.arguments import check_arguments
from gd_plugin.masks.shard import VocabShard

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NEG_INF = float("-inf")


def as_integers(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def random_mask(rng, rows, words, density):
    bits = rng.random((rows, 32 * words)) < density
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(rows, words).copy())


def random_logits(rng, rows, columns, dtype):
    logits = torch.from_numpy(rng.standard_normal((rows, columns))).to(dtype)
    for value in (float("nan"), float("inf"), NEG_INF):
        logits[torch.from_numpy(rng.random((rows, columns)) < 0.03)] = value
    return logits


def check(logits, bitmask, token_mask=None, d2t=None, row_index=None, col_start=0, vocab_size=None, **options):
    """In place and into `out`, which begins as NaN so that an element left out would show."""
    arguments = check_arguments(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size)
    legal = legal_columns(*logits.shape, *arguments)
    want = torch.where(legal, as_integers(logits), as_integers(torch.full_like(logits, NEG_INF)))
    out = torch.full_like(logits, float("nan"))
    before = as_integers(logits).clone()
    logits_bitmask.launch(logits, arguments, out)
    assert torch.equal(as_integers(out), want)
    assert torch.equal(as_integers(logits), before)
    logits_bitmask.launch(logits, arguments, logits, **options)
    assert torch.equal(as_integers(logits), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 1000, 50257, 128001, 128256])
def test_widths(dtype, columns):
    rng = np.random.default_rng(columns)
    words = (columns + 31) // 32
    # the interpreter takes milliseconds a program: wide rows come alone
    rows, densities = (2, (0.0, 0.5, 1.0)) if columns <= 1000 else (1, (0.5,))
    for density in densities:
        check(random_logits(rng, rows, columns, dtype), random_mask(rng, rows, words, density))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("col_start", [0, 1, 7, 8, 31, 32, 33, 64, 95])
def test_first_columns_on_and_off_a_word(dtype, col_start):
    rng = np.random.default_rng(col_start)
    for density in (0.02, 0.5, 0.98):
        # the mask ends inside the row: what is behind it is banned, and no word behind it is read
        check(random_logits(rng, 2, 256, dtype), random_mask(rng, 2, 8, density), col_start=col_start)
        check(random_logits(rng, 2, 256, dtype), random_mask(rng, 2, 12, density), col_start=col_start, vocab_size=301)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("first", "stride"), [(0, 160), (1, 160), (2, 162), (4, 164), (8, 168), (3, 161)])
def test_alignment_of_base_and_rows(dtype, first, stride):
    rng = np.random.default_rng(stride)
    buffer = random_logits(rng, 3, stride, dtype)
    before = as_integers(buffer).clone()
    check(buffer[:, first : first + 128], random_mask(rng, 3, 4, 0.5))
    untouched = torch.ones(stride, dtype=torch.bool)
    untouched[first : first + 128] = False
    assert torch.equal(as_integers(buffer)[:, untouched], before[:, untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_arguments(dtype):
    rng = np.random.default_rng(9)
    for _ in range(30):
        rows, columns = int(rng.integers(1, 4)), int(rng.choice([1, 24, 33, 64, 136, 200]))
        words, mask_rows = int(rng.integers(1, 8)), rows + int(rng.integers(0, 2))
        mask = random_mask(rng, mask_rows, words, rng.choice([0, 0.1, 0.5, 0.9, 1]))
        token_mask = row_index = d2t = None
        if rng.random() < 0.5:
            token_mask = torch.from_numpy(rng.integers(0, 2, rows).astype(rng.choice(["int32", "uint8", "bool"])))
        if rng.random() < 0.5:
            # a row that does not exist bans everything: nothing is read outside the mask
            row_index = torch.from_numpy(rng.integers(-1, mask_rows + 1, rows).astype(np.int32))
        if rng.random() < 0.4:
            offsets = rng.integers(-60, 90, int(rng.integers(0, columns + 1)))
            d2t = torch.from_numpy(offsets.astype(rng.choice(["int32", "int64"])))
        check(
            random_logits(rng, rows, columns, dtype),
            mask,
            token_mask,
            d2t,
            row_index,
            int(rng.choice([0, 5, 31, 32, 33])),
            int(rng.integers(0, 32 * words + 1)),
            store_only=bool(rng.random() < 0.3),
        )


def test_d2t_of_the_last_column_reaches_the_last_token():
    mask = torch.tensor([[0, 1 << 30]], dtype=torch.int32)
    logits = torch.zeros(1, 8)
    apply_token_bitmask_(logits, mask, d2t=torch.tensor([62, 0, 0, 0, 0, 0, 0, 55]))
    assert logits[0].isfinite().tolist() == [True] + 6 * [False] + [True]


def test_public_launcher_takes_shards_and_refuses_what_it_cannot_do():
    mask = torch.full((1, 2), -1, dtype=torch.int32)
    logits = torch.zeros(1, 40)
    assert apply_token_bitmask_(logits, mask, shard=VocabShard(1, 2, 60)) is logits
    assert logits.isfinite().sum() == 30
    assert apply_token_bitmask_(torch.zeros(0, 40), mask).shape == (0, 40)
    with pytest.raises(ValueError, match="float64"):
        apply_token_bitmask_(logits.double(), mask)
    with pytest.raises(ValueError, match="bitmask"):
        apply_token_bitmask_(logits, mask.long())
    with pytest.raises(ValueError, match="out"):
        apply_token_bitmask_(logits, mask, out=torch.zeros(1, 39))


def test_many_rows_share_a_mask_row():
    mask = torch.tensor([[5]], dtype=torch.int32)
    rows = 40
    logits = torch.zeros(rows, 8)
    apply_token_bitmask_(logits, mask, row_index=torch.zeros(rows, dtype=torch.int32))
    assert (logits.isfinite().sum(dim=1) == 2).all()


def test_offsets_past_two_to_the_31(monkeypatch):
    """Rows further apart than 32 bits can count: the addresses are recorded and nothing is written there."""
    from triton.runtime import interpreter

    addresses = []
    builder = type(interpreter.interpreter_builder)
    monkeypatch.setattr(builder, "create_masked_store", lambda self, ptrs, *rest: addresses.append(ptrs.data.min()))
    logits, stride = torch.zeros(1, 1024, dtype=torch.int16), (1 << 31) + 64
    mask = torch.zeros((3, 32), dtype=torch.int32)
    logits_bitmask.logits_bitmask_kernel[(3,)](
        logits, logits, mask, mask, mask, mask, stride, stride, 32, 1024, 3, 0, 0, 1024, 1,
        MINUS_INF=-0x80, VARIANT=logits_bitmask.ALIGNED, CHUNK=8, NUM_CHUNKS=128, IN_PLACE=True,
        HAS_TOKEN_MASK=False, HAS_ROW_INDEX=False, STORE_ONLY=False,
    )  # fmt: skip
    assert [int(address) - int(addresses[0]) for address in addresses] == [0, 2 * stride, 4 * stride]


@pytest.fixture
def traffic(monkeypatch):
    """Bytes of logits that active lanes load and store in the interpreter."""
    from triton.runtime import interpreter

    moved = {"load": 0, "store": 0}
    builder = type(interpreter.interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(self, ptrs, mask, other, *rest):
        if mask.data.ndim == 2 and mask.data.shape[1] > 1:  # logits are read in [C, CHUNK], words in [C, 1]
            moved["load"] += int(mask.data.sum()) * item_bytes(ptrs)
        return load(self, ptrs, mask, other, *rest)

    def counted_store(self, ptrs, value, mask, *rest):
        moved["store"] += int(mask.data.sum()) * item_bytes(ptrs)
        return store(self, ptrs, value, mask, *rest)

    def item_bytes(ptrs):
        return ptrs.get_element_ty().primitive_bitwidth // 8

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    return moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("col_start", [0, 3])
def test_bytes_moved_are_the_least_at_chunk_granularity(traffic, dtype, density, col_start):
    rng = np.random.default_rng(3)
    columns = 4096
    logits = random_logits(rng, 2, columns, dtype)
    mask = random_mask(rng, 2, columns // 32 + 1, density)
    arguments = check_arguments(logits, mask, None, None, None, col_start, None)
    legal = legal_columns(2, columns, *arguments)
    chunks = legal.reshape(2, -1, 16 // dtype.itemsize).sum(dim=2)
    width = 16 // dtype.itemsize
    logits_bitmask.launch(logits, arguments, logits)
    assert traffic["load"] == 16 * int(((chunks > 0) & (chunks < width)).sum())
    assert traffic["store"] == 16 * int((chunks < width).sum())
    traffic.update(load=0, store=0)
    logits_bitmask.launch(logits, arguments, torch.empty_like(logits))
    assert traffic["load"] == 16 * int((chunks > 0).sum())
    assert traffic["store"] == 16 * chunks.numel()


def test_programs_cover_the_row_and_stay_powers_of_two():
    device = torch.device("cpu")
    for rows in (1, 8, 64, 1024, 70_000):
        for columns in (1, 33, 32_000, 128_001, 151_936, 262_208):
            for chunk in (1, 2, 4, 8):
                num_chunks = logits_bitmask.chunks_per_program(rows, columns, chunk, device)
                assert num_chunks & (num_chunks - 1) == 0
                assert 128 <= num_chunks <= 1024
