"""The arguments of the mask operations, checked once and unpacked for the kernels.

In: what the caller passed.   Out: `MaskArguments`, which every kernel takes as it is, or a ValueError that names one.
Rules kept here: the width comes from the logits, columns beyond the mask are banned. It runs every step: a few
microseconds, no synchronisation.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch

from gd_plugin.masks.shard import VocabShard, check_shard

__all__ = ["MaskArguments", "check_arguments", "check_out", "check_row_index", "unpack_shard"]

_LOGITS_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_FLAG_DTYPES = frozenset({torch.bool, torch.uint8, torch.int32})
_INDEX_DTYPES = frozenset({torch.int32})
_OFFSET_DTYPES = frozenset({torch.int32, torch.int64})


class MaskArguments(NamedTuple):
    """Which columns of [B, N] logits are legal; what the kernels take behind the logits.

    Attributes:
        bitmask: int32 [rows, W].
        token_mask: [B] or None; a row at 0 keeps its values.
        d2t: offsets of these columns, [<= N], or None; columns behind its end are banned.
        row_index: int32 [B] or None; the mask row of each logits row, negative keeps the values.
        col_start: column 0 in whole-vocabulary coordinates (with d2t: draft-vocabulary coordinates).
        limit: tokens at and above it are banned; at most 32 * W.
    """

    bitmask: torch.Tensor
    token_mask: torch.Tensor | None
    d2t: torch.Tensor | None
    row_index: torch.Tensor | None
    col_start: int
    limit: int


def unpack_shard(
    shard: VocabShard | None,
    d2t: torch.Tensor | None,
    vocab_size: int | None,
    mask_width: int,
    num_columns: int,
) -> tuple[torch.Tensor | None, int, int | None]:
    """Return (d2t of these columns, column 0 in vocabulary coordinates, width) as the operators take them.

    Raises:
        TypeError: a shard of another class.
        ValueError: a d2t that is neither as long as the whole draft vocabulary nor as this shard; without a shard,
            one that is shorter than the logits are wide.
    """
    if shard is None:
        # the columns behind its end would be banned, and nobody told
        if d2t is not None and d2t.dim() == 1 and d2t.shape[0] < num_columns:
            raise ValueError(
                f"d2t has {d2t.shape[0]} entries but logits have {num_columns} columns; it needs one a column (if the "
                f"columns behind are padding, pass shard=VocabShard(0, 1, {d2t.shape[0]}))"
            )
        return d2t, 0, vocab_size
    check_shard("shard", shard)
    if d2t is None:
        # columns behind the shard's end are padding, not the next rank's tokens
        width = mask_width if vocab_size is None else vocab_size
        return None, shard.start, min(width, shard.stop)
    if d2t.shape == (shard.total,):
        return d2t[shard.start : shard.stop], shard.start, vocab_size
    if d2t.shape == (shard.num_columns,):
        return d2t, shard.start, vocab_size
    raise ValueError(
        f"d2t must have {shard.total} entries (the whole draft vocabulary) or {shard.num_columns} (this shard), got "
        f"shape {tuple(d2t.shape)}"
    )


def check_arguments(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None,
    d2t: torch.Tensor | None,
    row_index: torch.Tensor | None,
    col_start: int,
    vocab_size: int | None,
) -> MaskArguments:
    """Raise ValueError naming the first argument that no kernel could take; nothing has been written then.

    A d2t longer than the logits are wide is that of the whole draft vocabulary, and is cut from `col_start` on.
    """
    dtype, device, shape = logits.dtype, logits.device, logits.shape
    if dtype not in _LOGITS_DTYPES and not (dtype == torch.float64 and device.type == "cpu"):
        raise ValueError(
            f"logits must be float32, float16 or bfloat16 (float64 on the CPU only), got {dtype} on {device}"
        )
    if len(shape) != 2:
        raise ValueError(f"logits must be [rows, columns], got shape {tuple(shape)}")
    if not logits.is_contiguous():
        _check_strides("logits", logits)

    mask_shape = bitmask.shape
    if bitmask.dtype != torch.int32 or len(mask_shape) != 2:
        raise ValueError(f"bitmask must be int32 [rows, words], got {bitmask.dtype} {tuple(mask_shape)}")
    if bitmask.device != device:
        raise ValueError(f"bitmask is on {bitmask.device} but logits are on {device}; move it there first")
    if not bitmask.is_contiguous() and mask_shape[1] > 1 and bitmask.stride(1) != 1:
        raise ValueError(f"bitmask must have a last stride of 1, got strides {bitmask.stride()}; use .contiguous()")
    limit = 32 * mask_shape[1]
    if vocab_size is not None:
        if not 0 <= vocab_size <= limit:
            raise ValueError(
                f"bitmask has {mask_shape[1]} words, enough for {limit} tokens, but vocab_size is {vocab_size}; use "
                f"allocate_token_bitmask(rows, {vocab_size})"
            )
        limit = vocab_size
    if col_start < 0:
        raise ValueError(f"col_start must not be negative, got {col_start}")

    if row_index is None:
        if mask_shape[0] < shape[0]:
            raise ValueError(
                f"bitmask has {mask_shape[0]} rows but logits have {shape[0]}; pass row_index to share rows"
            )
    else:
        _check_vector("row_index", row_index, _INDEX_DTYPES, shape[0], device)
    if token_mask is not None:
        _check_vector("token_mask", token_mask, _FLAG_DTYPES, shape[0], device)
    if d2t is not None:
        _check_vector("d2t", d2t, _OFFSET_DTYPES, None, device)
        if d2t.shape[0] > shape[1]:
            d2t = d2t[col_start : col_start + shape[1]]
    return MaskArguments(bitmask, token_mask, d2t, row_index, col_start, limit)


def check_out(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError if `out` cannot take the result for `logits`."""
    if out.dtype != logits.dtype or out.shape != logits.shape or out.device != logits.device:
        raise ValueError(
            f"out must be {logits.dtype} {tuple(logits.shape)} on {logits.device} like logits, got {out.dtype} "
            f"{tuple(out.shape)} on {out.device}"
        )
    _check_strides("out", out)


def check_row_index(arguments: MaskArguments) -> None:
    """Raise ValueError if a row_index on the CPU names a row that does not exist; elsewhere this would synchronise."""
    if arguments.row_index is None or arguments.row_index.shape[0] == 0:
        return
    indices, num_rows = arguments.row_index.tolist(), arguments.bitmask.shape[0]
    if min(indices) < -1 or max(indices) >= num_rows:
        raise ValueError(f"row_index must be in [-1, {num_rows}), the rows of bitmask, got {indices[:20]}")


def _check_strides(name: str, tensor: torch.Tensor) -> None:
    row_stride, column_stride = tensor.stride()
    rows, columns = tensor.shape
    if columns > 1 and column_stride != 1 and rows:
        raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}; use .contiguous()")
    if rows > 1 and row_stride < columns:
        raise ValueError(f"{name} has rows that overlap (strides {tensor.stride()}); use .contiguous()")


def _check_vector(
    name: str, tensor: torch.Tensor, dtypes: Collection[torch.dtype], length: int | None, device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(sorted(map(str, dtypes)))}, got {tensor.dtype}")
    if tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        wanted = "one-dimensional" if length is None else f"[{length}], one entry a row of logits"
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}; use .contiguous()")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but logits are on {device}; move it there first")
