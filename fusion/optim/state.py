"""The state of an optimizer of K members: hyperparameters, multipliers, schedules, step counts and moments.

Shape suffixes: K members, P trainable parameters, S steps. Hyperparameters are vectors [K], values that also differ
between parameters are [K, P], and the moments of a parameter are [K, ...].
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.argument_checks import check_each, check_flag, check_mapping, refusal, require
from fusion.keys import RULES, SCHEDULE_FREE
from fusion.members.fused_model import FusedModel, check_fused
from fusion.members.member_indices import copy_rows, member_indices, member_pairs, member_rows, member_vector
from fusion.members.rows import Rows, layout_of
from fusion.optim.adafactor import STATE
from fusion.optim.learned import LEARNED, at_first
from fusion.optim.members_by_rule import runs_of
from fusion.optim.muon import matrices_of
from fusion.optim.native import Alike
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.segments import numbered
from fusion.optim.torch_optimizer import Multipliers, check_multipliers, check_real
from fusion.optim.torch_per_member import Apart, changed_options
from fusion.optim.update_rules import RULE_OF
from fusion.optim.vectorized import Tile

_TABLES = ("steps_KP", "lr_factor_K", "_estimates_K3", "_lr_multipliers_KP", "_decay_multipliers_KP")
_STATE = ("state", "steps", "lr_factor", "estimates", "schedule", "lr_multipliers", "weight_decay_multipliers")


class OptimizerState:
    """The state of a `FusedOptimizer`, without its updates. `FusedOptimizer` describes arguments and attributes."""

    def __init__(
        self,
        fused: FusedModel,
        members: Sequence[Hyperparameters],
        own_lr_factors: Sequence[Mapping[str, float]] | None = None,
        *,
        names: Sequence[str] | None = None,
        lr_multipliers: Multipliers | None = None,
        weight_decay_multipliers: Multipliers | None = None,
    ) -> None:
        check_fused(fused)
        check_each("members", members, Hyperparameters, fused.K)
        self.fused = fused
        self.members = list(members)
        fused.part_parameters(name for name, p in fused.shared.items() if p.requires_grad)
        self.names = [n for n, p in fused.stacked.items() if p.requires_grad and (names is None or n in names)]
        self._among = None if names is None else frozenset(names)
        if names is None and fused.parts.keys() != {*self.names}:
            fused.set_parts({})
        if not self.names:
            raise ValueError("`fused` has no stacked parameter that needs gradients")
        check_real({hp.kind for hp in self.members}, {name: fused.stacked[name] for name in self.names})
        self._index = {name: i for i, name in enumerate(self.names)}
        self._moments: dict[str, Rows] = {}
        self._apart: dict[int, Apart] = {}
        self._matrices = matrices_of(fused, self.members, self.names)
        self.changes = 0
        self._schedule_SK: Tensor | None = None
        self._next = torch.zeros(1, dtype=torch.int64)
        self.steps_KP = torch.zeros(fused.K, len(self.names), dtype=torch.float64)
        self.lr_factor_K = torch.ones(fused.K, dtype=torch.float64)
        self._estimates_K3 = at_first(self.members)
        self._lr_multipliers_KP = self._per_parameter("lr_multipliers", lr_multipliers)
        if own_lr_factors is not None:
            check_each("own_lr_factors", own_lr_factors, Mapping, fused.K)
            rows = [[own.get(name, 1.0) for name in self.names] for own in own_lr_factors]
            self._lr_multipliers_KP *= torch.tensor(rows, dtype=torch.float64)
        self._decay_multipliers_KP = self._per_parameter("weight_decay_multipliers", weight_decay_multipliers)
        self._tabulate()

    @property
    def K(self) -> int:  # noqa: N802
        """Return the number of members."""
        return len(self.members)

    def set_lr_factor(self, factor: float | Sequence[float] | Tensor) -> None:
        """Multiply the base learning rates, which were given at construction, by `factor`: a number, or [K]."""
        factor_K = member_vector("factor", factor, self.K)
        _check_factors("factor", factor_K)
        if self._schedule_SK is not None:
            self._schedule_SK, self.changes = None, self.changes + 1
        self.lr_factor_K.copy_(factor_K)

    @torch.inference_mode(False)
    def schedule(self, factors: Sequence[Sequence[float]]) -> None:
        """Set the factors [S, K] of the next S steps in advance, so that no step waits. Later steps use the last row.

        The schedule stays after `keep`, and `state_dict` saves it. After `concat`, set it again.

        Raises:
            ValueError: if `factors` are not [S, K] with S >= 1.
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

    @torch.inference_mode(False)
    def keep(self, indices: Sequence[int]) -> None:
        """Drop all members but those at `indices`, in that order, as `FusedModel.keep` does."""
        chosen = member_indices(indices, self.K)
        self.members = [self.members[k] for k in chosen]
        # Copy the optimizers, because an index may be repeated, and copies of a member must not share an optimizer.
        self._apart = {i: copy.deepcopy(self._apart[k]) for i, k in enumerate(chosen) if k in self._apart}
        for name in _TABLES:
            setattr(self, name, getattr(self, name)[chosen])
        self._moments = {key: rows.keep(chosen) for key, rows in self._moments.items()}
        if self._schedule_SK is not None:
            self._schedule_SK = self._schedule_SK[:, chosen]
        self._tabulate()

    def copy(self, sources: Mapping[int, int]) -> None:
        """Make members copies of others, in place, including hyperparameters and schedule.

        Call the model's `copy` with the same `sources`; `FusedModel.copy` describes them.
        """
        targets, copied = member_pairs(sources, self.K)
        if not targets:
            return
        for name in _TABLES:
            copy_rows(getattr(self, name), targets, copied)
        for rows in self._moments.values():
            rows.overwrite(targets, copied)
        if self._schedule_SK is not None:
            copy_rows(self._schedule_SK.T, targets, copied)
        members, apart = list(self.members), dict(self._apart)
        for k, source in zip(targets, copied):
            self.members[k] = members[source]
            self._apart.pop(k, None)
            if source in apart:
                self._apart[k] = copy.deepcopy(apart[source])
        self._tabulate()

    def take_hyperparameters(self, other: OptimizerState) -> None:
        """Replace hyperparameters and multipliers by those of the optimizer `other`; keep all other state.

        The averages of Schedule-Free members stay as they are.

        Args:
            other: An optimizer of the same parameters, whose members use the same kinds of optimizers.

        Raises:
            ValueError: if the two update different parameters, or a member uses another kind of optimizer.
        """
        kinds = [[hp.kind for hp in each.members] for each in (self, other)]
        require(self.names == other.names and kinds[0] == kinds[1], "other", kinds[1], f"an optimizer of {kinds[0]}")
        before, self.members = self.members, list(other.members)
        multipliers = {k: self._multipliers_of(k) for k in self._apart}
        self._lr_multipliers_KP = other._lr_multipliers_KP.to(self._lr_multipliers_KP.device)
        self._decay_multipliers_KP = other._decay_multipliers_KP.to(self._decay_multipliers_KP.device)
        for k, apart in list(self._apart.items()):
            if before[k] != self.members[k] or multipliers[k] != self._multipliers_of(k):
                del self._apart[k]
                self._apart_of(k).load_state_dict(apart.state_dict(), but=changed_options(before[k], self.members[k]))
        self._tabulate()
        self._keep_averages(before)

    @torch.inference_mode(False)
    def concat(self, other: OptimizerState) -> None:
        """Append the members of `other`, with their state, as `FusedModel.concat` does.

        Raises:
            ValueError: if the two update different parameters.
        """
        require(isinstance(other, OptimizerState), "other", other, "a FusedOptimizer")
        if self.names != other.names:
            raise ValueError("`other` optimizes other parameters, so its members cannot join")
        self._schedule_SK = None
        keys = {**self._moments, **other._moments}
        self._moments = {key: self._moment(key).concat(other._moment(key)) for key in keys}
        self._apart |= {self.K + k: copy.deepcopy(apart) for k, apart in other._apart.items()}
        self.members = self.members + other.members
        for name in _TABLES:
            ours = getattr(self, name)
            setattr(self, name, torch.cat([ours, getattr(other, name).to(ours.device)]))
        self._tabulate()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` restores, including hyperparameters, as tensors and plain values."""
        return {
            "members": [{**vars(hp), "make": hp.make is not None} for hp in self.members],
            "names": list(self.names),
            "state": {
                name: {key: rows.parts[name].clone() for key, rows in self._moments.items() if name in rows.parts}
                for name in self.names
            },
            "apart": [self._apart[k].state_dict() if k in self._apart else None for k in range(self.K)],
            "steps": self.steps_KP.clone(),
            "lr_factor": self.lr_factor_K.clone(),
            "estimates": self._estimates_K3.clone(),
            "schedule": None if self._schedule_SK is None else (self._schedule_SK.clone(), self._next.clone()),
            "lr_multipliers": self._lr_multipliers_KP.clone(),
            "weight_decay_multipliers": self._decay_multipliers_KP.clone(),
        }

    @torch.inference_mode(False)
    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, members: Sequence[int] | None = None, hyperparameters: bool = True
    ) -> None:
        """Restore the result of `state_dict`. Load the model's state before this call.

        Args:
            state_dict: The state of as many members as the model has, or of more.
            members: Indices of the members in `state_dict` to load, in this order; None for all.
            hyperparameters: If True, restore hyperparameters and multipliers, too. If False, keep those of this
                optimizer; the averages of Schedule-Free members are still those that were saved.

        Raises:
            ValueError: if `state_dict` has other parameters or another number of members than the model. Also if a
                user's function made the optimizer of a loaded member, but this optimizer has no function for it. Also
                if `hyperparameters` is False and a member had another kind of optimizer.
            IndexError: if one of `members` is not in [-K, K) of the K in `state_dict`.
        """
        check_mapping("state_dict", state_dict, "members", "names", *_STATE)
        if list(state_dict["names"]) != self.names:
            raise ValueError("`state_dict` is of an optimizer for other parameters")
        K = len(state_dict["members"])
        chosen = list(range(K)) if members is None else member_indices(members, K, "members")
        if len(chosen) != self.fused.K:
            raise ValueError(f"`state_dict` has {len(chosen)} members, but must have {self.fused.K}, as the model has")
        check_flag("hyperparameters", hyperparameters)
        before = [_hyperparameters(state_dict["members"][k], hp.make) for k, hp in zip(chosen, self.members)]
        rules = [[RULE_OF.get(hp.kind, hp.kind) for hp in each] for each in (before, self.members)]
        told = f"True unless members have the optimizers of `state_dict`, {rules[0]}"
        require(hyperparameters or rules[0] == rules[1], "hyperparameters", False, told)
        if hyperparameters:
            self.members = before
            self._lr_multipliers_KP = state_dict["lr_multipliers"][chosen]
            self._decay_multipliers_KP = state_dict["weight_decay_multipliers"][chosen]
        self._moments = {}
        for name, moments in state_dict["state"].items():
            for key, moment in moments.items():
                self._moment(key).parts[name].copy_(moment if members is None else member_rows(moment, chosen))
        self.steps_KP = state_dict["steps"][chosen]
        self.lr_factor_K = state_dict["lr_factor"][chosen]
        self._estimates_K3 = state_dict["estimates"][chosen]
        self._schedule_SK = None
        if state_dict["schedule"] is not None:
            table_SK, at = state_dict["schedule"]
            self._schedule_SK, self._next = table_SK[:, chosen], at.clone()
        self._tabulate()
        self._apart = {}
        saved = state_dict.get("apart", [None] * K)
        for position, k in enumerate(chosen):
            if saved[k] is not None and not self.members[position].is_vectorized:
                changed = changed_options(before[position], self.members[position])
                self._apart_of(position).load_state_dict(saved[k], but=changed)
        self._keep_averages(before)

    @torch.no_grad()
    def _keep_averages(self, before: Sequence[Hyperparameters]) -> None:
        """Change the weights for training so that the averages stay the same, although `average_share` has changed.

        Args:
            before: The earlier hyperparameters of each member.
        """
        for k, (hp, was) in enumerate(zip(self.members, before)):
            if hp.kind in SCHEDULE_FREE and hp.average_share != was.average_share:
                for name, z in self._moment("iterate").parts.items():
                    if self.steps_KP[k, self._index[name]] > 0:
                        y = self.fused.stacked[name][k]
                        y.copy_(torch.lerp(z[k], y, hp.average_share / was.average_share))

    def _per_parameter(self, name: str, multipliers: Multipliers | None) -> Tensor:
        """Return multipliers as [K, P]: each member has those given for its optimizer. Errors call them `name`."""
        known = {**self.fused.stacked, **self.fused.shared}
        check_multipliers(name, multipliers, known)
        columns = {rule: (multipliers or {}).get(rule, {}) for rule in RULES}
        rows = [[columns[hp.rule(name in self._matrices)].get(name, 1.0) for name in self.names] for hp in self.members]
        return torch.tensor(rows, dtype=torch.float64)

    def _tabulate(self) -> None:
        """Compute the values that do not change from step to step: runs of members, rates and weight decays [K, P]."""
        self._runs = list(runs_of(self.members))
        self._matrices = matrices_of(self.fused, self.members, self.names)
        lr_K, decay_K = torch.tensor([[hp.lr, hp.decay] for hp in self.members], dtype=torch.float64).T
        self._lr_KP = lr_K[:, None] * self._lr_multipliers_KP.cpu()
        self._decay_KP = decay_K[:, None] * self._decay_multipliers_KP.cpu()
        self._compare_histories()
        self._move(self.fused.stacked, force=True)

    def _move(self, stacked: Mapping[str, Tensor], *, force: bool = False) -> None:
        """Move the state to the device and the dtypes of the parameters, `stacked`.

        If they have not changed, do nothing, unless `force` is True.
        """
        device, dtypes = stacked[self.names[0]].device, {parameter.dtype for parameter in stacked.values()}
        if not force and self.steps_KP.device == device and self._dtypes == dtypes:
            return
        self._dtypes: set[torch.dtype] = dtypes
        self.steps_KP, self.lr_factor_K = self.steps_KP.to(device), self.lr_factor_K.to(device)
        if self._schedule_SK is not None:
            self._schedule_SK, self._next = self._schedule_SK.to(device), self._next.to(device)
        self._estimates_K3 = self._estimates_K3.to(device)
        for run in self._runs:
            run.to(device)
            # Make these vectors views of `_estimates_K3`, so that they have the numbers that the rule learns.
            run.vectors |= zip(LEARNED.get(run.kind, ()), self._estimates_K3[run.start : run.stop].split(1, 1))
        for key, rows in self._moments.items():
            parts = {name: values.to(self.fused.stacked[name]) for name, values in rows.parts.items()}
            if any(part is not rows.parts[name] for name, part in parts.items()):
                self._moments[key] = Rows.of(layout_of(parts, self.fused.parts), parts)
        self.changes += 1
        self._tiles: dict[Hashable, list[Tile]] = {}
        self._groups: dict[Hashable, list[Alike]] = {}
        self._increments: dict[tuple[str, ...], Tensor] = {}
        self._under_prodigy: dict[tuple[bool, ...], Tensor] = {}

    def _follow_schedule(self) -> None:
        if self._schedule_SK is not None:
            torch.index_select(self._schedule_SK, 0, self._next, out=self.lr_factor_K[None])
            self._next.add_(1).clamp_(max=len(self._schedule_SK) - 1)

    def _compare_histories(self) -> None:
        """Number the parameters so that equal numbers mean equal step counts in all members."""
        self._history = numbered(map(tuple, self.steps_KP.T.tolist()))

    def _apart_of(self, k: int) -> Apart:
        """Return the separate optimizer of member `k`, which torch updates; make it if it is missing."""
        if k not in self._apart:
            stacked = self.fused.stacked
            views = {name: stacked[name][k] for name in self.names}
            self._apart[k] = Apart(self.members[k], views, *self._multipliers_of(k))
        return self._apart[k]

    def _multipliers_of(self, k: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return member `k`'s multipliers of learning rates and its multipliers of weight decays, by parameter name."""
        lr, decay = (of_KP[k].tolist() for of_KP in (self._lr_multipliers_KP, self._decay_multipliers_KP))
        return dict(zip(self.names, lr)), dict(zip(self.names, decay))

    def _moment(self, key: str) -> Rows:
        if key not in self._moments:
            like = {
                name: STATE[key](p) if key in STATE else p
                for name, p in ((name, self.fused.stacked[name]) for name in self.names)
            }
            shaped = {name: tensor for name, tensor in like.items() if tensor is not None}
            device = self.fused.stacked[self.names[0]].device
            self._moments[key] = Rows.zeros(layout_of(shaped, self.fused.parts), self.K, device)
        return self._moments[key]

    def _moments_of(self, name: str) -> list[Tensor]:
        return [rows.parts[name] for rows in self._moments.values() if name in rows.parts]


def _hyperparameters(saved: Mapping[str, Any], make: Any) -> Hyperparameters:
    if not saved.get("make"):
        return Hyperparameters(**{**saved, "make": None})
    require(make is not None, "state_dict", saved, "loaded by an optimizer whose members have the same functions")
    return Hyperparameters(**{**saved, "make": make})


def _check_factors(name: str, factors: Tensor) -> None:
    fine = bool(((factors >= 0) & factors.isfinite()).all())
    require(fine, name, factors.tolist(), "finite numbers >= 0")
