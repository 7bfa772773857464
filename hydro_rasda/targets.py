"""Stages 3 and 4 on one device: the finalists at full size, halved at RASDA's milestones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from .run import Run, metric_lines
from .schedulers import SuccessiveHalving, milestones
from .single import TargetOutcome, TargetTask
from .store import Unit
from .train import Span


class TargetTrainer(Protocol):
    """Trains full-size models."""

    def train_each(self, tasks: Iterable[TargetTask]) -> Iterator[TargetOutcome]:
        """Train full-size models, each as far as the time budget goes.

        Args:
            tasks: Independent of each other. The next is taken when it can begin.

        Yields:
            What each gave, as they are done.
        """
        ...


def train_targets(run: Run, finalists: Sequence[int], device: TargetTrainer) -> None:
    """Train the full-size models, halving them at RASDA's milestones by where each is expected to end."""
    settings = run.settings
    stops = milestones(settings.full_grace_period, settings.max_t, settings.rasda.scaling_factor)
    halving = SuccessiveHalving(stops, settings.rasda.reduction_factor, settings.mode)
    left = list(finalists)
    for stop in stops:
        run.progress.begin("full size", sum(stop - run.epochs("target", n) for n in left))
        _train_to(stop, run, left, device)
        run.progress.end()
        scores = {number: run.score("target", number) for number in left}
        if any(run.epochs("target", n) < stop and not _ended_early(run, n) for n in left):
            run.progress.say("`time_budget_s` is spent: the same call with more goes on from here")
            return
        curves = {number: run.curve("surrogate", number) for number in left}
        foreseen = expected(scores, curves, stop)
        left = run.decide(f"target/to-{stop}/kept", left, lambda: halving.promote(foreseen))  # noqa: B023 (called at once)
        if not left:
            return
        if len(scores) > 1 or stop == stops[-1]:
            kept = f"{len(left)} of {len(scores)} go on" if stop < stops[-1] else "done"
            best = f"best {run.problem.metric} {scores[left[0]]:.4g} (trial {left[0]})"
            run.progress.say(f"full size at epoch {stop}: {kept}, {best}")


def expected(scores: Mapping[int, float], curves: Mapping[int, Mapping[int, float]], epoch: int) -> dict[int, float]:
    """What trials at an epoch are expected to score in the end: each changes from here on as its surrogate did.

    Curves cross late where learning rates decay, or where a configuration overfits: a trial that is behind now can be
    the best in the end. Its surrogate, which trained under the same schedule, has been there.

    Args:
        scores: Each trial's at this epoch.
        curves: Each trial's surrogate's, by epoch. They count up to the last epoch that all of them reached, and
            nothing where that lies behind.
        epoch: Where the trials are.

    >>> expected({0: 0.5, 1: 0.6}, {0: {1: 0.7, 2: 0.7}, 1: {1: 0.9, 2: 0.6}}, epoch=1)
    {0: 0.5, 1: 0.29999999999999993}
    """
    last = min((max(curve, default=0) for curve in curves.values()), default=0)
    if last <= epoch:
        return dict(scores)
    changes = {number: curve[last] - curve[epoch] for number, curve in curves.items()}
    return {n: score + changes[n] if math.isfinite(changes[n]) else score for n, score in scores.items()}


def _ended_early(run: Run, number: int) -> bool:
    """Whether a full-size trial cannot go on, time or no time: it raised, or it diverged."""
    began = run.epochs("target", number) > 0
    return number in run.failures or (began and not math.isfinite(run.score("target", number)))


def _train_to(stop: int, run: Run, numbers: Sequence[int], device: TargetTrainer) -> None:
    """Train finalists to a milestone, in spans that end where a checkpoint is due, or as far as time goes."""
    while tasks := [task for n in numbers if (task := _next_task(run, n, stop, len(numbers))) is not None]:
        began = False
        # Those that were interrupted last time catch up first.
        tasks.sort(key=lambda task: task.span.start)
        for outcome in device.train_each(_in_time(run, tasks)):
            began = True
            _record(run, outcome)
        if not began:
            return


def _next_task(run: Run, number: int, stop: int, beside: int) -> TargetTask | None:
    """What is left to do for a finalist before the milestone, once what an earlier process recorded is taken in."""
    every = run.settings.checkpoint_every or stop
    while (start := run.epochs("target", number)) < stop and not _ended_early(run, number):
        key = f"target/trial-{number}/from-{start}"
        span = Span(start, min(stop, start - start % every + every))
        if not run.store.done(key):
            return TargetTask(key, number, span, run.checkpoints.get(number), run.settings.seed, beside)
        run.recall(key)
        if number not in run.failures:
            _go_on_from(run, number, key)
    return None


def _in_time(run: Run, tasks: Sequence[TargetTask]) -> Iterator[TargetTask]:
    """The tasks that the time budget allows to begin; the first of all begins without."""
    began = any(stage == "target" for stage, _ in run.metrics)
    for task in tasks:
        if began and run.out_of_time(1.0):
            return
        began = True
        yield task


def _record(run: Run, outcome: TargetOutcome) -> None:
    """Keep what was trained: first the checkpoint, then the journal's lines."""
    task = outcome.task
    if outcome.error is not None:
        line = {"event": "failed", "trial": task.number, "error": outcome.error}
        run.record(task.key, Unit(None, [line], outcome.seconds))
        return
    assert outcome.state is not None
    run.store.save(task.key, outcome.state)
    run.record(task.key, Unit(None, metric_lines("target", task.number, outcome.history), outcome.seconds))
    _go_on_from(run, task.number, task.key)


def _go_on_from(run: Run, number: int, key: str) -> None:
    before, run.checkpoints[number] = run.checkpoints.get(number), key
    if before is not None:
        run.store.discard([before])
