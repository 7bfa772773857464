"""Full-size training by script: epochs cost nothing, and score what they are told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Devices, Finished, History, Outcome, Task, Widths
from hydro_rasda.data import make_batches
from hydro_rasda.heats.race import Race
from hydro_rasda.heats.search import Search
from hydro_rasda.heats.sweep import Sweep
from hydro_rasda.history.lines import Unit, metric_lines
from hydro_rasda.problem.objective import supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import SweepRule
from hydro_rasda.settings.config import Keep, TuneConfig
from tests.hydro_rasda.models import mlp

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
        self.task: Task | None = None

    def idle(self, task: Task | None = None) -> list[int]:
        return [0] if self.left and self.task is None else []

    def busy(self) -> bool:
        return self.task is not None

    def start(self, device: int, task: Task) -> None:
        self.task = task

    def finished(self) -> list[Finished]:
        assert self.task is not None
        task, self.task = self.task, None
        return [Finished(task, self._train(task))]

    def speed(self, device: int, kind: str) -> None:
        """There is no other to compare with."""

    def machine(self, device: int) -> str:
        return "a machine"

    def cores(self, device: int) -> int:
        return 1

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None) -> dict[str, Widths]:
        return dict.fromkeys(kinds, Widths(1))

    def _train(self, task: Task) -> Outcome:
        history: History = []
        for epoch in range(task.span.start + 1, task.span.stop + 1):
            if epoch > len(self.scores[task.number]):
                return Outcome.failed(task.number, f"trial {task.number} raised in epoch {epoch}", 1.0)
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
        return Outcome.of_model(task.number, state, history, 1.0)


def open_run(path: Path, problem: Problem, number: int, **settings: Any) -> Run:
    """A run with so many trials, in one process after another, whose race is halved throughout."""
    settings = {"full_trainings": 0, **settings}
    trials = {n: Trial(n, {"lr": 0.1}) for n in range(number)}
    return run_of(problem.with_settings(**settings), Store.open(path, {}, "auto"), trials)


def untrained(path: Path, model_fn: Callable[..., nn.Module] = mlp, **settings: Any) -> Run:
    """A run whose data tell nothing, as what its trials score is made up."""
    cpu = torch.device("cpu")
    data = make_batches((torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64)), "data", cpu, 0)
    problem = Problem(model_fn, supervised(), data, data, TuneConfig(**settings), cpu)
    return Run(problem, Store.open(path, {}, "auto"))


def run_of(problem: Problem, store: Store, trials: dict[int, Trial]) -> Run:
    """A run of these trials, as the next process would open it."""
    run = Run(problem, store, known=trials)
    run.history.trials |= trials
    run.fold()
    return run


def sweep(
    run: Run, search: Search, devices: Devices, rule: SweepRule | None = None, race: Race | None = None
) -> list[int]:
    """Do a whole sweep, as `tune` does; return the finalists."""
    heat = Sweep(run, search, devices, rule, race)
    with run.store.sweeping():
        heat.train()
        return heat.finalists()


def curves(heat: HeatName, scores: Scores) -> Unit:
    """A unit that holds what trials scored in a heat."""
    lines = [
        line
        for n, values in scores.items()
        for line in metric_lines(heat, n, [(t, {"train_loss": v, "val_loss": v}) for t, v in enumerate(values, 1)])
    ]
    return Unit(None, lines)
