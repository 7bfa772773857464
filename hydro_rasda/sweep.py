"""Stages 1 and 2: many configurations on fused surrogates, halved at each rung.

Whichever device is free takes the next groups, one for each of its cores: each of trials of one kind, which train as
one fused model, and together so many that the other free devices have their share. On one device, each rung trains
every trial that is left to the same milestone, then compares them all at once: who trained first, or beside whom, does
not matter.
"""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from fusion import OPTIMIZERS, fusion_key
from fusion.keys import read

from .forks import Died, each, evenly
from .fused import GroupOutcome, GroupTask, multipliers
from .grouping import Waiting, Widths, next_groups
from .planning import Example
from .problem import Problem, Trial
from .run import Run, decision_key, metric_lines
from .schedulers import Ladder, SuccessiveHalving, milestones, rank
from .search import Search
from .store import Line, Unit
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
    """The part of a backend that the sweep needs: devices that each train one task at a time."""

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

    def cores(self, device: int) -> int:
        """How many groups a device trains beside each other."""
        ...

    def plan(self, device: int, kinds: Mapping[str, Example]) -> Mapping[str, Widths]:
        """How a device would best group the trials of each kind."""
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
        self._cores = run.problem.cores
        self._done = 0
        # An earlier process's groups, in the order in which they were finished.
        self._recorded = [key for key in run.store.units() if "/group-" in key]

    def finalists(self) -> list[int]:
        self._show()
        found = self._climb()
        self._run.progress.end()
        # The finalists start anew at full size.
        self._run.store.discard(self._sources.values())
        return self._run.decide(FINALISTS, self._run.trials, lambda: found[: self._run.settings.top_k])

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
            elif run.store.done(
                decision_key(FINALISTS, run.trials)
            ):  # a time budget ended the sweep in an earlier process
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
        unit = run.unit(f"surrogate/kinds-from-{trials[0].number}", lambda: _kinds(run.problem, trials, self._cores))
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
            self._ladder.begin(stop, task.members)
            self._devices.start(device, task)

    def _task(self, device: int, span: Span, numbers: Sequence[int]) -> GroupTask:
        trials, devices = self._run.trials, self._devices
        # Members of one optimizer side by side: their update is then one slice of each fused parameter.
        order = sorted(numbers, key=lambda n: (OPTIMIZERS.index(_optimizer(trials[n])), n))
        of_kind: dict[str, list[int]] = {}
        for n in order:
            of_kind.setdefault(self._kinds[n], []).append(n)
        kind = next(iter(of_kind))
        idle = devices.idle()
        widths = {d: self._planned(d, of_kind) for d in idle}
        measured = {d: speed for d in idle if (speed := devices.speed(d, kind)) is not None}
        speeds = measured if len(measured) == len(idle) else {d: widths[d][kind].rate for d in idle}
        waiting = {kind: Waiting(of, widths[device][kind], self._steps(of[0])) for kind, of in of_kind.items()}
        groups = next_groups(waiting, devices.cores(device), speeds[device] / sum(speeds.values()))
        members = {n for group in groups for n in group.members}
        return GroupTask(
            key=f"surrogate/to-{span.stop}/group-{min(members)}",
            groups=tuple(groups),
            sources=tuple(sorted({self._sources[n] for n in members if n in self._sources})),
            span=span,
        )

    def _steps(self, number: int) -> float:
        """Of an epoch; 1 where the data have no length."""
        return self._run.problem.train_data.steps(self._run.trials[number].batch_size) or 1.0

    def _planned(self, device: int, of_kind: Mapping[str, Sequence[int]]) -> dict[str, Widths]:
        """For each kind of trials, how to group them on a device."""
        run, devices = self._run, self._devices
        if run.settings.fusion != "auto":
            return dict.fromkeys(of_kind, Widths(run.settings.fusion))
        names = {kind: f"surrogate/widths-of-{kind} on {devices.machine(device)}" for kind in of_kind}
        examples = {kind: (run.trials[numbers[0]], len(numbers)) for kind, numbers in of_kind.items()}
        if asked := {kind: example for kind, example in examples.items() if not run.store.done(names[kind])}:
            started = time.perf_counter()
            planned = devices.plan(device, asked)
            seconds = (time.perf_counter() - started) / len(asked)
            for kind in asked:
                run.record(names[kind], Unit(asdict(planned[kind]), [], seconds))
        return {kind: _widths(run.store.units()[name].value) for kind, name in names.items()}

    def _record(self, finished: Finished) -> None:
        """Keep what a device has done: first the checkpoint, then the journal's lines."""
        run, task, outcome = self._run, finished.task, finished.outcome
        run.store.save(task.key, {"parts": outcome.checkpoint})
        lines = [line for n, history in outcome.history.items() for line in metric_lines("surrogate", n, history)]
        lines += [{"event": "failed", "trial": number, "error": error} for number, error in outcome.failures.items()]
        value = {"members": list(task.members), "stop": task.span.stop}
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
        kept = run.decide(f"surrogate/to-{stop}/kept", scores, lambda: self._halving.promote(scores))
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
    kind: str = read(trial.config, "optimizer")
    return kind


def _kinds(problem: Problem, trials: Sequence[Trial], cores: int) -> Unit:
    """Digest of each trial's fusion key and batch size: what it must share with those that it is fused with."""
    parts = evenly(trials, cores)
    found: dict[int, _Kind] = {}
    for part, given in zip(parts, each([partial(_kinds_of, problem, part) for part in parts], cores)):
        found |= given if not isinstance(given, Died) else {t.number: _Kind(error=given.how) for t in part}
    lines: list[Line] = []
    for trial in trials:
        lines.append({"event": "trial", "trial": trial.number, "config": dict(trial.config)})
        if (error := found[trial.number].error) is not None:
            lines.append({"event": "failed", "trial": trial.number, "error": error})
    return Unit({number: kind.digest for number, kind in found.items() if kind.error is None}, lines)


@dataclass(frozen=True)
class _Kind:
    digest: str = ""
    error: str | None = None


def _kinds_of(problem: Problem, trials: Sequence[Trial]) -> dict[int, _Kind]:
    return {trial.number: _kind(problem, trial) for trial in trials}


def _kind(problem: Problem, trial: Trial) -> _Kind:
    try:
        surrogate = problem.surrogate(trial)
        # Targets of different widths can have surrogates of one width, for which learning rates scale differently.
        scales = repr(multipliers(surrogate, problem.width_ratio))
        key = fusion_key(surrogate, trial.batch_size, scales)
    except Exception:
        return _Kind(error=traceback.format_exc())
    return _Kind(hashlib.sha256(repr(key).encode()).hexdigest()[:12])


def _widths(value: Mapping[str, Any]) -> Widths:
    """From the journal, whose keys are strings."""
    throughput = {int(width): rate for width, rate in value["throughput"].items()}
    return Widths(value["most"], value["least"], throughput)
