"""Segments of parameters that are updated together.

The parameters of a segment are adjacent in one matrix of `fusion.members.rows`, and have equal step counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion.members.rows import Block, Layout

CHUNK = 2**17
"""Number of elements to update at a time on a CPU. For temporaries of this size, the allocator reuses memory.

The system maps new pages for larger temporaries in each operation. AdamW on 32 members of 27,000 parameters takes 5.0
ms if all are updated at once, and 1.9 ms in chunks.
"""

CHUNK_ELSEWHERE = 2**24
"""Number of elements to update at a time on other devices. It only bounds temporaries, to 64 MiB each in float32."""

_LARGE = 4
"""A parameter is large if it takes more than 1/`_LARGE` of a chunk. It is then faster to update it separately, because
its multipliers are [R, 1]. Together with others, they would be [R, n], which costs two more passes over memory."""


def chunk(device: torch.device) -> int:
    """Return the number of elements to update at a time on a device."""
    return CHUNK if device.type == "cpu" else CHUNK_ELSEWHERE


def numbered(values: Iterable[Hashable]) -> list[int]:
    """Number the values from 0, in the order of first appearance. If values are equal, so are their numbers.

    >>> numbered("abca")
    [0, 1, 2, 0]
    """
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@dataclass(frozen=True)
class Segment:
    """Adjacent parameters of one dtype that have equal step counts in each member.

    Attributes:
        start: The first column of the parameters in [K, N].
        sizes: Number of elements of each parameter, per member.
    """

    block: Block
    start: int
    names: Sequence[str]
    sizes: Sequence[int]

    @property
    def stop(self) -> int:
        """Return the last column plus 1."""
        return self.start + sum(self.sizes)


def segments(
    layout: Layout, steps: Mapping[str, Hashable], multipliers: Mapping[str, Hashable], K: int, device: torch.device
) -> Iterator[Segment]:
    """Split parameters into segments. A segment is at most as large as a chunk, unless it has a single parameter.

    Args:
        steps: A value for each parameter to update; equal values mean equal step counts.
        multipliers: A value for each parameter; equal values mean equal multipliers. A large parameter shares a segment
            only with parameters that have equal multipliers.
    """

    def joins(run: Sequence[str], name: str, shapes: Mapping[str, torch.Size]) -> bool:
        if steps[name] != steps[run[0]]:
            return False
        alike = all(multipliers[n] == multipliers[name] for n in run)
        return alike or all(K * shapes[n].numel() <= chunk(device) // _LARGE for n in (*run, name))

    for where, shapes in layout.items():
        run: list[str] = []
        start = column = width = 0
        for name, shape in shapes.items():
            size = shape.numel()
            if run and not (name in steps and width + size <= chunk(device) and joins(run, name, shapes)):
                yield Segment(where, start, run, [shapes[n].numel() for n in run])
                run, width = [], 0
            if name in steps:
                start = start if run else column
                run, width = [*run, name], width + size
            column += size
        if run:
            yield Segment(where, start, run, [shapes[n].numel() for n in run])
