"""apply_token_bitmask_ on the CPU, against a double loop over single bits."""

import os
import signal

import numpy as np
import pytest
import torch

from gd_plugin.masks import cpu
from gd_plugin.masks.apply import apply_token_bitmask_
from gd_plugin.masks.shard import VocabShard

FUZZ_ROUNDS = 4000 if os.environ.get("GD_PLUGIN_FUZZ", "ci") == "long" else 400
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DENSITIES = [0.0, 0.003, 0.1, 0.5, 0.85, 0.97, 0.999, 1.0]
NEG_INF = float("-inf")


def as_integers(tensor):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def assert_same_bits(got, want):
    assert torch.equal(as_integers(got), as_integers(want))


def pack(bits):
    """bool [R, 32 * W] -> int32 [R, W]"""
    rows, width = bits.shape
    packed = np.packbits(bits, axis=1, bitorder="little")
    return torch.from_numpy(packed.view(np.int32).reshape(rows, width // 32).copy())


def expected(logits, bits, limit, *, col_start=0, token_mask=None, row_index=None, d2t=None):
    """The double loop: one Python decision an element."""
    result = logits.clone()
    for row in range(logits.shape[0]):
        mask_row = row if row_index is None else int(row_index[row])
        if mask_row < 0 or (token_mask is not None and not token_mask[row]):
            continue
        for column in range(logits.shape[1]):
            token = col_start + column
            if d2t is not None:
                token = token + int(d2t[column]) if column < len(d2t) else -1
            if not (0 <= token < limit and bits[mask_row, token]):
                result[row, column] = NEG_INF
    return result


def random_logits(rng, rows, columns, dtype, pad=0):
    buffer = torch.from_numpy(rng.standard_normal((rows, columns + pad))).to(dtype)
    for value in (float("nan"), float("inf"), NEG_INF):
        buffer[torch.from_numpy(rng.random((rows, columns + pad)) < 0.02)] = value
    return buffer


def test_random_cases_equal_the_double_loop():
    rng = np.random.default_rng(6)
    for _ in range(FUZZ_ROUNDS):
        rows, columns, vocab = int(rng.integers(0, 4)), int(rng.integers(1, 150)), int(rng.integers(1, 260))
        mask_rows = rows + int(rng.integers(0, 3))
        words = (vocab + 31) // 32 + int(rng.integers(0, 2))
        # bits past the vocabulary are as random as those before it
        bits = rng.random((mask_rows, 32 * words)) < rng.choice(DENSITIES)
        buffer = random_logits(rng, rows, columns, DTYPES[rng.integers(4)], pad=int(rng.integers(0, 4)))
        logits, before = buffer[:, :columns], buffer.clone()
        token_mask = row_index = shard = d2t = None
        if rng.random() < 0.4:
            token_mask = torch.from_numpy(rng.integers(0, 2, rows).astype(rng.choice(["int32", "uint8", "bool"])))
        if rng.random() < 0.4 and mask_rows:
            row_index = torch.from_numpy(rng.integers(-1, mask_rows, rows).astype(np.int32))
        limit, col_start = vocab, 0
        if rng.random() < 0.6:
            total = vocab + int(rng.integers(0, 60))
            start, stop = np.sort(rng.integers(0, total + 1, 2)).tolist()
            shard = VocabShard(1, 3, total, [0, start, stop, total])
            col_start = start
        local = None
        if rng.random() < 0.4:
            whole = torch.from_numpy(rng.integers(-9, 90, columns if shard is None else total)).to(torch.int32)
            local = whole if shard is None else whole[start:stop]
            d2t = whole if rng.random() < 0.5 else local
            if shard is not None and shard.num_columns > columns:
                continue
        elif shard is not None:
            limit = min(vocab, stop)
        out = None if rng.random() < 0.5 else torch.full_like(logits, float("nan"))
        want = expected(logits, bits, limit, col_start=col_start, token_mask=token_mask, row_index=row_index, d2t=local)
        got = apply_token_bitmask_(
            logits, pack(bits), token_mask, d2t, row_index=row_index, shard=shard, vocab_size=vocab, out=out
        )
        assert got is (logits if out is None else out)
        assert_same_bits(got, want)
        if out is not None:
            assert_same_bits(buffer, before)
        # what lies between the rows of a strided view is not ours
        assert_same_bits(buffer[:, columns:], before[:, columns:])


@pytest.fixture(params=["numpy", "engine"])
def path(request, monkeypatch):
    """Both ways mostly legal rows can take: with xgrammar loaded and without."""
    if request.param == "engine":
        pytest.importorskip("xgrammar")
        monkeypatch.setattr(cpu, "_engine_kernels", [])
        assert cpu._engine_kernel() is not None
    else:
        monkeypatch.setattr(cpu, "_engine_kernels", [None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 50257, 128001, 151936])
def test_every_density_and_width(dtype, columns, path):
    rng = np.random.default_rng(columns)
    words = (columns + 31) // 32
    for density in DENSITIES:
        bits = rng.random((2, 32 * words)) < density
        bits[1, : columns // 2] = False  # legal columns in one part of the row only
        logits = random_logits(rng, 2, columns, dtype, pad=3)[:, :columns]
        legal = torch.from_numpy(bits[:, :columns])
        want = torch.where(legal, as_integers(logits), as_integers(torch.full_like(logits, NEG_INF)))
        out = apply_token_bitmask_(logits, pack(bits), out=torch.full_like(logits, float("nan")))
        assert torch.equal(as_integers(out), want)
        assert torch.equal(as_integers(apply_token_bitmask_(logits, pack(bits))), want)


@pytest.mark.parametrize("edge", [1, 31, 32, 33, 63, 64, 65])
def test_shards_off_a_word_boundary(edge):
    rng = np.random.default_rng(edge)
    bits = rng.random((2, 160)) < 0.5
    whole = random_logits(rng, 2, 150, torch.float32)
    want = expected(whole, bits, 150)
    for rank in range(3):
        shard = VocabShard(rank, 3, 150, [0, edge, 100, 150])
        part = whole[:, shard.start : shard.stop].clone()
        apply_token_bitmask_(part, pack(bits), shard=shard)
        assert_same_bits(part, want[:, shard.start : shard.stop])


def test_padding_behind_a_shard_is_not_the_next_ranks_tokens():
    logits = torch.zeros(1, 20)
    mask = torch.full((1, 4), -1, dtype=torch.int32)
    apply_token_bitmask_(logits, mask, shard=VocabShard(0, 2, 30, [0, 15, 30]))
    assert (logits[0, :15] == 0).all()
    assert (logits[0, 15:] == NEG_INF).all()


def test_d2t_reaches_the_last_column_and_bans_what_is_outside():
    bits = np.zeros((1, 64), dtype=bool)
    bits[0, 63] = True
    d2t = torch.tensor([63, 62, 62, -4], dtype=torch.int64)  # tokens 63, 63, 64, -1
    logits = torch.zeros(1, 4)
    apply_token_bitmask_(logits, pack(bits), d2t=d2t)
    assert logits[0].tolist() == [0, 0, NEG_INF, NEG_INF]


def test_columns_beyond_the_mask_are_banned_and_tail_bits_are_not_trusted():
    mask = torch.full((1, 2), -1, dtype=torch.int32)
    assert apply_token_bitmask_(torch.zeros(1, 70), mask)[0].isfinite().sum() == 64
    assert apply_token_bitmask_(torch.zeros(1, 70), mask, vocab_size=33)[0].isfinite().sum() == 33


def test_no_rows_and_no_columns():
    mask = torch.zeros((0, 2), dtype=torch.int32)
    assert apply_token_bitmask_(torch.zeros(0, 64), mask).shape == (0, 64)
    assert apply_token_bitmask_(torch.zeros(2, 0), torch.zeros((2, 0), dtype=torch.int32)).shape == (2, 0)
    none = torch.full((2,), -1, dtype=torch.int32)
    assert (apply_token_bitmask_(torch.zeros(2, 64), mask, row_index=none) == 0).all()


def test_rows_may_share_a_mask_row():
    mask = torch.tensor([[1], [2]], dtype=torch.int32)
    logits = apply_token_bitmask_(torch.zeros(3, 2), mask, row_index=torch.tensor([1, 1, 0], dtype=torch.int32))
    assert logits.tolist() == [[NEG_INF, 0], [NEG_INF, 0], [0, NEG_INF]]


LOGITS = torch.zeros(2, 64)
MASK = torch.zeros((2, 2), dtype=torch.int32)
INDEX = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("logits", {"logits": torch.zeros(2, 64, dtype=torch.int32)}),
        ("logits", {"logits": torch.zeros(64)}),
        ("logits", {"logits": torch.zeros(2, 128)[:, ::2]}),
        ("logits", {"logits": torch.zeros(1, 64).expand(2, 64)}),
        ("bitmask", {"bitmask": MASK.long()}),
        ("bitmask", {"bitmask": MASK[0]}),
        ("bitmask", {"bitmask": torch.zeros((2, 4), dtype=torch.int32)[:, ::2]}),
        ("bitmask", {"bitmask": MASK[:1]}),
        ("bitmask", {"bitmask": MASK.to("meta")}),
        ("bitmask has 2 words", {"vocab_size": 65}),
        ("vocab_size", {"vocab_size": -1}),
        ("token_mask", {"token_mask": torch.ones(2)}),
        ("token_mask", {"token_mask": torch.ones(3, dtype=torch.int32)}),
        ("token_mask", {"token_mask": torch.ones(4, dtype=torch.int32)[::2]}),
        ("row_index", {"row_index": INDEX.long()}),
        ("row_index", {"row_index": INDEX[:1]}),
        ("row_index", {"row_index": INDEX + 2}),
        ("row_index", {"row_index": INDEX - 2}),
        ("d2t", {"d2t": torch.zeros(64)}),
        ("d2t", {"d2t": torch.zeros((1, 64), dtype=torch.int32)}),
        ("d2t has 5 entries", {"d2t": torch.zeros(5, dtype=torch.int32)}),
        ("d2t", {"d2t": torch.zeros(7, dtype=torch.int32), "shard": VocabShard(0, 2, 128)}),
        ("out", {"out": LOGITS.half()}),
        ("out", {"out": torch.zeros(2, 63)}),
        ("out", {"out": torch.zeros(2, 128)[:, ::2]}),
        ("out", {"out": LOGITS.to("meta")}),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_written(named, arguments):
    logits = torch.zeros(2, 64)
    complete = {"logits": logits, "bitmask": MASK} | arguments
    with pytest.raises(ValueError, match=named):
        apply_token_bitmask_(**complete)
    assert (logits == 0).all()


def test_operators_pass_opcheck():
    rng = np.random.default_rng(0)
    mask = pack(rng.random((3, 128)) < 0.5)
    logits = torch.from_numpy(rng.standard_normal((3, 100))).float()
    operators = torch.ops.gd_plugin
    index = torch.tensor([2, -1, 0], dtype=torch.int32)
    torch.library.opcheck(operators.apply_token_bitmask_.default, (logits.clone(), mask))
    torch.library.opcheck(
        operators.apply_token_bitmask_.default, (logits.clone(), mask, index, None, index, 3), {"vocab_size": 90}
    )
    torch.library.opcheck(operators.apply_token_bitmask_out.default, (logits, mask), {"out": torch.zeros_like(logits)})


@pytest.mark.parametrize("shard", [None, VocabShard(1, 2, 200)], ids=["whole", "shard"])
@pytest.mark.parametrize("into_out", [False, True], ids=["in place", "out"])
def test_compiled_without_graph_breaks(shard, into_out):
    def step(logits, mask):
        scaled = logits * 2
        out = torch.empty_like(scaled) if into_out else None
        return apply_token_bitmask_(scaled, mask, shard=shard, out=out) + 1

    rng = np.random.default_rng(1)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (1, 3):
        mask = pack(rng.random((rows, 224)) < 0.5)
        logits = torch.from_numpy(rng.standard_normal((rows, 100))).float()
        assert torch.equal(compiled(logits.clone(), mask), step(logits.clone(), mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [0.3, 0.97])
def test_nans_of_either_sign_keep_or_lose_their_bits(dtype, density, path):
    """Legal ones keep sign and payload; banned ones become -inf, though some are above it as integers."""
    rng = np.random.default_rng(12)
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    minus_inf = as_integers(torch.tensor([NEG_INF], dtype=dtype)).numpy().view(unsigned)[0]
    payloads = rng.integers(1, 1 << 6, (2, 320)).astype(unsigned)
    signs = rng.integers(0, 2, (2, 320)).astype(unsigned) << unsigned(8 * dtype.itemsize - 1)
    # exponent all ones and a mantissa that is not 0: signalling and quiet NaNs
    elements = ((minus_inf << unsigned(1)) >> unsigned(1)) | payloads | signs
    logits = torch.from_numpy(elements.view(f"i{dtype.itemsize}")).view(dtype)
    assert logits.isnan().all()
    bits = rng.random((2, 320)) < density
    bits[1] = rng.random(320) < 0.02
    want = np.where(bits, elements, minus_inf)
    got = apply_token_bitmask_(logits.clone(), pack(bits))
    assert (as_integers(got).numpy().view(unsigned) == want).all()


@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("more_rows", "more_words"), [(0, 0), (3, 0), (0, 2), (2, 1)])
def test_masks_with_rows_and_words_to_spare(density, more_rows, more_words, path):
    rng = np.random.default_rng(5)
    for rows in (1, 2):
        bits = rng.random((rows + more_rows, 32 * (40 + more_words))) < density
        bits[rows:] ^= True
        bits[:, 1280:] ^= True
        logits = random_logits(rng, rows, 1280, torch.float32)
        want = np.where(bits[:rows, :1280], as_integers(logits), as_integers(torch.full_like(logits, NEG_INF)))
        assert (as_integers(apply_token_bitmask_(logits, pack(bits))).numpy() == want).all()


@pytest.mark.parametrize("density", [0.0, 0.001, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("kind", ["alike", "one apart", "out"])
def test_many_rows_go_to_several_threads(density, kind, path, monkeypatch):
    monkeypatch.setattr(cpu, "_PARALLEL_FROM_US", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rng = np.random.default_rng(3)
    bits = rng.random((7, 4096)) < density
    if kind == "one apart":
        bits[4] = rng.random(4096) < 1 - density
    logits = random_logits(rng, 7, 4096, torch.bfloat16)
    want = torch.where(torch.from_numpy(bits), as_integers(logits), as_integers(torch.full_like(logits, NEG_INF)))
    out = torch.full_like(logits, float("nan")) if kind == "out" else logits
    assert torch.equal(as_integers(apply_token_bitmask_(logits, pack(bits), out=out)), want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(cpu, "_PARALLEL_FROM_US", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    mask = torch.full((4, 128), 0x55555555, dtype=torch.int32)
    apply_token_bitmask_(torch.zeros(4, 4096), mask)
    child = os.fork()
    if child == 0:
        # a thread that is not there would be waited for until the alarm ends this process
        signal.alarm(20)
        finite = apply_token_bitmask_(torch.zeros(4, 4096), mask).isfinite().sum()
        os._exit(0 if int(finite) == 4 * 2048 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_engine_kernel_that_misbehaves_is_not_used():
    def writes_nothing(*_):
        return None

    def raises(*_):
        raise TypeError("other arguments")

    assert not cpu._behaves(writes_nothing)
    assert not cpu._behaves(raises)
