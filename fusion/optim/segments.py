"""Segments of parameters that are updated at once: neighbours in the rows, of one type, with equal step counts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion.members.rows import Block, Layout

CHUNK = 2**17
"""Elements to update at a time on a CPU: the allocator reuses memory for temporaries of that size.

Larger temporaries are mapped anew, page by page, for each operation. AdamW on 32 members of 27,000 parameters takes
5.0 ms at once, and 1.9 ms in chunks.
"""

CHUNK_ELSEWHERE = 2**24
"""The same on other devices, where it only bounds the memory of temporaries: 64 MiB each in float32."""

_LARGE = 4
"""A parameter is faster by itself if it takes more than 1/4 of a chunk. Its multipliers are then [R, 1]. Side by side
with others they are [R, n]: two passes over memory more."""


def chunk(device: torch.device) -> int:
    """Return the number of elements to update at a time on a device."""
    return CHUNK if device.type == "cpu" else CHUNK_ELSEWHERE


def numbered(values: Iterable[Hashable]) -> list[int]:
    """Number values: equal values get equal numbers, from 0 in the order in which they first come.

    >>> numbered("abca")
    [0, 1, 2, 0]
    """
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@dataclass(frozen=True)
class Segment:
    """Neighbouring parameters of one type that have taken as many steps as each other, in each member.

    Attributes:
        start: Their first column of [K, N].
        sizes: Elements of each.
    """

    block: Block
    start: int
    names: Sequence[str]
    sizes: Sequence[int]

    @property
    def stop(self) -> int:
        """Return the column after the last."""
        return self.start + sum(self.sizes)


def segments(
    layout: Layout, steps: Mapping[str, Hashable], multipliers: Mapping[str, Hashable], K: int, device: torch.device
) -> Iterator[Segment]:
    """Split parameters into segments, each at most as large as a chunk unless it is one parameter.

    Args:
        steps: Value for each parameter to update; equal values mean equal step counts.
        multipliers: Value for each parameter; equal values mean equal multipliers. Large parameters share a segment
            only with those of equal multipliers.
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
