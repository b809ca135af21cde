"""Writing one step's mask rows: fill, check, switch on, repeat.

In:  matchers and the row each of them writes.
Out: rows of `bitmask` and `token_mask` in host memory, and which of them have a legal token at all.
Only bits of real tokens count as legal.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.grammars.batch import fill_next_token_bitmasks
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.masks.buffers import HostRows
from gd_plugin.masks.shard import VocabShard

__all__ = ["DraftVocabulary", "RowWriter"]


class RowWriter:
    """Writes the rows of one host buffer, step after step.

    Args:
        host: the buffer.
        vocab_size: bits that count.
        max_look_ahead: rows with at most this many legal tokens lose those that lead to a row without any.
        fill_threads: threads that fill rows; None is one a core where that pays.
    """

    def __init__(
        self, host: HostRows, vocab_size: int, *, max_look_ahead: int = 0, fill_threads: int | None = None
    ) -> None:
        self.max_look_ahead = max_look_ahead
        self._fill_threads = fill_threads
        self._bitmask = host.matrix
        self._first = host.first
        self._words = host.words
        self._token_mask = host.switches
        self._num_words = host.words.shape[1]
        self._flat = host.words.reshape(-1).data
        self._num_full_words, self._num_tail_bits = divmod(vocab_size, 32)
        self._zeros = np.zeros(self._num_full_words, dtype=np.int32).data
        # bits at and above vocab_size share the last word with real ones
        self._tail = np.uint32((1 << self._num_tail_bits) - 1).view(np.int32)
        self._draft_words: npt.NDArray[np.int32] | None = None

    def begin(self, num_rows: int, draft_words: npt.NDArray[np.int32] | None) -> None:
        """Begin a step: switch its first `num_rows` rows off.

        Args:
            num_rows: rows of the step.
            draft_words: int32 [W], the tokens that a pruned draft vocabulary can spell; None is all of them.
        """
        self._token_mask[:num_rows] = 0
        self._draft_words = draft_words

    def fill(self, matchers: Sequence[GrammarMatcher], rows: Sequence[int]) -> dict[int, Exception]:
        """Fill one row of each matcher; return position -> error for those that could not."""
        errors: dict[int, Exception] = {}
        if len(matchers) == 1:
            # a call for many takes half as long again as the one row
            try:
                matchers[0].fill_next_token_bitmask(self._bitmask, self._first + rows[0])
            except Exception as error:
                errors[0] = error
        else:
            indices = [self._first + row for row in rows]
            errors = fill_next_token_bitmasks(matchers, self._bitmask, indices, num_threads=self._fill_threads)
        if self.max_look_ahead:
            for position, matcher in enumerate(matchers):
                if position not in errors:
                    try:
                        self._look_ahead(matcher, rows[position])
                    except Exception as error:
                        errors[position] = error
        return errors

    def has_legal_token(self, row: int) -> bool:
        """Tell whether the row allows any real token, and in a pruned vocabulary any that it can spell."""
        if self._draft_words is None:
            start = row * self._num_words
            # ends at the first legal token, which is often a byte, and those come first: a tenth of a whole count
            if self._flat[start : start + self._num_full_words] != self._zeros:
                return True
            return self._num_tail_bits > 0 and bool(self._words[row, self._num_full_words] & self._tail)
        words = self._words[row, : len(self._draft_words)] & self._draft_words
        full = self._num_full_words
        return bool(np.count_nonzero(words[:full])) or (self._num_tail_bits > 0 and bool(words[full] & self._tail))

    def switch_on(self, row: int) -> None:
        """Have the row applied."""
        self._token_mask[row] = 1

    def switch_off(self, row: int) -> None:
        """Have the row left alone."""
        self._token_mask[row] = 0

    def repeat(self, row: int, rows: range) -> None:
        """Copy `row` into `rows` and have them applied."""
        self._words[rows.start : rows.stop] = self._words[row]
        self._token_mask[rows.start : rows.stop] = 1

    def ban(self, row: int, token_id: int) -> None:
        """Take one token out of the row."""
        word, bit = divmod(token_id, 32)
        self._words[row, word] &= ~np.uint32(1 << bit).view(np.int32)

    def _look_ahead(self, matcher: GrammarMatcher, row: int) -> None:
        """Ban the legal tokens behind which no token is legal."""
        bits = np.unpackbits(self._words[row].view(np.uint8), bitorder="little")
        legal = np.flatnonzero(bits)
        if len(legal) > self.max_look_ahead or matcher.is_terminated():
            return
        kept = self._words[row].copy()
        for token_id in legal.tolist():
            if not matcher.accept_token(token_id):
                continue
            try:
                if not matcher.is_terminated():
                    matcher.fill_next_token_bitmask(self._bitmask, self._first + row)
                    if not self.has_legal_token(row):
                        kept[token_id >> 5] &= ~np.uint32(1 << (token_id & 31)).view(np.int32)
            finally:
                matcher.rollback(1)
        self._words[row] = kept


class DraftVocabulary:
    """Which tokens a pruned draft vocabulary can spell, remembered for the last `d2t`.

    Args:
        shard: columns of the draft's logits that this rank holds, or None.
        num_words: W.
        vocab_size: tokens there are.
    """

    def __init__(self, shard: VocabShard | None, num_words: int, vocab_size: int) -> None:
        self._shard = shard
        self._num_words = num_words
        self._vocab_size = vocab_size
        self._known: tuple[torch.Tensor, npt.NDArray[np.int32]] | None = None

    def is_known(self, d2t: torch.Tensor | None) -> bool:
        """Tell whether `words` answers without synchronising."""
        is_part = d2t is not None and self._shard is not None and d2t.shape[0] != self._shard.total
        return d2t is None or is_part or (self._known is not None and self._known[0] is d2t)

    def words(self, d2t: torch.Tensor | None) -> npt.NDArray[np.int32] | None:
        """Return the tokens as int32 [W]; None if that is all or not known. The first call for a `d2t` synchronises."""
        if d2t is None or (self._shard is not None and d2t.shape[0] != self._shard.total):
            # one shard of a d2t must not decide: every rank has to come to the same masks
            return None
        if self._known is None or self._known[0] is not d2t:
            offsets = d2t.cpu().numpy().astype(np.int64)
            tokens = offsets + np.arange(len(offsets))
            bits = np.zeros(32 * self._num_words, dtype=np.uint8)
            bits[tokens[(tokens >= 0) & (tokens < self._vocab_size)]] = 1
            self._known = (d2t, np.packbits(bits, bitorder="little").view(np.int32))
        return self._known[1]
