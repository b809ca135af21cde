"""apply_token_bitmask_: ban logits columns by bitmask, on whatever device the logits are.

In: logits [B, N] and int32 mask rows.   Out: the logits, banned columns at -inf, legal ones bit for bit as they were.
Rules kept here: the width comes from the logits, columns beyond the mask are banned, bits past the vocabulary are never
trusted. Arguments are checked once, here; kernels trust them.
"""

import torch

from gd_plugin.masks.cpu import apply_token_bitmask_cpu
from gd_plugin.masks.shard import VocabShard

__all__ = ["apply_token_bitmask_"]

_LOGITS_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_FLAG_DTYPES = frozenset({torch.bool, torch.uint8, torch.int32})


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
    """Set logits[r, c] to -inf where the token of column c is banned in the mask row of r, and return the result.

    Args:
        logits: [B, N], float32, float16 or bfloat16 (float64 on the CPU only), last stride 1, rows of any stride.
        bitmask: int32 [>= B, W], last stride 1; bit t % 32 of word t // 32 is 1 where token t is legal.
        token_mask: int32, uint8 or bool [B]; a row at 0 keeps its values.
        d2t: int32 or int64, draft column i stands for token i + d2t[i], i counted over the whole draft vocabulary;
            of the whole draft vocabulary, or of this shard's columns.
        row_index: int32 [B], the mask row of each logits row; -1 keeps the row's values.
        shard: which columns of the vocabulary (with d2t: of the draft vocabulary) these logits are; logits may be padded
            behind the shard's end. Default: column 0 is token 0.
        vocab_size: tokens at and above it are banned. Default: the mask's width.
        out: written in place of `logits`, same shape, dtype and device.

    Returns:
        `out` if given, else `logits`.

    Raises:
        ValueError: an argument of the wrong dtype, shape, device or stride, or a mask narrower than `vocab_size`; nothing
            has been written.
    """
    col_start = 0
    limit = 32 * bitmask.shape[-1]
    if vocab_size is not None:
        if not 0 <= vocab_size <= limit:
            raise ValueError(
                f"bitmask has {bitmask.shape[-1]} words, enough for {limit} tokens, but vocab_size is {vocab_size}; use "
                f"allocate_token_bitmask(rows, {vocab_size})"
            )
        limit = vocab_size
    if shard is not None:
        col_start = shard.start
        if d2t is None:
            limit = min(limit, shard.stop)
        else:
            d2t = _shard_of_d2t(d2t, shard)
    target = logits if out is None else out
    _check(logits, bitmask, token_mask, d2t, row_index, target)
    apply_token_bitmask_cpu(logits, bitmask, token_mask, d2t, row_index, col_start, limit, target)
    return target


def _shard_of_d2t(d2t: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    if d2t.shape == (shard.total,):
        return d2t[shard.start : shard.stop]
    if d2t.shape == (shard.num_columns,):
        return d2t
    raise ValueError(
        f"d2t must have {shard.total} entries (the whole draft vocabulary) or {shard.num_columns} (this shard), got "
        f"shape {tuple(d2t.shape)}"
    )


def _check(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None,
    d2t: torch.Tensor | None,
    row_index: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Raise ValueError naming the first argument that a kernel could not take. A few microseconds: it runs every step."""
    dtype, device, shape = logits.dtype, logits.device, logits.shape
    if dtype not in _LOGITS_DTYPES and not (dtype == torch.float64 and device.type == "cpu"):
        raise ValueError(
            f"logits must be float32, float16 or bfloat16 (float64 on the CPU only), got {dtype} on {device}"
        )
    if len(shape) != 2:
        raise ValueError(f"logits must be [rows, columns], got shape {tuple(shape)}")
    _check_strides("logits", logits)
    if out is not logits:
        if out.dtype != dtype or out.shape != shape or out.device != device:
            raise ValueError(
                f"out must be {dtype} {tuple(shape)} on {device} like logits, got {out.dtype} {tuple(out.shape)} on "
                f"{out.device}"
            )
        _check_strides("out", out)
    if bitmask.dtype != torch.int32 or bitmask.dim() != 2:
        raise ValueError(f"bitmask must be int32 [rows, words], got {bitmask.dtype} {tuple(bitmask.shape)}")
    if bitmask.device != device:
        raise ValueError(f"bitmask is on {bitmask.device} but logits are on {device}; move it there first")
    if bitmask.shape[1] > 1 and bitmask.stride(1) != 1:
        raise ValueError(f"bitmask must have a last stride of 1, got strides {bitmask.stride()}; use .contiguous()")
    if row_index is None:
        if bitmask.shape[0] < shape[0]:
            raise ValueError(
                f"bitmask has {bitmask.shape[0]} rows but logits have {shape[0]}; pass row_index to share rows"
            )
    else:
        _check_vector("row_index", row_index, (torch.int32,), shape[0], device)
        if (
            device.type == "cpu"
            and shape[0]
            and not -1 <= int(row_index.min()) <= int(row_index.max()) < bitmask.shape[0]
        ):
            raise ValueError(
                f"row_index must be in [-1, {bitmask.shape[0]}), the rows of bitmask, got {row_index.tolist()}"
            )
    if token_mask is not None:
        _check_vector("token_mask", token_mask, _FLAG_DTYPES, shape[0], device)
    if d2t is not None:
        _check_vector("d2t", d2t, (torch.int32, torch.int64), None, device)


def _check_strides(name: str, tensor: torch.Tensor) -> None:
    row_stride, column_stride = tensor.stride()
    rows, columns = tensor.shape
    if columns > 1 and column_stride != 1:
        raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}; use .contiguous()")
    if rows > 1 and row_stride < columns:
        raise ValueError(f"{name} has rows that overlap (strides {tensor.stride()}); use .contiguous()")


def _check_vector(
    name: str,
    tensor: torch.Tensor,
    dtypes: "frozenset[torch.dtype] | tuple[torch.dtype, ...]",
    length: int | None,
    device: torch.device,
) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(sorted(str(dtype) for dtype in dtypes))}, got {tensor.dtype}")
    if tensor.dim() != 1 or (length is not None and tensor.shape[0] != length):
        wanted = "one-dimensional" if length is None else f"[{length}], one entry a row of logits"
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}; use .contiguous()")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} but logits are on {device}; move it there first")
