"""Several fused optimizers as one: each updates one part of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusion.argument_checks import check_mapping, require
from fusion.optim.fused import FusedOptimizer
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.parts import by_part
from fusion.optim.state import OptimizerState


class FusedByPart(FusedOptimizer):
    """Joins one `FusedOptimizer` for each part of a model.

    The optimizers of the parts hold the state. Each method calls the same method of all of them.

    Args:
        parts: Name of the part -> its optimizer. All update the same model, but different parameters.
    """

    def __init__(self, parts: Mapping[str, FusedOptimizer]) -> None:
        self.parts = dict(parts)
        (first, *_) = self.parts.values()
        self.fused = first.fused
        self.names = [name for part in self.parts.values() for name in part.names]
        self.fused.set_parts({name: part for part, of in self.parts.items() for name in of.names})

    @property
    def K(self) -> int:  # noqa: N802
        """Return the number of members."""
        return next(iter(self.parts.values())).K

    @property
    def members(self) -> list[Hyperparameters]:  # type: ignore[override]
        """Return the members' hyperparameters for the first part."""
        return next(iter(self.parts.values())).members

    @property
    def lr_factor_K(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        """Return the schedule's factor of each member's learning rate, [K]; it is the same for all parts."""
        return next(iter(self.parts.values())).lr_factor_K

    @property
    def steps_KP(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        """Return the number of updates of each member's parameters, in the order of `names`."""
        return torch.cat([part.steps_KP for part in self.parts.values()], 1)

    @property
    def changes(self) -> int:  # type: ignore[override]
        """Return the number of times that tensors of any part were replaced by others."""
        return sum(part.changes for part in self.parts.values())

    @property
    def can_be_recorded(self) -> bool:
        """Return whether the `step` of every part can be recorded."""
        return all(part.can_be_recorded for part in self.parts.values())

    def step(self, takes: Tensor | None = None) -> None:
        """Update every parameter that has a gradient."""
        for part in self.parts.values():
            part.step(takes)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the weights for evaluation into all parts, inside this context; then restore those for training."""
        with ExitStack() as stack:
            for part in self.parts.values():
                stack.enter_context(part.evaluating())
            yield

    def set_lr_factor(self, factor: float | Sequence[float] | Tensor) -> None:
        """Multiply the learning rates of all parts by `factor`: a number, or [K]."""
        for part in self.parts.values():
            part.set_lr_factor(factor)

    def schedule(self, factors: Sequence[Sequence[float]]) -> None:
        """Set the factors [S, K] of the next S steps for all parts."""
        for part in self.parts.values():
            part.schedule(factors)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all members but those at `indices`, in that order."""
        for part in self.parts.values():
            part.keep(indices)

    def copy(self, sources: Mapping[int, int]) -> None:
        """Make members copies of others, in place."""
        for part in self.parts.values():
            part.copy(sources)

    def take_hyperparameters(self, other: OptimizerState) -> None:
        """Replace hyperparameters and multipliers by those of another optimizer of the same parts."""
        for name, part in self._like(other).items():
            self.parts[name].take_hyperparameters(part)

    def concat(self, other: OptimizerState) -> None:
        """Append the members of another optimizer of the same parts, with their state."""
        for name, part in self._like(other).items():
            self.parts[name].concat(part)

    def _tabulate(self) -> None:
        """Do nothing: each part tabulates its own values."""

    def _like(self, other: OptimizerState) -> Mapping[str, FusedOptimizer]:
        parts = other.parts if isinstance(other, FusedByPart) else {}
        require(parts.keys() == self.parts.keys(), "other", [*parts], f"an optimizer of the parts {[*self.parts]}")
        return parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part, which `load_state_dict` restores."""
        return {"parts": {name: part.state_dict() for name, part in self.parts.items()}}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, members: Sequence[int] | None = None, hyperparameters: bool = True
    ) -> None:
        """Restore the result of `state_dict`; `FusedOptimizer` describes the arguments."""
        check_mapping("state_dict", state_dict, "parts")
        saved = state_dict["parts"]
        require(saved.keys() == self.parts.keys(), "state_dict", [*saved], f"of the parts {[*self.parts]}")
        for name, part in self.parts.items():
            part.load_state_dict(saved[name], members=members, hyperparameters=hyperparameters)

    def unfuse(self, k: int, module: nn.Module) -> torch.optim.Optimizer:
        """Return member `k`'s optimizer in the same state: one of torch's for each part, joined by `by_part`."""
        return by_part({name: part.unfuse(k, module) for name, part in self.parts.items()})
