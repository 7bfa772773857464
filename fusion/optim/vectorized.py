"""The members of a run updated together, parameter by parameter, on any device.

Shape suffixes: P trainable parameters, R members of the run, B members of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fusion.optim import updates
from fusion.optim.runs import Coefficients, Run

BLOCK = 2**17
"""Elements of a parameter to update at a time on a CPU: temporaries of that size are found in memory that is at hand.

Larger ones are mapped anew, page by page, for each operation. AdamW on 32 members of 27,000 parameters: 5.0 ms at once,
1.9 ms in blocks.
"""


def update(run: Run, tensors: Mapping[int, Sequence[Tensor]], coefficients_PR: Coefficients) -> None:
    """Apply the rule of a run to its members, in place.

    Args:
        run: The members.
        tensors: Row of the coefficients -> parameter, gradient and moments, [K, ...] each.
        coefficients_PR: What else the rule takes.
    """
    by_dtype = {_math_dtype(parameter.dtype) for parameter, *_ in tensors.values()}
    tables = {dtype: _unbind(coefficients_PR, dtype) for dtype in by_dtype}
    for i, stored in tensors.items():
        math = _math_dtype(stored[0].dtype)
        row = {name: None if c is None else c[i] for name, c in tables[math].items()}
        for block in _blocks(stored[0], run.start, run.stop):
            inside = slice(block.start - run.start, block.stop - run.start)
            own = {name: None if c is None else c[inside] for name, c in row.items()}
            _update(run.adaptive, [t[block] for t in stored], own, math)


def _blocks(parameter: Tensor, start: int, stop: int) -> Iterator[slice]:
    """Split the members of a run into blocks."""
    step = stop - start
    if parameter.device.type == "cpu":
        step = max(1, BLOCK * parameter.shape[0] // max(1, parameter.numel()))
    return (slice(first, min(first + step, stop)) for first in range(start, stop, step))


def _update(adaptive: bool, stored: list[Tensor], row: Mapping[str, Tensor | None], math: torch.dtype) -> None:
    """Apply a rule in `math` precision to some members of one parameter, in place.

    Args:
        adaptive: Whether the rule is Adam's.
        stored: Parameter, gradient and moments, [B, ...] each.
        row: Coefficients of the rule, [B] each.
        math: Their precision.
    """
    shape = (-1,) + (1,) * (stored[0].ndim - 1)
    coefficients = {name: None if c is None else c.view(shape) for name, c in row.items()}
    tensors = [t if t.dtype == math else t.to(math) for t in stored]
    if adaptive:
        updates.adam(*tensors, **coefficients)  # type: ignore[arg-type]
    else:
        updates.sgd(*tensors, **coefficients)  # type: ignore[arg-type]
    if stored[0].dtype != math:
        for target, value in zip(stored[:1] + stored[2:], tensors[:1] + tensors[2:], strict=True):
            target.copy_(value)


def _unbind(coefficients: Coefficients, dtype: torch.dtype) -> dict[str, Sequence[Tensor] | None]:
    """Each [P, R] as P rows of the parameters' type."""
    return {name: None if c is None else c.to(dtype).unbind(0) for name, c in coefficients.items()}


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision to update in: a coefficient like 1 - lr * weight_decay is 1 in half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
