"""The parts of a batch that several ranks take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """The part of a global batch that one rank takes.

    Attributes:
        examples: Number of rows that count: 0 for a filler, if nothing is left for the rank.
        weight: Factor of the mean loss over the rows, so that the ranks' average is the mean over the batch.
    """

    rows: slice
    examples: int
    weight: float


@dataclass(frozen=True)
class Shard:
    """A rank's place among the `world` ranks that train one model together; by default it is alone."""

    rank: int = 0
    world: int = 1

    def part(self, examples: int, least: int = 1) -> Part:
        """This rank's part of a global batch.

        If there is too little for all, the first ranks take it, and the others a filler of the same examples.

        Args:
            examples: Size of the global batch, >= 1.
            least: No rank takes fewer, unless the batch has fewer: batch statistics need 2.

        >>> [Shard(rank, 4).part(5, least=2).examples for rank in range(4)]
        [3, 2, 0, 0]
        >>> [Shard(rank, 4).part(5).weight for rank in range(4)]
        [1.6, 0.8, 0.8, 0.8]
        """
        takers = max(1, min(self.world, examples // least))
        if self.rank >= takers:
            return Part(slice(0, least), 0, 0.0)
        rows = slice(self.rank, None, takers)
        taken = len(range(examples)[rows])
        return Part(rows, taken, taken * self.world / examples)


ALONE = Shard()
