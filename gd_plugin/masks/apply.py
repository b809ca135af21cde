"""apply_token_bitmask_: ban logits columns by bitmask, on whatever device the logits are.

In: logits [B, N] and int32 mask rows.   Out: the logits, banned columns at -inf, legal ones bit for bit as they were.

Two torch operators do the work, so that compiled and captured programs can hold it (an operator may not return what it
mutates, hence one in place and one into `out`). They dispatch by device: CUDA and ROCm run the Triton kernel, the CPU
masks/cpu.py, every other device the plain-torch definition in triton_kernels/reference.py.
"""

from typing import Any

import torch

from gd_plugin.masks.arguments import check_arguments, check_out, check_row_index, unpack_shard
from gd_plugin.masks.cpu import apply_plain_token_bitmask_cpu, apply_token_bitmask_cpu
from gd_plugin.masks.shard import VocabShard

__all__ = ["apply_token_bitmask_", "open_banned_rows_"]


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

    Neither synchronises nor allocates on a GPU. Not differentiable: the result is a set of scores to choose from.

    Args:
        logits: [B, N], float32, float16 or bfloat16 (float64 on the CPU only), last stride 1, rows of any stride.
        bitmask: int32 [>= B, W], last stride 1; bit t % 32 of word t // 32 is 1 where token t is legal.
        token_mask: int32, uint8 or bool [B]; a row at 0 keeps its values.
        d2t: int32 or int64, draft column i stands for token i + d2t[i], i counted over the whole draft vocabulary;
            of the whole draft vocabulary, or of this shard's columns; without a shard, at least one a column.
        row_index: int32 [B], the mask row of each logits row; -1 keeps the row's values. On a GPU the values are not
            checked (that would synchronise): a row that does not exist bans the whole row.
        shard: which columns of the vocabulary (with d2t: of the draft vocabulary) these logits are; logits may be
            padded behind the shard's end. Default: column 0 is token 0.
        vocab_size: tokens at and above it are banned. Default: the mask's width.
        out: written in place of `logits`, same shape, dtype and device, not overlapping them.

    Returns:
        `out` if given, else `logits`.

    Raises:
        ValueError: an argument of the wrong dtype, shape, device or stride, or a mask narrower than `vocab_size`;
            nothing has been written.
    """
    # on the CPU the operator's own dispatch would cost as much as a row
    direct = type(logits) is torch.Tensor and logits.is_cpu and not torch.compiler.is_compiling()
    plain = token_mask is None and d2t is None and row_index is None and shard is None and vocab_size is None
    if direct and plain and out is None and apply_plain_token_bitmask_cpu(logits, bitmask):
        return logits
    if shard is None and d2t is None:
        col_start = 0
    else:
        d2t, col_start, vocab_size = unpack_shard(shard, d2t, vocab_size, 32 * bitmask.shape[-1], logits.shape[-1])
    if direct:
        _apply(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size, logits if out is None else out)
    elif out is None:
        torch.ops.gd_plugin.apply_token_bitmask_(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size)
    else:
        torch.ops.gd_plugin.apply_token_bitmask_out(
            logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size, out=out
        )
    return logits if out is None else out


def open_banned_rows_(
    logits: torch.Tensor, bitmask: torch.Tensor, guided: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    """Where something before the guide banned every legal token of a row, let all of them through alike, in place.

    Does not wait for a GPU.

    Args:
        logits: [B, N], masked already.
        bitmask: what they were masked with.
        guided: bool [B], rows that a mask speaks of.
        **arguments: the others that `apply_token_bitmask_` was given.

    Returns:
        bool [B], the rows that were opened.
    """
    banned = (logits.amax(dim=-1) == float("-inf")) & guided
    if logits.is_cpu and not bool(banned.any()):
        return banned
    legal = apply_token_bitmask_(torch.zeros_like(logits), bitmask, **arguments)
    logits.copy_(torch.where(banned[:, None], legal, logits))
    return banned


def _apply(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None,
    d2t: torch.Tensor | None,
    row_index: torch.Tensor | None,
    col_start: int,
    vocab_size: int | None,
    out: torch.Tensor,
) -> None:
    arguments = check_arguments(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size)
    if out is not logits:
        check_out(logits, out)
    if out.numel() == 0:
        return
    device_type = logits.device.type
    if device_type == "cpu":
        check_row_index(arguments)
        apply_token_bitmask_cpu(logits, arguments, out)
    elif device_type == "cuda":  # ROCm's devices have this name too
        from gd_plugin.triton_kernels.logits_bitmask import launch

        launch(logits, arguments, out)
    else:
        from gd_plugin.triton_kernels.reference import legal_columns

        banned = ~legal_columns(logits.shape[0], logits.shape[1], *arguments)
        if out is not logits:
            out.copy_(logits)
        out.masked_fill_(banned, float("-inf"))


def _operator_in_place(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    col_start: int = 0,
    vocab_size: int | None = None,
) -> None:
    _apply(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size, logits)


def _operator_out(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    col_start: int = 0,
    vocab_size: int | None = None,
    *,
    out: torch.Tensor,
) -> None:
    _apply(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size, out)


def _fake(*args: object, **kwargs: object) -> None:
    """Nothing to infer: both operators write into a tensor of a known shape and return nothing."""


_ARGUMENTS = (
    "Tensor bitmask, Tensor? token_mask=None, Tensor? d2t=None, Tensor? row_index=None, int col_start=0, "
    "int? vocab_size=None"
)
_library = torch.library.Library("gd_plugin", "FRAGMENT")
for _name, _first, _last, _function in (
    ("apply_token_bitmask_", "Tensor(a!) logits", "", _operator_in_place),
    ("apply_token_bitmask_out", "Tensor logits", ", *, Tensor(a!) out", _operator_out),
):
    _library.define(f"{_name}({_first}, {_ARGUMENTS}{_last}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gd_plugin::{_name}", _fake, lib=_library)
