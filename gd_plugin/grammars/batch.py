"""One call fills the rows of a step, and one matcher's failure stays in its row.

In:  matchers of any backend, a bitmask, the row of each.      Out: filled rows, and the errors of the rest by position.
"""

from collections.abc import Sequence

import torch

from gd_plugin.grammars.matcher import GrammarMatcher

__all__ = ["fill_next_token_bitmasks"]


def fill_next_token_bitmasks(
    matchers: Sequence[GrammarMatcher], bitmask: torch.Tensor, indices: Sequence[int]
) -> dict[int, Exception]:
    """Fill row `indices[i]` of `bitmask` from `matchers[i]`, for all i.

    Args:
        matchers: one a row; several rows may not share one.
        bitmask: int32 [rows, >=W] on the CPU.
        indices: row of each matcher.

    Returns:
        Position in `matchers` -> error, for the rows that could not be filled; their content is undefined. All others
        are filled.

    Raises:
        ValueError: `matchers` and `indices` differ in length; nothing is written.
    """
    if len(matchers) != len(indices):
        raise ValueError(f"{len(matchers)} matchers need as many rows, got {len(indices)} indices")
    errors: dict[int, Exception] = {}
    for position, (matcher, index) in enumerate(zip(matchers, indices, strict=True)):
        try:
            matcher.fill_next_token_bitmask(bitmask, index)
        except Exception as error:
            errors[position] = error
    return errors
