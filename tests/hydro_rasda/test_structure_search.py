from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydro_rasda import SweepConfig, TuneResult, choice, load, loguniform, uniform
from hydro_rasda.objectives import Fits
from hydro_rasda.problem import Problem
from hydro_rasda.run.journal import Unit
from hydro_rasda.run.state import Run, metric_lines
from hydro_rasda.run.store import Store
from hydro_rasda.space import sample
from hydro_rasda.structure_search import StructureSearch, structure_of
from hydro_rasda.trial import Trial
from tests.hydro_rasda.test_several_metrics import sized

SPACE: dict[str, Any] = {
    "lr": loguniform(1e-4, 1.0),
    "optimizer": choice(["sgd", "adamw"]),
    "depth": choice([1, 2, 3]),
    "kind": choice([{"name": "conv", "kernel": choice([3, 5])}, {"name": "mlp", "dropout": uniform(0, 0.5)}]),
}
"""Nine structures."""

Open = Callable[..., StructureSearch]


@pytest.fixture
def open_search(problem: Problem, tmp_path: Path) -> Iterator[Open]:
    stores: list[Store] = []

    def call(num_samples: int, space: Any = SPACE, fits: Fits | None = None) -> StructureSearch:
        for store in stores:
            store.close()
        stores.append(Store.open(tmp_path / "run", {}, "auto"))
        run = Run(problem.with_settings(num_samples=num_samples), stores[-1])
        for key in stores[-1].units():
            run.recall(key)
        return StructureSearch(space, run, fits)

    yield call
    for store in stores:
        store.close()


def play(search: StructureSearch, score: Callable[[Trial], float]) -> list[list[Trial]]:
    """All rounds; each trial has its score after the first epoch."""
    rounds: list[list[Trial]] = []
    while trials := search.next_trials():
        rounds.append(trials)
        run = search._run
        lines = [
            line
            for trial in trials
            for line in metric_lines("surrogate", trial.number, [(1, {"train_loss": 0.0, "val_loss": score(trial)})])
        ]
        if not run.store.done(f"surrogate/{len(rounds)}"):
            run.record(f"surrogate/{len(rounds)}", Unit(None, lines))
    return rounds


def deep_is_good(trial: Trial) -> float:
    return float(trial.config["lr"]) / 10 - float(trial.config["depth"])


def structures(trials: list[Trial]) -> Counter[str]:
    return Counter(repr(sorted(structure_of(trial.config).items())) for trial in trials)


def test_all_structures_are_tried_and_the_best_get_the_rest(open_search: Open) -> None:
    first, second = play(open_search(64), deep_is_good)
    assert set(structures(first).values()) == {3}
    assert len(structures(first)) == 9
    assert len(first) + len(second) == 64
    assert len(structures(second)) == 3
    assert {trial.config["depth"] for trial in second} == {3}
    assert [trial.number for trial in first + second] == [*range(64)]


def test_structures_are_compared_by_the_same_draws(open_search: Open) -> None:
    (first, _) = play(open_search(64), deep_is_good)
    rates = {
        name: [t.config["lr"] for t in first if repr(structure_of(t.config)) == name]
        for name in {repr(structure_of(t.config)) for t in first}
    }
    of_conv = [tuple(values) for name, values in rates.items() if "conv" in name]
    assert len({*of_conv}) == 1


def test_the_configurations_belong_to_the_space(open_search: Open) -> None:
    known = {tuple(sorted(config)) for config in sample(SPACE, 64, 0)}
    for trial in (trial for trials in play(open_search(64), deep_is_good) for trial in trials):
        assert tuple(sorted(trial.config)) in known
        assert ("kernel" in trial.config) == (trial.config["name"] == "conv")


def test_more_samples_go_on_with_the_rounds_that_there_were(open_search: Open) -> None:
    few = play(open_search(32), deep_is_good)
    many = play(open_search(48), deep_is_good)
    assert many[:2] == few
    assert sum(map(len, many)) == 48
    assert {trial.config["depth"] for trial in many[2]} == {3}


def test_one_structure_gets_all(open_search: Open) -> None:
    (only,) = play(open_search(9, {"lr": loguniform(1e-4, 1.0), "depth": 3}), deep_is_good)
    assert len(only) == 9


def test_only_what_fits_is_tried(open_search: Open) -> None:
    rounds = play(open_search(32, fits=lambda config: config["depth"] < 3 and config["lr"] < 0.1), deep_is_good)
    trials = [trial for trials in rounds for trial in trials]
    assert len(trials) == 32
    assert all(trial.config["depth"] < 3 and trial.config["lr"] < 0.1 for trial in trials)


def test_a_run_fills_its_groups_and_resumes(tmp_path: Path, quick: Callable[..., TuneResult]) -> None:
    space = {"lr": loguniform(1e-2, 0.3), "width": choice([16, 32, 64]), "batch_size": choice([32, 64])}
    asked: dict[str, Any] = {"model_fn": sized, "space": space, "sweep": SweepConfig(searcher="structures")}
    result = quick(**asked, num_samples=24)
    found = [(trial.config["width"], trial.config["batch_size"]) for trial in result.trials]
    assert set(Counter(found[:12]).values()) == {2}
    assert len({*found[12:]}) == 2
    assert [trial.config for trial in load(result.path).trials] == [trial.config for trial in result.trials]
    again = quick(**asked, num_samples=28)
    assert [trial.config for trial in again.trials[:24]] == [trial.config for trial in result.trials]
    with pytest.raises(ValueError, match=r"`sweep\.searcher` is 'structure', but must be None, one of .*'structures'"):
        quick(**asked | {"sweep": SweepConfig(searcher="structure")}, name="other")
