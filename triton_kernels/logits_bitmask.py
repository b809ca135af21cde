"""Ban logits columns by bitmask on a GPU, 16 bytes at a time.

    out[r, c] = logits[r, c] where reference.legal_columns says so, else -inf

A chunk is the widest run of columns that one access may move: 16 bytes (8 halves or 4 floats) if base, row stride and
width allow it, down to one column. Each chunk decides for itself: all legal, nothing is touched; none legal, one store
and no load; mixed, load, select and store. A predicate that is the same for a whole chunk is what lets the compiler
keep the access whole. Logits are handled as integers of their own width, so that a legal element keeps its bits.

Three variants, chosen when the kernel is specialised: ALIGNED, where no chunk straddles two mask words; SHIFTED, where
chunks may, because the shard's first column is no multiple of the chunk; D2T, where each column looks its token up.

The launcher neither synchronises nor allocates nor tunes, so it may be captured in a CUDA graph.
"""

from functools import lru_cache
from math import gcd
from typing import Final

import torch
import triton
import triton.language as tl

from gd_plugin.masks.arguments import MaskArguments, check_arguments, check_out, unpack_shard
from gd_plugin.masks.shard import VocabShard

__all__ = ["apply_token_bitmask_", "launch"]

ALIGNED: Final = 0
SHIFTED: Final = 1
D2T: Final = 2

_ACCESS_BYTES: Final = 16
THREADS: Final = 128
# columns a program handles, between what one pass of its threads moves and what its registers hold
_MIN_CHUNKS, _MAX_CHUNKS = THREADS, 8 * THREADS
# programs wanted per multiprocessor before a program is given more columns
_PROGRAMS_PER_SM: Final = 8
# dtype -> (integer dtype of its width, -inf as that integer)
AS_INTEGERS: Final = {
    torch.float32: (torch.int32, -0x800000),
    torch.float16: (torch.int16, -0x400),
    torch.bfloat16: (torch.int16, -0x80),
}


@triton.jit
def guided_row(row, token_mask_ptr, row_index_ptr, HAS_TOKEN_MASK: tl.constexpr, HAS_ROW_INDEX: tl.constexpr):
    """Return (whether a mask applies to the row, its mask row)."""
    guided = True
    mask_row = row
    if HAS_TOKEN_MASK:
        guided = tl.load(token_mask_ptr + row) != 0
    if HAS_ROW_INDEX:
        mask_row = tl.load(row_index_ptr + row)
        guided = guided & (mask_row >= 0)
    return guided, mask_row


@triton.jit
def legal_bits(
    columns,
    words_ptr,
    d2t_ptr,
    num_d2t,
    col_start,
    limit,
    VARIANT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the legal columns of each chunk as bits, [C, 1]; `columns`, [C, 1], are the first of each chunk.

    Bit j belongs to column j of the chunk. No word is read that holds no token below `limit`.
    """
    if VARIANT == 2:  # D2T
        lanes = tl.arange(0, CHUNK)[None, :]
        drafts = columns + lanes  # [C, CHUNK]
        offsets = tl.load(d2t_ptr + drafts, mask=drafts < num_d2t, other=0).to(tl.int64)
        tokens = drafts.to(tl.int64) + col_start + offsets
        known = ((drafts < num_d2t) & (tokens >= 0) & (tokens < limit)).to(tl.int32) != 0
        words = tl.load(words_ptr + (tokens >> 5), mask=known, other=0).to(tl.uint32, bitcast=True)
        bits = ((words >> (tokens & 31).to(tl.uint32)) & 1) << lanes.to(tl.uint32)
        return tl.sum(bits.to(tl.int32), axis=1)[:, None]
    tokens = columns + col_start
    # bits of this chunk that stand for a token at all
    num_known = tl.minimum(tl.maximum(limit - tokens, 0), CHUNK)
    shifts = (tokens & 31).to(tl.uint32)
    words = tl.load(words_ptr + (tokens >> 5), mask=num_known > 0, other=0).to(tl.uint32, bitcast=True)
    bits = words >> shifts
    if VARIANT == 1:  # SHIFTED
        taken = 32 - (tokens & 31)  # bits of the chunk that the first word holds, if not all
        upper = tl.load(words_ptr + (tokens >> 5) + 1, mask=num_known > taken, other=0).to(tl.uint32, bitcast=True)
        # & 31: where the first word holds everything, `upper` is 0 and the shift only has to be defined
        bits = bits | (upper << (taken & 31).to(tl.uint32))
    return bits.to(tl.int32, bitcast=True) & ((1 << num_known) - 1)


@triton.jit
def logits_bitmask_kernel(
    logits_ptr,
    out_ptr,
    bitmask_ptr,
    token_mask_ptr,
    d2t_ptr,
    row_index_ptr,
    logits_stride,
    out_stride,
    bitmask_stride,
    num_columns,
    num_mask_rows,
    num_d2t,
    col_start,
    limit,
    blocks_per_row,
    MINUS_INF: tl.constexpr,
    VARIANT: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    HAS_TOKEN_MASK: tl.constexpr,
    HAS_ROW_INDEX: tl.constexpr,
    STORE_ONLY: tl.constexpr,
):
    """One program masks NUM_CHUNKS chunks of CHUNK columns of one row."""
    program = tl.program_id(0)
    row = program // blocks_per_row
    block = program % blocks_per_row
    guided, mask_row = guided_row(row, token_mask_ptr, row_index_ptr, HAS_TOKEN_MASK, HAS_ROW_INDEX)
    if IN_PLACE:  # noqa: SIM102 - the outer test is settled at compile time, the inner one by the row
        if not guided:
            return
    # 64-bit: 16,384 rows of 151,936 columns are more than 2**31 elements
    # the launcher chose CHUNK so that every row begins at a multiple of it
    access: tl.constexpr = CHUNK * (out_ptr.dtype.element_ty.primitive_bitwidth // 8)
    source_ptr = tl.multiple_of(logits_ptr + row.to(tl.int64) * logits_stride, access)
    target_ptr = tl.multiple_of(out_ptr + row.to(tl.int64) * out_stride, access)
    words_ptr = bitmask_ptr + mask_row.to(tl.int64) * bitmask_stride

    columns = (block * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)[:, None]) * CHUNK  # [C, 1]
    lanes = tl.arange(0, CHUNK)[None, :]
    elements = columns + lanes  # [C, CHUNK]
    # a chunk divides the width: it is inside the row or outside, never half
    inside = columns < num_columns
    # a mask row that does not exist bans everything, one that does not apply nothing
    readable = guided
    if HAS_ROW_INDEX:
        readable = guided & (mask_row < num_mask_rows)
    bits = legal_bits(columns, words_ptr, d2t_ptr, num_d2t, col_start, tl.where(readable, limit, 0), VARIANT, CHUNK)
    ALL: tl.constexpr = (1 << CHUNK) - 1
    if not IN_PLACE:
        bits = tl.where(guided, bits, ALL)
    legal = ((bits >> lanes) & 1) != 0  # [C, CHUNK]

    if STORE_ONLY:
        # measured against the other form by benchmarks/gpu_check.py: mixed chunks store at their banned columns alone
        empty = tl.broadcast_to((inside & (bits == 0)).to(tl.int32) != 0, (NUM_CHUNKS, CHUNK))
        mixed = (inside & (bits != 0)).to(tl.int32) != 0
        fill = tl.full((NUM_CHUNKS, CHUNK), MINUS_INF, target_ptr.dtype.element_ty)
        tl.store(target_ptr + elements, fill, mask=empty)
        tl.store(target_ptr + elements, fill, mask=(mixed & (legal == 0)).to(tl.int32) != 0)
        return
    loads = (inside & (bits != 0)).to(tl.int32) != 0
    stores = inside
    if IN_PLACE:
        loads = (loads & (bits != ALL)).to(tl.int32) != 0
        stores = (stores & (bits != ALL)).to(tl.int32) != 0
    values = tl.load(source_ptr + elements, mask=tl.broadcast_to(loads, (NUM_CHUNKS, CHUNK)), other=MINUS_INF)
    values = tl.where(legal, values, MINUS_INF)
    tl.store(target_ptr + elements, values, mask=tl.broadcast_to(stores, (NUM_CHUNKS, CHUNK)))


def launch(logits: torch.Tensor, arguments: MaskArguments, out: torch.Tensor, *, store_only: bool = False) -> None:
    """Write the masked `logits`, [B, N] with B and N at least 1, into `out`, which may be `logits` itself.

    Args:
        logits: checked by masks/arguments.py.
        arguments: what is legal.
        out: as `logits`.
        store_only: in place, write mixed chunks column by column without reading them. For measuring.
    """
    bitmask, token_mask, d2t, row_index, col_start, limit = arguments
    num_rows, num_columns = logits.shape
    integer, minus_inf = AS_INTEGERS[logits.dtype]
    in_place = out is logits
    chunk = widest_chunk(logits) if in_place else min(widest_chunk(logits), widest_chunk(out))
    num_chunks = chunks_per_program(num_rows, num_columns, chunk, logits.device)
    blocks_per_row = triton.cdiv(num_columns, num_chunks * chunk)
    target = out.view(integer)
    # the logits' device need not be the current one
    with torch.cuda.device_of(logits):
        logits_bitmask_kernel[(num_rows * blocks_per_row,)](
            target if in_place else logits.view(integer),
            target,
            *mask_tensors(arguments),
            logits.stride(0),
            out.stride(0),
            bitmask.stride(0),
            num_columns,
            bitmask.shape[0],
            0 if d2t is None else d2t.shape[0],
            col_start,
            limit,
            blocks_per_row,
            MINUS_INF=minus_inf,
            VARIANT=variant_of(arguments, chunk),
            CHUNK=chunk,
            NUM_CHUNKS=num_chunks,
            IN_PLACE=in_place,
            HAS_TOKEN_MASK=token_mask is not None,
            HAS_ROW_INDEX=row_index is not None,
            STORE_ONLY=in_place and (store_only or chunk == 1),
            num_warps=THREADS // 32,
            enable_fp_fusion=False,
        )


def mask_tensors(arguments: MaskArguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (bitmask, token_mask, d2t, row_index) as kernels load them; for what is absent a tensor that is never read."""
    bitmask, token_mask, d2t, row_index = arguments[:4]
    if token_mask is not None and token_mask.dtype == torch.bool:
        token_mask = token_mask.view(torch.uint8)
    return (
        bitmask,
        bitmask if token_mask is None else token_mask,
        bitmask if d2t is None else d2t,
        bitmask if row_index is None else row_index,
    )


def variant_of(arguments: MaskArguments, chunk: int) -> int:
    """Return the kernel variant for these arguments."""
    if arguments.d2t is not None:
        return D2T
    return ALIGNED if arguments.col_start % chunk == 0 else SHIFTED


def widest_chunk(logits: torch.Tensor) -> int:
    """Return the columns that one access may move: a power of two that base, row stride and width are multiples of."""
    size = logits.element_size()
    row_stride = logits.stride(0) if logits.shape[0] > 1 else 0
    return gcd(_ACCESS_BYTES // size, logits.data_ptr() // size, row_stride, logits.shape[1])


def chunks_per_program(num_rows: int, num_columns: int, chunk: int, device: torch.device) -> int:
    """Return the chunks a program handles, a power of two: few while the device is not full, then more."""
    wanted = num_rows * num_columns // (chunk * _PROGRAMS_PER_SM * _num_multiprocessors(device))
    return int(min(max(triton.next_power_of_2(wanted), _MIN_CHUNKS), _MAX_CHUNKS))


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    # the interpreter runs on the CPU, one program after another
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def apply_token_bitmask_(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    row_index: torch.Tensor | None = None,
    shard: VocabShard | None = None,
    vocab_size: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Do what gd_plugin.apply_token_bitmask_ does, by this kernel on any device: with TRITON_INTERPRET=1 on the CPU too.

    Raises:
        ValueError: as gd_plugin.apply_token_bitmask_; float64 logits.
    """
    d2t, col_start, vocab_size = unpack_shard(shard, d2t, vocab_size, 32 * bitmask.shape[-1], logits.shape[-1])
    arguments = check_arguments(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size)
    if logits.dtype not in AS_INTEGERS:
        raise ValueError(f"logits must be float32, float16 or bfloat16 for the Triton kernel, got {logits.dtype}")
    if out is not None:
        check_out(logits, out)
    target = logits if out is None else out
    if target.numel():
        launch(logits, arguments, target)
    return target
