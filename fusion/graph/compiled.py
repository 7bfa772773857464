"""A step compiled by torch's compiler. On a CPU, it takes the place of a CUDA graph."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fusion.graph.capture import Replay
from fusion.graph.trace import place_of

Result = TypeVar("Result")

TOLERANCE = 0.05
"""Largest allowed relative difference between the results of compiled code and of the step.

Rounding causes a smaller difference, even in bfloat16.
"""


def compiling_pays(seconds: float, speedup: float, compile_seconds: float) -> bool:
    """Return whether compiling a step saves more than twice the time that compiling takes.

    Args:
        seconds: Time that all remaining steps take if they are not compiled.
        speedup: Speed of a compiled step, divided by the speed of the step as it is written.
        compile_seconds: Time that compiling takes.

    >>> compiling_pays(39.0, 2.0, 10.0), compiling_pays(41.0, 2.0, 10.0)
    (False, True)
    """
    return seconds * (1 - 1 / speedup) > 2 * compile_seconds


class Inductor:
    """A `Capture` that compiles a whole step (forward, backward and update) to C++.

    It needs a C++ compiler on the machine, and takes seconds to minutes. Torch caches compiled code on disk, where
    other processes find it. Compilation runs in this process. The code is made for torch's present number of threads.
    """

    def aside(self, step: Callable[[], Result]) -> Result:
        """Run a step as it is, because a CPU has no streams."""
        return step()

    def record(self, step: Callable[[], Result], generators: Iterable[torch.Generator]) -> tuple[Result, Replay]:
        """Compile a step, and run the compiled code once.

        First the step and the compiled code each compute two steps in a row from the same state. They must return the
        same results up to rounding; the second result also depends on the first update. Weights are not compared,
        because they may differ by more if a gradient is only a rounding error. The gradient of a bias before batch
        normalization is an example.

        Raises:
            RuntimeError: if the step draws random numbers, because compiled code would draw other ones. Also if the
                compiled code returns other results.
            Exception: any error of the compiler.
        """
        tape, sources = _Tape(), [torch.default_generator, *generators]
        stood = [source.get_state() for source in sources]
        try:
            with tape:
                result = step()
            if not all(map(torch.equal, stood, [source.get_state() for source in sources])):
                raise RuntimeError("it draws random numbers, and compiled code would draw others")
            made = _tensors(result)
            found = list(tape.found.values())
            graph, inputs = _graph(tape.calls, found, made), [of.whole for of in found]
            given: list[Any] = list(inputs)
            with torch.no_grad(), torch._inductor.config.patch(compile_threads=1), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about its own code
                compiled = torch._inductor.compile(graph, given)
            expected = [*map(torch.clone, made), *_tensors(step())]
            tape.undo()
            with torch.no_grad():
                returned = [tensor.clone() for _ in range(2) for tensor in compiled(*inputs)]
                if not all(map(_is_close, returned, expected)):
                    raise RuntimeError("compiled code returns something else")
                tape.undo()
                _fill(made, compiled(*inputs))
        except BaseException:
            tape.undo()
            for source, state in zip(sources, stood):
                source.set_state(state)
            raise

        def replay() -> None:
            with torch.no_grad():
                _fill(made, compiled(*inputs))

        return result, replay


@dataclass(frozen=True)
class _Found:
    """Memory that a step uses but did not allocate, and its content before the step."""

    whole: Tensor
    before: Tensor


_Call = tuple[Any, tuple[Any, ...], dict[str, Any], Any]
"""An operator, its arguments and its result. Calls keep all tensors of a step alive, so that none reuses an address."""


class _Tape(TorchDispatchMode):
    """Records the operators that a step calls.

    Attributes:
        found: Result of `place_of` -> memory that the step uses but did not allocate.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.found: dict[int, _Found] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # torch's optimizers call it to mark their steps; it computes nothing
            return func(*args, **kwargs)
        for leaf in _tensors((args, kwargs)):
            if (place := place_of(leaf)) not in self._made and place not in self.found:
                whole = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
                self.found[place] = _Found(whole, whole.clone())
        result = func(*args, **kwargs)
        self._made.update(place for leaf in _tensors(result) if (place := place_of(leaf)) not in self.found)
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Restore the content that the memory in `found` had before the step."""
        with torch.no_grad():
            for of in self.found.values():
                of.whole.copy_(of.before)


def _graph(calls: Sequence[_Call], found: Sequence[_Found], made: Sequence[Tensor]) -> fx.GraphModule:
    """Build a function that repeats `calls`: it writes into the memory `found`, and returns the tensors `made`."""
    graph = fx.Graph()
    memory = {place_of(of.whole): graph.placeholder(f"memory_{i}") for i, of in enumerate(found)}
    nodes: dict[tuple[Any, ...], fx.Node] = {}

    def node(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # Identify a tensor by its memory, not by its object, because backward gets other objects for the same memory.
        key = _key(leaf)
        if key not in nodes:
            shape = (list(leaf.shape), list(leaf.stride()), leaf.storage_offset())
            nodes[key] = graph.call_function(torch.ops.aten.as_strided.default, (memory[place_of(leaf)], *shape))
        return nodes[key]

    for func, args, kwargs, result in calls:
        called = graph.call_function(func, tree_map(node, args), tree_map(node, kwargs))
        if isinstance(result, Tensor):
            nodes[_key(result)] = called
        elif isinstance(result, tuple | list):
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    nodes[_key(part)] = graph.call_function(operator.getitem, (called, i))
    graph.output(tuple(map(node, made)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return (place_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


def _fill(made: Sequence[Tensor], computed: Sequence[Tensor]) -> None:
    for to, tensor in zip(made, computed, strict=True):
        to.copy_(tensor)


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours.double(), theirs.double(), rtol=TOLERANCE, atol=1e-6, equal_nan=True)
