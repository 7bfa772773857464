"""K surrogates trained as one: what a device does with a group of trials between two milestones."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion import (
    OPTIMIZERS,
    FusedModel,
    FusionMismatch,
    FusionWarning,
    clip_grad_norm_,
    dry_run,
    fuse,
    fused_optimizer,
    lr_factor,
)
from fusion.keys import read
from fusion.memory import is_out_of_memory
from fusion.streams import seed_generators
from surrogate import lr_multipliers, weight_decay_multipliers

from .data import Batch
from .forks import evenly
from .problem import Problem, Trial
from .train import EpochMetrics, History, Span, train_epochs

State = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Trials that can train as one fused model.

    Attributes:
        kind: Digest of the fusion key that they share.
        members: Their numbers.
        fused: Whether they do; otherwise one after another, which is faster for a few.
    """

    kind: str
    members: tuple[int, ...]
    fused: bool

    def of(self, members: Sequence[int]) -> Group:
        """Some of the members."""
        return replace(self, members=tuple(members), fused=self.fused and len(members) > 1)


class FusedLearner:
    """K fused models, each with its own hyperparameters."""

    def __init__(self, modules: Sequence[nn.Module], configs: Sequence[Mapping[str, Any]], problem: Problem) -> None:
        self.fused: FusedModel = fuse(modules)
        self.optimizer = fused_optimizer(self.fused, configs, **multipliers(modules[0], problem.width_ratio))
        self._configs = list(configs)
        self._objective = problem.objective
        self._max_t = problem.max_t

    def seed(self, seeds: Sequence[int]) -> None:
        if self.fused.K == 1:
            # It draws from the global generators as any model does, without the time that it takes to exchange them.
            seed_generators(seeds[0])
        else:
            self.fused.seed(seeds)

    def train_mode(self, training: bool) -> None:
        self.fused.train(training)

    def step(self, batch: Batch, epoch: float, steps: float) -> Mapping[str, Tensor]:
        self.optimizer.set_lr_factor([lr_factor(config, epoch, self._max_t, steps) for config in self._configs])
        metrics = self.fused.map(self._objective, batch)
        self.optimizer.zero_grad()
        metrics["loss"].sum().backward()
        norms = [read(config, "grad_clip") for config in self._configs]
        if any(norms):
            clip_grad_norm_(self.fused, [norm or math.inf for norm in norms])
        self.optimizer.step()
        return {name: value.detach() for name, value in metrics.items()}

    def evaluate(self, batch: Batch) -> Mapping[str, Tensor]:
        with torch.no_grad():
            result: Mapping[str, Tensor] = self.fused.map(self._objective, batch)
            return result

    def state(self) -> State:
        """Weights, buffers and optimizer state of all members."""
        return {"model": self.fused.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.fused.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def member_state(self, position: int) -> State:
        """One member's weights, buffers and optimizer state, as `SingleLearner` loads them."""
        module = self.fused.unfuse(position)
        return {"model": module.state_dict(), "optimizer": self.optimizer.unfuse(position, module).state_dict()}

    def keep(self, positions: Sequence[int]) -> None:
        """Drop all members but these."""
        if list(positions) != list(range(len(self._configs))):
            self.fused.keep(positions)
            self.optimizer.keep(positions)
            self._configs = [self._configs[p] for p in positions]

    def concat(self, other: FusedLearner) -> None:
        """Take in another learner's members, after its own."""
        self.fused.concat(other.fused)
        self.optimizer.concat(other.optimizer)
        self._configs += other._configs


def multipliers(module: nn.Module, width_ratio: float) -> dict[str, Any]:
    """muP's per-parameter factors for each optimizer, as `fusion` takes them; none for a model of full width."""
    if width_ratio == 1:
        return {}
    return {
        "lr_multipliers": {name: lr_multipliers(module, name) for name in OPTIMIZERS},
        "weight_decay_multipliers": {name: weight_decay_multipliers(module, name) for name in OPTIMIZERS},
    }


@dataclass(frozen=True)
class GroupTask:
    """A unit of work: groups that train beside each other, from the last milestone to the next.

    Attributes:
        key: Name of the unit in the journal and of the checkpoint that it leaves.
        groups: The trials; groups are independent of each other.
        sources: Keys of the earlier tasks that trained them; empty at the first rung.
        span: Which epochs.
    """

    key: str
    groups: tuple[Group, ...]
    sources: tuple[str, ...]
    span: Span

    @property
    def members(self) -> tuple[int, ...]:
        """The trials of all groups."""
        return tuple(number for group in self.groups for number in group.members)

    def parts(self) -> list[GroupTask]:
        """Each group by itself."""
        return [replace(self, groups=(group,)) for group in self.groups]

    def smaller(self) -> list[GroupTask]:
        """Its groups by themselves; of a single group, each half of its members."""
        if len(self.groups) > 1:
            return self.parts()
        (group,) = self.groups
        return [replace(self, groups=(group.of(half),)) for half in evenly(group.members, 2)]


def group_key(span: Span, members: Iterable[int]) -> str:
    """Name of the unit that trains these trials for a span: no trial begins the same span twice."""
    return f"surrogate/to-{span.stop}/from-{span.start}/group-{min(members)}"


@dataclass
class GroupOutcome:
    """What training a group gave.

    Attributes:
        checkpoint: To go on from: for each fused model that was trained, its members and its state.
        history: Each trial's epochs.
        failures: For each trial that raised, the traceback.
    """

    checkpoint: list[dict[str, Any]]
    history: dict[int, History]
    failures: dict[int, str]


Load = Callable[[str], Mapping[str, Any]]
OnEpoch = Callable[[int, EpochMetrics], None]


def train_group(
    problem: Problem,
    trials: Mapping[int, Trial],
    task: GroupTask,
    load: Load,
    should_stop: Callable[[], bool] = lambda: False,
    on_epoch: OnEpoch = lambda epoch, metrics: None,
) -> GroupOutcome:
    """Train a group to its milestone, fused; one member after another where vmap cannot follow the model.

    Members that have not trained together before are first compared, on one batch, with what each computes alone.

    Where memory runs out, the group's halves start again from its checkpoint, one after the other. Where it raises
    anything else, its members do, one by one, so that only those that raise by themselves fail.

    Args:
        problem: What is tuned.
        trials: All trials by number.
        task: One group, where it starts and where it stops.
        load: Gives an earlier task's checkpoint by its key.
        should_stop: Asked after each epoch.
        on_epoch: Told of each epoch.
    """
    (group,) = task.groups
    members = group.members
    try:
        return _train(problem, trials, task, load, should_stop, on_epoch)
    except Exception as error:
        if len(members) == 1:
            return GroupOutcome([], {members[0]: []}, {members[0]: traceback.format_exc()})
        if isinstance(error, FusionMismatch):
            warnings.warn(f"{len(members)} trials train each by itself: {error}", FusionWarning, stacklevel=2)
        size = -(-len(members) // 2) if is_out_of_memory(error) else 1
    # Only here are the failed group's tensors gone: until then the error's traceback holds them.
    parts = (group.of(members[i : i + size]) for i in range(0, len(members), size))
    return joined(
        train_group(problem, trials, replace(task, groups=(part,)), load, should_stop, on_epoch) for part in parts
    )


def _train(
    problem: Problem,
    trials: Mapping[int, Trial],
    task: GroupTask,
    load: Load,
    should_stop: Callable[[], bool],
    on_epoch: OnEpoch,
) -> GroupOutcome:
    members = task.members
    batch_size = trials[members[0]].batch_size
    known = False
    if task.sources:
        learner, known = _resume(problem, trials, members, task.sources, load)
    else:
        learner = _start(problem, trials, members)
    learner.fused.one_by_one = not task.groups[0].fused
    batch = next(problem.train_data.epoch(batch_size, task.span.start))
    dry_run(learner.fused, problem.objective, batch, compare=not known)
    history: dict[int, History] = {number: [] for number in members}
    for epoch, metrics in train_epochs(learner, problem, task.span, batch_size, members, should_stop):
        for k, number in enumerate(members):
            history[number].append((epoch, {name: values[k] for name, values in metrics.items()}))
        on_epoch(epoch, metrics)
    return GroupOutcome([{"members": list(members), "state": learner.state()}], history, {})


def joined(outcomes: Iterable[GroupOutcome]) -> GroupOutcome:
    """The outcomes of a group's parts as that of the group."""
    whole = GroupOutcome([], {}, {})
    for outcome in outcomes:
        whole.checkpoint += outcome.checkpoint
        whole.history |= outcome.history
        whole.failures |= outcome.failures
    return whole


def _start(problem: Problem, trials: Mapping[int, Trial], members: Sequence[int]) -> FusedLearner:
    built = {number: problem.surrogate(trials[number]) for number in dict.fromkeys(members)}
    return FusedLearner([built[n] for n in members], [trials[n].config for n in members], problem)


def state_of(problem: Problem, trials: Mapping[int, Trial], number: int, source: str, load: Load) -> State:
    """What `SingleLearner` goes on from, of a trial whose surrogate was as wide as the model.

    Args:
        problem: What is tuned.
        trials: All trials by number.
        number: The trial.
        source: Key of the task that trained it last.
        load: Gives a task's checkpoint by its key.
    """
    return _resume(problem, trials, [number], [source], load)[0].member_state(0)


def _resume(
    problem: Problem, trials: Mapping[int, Trial], members: Sequence[int], sources: Sequence[str], load: Load
) -> tuple[FusedLearner, bool]:
    """The fused model of a group whose members were trained in other groups, in the group's order.

    And whether any of them were trained as one: those that were refused as one have trained by themselves.
    """
    merged: FusedLearner | None = None
    order: list[int] = []
    together = False
    for part in (part for source in sources for part in load(source)["parts"]):
        kept = [number for number in part["members"] if number in members]
        if not kept:
            continue
        # Those that are dropped again are not built, which can take longer than an epoch: any of their kind holds their
        # place among the loaded weights.
        learner = _start(problem, trials, [n if n in kept else kept[0] for n in part["members"]])
        learner.load(part["state"])
        learner.keep([part["members"].index(number) for number in kept])
        order += kept
        together = together or len(part["members"]) > 1
        if merged is None:
            merged = learner
        else:
            merged.concat(learner)
    assert merged is not None
    merged.keep([order.index(number) for number in members])
    return merged, together
