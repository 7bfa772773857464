"""One optimizer for K members, each with hyperparameters, and if need be an update rule, of its own.

Shape suffixes: K members, P trainable parameters, N elements of them in a member, S steps. Hyperparameters are kept as
vectors [K], what also differs from parameter to parameter (multipliers, step counts) as [K, P], the moments as [K, N].
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fusion.checks import check_each, check_mapping, refusal, require
from fusion.kept import kept
from fusion.keys import KINDS
from fusion.members import member_indices, member_rows, member_vector
from fusion.model import FusedModel, check_fused
from fusion.optim import native
from fusion.optim.apart import Apart, go_on
from fusion.optim.hyper import Hyperparameters
from fusion.optim.runs import Run, runs_of
from fusion.optim.segments import numbered, segments
from fusion.optim.single import Multipliers, check_multipliers, torch_optimizer
from fusion.optim.vectorized import Tile
from fusion.rows import Layout, Rows, layout_of, make_dense
from fusion.structure import check_module

_TABLES = ("steps_KP", "lr_factor_K", "_lr_multipliers_KP", "_decay_multipliers_KP")
_STATE = ("state", "steps", "lr_factor", "schedule", "lr_multipliers", "weight_decay_multipliers")


class FusedOptimizer:
    """Updates the stacked parameters of a `FusedModel`, each member as `torch.optim` would update it alone.

    Members whose neighbours use the same rule are updated together, all parameters of one type at once: K members of
    any depth take as few operators as one of one layer if those of one optimizer stand side by side. For that,
    parameters and gradients become views of [K, N] in `step`, unless torch's own kernels for CPUs are faster. Members
    with other optimizers than sgd, adam and adamw are updated by torch's own, one after another.

    Args:
        fused: The model; the optimizer finds its parameters by name, so that it survives `fused.keep`.
        members: K hyperparameters.
        own_lr_factors: For each member, parameter name -> factor of its learning rate besides.
        lr_multipliers: Optimizer name -> parameter name -> factor of the learning rate, 1 where absent.
        weight_decay_multipliers: Likewise, for the weight decay.

    Attributes:
        lr_factor_K: [K], what a schedule multiplies each member's learning rate with; 1 at first.
        steps_KP: [K, P], how often each member's parameters have been updated.
        changes: As of `FusedModel`.

    Raises:
        ValueError: where there are not K hyperparameters, or multipliers name no parameter.
    """

    def __init__(
        self,
        fused: FusedModel,
        members: Sequence[Hyperparameters],
        own_lr_factors: Sequence[Mapping[str, float]] | None = None,
        *,
        lr_multipliers: Multipliers | None = None,
        weight_decay_multipliers: Multipliers | None = None,
    ) -> None:
        check_fused(fused)
        check_each("members", members, Hyperparameters, fused.K)
        self.fused = fused
        self.members = list(members)
        self.names = [name for name, p in fused.stacked.items() if p.requires_grad]
        if not self.names:
            raise ValueError("`fused` has no stacked parameter that needs gradients")
        self._index = {name: i for i, name in enumerate(self.names)}
        self._moments: dict[str, Rows] = {}
        self._apart: dict[int, Apart] = {}
        self.changes = 0
        self._schedule_SK: Tensor | None = None
        self._next = torch.zeros(1, dtype=torch.int64)
        self.steps_KP = torch.zeros(fused.K, len(self.names), dtype=torch.float64)
        self.lr_factor_K = torch.ones(fused.K, dtype=torch.float64)
        self._lr_multipliers_KP = self._per_parameter("lr_multipliers", lr_multipliers)
        if own_lr_factors is not None:
            check_each("own_lr_factors", own_lr_factors, Mapping, fused.K)
            rows = [[own.get(name, 1.0) for name in self.names] for own in own_lr_factors]
            self._lr_multipliers_KP *= torch.tensor(rows, dtype=torch.float64)
        self._decay_multipliers_KP = self._per_parameter("weight_decay_multipliers", weight_decay_multipliers)
        self._tabulate()

    @property
    def K(self) -> int:  # noqa: N802
        """The number of members."""
        return len(self.members)

    @property
    def can_be_recorded(self) -> bool:
        """Whether `step` never waits for the host: where torch updates a member, it does."""
        return all(hp.is_vectorized for hp in self.members)

    def set_lr_factor(self, factor: float | Sequence[float] | Tensor) -> None:
        """Multiply the learning rates, those given at construction, by `factor`: a number, or [K]."""
        factor_K = member_vector("factor", factor, self.K)
        _check_factors("factor", factor_K)
        if self._schedule_SK is not None:
            self._schedule_SK, self.changes = None, self.changes + 1
        self.lr_factor_K.copy_(factor_K)

    def schedule(self, factors: Sequence[Sequence[float]]) -> None:
        """The same for the coming S steps at once, [S, K], after which the last stays: no step waits for its factors.

        `keep` and `load_state_dict` carry it along; after `concat` it has to be given again.

        Raises:
            ValueError: where it is not [S, K] with S >= 1.
        """
        rule = f"[S, {self.K}] with S >= 1: a row for each step, of a factor for each member"
        try:
            table_SK = torch.as_tensor(factors, dtype=torch.float64).clone()
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(refusal("factors", factors, rule)) from None
        fits = table_SK.ndim == 2 and len(table_SK) > 0 and table_SK.shape[1] == self.K
        require(fits, "factors", list(table_SK.shape), rule)
        _check_factors("factors", table_SK)
        device = self.steps_KP.device
        if self._schedule_SK is not None and self._schedule_SK.shape == table_SK.shape:
            self._schedule_SK.copy_(table_SK)
            self._next.zero_()
        else:
            self._schedule_SK, self._next = table_SK.to(device), torch.zeros(1, dtype=torch.int64, device=device)
            self.changes += 1

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self.fused.zero_grad()

    @torch.no_grad()
    def step(self, takes: Tensor | None = None) -> None:
        """Update every parameter that has a gradient; like torch's, the others are left alone.

        Args:
            takes: [K] of booleans, on the members' device: who takes the step, as `LossScale.unscale` says; all if
                None. Of the others nothing changes, their steps are not counted either, and their gradients must be
                finite.
        """
        if self.fused.K != self.K:
            raise RuntimeError(f"the optimizer has {self.K} members, but its model has {self.fused.K}")
        stacked = self.fused.stacked
        self._move(stacked[self.names[0]].device)
        self._follow_schedule()
        make_dense(stacked.values())
        present = [name for name in self.names if stacked[name].grad is not None]
        if not present:
            return
        self._count(present, takes)
        with self._left_alone(stacked, takes):
            self._step_apart(stacked, present, takes)
            if self._runs and native.can_update(self.fused, [stacked[name] for name in self.names]):
                self._step_members(stacked, present, takes)
            elif self._runs:
                self._step_rows(stacked, present, takes)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all members but those at `indices`, in that order, as `FusedModel.keep` does."""
        chosen = member_indices(indices, self.K)
        self.members = [self.members[k] for k in chosen]
        # One that is kept twice goes on as two.
        self._apart = {i: copy.deepcopy(self._apart[k]) for i, k in enumerate(chosen) if k in self._apart}
        for name in _TABLES:
            setattr(self, name, getattr(self, name)[chosen])
        self._moments = {key: rows.keep(chosen) for key, rows in self._moments.items()}
        if self._schedule_SK is not None:
            self._schedule_SK = self._schedule_SK[:, chosen]
        self._tabulate()

    def concat(self, other: FusedOptimizer) -> None:
        """Append the members of `other`, with their state, as `FusedModel.concat` does.

        Raises:
            ValueError: where the two optimize different parameters.
        """
        require(isinstance(other, FusedOptimizer), "other", other, "a FusedOptimizer")
        if self.names != other.names:
            raise ValueError("`other` optimizes other parameters, so its members cannot join")
        self._schedule_SK = None
        keys = {**self._moments, **other._moments}
        self._moments = {key: self._moment(key).concat(other._moment(key)) for key in keys}
        self._apart |= {self.K + k: apart for k, apart in other._apart.items()}
        self.members = self.members + other.members
        for name in _TABLES:
            ours = getattr(self, name)
            setattr(self, name, torch.cat([ours, getattr(other, name).to(ours.device)]))
        self._tabulate()

    def unfuse(self, k: int, module: nn.Module) -> torch.optim.Optimizer:
        """Member `k`'s optimizer as torch's own, which goes on where this one is; its learning rate is the base rate.

        Args:
            k: The member.
            module: What it is to update: `fused.unfuse(k)`.

        Raises:
            IndexError: where `k` is not in [-K, K).
        """
        (k,) = member_indices([k], self.K, "k")
        check_module(module)
        hp = self.members[k]
        lr, decay = self._multipliers_of(k)
        parameters, steps = dict(module.named_parameters()), self.steps_KP[k].tolist()
        optimizer = torch_optimizer(parameters, hp, lr, decay)
        if not hp.is_vectorized:
            go_on(optimizer, parameters, self._apart_of(k).state_dict())
            return optimizer
        for name, step in zip(self.names, steps):
            if step:
                moments = {key: rows.parts[name][k].clone() for key, rows in self._moments.items()}
                optimizer.state[parameters[name]] = _torch_state(hp, step, moments)
        # Through torch's own checks, which also put each tensor where this kind of optimizer wants it.
        optimizer.load_state_dict(optimizer.state_dict())
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` restores, hyperparameters included: tensors and plain values only."""
        return {
            "members": [{**vars(hp), "make": hp.make is not None} for hp in self.members],
            "names": list(self.names),
            "state": {
                name: {key: rows.parts[name].clone() for key, rows in self._moments.items()} for name in self.names
            },
            "apart": [self._apart[k].state_dict() if k in self._apart else None for k in range(self.K)],
            "steps": self.steps_KP.clone(),
            "lr_factor": self.lr_factor_K.clone(),
            "schedule": None if self._schedule_SK is None else (self._schedule_SK.clone(), self._next.clone()),
            "lr_multipliers": self._lr_multipliers_KP.clone(),
            "weight_decay_multipliers": self._decay_multipliers_KP.clone(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, members: Sequence[int] | None = None) -> None:
        """Restore what `state_dict` returned.

        Args:
            state_dict: Of as many members as the model has, or of more.
            members: Which of the members in `state_dict` to load, in this order, as after `keep(members)`; all if None.

        Raises:
            ValueError: where it is of other parameters, of another number of members than the model has, or of a member
                whose optimizer a function made, in place of one without.
            IndexError: where one of `members` is not in [-K, K) of the K in `state_dict`.
        """
        check_mapping("state_dict", state_dict, "members", "names", *_STATE)
        if list(state_dict["names"]) != self.names:
            raise ValueError("`state_dict` is of an optimizer for other parameters")
        K = len(state_dict["members"])
        chosen = list(range(K)) if members is None else member_indices(members, K, "members")
        if len(chosen) != self.fused.K:
            raise ValueError(f"`state_dict` has {len(chosen)} members, but must have {self.fused.K}, as the model has")
        own = [hp.make for hp in self.members]
        self.members = [_hyperparameters(state_dict["members"][k], own[i]) for i, k in enumerate(chosen)]
        self._moments = {}
        for name, moments in state_dict["state"].items():
            for key, moment in moments.items():
                self._moment(key).parts[name].copy_(moment if members is None else member_rows(moment, chosen))
        self.steps_KP = state_dict["steps"][chosen]
        self.lr_factor_K = state_dict["lr_factor"][chosen]
        self._schedule_SK = None
        if state_dict["schedule"] is not None:
            table_SK, at = state_dict["schedule"]
            self._schedule_SK, self._next = table_SK[:, chosen], at.clone()
        self._lr_multipliers_KP = state_dict["lr_multipliers"][chosen]
        self._decay_multipliers_KP = state_dict["weight_decay_multipliers"][chosen]
        self._tabulate()
        self._apart = {}
        saved = state_dict.get("apart", [None] * K)
        for position, k in enumerate(chosen):
            if saved[k] is not None and not self.members[position].is_vectorized:
                self._apart_of(position).load_state_dict(saved[k])

    def _per_parameter(self, name: str, multipliers: Multipliers | None) -> Tensor:
        """Multipliers as [K, P], each member's taken from those of its optimizer."""
        known = {**self.fused.stacked, **self.fused.shared}
        check_multipliers(name, multipliers, known)
        columns = {kind: (multipliers or {}).get(kind, {}) for kind in KINDS}
        rows = [[columns[hp.kind].get(name, 1.0) for name in self.names] for hp in self.members]
        return torch.tensor(rows, dtype=torch.float64)

    def _tabulate(self) -> None:
        """Work out what stays as it is from step to step."""
        self._runs = list(runs_of(self.members))
        decay_K = torch.tensor([hp.decay for hp in self.members], dtype=torch.float64)
        lr_K = torch.tensor([hp.lr for hp in self.members], dtype=torch.float64)
        self._lr_KP = lr_K[:, None] * self._lr_multipliers_KP.cpu()
        self._decay_KP = decay_K[:, None] * self._decay_multipliers_KP.cpu()
        self._compare_histories()
        self._move(self.fused.stacked[self.names[0]].device, force=True)

    def _move(self, device: torch.device, *, force: bool = False) -> None:
        if self.steps_KP.device == device and not force:
            return
        self.steps_KP, self.lr_factor_K = self.steps_KP.to(device), self.lr_factor_K.to(device)
        if self._schedule_SK is not None:
            self._schedule_SK, self._next = self._schedule_SK.to(device), self._next.to(device)
        for run in self._runs:
            run.to(device)
        self.changes += 1
        self._tiles: dict[Hashable, list[Tile]] = {}
        self._increments: dict[tuple[str, ...], Tensor] = {}

    def _follow_schedule(self) -> None:
        if self._schedule_SK is not None:
            torch.index_select(self._schedule_SK, 0, self._next, out=self.lr_factor_K[None])
            self._next.add_(1).clamp_(max=len(self._schedule_SK) - 1)

    def _compare_histories(self) -> None:
        """Note which parameters have taken as many steps as each other."""
        self._history = numbered(map(tuple, self.steps_KP.T.tolist()))

    def _count(self, present: Sequence[str], takes: Tensor | None) -> None:
        """Count a step for parameters that have a gradient, of members that take it."""
        taken: Tensor | int = 1 if takes is None else takes[:, None].to(self.steps_KP.dtype)
        if len(present) == len(self.names):
            self.steps_KP += taken
            return
        taking = set(present)

        def increment_P() -> Tensor:  # noqa: N802
            return torch.tensor([float(name in taking) for name in self.names]).to(self.steps_KP)

        self.steps_KP += kept(self._increments, tuple(present), increment_P) * taken
        self._history = numbered((h, name in taking) for h, name in zip(self._history, self.names))

    @contextmanager
    def _left_alone(self, stacked: Mapping[str, nn.Parameter], takes: Tensor | None) -> Iterator[None]:
        """Undo a step for members that have no gradient of a parameter where others have one."""
        without = {name: ks for name, ks in self.fused.unreached().items() if name in self._index}
        saved = {n: [t[ks] for t in (stacked[n], *self._moments_of(n))] for n, ks in without.items()}
        yield
        for name, ks in without.items():
            for tensor, before in zip_longest((stacked[name], *self._moments_of(name)), saved[name]):
                tensor[ks] = 0 if before is None else before
            self.steps_KP[ks, self._index[name]] -= 1 if takes is None else takes[ks].to(self.steps_KP.dtype)
        if without:
            self._compare_histories()

    def _step_members(self, stacked: Mapping[str, nn.Parameter], present: Sequence[str], takes: Tensor | None) -> None:
        stay = set() if takes is None else {k for k, taken in enumerate(takes.tolist()) if not taken}
        factors = self.lr_factor_K.tolist()
        lr_KP = (self._lr_KP * self.lr_factor_K[:, None]).tolist()
        decay_KP, steps_KP = self._decay_KP.tolist(), self.steps_KP.tolist()
        for run in self._runs:
            slots: list[list[native.Slot]] = [[] for _ in run.members]
            for name in present:
                i = self._index[name]
                tensors = self._tensors(run, name, stacked)
                for r, (p, g, *own) in enumerate(zip(*(t[run.start : run.stop].unbind() for t in tensors))):
                    k = run.start + r
                    slots[r].append(native.Slot(p, g.contiguous(), own, lr_KP[k][i], decay_KP[k][i], steps_KP[k][i]))
            for r, hp in enumerate(run.members):
                if run.start + r not in stay:
                    native.update(hp, slots[r], factors[run.start + r])

    def _step_apart(self, stacked: Mapping[str, nn.Parameter], present: Sequence[str], takes: Tensor | None) -> None:
        """Update those members that torch updates, one after another."""
        members = [k for k, hp in enumerate(self.members) if not hp.is_vectorized]
        if not members:
            return
        unreached, factors = self.fused.unreached(), self.lr_factor_K.tolist()
        for k in members:
            if takes is None or bool(takes[k]):
                reached = ((n, stacked[n].grad) for n in present if k not in unreached.get(n, ()))
                gradients = {name: grad[k] for name, grad in reached if grad is not None}
                self._apart_of(k).update({name: stacked[name][k] for name in self.names}, gradients, factors[k])
        for name in present:
            increment_version(stacked[name])

    def _apart_of(self, k: int) -> Apart:
        """The optimizer of a member that torch updates."""
        if k not in self._apart:
            stacked = self.fused.stacked
            views = {name: stacked[name][k] for name in self.names}
            self._apart[k] = Apart(self.members[k], views, *self._multipliers_of(k))
        return self._apart[k]

    def _multipliers_of(self, k: int) -> tuple[dict[str, float], dict[str, float]]:
        """One member's, of learning rates and of weight decays, by name of the parameter."""
        lr, decay = (of_KP[k].tolist() for of_KP in (self._lr_multipliers_KP, self._decay_multipliers_KP))
        return dict(zip(self.names, lr)), dict(zip(self.names, decay))

    def _tensors(self, run: Run, name: str, stacked: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """A parameter with its gradient and the moments that the run's rule takes, [K, ...] each."""
        parameter = stacked[name]
        assert parameter.grad is not None
        return [parameter, parameter.grad, *(self._moment(key).parts[name] for key in run.moments)]

    def _step_rows(self, stacked: Mapping[str, nn.Parameter], present: Sequence[str], takes: Tensor | None) -> None:
        flat = self.fused.flat(self.names)
        flat.gather({name: stacked[name] for name in self.names})
        factor_K1 = self.lr_factor_K[:, None]
        for tile in self._tiles_of(present, flat.values.layout):
            moments = [self._moment(key) for key in tile.run.moments]
            stored = [rows.blocks[tile.segment.block] for rows in (flat.values, flat.gradients, *moments)]
            steps_K1 = self.steps_KP.narrow(1, self._index[tile.segment.names[0]], 1)
            tile.update(stored, steps_K1, factor_K1, None if takes is None else takes[:, None])
        for name in present:
            # What autograd has kept for a backward pass is no longer what it was.
            increment_version(stacked[name])

    def _tiles_of(self, present: Sequence[str], layout: Layout) -> list[Tile]:
        """The tiles that parameters with a gradient make, kept for the steps that have the same."""
        key = (tuple(present), tuple(self._history))
        return kept(self._tiles, key, lambda: list(self._make_tiles(present, layout)))

    def _make_tiles(self, present: Sequence[str], layout: Layout) -> Iterator[Tile]:
        device = self.steps_KP.device
        steps = {name: self._history[self._index[name]] for name in present}
        both_PK = torch.stack([self._lr_KP, self._decay_KP]).permute(2, 0, 1)
        multipliers = dict(zip(self.names, numbered(map(str, both_PK.tolist()))))
        for segment in segments(layout, steps, multipliers, self.K, device):
            columns = [self._index[name] for name in segment.names]
            for run in self._runs:
                lr_RP, decay_RP = (t[run.start : run.stop, columns] for t in (self._lr_KP, self._decay_KP))
                yield Tile(run, segment, lr_RP, decay_RP, device)

    def _moment(self, key: str) -> Rows:
        if key not in self._moments:
            stacked = {name: self.fused.stacked[name] for name in self.names}
            device = stacked[self.names[0]].device
            self._moments[key] = Rows.zeros(layout_of(stacked), self.K, device)
        return self._moments[key]

    def _moments_of(self, name: str) -> list[Tensor]:
        return [rows.parts[name] for rows in self._moments.values()]


def _hyperparameters(saved: Mapping[str, Any], make: Any) -> Hyperparameters:
    if not saved.get("make"):
        return Hyperparameters(**{**saved, "make": None})
    require(make is not None, "state_dict", saved, "loaded by an optimizer whose members have the same functions")
    return Hyperparameters(**{**saved, "make": make})


def _torch_state(hp: Hyperparameters, step: float, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if hp.kind == "sgd":
        return {"momentum_buffer": moments["first"]} if hp.momentum else {}
    return {"step": torch.tensor(step), "exp_avg": moments["first"], "exp_avg_sq": moments["second"]}


def _check_factors(name: str, factors: Tensor) -> None:
    fine = bool(((factors >= 0) & factors.isfinite()).all())
    require(fine, name, factors.tolist(), "finite numbers >= 0")
