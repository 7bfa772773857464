from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydro_rasda.config import Mode, TuneConfig
from hydro_rasda.data import make_batches
from hydro_rasda.fused import GroupTask
from hydro_rasda.objective import supervised
from hydro_rasda.planning import Widths
from hydro_rasda.problem import Problem, Trial
from hydro_rasda.progress import Progress
from hydro_rasda.run import Run
from hydro_rasda.store import Store, Unit
from hydro_rasda.sweep import AllTrialsFailed, make_groups, sweep
from tests.hydro_rasda.models import Config, mlp

X, Y = torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64)


class Curves:
    """A backend that trains nothing: a trial's metric is what its configuration says, a little better each epoch."""

    def __init__(self, order: int = 1, epochs_at_most: int = 10**9) -> None:
        self.order, self.epochs_at_most = order, epochs_at_most
        self.tasks: list[GroupTask] = []

    def train_groups(self, run: Run, tasks: Sequence[GroupTask]) -> None:
        for task in tasks[:: self.order]:
            self.tasks.append(task)
            run.unit(task.key, lambda: self._unit(run, task))  # noqa: B023

    def _unit(self, run: Run, task: GroupTask) -> Unit:
        sign = 1.0 if run.settings.mode == "min" else -1.0
        stop = min(task.span.stop, self.epochs_at_most)
        lines: list[dict[str, Any]] = []
        for number in task.group.members:
            config = run.trials[number].config
            for epoch in range(task.span.start + 1, stop + 1):
                value = sign * (config["final"] - 0.001 * epoch)
                metrics = {"train_loss": value, "val_loss": value}
                lines.append({"event": "metrics", "stage": "surrogate", "trial": number, "epoch": epoch, **metrics})
        return Unit(None, lines)


class Given:
    """A search that gives its configurations in batches, and remembers what it is told."""

    def __init__(self, batches: Sequence[Sequence[Config]]) -> None:
        self.batches, self.given = list(batches), 0
        self.told: dict[int, list[int]] = {}
        self.closed: list[int] = []

    def next_trials(self) -> list[Trial]:
        if not self.batches:
            return []
        trials = [Trial(self.given + i, config) for i, config in enumerate(self.batches.pop(0))]
        self.given += len(trials)
        return trials

    def tell(self, number: int, epoch: int, score: float) -> None:
        self.told.setdefault(number, []).append(epoch)

    def close(self, number: int, epoch: int, score: float) -> None:
        self.closed.append(number)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    cpu = torch.device("cpu")
    data = make_batches((X, Y), "data", cpu, 0)
    problem = Problem(mlp, supervised(), data, data, 0.5, "val_loss", "min", 9, 0, cpu)
    settings = TuneConfig(num_samples=27, max_t=9, reduction_factor=3, top_k=1, fusion=4)
    with Store.open(tmp_path / "run", {}, "auto") as store:
        yield Run(problem, settings, store, Progress(silent=True))


def configs(finals: Sequence[float]) -> list[Config]:
    return [{"lr": 0.1, "final": final, "batch_size": (2, 4)[i % 2]} for i, final in enumerate(finals)]


FINALS = [float((7 * i) % 27) for i in range(27)]
"""A permutation of 0 to 26: trial 0 is best, then trial 4 (7 * 4 = 28 = 27 + 1), then trial 8, ..."""

BEST_FIRST = sorted(range(27), key=lambda n: FINALS[n])


def test_halving_is_over_all_trials_of_a_rung(run: Run) -> None:
    backend = Curves()
    assert sweep(run, Given([configs(FINALS)]), backend) == [0]
    for stop, left in ((1, 27), (3, 9), (9, 3)):
        trained = [n for task in backend.tasks if task.span.stop == stop for n in task.group.members]
        assert sorted(trained) == sorted(BEST_FIRST[:left])


def test_who_trains_first_or_in_which_batch_does_not_matter(run: Run) -> None:
    split = [configs(FINALS)[i : i + 9] for i in (0, 9, 18)]
    assert sweep(run, Given(split), Curves(order=-1)) == [0]


def test_max_mirrors_min(run: Run) -> None:
    mirrored = replace(run, settings=replace(run.settings, mode="max", top_k=3))
    assert sweep(mirrored, Given([configs(FINALS)]), Curves()) == [0, 4, 8]


def test_nan_is_worst_in_both_modes(run: Run) -> None:
    modes: tuple[Mode, ...] = ("min", "max")
    for mode in modes:
        finals = [math.nan, 2.0, math.inf, 1.0, -math.inf]
        settings = replace(run.settings, mode=mode, top_k=4)
        fresh = Run(run.problem, settings, run.store, run.progress)
        run.store._units.clear()
        assert sweep(fresh, Given([configs(finals)]), Curves()) == [3, 1]


def test_all_diverged(run: Run) -> None:
    with pytest.raises(AllTrialsFailed, match=r"all 3 trials diverged or failed by epoch 1 .*journal\.jsonl"):
        sweep(run, Given([configs([math.nan] * 3)]), Curves())


def test_a_model_that_fails_is_left_out_with_its_traceback(run: Run) -> None:
    trials = configs(FINALS[:4])
    trials[0]["activation"] = "no such activation"
    assert sweep(run, Given([trials]), Curves()) == [1]  # 0 would be best; 7 is next
    assert "no such activation" in run.failures[0]
    assert list(run.failures) == [0]


def test_a_searcher_is_told_of_each_rung_and_of_each_end(run: Run) -> None:
    search = Given([configs(FINALS[:14]), configs(FINALS[14:])])
    sweep(run, search, Curves())
    rungs = {3: [1, 3, 9], 9: [1, 3], 27: [1]}
    for place, number in enumerate(BEST_FIRST):
        assert search.told[number] == next(epochs for left, epochs in rungs.items() if place < left)
    assert sorted(search.closed) == list(range(27))


def test_a_rung_cut_short_by_time_keeps_the_best_of_the_deepest(run: Run) -> None:
    short = Run(run.problem, replace(run.settings, top_k=2), run.store, run.progress)
    assert sweep(short, Given([configs(FINALS)]), Curves(epochs_at_most=2)) == [0, 4]
    assert short.epochs("surrogate", 0) == 2


def test_checkpoints_of_the_sweep_are_gone_after_it(run: Run) -> None:
    class Saving(Curves):
        def _unit(self, run: Run, task: GroupTask) -> Unit:
            run.store.save(task.key, {})
            return super()._unit(run, task)

    sweep(run, Given([configs(FINALS)]), Saving())
    assert not list((run.store.path / "checkpoints").iterdir())


def rounded_width(config: Config, width_ratio: float = 1.0) -> nn.Module:
    width = int(config["width"] * width_ratio)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10))


def test_surrogates_of_targets_of_different_width_are_not_fused(run: Run) -> None:
    backend = Curves()
    run.problem = replace(run.problem, model_fn=rounded_width)
    trials = [{"lr": 0.1, "final": float(w), "width": w, "batch_size": 4} for w in (32, 33, 32)]
    assert rounded_width(trials[0], 0.5)[0].weight.shape == rounded_width(trials[1], 0.5)[0].weight.shape  # type: ignore[index]
    sweep(run, Given([trials]), backend)
    assert [task.group.members for task in backend.tasks if task.span.stop == 1] == [(0, 2), (1,)]


def test_groups_are_of_one_kind_and_even() -> None:
    kinds = {n: "ab"[n % 2] for n in range(10)}
    groups = make_groups(kinds, range(10), {"a": Widths(3), "b": Widths(8)})
    assert [g.members for g in groups] == [(0, 2, 4), (6, 8), (1, 3, 5, 7, 9)]
    assert [g.kind for g in groups] == ["a", "a", "b"]


def test_groups_keep_the_order_that_they_are_given() -> None:
    groups = make_groups(dict.fromkeys(range(4), "a"), [3, 0, 2, 1], {"a": Widths(4)})
    assert [g.members for g in groups] == [(3, 0, 2, 1)]


def test_small_groups_train_one_by_one() -> None:
    groups = make_groups(dict.fromkeys(range(5), "a"), range(5), {"a": Widths(4, least=3)})
    assert [(g.members, g.fused) for g in groups] == [((0, 1, 2), True), ((3, 4), False)]
