"""The CPU kernel: vector code for whole rows, sparse code where few columns differ from their neighbours.

In: checked arguments of masks/apply.py, on the CPU.   Out: `out` (which may be `logits`), banned columns at -inf.

Rows are handled as integers of the logits' width, so that a legal element keeps its bits, a NaN's payload included, and
so that one code serves every dtype (numpy has no bfloat16). A row takes one of three paths by how many of its mask words
are not all banned or not all legal: fill and put the legal values back, put -inf at the banned ones, or select everywhere.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["apply_token_bitmask_cpu"]

Words = npt.NDArray[np.uint32]
Bits = npt.NDArray[Any]  # logits as signed integers of their own width

# dtype -> (integer dtype of its width, -inf as that integer)
_AS_INTEGERS = {
    dtype: (integer, int(torch.tensor([float("-inf")], dtype=dtype).view(integer)))
    for dtype, integer in (
        (torch.float32, torch.int32),
        (torch.float16, torch.int16),
        (torch.bfloat16, torch.int16),
        (torch.float64, torch.int64),
    )
}

# Below one word in this many, index lists beat a pass over the whole row (benchmarks/apply_cpu.py).
_SPARSE_FRACTION = 16


def apply_token_bitmask_cpu(
    logits: torch.Tensor,
    bitmask: torch.Tensor,
    token_mask: torch.Tensor | None,
    d2t: torch.Tensor | None,
    row_index: torch.Tensor | None,
    col_start: int,
    limit: int,
    out: torch.Tensor,
) -> None:
    """Write the masked `logits` into `out`.

    Args:
        logits: [B, N], last stride 1.
        bitmask: int32 [rows, W].
        token_mask: [B] or None; a row at 0 keeps its values.
        d2t: offsets of these columns, [<= N], or None; columns behind its end are banned.
        row_index: int32 [B] or None; mask row of each logits row, -1 keeps the values.
        col_start: column 0 in whole-vocabulary coordinates.
        limit: tokens at and above it are banned; at most 32 * W.
        out: as `logits`; the same tensor to work in place.
    """
    integer, minus_inf = _AS_INTEGERS[logits.dtype]
    source = logits.detach().view(integer).numpy()
    in_place = out is logits
    target = source if in_place else out.detach().view(integer).numpy()
    rows = bitmask.numpy().view(np.uint32)
    num_rows, num_columns = source.shape
    active = None if token_mask is None else token_mask.tolist()
    indices = range(num_rows) if row_index is None else row_index.tolist()
    tokens = None if d2t is None else _tokens(d2t, col_start)
    num_valid = max(0, min(num_columns, limit - col_start)) if tokens is None else len(tokens)

    for row, index in enumerate(indices):
        if index == -1 or (active is not None and not active[row]):
            if not in_place:
                target[row] = source[row]
            continue
        if tokens is None:
            words = _column_words(rows[index], col_start, num_valid)
        else:
            words = _gathered_words(rows[index], tokens, limit)
        _apply_row(source[row, :num_valid], target[row, :num_valid], words, minus_inf, in_place)
        if num_valid < num_columns:
            target[row, num_valid:].fill(minus_inf)


def _column_words(row: Words, col_start: int, num_columns: int) -> Words:
    """Return ceil(num_columns / 32) words whose bit c is token col_start + c; bits past the end are 0."""
    num_words = (num_columns + 31) >> 5
    first, shift = divmod(col_start, 32)
    if shift:
        words = row[first : first + num_words] >> np.uint32(shift)
        # the last word has no upper neighbour where the mask ends in it
        upper = row[first + 1 : first + 1 + num_words] << np.uint32(32 - shift)
        words[: len(upper)] |= upper
    else:
        words = row[first : first + num_words]
    tail = num_columns & 31
    if tail:
        words = words.copy()
        words[-1] &= np.uint32((1 << tail) - 1)
    return words


def _tokens(d2t: torch.Tensor, col_start: int) -> npt.NDArray[np.int64]:
    """Return the token of every column, int64 [<= N]."""
    offsets = d2t.numpy().astype(np.int64)
    return offsets + np.arange(col_start, col_start + len(offsets))


def _gathered_words(row: Words, tokens: npt.NDArray[np.int64], limit: int) -> Words:
    """Return words whose bit c is the bit of tokens[c]; a token outside [0, limit) is banned."""
    known = (tokens >= 0) & (tokens < limit)
    # a token out of range reads token 0 instead, and is then banned
    safe = np.where(known, tokens, 0)
    legal = ((row[safe >> 5] >> (safe & 31).astype(np.uint32)) & np.uint32(1)).astype(np.bool_) & known
    packed = np.zeros(((len(tokens) + 31) >> 5) * 4, dtype=np.uint8)
    packed[: (len(tokens) + 7) >> 3] = np.packbits(legal, bitorder="little")
    return packed.view("<u4").astype(np.uint32, copy=False)


def _apply_row(source: Bits, target: Bits, words: Words, minus_inf: int, in_place: bool) -> None:
    """Ban the columns of one row, [n], whose bit in `words`, [ceil(n / 32)], is 0."""
    few = len(words) // _SPARSE_FRACTION + 1
    if np.count_nonzero(words) <= few:
        columns = _columns_of_set_bits(words)
        values = source[columns]
        target.fill(minus_inf)
        target[columns] = values
        return
    banned = ~words
    if np.count_nonzero(banned) <= few:
        columns = _columns_of_set_bits(banned)
        if not in_place:
            target[:] = source
        # bits behind the row's end are banned too
        target[columns[columns < len(target)]] = minus_inf
        return
    _select(source, target, words, minus_inf)


def _columns_of_set_bits(words: Words) -> npt.NDArray[np.int64]:
    places = words.nonzero()[0]
    positions = _unpack(words[places]).nonzero()[0]
    columns: npt.NDArray[np.int64] = (places[positions >> 5] << 5) + (positions & 31)
    return columns


def _select(source: Bits, target: Bits, words: Words, minus_inf: int) -> None:
    """Write source where the bit is 1 and -inf where it is 0, without a branch an element."""
    keep = _unpack(words)[: len(source)].astype(source.dtype)
    np.negative(keep, out=keep)  # 1 -> all ones
    value = source.dtype.type(minus_inf)
    # minus_inf ^ ((source ^ minus_inf) & keep)
    changed = source ^ value
    changed &= keep
    np.bitwise_xor(changed, value, out=target)


def _unpack(words: Words) -> npt.NDArray[np.uint8]:
    """Return one byte a bit, 0 or 1, least significant bit first."""
    little = words if sys.byteorder == "little" else words.byteswap()
    return np.unpackbits(little.view(np.uint8), bitorder="little")
