"""One optimizer for K members, each with hyperparameters, and if need be an update rule, of its own.

Shape suffixes: K members, P trainable parameters. Hyperparameters are kept as vectors [K], what also differs
from parameter to parameter (multipliers, step counts) as [P, K], the moments as [K, ...] like the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from fusion.checks import require
from fusion.members import member_indices, member_rows, member_vector
from fusion.model import FusedModel
from fusion.optim import native, vectorized
from fusion.optim.hyper import OPTIMIZERS, Hyperparameters
from fusion.optim.runs import Run, runs_of
from fusion.optim.single import Multipliers, multipliers_of, torch_optimizer


class FusedOptimizer:
    """Updates the stacked parameters of a `FusedModel`, each member as `torch.optim` would update it alone.

    Members whose neighbours use the same rule are updated together, on slices that are views: K members take
    as few kernels as one if those of one optimizer stand side by side.

    Args:
        fused: The model; the optimizer finds its parameters by name, so that it survives `fused.keep`.
        members: K hyperparameters.
        lr_multipliers: Optimizer name -> parameter name -> factor of the learning rate, 1 where absent.
        weight_decay_multipliers: Likewise, for the weight decay.

    Attributes:
        lr_factor_K: [K], what a schedule multiplies each member's learning rate with; 1 at first.

    Raises:
        ValueError: where there are not K hyperparameters, or multipliers name no parameter.
    """

    def __init__(
        self,
        fused: FusedModel,
        members: Sequence[Hyperparameters],
        *,
        lr_multipliers: Multipliers | None = None,
        weight_decay_multipliers: Multipliers | None = None,
    ) -> None:
        require(len(members) == fused.K, "len(members)", len(members), f"{fused.K}, as many as `fused` has")
        self.fused = fused
        self.members = list(members)
        self.names = [name for name, p in fused.stacked.items() if p.requires_grad]
        if not self.names:
            raise ValueError("`fused` has no stacked parameter that needs gradients")
        self.state: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        self.steps_PK = torch.zeros(len(self.names), fused.K, dtype=torch.float64)
        self.lr_factor_K = torch.ones(fused.K, dtype=torch.float64)
        self._lr_multipliers_PK = self._per_parameter(lr_multipliers)
        self._decay_multipliers_PK = self._per_parameter(weight_decay_multipliers)
        self._tabulate()

    @property
    def K(self) -> int:  # noqa: N802
        """The number of members."""
        return len(self.members)

    def set_lr_factor(self, factor: float | Sequence[float] | Tensor) -> None:
        """Multiply the learning rates, those given at construction, by `factor`: a number, or [K]."""
        self.lr_factor_K.copy_(member_vector("factor", factor, self.K))

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.fused.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient; like torch's, the others are left alone."""
        if self.fused.K != self.K:
            raise RuntimeError(f"the optimizer has {self.K} members, but its model has {self.fused.K}")
        stacked = self.fused.stacked
        rows = [i for i, name in enumerate(self.names) if stacked[name].grad is not None]
        if not rows:
            return
        self._move(stacked[self.names[rows[0]]].device)
        if len(rows) == len(self.names):
            self.steps_PK += 1
        else:
            self.steps_PK[rows] += 1
        with self._left_alone(stacked):
            if native.can_update([stacked[self.names[i]] for i in rows], self.K):
                self._step_members(stacked, rows)
                return
            for run in self._runs:
                self._step_run(run, stacked, rows)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all members but those at `indices`, in that order, as `FusedModel.keep` does."""
        chosen = member_indices(indices, self.K)
        self.members = [self.members[k] for k in chosen]
        for name in ("steps_PK", "lr_factor_K", "_lr_multipliers_PK", "_decay_multipliers_PK"):
            setattr(self, name, getattr(self, name)[..., chosen])
        for moments in self.state.values():
            for key, moment in moments.items():
                moments[key] = member_rows(moment, chosen)
        self._tabulate()

    def concat(self, other: FusedOptimizer) -> None:
        """Append the members of `other`, with their state, as `FusedModel.concat` does.

        Raises:
            ValueError: where the two optimize different parameters.
        """
        if self.names != other.names:
            raise ValueError("`other` optimizes other parameters, so its members cannot join")
        self.state = {n: _join(self.state[n], other.state[n], self.K, other.K) for n in self.names}
        self.members = self.members + other.members
        for name in ("steps_PK", "lr_factor_K", "_lr_multipliers_PK", "_decay_multipliers_PK"):
            ours = getattr(self, name)
            setattr(self, name, torch.cat([ours, getattr(other, name).to(ours.device)], -1))
        self._tabulate()

    def unfuse(self, k: int, module: nn.Module) -> torch.optim.Optimizer:
        """Member `k`'s optimizer as torch's own, which goes on where this one is; its learning rate is the base rate.

        Args:
            k: The member.
            module: What it is to update: `fused.unfuse(k)`.

        Raises:
            IndexError: where `k` is not in [-K, K).
        """
        (k,) = member_indices([k], self.K)
        hp = self.members[k]
        both_PK = (self._lr_multipliers_PK, self._decay_multipliers_PK)
        lr, decay = (dict(zip(self.names, of_PK[:, k].tolist())) for of_PK in both_PK)
        optimizer = torch_optimizer(module, hp, lr, decay)
        parameters, steps = dict(module.named_parameters()), self.steps_PK[:, k].tolist()
        for name, step in zip(self.names, steps):
            if step:
                moments = {key: moment[k].clone() for key, moment in self.state[name].items()}
                optimizer.state[parameters[name]] = _torch_state(hp, step, moments)
        # Through torch's own checks, which also put each tensor where this kind of optimizer wants it.
        optimizer.load_state_dict(optimizer.state_dict())
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` restores, hyperparameters included: tensors and plain values only."""
        return {
            "members": [dict(vars(hp)) for hp in self.members],
            "names": list(self.names),
            "state": {name: _clone(moments) for name, moments in self.state.items()},
            "steps": self.steps_PK.clone(),
            "lr_factor": self.lr_factor_K.clone(),
            "lr_multipliers": self._lr_multipliers_PK.clone(),
            "weight_decay_multipliers": self._decay_multipliers_PK.clone(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, members: Sequence[int] | None = None) -> None:
        """Restore what `state_dict` returned.

        Args:
            state_dict: Of as many members as the model has, or of more.
            members: Which of the members in `state_dict` to load, in this order, as after `keep(members)`; all if None.

        Raises:
            ValueError: where it is of other parameters, or of another number of members than the model has.
            IndexError: where one of `members` is not in [-K, K) of the K in `state_dict`.
        """
        if list(state_dict["names"]) != self.names:
            raise ValueError("`state_dict` is of an optimizer for other parameters")
        K = len(state_dict["members"])
        chosen = list(range(K)) if members is None else member_indices(members, K, "members")
        if len(chosen) != self.fused.K:
            raise ValueError(f"`state_dict` has {len(chosen)} members, but must have {self.fused.K}, as the model has")
        stacked = self.fused.stacked
        self.members = [Hyperparameters(**state_dict["members"][k]) for k in chosen]
        self.state = {
            name: {
                key: (moment if members is None else member_rows(moment, chosen)).to(stacked[name].device, copy=True)
                for key, moment in moments.items()
            }
            for name, moments in state_dict["state"].items()
        }
        self.steps_PK = state_dict["steps"][..., chosen]
        self.lr_factor_K = state_dict["lr_factor"][..., chosen]
        self._lr_multipliers_PK = state_dict["lr_multipliers"][..., chosen]
        self._decay_multipliers_PK = state_dict["weight_decay_multipliers"][..., chosen]
        self._tabulate()

    def _per_parameter(self, multipliers: Multipliers | None) -> Tensor:
        """Multipliers as [P, K], each member's taken from those of its optimizer."""
        known = {**self.fused.stacked, **self.fused.shared}
        columns = {kind: multipliers_of(kind, multipliers, known) for kind in OPTIMIZERS}
        rows = [[columns[hp.kind].get(name, 1.0) for hp in self.members] for name in self.names]
        return torch.tensor(rows, dtype=torch.float64)

    def _tabulate(self) -> None:
        """Work out what stays as it is from step to step."""
        self._runs = list(runs_of(self.members))
        decay_K = torch.tensor([hp.decay for hp in self.members], dtype=torch.float64)
        lr_K = torch.tensor([hp.lr for hp in self.members], dtype=torch.float64)
        self._lr_PK = lr_K * self._lr_multipliers_PK.cpu()
        self._decay_PK = decay_K * self._decay_multipliers_PK.cpu()
        self._move(self.fused.stacked[self.names[0]].device, force=True)

    def _move(self, device: torch.device, *, force: bool = False) -> None:
        if self.steps_PK.device == device and not force:
            return
        for name in ("steps_PK", "lr_factor_K", "_lr_PK", "_decay_PK"):
            setattr(self, name, getattr(self, name).to(device))
        for run in self._runs:
            run.to(device)

    @contextmanager
    def _left_alone(self, stacked: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Undo a step for members that have no gradient of a parameter where others have one."""
        without = {name: ks for name, ks in self.fused.unreached().items() if name in self.state}
        saved = {n: [t[ks] for t in (stacked[n], *self.state[n].values())] for n, ks in without.items()}
        yield
        for name, ks in without.items():
            for tensor, before in zip_longest((stacked[name], *self.state[name].values()), saved[name]):
                tensor[ks] = 0 if before is None else before
            self.steps_PK[self.names.index(name), ks] -= 1

    def _step_members(self, stacked: Mapping[str, nn.Parameter], rows: Sequence[int]) -> None:
        factors = self.lr_factor_K.tolist()
        lr_PK = (self._lr_PK * self.lr_factor_K).tolist()
        decay_PK, steps_PK = self._decay_PK.tolist(), self.steps_PK.tolist()
        for run in self._runs:
            slots: list[list[native.Slot]] = [[] for _ in run.members]
            for i in rows:
                tensors = self._tensors(run, self.names[i], stacked)
                for r, (p, g, *own) in enumerate(zip(*(t[run.start : run.stop].unbind() for t in tensors))):
                    k = run.start + r
                    slots[r].append(native.Slot(p, g, own, lr_PK[i][k], decay_PK[i][k], steps_PK[i][k]))
            for r, hp in enumerate(run.members):
                native.update(hp, slots[r], factors[run.start + r])

    def _step_run(self, run: Run, stacked: Mapping[str, nn.Parameter], rows: Sequence[int]) -> None:
        at = slice(run.start, run.stop)
        coefficients_PR = run.coefficients(
            self._lr_PK[:, at], self._decay_PK[:, at], self.steps_PK[:, at], self.lr_factor_K[at]
        )
        tensors = {i: self._tensors(run, self.names[i], stacked) for i in rows}
        vectorized.update(run, tensors, coefficients_PR)

    def _tensors(self, run: Run, name: str, stacked: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """A parameter with its gradient and the moments that the run's rule takes, [K, ...] each."""
        parameter = stacked[name]
        assert parameter.grad is not None
        return [parameter, parameter.grad, *(self._moment(name, key, parameter) for key in run.moments)]

    def _moment(self, name: str, key: str, parameter: Tensor) -> Tensor:
        moments = self.state[name]
        if key not in moments:
            moments[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return moments[key]


def _torch_state(hp: Hyperparameters, step: float, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if hp.kind == "sgd":
        return {"momentum_buffer": moments["first"]} if hp.momentum else {}
    return {"step": torch.tensor(step), "exp_avg": moments["first"], "exp_avg_sq": moments["second"]}


def _clone(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: moment.clone() for key, moment in moments.items()}


def _join(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], K: int, L: int) -> dict[str, Tensor]:
    """Moments of K and of L members one after the other; zeros, as at the start, where a side keeps none."""
    joined = {}
    for key in {**ours, **theirs}:
        like = ours.get(key, theirs.get(key))
        assert like is not None
        first = ours.get(key, like.new_zeros(K, *like.shape[1:]))
        second = theirs.get(key, like.new_zeros(L, *like.shape[1:])).to(first.device)
        joined[key] = torch.cat([first, second])
    return joined
