"""Full-size training by script: epochs cost nothing, and score what they are told to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydro_rasda.config import Keep
from hydro_rasda.contracts import FullSizeOutcome, FullSizeTask, History
from hydro_rasda.history.lines import Stage, Unit, metric_lines
from hydro_rasda.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.trial import Trial

Scores = Mapping[int, Sequence[float]]
"""Of each trial, the metric after each epoch."""


class Scripted:
    """Trains by script; `trained` says which epochs of which trial.

    Args:
        scores: What each epoch gives; a trial raises where they end, and diverges where they are infinite.
        epochs: It stops after so many, as when time is up.
        keep: Of which epoch it leaves the weights, as `tune` has it; the lowest score is the best.
    """

    def __init__(self, scores: Scores, epochs: float = math.inf, keep: Keep = "last") -> None:
        self.scores, self.left, self.keep = scores, epochs, keep
        self.trained: list[tuple[int, int]] = []

    def train_each(self, tasks: Iterable[FullSizeTask]) -> Iterator[FullSizeOutcome]:
        for task in tasks:
            if not self.left:
                return
            yield self._train(task)

    def _train(self, task: FullSizeTask) -> FullSizeOutcome:
        history: History = []
        for epoch in range(task.span.start + 1, task.span.stop + 1):
            if epoch > len(self.scores[task.number]):
                return FullSizeOutcome(task, None, [], f"trial {task.number} raised in epoch {epoch}", 1.0)
            score = self.scores[task.number][epoch - 1]
            history.append((epoch, {"train_loss": score, "val_loss": score}))
            self.trained.append((task.number, epoch))
            self.left -= 1
            if not (self.left and math.isfinite(score)):
                break
        state: dict[str, Any] = {"model": {}, "epoch": history[-1][0]}
        if self.keep == "best":
            score, epoch = min((score, i) for i, score in enumerate(self.scores[task.number][: state["epoch"]], 1))
            state["best"] = {"epoch": epoch, "score": score, "model": {}}
        return FullSizeOutcome(task, state, history, None, 1.0)


def open_run(path: Path, problem: Problem, number: int, **settings: Any) -> Run:
    """A run with so many trials, in one process after another, whose full-size stage is halved throughout."""
    settings = {"full_trainings": 0, **settings}
    trials = {n: Trial(n, {"lr": 0.1}) for n in range(number)}
    return run_of(problem.with_settings(**settings), Store.open(path, {}, "auto"), trials)


def run_of(problem: Problem, store: Store, trials: dict[int, Trial]) -> Run:
    """A run of these trials, as the next process would open it."""
    run = Run(problem, store, known=trials)
    run.fold()
    run.history.trials |= trials
    return run


def curves(stage: Stage, scores: Scores) -> Unit:
    """A unit that holds what trials scored in a stage."""
    lines = [
        line
        for n, values in scores.items()
        for line in metric_lines(stage, n, [(t, {"train_loss": v, "val_loss": v}) for t, v in enumerate(values, 1)])
    ]
    return Unit(None, lines)
