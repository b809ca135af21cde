"""The CPU kernel: a path for rows with few legal columns, one for rows with few banned ones, one for all others.

In: checked arguments of masks/apply.py, on the CPU.   Out: `out` (which may be `logits`), banned columns at -inf.

Logits are handled as integers of their own width: a legal element keeps its bits, a NaN's payload included, and one
code serves every dtype (numpy has no bfloat16). Which path a row takes is guessed from a sample of its mask words; the
guess decides the speed alone, never the result. The figures behind the thresholds come from benchmarks/apply_cpu.py.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.masks.arguments import MaskArguments

__all__ = ["apply_token_bitmask_cpu"]

Words = npt.NDArray[np.uint32]
Bits = npt.NDArray[Any]  # logits as signed integers of their own width

# dtype -> (integer dtype of its width, -inf as that integer)
_AS_INTEGERS: Final = {
    dtype: (integer, int(torch.tensor([float("-inf")], dtype=dtype).view(integer)))
    for dtype, integer in (
        (torch.float32, torch.int32),
        (torch.float16, torch.int16),
        (torch.bfloat16, torch.int16),
        (torch.float64, torch.int64),
    )
}
# words of a row looked at to choose its path
_SAMPLED_WORDS: Final = 16
# Up to this fraction of the words may hold a legal column for a row to be filled and its legal values put back.
_SPARSE_FRACTION: Final = 1 / 8
# From this fraction of legal columns on, a loop over the banned ones beats a pass over all.
_MOSTLY_LEGAL: Final = 0.8
# Columns selected at a time: what one pass writes is still in the cache for the next.
_CHUNK: Final = 1 << 16


def apply_token_bitmask_cpu(logits: torch.Tensor, arguments: MaskArguments, out: torch.Tensor) -> None:
    """Write the masked `logits`, [B, N] with B and N at least 1, into `out`, which may be `logits` itself."""
    bitmask, token_mask, d2t, row_index, col_start, limit = arguments
    integer, minus_inf = _AS_INTEGERS[logits.dtype]
    target = out.view(integer).numpy()
    in_place = out is logits
    source = target if in_place else logits.view(integer).numpy()
    rows = bitmask.numpy().view(np.uint32)
    num_rows, num_columns = target.shape

    guided = _guided_rows(num_rows, token_mask, row_index)
    if not in_place and len(guided) < num_rows:
        for row in set(range(num_rows)).difference(guided):
            target[row] = source[row]
    if not guided:
        return
    if row_index is not None:
        # an unguided row's words are any row's: nothing looks at them
        rows = rows[[max(index, 0) for index in row_index.tolist()]]

    if d2t is None:
        num_valid = max(0, min(num_columns, limit - col_start))
        words = _column_words(rows[:num_rows], col_start, num_valid)
    else:
        num_valid = len(d2t)
        words = _gathered_words(rows[:num_rows], d2t, col_start, limit)
    if num_valid < num_columns:
        for row in guided:
            target[row, num_valid:].fill(minus_inf)
    if num_valid:
        target = target[:, :num_valid]
        _ban(target if in_place else source[:, :num_valid], target, words, guided, minus_inf, out)


def _guided_rows(num_rows: int, token_mask: torch.Tensor | None, row_index: torch.Tensor | None) -> "list[int] | range":
    """Return the rows that a mask applies to, ascending."""
    guided: list[int] | range = range(num_rows)
    if token_mask is not None:
        flags = token_mask.tolist()
        guided = [row for row in guided if flags[row]]
    if row_index is not None:
        indices = row_index.tolist()
        guided = [row for row in guided if indices[row] >= 0]
    return guided


def _column_words(rows: Words, col_start: int, num_columns: int) -> Words:
    """Return [B, ceil(num_columns / 32)] words whose bit c is token col_start + c; bits past the end are 0."""
    num_words = (num_columns + 31) >> 5
    first, shift = divmod(col_start, 32)
    words = rows[:, first : first + num_words]
    if shift:
        # the last word has no upper neighbour where the mask ends in it
        upper = rows[:, first + 1 : first + 1 + num_words] << np.uint32(32 - shift)
        words = words >> np.uint32(shift)
        words[:, : upper.shape[1]] |= upper
    tail = num_columns & 31
    if tail:
        if not shift:
            words = words.copy()
        words[:, -1] &= np.uint32((1 << tail) - 1)
    return words


def _gathered_words(rows: Words, d2t: torch.Tensor, col_start: int, limit: int) -> Words:
    """Return [B, ceil(n / 32)] words whose bit c is that of token col_start + c + d2t[c], 0 outside [0, limit)."""
    tokens = d2t.numpy().astype(np.int64)
    tokens += np.arange(col_start, col_start + len(tokens))
    known = (tokens >= 0) & (tokens < limit)
    # a token out of range reads token 0 instead, and is then banned
    tokens[~known] = 0
    legal = ((rows[:, tokens >> 5] >> (tokens & 31).astype(np.uint32)) & np.uint32(1)).astype(np.bool_) & known
    packed = np.zeros((len(rows), ((len(tokens) + 31) >> 5) * 4), dtype=np.uint8)
    packed[:, : (len(tokens) + 7) >> 3] = np.packbits(legal, axis=1, bitorder="little")
    return packed.view(np.uint32)


def _ban(
    source: Bits, target: Bits, words: Words, guided: "list[int] | range", minus_inf: int, out: torch.Tensor
) -> None:
    """Ban the columns of the guided rows whose bit in `words` is 0; both [B, n], `words` [B, ceil(n / 32)]."""
    mostly_legal, others = _split_by_sample(words, guided)
    kernel = _engine_kernel() if mostly_legal and out.dtype in _ENGINE_DTYPES else None
    if kernel is None:
        others = guided
    else:
        if source is not target:
            for row in mostly_legal:
                target[row] = source[row]
        _ban_by_engine(kernel, target, words, mostly_legal, minus_inf, out)
    for row in others:
        _ban_row(source[row], target[row], words[row], minus_inf, source is target)


def _split_by_sample(words: Words, rows: "list[int] | range") -> tuple[list[int], "list[int] | range"]:
    """Split `rows` into those that look mostly legal and all others."""
    sample = words[:, :: words.shape[1] // _SAMPLED_WORDS + 1]
    enough = int(_MOSTLY_LEGAL * 32 * sample.shape[1])
    counts = [sum(map(int.bit_count, row)) for row in sample.tolist()]
    mostly_legal = [row for row in rows if counts[row] >= enough]
    return mostly_legal, [row for row in rows if counts[row] < enough] if mostly_legal else rows


def _ban_by_engine(
    kernel: Callable[..., object], target: Bits, words: Words, rows: list[int], minus_inf: int, out: torch.Tensor
) -> None:
    """Write -inf where the bit is 0, in `rows` of `target`, [B, n], the first columns of `out`."""
    num_columns = target.shape[1]
    whole = num_columns >> 5
    if whole:
        # whole words only: with a width inside a word the engine's kernel has been seen to write past the row
        kernel(
            out.data_ptr(),
            (len(target), whole << 5),
            (out.stride(0), 1),
            torch.from_numpy(words).data_ptr(),
            (len(words), whole),
            (words.strides[0] >> 2, 1),
            whole << 5,
            rows,
            _ENGINE_DTYPES[out.dtype],
        )
    if whole < words.shape[1]:
        for row in rows:
            _ban_row(target[row, whole << 5 :], target[row, whole << 5 :], words[row, whole:], minus_inf, True)


def _ban_row(source: Bits, target: Bits, words: Words, minus_inf: int, in_place: bool) -> None:
    """Ban the columns of one row, [n], whose bit in `words`, [ceil(n / 32)], is 0."""
    few = int(len(words) * _SPARSE_FRACTION) + 1
    places = words.astype(np.bool_).nonzero()[0]
    if len(places) <= few:
        columns = _columns_of_set_bits(words, places)
        values = source[columns]
        target.fill(minus_inf)
        target[columns] = values
        return
    if len(places) > len(words) - few:
        banned = ~words
        places = banned.astype(np.bool_).nonzero()[0]
        if len(places) <= few:
            if not in_place:
                target[:] = source
            columns = _columns_of_set_bits(banned, places)
            # bits behind the row's end are 0 too
            target[columns[columns < len(target)]] = minus_inf
            return
    _select(source, target, words, minus_inf)


def _select(source: Bits, target: Bits, words: Words, minus_inf: int) -> None:
    """Write source where the bit is 1 and -inf where it is 0, all [n], without a branch an element."""
    dtype = source.dtype
    value = dtype.type(minus_inf)
    table = _KEEP_BITS[dtype.itemsize]
    scratch = _scratch(dtype)
    mask_bytes = words.view(np.uint8)
    for start in range(0, len(source), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        part, result = source[chunk], target[chunk]
        picked = mask_bytes[start >> 3 : (start + len(part) + 7) >> 3]
        # every index is in range; "clip" spares numpy a copy of `out`
        table.take(picked, axis=0, out=scratch[: len(picked)], mode="clip")
        keep = scratch.reshape(-1)[: len(part)]
        # minus_inf ^ ((source ^ minus_inf) & keep)
        np.bitwise_xor(part, value, out=result)
        np.bitwise_and(result, keep, out=result)
        np.bitwise_xor(result, value, out=result)


# item size in bytes -> for each value of a mask byte, all ones for its set bits and zeros for the others, [256, 8]
_KEEP_BITS: Final = {
    size: -np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(f"i{size}")
    for size in (2, 4, 8)
}
_thread = threading.local()


def _scratch(dtype: np.dtype[Any]) -> Bits:
    """Return this thread's [_CHUNK / 8, 8] of `dtype`: fresh pages a call would cost more than the work in them."""
    found: Bits | None = getattr(_thread, dtype.name, None)
    if found is None:
        found = np.empty((_CHUNK // 8, 8), dtype=dtype)
        setattr(_thread, dtype.name, found)
    return found


def _columns_of_set_bits(words: Words, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the positions of the 1 bits of `words`, [W], ascending; `places` are the words that have one."""
    # nonzero is many times faster on booleans than on the same bytes
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").view(np.bool_).nonzero()[0]
    columns: npt.NDArray[np.int64] = (places[bits >> 5] << 5) + (bits & 31)
    return columns


_ENGINE_DTYPES: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_engine_kernels: list[Callable[..., object] | None] = []


def _engine_kernel() -> Callable[..., object] | None:
    """Return xgrammar's CPU kernel if that engine is loaded and its kernel does what is expected of it.

    It visits banned columns one by one in compiled code: the fastest there is where they are few. Its own Python layer
    costs as much as the work, so the function below that is called; nothing depends on finding it.
    """
    if not _engine_kernels:
        engine = sys.modules.get("xgrammar.base")
        if engine is None:
            return None
        kernel = getattr(
            getattr(getattr(engine, "_core", None), "kernels", None), "apply_token_bitmask_inplace_cpu", None
        )
        _engine_kernels.append(kernel if kernel is not None and _behaves(kernel) else None)
    return _engine_kernels[0]


def _behaves(kernel: Callable[..., object]) -> bool:
    """Try `kernel` on rows of a known answer, a row apart and a row left out."""
    words = torch.tensor([[0], [-2], [0x7FFFFFFE]], dtype=torch.int32)
    for dtype, name in _ENGINE_DTYPES.items():
        buffer = torch.zeros((3, 40), dtype=dtype)
        expected = buffer.clone()
        expected[1, 0] = expected[2, 0] = expected[2, 31] = float("-inf")
        try:
            kernel(buffer.data_ptr(), (3, 32), (40, 1), words.data_ptr(), (3, 1), (1, 1), 32, [1, 2], name)
        except Exception:
            return False
        if not torch.equal(buffer, expected):
            return False
    return True
