"""Everything in this process, on one device: the default."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping, Sequence

import torch

from fusion import keep_freed_memory

from ..fused import GroupTask, train_group
from ..run import Run, Stage
from ..schedulers import SuccessiveHalving, milestones
from ..store import Line, Unit
from ..train import EpochMetrics, Span, train_target

SWEEP_SHARE = 0.5
"""Of a time budget, what the sweep may spend; the rest trains the finalists."""


class LocalBackend:
    """Trains groups of surrogates, then the full-size finalists, one after another."""

    def train_groups(self, run: Run, tasks: Sequence[GroupTask]) -> None:
        """Train groups and record each as a unit under its key; leave out what the time budget does not allow."""
        if run.problem.device.type == "cpu":
            # Page faults on blocks that were freed a step before can take half of a fused step.
            keep_freed_memory()
        run.progress.begin("surrogates", sum((t.span.stop - t.span.start) * len(t.group.members) for t in tasks))
        for task in tasks:
            nothing_yet = not any(stage == "surrogate" for stage, _ in run.metrics)
            if run.out_of_time(SWEEP_SHARE) and not nothing_yet and not run.store.done(task.key):
                run.progress.say("the sweep's share of `time_budget_s` is spent: going on with the best so far")
                break
            run.unit(task.key, lambda: _group_unit(run, task))  # noqa: B023 (called at once)
        run.progress.end()

    def train_targets(self, run: Run, finalists: Sequence[int]) -> None:
        """Train the full-size models, halving them at RASDA's milestones."""
        settings = run.settings
        stops = milestones(settings.full_grace_period, settings.max_t, settings.rasda.scaling_factor)
        halving = SuccessiveHalving(stops, settings.rasda.reduction_factor, settings.mode)
        left = list(finalists)
        for stop in stops:
            run.progress.begin("full size", sum(stop - run.epochs("target", n) for n in left))
            for number in left:
                _train_target(run, number, stop)
            run.progress.end()
            scores = {number: run.score("target", number) for number in left}
            if any(run.epochs("target", n) < stop and not _ended_early(run, n) for n in left):
                run.progress.say("`time_budget_s` is spent: the same call with more goes on from here")
                return
            left = run.decide(f"target/to-{stop}/kept", lambda: halving.promote(scores))  # noqa: B023 (called at once)
            if not left:
                return
            if len(scores) > 1 or stop == stops[-1]:
                kept = f"{len(left)} of {len(scores)} go on" if stop < stops[-1] else "done"
                best = f"best {run.problem.metric} {scores[left[0]]:.4g} (trial {left[0]})"
                run.progress.say(f"full size at epoch {stop}: {kept}, {best}")


def _ended_early(run: Run, number: int) -> bool:
    """Whether a full-size trial cannot go on, time or no time: it raised, or it diverged."""
    began = run.epochs("target", number) > 0
    return number in run.failures or (began and not math.isfinite(run.score("target", number)))


def _group_unit(run: Run, task: GroupTask) -> Unit:
    def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
        run.progress.advance(len(task.group.members), _note(run, metrics))

    def load(key: str) -> list[dict[str, object]]:
        parts: list[dict[str, object]] = run.store.load(key, run.problem.device)["parts"]
        return parts

    outcome = train_group(run.problem, run.trials, task, load, lambda: run.out_of_time(SWEEP_SHARE), on_epoch)
    run.store.save(task.key, {"parts": outcome.checkpoint})
    lines = [line for number, history in outcome.history.items() for line in _lines("surrogate", number, history)]
    lines += [{"event": "failed", "trial": number, "error": error} for number, error in outcome.failures.items()]
    return Unit(None, lines)


def _train_target(run: Run, number: int, stop: int) -> None:
    """Train one finalist to a milestone, in spans that end where a checkpoint is due."""
    every = run.settings.checkpoint_every or stop
    while (start := run.epochs("target", number)) < stop:
        key = f"target/trial-{number}/from-{start}"
        first_of_all = not any(stage == "target" for stage, _ in run.metrics)
        if run.out_of_time(1.0) and not first_of_all and not run.store.done(key):
            return
        span = Span(start, min(stop, start - start % every + every))
        run.unit(key, lambda: _target_unit(run, key, number, span))  # noqa: B023 (called at once)
        if number in run.failures:
            return
        before, run.checkpoints[number] = run.checkpoints.get(number), key
        if before is not None:
            run.store.discard([before])
        if _ended_early(run, number):
            return


def _target_unit(run: Run, key: str, number: int, span: Span) -> Unit:
    def on_epoch(epoch: int, metrics: EpochMetrics) -> None:
        run.progress.advance(1, f"trial {number}: {_note(run, metrics)}")

    before = run.checkpoints.get(number)
    state = run.store.load(before, run.problem.device) if before is not None else None
    try:
        state, history = train_target(
            run.problem, run.trials[number], span, state, lambda: run.out_of_time(1.0), on_epoch
        )
    except Exception:
        return Unit(None, [{"event": "failed", "trial": number, "error": traceback.format_exc()}])
    run.store.save(key, state)
    return Unit(None, _lines("target", number, history))


def _lines(stage: Stage, number: int, history: Iterable[tuple[int, Mapping[str, float]]]) -> list[Line]:
    return [
        {"event": "metrics", "stage": stage, "trial": number, "epoch": epoch, **metrics} for epoch, metrics in history
    ]


def _note(run: Run, metrics: EpochMetrics) -> str:
    finite = [value for value in metrics[run.problem.metric] if math.isfinite(value)]
    if not finite:
        return ""
    best = min(finite) if run.problem.mode == "min" else max(finite)
    return f"{run.problem.metric} {best:.4g}"


def default_device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
