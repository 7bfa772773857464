"""Count recordings of steps: CUDA graphs if there is a GPU, otherwise those of a stand-in.

The stand-in, `Recorder`, records operators, and runs them again on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion.graph import step
from fusion.graph.capture import CudaGraphs
from fusion.streams import by_state, exchanged

Result = TypeVar("Result")


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The device on which recorded steps are tested."""


class Counted(CudaGraphs):
    """CUDA graphs that count recordings and replays as `Recorder` does."""

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.recordings = self.replays = 0

    def record(
        self, step: Callable[[], Result], generators: Iterable[torch.Generator]
    ) -> tuple[Result, Callable[[], None]]:
        result, replay = super().record(step, generators)
        self.recordings += 1

        def counted() -> None:
            self.replays += 1
            replay()

        return result, counted


class Recorder:
    """A stand-in for CUDA graphs, with the interface `Capture`.

    As with CUDA graphs, a replay runs operators on the memory of the recorded tensors, and does not call the step.

    Attributes:
        recordings: Number of steps that were recorded.
        replays: Number of replays, summed over all recordings.
    """

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def aside(self, step: Callable[[], Result]) -> Result:
        return step()

    def record(
        self, step: Callable[[], Result], generators: Iterable[torch.Generator]
    ) -> tuple[Result, Callable[[], None]]:
        tape = _Tape()
        with exchanged(tape.exchange), tape:
            result = step()
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for act in tape.acts:
                    act()

        return result, replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.acts: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [i for i, t in enumerate(made) if t.untyped_storage()._cdata not in given]
        # Keep detached handles of the tensors. The step's code may later move its own tensors to other memory, but not
        # these handles.
        made = [t.detach() for t in made]
        args, kwargs = _handles(args), _handles(kwargs)

        def act() -> None:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for i in fresh:
                made[i].copy_(again[i])

        self.acts.append(act)
        return result

    def exchange(self, default: torch.Generator, own: torch.Generator) -> Callable[[bool], None]:
        """Record an exchange of generators like an operator: replays of a graph also draw from exchanged generators."""
        backs = [by_state(default, own)]
        self.acts.append(lambda: backs.append(by_state(default, own)))

        def back(drawn: bool) -> None:
            backs.pop()(drawn)
            self.acts.append(lambda: backs.pop()(drawn))

        return back


def _handles(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


@contextmanager
def recording() -> Iterator[Recorder | Counted]:
    """Within the context, count recordings of steps. If there is no GPU, `Recorder` records steps on the CPU."""
    recorder = Counted() if DEVICE.type == "cuda" else Recorder()
    with mock.patch.object(step, "capture_on", return_value=recorder):
        yield recorder
