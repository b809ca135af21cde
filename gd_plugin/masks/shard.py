"""VocabShard: which columns of the vocabulary one rank of a tensor-parallel group holds.

In: a rank and how the vocabulary is cut.   Out: the half-open range [start, stop) of columns in whole-vocabulary
coordinates (draft-vocabulary coordinates where a `d2t` prunes it). Any edges do: a shard need not begin at a mask word,
because kernels read the whole mask row at a bit offset and never slice its words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["VocabShard", "check_shard"]


@dataclass(frozen=True)
class VocabShard:
    """Columns [start, stop) of `total`, held by `rank` of `world_size`.

    Args:
        rank: rank inside the tensor-parallel group, which need not be the global rank modulo its size.
        world_size: ranks in that group.
        total: columns of the whole vocabulary; of the whole draft vocabulary if the logits are pruned by a d2t.
        edges: world_size + 1 column numbers, from 0 to `total`, none below the one before it: rank r holds
            [edges[r], edges[r + 1]). Default: ceil(total / world_size) columns a rank, the last ones short or empty.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a rank outside the group, a negative total, or edges that do not cut [0, total] in order.
    """

    rank: int
    world_size: int
    total: int
    edges: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "total"):
            if not _is_integer(getattr(self, name)):
                raise TypeError(f"{name} must be an int, got {getattr(self, name)!r}")
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {self.rank}; use the rank inside the group")
        if self.total < 0:
            raise ValueError(f"total must not be negative, got {self.total}")
        if self.edges is None:
            width = -(-self.total // self.world_size)
            edges = tuple(min(rank * width, self.total) for rank in range(self.world_size + 1))
        else:
            if not all(_is_integer(edge) for edge in self.edges):
                raise TypeError(f"edges must be column numbers (int), got {self.edges!r}")
            edges = tuple(int(edge) for edge in self.edges)
            in_order = all(low <= high for low, high in pairwise(edges))
            if len(edges) != self.world_size + 1 or edges[0] != 0 or edges[-1] != self.total or not in_order:
                raise ValueError(
                    f"edges must be {self.world_size + 1} ascending column numbers from 0 to {self.total}, got "
                    f"{list(edges)[:20]}"
                )
        # a tuple, so that equal cuts are equal and hash the same however they were given
        object.__setattr__(self, "edges", edges)

    @property
    def start(self) -> int:
        """First column held."""
        return self._edges[self.rank]

    @property
    def stop(self) -> int:
        """Column behind the last one held."""
        return self._edges[self.rank + 1]

    @property
    def num_columns(self) -> int:
        """Columns held; logits may be wider, their columns behind that are padding."""
        return self.stop - self.start

    @property
    def _edges(self) -> tuple[int, ...]:
        return self.edges if isinstance(self.edges, tuple) else ()


def check_shard(name: str, shard: VocabShard | None) -> None:
    """Raise TypeError if the argument `name` is something else than a shard or None."""
    if shard is not None and not isinstance(shard, VocabShard):
        raise TypeError(f"{name} must be a VocabShard or None, got {shard!r}; use VocabShard(rank, world_size, total)")


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)
