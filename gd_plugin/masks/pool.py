"""BitmaskPool: rows of mask words that come and go, in one growing bitmask on the CPU.

A step's logits rows point into the pool (`row_index` of `apply_token_bitmask_`), so that rows with the same history
share one mask and a row that is asked for again is not filled again.
"""

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.masks.bitmask import allocate_token_bitmask

__all__ = ["BitmaskPool"]


class BitmaskPool:
    """Rows of one width, handed out by index. Not thread-safe.

    Attributes:
        vocab_size: width in tokens.
        bitmask: int32 [capacity, W] on the CPU; replaced, content kept, when the pool grows.
        words: the same memory as numpy sees it.
    """

    def __init__(self, vocab_size: int, capacity: int = 8) -> None:
        self.vocab_size = vocab_size
        self.bitmask: torch.Tensor = allocate_token_bitmask(capacity, vocab_size)
        self.words: npt.NDArray[np.int32] = self.bitmask.numpy()
        self._free = list(range(capacity - 1, -1, -1))

    def take(self) -> int:
        """Return the index of a row that nobody uses; its content is undefined."""
        if not self._free:
            used = self.bitmask.shape[0]
            grown = allocate_token_bitmask(2 * used, self.vocab_size)
            grown[:used] = self.bitmask
            self.bitmask, self.words = grown, grown.numpy()
            self._free = list(range(2 * used - 1, used - 1, -1))
        return self._free.pop()

    def give_back(self, index: int) -> None:
        """Let the row be handed out again."""
        self._free.append(index)

    @property
    def num_used(self) -> int:
        """Rows in use."""
        return self.bitmask.shape[0] - len(self._free)
