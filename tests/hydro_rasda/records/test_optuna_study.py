from __future__ import annotations

import json
import logging
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import TrialState
from ray import tune as ray_tune
from torch import nn

from hydro_rasda import (
    RaceConfig,
    TuneResult,
    choice,
    grid_search,
    load,
    loguniform,
    qloguniform,
    quniform,
    randint,
    sample_from,
    uniform,
)
from hydro_rasda.plots.hyperparameters import importance_of
from hydro_rasda.records.optuna_study import distribution
from hydro_rasda.space.space import describe, sample
from tests.hydro_rasda.conftest import SPACE
from tests.hydro_rasda.journals import signed
from tests.hydro_rasda.models import stumbles_in_some

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]


def told(study: Study) -> list[Any]:
    """All that a study says of its trials, but for when they were put in; a NaN is equal to another."""
    keep = ("number", "state", "params", "distributions", "user_attrs", "system_attrs", "intermediate_values", "values")
    return [repr([getattr(trial, name) for name in keep]) for trial in study.trials]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_importances_of_all_trials_and_our_best(quick: Quick, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    metric = {"min": "val_loss", "max": "val_accuracy"}[mode]
    result = quick(num_samples=16, mode=mode, metric=metric)
    monitored = logging.getLogger("optuna")
    monitored.addHandler(caplog.handler)
    study = result.to_optuna()
    monitored.removeHandler(caplog.handler)
    assert caplog.text == ""
    assert told(load(result.path).to_optuna()) == told(study)
    assert study.direction.name == {"min": "MINIMIZE", "max": "MAXIMIZE"}[mode]
    best = study.best_trial
    assert (best.number, best.value) == (result.best_trial, result.best_metric)
    assert best.params == result.best_config
    importances = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))
    assert importances.keys() == SPACE.keys()
    assert sum(importances.values()) == pytest.approx(1)
    assert all(math.isfinite(value) and value >= 0 for value in importances.values())
    curves = result.curves()
    for trial, record in zip(study.trials, result.trials, strict=True):
        own = curves[(curves.trial == record.trial) & (curves.metric == metric)]
        own = own[own.heat == trial.user_attrs["heat"]]
        assert trial.intermediate_values == dict(zip(own.epoch, own.value, strict=True))
        assert trial.state is TrialState.COMPLETE
        assert trial.value == (record.metric if record.epochs else record.sweep_metric)


def test_a_surrogate_that_is_better_than_the_best_model_does_not_win(quick: Quick) -> None:
    """Scores of the sweep are all made better than any of full size; those stopped there, for last weights too."""
    result = quick(race=RaceConfig(keep="last", top_k=3))
    journal = result.path / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    stopped = [record.trial for record in result.trials if 0 < record.epochs < 4]
    assert stopped
    for line in lines:
        early = line.get("heat") == "race" and line["trial"] in stopped
        if line["event"] == "metrics" and (line["heat"] == "sweep" or early):
            line["val_loss"] /= 1000
    journal.write_bytes(signed(lines))
    changed = load(result.path)
    assert changed.best_trial == result.best_trial
    study = changed.to_optuna()
    assert study.best_trial.number == result.best_trial
    assert min(trial.value for trial in study.trials if trial.value is not None) < result.best_metric / 10


@pytest.mark.parametrize(("mode", "factor"), [("min", 1 / 1000), ("min", 1), ("max", 1000)])
def test_a_stopped_trial_that_kept_a_better_score_does_not_win(quick: Quick, mode: str, factor: float) -> None:
    """Trials are compared by their ends. Of equal scores, a study would take the first trial's."""
    result = quick(mode=mode, metric={"min": "val_loss", "max": "val_accuracy"}[mode], race=RaceConfig(top_k=3))
    journal = result.path / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    stopped = next(record.trial for record in result.trials if record.epochs and record.status == "stopped")
    for line in lines:
        if line.get("key", "").startswith(f"race/trial-{stopped}/to-"):
            line["value"]["best"]["score"] = factor * result.best_metric
    journal.write_bytes(signed(lines))
    changed = load(result.path)
    assert changed.best_trial == result.best_trial
    assert changed.trials[stopped].metric == factor * result.best_metric
    assert changed.to_optuna().best_trial.number == result.best_trial


def test_a_winner_that_ended_by_itself_is_the_best_of_a_study(quick: Quick) -> None:
    """Where last weights count, others that trained for longer have worse ends."""
    result = quick(race=RaceConfig(keep="last", top_k=3))
    winner = result.trials[result.best_trial]
    ended = replace(winner, epochs=winner.epochs - 1, kept_epoch=winner.epochs - 1)
    trials = [ended if record is winner else record for record in result.trials]
    trials += [replace(winner, trial=len(trials), metric=2 * winner.metric)]
    study = replace(result, trials=tuple(trials)).to_optuna()
    assert study.best_trial.number == result.best_trial


@pytest.mark.filterwarnings("ignore:transfer to full size")
def test_what_diverged_failed_or_never_began(quick: Quick) -> None:
    space = {"lr": choice([0.01, 0.03, 1e30]), "optimizer": "sgd", "stumbles": choice([0.0, 0.0, 1.0])}
    result = quick(model_fn=stumbles_in_some, space=space, num_samples=12)
    study = result.to_optuna()
    states = {"finished": "COMPLETE", "stopped": "COMPLETE", "diverged": "FAIL", "failed": "FAIL"}
    assert {record.status for record in result.trials} == states.keys()
    for trial, record in zip(study.trials, result.trials, strict=True):
        assert trial.state.name == states[record.status]
        assert trial.params == {"lr": record.config["lr"], "stumbles": record.config["stumbles"]}
        assert trial.user_attrs["error"] == record.error
    assert study.best_trial.number == result.best_trial


def test_a_trial_that_lacks_one_of_several_values_is_no_result(quick: Quick) -> None:
    result = quick(metric=["val_loss", "params"], num_samples=2, max_t=1)
    first, second = result.trials
    trials = (replace(first, costs={"params": math.nan}), second)
    states = [trial.state for trial in replace(result, trials=trials).to_optuna().trials]
    assert states == [TrialState.FAIL, TrialState.COMPLETE]


def test_trials_that_have_not_begun_wait_to_be_tried(quick: Quick) -> None:
    result = quick(time_budget_s=1e-3)
    study = result.to_optuna()
    waiting = [n for n, record in enumerate(result.trials) if record.status == "not begun"]
    assert waiting
    assert [trial.number for trial in study.trials if trial.state is TrialState.WAITING] == waiting
    asked = study.ask()
    assert asked.number == waiting[0]
    assert asked.suggest_float("lr", 1e-3, 0.3, log=True) == result.trials[waiting[0]].config["lr"]


OBJECTS = [nn.ReLU, nn.GELU]


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        (uniform(0.5, 0.9), FloatDistribution(0.5, 0.9)),
        (loguniform(1e-4, 1), FloatDistribution(1e-4, 1, log=True)),
        (quniform(0.1, 0.5, 0.1), FloatDistribution(0.1, 0.5, step=0.1)),
        (qloguniform(1e-4, 1, 1e-4), FloatDistribution(1e-4, 1, log=True)),
        (randint(1, 5), IntDistribution(1, 4)),
        (ray_tune.qrandint(2, 10, 2), IntDistribution(2, 10, step=2)),
        (ray_tune.lograndint(1, 100), IntDistribution(1, 99, log=True)),
        (choice(["sgd", "adamw"]), CategoricalDistribution(("sgd", "adamw"))),
        (choice([None, True, 1.5, "x"]), CategoricalDistribution((None, True, 1.5, "x"))),
        (choice([[1, 2], (3,)]), CategoricalDistribution(("[1, 2]", "[3]"))),
        (grid_search([32, 64]), CategoricalDistribution((32, 64))),
    ],
)
def test_a_domain_in_optunas_terms(domain: Any, expected: BaseDistribution) -> None:
    """Closed forms; each holds what is sampled of it."""
    space = {"lr": 0.1, "x": domain}
    words = describe(space)["x"]
    assert distribution(words, []) == expected
    if not isinstance(expected, CategoricalDistribution):
        assert distribution(words, [config["x"] for config in sample(space, 50, seed=0)]) == expected


@pytest.mark.parametrize(
    ("domain", "values", "expected"),
    [
        (uniform(0.5, 0.9), [0.4, 0.6, 1.0], FloatDistribution(0.4, 1.0)),
        (loguniform(1e-2, 1), [1e-3, 0.1], FloatDistribution(1e-3, 1, log=True)),
        (loguniform(1e-2, 1), [0.0, 0.1], FloatDistribution(0.0, 1)),
        (quniform(0.1, 0.5, 0.1), [0.1, 0.24], FloatDistribution(0.1, 0.5)),
        (randint(1, 5), [2, 6], IntDistribution(1, 6)),
        (randint(1, 5), [2, 3.6], FloatDistribution(1, 4)),
        (uniform(0.5, 0.9), [0.6, None, 0.7], CategoricalDistribution((0.6, None, 0.7))),
        (randint(1, 5), [2, True], CategoricalDistribution((2, True))),
        (ray_tune.randn(0, 1), [-0.5, 0.25], FloatDistribution(-0.5, 0.25)),
        (sample_from(lambda spec: 1), [3, 1, 2], IntDistribution(1, 3)),
        (sample_from(lambda spec: "a"), ["b", "a", "b"], CategoricalDistribution(("b", "a"))),
        (choice(OBJECTS), ["ReLU", "GELU"], CategoricalDistribution(("ReLU", "GELU"))),
        (choice([1, 2]), [3, 1], CategoricalDistribution((1, 2, 3))),
        (sample_from(lambda spec: 1), [2**70 + 1, 2**70 + 9], FloatDistribution(2**70, 2**70)),
        (randint(1, 2**60), [2**59 + 1, 5], FloatDistribution(1, 2**60)),
        (sample_from(lambda spec: 1), [math.inf, 0.5], CategoricalDistribution((math.inf, 0.5))),
    ],
)
def test_what_the_space_does_not_say_or_pbt_has_left(
    domain: Any, values: list[Any], expected: BaseDistribution
) -> None:
    assert distribution(describe({"x": domain})["x"], values) == expected


def test_nested_names_and_objects(quick: Quick) -> None:
    inner = {"depth": choice([1, 2]), "act": choice(OBJECTS)}
    space = {"lr": loguniform(1e-3, 0.3), "extra": inner, "batch_size": 64, "a/key": uniform(0, 1)}
    result = quick(space=space, num_samples=6)
    for study in (result.to_optuna(), load(result.path).to_optuna()):
        best = study.best_trial.params
        assert best.keys() == {"lr", "extra/depth", "extra/act", "a/key"}
        assert best["extra/act"] == result.best_config["extra"]["act"].__name__


def test_a_key_that_branches_draw_from_several_domains_spans_its_values(quick: Quick) -> None:
    branches = [{"act": choice(["relu", "gelu"]), "size": uniform(1, 2)}, {"act": "tanh", "size": randint(5, 9)}]
    result = quick(space={"lr": 0.1, "branch": choice(branches)}, num_samples=9, max_t=1)
    acts, sizes = ([record.config[name] for record in result.trials] for name in ("act", "size"))
    distributions = result.to_optuna().trials[0].distributions
    assert distributions == {
        "act": CategoricalDistribution(tuple(dict.fromkeys(acts))),
        "size": FloatDistribution(min(sizes), max(sizes)),
    }


def test_without_optuna_it_says_what_to_install(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    result = quick(num_samples=1, max_t=1)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"`to_optuna` needs optuna, .* pip install 'hydro-rasda\[optuna\]'"):
        result.to_optuna()


def test_numbers_that_no_float_holds_and_infinities_are_those_of_the_run(quick: Quick) -> None:
    limits = [1.0, math.inf, -math.inf, math.nan]
    seeds = {"seed": sample_from(lambda spec: 2**70 + random.randrange(9)), "huge": choice([10**400, 3])}
    space = {"lr": 0.1, "limit": choice(limits), **seeds}
    result = quick(space=space, num_samples=9, max_t=1)
    study = result.to_optuna()
    assert [repr(t.params["limit"]) for t in study.trials] == [repr(t.config["limit"]) for t in result.trials]
    assert [t.params["seed"] for t in study.trials] == [t.config["seed"] for t in result.trials]
    assert [str(t.params["huge"]) for t in study.trials] == [str(t.config["huge"]) for t in result.trials]
    limit = study.trials[0].distributions["limit"]
    assert isinstance(limit, CategoricalDistribution)
    assert len(limit.choices) == len({repr(trial.config["limit"]) for trial in result.trials})


def test_importances_of_keys_that_the_best_trial_lacks(quick: Quick) -> None:
    branches = [{"plain": True}, {"size": uniform(1, 2)}]
    result = quick(space={"lr": 0.1, "branch": choice(branches)}, num_samples=12, max_t=1)
    lacks = next(trial.trial for trial in result.trials if "size" not in trial.config)
    assert [*importance_of(replace(result, best_trial=lacks))] == ["size"]
