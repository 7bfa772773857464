"""Train a group of K surrogates as one fused model on a device, from one milestone to the next."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from fusion import FusionMismatch, FusionWarning, dry_run, fusion_key
from fusion.evaluate.backoff import free_memory, is_out_of_memory
from fusion.evaluate.microbatch import can_be_split, split
from fusion.warn import warn
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import EpochMetrics, Group, History, Outcome, Task
from hydro_rasda.data import ALONE, Batch
from hydro_rasda.problem.objective import scalars
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.checkpoints import DamagedCheckpoint
from hydro_rasda.training.cuda_graphs import records
from hydro_rasda.training.folds_and_repeats import members_first, shares_of
from hydro_rasda.training.fused_learner import FusedLearner, State
from hydro_rasda.training.loop import train_epochs
from hydro_rasda.training.user_loop import train_own_surrogate

_MICRO_BATCHES = (
    "a trial does not fit memory with whole batches of {}: it trains with each in micro-batches, one after the other, "
    "whose gradients are averaged. Up to rounding that is the same where the loss is a mean over examples, or returned "
    "with its weight; batch "
    "normalization, though, sees a micro-batch at a time, and dropout draws other numbers"
)


Load = Callable[[str], Mapping[str, Any]]
OnEpoch = Callable[[int, EpochMetrics], None]


class LiveGroup:
    """The group that this process trained last, kept on its device, so that survivors continue without a rebuild."""

    def __init__(self) -> None:
        self._key, self._group, self._trials = "", Group("", (), False), dict[int, Trial]()
        self._learner: FusedLearner | None = None

    def put(self, key: str, group: Group, trials: Mapping[int, Trial], learner: FusedLearner) -> None:
        """Keep a group and its learner, so that `take` can reuse them; `key` is that of the task that trained them."""
        learner.optimizer.zero_grad()
        self._key, self._group, self._learner = key, group, learner
        self._trials = {number: trials[number] for number in group.members}

    def drop(self) -> None:
        self._learner = None

    def take(self, problem: Problem, trials: Mapping[int, Trial], task: Task) -> FusedLearner | None:
        """Return the kept learner, prepared for a task; None if the task's group must be rebuilt from checkpoints.

        In both cases, this object no longer keeps the group. The learner is reused only if a rebuild would give the
        same result to the last bit. Therefore, the group is rebuilt if modules change their own attributes while they
        run, or if a member's new configuration changes its structure (such as a float in a tuple).
        """
        learner, before = self._learner, self._group
        self.drop()
        (group,) = task.groups
        sources = {number: task.copies.get(number, number) for number in group.members}
        there = task.sources == (self._key,) and {*sources, *sources.values()} <= {*before.members}
        alike = replace(before, members=group.members, kind=group.kind) == group
        own = getattr(as_given(problem.objective), "optimizer_settings", None)
        if learner is None or not there or not alike or own is not None:
            return None
        learner.train_mode(True)
        if learner.fused.attributes_changed:
            return None
        at = {number: k for k, number in enumerate(before.members)}
        each = problem.each("sweep")
        modules = {
            len(each) * k + i: of_model.surrogate(trials[number])
            for k, number in enumerate(group.members)
            if not _is_alike(problem, trials[number], self._trials[sources[number]])
            for i, of_model in enumerate(each)
        }
        key = learner.fused.key
        if any(fusion_key(module) != key for module in modules.values()):
            return None
        pairs = [(at[number], at[source]) for number, source in sources.items()]
        learner.copy({k: of for pair in pairs for k, of in zip(*(_of_models([i], len(each)) for i in pair))})
        learner.keep(_of_models([at[number] for number in group.members], len(each)))
        learner.go_on([trials[number].config for number in group.members for _ in each], modules)
        return learner


def _of_models(positions: Sequence[int], models: int) -> list[int]:
    """Convert positions of trials in a group to those of their models in the fused model, `models` for each trial."""
    return [models * position + at for position in positions for at in range(models)]


def _is_alike(problem: Problem, trial: Trial, source: Trial) -> bool:
    return trial.config == source.config or problem.builds_alike(trial.config, source.config)


def train_group(
    problem: Problem,
    trials: Mapping[int, Trial],
    task: Task,
    load: Load,
    should_stop: Callable[[], bool] = lambda: False,
    on_epoch: OnEpoch = lambda epoch, metrics: None,
    live: LiveGroup | None = None,
) -> Outcome:
    """Train a group to its milestone as one fused model. If vmap cannot run the model, members train one by one.

    If members have not trained together before, the group is first compared with each member alone on one batch.

    If memory runs out, the group starts again from its checkpoint without recorded steps. If it runs out again, the
    group's halves train one after the other. If even a single member does not fit, it trains with each batch in
    micro-batches. After any other error, members start again one by one, so that only members that raise by themselves
    fail.

    Args:
        load: Returns the checkpoint of an earlier task by the task's key.
        live: The group that this process trained last; the new group replaces it. None to keep no group.
    """

    members, (group,) = task.members, task.groups
    if problem.is_own("sweep"):
        return train_own_surrogate(problem, trials[task.number], task, load, should_stop, on_epoch)
    halves = False
    # The second try takes less memory, because recorded steps hold memory of their own.
    tries = [problem, problem.with_settings(graph=False)] if records(problem) else [problem]
    for asked in tries:
        try:
            return _train(asked, trials, task, load, should_stop, on_epoch, live or LiveGroup())
        except DamagedCheckpoint:
            raise  # the trials that load the checkpoint are not at fault
        except (Exception, SystemExit) as error:  # an uncaught SystemExit would look like success
            goes_on = is_out_of_memory(error) and asked is not tries[-1]
            halves = is_out_of_memory(error) and not goes_on and _can_be_smaller(problem, trials, task)
            if len(members) == 1 and not goes_on and not halves:
                return Outcome.failed(members[0], traceback.format_exc())
            if isinstance(error, FusionMismatch):
                warn(f"{len(members)} trials train each by itself: {error}", FusionWarning)
        # The failed attempt's tensors can only be freed here, because the error's traceback holds them within `except`.
        free_memory()
        if not goes_on:
            break
    parts = task.smaller() if halves else [replace(task, groups=(group.of([number]),)) for number in members]
    return joined(train_group(problem, trials, part, load, should_stop, on_epoch) for part in parts)


def _can_be_smaller(problem: Problem, trials: Mapping[int, Trial], task: Task) -> bool:
    """Tell whether a task can be made smaller: its group has several members, or its batch can be split further."""
    (group,) = task.groups
    batch_size = trials[group.members[0]].batch_size
    if len(group.members) > 1 or group.micro_batches >= batch_size:
        return len(group.members) > 1
    return can_be_split(next(problem.train_data.epoch(batch_size, task.span.start)))


def _train(
    problem: Problem,
    trials: Mapping[int, Trial],
    task: Task,
    load: Load,
    should_stop: Callable[[], bool],
    on_epoch: OnEpoch,
    live: LiveGroup,
) -> Outcome:
    members, (group,) = task.members, task.groups
    batch_size = trials[members[0]].batch_size
    learner = live.take(problem, trials, task) or _built(problem, trials, task, load)
    if group.micro_batches > 1:
        warn(_MICRO_BATCHES.format(batch_size))
    history: dict[int, History] = {number: [] for number in members}
    for epoch, metrics in train_epochs(learner, problem, task.span, batch_size, members, should_stop):
        for k, number in enumerate(members):
            history[number].append((epoch, {name: values[k] for name, values in metrics.items()}))
        on_epoch(epoch, metrics)
    outcome = Outcome([{"members": list(members), "state": learner.state()}], history, {})
    live.put(task.key, group, trials, learner)
    return outcome


def _built(problem: Problem, trials: Mapping[int, Trial], task: Task, load: Load) -> FusedLearner:
    """Build a group's learner, with initial weights or from checkpoints, and check its fused training on one batch."""
    members, (group,) = task.members, task.groups
    known = False
    if task.sources:
        learner, known = _resume(problem, trials, members, task.sources, load, task.copies)
    else:
        learner = _start(problem, trials, members)
    learner.fused.one_by_one = not group.fused
    learner.micro_batches = max(learner.micro_batches, group.micro_batches)
    if group.compiled and problem.settings.graph is not False:
        learner.compile()
    each = problem.each("sweep")
    (share,) = islice(shares_of(each, trials[members[0]].batch_size, task.span.start, ALONE), 1)
    # `together` is None if the models' batches cannot be put side by side; the models then train one after another.
    together = None if len(each) == 1 else learner.side_by_side(share.batch)
    batch = share.batch if len(each) == 1 else share.batch[0] if together is None else together

    def means(model: nn.Module, part: Batch) -> Mapping[str, Tensor]:
        return scalars(problem.objective(model, part))

    written = learner.fused.written if known else None
    part, own = split(batch, learner.parts_of(batch))[0], together is not None
    tried = members_first(part) if own else part
    dry_run(learner.fused, means, tried, compare=not known, written=written, own_data=own)
    return learner


def joined(outcomes: Iterable[Outcome]) -> Outcome:
    """Join the outcomes of a task's parts into one outcome of the task."""
    whole, *others = outcomes
    for outcome in others:
        whole.checkpoint += outcome.checkpoint
        whole.history |= outcome.history
        whole.failures |= outcome.failures
    return whole


def _start(problem: Problem, trials: Mapping[int, Trial], members: Sequence[int]) -> FusedLearner:
    each = problem.each("sweep")
    modules = [of_model.surrogate(trials[number]) for number in members for of_model in each]
    configs = [trials[number].config for number in members for _ in each]
    return FusedLearner(modules, configs, problem, len(each))


def states_of(problem: Problem, trials: Mapping[int, Trial], number: int, source: str, load: Load) -> list[State]:
    """Return the states from which `SingleLearner` continues a trial's models after a sweep at full width.

    If the trial has fewer models at full size than in the sweep, only the first ones continue.
    """
    learner, _ = _resume(problem, trials, [number], [source], load)
    return [learner.member_state(at) for at in range(problem.settings.models("race"))]


def cut_down(problem: Problem, trials: Mapping[int, Trial], task: Task, load: Load) -> dict[str, Any]:
    """Load the checkpoints from which a task continues. Return one part that holds only the task's members."""
    members = task.members
    learner, _ = _resume(problem, trials, members, task.sources, load, task.copies)
    return {"members": list(members), "state": learner.state()}


def _resume(
    problem: Problem,
    trials: Mapping[int, Trial],
    members: Sequence[int],
    sources: Sequence[str],
    load: Load,
    copies: Mapping[int, int] = MappingProxyType({}),
) -> tuple[FusedLearner, bool]:
    """Build the learner of a group from the checkpoints of the groups in which its members trained before.

    Returns:
        The learner, with members in the order of `members`, and a flag. The flag is True if any member has trained in a
        group of several models. Members that failed the check of fused training have trained one by one, so they do not
        count.
    """
    going_on: dict[int, list[int]] = {}
    for number in members:
        going_on.setdefault(copies.get(number, number), []).append(number)
    models = problem.settings.models("sweep")
    merged: FusedLearner | None = None
    order: list[int] = []
    together = False
    for part in (part for source in sources for part in load(source)["parts"]):
        kept = [number for trained in part["members"] for number in going_on.get(trained, ())]
        if not kept:
            continue
        learner = _start(problem, trials, kept)
        positions = [part["members"].index(copies.get(number, number)) for number in kept]
        copied = not copies.keys().isdisjoint(kept)
        some = copied or len(kept) < len(part["members"])
        learner.load(part["state"], _of_models(positions, models) if some else None, hyperparameters=not copied)
        order += kept
        together = together or models * len(part["members"]) > 1
        if merged is None:
            merged = learner
        else:
            merged.concat(learner)
    assert merged is not None
    merged.keep(_of_models([order.index(number) for number in members], models))
    return merged, together
