"""Evaluation of members whose optimizer trains other weights than it evaluates, such as Schedule-Free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fusion.keys import SCHEDULE_FREE
from fusion.members.member_indices import member_indices
from fusion.optim.schedule_free import write
from fusion.optim.state import OptimizerState


class EvaluatedOptimizer(OptimizerState):
    """The state of a `FusedOptimizer`, with a context in which the model holds the weights to evaluate."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the weights to evaluate into the model, inside this context; then restore the weights that train.

        The two differ for Schedule-Free members, and for users' optimizers that have `train()` and `eval()`.
        """
        stacked, averaging = self.fused.stacked, [run for run in self._runs if run.kind in SCHEDULE_FREE]
        with torch.inference_mode(False):  # later steps write to tensors that may be made here
            self._move(stacked[self.names[0]].device)
            iterates = self._moment("iterate").parts if averaging else {}
            apart = {k: self._apart_of(k) for k, hp in enumerate(self.members) if not hp.is_vectorized}
        held, averages = list[Tensor](), list[Tensor]()
        for run in averaging:
            for name, z in iterates.items():
                held.append(stacked[name].detach()[run.start : run.stop])
                averages.append(run.average(stacked[name], z, self.steps_KP[:, self._index[name]]))
        before = [y.clone() for y in held]
        with ExitStack() as stack:
            for k, own in apart.items():
                stack.enter_context(own.evaluating({name: stacked[name][k] for name in self.names}))
            write(held, averages)
            try:
                yield
            finally:
                write(held, before)

    def take_hyperparameters(self, other: OptimizerState) -> None:
        """Do what `OptimizerState` does, but keep the averages of Schedule-Free members as they are."""
        before = [hp.average_share for hp in self.members]
        super().take_hyperparameters(other)
        self._keep_averages(before)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, members: Sequence[int] | None = None, hyperparameters: bool = True
    ) -> None:
        """Do what `OptimizerState` does, and restore the averages of Schedule-Free members as saved.

        Load the model's state before this call.
        """
        super().load_state_dict(state_dict, members=members, hyperparameters=hyperparameters)
        if not hyperparameters:
            saved = state_dict["members"]
            chosen = range(len(saved)) if members is None else member_indices(members, len(saved), "members")
            keys = ["momentum" if hp.kind == "schedule_free_sgd" else "beta1" for hp in self.members]
            self._keep_averages([saved[k][key] for k, key in zip(chosen, keys)])

    @torch.no_grad()
    def _keep_averages(self, before: Sequence[float]) -> None:
        """Move the weights that train, so that the averages stay the same although `average_share` has changed.

        Args:
            before: The earlier `average_share` of each member.
        """
        for k, (hp, share) in enumerate(zip(self.members, before)):
            if hp.kind in SCHEDULE_FREE and hp.average_share != share:
                for name, z in self._moment("iterate").parts.items():
                    if self.steps_KP[k, self._index[name]] > 0:
                        y = self.fused.stacked[name][k]
                        y.copy_(torch.lerp(z[k], y, hp.average_share / share))
