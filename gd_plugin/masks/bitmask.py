"""Rows of mask words: allocation, validity, stray bits.

A bitmask is int32 [rows, W], W = ceil(V / 32). Bit `t % 32` of word `t // 32` is 1 when token `t` is legal, least
significant bit first. Bits at and above `vocab_size` in the last word, and words behind it, mean nothing: they are
never counted and never trusted.
"""

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "allocate_token_bitmask",
    "few_legal_tokens",
    "first_valid_token",
    "first_valid_tokens",
    "legal_columns",
    "num_mask_words",
    "row_has_valid_token",
    "rows_have_valid_token",
    "token_ids_to_words",
]


def num_mask_words(vocab_size: int) -> int:
    """Words a row needs for `vocab_size` tokens."""
    return (vocab_size + 31) // 32


def allocate_token_bitmask(rows: int, vocab_size: int, *, pin_memory: bool = False) -> torch.Tensor:
    """Return an all-zero bitmask, int32 [rows, W], on the CPU.

    Args:
        rows: number of rows, 0 or more.
        vocab_size: width in tokens, 1 or more.
        pin_memory: allocate page-locked memory, for asynchronous copies to a GPU.

    Raises:
        ValueError: a negative number of rows or a width below 1.
    """
    if rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    return torch.zeros((rows, num_mask_words(vocab_size)), dtype=torch.int32, pin_memory=pin_memory)


def row_has_valid_token(row: torch.Tensor, vocab_size: int) -> bool:
    """Tell whether one row, int32 [>=W] on the CPU, has a legal token below `vocab_size`.

    Raises:
        ValueError: the row is not one-dimensional int32 on the CPU, or narrower than `vocab_size`.
    """
    if row.dim() != 1:
        raise ValueError(f"row must have one dimension, got shape {tuple(row.shape)}; pass bitmask[index]")
    return bool(rows_have_valid_token(row[None], vocab_size)[0])


def rows_have_valid_token(rows: torch.Tensor, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Tell for each row of int32 [B, >=W] on the CPU whether it has a legal token below `vocab_size`. O(B * W).

    Raises:
        ValueError: not two-dimensional int32 on the CPU, or narrower than `vocab_size`.
    """
    if rows.dtype != torch.int32 or rows.device.type != "cpu" or rows.dim() != 2:
        raise ValueError(
            f"bitmask must be int32 [rows, words] on the CPU, got {rows.dtype} {tuple(rows.shape)} on {rows.device}"
        )
    words, bits = divmod(vocab_size, 32)
    if rows.shape[1] < num_mask_words(vocab_size):
        raise ValueError(
            f"bitmask has {rows.shape[1]} words, enough for {rows.shape[1] * 32} tokens, but vocab_size is "
            f"{vocab_size}; use allocate_token_bitmask(rows, {vocab_size})"
        )
    host = rows.numpy()
    valid: npt.NDArray[np.bool_] = np.any(host[:, :words], axis=1)
    if bits:
        # bits at and above vocab_size share the last word with real ones
        valid = valid | ((host[:, words] & np.int32((1 << bits) - 1)) != 0)
    return valid


def first_valid_tokens(rows: torch.Tensor, vocab_size: int) -> npt.NDArray[np.int64]:
    """Return for each row of int32 [B, >=W] on the CPU its lowest legal token below `vocab_size`, or -1. O(B * W)."""
    return np.array([first_valid_token(words, vocab_size) for words in rows.numpy()], dtype=np.int64)


def first_valid_token(words: npt.NDArray[np.int32], vocab_size: int) -> int:
    """Return the lowest legal token of one row, int32 [>=W], below `vocab_size`, or -1. O(W)."""
    full_words, bits = divmod(vocab_size, 32)
    word = int((words != 0).argmax())
    if word > full_words:
        return -1
    value = int(words[word])
    if word == full_words:
        # bits at and above vocab_size share the last word with real ones
        value &= (1 << bits) - 1
    return 32 * word + (value & -value).bit_length() - 1 if value else -1


def legal_columns(row: torch.Tensor, num_columns: int) -> npt.NDArray[np.bool_]:
    """Unpack one row, int32 [W] on the CPU, into bool [num_columns]; columns behind the row are not legal."""
    bits = np.unpackbits(np.ascontiguousarray(row.numpy()).view(np.uint8), bitorder="little")
    columns = np.zeros(num_columns, dtype=np.bool_)
    count = min(num_columns, len(bits))
    columns[:count] = bits[:count]
    return columns


def few_legal_tokens(row: torch.Tensor, vocab_size: int, limit: int) -> list[int] | None:
    """Return the legal tokens of one row, int32 [W] on the CPU, in ascending order; None if they are more than `limit`."""
    words = row.numpy().view(np.uint32)
    used = np.flatnonzero(words)
    if len(used) > limit:
        return None
    bits = np.unpackbits(words[used, None].view(np.uint8), axis=1, bitorder="little")
    places, offsets = bits.nonzero()
    tokens: list[int] = (used[places] * 32 + offsets).tolist()
    tokens = [token_id for token_id in tokens if token_id < vocab_size]
    return tokens if len(tokens) <= limit else None


def token_ids_to_words(token_ids: "tuple[int, ...] | list[int]", num_words: int) -> npt.NDArray[np.int32]:
    """Return one row, int32 [num_words], with the bits of `token_ids` set; ids past the row are left out."""
    words = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        if 0 <= token_id < 32 * num_words:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words.view(np.int32)
