"""Stages 3 and 4 on one device: the finalists at full size, one after another, halved at RASDA's milestones."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .run import Run, metric_lines
from .schedulers import SuccessiveHalving, milestones
from .store import Unit
from .train import History, Span


class TargetTrainer(Protocol):
    """Trains one full-size model at a time."""

    def train_target(
        self, number: int, span: Span, state: Mapping[str, Any] | None, seed: int
    ) -> tuple[Mapping[str, Any], History]:
        """Train a trial for a span of epochs, or as far as the time budget goes.

        Args:
            number: The trial.
            span: Which epochs.
            state: What an earlier span returned; None starts from the trial's initial weights.
            seed: Determines those, and dropout.

        Returns:
            The state to go on from, and the history: epochs trained with the metrics after each.
        """
        ...


def train_targets(run: Run, finalists: Sequence[int], device: TargetTrainer) -> None:
    """Train the full-size models, halving them at RASDA's milestones."""
    settings = run.settings
    stops = milestones(settings.full_grace_period, settings.max_t, settings.rasda.scaling_factor)
    halving = SuccessiveHalving(stops, settings.rasda.reduction_factor, settings.mode)
    left = list(finalists)
    for stop in stops:
        run.progress.begin("full size", sum(stop - run.epochs("target", n) for n in left))
        for number in left:
            _train_target(run, number, stop, device)
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


def _train_target(run: Run, number: int, stop: int, device: TargetTrainer) -> None:
    """Train one finalist to a milestone, in spans that end where a checkpoint is due."""
    every = run.settings.checkpoint_every or stop
    while (start := run.epochs("target", number)) < stop:
        key = f"target/trial-{number}/from-{start}"
        first_of_all = not any(stage == "target" for stage, _ in run.metrics)
        if run.out_of_time(1.0) and not first_of_all and not run.store.done(key):
            return
        span = Span(start, min(stop, start - start % every + every))
        run.unit(key, lambda: _target_unit(run, key, number, span, device))  # noqa: B023 (called at once)
        if number in run.failures:
            return
        before, run.checkpoints[number] = run.checkpoints.get(number), key
        if before is not None:
            run.store.discard([before])
        if _ended_early(run, number):
            return


def _target_unit(run: Run, key: str, number: int, span: Span, device: TargetTrainer) -> Unit:
    before = run.checkpoints.get(number)
    state = run.store.load(before, run.problem.device) if before is not None else None
    try:
        after, history = device.train_target(number, span, state, run.settings.seed)
    except Exception:
        return Unit(None, [{"event": "failed", "trial": number, "error": traceback.format_exc()}])
    run.store.save(key, after)
    return Unit(None, metric_lines("target", number, history))
