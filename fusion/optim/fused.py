"""One optimizer for K members, each with its own hyperparameters and, if members differ in it, its own update rule.

Shape suffixes: K members, P trainable parameters, N elements of these in a member, S steps. Hyperparameters are vectors
[K], and moments are [K, N]. Values that also differ between parameters (multipliers, step counts) are [K, P].

A run is a series of adjacent members with one update rule (`RuleMembers`). Parameters are in rows if each member's
values fill one row of a matrix [K, N] (`fusion.members.rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fusion.argument_checks import require
from fusion.keys import ONE_PASS, SCHEDULE_FREE
from fusion.members.bounded_cache import kept
from fusion.members.member_indices import member_indices
from fusion.members.rows import Layout, make_dense
from fusion.optim import adafactor, muon, native
from fusion.optim.learned import LEARNED
from fusion.optim.members_by_rule import RuleMembers
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.schedule_free import write
from fusion.optim.segments import numbered, segments
from fusion.optim.state import OptimizerState
from fusion.optim.torch_optimizer import torch_optimizer
from fusion.optim.update_rules import RULE_OF, UPDATE_RULES, momentum_product
from fusion.optim.vectorized import Tile
from fusion.structure import check_module


class FusedOptimizer(OptimizerState):
    """Updates the stacked parameters of a `FusedModel`, each member as `torch.optim` would update it alone.

    Adjacent members with the same rule are updated together, with all their parameters of one dtype at once. If members
    with the same optimizer are adjacent, K deep models take as few operators as one model with one layer. For that,
    `step` makes parameters and gradients views of matrices [K, N], unless torch's own kernels for CPUs are faster. Muon
    updates all matrices of one shape together; Adafactor updates parameters one by one. Members with adadelta, adagrad,
    asgd or a user's optimizer are updated one after another, by torch's own code.

    Args:
        fused: The model. Parameters are found by name, so the optimizer stays valid after `fused.keep`.
        members: The hyperparameters of the K members.
        own_lr_factors: `own_lr_factors[k][parameter]` is a further factor of member k's learning rate, 1 if absent.
        names: Names of the parameters to update if another optimizer updates the rest, see `FusedByPart`; None for all.
        lr_multipliers: `lr_multipliers[optimizer][parameter]` is a factor of the learning rate, 1 if absent.
        weight_decay_multipliers: The same for the weight decay.

    Attributes:
        lr_factor_K: [K], the schedule's factor of each member's learning rate; 1 at first.
        steps_KP: [K, P], number of updates of each member's parameters.
        changes: Number of times that tensors were replaced by others, as in `FusedModel`.

    Raises:
        ValueError: if the number of hyperparameters is not K, or multipliers name no parameter.
    """

    @property
    def can_be_recorded(self) -> bool:
        """Return whether `step` can be recorded, because it exchanges no values between host and device.

        Recording is not possible with Muon, NAdam, or members that torch updates, nor with Adafactor on a GPU.
        """
        waiting = ("muon", "nadam", *(["adafactor"] if self.lr_factor_K.is_cuda else []))
        return all(hp.is_vectorized and hp.kind not in waiting for hp in self.members)

    def __getstate__(self) -> dict[str, Any]:
        """Leave views of tensors out of copies and pickles, where they would become independent tensors."""
        return {**vars(self), "_runs": [], "_tiles": {}, "_groups": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the attributes, and make the views again."""
        vars(self).update(state)
        self._tabulate()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to 0, as torch's optimizers do."""
        self.fused.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, takes: Tensor | None = None) -> None:
        """Update every parameter that has a gradient; as in torch, all other parameters stay as they are.

        Args:
            takes: [K] of booleans on the model's device, as `LossScale.unscale` returns them. Members with True take
                the step; None means all members. Members with False stay as they are, and the step does not count for
                them, but their gradients must be finite.
        """
        if self.fused.K != self.K:
            raise RuntimeError(f"the optimizer has {self.K} members, but its model has {self.fused.K}")
        fits = takes is None or (isinstance(takes, Tensor) and takes.dtype == torch.bool and takes.shape == (self.K,))
        require(fits, "takes", takes, f"a tensor of {self.K} booleans, one for each member")
        stacked = self.fused.stacked
        # Find parameters that were frozen when the optimizer was made. Do not look for them if this optimizer updates
        # only some parameters and the model has no parts, because another optimizer may then update the others.
        known = self._index if self._among is None else self.fused.parts
        for name, p in {**self.fused.common.params(), **stacked}.items() if known else ():
            if p.requires_grad and p.grad is not None and name not in known:
                raise RuntimeError(f"`{name}` was frozen when the optimizer was made: make a new one")
        self._move(stacked)
        self._follow_schedule()
        make_dense(stacked.values())
        present = [name for name in self.names if stacked[name].grad is not None]
        if not present:
            return
        takes = self._learning(takes)
        self._count(present, takes)
        with self._left_alone(stacked, takes):
            self._step_apart(stacked, present, takes)
            self._step_whole(stacked, present, takes)
            have_kernels = all(run.members[0].kind in (*ONE_PASS, "muon") for run in self._runs)
            if have_kernels and native.takes_in_place(self.fused, [stacked[name] for name in self.names]):
                self._step_members(stacked, present, takes)
            elif any(self._in_rows(run, present) for run in self._runs):
                self._step_rows(stacked, present, takes)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the weights for evaluation into the model, inside this context; then restore the weights for training.

        These weights differ for Schedule-Free members, and for users' optimizers that have `train()` and `eval()`.
        """
        stacked, averaging = self.fused.stacked, [run for run in self._runs if run.kind in SCHEDULE_FREE]
        with torch.inference_mode(False):  # later steps must be able to write to tensors that are made here
            self._move(stacked)
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

    @torch.inference_mode(False)
    def unfuse(self, k: int, module: nn.Module) -> torch.optim.Optimizer:
        """Return member `k`'s optimizer as one of torch's, in the same state; its learning rate is the base rate.

        If it has the modes `train()` and `eval()`, it is in training mode.

        Args:
            module: The module that it updates: the result of `fused.unfuse(k)`.

        Raises:
            IndexError: if `k` is not in [-K, K).
        """
        (k,) = member_indices([k], self.K, "k")
        check_module(module)
        hp = self.members[k]
        lr, decay = self._multipliers_of(k)
        own, steps = set(self.names), self.steps_KP[k].tolist()
        parameters = {name: p for name, p in module.named_parameters() if name in own}
        if missing := [name for name in self.names if name not in parameters]:
            raise ValueError(f"`module` has no parameter {missing[0]!r}, but must be the result of `fused.unfuse({k})`")
        optimizer = torch_optimizer(parameters, hp, lr, decay, self._matrices)
        if not hp.is_vectorized:
            self._apart_of(k).hand_over(optimizer, parameters)
            return optimizer
        for name, step in zip(self.names, steps):
            if step:
                kept_of = ((key, rows.parts.get(name)) for key, rows in self._moments.items())
                moments = {key: moment[k].clone() for key, moment in kept_of if moment is not None}
                optimizer.state[parameters[name]] = _torch_state(hp.rule(name in self._matrices), hp, step, moments)
        first, second, taken = self._estimates_K3[k].tolist()
        for group in optimizer.param_groups:
            # A Schedule-Free group keeps its largest learning rate and a sum of squared learning rates. Both were
            # computed without multipliers. Multiply the rate by the group's factor, and the sum by the factor's square.
            factor = group["lr"] / hp.lr if hp.kind in SCHEDULE_FREE else 1.0
            group.update(zip(LEARNED.get(hp.kind, ()), (factor * first, factor**2 * second, int(taken))))
        # Load the state once, because `load_state_dict` moves each tensor to the device that this optimizer needs.
        optimizer.load_state_dict(optimizer.state_dict())
        return optimizer

    def _learning(self, takes: Tensor | None) -> Tensor | None:
        """Return `takes`, but False for Prodigy members with a learning rate of 0: prodigyopt skips their steps."""
        under_prodigy = [hp.kind == "prodigy" for hp in self.members]
        if not any(under_prodigy):
            return takes

        def as_tensor() -> Tensor:
            return torch.tensor(under_prodigy).to(self.lr_factor_K.device)

        learn = ~(kept(self._under_prodigy, tuple(under_prodigy), as_tensor) & (self.lr_factor_K == 0))
        return learn if takes is None else learn & takes

    def _count(self, present: Sequence[str], takes: Tensor | None) -> None:
        """Count the step, for parameters with a gradient and members that take it."""
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
        """At the end of this context, undo the update of each parameter in the members that have no gradient of it."""
        without = {name: ks for name, ks in self.fused.unreached().items() if name in self._index}
        saved = {n: [t[ks] for t in (stacked[n], *self._moments_of(n))] for n, ks in without.items()}
        for name, ks in without.items():
            for moment in self._moments_of(name):
                moment[ks] = 0  # a moment of 0 adds nothing to Prodigy's sums over parameters
        try:
            yield
        finally:  # `finally`, because Ctrl-C may end the step
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
            for group in self._groups_of(run, present, stacked):
                i = group.column
                grads = [_gradient(stacked[name])[run.start : run.stop].contiguous() for name in group.names]
                gradients = native.views_of([grads])
                for k, hp, (parameters, *moments), (own,) in zip(
                    range(run.start, run.stop), run.members, group.views, gradients
                ):
                    if k not in stay:
                        tensors = (parameters, own, *moments)
                        native.update(hp, tensors, lr_KP[k][i], decay_KP[k][i], steps_KP[k][i], factors[k])

    def _groups_of(
        self, run: RuleMembers, present: Sequence[str], stacked: Mapping[str, nn.Parameter]
    ) -> list[native.Alike]:
        """Group a run's parameters with a gradient by equal multipliers and step counts.

        The groups are cached for later steps on the same tensors.
        """
        names = self._in_rows(run, present)
        roles = [stacked, *(self._moment(key).parts for key in run.moments)]
        addresses = tuple(role[name].data_ptr() for role in roles for name in names)
        key = (run.start, tuple(names), tuple(self._history), addresses)
        return kept(self._groups, key, lambda: list(self._make_groups(run, names, roles)))

    def _make_groups(
        self, run: RuleMembers, names: Sequence[str], roles: Sequence[Mapping[str, Tensor]]
    ) -> Iterator[native.Alike]:
        alike = dict(zip(self.names, numbered(zip(self._multipliers(), self._history))))
        for number in dict.fromkeys(alike[name] for name in names):
            own = [name for name in names if alike[name] == number]
            views = native.views_of([[role[name][run.start : run.stop] for name in own] for role in roles])
            yield native.Alike(own, self._index[own[0]], views)

    def _multipliers(self) -> list[int]:
        """Number the parameters so that equal numbers mean equal multipliers in all members."""
        both_PK = torch.stack([self._lr_KP, self._decay_KP]).permute(2, 0, 1)
        return numbered(map(str, both_PK.tolist()))

    def _step_apart(self, stacked: Mapping[str, nn.Parameter], present: Sequence[str], takes: Tensor | None) -> None:
        """Update the members whose optimizer is not vectorized, one after another, by their own torch optimizers."""
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

    def _step_whole(self, stacked: Mapping[str, nn.Parameter], present: Sequence[str], takes: Tensor | None) -> None:
        """Update the parameters whose elements depend on each other: Muon's matrices, and all of Adafactor's."""
        for run in self._runs:
            names = [name for name in present if self._is_whole(run, name)]
            if not names:
                continue
            own, device = slice(run.start, run.stop), self.lr_factor_K.device
            stored = [[t[own] for t in self._tensors(run, name, stacked)] for name in names]
            lr_RP = self._lr_KP[own].to(device) * self.lr_factor_K[own, None]
            tables = (lr_RP, self._decay_KP[own].to(device), self.steps_KP[own])
            rates, decays, steps = ([table[:, self._index[name]] for name in names] for table in tables)
            taking = None if takes is None else takes[own]
            if run.kind == "muon":
                muon.update([tensors[:3] for tensors in stored], run, rates, decays, taking)
            else:
                adafactor.update(stored, run, rates, decays, steps, taking)

    def _tensors(self, run: RuleMembers, name: str, stacked: Mapping[str, nn.Parameter]) -> list[Tensor]:
        """Return a parameter, its gradient, and the moments that the run's rule uses, [K, ...] each."""
        parameter = stacked[name]
        kept_of = (self._moment(key).parts.get(name) for key in run.moments)
        return [parameter, _gradient(parameter), *(moment for moment in kept_of if moment is not None)]

    def _step_rows(self, stacked: Mapping[str, nn.Parameter], present: Sequence[str], takes: Tensor | None) -> None:
        flat = self.fused.flat(self.fused.parts or self.names)
        flat.gather({name: stacked[name] for name in self.names})
        factor_K1, takes_K1 = self.lr_factor_K[:, None], None if takes is None else takes[:, None]
        tiles = self._tiles_of(present, flat.values.layout)
        moments = {run.start: [self._moment(key) for key in run.moments] for run in self._runs}

        def update(tile: Tile, *, before: bool = False) -> Tensor | None:
            both = (flat.values, flat.gradients, *moments[tile.run.start])
            stored = [rows.blocks[tile.segment.block] for rows in both]
            steps_K1 = self.steps_KP.narrow(1, self._index[tile.segment.names[0]], 1)
            if self.fused.updated_in_turn and tile.run.kind in ONE_PASS and tile.worth_a_call and native.takes(stored):
                tile.update_in_turn(stored, steps_K1, factor_K1, takes_K1)
                return None
            return tile.update(stored, steps_K1, factor_K1, takes_K1, before=before)

        for run in self._runs:
            if run.rule.learn is not None:
                own, passes = slice(run.start, run.stop), run.rule.before is not None
                of_run = [update(tile, before=True) for tile in tiles if tile.run is run] if passes else []
                found = [sums for sums in of_run if sums is not None]
                sums_R2 = torch.stack(found).sum(0, dtype=torch.float64) if found else None
                taking = None if takes_K1 is None else takes_K1[own]
                run.rule.learn(run.members, run.vectors, self._estimates_K3[own], sums_R2, factor_K1[own], taking)
        for tile in tiles:
            update(tile)
        for name in present:
            # Tell autograd that the parameter has changed. If a backward pass needs the old values, it then fails.
            increment_version(stacked[name])

    def _tiles_of(self, present: Sequence[str], layout: Layout) -> list[Tile]:
        """Return a `Tile` for each run and segment of parameters with a gradient; they are cached for later steps."""
        key = (tuple(present), tuple(self._history))
        return kept(self._tiles, key, lambda: list(self._make_tiles(present, layout)))

    def _make_tiles(self, present: Sequence[str], layout: Layout) -> Iterator[Tile]:
        device = self.steps_KP.device
        steps = {name: self._history[self._index[name]] for name in present}
        multipliers = dict(zip(self.names, self._multipliers()))
        for _, runs in groupby(self._runs, key=lambda run: run.kind in _WHOLE and run.kind):
            alike = list(runs)
            own = {name: steps[name] for name in self._in_rows(alike[0], present)}
            for segment in segments(layout, own, multipliers, self.K, device):
                columns = [self._index[name] for name in segment.names]
                for run in alike:
                    lr_RP, decay_RP = (t[run.start : run.stop, columns] for t in (self._lr_KP, self._decay_KP))
                    yield Tile(run, segment, lr_RP, decay_RP, device)

    def _is_whole(self, run: RuleMembers, name: str) -> bool:
        """Return whether the run's rule updates a parameter as a whole, because its elements depend on each other."""
        return run.kind == "adafactor" or (run.kind == "muon" and name in self._matrices)

    def _in_rows(self, run: RuleMembers, present: Sequence[str]) -> Sequence[str]:
        """Select the parameters in `present` that the run's rule updates element by element, as updates in rows do."""
        return [name for name in present if not self._is_whole(run, name)] if run.kind in _WHOLE else present


_WHOLE = ("adafactor", "muon")
"""Optimizers that update some parameters as a whole instead of element by element."""


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _torch_state(rule: str, hp: Hyperparameters, step: float, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if rule.startswith("muon"):
        return {"momentum_buffer": moments["first"]}
    torch_names = UPDATE_RULES[RULE_OF[rule]].moments
    named = {torch_name: moments[name] for name, torch_name in torch_names.items() if name in moments}
    if "momentum_buffer" in named and not hp.momentum:
        del named["momentum_buffer"]
    if rule in ("sgd", *SCHEDULE_FREE):
        return named
    if rule == "nadam":
        named["mu_product"] = momentum_product(torch.tensor(hp.beta1), torch.tensor(step)).float()
    return {"step": torch.tensor(step), **named}
