"""The greatest legal column of each row in one pass over the logits, which stay as they are.

Definition: reference.argmax_under_bitmask_reference. A chunk without a legal column is not read. Each program reduces
its chunks to one integer whose order is that of (value, lower column first); a second, tiny reduction over the programs
of a row is left to torch.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from gd_plugin.triton_kernels.logits_bitmask import (
    THREADS,
    chunks_per_program,
    guided_row,
    legal_bits,
    mask_tensors,
    variant_of,
    widest_chunk,
)

from gd_plugin.masks.arguments import MaskArguments

__all__ = ["launch_argmax"]

# below the key of every value, -inf included
_NOTHING: Final = -(1 << 63)
_LAST_COLUMN: Final = 0x7FFFFFFF


@triton.jit
def masked_argmax_kernel(
    logits_ptr,
    keys_ptr,
    bitmask_ptr,
    token_mask_ptr,
    d2t_ptr,
    row_index_ptr,
    logits_stride,
    bitmask_stride,
    num_columns,
    num_mask_rows,
    num_d2t,
    col_start,
    limit,
    blocks_per_row,
    VARIANT: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HAS_TOKEN_MASK: tl.constexpr,
    HAS_ROW_INDEX: tl.constexpr,
):
    """Write the greatest key of NUM_CHUNKS chunks of one row to keys[row, block]."""
    program = tl.program_id(0)
    row = program // blocks_per_row
    block = program % blocks_per_row
    guided, mask_row = guided_row(row, token_mask_ptr, row_index_ptr, HAS_TOKEN_MASK, HAS_ROW_INDEX)
    access: tl.constexpr = CHUNK * (logits_ptr.dtype.element_ty.primitive_bitwidth // 8)
    source_ptr = tl.multiple_of(logits_ptr + row.to(tl.int64) * logits_stride, access)
    words_ptr = bitmask_ptr + mask_row.to(tl.int64) * bitmask_stride

    columns = (block * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)[:, None]) * CHUNK  # [C, 1]
    lanes = tl.arange(0, CHUNK)[None, :]
    readable = guided
    if HAS_ROW_INDEX:
        readable = guided & (mask_row < num_mask_rows)
    bits = legal_bits(columns, words_ptr, d2t_ptr, num_d2t, col_start, tl.where(readable, limit, 0), VARIANT, CHUNK)
    ALL: tl.constexpr = (1 << CHUNK) - 1
    bits = tl.where(guided, bits, ALL)
    bits = tl.where(columns < num_columns, bits, 0)

    loads = tl.broadcast_to(bits != 0, (NUM_CHUNKS, CHUNK))
    # adding zero makes -0.0 the 0.0 it is equal to
    values = tl.load(source_ptr + columns + lanes, mask=loads, other=0.0).to(tl.float32) + 0.0  # [C, CHUNK]
    # the bits of a float, ordered as signed integers once the negative ones are turned round
    order = values.to(tl.int32, bitcast=True)
    order = order ^ ((order >> 31) & 0x7FFFFFFF)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - (columns + lanes)).to(tl.int64)
    keys = tl.where(((bits >> lanes) & 1) != 0, keys, -9223372036854775808)
    tl.store(keys_ptr + program, tl.max(tl.max(keys, axis=1), axis=0))


def launch_argmax(logits: torch.Tensor, arguments: MaskArguments) -> torch.Tensor:
    """Return int64 [B], the greatest legal column of each row of `logits`, [B, N], or -1 where none is legal.

    Allocates its result and B times the programs of a row; does not synchronise.
    """
    bitmask, token_mask, d2t, row_index, col_start, limit = arguments
    num_rows, num_columns = logits.shape
    chunk = widest_chunk(logits)
    num_chunks = chunks_per_program(num_rows, num_columns, chunk, logits.device)
    blocks_per_row = triton.cdiv(num_columns, num_chunks * chunk)
    keys = torch.empty((num_rows, blocks_per_row), dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):
        masked_argmax_kernel[(num_rows * blocks_per_row,)](
            logits,
            keys,
            *mask_tensors(arguments),
            logits.stride(0),
            bitmask.stride(0),
            num_columns,
            bitmask.shape[0],
            0 if d2t is None else d2t.shape[0],
            col_start,
            limit,
            blocks_per_row,
            VARIANT=variant_of(arguments, chunk),
            CHUNK=chunk,
            NUM_CHUNKS=num_chunks,
            HAS_TOKEN_MASK=token_mask is not None,
            HAS_ROW_INDEX=row_index is not None,
            num_warps=THREADS // 32,
            enable_fp_fusion=False,
        )
    best = keys.amax(dim=1)
    return torch.where(best == _NOTHING, -1, _LAST_COLUMN - (best & 0xFFFFFFFF))
