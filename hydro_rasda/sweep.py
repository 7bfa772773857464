"""Stages 1 and 2: many configurations on fused surrogates, halved at each rung.

Whichever device is free takes the next groups, one for each of its cores: each of trials of one kind, which train as
one fused model, and together so many that the other free devices have their share. On one device, each rung trains
every trial that is left to the same milestone, then compares them all at once: who trained first, or beside whom, does
not matter.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from fusion import OPTIMIZERS
from fusion.keys import read

from .chance import warn_of_chance
from .fused import GroupOutcome, GroupTask, group_key
from .grouping import Waiting, Widths, next_groups
from .kinds import find_kinds
from .problem import Trial
from .run import Run, metric_lines
from .schedulers import Ladder, SuccessiveHalving, milestones, rank
from .search import Search
from .store import Unit
from .targets import TargetTrainer
from .train import Span
from .transfer import check_transfer
from .unread import Unread, warn_of_unread

FINALISTS = "surrogate/finalists"

_KEPT = re.compile(r"surrogate/to-(\d+)/kept")


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

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]]) -> Mapping[str, Widths]:
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
    """Where a sweep stands: which trials can be fused, and how far each is."""

    def __init__(self, run: Run, search: Search, devices: Devices) -> None:
        settings = run.settings
        self._run, self._search, self._devices = run, search, devices
        stops = milestones(settings.grace_period, settings.max_t, settings.reduction_factor)
        self._halving = SuccessiveHalving(stops, settings.reduction_factor, settings.mode, keep_at_least=settings.top_k)
        self._ladder = Ladder(self._halving, settings.num_samples)
        self._kinds: dict[int, str] = {}
        self._unread: list[Unread] = []
        self._cores = run.problem.cores
        self._done = 0
        # An earlier process's groups, in the order in which they were finished.
        self._recorded = [key for key in run.store.units() if "/group-" in key]
        # By milestone, those whom an earlier decision let go on, perhaps over fewer trials.
        self._chosen: dict[int, set[int]] = {stop: set() for stop in stops}
        for key, unit in run.store.units().items():
            if (kept := _KEPT.match(key)) is not None:
                self._chosen.setdefault(int(kept[1]), set()).update(unit.value)

    def finalists(self) -> list[int]:
        self._show()
        with self._run.store.sweeping():
            found = self._climb()
        self._run.progress.end()
        return found

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
            else:
                self._dispatch()
                if not devices.busy():
                    run.end_by_time("surrogate")
                    run.progress.say("the sweep's share of `time_budget_s` is spent: going on with the best so far")
                    return self._deepest()
                for finished in devices.finished():
                    self._record(finished)

    def _show(self) -> None:
        self._run.progress.begin("surrogates", self._ladder.epochs - self._done)

    def _admit(self) -> None:
        run, first = self._run, self._halving.milestones[0]
        if not (trials := self._search.next_trials()):
            self._ladder.admitted_all()
            return
        run.trials |= {trial.number: trial for trial in trials}
        # A run that was given more samples has built the first of them before.
        unseen = trials
        while unseen:
            unit = run.unit(
                f"surrogate/kinds-from-{unseen[0].number}", partial(find_kinds, run.problem, unseen, self._cores)
            )
            self._kinds |= {int(number): kind for number, kind in unit.value.items()}
            seen = {line["trial"] for line in unit.lines}
            unseen = [trial for trial in unseen if trial.number not in seen]
            self._unread += [line.get("unread", {}) for line in unit.lines if line["event"] == "trial"]
        if len(run.trials) >= run.settings.num_samples and not run.derived:
            warn_of_unread(self._unread)
        self._ladder.admit(trial.number for trial in trials)
        self._ladder.reach(first, {trial.number: math.nan for trial in trials if trial.number not in self._kinds})

    def _dispatch(self) -> None:
        while self._may_begin() and (idle := self._devices.idle()) and (waiting := self._waiting()) is not None:
            task = self._task(idle[0], *waiting)
            self._ladder.begin(task.span.stop, task.members)
            self._devices.start(idle[0], task)

    def _may_begin(self) -> bool:
        """Whether there is time; the first group of all begins without."""
        nothing_yet = not any(stage == "surrogate" for stage, _ in self._run.metrics) and not self._devices.busy()
        return nothing_yet or not self._run.out_of_time("surrogate")

    def _waiting(self) -> tuple[Span, list[int]] | None:
        """What a device may begin: trials that go on from the same epoch, those behind first."""
        while (waiting := self._ladder.waiting()) is not None:
            _, stop, numbers = waiting
            if known := self._scores(stop, numbers):  # promoted early now, and trained before
                self._ladder.reach(stop, known)
                continue
            there = {key for key in {self._run.sources.get(n) for n in numbers} if key and self._run.store.has(key)}
            starts = {n: self._run.epochs("surrogate", n) if self._run.sources.get(n) in there else 0 for n in numbers}
            start = min(starts.values())
            return Span(start, stop), [n for n in numbers if starts[n] == start]
        return None

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
            key=group_key(span, members),
            groups=tuple(groups),
            sources=tuple(sorted({self._run.sources[n] for n in members})) if span.start else (),
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
        trials = {kind: [run.trials[n] for n in numbers] for kind, numbers in of_kind.items()}
        if asked := {kind: of for kind, of in trials.items() if not run.store.done(names[kind])}:
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
        # A trial that came back to the race after its checkpoint was gone has trained its first epochs again.
        fresh = {n: [at for at in h if at[0] > run.epochs("surrogate", n)] for n, h in outcome.history.items()}
        lines = [line for n, history in fresh.items() for line in metric_lines("surrogate", n, history)]
        lines += [{"event": "failed", "trial": number, "error": error} for number, error in outcome.failures.items()]
        # The last digits depend on how many train as one, which memory may have decided.
        groups = [part["members"] for part in outcome.checkpoint]
        value = {"members": list(task.members), "stop": task.span.stop, "groups": groups}
        self._take_in(task.key, run.record(task.key, Unit(value, lines, finished.seconds)))

    def _next_recorded(self) -> str | None:
        """The next group that an earlier process recorded, once its trials are admitted."""
        if self._recorded and self._kinds.keys() >= set(self._run.store.units()[self._recorded[0]].value["members"]):
            return self._recorded.pop(0)
        return None

    def _take_in(self, key: str, unit: Unit) -> None:
        run, stop, members = self._run, unit.value["stop"], unit.value["members"]
        run.go_on_from(key, members, {line["trial"] for line in unit.lines if line["event"] == "failed"})
        if stop in self._halving.milestones:  # of more samples, one may have a longer warm-up, which moves the rungs
            self._reach(stop, members)
        self._done += sum(line["event"] == "metrics" for line in unit.lines)
        for n in members:
            self._search.tell(n, run.epochs("surrogate", n), run.score("surrogate", n))
        self._devices.told(min(1.0, self._done / self._ladder.epochs), self._ladder.best(run.settings.top_k))

    def _reach(self, stop: int, members: Iterable[int]) -> None:
        # Whom an earlier decision over fewer trials let go on, this one may not.
        entered, below = self._ladder.entered(stop), self._below(stop)
        takes_part = [n for n in members if n in entered or below is None or n not in self._chosen[below]]
        self._ladder.reach(stop, self._scores(stop, takes_part))

    def _scores(self, stop: int, numbers: Iterable[int]) -> dict[int, float]:
        """Scores at a milestone, of those that are through with it: the time budget may have ended others before."""
        run = self._run
        return {n: run.score_at("surrogate", n, stop) for n in numbers if run.passed("surrogate", n, stop)}

    def _below(self, stop: int) -> int | None:
        """The milestone before; None below the first."""
        return max((earlier for earlier in self._halving.milestones if earlier < stop), default=None)

    def _halve(self, stop: int, scores: Mapping[int, float]) -> list[int] | None:
        """Decide a rung over all of its trials, and tell user and searcher; the finalists if it was the last."""
        run = self._run
        kept = run.decide(f"surrogate/to-{stop}/kept", scores, lambda: self._promoted(stop, scores))
        if not kept:
            raise _all_failed(run, len(scores), stop)
        best = f"best {run.problem.metric} {scores[kept[0]]:.4g} (trial {kept[0]})"
        run.progress.say(f"surrogates at epoch {stop}: {len(kept)} of {len(scores)} go on, {best}")
        last = self._ladder.decide(stop, kept)
        out = scores.keys() if last else scores.keys() - self._ladder.above(stop)
        for n in sorted(out):
            self._search.close(n, run.epochs("surrogate", n), scores[n])
        if not last:
            run.forget(out)
            following = self._halving.next_milestone(stop)
            assert following is not None
            self._ladder.reach(following, self._scores(following, kept))
        if run.settings.check_transfer and stop == self._halving.milestones[0]:
            run.transfer = check_transfer(run, scores, stop, self._devices)
            self._show()
        return self._transferred(kept) if last else None

    def _promoted(self, stop: int, scores: Mapping[int, float]) -> Sequence[int]:
        if stop == self._halving.milestones[0]:
            warn_of_chance(self._run, scores, stop)
        return self._halving.promote(scores)

    def _transferred(self, kept: Sequence[int]) -> list[int]:
        """The finalists. A surrogate as wide as the model is the model: its training goes on from where it is."""
        run = self._run
        finalists = run.decide(FINALISTS, run.trials, lambda: kept[: run.settings.top_k])
        go_on = finalists if run.problem.width_ratio == 1 else []
        run.forget([n for n in run.sources if n not in go_on])
        return finalists

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
        return sorted(left, key=lambda n: -run.epochs("surrogate", n))[: run.settings.top_k]


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


def _widths(value: Mapping[str, Any]) -> Widths:
    """From the journal, whose keys are strings."""
    throughput = {int(width): rate for width, rate in value["throughput"].items()}
    return Widths(value["most"], value["least"], throughput)
