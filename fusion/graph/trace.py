"""A trace of the operators that a step calls. A step can be recorded only if the traces of two steps are equal."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Call = tuple[Any, ...]
"""An operator and its arguments: numbers as they are, and for tensors their form and their place in memory."""


class Trace(TorchDispatchMode):
    """Records the operators that one step calls, and finds reasons why a replay would differ from the step.

    A replay differs if the step reads a value from the device, copies data between devices, or draws random numbers on
    the host. It also differs if a number, or a tensor's place in memory, is not the same as in the step before.

    Args:
        before: The trace of the step before, whose batch had the same form and lay in the same memory.

    Attributes:
        obstacle: The first such reason; empty if there is none.
        found: Storages that the step uses but did not allocate. A recording reads them, so they must be kept.
        generators: The generators that were passed to operators.
    """

    def __init__(self, device: torch.device, before: Trace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.obstacle = ""
        self.found: dict[int, torch.UntypedStorage] = {}
        self.generators: set[torch.Generator] = set()
        self._device, self._before = device, before
        self._calls: list[Call] = []
        self._made: dict[int, int] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # torch's optimizers call it to mark their steps; it computes nothing
            return func(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        literal = func is _LITERAL
        call: Call = (func, *(self._value(leaf) if literal else self._noted(leaf) for leaf in given))
        if not self.obstacle:
            self.obstacle = self._difference(call)
        self._calls.append(call)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not self.obstacle:
            self.obstacle = self._obstacle(func, args, [leaf for leaf in given if isinstance(leaf, Tensor)], made)
        old = {place_of(leaf) for leaf in given if isinstance(leaf, Tensor) and not literal}
        for tensor in made:
            place = place_of(tensor)
            if place not in old:
                self._made[place], self._count = self._count, self._count + 1
        return result

    def finish(self) -> str:
        """End the trace; return `obstacle`, which now also covers a step with fewer calls than the one before."""
        if not self.obstacle and self._before is not None and len(self._calls) < len(self._before._calls):
            self.obstacle = f"{self._before._calls[len(self._calls)][0]} is called in one step and not in the next"
        self._before = None
        return self.obstacle

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            self.generators.add(leaf)
            return id(leaf)
        if isinstance(leaf, torch.ScriptObject):
            return type(leaf)
        if isinstance(leaf, torch.UntypedStorage):  # under autocast, an operator takes the storage of an LSTM's weights
            return ("made", self._made[leaf._cdata]) if leaf._cdata in self._made else ("found", leaf._cdata)
        if not isinstance(leaf, Tensor):
            return leaf if leaf == leaf else repr(leaf)  # NaN differs from itself, but its text does not
        form = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.storage_offset())
        place = place_of(leaf)
        if place in self._made:
            return (*form, "made", self._made[place])
        self.found.setdefault(place, leaf.untyped_storage())
        return (*form, "number", str(leaf.item())) if self._is_number(leaf) else (*form, "found", place)

    def _value(self, leaf: Any) -> Any:
        """Return the dtype and values of a CPU tensor that `torch.tensor` made, because no argument shows them.

        Return None for all other values.
        """
        return (leaf.dtype, str(leaf.tolist())) if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else None

    def _is_number(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a single number on the host, whose value kernels get as an argument."""
        return tensor.device.type == "cpu" != self._device.type and tensor.ndim == 0

    def _obstacle(self, func: Any, args: Sequence[Any], given: Sequence[Tensor], made: Sequence[Tensor]) -> str:
        here = [t for t in (*given, *made) if t.device.type == self._device.type]
        there = [t for t in (*given, *made) if t.device.type not in (self._device.type, "meta")]
        if func is _LITERAL:
            made_of_numbers = bool(here) and self._device.type != "cpu"
            return f"numbers of the host become a tensor of the device{_where()}" if made_of_numbers else ""
        if any(t.device.type == self._device.type for t in given) and _waits(func, args):
            return f"{func} waits for values of the device{_where()}"
        if here and any(func in _COPYING or not self._is_number(t) for t in there):
            return f"{func} brings data from one device to another{_where()}"
        if there and torch.Tag.nondeterministic_seeded in func.tags and not func.name().startswith(_ATTENTION):
            return f"{func} draws random numbers on another device{_where()}"
        return ""

    def _difference(self, call: Call) -> str:
        if self._before is None:
            return ""
        at, calls = len(self._calls), self._before._calls
        if at < len(calls) and calls[at] == call:
            return ""
        if at >= len(calls) or calls[at][0] is not call[0]:
            return f"{call[0]} is called in one step and not in the next{_where()}"
        for now, before in zip(call[1:], calls[at][1:]):
            if now != before and not isinstance(now, tuple):
                return f"{call[0]} is given {before} in one step and {now} in the next{_where()}"
        return f"{call[0]} is given another tensor, in form, place or value, in one step than in the next{_where()}"


_ATTENTION = "aten::_scaled_dot_product"
"""Prefix of the names of attention operators, which return the seed and the offset of their dropout.

Seed and offset are on the device while a step is recorded, and on the host otherwise, so they are no obstacle.
"""

_LITERAL = torch.ops.aten.lift_fresh.default
_INDEXING = frozenset(getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_"))
_COPYING = frozenset(getattr(torch.ops.aten, name).default for name in ("copy_", "_to_copy", "_foreach_copy_"))
_DEPENDING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def _waits(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the operator `func` makes the host wait for values of a tensor."""
    if func.overloadpacket in _INDEXING:
        return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return any(tag in func.tags for tag in _DEPENDING)


def place_of(tensor: Tensor) -> int:
    """Return an identifier of the storage in which a tensor lies."""
    place: int = tensor.untyped_storage()._cdata
    return place


def _where() -> str:
    """Return the line of the user's code that called the operator; empty in the backward pass."""
    frames = traceback.extract_stack()
    inside = max((i for i, frame in enumerate(frames) if Path(frame.filename) == _STEP), default=0)
    theirs = [frame for frame in frames[inside:] if _MACHINERY.isdisjoint(Path(frame.filename).parents)]
    if not theirs:
        return ""
    frame = theirs[-1]
    return f", at {frame.filename}:{frame.lineno} `{linecache.getline(frame.filename, frame.lineno or 0).strip()}`"


_STEP = Path(__file__).with_name("step.py")
_MACHINERY = {Path(__file__).parents[1], Path(torch.__file__).parent}
