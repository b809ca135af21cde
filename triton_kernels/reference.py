"""What the kernels compute, in plain torch: short enough to be read as the definition. Kernels are tested against it.

    token(c)    = col_start + c, or col_start + c + d2t[c]                the token that column c stands for
    legal(r, c) = token(c) in [0, limit) and bit token(c) of bitmask[row_index[r]] is 1
    out[r, c]   = logits[r, c] where row r is unguided or legal(r, c), else -inf

A row is unguided if its token_mask is 0 or its row_index negative. Runs on any device torch runs on.
"""

import torch

__all__ = ["apply_token_bitmask_reference", "argmax_under_bitmask_reference", "legal_columns"]


def legal_columns(
    num_rows: int,
    num_columns: int,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    col_start: int = 0,
    limit: int | None = None,
) -> torch.Tensor:
    """Return bool [num_rows, num_columns]: True where the element keeps its value.

    Args:
        num_rows: rows of the logits, B.
        num_columns: columns of the logits, N.
        bitmask: int32 [rows, W].
        token_mask: [B] or None.
        d2t: offsets of these columns, [<= N]; columns behind its end stand for no token.
        row_index: int32 [B] or None; a row that does not exist bans everything, a negative one nothing.
        col_start: column 0 in whole-vocabulary coordinates (with d2t: draft-vocabulary coordinates).
        limit: tokens at and above it are banned; at most 32 * W, which is the default.
    """
    device = bitmask.device
    limit = 32 * bitmask.shape[1] if limit is None else limit
    columns = torch.arange(num_columns, device=device)
    tokens = columns + col_start  # [N]
    known = tokens < limit
    if d2t is not None:
        known = columns < d2t.shape[0]
        tokens = tokens + torch.nn.functional.pad(d2t.long(), (0, num_columns - d2t.shape[0]))
        known = known & (tokens >= 0) & (tokens < limit)
    rows = torch.arange(num_rows, device=device) if row_index is None else row_index.long()  # [B]
    exists = (rows >= 0) & (rows < bitmask.shape[0])
    # one more row and word of zeros: what every row and token that does not exist reads
    words = torch.nn.functional.pad(bitmask, (0, 1, 0, 1))[torch.where(exists, rows, bitmask.shape[0])]
    words = words[:, torch.where(known, tokens // 32, bitmask.shape[1])]  # [B, N]
    legal = ((words >> (tokens % 32).int()) & 1).bool()
    if row_index is not None:
        legal = legal | (row_index < 0)[:, None]
    if token_mask is not None:
        legal = legal | (token_mask == 0)[:, None]
    return legal


def apply_token_bitmask_reference(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    col_start: int = 0,
    limit: int | None = None,
) -> torch.Tensor:
    """Return a masked copy of `logits`, [B, N]; the other arguments as in `legal_columns`."""
    legal = legal_columns(logits.shape[0], logits.shape[1], bitmask, token_mask, d2t, row_index, col_start, limit)
    return logits.masked_fill(~legal, float("-inf"))


def argmax_under_bitmask_reference(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    d2t: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
    col_start: int = 0,
    limit: int | None = None,
) -> torch.Tensor:
    """Return int64 [B], the greatest legal column of each row, or -1 where none is legal.

    NaN is greater than every number; of equals the lowest column wins; a legal -inf is still legal.
    """
    legal = legal_columns(logits.shape[0], logits.shape[1], bitmask, token_mask, d2t, row_index, col_start, limit)
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), -1, dtype=torch.long)
    best = logits.masked_fill(~legal, float("-inf")).amax(dim=1, keepdim=True)  # NaN where a legal NaN is
    candidates = legal & ((logits == best) | (logits.isnan() & best.isnan()))
    return torch.where(candidates.any(dim=1), candidates.int().argmax(dim=1), -1)
