"""Stages 1 and 2: many configurations on fused surrogates, halved at each rung.

Whichever device is free takes the next group: of trials of one kind, which train as one fused model, and of a size that
leaves the other free devices their share. On one device, each rung trains every trial that is left to the same
milestone, then compares them all at once: who trained first, or beside whom, does not matter.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from fusion import OPTIMIZERS, fusion_key

from .fused import Group, GroupOutcome, GroupTask, multipliers
from .planning import Widths
from .problem import Problem, Trial
from .run import Run, metric_lines
from .schedulers import Ladder, SuccessiveHalving, milestones, rank
from .search import Search
from .space import DEFAULT_OPTIMIZER
from .store import Unit
from .targets import TargetTrainer
from .train import Span
from .transfer import check_transfer

SWEEP_SHARE = 0.5
"""Of a time budget, what the sweep may spend; the rest trains the finalists."""

FINALISTS = "surrogate/finalists"


@dataclass(frozen=True)
class Finished:
    """A group that a device has trained.

    Attributes:
        task: What it was asked for.
        outcome: What it gave.
        seconds: Wall time that it took.
    """

    task: GroupTask
    outcome: GroupOutcome
    seconds: float


class Devices(TargetTrainer, Protocol):
    """The part of a backend that the sweep needs: devices that each train one group at a time."""

    def idle(self) -> Sequence[int]:
        """The devices that have nothing to do."""
        ...

    def busy(self) -> bool:
        """Whether any group is under way."""
        ...

    def speed(self, device: int, kind: str) -> float | None:
        """Epochs of a trial of this kind per second, as measured; None before."""
        ...

    def machine(self, device: int) -> str:
        """Equal for devices that are equally fast."""
        ...

    def plan(self, device: int, trial: Trial, kind: str, count: int) -> Widths:
        """How a device would best group so many trials of a kind, of which `trial` is one."""
        ...

    def start(self, device: int, task: GroupTask) -> None:
        """Have an idle device train a group."""
        ...

    def finished(self) -> Sequence[Finished]:
        """Groups that are done since the last call; waits for one."""
        ...

    def told(self, share: float, best: Sequence[int]) -> None:
        """Told, after each group, of the share of the sweep that is done, and of its `top_k` best trials so far."""
        ...


class AllTrialsFailed(RuntimeError):
    """No trial of a stage ended with a finite metric."""


def sweep(run: Run, search: Search, devices: Devices) -> list[int]:
    """Try every configuration on its surrogate, halving at each milestone, until the `top_k` best are left.

    Args:
        run: Gets each trial and its metrics.
        search: Gives the configurations; all pass the first rung before it is decided.
        devices: Train groups.

    Returns:
        The finalists' numbers, best first; at most `top_k`.

    Raises:
        AllTrialsFailed: where no trial has a finite metric.
    """
    return _Sweep(run, search, devices).finalists()


class _Sweep:
    """Where a sweep stands: which trials can be fused, how far each is, and which checkpoint it would go on from."""

    def __init__(self, run: Run, search: Search, devices: Devices) -> None:
        settings = run.settings
        self._run, self._search, self._devices = run, search, devices
        stops = milestones(settings.grace_period, settings.max_t, settings.reduction_factor)
        self._halving = SuccessiveHalving(stops, settings.reduction_factor, settings.mode, keep_at_least=settings.top_k)
        self._ladder = Ladder(self._halving, settings.num_samples)
        self._kinds: dict[int, str] = {}
        self._sources: dict[int, str] = {}
        self._widths: dict[tuple[str, str], Widths] = {}
        self._done = 0
        # An earlier process's groups, in the order in which they were finished.
        self._recorded = [key for key in run.store.units() if "/group-" in key]

    def finalists(self) -> list[int]:
        self._show()
        found = self._climb()
        self._run.progress.end()
        # The finalists start anew at full size.
        self._run.store.discard(self._sources.values())
        return self._run.decide(FINALISTS, lambda: found[: self._run.settings.top_k])

    def _climb(self) -> list[int]:
        run, ladder, devices = self._run, self._ladder, self._devices
        while True:
            if (rung := ladder.complete()) is not None:
                if (finalists := self._halve(*rung)) is not None:
                    return finalists
            elif (key := self._next_recorded()) is not None:
                self._take_in(key, run.recall(key))
            elif ladder.hungry():
                self._admit()
            elif run.store.done(FINALISTS):  # a time budget ended the sweep in an earlier process
                return self._deepest()
            else:
                self._dispatch()
                if not devices.busy():
                    run.progress.say("the sweep's share of `time_budget_s` is spent: going on with the best so far")
                    return self._deepest()
                for finished in devices.finished():
                    self._record(finished)

    def _show(self) -> None:
        self._run.progress.begin("surrogates", self._ladder.epochs - self._done)

    def _admit(self) -> None:
        """Build each trial's surrogate, to see with whom it can be fused; a trial whose model fails, fails alone."""
        run, first = self._run, self._halving.milestones[0]
        if not (trials := self._search.next_trials()):
            self._ladder.admitted_all()
            return
        run.trials |= {trial.number: trial for trial in trials}
        unit = run.unit(f"surrogate/kinds-from-{trials[0].number}", lambda: _kinds(run.problem, trials))
        self._kinds |= {int(number): kind for number, kind in unit.value.items()}
        self._ladder.admit(trial.number for trial in trials)
        self._ladder.reach(first, {trial.number: math.nan for trial in trials if trial.number not in self._kinds})

    def _dispatch(self) -> None:
        for device in self._devices.idle():
            nothing_yet = not any(stage == "surrogate" for stage, _ in self._run.metrics) and not self._devices.busy()
            if self._run.out_of_time(SWEEP_SHARE) and not nothing_yet:
                return
            waiting = self._ladder.waiting()
            if waiting is None:
                return
            start, stop, numbers = waiting
            task = self._task(device, Span(start, stop), numbers)
            self._ladder.begin(stop, task.group.members)
            self._devices.start(device, task)

    def _task(self, device: int, span: Span, numbers: Sequence[int]) -> GroupTask:
        trials = self._run.trials
        # Members of one optimizer side by side: their update is then one slice of each fused parameter.
        order = sorted(numbers, key=lambda n: (OPTIMIZERS.index(_optimizer(trials[n])), n))
        kind = self._kinds[order[0]]
        count = Counter(self._kinds[n] for n in order)[kind]
        idle = self._devices.idle()
        widths = {d: self._planned(d, kind, order[0], count) for d in idle}
        measured = {d: speed for d in idle if (speed := self._devices.speed(d, kind)) is not None}
        speeds = measured if len(measured) == len(idle) else {d: widths[d].rate for d in idle}
        group = next_group(self._kinds, order, widths[device], speeds[device] / sum(speeds.values()))
        return GroupTask(
            key=f"surrogate/to-{span.stop}/group-{min(group.members)}",
            group=group,
            sources=tuple(sorted({self._sources[n] for n in group.members if n in self._sources})),
            span=span,
            batch_size=trials[group.members[0]].batch_size,
        )

    def _planned(self, device: int, kind: str, number: int, count: int) -> Widths:
        """How to group the trials of a kind on a device."""
        run, width = self._run, self._run.settings.fusion
        if width != "auto":
            return Widths(width)
        machine = self._devices.machine(device)
        if (kind, machine) not in self._widths:
            plan = run.store.once(
                f"surrogate/widths-of-{kind} on {machine}",
                lambda: asdict(self._devices.plan(device, run.trials[number], kind, count)),
            )
            self._widths[kind, machine] = Widths(**plan.value)
        return self._widths[kind, machine]

    def _record(self, finished: Finished) -> None:
        """Keep what a device has done: first the checkpoint, then the journal's lines."""
        run, task, outcome = self._run, finished.task, finished.outcome
        run.store.save(task.key, {"parts": outcome.checkpoint})
        lines = [line for n, history in outcome.history.items() for line in metric_lines("surrogate", n, history)]
        lines += [{"event": "failed", "trial": number, "error": error} for number, error in outcome.failures.items()]
        value = {"members": list(task.group.members), "stop": task.span.stop}
        self._take_in(task.key, run.record(task.key, Unit(value, lines, finished.seconds)))

    def _next_recorded(self) -> str | None:
        """The next group that an earlier process recorded, once its trials are admitted."""
        if self._recorded and self._kinds.keys() >= set(self._run.store.units()[self._recorded[0]].value["members"]):
            return self._recorded.pop(0)
        return None

    def _take_in(self, key: str, unit: Unit) -> None:
        run, stop, members = self._run, unit.value["stop"], unit.value["members"]
        scores = {n: run.score("surrogate", n) for n in members}
        # The time budget may have ended the group before its milestone.
        there = {n: score for n, score in scores.items() if run.epochs("surrogate", n) >= stop or math.isnan(score)}
        self._ladder.begin(stop, members)
        self._ladder.reach(stop, there)
        self._sources |= dict.fromkeys(members, key)
        self._done += sum(line["event"] == "metrics" for line in unit.lines)
        for n in members:
            self._search.tell(n, run.epochs("surrogate", n), scores[n])
        self._devices.told(min(1.0, self._done / self._ladder.epochs), self._ladder.best(run.settings.top_k))

    def _halve(self, stop: int, scores: Mapping[int, float]) -> list[int] | None:
        """Decide a rung over all of its trials, and tell user and searcher; the finalists if it was the last."""
        run = self._run
        kept = run.decide(f"surrogate/to-{stop}/kept", lambda: self._halving.promote(scores))
        if not kept:
            raise _all_failed(run, len(scores), stop)
        best = f"best {run.problem.metric} {scores[kept[0]]:.4g} (trial {kept[0]})"
        run.progress.say(f"surrogates at epoch {stop}: {len(kept)} of {len(scores)} go on, {best}")
        last = self._ladder.decide(stop, kept)
        for n in sorted(scores.keys() if last else scores.keys() - self._ladder.above(stop)):
            self._search.close(n, run.epochs("surrogate", n), scores[n])
        if run.settings.check_transfer and stop == self._halving.milestones[0]:
            run.transfer = check_transfer(run, scores, stop, self._devices)
            self._show()
        return kept if last else None

    def _deepest(self) -> list[int]:
        """The finalists where the time budget ended a rung early: who trained longest, then who is best."""
        run = self._run
        numbers = sorted(run.trials)
        scores = {n: run.score("surrogate", n) for n in numbers}
        best_first = [numbers[i] for i in rank(list(scores.values()), run.settings.mode)]
        left = [n for n in best_first if math.isfinite(scores[n])]
        if not left:
            raise _all_failed(run, len(numbers), self._halving.milestones[0])
        for n in numbers:
            self._search.close(n, run.epochs("surrogate", n), scores[n])
        return sorted(left, key=lambda n: -run.epochs("surrogate", n))


def _all_failed(run: Run, count: int, stop: int) -> AllTrialsFailed:
    told = (
        f"all {count} trials diverged or failed by epoch {stop} of the sweep: no finite {run.problem.metric}; "
        f"lower `lr` or look into {run.store.path / 'journal.jsonl'}"
    )
    if run.failures:
        number, error = next(iter(run.failures.items()))
        told += f"\n\nTrial {number} failed with\n{error}"
    return AllTrialsFailed(told)


def _optimizer(trial: Trial) -> str:
    return str(trial.config.get("optimizer", DEFAULT_OPTIMIZER))


def _kinds(problem: Problem, trials: Sequence[Trial]) -> Unit:
    """Digest of each trial's fusion key and batch size: what it must share with those that it is fused with."""
    kinds: dict[int, str] = {}
    lines = []
    for trial in trials:
        lines.append({"event": "trial", "trial": trial.number, "config": dict(trial.config)})
        try:
            surrogate = problem.surrogate(trial)
            # Targets of different widths can have surrogates of one width, for which learning rates scale differently.
            scales = repr(multipliers(surrogate, problem.width_ratio))
            key = fusion_key(surrogate, trial.batch_size, scales)
        except Exception:
            lines.append({"event": "failed", "trial": trial.number, "error": traceback.format_exc()})
        else:
            kinds[trial.number] = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    return Unit(kinds, lines)


def next_group(kinds: Mapping[int, str], waiting: Sequence[int], widths: Widths, share: float = 1.0) -> Group:
    """The next group to train: the first waiting trial, and others of its kind, in even parts.

    Args:
        kinds: Each trial's kind; trials of one kind can be fused.
        waiting: The trials; members keep this order.
        widths: How many of the first one's kind to train as one.
        share: Of all that wait, what the group may take at most: the rest is for other free devices.

    >>> kinds = {0: "a", 1: "b", 2: "a", 3: "a"}
    >>> next_group(kinds, [0, 1, 2, 3], Widths(2)).members, next_group(kinds, [0, 1, 2, 3], Widths(4)).members
    ((0, 2), (0, 2, 3))
    >>> next_group(kinds, [0, 1, 2, 3], Widths(4), share=0.5).members
    (0, 2)
    """
    kind = kinds[waiting[0]]
    of_kind = [number for number in waiting if kinds[number] == kind]
    parts = -(-len(of_kind) // widths.most)
    size = min(-(-len(of_kind) // parts), math.ceil(len(waiting) * share))
    return Group(kind, tuple(of_kind[:size]), fused=size >= widths.least)
