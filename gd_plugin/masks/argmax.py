"""argmax_under_bitmask: the best legal column of each row, for greedy decoding and drafting.

In: logits [B, N] and int32 mask rows.   Out: int64 [B]; the logits are read once and not written.
"""

import torch

from gd_plugin.masks.arguments import check_arguments, check_row_index, unpack_shard
from gd_plugin.masks.shard import VocabShard

__all__ = ["argmax_under_bitmask"]


def argmax_under_bitmask(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    *,
    row_index: torch.Tensor | None = None,
    shard: VocabShard | None = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Return int64 [B], the legal column with the greatest logit in each row.

    Of equal logits the lowest column wins; NaN is greater than every number, as in torch.argmax; a legal -inf still beats
    every banned column. A row without a legal column gets -1. With a d2t or a shard the result is a column of these
    logits, not a token.

    Args:
        logits: [B, N], as in apply_token_bitmask_.
        bitmask: int32 [>= B, W].
        token_mask: a row at 0 is searched whole.
        d2t: as in apply_token_bitmask_.
        row_index: as in apply_token_bitmask_; a row at -1 is searched whole.
        shard: as in apply_token_bitmask_.
        vocab_size: tokens at and above it are banned.

    Raises:
        ValueError: as apply_token_bitmask_.
    """
    d2t, col_start, vocab_size = unpack_shard(shard, d2t, vocab_size, 32 * bitmask.shape[-1], logits.shape[-1])
    arguments = check_arguments(logits, bitmask, token_mask, d2t, row_index, col_start, vocab_size)
    if logits.device.type == "cpu":
        check_row_index(arguments)
    elif logits.device.type == "cuda" and logits.numel():
        from gd_plugin.triton_kernels.masked_argmax import launch_argmax

        return launch_argmax(logits, arguments)
    from gd_plugin.triton_kernels.reference import argmax_under_bitmask_reference

    return argmax_under_bitmask_reference(logits, *arguments)
