"""The CPU kernel: a path for rows with few legal columns, one for rows with few banned ones, one for all others.

In: checked arguments of masks/apply.py, on the CPU.   Out: `out` (which may be `logits`), banned columns at -inf.

Logits are handled as unsigned integers of their own width: a legal element keeps its bits, a NaN's payload included, and
one code serves every dtype (numpy has no bfloat16). Which path a row takes is guessed from a sample of its mask words; the
guess decides the speed alone, never the result. The figures behind the thresholds come from benchmarks/apply_cpu.py.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.masks.arguments import MaskArguments

__all__ = ["apply_plain_token_bitmask_cpu", "apply_token_bitmask_cpu"]

Words = npt.NDArray[Any]  # mask words, 32 bits each
Bits = npt.NDArray[Any]  # logits as unsigned integers of their own width

# dtype -> (unsigned dtype of its width, -inf as such an integer)
_AS_UNSIGNED: Final = {
    torch.float32: (torch.uint32, 0xFF800000),
    torch.float16: (torch.uint16, 0xFC00),
    torch.bfloat16: (torch.uint16, 0xFF80),
    torch.float64: (torch.uint64, 0xFFF0000000000000),
}
# words of a row looked at to choose its path
_SAMPLED_WORDS: Final = 16
# Up to this fraction of the words may hold a legal column for a row to be filled and its legal values put back.
_SPARSE_FRACTION: Final = 1 / 8
# From this fraction of legal columns on, a loop over the banned ones beats a pass over all.
_MOSTLY_LEGAL: Final = 0.78
# Columns selected at a time: all of a row but for the widest.
_CHUNK: Final = 1 << 18
# What a path costs, roughly, in microseconds: a banned column, a selected one, a filled one.
_BANNED_US, _SELECTED_US, _FILLED_US = 6e-3, 1e-3, 3e-4
# Work of fewer microseconds is not worth a second thread: a busy machine gives it a core some milliseconds late.
_PARALLEL_FROM_US: Final = 6000


def apply_token_bitmask_cpu(logits: torch.Tensor, arguments: MaskArguments, out: torch.Tensor) -> None:
    """Write the masked `logits`, [B, N] with B and N at least 1, into `out`, which may be `logits` itself."""
    bitmask, token_mask, d2t, row_index, col_start, limit = arguments
    unsigned, minus_inf = _AS_UNSIGNED[logits.dtype]
    target: Bits = out.view(unsigned).numpy()
    in_place = out is logits
    source: Bits = target if in_place else logits.view(unsigned).numpy()
    rows: Words = bitmask.numpy().view(np.uint32)
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
        source, target, out = source[:, :num_valid], target[:, :num_valid], out[:, :num_valid]
    if num_valid:
        _ban(source, target, words, guided, _sampled_legal(words, guided), out)


def apply_plain_token_bitmask_cpu(logits: torch.Tensor, bitmask: torch.Tensor) -> bool:
    """Mask `logits` in place if there is nothing special about them.

    The shortest way for whole vocabularies: there the work takes microseconds, and so would checking every argument.

    Returns:
        False if nothing has been checked or done.
    """
    shape, mask_shape = logits.shape, bitmask.shape
    if len(shape) != 2 or len(mask_shape) != 2 or bitmask.dtype is not torch.int32 or not bitmask.is_cpu:
        return False
    num_rows, num_columns = shape
    num_words = num_columns >> 5
    name = _ENGINE_DTYPES.get(logits.dtype)
    if name is None or num_columns & 31 or not num_columns or not 0 < num_rows <= mask_shape[0]:
        return False
    if mask_shape[1] < num_words or not (logits.is_contiguous() and bitmask.is_contiguous()):
        return False
    words = bitmask.numpy()
    if mask_shape != (num_rows, num_words):
        words = words[:num_rows, :num_words]
    rows = range(num_rows)
    legal = _sampled_legal(words, rows)
    if min(legal) >= _MOSTLY_LEGAL and (num_rows - sum(legal)) * num_columns * _BANNED_US < _PARALLEL_FROM_US:
        kernel = _engine_kernel()
        if kernel is not None:
            kernel(
                logits.data_ptr(),
                shape,
                (num_columns, 1),
                bitmask.data_ptr(),
                # a mask may have more rows and words: the engine refuses the former
                (num_rows, num_words),
                (mask_shape[1], 1),
                num_columns,
                None,
                name,
            )
            return True
    unsigned, minus_inf = _AS_UNSIGNED[logits.dtype]
    target: Bits = logits.view(unsigned).numpy()
    few = int(num_words * _SPARSE_FRACTION)
    if max(legal) <= 2 * _SPARSE_FRACTION and num_rows * num_columns * _FILLED_US < _PARALLEL_FROM_US:  # noqa: SIM102
        if all(np.count_nonzero(row) <= few for row in words):
            _keep_few(target, target, words, minus_inf, rows)
            return True
    _ban(target, target, words, rows, legal, logits)
    return True


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
    source: Bits, target: Bits, words: Words, rows: Sequence[int], legal: Sequence[float], out: torch.Tensor
) -> None:
    """Ban the columns of some rows whose bit in `words`, [B, ceil(n / 32)], is 0.

    Args:
        source: logits, [B, n].
        target: where the result goes, [B, n]; `source` itself if the work is done in place.
        words: mask words, [B, ceil(n / 32)], bits behind the row's end 0.
        rows: the rows to mask.
        legal: for each of them the fraction of its columns that seem to be legal.
        out: `target` as a tensor.
    """
    num_columns = target.shape[1]
    minus_inf = _AS_UNSIGNED[out.dtype][1]
    few = int(words.shape[1] * _SPARSE_FRACTION) + 1
    sparse, mostly_legal, mixed = [], [], []
    num_banned = 0.0
    for row, fraction in zip(rows, legal, strict=True):
        if fraction >= _MOSTLY_LEGAL:
            mostly_legal.append(row)
            num_banned += (1 - fraction) * num_columns
        elif fraction <= 2 * _SPARSE_FRACTION and np.count_nonzero(words[row]) <= few:
            sparse.append(row)
        else:
            mixed.append(row)
    if mostly_legal:
        if source is not target:
            for row in mostly_legal:
                target[row] = source[row]
        kernel = _engine_kernel() if out.dtype in _ENGINE_DTYPES else None
        if kernel is None:
            mixed += [row for row in mostly_legal if not _ban_few(target[row], words[row], few, minus_inf)]
        else:
            ban = partial(_ban_by_engine, kernel, target, words, minus_inf, out)
            _in_parallel(ban, mostly_legal, num_banned * _BANNED_US)
    if sparse:
        keep = partial(_keep_few, source, target, words, minus_inf)
        _in_parallel(keep, sparse, len(sparse) * num_columns * _FILLED_US)
    if mixed:
        select = partial(_select, source, target, words, minus_inf)
        _in_parallel(select, mixed, len(mixed) * num_columns * _SELECTED_US)


def _sampled_legal(words: Words, rows: Sequence[int]) -> list[float]:
    """Return the fraction of legal columns among those of a few words of each of `rows`."""
    sample = words[:, :: words.shape[1] // _SAMPLED_WORDS + 1]
    width = 4 * sample.shape[1]
    raw = sample.tobytes()
    return [int.from_bytes(raw[row * width : (row + 1) * width]).bit_count() / (8 * width) for row in rows]


def _in_parallel(work: Callable[[Sequence[int]], None], rows: Sequence[int], microseconds: float) -> None:
    """Call `work` with all `rows`, or, if it takes that long in all, with one at a time on several threads."""
    num_helpers = min(torch.get_num_threads(), len(rows)) - 1 if microseconds >= _PARALLEL_FROM_US else 0
    if num_helpers <= 0:
        work(rows)
        return
    # rows are taken from one iterator, so that nobody waits for a helper that the machine has no core for
    rows_left = iter(rows)

    def take_rows() -> None:
        for row in rows_left:
            work((row,))

    helpers = [_threads().submit(take_rows) for _ in range(num_helpers)]
    take_rows()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="gd_plugin masks")


if hasattr(os, "register_at_fork"):
    # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_threads.cache_clear)


def _keep_few(source: Bits, target: Bits, words: Words, minus_inf: int, rows: Sequence[int]) -> None:
    """Fill `rows` and put their few legal values back."""
    for row in rows:
        columns = _columns_of_set_bits(words[row])
        values = source[row][columns]
        target[row].fill(minus_inf)
        target[row][columns] = values


def _ban_few(target: Bits, words: Words, few: int, minus_inf: int) -> bool:
    """Ban the columns of one row, [n], whose bit is 0 if they lie in few words; return whether they do."""
    banned = ~words
    if np.count_nonzero(banned) > few:
        return False
    columns = _columns_of_set_bits(banned)
    # bits behind the row's end are 0 in `words` too
    target[columns[columns < len(target)]] = minus_inf
    return True


def _select(source: Bits, target: Bits, words: Words, minus_inf: int, rows: Sequence[int]) -> None:
    """Write source where the bit is 1 and -inf where it is 0 in `rows`, without a branch an element.

    As unsigned integers -inf is above every number and 0 below: the greater of an element and (0 or -inf) is what to
    write. NaNs with the sign bit set are above -inf and are looked for afterwards.
    """
    table = _FLOORS[minus_inf]
    scratch = _scratch(table.dtype, min(target.shape[1], _CHUNK))
    mask_bytes = words.view(np.uint8)
    for row in rows:
        for start in range(0, target.shape[1], _CHUNK):
            result = target[row, start : start + _CHUNK]
            picked = mask_bytes[row, start >> 3 : (start + len(result) + 7) >> 3]
            # every index is in range; "clip" spares numpy a copy of `out`
            table.take(picked, axis=0, out=scratch[: len(picked)], mode="clip")
            floor = scratch.reshape(-1)[: len(result)]
            np.maximum(source[row, start : start + _CHUNK], floor, out=result)
            if result.max() > minus_inf:
                result[floor != 0] = minus_inf


# -inf as an integer -> for each value of a mask byte, 0 for its set bits and -inf for the others, [256, 8]
_FLOORS: Final = {
    minus_inf: np.where(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
        np.array(0, f"u{dtype.itemsize}"),
        np.array(minus_inf, f"u{dtype.itemsize}"),
    )
    for dtype, (_, minus_inf) in _AS_UNSIGNED.items()
}
_thread = threading.local()


def _scratch(dtype: np.dtype[Any], num_columns: int) -> Bits:
    """Return this thread's [>= num_columns / 8, 8] of `dtype`: fresh pages a call would cost more than the work in them."""
    found: Bits | None = getattr(_thread, dtype.name, None)
    if found is None or found.size < num_columns:
        found = np.empty(((num_columns + 7) // 8, 8), dtype=dtype)
        setattr(_thread, dtype.name, found)
    return found


def _columns_of_set_bits(words: Words) -> npt.NDArray[np.int64]:
    """Return the positions of the 1 bits of `words`, [W], ascending."""
    # nonzero is many times faster on booleans than on the same bytes
    places = words.astype(np.bool_).nonzero()[0]
    if not len(places):
        return places
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").view(np.bool_).nonzero()[0]
    columns: npt.NDArray[np.int64] = (places[bits >> 5] << 5) + (bits & 31)
    return columns


_ENGINE_DTYPES: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _ban_by_engine(
    kernel: Callable[..., object], target: Bits, words: Words, minus_inf: int, out: torch.Tensor, rows: Sequence[int]
) -> None:
    """Write -inf where the bit is 0, in `rows` of `target`, [B, n], which is `out` as an array."""
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
            list(rows),
            _ENGINE_DTYPES[out.dtype],
        )
    if whole < words.shape[1]:
        for row in rows:
            _ban_few(target[row, whole << 5 :], words[row, whole:], 1, minus_inf)


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
