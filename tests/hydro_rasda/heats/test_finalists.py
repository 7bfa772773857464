"""The choice of finalists, the check of surrogates at full size, and finalists that resume from the sweep."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice, grid_search, loguniform, uniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Event, Finished, Group, Outcome, Span, Task, full_size_task
from hydro_rasda.heats.finalists import hand_over
from hydro_rasda.heats.race import train_finalists
from hydro_rasda.heats.transfer_check import check_transfer
from hydro_rasda.history.history import FINALISTS
from hydro_rasda.history.lines import Unit
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.events import Callbacks, HeatBegan
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.state import Run
from hydro_rasda.training.full_size import train_full_size_trial
from hydro_rasda.training.group_training import states_of, train_group
from surrogate.transfer_verdict import RankComparison
from tests.hydro_rasda.heats.conftest import Opens
from tests.hydro_rasda.models import Config, mlp
from tests.hydro_rasda.scripted import Scripted, curves

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
Check = Callable[..., tuple[Run, RankComparison | None]]
ROOM = Path(__file__).parents[1]


class Gain(nn.Module):
    """Multiplies what comes in."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def learns_only_wide(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """At full width the gain helps; below it the gain is turned around, so that surrogates rank upside down."""
    gain = config["gain"] if width_ratio == 1 else 1 - config["gain"]
    return nn.Sequential(mlp(config, width_ratio), Gain(3 * gain))


def test_check_at_full_width_agrees_with_itself(quick: Quick) -> None:
    """The surrogates are the targets: the same initial weights and batches, fused or not, rank alike."""
    result = quick(sweep=SweepConfig(surrogate=1, check_transfer=True))
    assert result.transfer is not None
    assert result.transfer.rho == pytest.approx(1.0)
    assert result.transfer.regret[1] == pytest.approx(0.0, abs=1e-4)
    assert result.transfer.verdict == "trusted"


def test_what_two_seeds_of_one_configuration_differ_by_counts_as_no_regret(quick: Quick, tmp_path: Path) -> None:
    """The check is a part of the run: a resumed one reads it, and the verdict does not depend on it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transfer, again = (quick(sweep=SweepConfig(check_transfer=True)).transfer for _ in range(2))
    assert again == transfer
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    values = {line["key"]: line["value"] for line in lines if line.get("key", "").startswith("check/")}
    (key,) = (key for key in values if key.endswith("/again"))
    spread = abs(values[key] - values[key.replace("/again", "/first")])
    assert transfer is not None
    assert transfer.tolerance == pytest.approx(spread)
    assert spread > 0
    assert not math.isnan(transfer.rho)


def test_a_ranking_upside_down_is_not_trusted(quick: Quick) -> None:
    space = {"lr": choice([0.01]), "optimizer": "sgd", "gain": uniform(0.0, 1.0)}
    with pytest.warns(UserWarning, match="transfer to full size is") as told:
        result = quick(model_fn=learns_only_wide, space=space, num_samples=12, sweep=SweepConfig(check_transfer=True))
    assert {Path(warning.filename) for warning in told} == {ROOM / "conftest.py"}, "it names the call of `tune`"
    assert result.transfer is not None
    assert result.transfer.rho < 0.5
    assert result.transfer.verdict != "trusted"


@pytest.fixture
def check(opens: Opens) -> Iterator[Check]:
    """Checks four trials by script, three epochs each; surrogates rank them as their numbers do."""
    narrow = {n: 0.1 * n for n in range(1, 5)}
    others: list[Finished] = []

    def call(device: Scripted, **settings: Any) -> tuple[Run, RankComparison | None]:
        run = opens(5, **settings)
        return run, check_transfer(run, narrow, 3, device, others.append)

    yield call
    assert not others


SAME_ORDER = {n: [0.1 * n + 0.3, 0.1 * n + 0.2, 0.1 * n] for n in range(1, 5)}


def test_the_check_begins_no_training_without_time_and_goes_on_with_more(check: Check) -> None:
    run, found = check(device := Scripted(SAME_ORDER), time_budget_s=1e-9)
    assert (device.trained, found) == ([], None)
    assert any("the check of the transfer is left out" in message.text for message in read_messages(run.store.path))
    _, found = check(Scripted(SAME_ORDER, epochs=5), time_budget_s=1e6)  # time ends in the second training
    assert found is None
    _, found = check(device := Scripted(SAME_ORDER), time_budget_s=1e6)
    assert found is not None
    assert found.rho == pytest.approx(1.0)
    assert (1, 1) in device.trained, "the best, once more, from another seed"
    assert len(device.trained) == 4 * 3


@pytest.mark.parametrize(("top_k", "compared"), [(2, 2), (4, 3)])
def test_the_check_looks_at_no_more_of_the_best_than_train_at_full_size(
    check: Check, top_k: int, compared: int
) -> None:
    _, found = check(Scripted(SAME_ORDER), race=RaceConfig(top_k=top_k))
    assert found is not None
    assert found.top_k == compared


def test_the_check_announces_the_epochs_that_it_trains(opens: Opens) -> None:
    events: list[Event] = []
    run, device = opens(5), Scripted(SAME_ORDER)
    run.callbacks = Callbacks([events.append])
    check_transfer(run, {n: 0.1 * n for n in range(1, 5)}, 3, device, lambda finished: None)
    (began,) = (event for event in events if isinstance(event, HeatBegan))
    assert (began.heat, began.epochs) == ("transfer check", (4 + 1) * 3)
    assert len(device.trained) == began.epochs


def test_a_check_that_is_good_enough_early_has_not_diverged(check: Check) -> None:
    class Stops(Scripted):
        def _train(self, task: Task) -> Outcome:
            outcome = super()._train(task)
            return replace(outcome, history={1: outcome.epochs[:1]}) if task.number == 1 else outcome

    _, found = check(Stops({**SAME_ORDER, 1: [0.05, 0.04, 0.03]}), stop_at=0.06)
    assert found is not None
    assert found.rho == pytest.approx(1.0)


@pytest.mark.parametrize(("horizon", "of_check"), [(3, 3), (9, None), (None, None)])
def test_schedules_end_with_the_check_if_they_do_so_on_surrogates(
    opens: Opens, problem: Problem, horizon: int | None, of_check: int | None
) -> None:
    horizons = set[int | None]()

    class Notes(Scripted):
        def start(self, device: int, task: Task) -> None:
            horizons.add(task.horizon)
            super().start(device, task)

    run = opens(5, replace(problem, horizon=horizon))
    check_transfer(run, {n: 0.1 * n for n in range(1, 5)}, 3, Notes(SAME_ORDER), lambda finished: None)
    assert horizons == {of_check}


def test_a_trial_that_diverges_in_the_check_comes_last_at_full_size(check: Check) -> None:
    """It is no training that time cut short."""
    with pytest.warns(UserWarning, match="transfer to full size is doubtful"):
        run, found = check(Scripted({**SAME_ORDER, 2: [math.inf]}))
    assert run.store.units()["check/trial-2/first"].value is None
    assert found is not None
    assert found.rho == pytest.approx(0.4)  # the surrogates' ranks 1, 2, 3, 4 are 1, 4, 2, 3 at full size


def test_it_is_said_where_surrogates_decide_nothing(quick: Quick) -> None:
    def told(**settings: Any) -> list[str]:
        said: list[str] = []
        quick(callbacks=[lambda event: said.append(getattr(event, "text", ""))], max_t=1, **settings)
        return [text for text in said if "`sweep=SweepConfig(surrogate=1)`" in text]

    (few,) = told(num_samples=2, name="few")
    assert few.startswith(
        "whatever surrogates say, all 2 configurations can enter the race: `sweep=SweepConfig(surrogate=1)`"
    )
    (one,) = told(num_samples=1, name="one")
    assert "the only configuration can enter the race" in one
    assert not told(num_samples=2, sweep=SweepConfig(surrogate=1), name="wide")
    assert not told(num_samples=3, name="more")
    assert not told(num_samples=1, space={"lr": grid_search([0.05, 0.1, 0.2])}, name="grid")


def test_regularizers_tuned_on_a_narrow_surrogate_are_warned_of(quick: Quick) -> None:
    space = {"lr": loguniform(1e-3, 0.3), "weight_decay": loguniform(1e-6, 1e-2), "dropout": 0.1}
    with pytest.warns(
        UserWarning, match="the best weight_decay at 1/8 of the width may not suit the full model"
    ) as told:
        quick(space=space, sweep={"surrogate": 1 / 8})
    assert Path(told[0].filename) == ROOM / "conftest.py", "it names the call of `tune`"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(space=space, sweep=SweepConfig(surrogate=1 / 2), name="wider")


Pair = tuple[Tensor, Tensor]

CONFIGS: list[Config] = [
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "cosine", "grad_clip": 0.3},
    {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "schedule": "exponential", "gamma": 0.7},
    {"optimizer": "adamw", "lr": 0.01, "warmup_epochs": 1.5, "grad_clip": 0.5},
    {"optimizer": "sgd", "lr": 0.1},
    {"optimizer": "nadam", "lr": 0.01, "schedule": "cosine", "grad_clip": 0.5},
    {"optimizer": "schedule_free_adamw", "lr": 0.02, "warmup_epochs": 1.5, "weight_decay": 0.1},
    {"optimizer": "schedule_free_sgd", "lr": 0.5, "momentum": 0.8, "grad_clip": 0.5},
]


def trained(problem: Problem, trial: Trial, span: Span, state: Any = None) -> Outcome:
    return train_full_size_trial(
        problem, trial, full_size_task("a task", trial.number, span, None, problem.settings.seed), state
    )


def fine_tuned(config: Config) -> nn.Module:
    """A frozen base, the same for all trials, running statistics, and a head."""
    base, fixed = nn.Linear(64, 32), torch.Generator().manual_seed(3)
    with torch.no_grad():
        base.weight.copy_(torch.randn(32, 64, generator=fixed) / 8)
        base.bias.zero_()
    return nn.Sequential(base.requires_grad_(False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize(("model_fn", "ways"), [(mlp, [True, False]), (fine_tuned, [True])], ids=["mlp", "fine_tuned"])
def test_going_on_from_a_fused_sweep_is_training_in_one(problem: Problem, model_fn: Any, ways: list[bool]) -> None:
    """Also from one whose members trained one by one."""
    # Epochs of a sweep are not those of averaged weights.
    problem = replace(problem, model_fn=model_fn).with_settings(sweep=SweepConfig(surrogate=1), race=RaceConfig(ema=0))
    trials = {n: Trial(n, {**config, "batch_size": 32, "dropout": 0.2}) for n, config in enumerate(CONFIGS)}
    wholes = {number: trained(problem, trial, Span(0, 4)) for number, trial in trials.items()}
    for fused in ways:
        task = Task("a group", (Group("", tuple(trials), fused=fused),), (), Span(0, 2))
        outcome = train_group(problem, trials, task, load=pytest.fail)
        load = {"a group": {"parts": outcome.checkpoint}}.__getitem__
        for number, whole in wholes.items():
            (state,) = states_of(problem, trials, number, "a group", load)
            rest = trained(problem, trials[number], Span(2, 4), state)
            history = outcome.history[number] + rest.epochs
            assert [epoch for epoch, _ in history] == [1, 2, 3, 4]
            for (_, metrics), (_, expected) in zip(history, whole.epochs, strict=True):
                assert metrics == pytest.approx(expected, rel=1e-4)
            torch.testing.assert_close(rest.state["model"], whole.state["model"], rtol=1e-3, atol=1e-5)


SPACE: dict[str, Any] = {"lr": loguniform(1e-3, 0.3), "optimizer": choice(["sgd", "adamw"]), "batch_size": 64}


def epochs(result: TuneResult, heat: str) -> dict[int, list[int]]:
    seen = {r.trial: [line["epoch"] for line in r.history if line["heat"] == heat] for r in result.trials}
    return {number: of for number, of in seen.items() if of}


def test_the_sweeps_epochs_count_once_and_its_checkpoints_go(quick: Quick) -> None:
    result = quick(sweep=SweepConfig(surrogate=1), space=SPACE, race=RaceConfig(grace_period=1))
    swept, full = epochs(result, "sweep"), epochs(result, "race")
    (winner,) = [record for record in result.trials if record.status == "finished"]
    assert full == {winner.trial: [3, 4]}, "both finalists were swept to epoch 2, at which one of them is halved"
    assert (winner.epochs, winner.metric) == (4, result.best_metric)
    assert result.cost.race_epochs == 2
    assert result.cost.sweep_epochs == sum(map(len, swept.values())) == 9 + 4
    finalists = [record.trial for record in result.trials if record.epochs]
    assert [result.trials[n].epochs for n in finalists if n != winner.trial] == [2]
    for number in finalists:
        result.best_model(number)
    assert len(list((result.path / "checkpoints").iterdir())) == 2
    again = quick(sweep=SweepConfig(surrogate=1), space=SPACE, race=RaceConfig(grace_period=1))
    assert (again.trials, again.cost.race_epochs) == (result.trials, 2)


def test_finalists_that_the_sweep_trained_to_the_end_train_no_more(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    result = quick(
        sweep=SweepConfig(surrogate=1, grace_period=4), space=SPACE, race=RaceConfig(keep="last", grace_period=4)
    )
    assert result.cost.race_epochs == 0
    assert epochs(result, "race") == {}
    finished = [record for record in result.trials if record.status == "finished"]
    assert [record.metric == record.sweep_metric for record in finished] == [True, True]
    assert result.best_metric == min(record.metric for record in finished)
    assert result.evaluate(digits[1])["loss"] == pytest.approx(result.best_metric, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.mode. is 'max':UserWarning")
def test_a_best_epoch_whose_weights_are_gone_is_trained_once_more(quick: Quick) -> None:
    """Here the largest loss is the best: the first epoch's, of which the sweep keeps no weights."""
    asked: dict[str, Any] = {
        "sweep": SweepConfig(surrogate=1, grace_period=2),
        "race": RaceConfig(grace_period=4),
        "space": {"lr": grid_search([0.05, 0.1])},
        "num_samples": 1,
    }
    high = quick(**asked, mode="max", name="high")
    assert epochs(high, "race") == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}
    assert [record.kept_epoch for record in high.trials] == [1, 1]
    low = quick(**asked, mode="min", name="low")
    assert epochs(low, "race") == {0: [3, 4], 1: [3, 4]}


@pytest.mark.filterwarnings("ignore:.mode. is 'max':UserWarning")
def test_an_epoch_of_the_sweep_whose_score_is_a_mean_over_seeds_is_not_handed_back(
    quick: Quick, digits: tuple[Pair, Pair]
) -> None:
    """Here the largest loss is the best: the first epoch's, which the sweep trained from two seeds."""
    result = quick(space=SPACE, num_samples=3, max_t=2, mode="max", sweep=SweepConfig(surrogate=1, repeats=2))
    assert {record.kept_epoch for record in result.trials if record.epochs == 2} == {2}
    assert result.evaluate(digits[1])["loss"] == pytest.approx(result.best_metric, rel=1e-5)


def test_narrow_surrogates_are_not_handed_over(quick: Quick) -> None:
    result = quick(space=SPACE, race=RaceConfig(grace_period=4))
    assert sorted(epochs(result, "race").values()) == [[1, 2, 3, 4]] * 2
    assert result.transfer is None  # nobody asked for its check


@pytest.fixture
def open_swept(opens: Opens) -> Callable[[], Run]:
    """Opens a run of two trials once more, which a sweep at full width has trained for two epochs."""
    group = Task("sweep/to-2/from-0/group-0", (Group("", (0, 1), fused=True),), (), Span(0, 2))

    def call() -> Run:
        run = opens(2, sweep=SweepConfig(surrogate=1), race=RaceConfig(grace_period=1))
        if not run.store.done(group.key):
            outcome = train_group(run.problem, run.history.trials, group, load=pytest.fail)
            run.store.save(group.key, {"parts": outcome.checkpoint})
            unit = curves("sweep", {0: [0.5, 0.4], 1: [0.3, 0.2]})
            run.record(group.key, replace(unit, value={"members": [0, 1], "stop": 2}))
        return run

    return call


def test_a_call_with_more_time_can_go_on_with_the_sweep(open_swept: Callable[[], Run]) -> None:
    run = open_swept()
    hand_over(run, [0, 1])
    assert run.store.has("sweep/to-2/from-0/group-0")
    run.record(FINALISTS, Unit([0, 1]))
    hand_over(run, [0, 1])
    assert not run.store.has("sweep/to-2/from-0/group-0")


def test_who_has_a_checkpoint_of_fewer_epochs_than_the_journal_starts_anew(open_swept: Callable[[], Run]) -> None:
    """Its later checkpoint was lost, and time ran out before its epochs were trained again."""
    run = open_swept()
    again = "sweep/to-1/from-0/group-0"
    run.store.save(again, run.store.load("sweep/to-2/from-0/group-0", device=run.problem.device))
    run.record(again, Unit({"members": [0, 1], "stop": 1, "behind": {"0": 1}}))
    hand_over(run, [0, 1])
    assert run.history.curve("race", 0) == {}
    assert run.history.curve("race", 1) == {1: 0.3, 2: 0.2}


def test_who_trained_on_or_failed_since_stays_as_it_is(open_swept: Callable[[], Run]) -> None:
    run = open_swept()
    hand_over(run, [0, 1])
    assert run.history.curve("race", 1) == {1: 0.3, 2: 0.2}
    train_finalists(run, [0, 1], device := Scripted({0: [0.5, 0.4, 0.4, 0.4], 1: [0.3, 0.2, 0.6]}))
    # What raised afterwards is tried twice more, and then the one that was stopped goes on.
    assert device.trained == [(1, 3)] * 3 + [(0, 3), (0, 4)]
    assert set(run.history.failures) == {1}
    run = open_swept()
    hand_over(run, [0, 1])
    assert run.history.curve("race", 1) == {1: 0.3, 2: 0.2}
    assert set(run.history.failures) == {1}
