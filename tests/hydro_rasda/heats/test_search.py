from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.tune.search import ConcurrencyLimiter, Searcher
from ray.tune.search.bohb import TuneBOHB
from ray.tune.search.optuna import OptunaSearch
from torch import nn

from hydro_rasda import (
    RunExists,
    SweepConfig,
    TuneResult,
    choice,
    grid_search,
    loguniform,
    qloguniform,
    sample_from,
    uniform,
)
from hydro_rasda.heats.cost_limits import Costs, all_fit
from hydro_rasda.heats.search import (
    DRAWS,
    SEARCHER_ROUNDS,
    RandomSearch,
    SearcherSearch,
    check_searcher,
    named_searcher,
    prepare,
    with_objects,
)
from hydro_rasda.history.lines import jsonable
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.journal import read_messages
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import SEARCHERS, TuneConfig
from hydro_rasda.space.domains import to_ray
from hydro_rasda.space.space import sample
from tests.hydro_rasda.models import counted

pytestmark = pytest.mark.usefixtures("one_process")

SPACE: dict[str, Any] = {
    "lr": loguniform(1e-4, 1.0),
    "batch_size": choice([16, 32]),
    "optimizer": choice(["sgd", "adamw"]),
    "constant": 3,
    "nested": {"x": uniform(0.0, 1.0), "constant": "c"},
}

Quick = Callable[..., TuneResult]
Open = Callable[..., SearcherSearch]


def old_hpbandster(test: Any) -> Any:
    """hpbandster, which TuneBOHB needs, is older than the ConfigSpace and statsmodels that it runs on."""
    for warning in ("ignore:Please use:DeprecationWarning", "ignore:After 0.17:FutureWarning"):
        test = pytest.mark.filterwarnings(warning)(test)
    return test


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    yield
    assert not ray.is_initialized()


@pytest.fixture
def open_search(problem: Problem, tmp_path: Path) -> Iterator[Open]:
    """Opens a search over `SPACE`, as `tune` does; a second call with the same name resumes."""
    stores: list[Store] = []

    def call(given: Searcher | str, num_samples: int, name: str = "run", mode: str = "min") -> SearcherSearch:
        for store in stores:
            store.close()
        asked = problem.with_settings(mode=mode, num_samples=num_samples)
        searcher = named_searcher(given, SPACE, asked.settings) if isinstance(given, str) else given
        assert searcher is not None
        if searcher is given:
            prepare(searcher, SPACE, asked.settings.comparison.objectives)
        stores.append(Store.open(tmp_path / name, {}, "auto"))
        run = Run(asked, stores[-1])
        return SearcherSearch(searcher, SPACE, run)

    yield call
    for store in stores:
        store.close()


def score(config: dict[str, Any]) -> float:
    """Best at lr = 0.01, x = 0.5."""
    off: float = abs(math.log10(config["lr"]) + 2) + abs(config["nested"]["x"] - 0.5)
    return off


def play(search: SearcherSearch, sign: float = 1.0) -> list[dict[str, Any]]:
    """All configurations that a search gives where it is told each batch's scores before the next."""
    configs: list[dict[str, Any]] = []
    while trials := search.next_trials():
        assert [trial.number for trial in trials] == list(range(len(configs), len(configs) + len(trials)))
        for trial in trials:
            search._tell(trial.number, 1, sign * score(dict(trial.config)))
        configs += [dict(trial.config) for trial in trials]
    return configs


both_searchers = pytest.mark.parametrize("kind", [OptunaSearch, TuneBOHB])


def test_random_search_gives_the_sample_at_once() -> None:
    search = RandomSearch(SPACE, 5, seed=1)
    assert [dict(trial.config) for trial in search.next_trials()] == sample(SPACE, 5, seed=1)
    assert search.next_trials() == []


@pytest.mark.parametrize("more", [{}, {"grid": grid_search([1, 2])}, {"drawn": sample_from(lambda _: random.random())}])
def test_more_samples_begin_with_the_same(more: dict[str, Any]) -> None:
    few, many = (RandomSearch({**SPACE, **more}, count, seed=1).trials for count in (3, 7))
    assert few == many[: len(few)]
    assert len({trial.config["lr"] for trial in many}) == len(many)


def test_random_search_says_whether_time_or_constraints_left_it_with_few() -> None:
    space, rarely = {"lr": uniform(0.0, 1.0)}, lambda config: config["lr"] < 0.001
    in_time = RandomSearch(space, 20, 0, fits=lambda config: config["lr"] < 0.5)
    late = RandomSearch(space, 20, 0, fits=lambda config: config["lr"] < 0.5, enough=lambda found: found >= 7)
    few = RandomSearch(space, 20, 0, fits=rarely)
    assert (in_time.planned, in_time.late) == (20, False)
    assert (late.planned, late.late) == (7, True)
    assert (few.planned < 20, few.late) == (True, False)


def test_once_enough_configurations_fit_no_other_is_looked_at() -> None:
    """To look at one may take a model of full size."""
    looked_at: list[bool] = []

    def fits(config: Mapping[str, Any]) -> bool:
        looked_at.append(config["lr"] < 0.3)
        return looked_at[-1]

    assert RandomSearch({"lr": uniform(0.0, 1.0)}, 20, 0, fits=fits).planned == 20
    assert looked_at[-1]
    assert sum(looked_at) == 20


@pytest.mark.parametrize("finished", [True, False])
def test_a_searcher_with_few_suggestions_names_constraints_once_and_only_if_they_are_the_reason(
    problem: Problem, tmp_path: Path, finished: bool
) -> None:
    space, asked, first = {"lr": loguniform(1e-4, 1.0)}, problem.with_settings(num_samples=8), list[float]()
    searcher = named_searcher("tpe", space, asked.settings)
    assert searcher is not None
    suggest: Any = searcher.suggest

    def few(trial: str) -> Any:
        if finished and len(first) == 3:
            return Searcher.FINISHED
        found = suggest(trial)
        first.extend([found["lr"]] * (len(first) < 3))
        return found

    searcher.suggest = few
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        search = SearcherSearch(searcher, space, Run(asked, store), lambda config: config["lr"] in first)
        assert len([trial for _ in range(8) for trial in search.next_trials()]) == 3
        told = [message.text for message in read_messages(store.path)]
        assert [line.partition(":")[0] for line in told] == ["3 of 8 configurations are tried"] * (not finished)


def test_a_searcher_draws_within_constraints_as_long_as_there_is_time(problem: Problem, tmp_path: Path) -> None:
    space, drawn = {"lr": loguniform(1e-4, 1.0)}, list[float]()

    def fits(config: Mapping[str, Any]) -> bool:
        drawn.append(config["lr"])
        return True

    for budget, count in ((1e-9, 1), (None, 8)):
        asked = problem.with_settings(num_samples=8, time_budget_s=budget)
        searcher = named_searcher("tpe", space, asked.settings)
        assert searcher is not None
        with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
            search = SearcherSearch(searcher, space, Run(asked, store), fits)
            drawn.clear()
            while search.next_trials():
                pass
            assert ([trial.config["lr"] for trial in search.given], len(drawn)) == (drawn, count)
            assert search.late is (budget is not None)
            assert not read_messages(store.path)


def test_a_searcher_is_refused_if_no_suggestion_meets_the_constraints(problem: Problem, tmp_path: Path) -> None:
    """Costs of a model are known too late for a sample of the space to tell."""
    space, asked = {"lr": loguniform(1e-4, 1.0)}, problem.with_settings(num_samples=1)
    searcher = named_searcher("tpe", space, asked.settings)
    assert searcher is not None
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        search = SearcherSearch(searcher, space, Run(asked, store), lambda config: False)
        with pytest.raises(ValueError, match=rf"`sweep\.constraints` leaves nothing to try: none of {DRAWS} conf"):
            search.next_trials()
        assert not read_messages(store.path)


def test_a_searcher_is_asked_for_more(open_search: Open) -> None:
    first = play(open_search(OptunaSearch(seed=3), 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        grown = play(open_search(OptunaSearch(seed=3), 16))
    assert grown[:6] == first
    assert len(grown) == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert play(open_search(OptunaSearch(seed=3), 16)) == grown


def test_infinity_is_suggested_as_it_is(problem: Problem, tmp_path: Path) -> None:
    """The journal has null for it."""
    space, searcher = {"lr": 0.1, "cut": choice([math.inf, 1e9])}, OptunaSearch(seed=3)
    prepare(searcher, space, problem.settings.comparison.objectives)
    with warnings.catch_warnings(), Store.open(tmp_path / "run", {}, "auto") as store:
        warnings.simplefilter("error", UserWarning)
        search = SearcherSearch(searcher, space, Run(problem.with_settings(num_samples=9), store))
        cuts = [trial.config["cut"] for _ in range(3) for trial in search.next_trials()]
    assert {*cuts} <= {math.inf, 1e9}
    assert math.inf in cuts


def test_random_search_refuses_what_a_sample_from_gave() -> None:
    with pytest.raises(ValueError, match="a space with the key 'lr'"):
        RandomSearch({"momentum": uniform(0, 1)}, 1, seed=0)


@old_hpbandster
@both_searchers
def test_configurations_come_in_batches_with_the_constants_of_the_space(kind: Any, open_search: Open) -> None:
    search = open_search(kind(seed=0), num_samples=10)
    sizes = []
    while trials := search.next_trials():
        sizes.append(len(trials))
        for trial in trials:
            config = dict(trial.config)
            assert set(config) == set(SPACE)
            assert (config["constant"], config["nested"]["constant"]) == (3, "c")
            assert 1e-4 <= config["lr"] <= 1
            assert (type(config["batch_size"]), type(config["optimizer"])) == (int, str)
    assert sizes == [3, 3, 3, 1]
    assert len(sizes) == SEARCHER_ROUNDS


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.slow
@old_hpbandster
@both_searchers
def test_a_searcher_learns_from_the_first_rung(kind: Any, mode: str, open_search: Open) -> None:
    def later_scores(search: SearcherSearch, sign: float) -> float:
        scores = [score(config) for config in play(search, sign)]
        return sum(scores[20:]) / len(scores[20:])

    sign = 1.0 if mode == "min" else -1.0
    told = [later_scores(open_search(kind(seed=s), 80, f"told-{s}", mode), sign) for s in range(2)]
    untold = [later_scores(open_search(kind(seed=s), 80, f"untold-{s}", mode), 0.0) for s in range(2)]
    assert sum(told) < 0.8 * sum(untold)


@old_hpbandster
@both_searchers
def test_a_seeded_searcher_repeats_itself_on_resume(kind: Any, open_search: Open) -> None:
    first = play(open_search(kind(seed=3), 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert play(open_search(kind(seed=3), 12)) == first


def test_max_mirrors_min(open_search: Open) -> None:
    assert play(open_search(OptunaSearch(seed=3), 40, "min")) == play(
        open_search(OptunaSearch(seed=3), 40, "max", mode="max"), sign=-1.0
    )


def test_an_unseeded_searcher_goes_on_with_the_journals_configurations(open_search: Open) -> None:
    search = open_search(OptunaSearch(seed=1), 12)
    recorded = [trial.config for _ in range(2) for trial in search.next_trials()]
    resumed = open_search(OptunaSearch(seed=2), 12)
    with pytest.warns(UserWarning, match="the searcher does not repeat its suggestion for trial 0: give it a seed"):
        again = [trial.config for _ in range(2) for trial in resumed.next_trials()]
    assert again == recorded
    for number in range(6):
        resumed._tell(number, 1, 0.5)
        resumed._close(number, 1, 0.5)
    fresh = resumed.next_trials()
    assert [trial.number for trial in fresh] == [6, 7, 8]
    assert not any(trial.config in recorded for trial in fresh)


def test_an_unseeded_searcher_may_suggest_models_whose_costs_no_process_has_measured(
    problem: Problem, tmp_path: Path
) -> None:
    """Their costs are recorded while the journal is read."""
    asked = problem.with_settings(num_samples=8, sweep=SweepConfig(surrogate=0.5, constraints={"params": (None, 1e9)}))

    def opened(store: Store, seed: int) -> tuple[Run, SearcherSearch]:
        prepare(searcher := OptunaSearch(seed=seed), SPACE, asked.settings.comparison.objectives)
        run = Run(asked, store)
        return run, SearcherSearch(searcher, SPACE, run, all_fit(asked.settings.sweep.constraints, Costs(run)))

    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        _, search = opened(store, 1)
        recorded = [trial.config for trial in search.next_trials()]
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        run, search = opened(store, 2)
        with pytest.warns(UserWarning, match="the searcher does not repeat its suggestion"):
            run.fold(search.hear)
        assert [trial.config for trial in search.given] == recorded
        assert run.history.last == [*store.units()][-1], "that of the costs, as the next reader finds it"


def test_a_failed_trial_is_no_result(open_search: Open) -> None:
    searcher = OptunaSearch(seed=0)
    search = open_search(searcher, 4)
    (trial,) = search.next_trials()
    search._tell(trial.number, 1, math.nan)
    search.next_trials()
    study = searcher._ot_study
    assert study is not None
    assert [(t.state.name, t.value) for t in study.get_trials()] == [("FAIL", None), ("RUNNING", None)]


def test_the_last_batch_is_told_every_rung(open_search: Open) -> None:
    searcher = OptunaSearch(seed=0)
    search = open_search(searcher, 1)
    (trial,) = search.next_trials()
    for epoch in (1, 3, 9):
        search._tell(trial.number, epoch, 1 / epoch)
    search._close(trial.number, 9, 1 / 9)
    search._close(trial.number, 9, 1 / 9)
    study = searcher._ot_study
    assert study is not None
    (told,) = study.get_trials()
    assert (told.value, told.intermediate_values) == (1 / 9, {1: 1.0, 3: 1 / 3, 9: 1 / 9})


@pytest.mark.parametrize("wrong", ["optuna", OptunaSearch, ConcurrencyLimiter(OptunaSearch(), max_concurrent=2)])
def test_what_is_no_searcher(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"`sweep\.searcher` is .*, but must be "):
        check_searcher(wrong)


@old_hpbandster
@both_searchers
def test_a_space_that_a_searcher_cannot_search(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"`space` cannot be searched by {kind.__name__}: Grid search parameters"):
        prepare(kind(), {**SPACE, "depth": grid_search([1, 2])}, (("val_loss", "min"),))


@pytest.mark.slow
def test_tune_with_a_searcher(quick: Quick) -> None:
    first = quick(sweep=SweepConfig(searcher=OptunaSearch(seed=0)), name="one")
    again = quick(sweep=SweepConfig(searcher=OptunaSearch(seed=0)), name="two")
    assert len(first.trials) == 9
    assert [t.config for t in first.trials] == [t.config for t in again.trials]
    assert (first.best_config, first.best_metric) == (again.best_config, again.best_metric)
    resumed = quick(sweep=SweepConfig(searcher=OptunaSearch(seed=0)), name="one")
    assert (resumed.best_config, resumed.best_metric) == (first.best_config, first.best_metric)


def test_a_searcher_stays_as_it_was(quick: Quick) -> None:
    searcher = OptunaSearch(seed=0)
    before = repr(vars(searcher))
    quick(sweep=SweepConfig(searcher=searcher), num_samples=3, max_t=2)
    assert repr(vars(searcher)) == before


@pytest.mark.slow
def test_an_interrupted_run_with_a_seeded_searcher_ends_as_an_unbroken_one(quick: Quick) -> None:
    calls: list[bool] = []
    impatient = counted(calls, interrupted_at=60)
    with pytest.raises(KeyboardInterrupt):
        quick(model_fn=impatient, sweep=SweepConfig(searcher=OptunaSearch(seed=0)))
    resumed = quick(model_fn=impatient, sweep=SweepConfig(searcher=OptunaSearch(seed=0)))
    assert len(calls) > 100
    unbroken = quick(model_fn=impatient, sweep=SweepConfig(searcher=OptunaSearch(seed=0)), name="unbroken")
    assert [record.history for record in resumed.trials] == [record.history for record in unbroken.trials]


@pytest.mark.slow
@old_hpbandster
def test_tune_with_bohb(quick: Quick) -> None:
    result = quick(sweep=SweepConfig(searcher=TuneBOHB(seed=0)))
    assert len(result.trials) == 9
    assert math.isfinite(result.best_metric)


def test_bad_searcher_leaves_no_run(quick: Quick, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`sweep\.searcher` is 'optuna'"):
        quick(sweep=SweepConfig(searcher="optuna"))
    with pytest.raises(ValueError, match="`space` cannot be searched by OptunaSearch"):
        quick(
            sweep=SweepConfig(searcher=OptunaSearch()),
            space={"lr": loguniform(1e-3, 1.0), "activation": grid_search(["relu"])},
        )
    assert not list(tmp_path.iterdir())


def test_known_configurations_come_first() -> None:
    space = {"lr": loguniform(1e-4, 1.0), "twice": sample_from(lambda spec: 2 * spec.config.lr), "net": {"depth": 3}}
    sampled = RandomSearch(space, 5, 0).trials
    known: list[dict[str, Any]] = [{"lr": 0.125}, {"lr": 0.5, "twice": 0.0, "net": {"depth": 4}}]
    trials = RandomSearch(space, 5, 0, known).trials
    assert [trial.number for trial in trials] == [0, 1, 2, 3, 4]
    assert trials[0].config == {"lr": 0.125, "twice": 0.25, "net": {"depth": 3}}
    assert trials[1].config == known[1]
    assert [trial.config for trial in trials[2:]] == [trial.config for trial in sampled[:3]]
    grown = RandomSearch(space, 9, 0, known).trials
    assert [trial.config for trial in grown[:5]] == [trial.config for trial in trials]
    assert len(RandomSearch(space, 1, 0, known).trials) == 2
    grid = {"lr": grid_search([0.1, 0.2, 0.3])}
    assert [t.config["lr"] for t in RandomSearch(grid, 1, 0, [{"lr": 0.5}, {}]).trials] == [0.5, 0.1, 0.1, 0.2, 0.3]
    few = RandomSearch(grid, 1, 0, [{"lr": 0.3}], fits=lambda config: config["lr"] > 0.15).trials
    one = RandomSearch(grid, 1, 0, [{"lr": 0.3}], fits=lambda config: config["lr"] > 0.25).trials
    assert [[trial.config["lr"] for trial in trials] for trials in (few, one)] == [[0.3, 0.2, 0.3], [0.3, 0.3]]


def test_a_known_integer_stands_for_a_float() -> None:
    space = {"lr": 0.1, "p": uniform(0, 1), "q": choice([0.5, 1.0]), "in": {"p": uniform(0, 1)}, "n": choice([1, 0.5])}
    (trial,) = RandomSearch(space, 1, 0, [{"p": 0, "q": 1, "in": {"p": 1}, "n": 1}]).trials
    assert repr(trial.config) == "{'lr': 0.1, 'p': 0.0, 'q': 1.0, 'in': {'p': 1.0}, 'n': 1}"


def test_of_a_nested_space_a_known_configuration_may_be_a_part() -> None:
    space = {"lr": 0.1, "net": {"depth": choice([2, 3]), "head": {"width": choice([8]), "drop": 0.5}}}
    (trial,) = RandomSearch(space, 1, 0, [{"net": {"depth": 9, "head": {"width": 7}}}]).trials
    assert trial.config["net"] == {"depth": 9, "head": {"width": 7, "drop": 0.5}}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"sweep": {"first": {"lr": 0.1}}}, "`sweep.first` is .*, but must be a list of configurations"),
        ({"sweep": {"first": [0.1]}}, r"`sweep.first\[0\]` is 0.1, but must be a configuration: a dict"),
        (
            {"sweep": {"first": [{"rl": 0.1}]}},
            r"`sweep.first\[0\]` is .*, but must be of the keys of `space`, which has no rl",
        ),
        (
            {"sweep": SweepConfig(first=[{"lr": -1.0}])},
            r"`sweep.first\[0\]` gives a configuration in which `lr` is -1.0, but must be a finite number > 0",
        ),
    ],
)
def test_what_is_no_configuration_of_the_space_is_refused(
    quick: Callable[..., TuneResult], arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        quick(**arguments)


def test_a_run_is_told_by_what_came_first(quick: Callable[..., TuneResult]) -> None:
    result = quick(sweep=SweepConfig(first=[{"lr": 0.0625}]), num_samples=4)
    assert result.trials[0].config["lr"] == 0.0625
    assert len(result.trials) == 4
    with pytest.raises(RunExists, match=r"`sweep\.first` has other values"):
        quick(sweep=SweepConfig(first=[{"lr": 0.125}]), num_samples=4)


NAMED = [name for name in SEARCHERS if name != "random"]


@pytest.mark.parametrize("name", NAMED)
def test_a_named_searcher_repeats_itself_on_resume_and_learns(name: Any, open_search: Open) -> None:
    def played(run: str, sign: float = 1.0) -> list[dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            return play(open_search(name, 16, run), sign)

    first = played("run")
    assert len(first) == 16
    assert played("run") == first
    upside_down = played("other", -1.0)
    assert upside_down[:4] == first[:4]
    assert (upside_down == first) is (name == "qmc")


def test_sobol_points_fill_a_range_evenly_from_the_first_batch_on(open_search: Open) -> None:
    searcher = named_searcher("qmc", SPACE, TuneConfig(num_samples=32))
    assert not isinstance(searcher, str)
    assert searcher is not None
    found = sorted(searcher.suggest(str(i))["lr"] for i in range(16))
    shares = [(math.log(lr) - math.log(1e-4)) / (math.log(1.0) - math.log(1e-4)) for lr in found]
    assert [int(16 * share) for share in shares] == list(range(16))


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution:UserWarning")
def test_a_choice_between_a_mapping_and_another_value_is_suggested(problem: Problem, tmp_path: Path) -> None:
    space = {"lr": 0.1, "drop": choice([None, {"p": 0.5}])}
    asked = problem.with_settings(num_samples=16)
    searcher = named_searcher("tpe", space, asked.settings)
    assert searcher is not None
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        batch = SearcherSearch(searcher, space, Run(asked, store)).next_trials
        found = [trial.config["drop"] for _ in range(4) for trial in batch()]
    assert None in found
    assert {"p": 0.5} in found


def test_values_of_a_searcher_are_rounded_as_those_at_random(problem: Problem, tmp_path: Path) -> None:
    space = {**SPACE, "width": qloguniform(8, 512, 8), "nested": {"width": qloguniform(8, 512, 8)}}
    asked = problem.with_settings(num_samples=16)
    searcher = named_searcher("tpe", space, asked.settings)
    assert not isinstance(searcher, str)
    assert searcher is not None
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        trials = SearcherSearch(searcher, space, Run(asked, store)).next_trials()
    widths = [width for trial in trials for width in (trial.config["width"], trial.config["nested"]["width"])]
    assert len({*widths}) > 2
    assert all(width % 8 == 0 and 8 <= width <= 512 for width in widths)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"x": choice([0.0, uniform(0.1, 0.5)])}, r"`space\['x'\]` holds a domain in a list or a choice"),
        ({"n": {"x": [uniform(0.1, 0.5), 3]}}, r"`space\['n'\]\['x'\]` holds a domain in a list or a choice"),
        ({"b": choice([{"x": (uniform(0, 1), 3)}, {}])}, r"`space\['b'\]\[0\]\['x'\]` holds a domain in a list"),
        ({"n": {"a/b": uniform(0, 1)}}, r"`space\['n'\]` has the key 'a/b', but a searcher needs names without"),
        ({"n": {1: uniform(0, 1)}}, r"`space\['n'\]` has the key 1, but a searcher needs names without"),
    ],
)
def test_domains_where_a_searcher_does_not_look(space: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        named_searcher("tpe", {"lr": loguniform(1e-4, 1.0), **space}, TuneConfig())


def test_cma_learns_from_one_metric() -> None:
    two = TuneConfig(objectives=(("val_loss", "min"), ("macs", "min")))
    with pytest.raises(
        ValueError, match=r"`sweep.searcher` is 'cma', but must be another one where `metric` is a list"
    ):
        named_searcher("cma", SPACE, two)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydro_rasda.heats.search.find_spec", lambda package: None if package == "cmaes" else package)
    told = r"'cma' needs cmaes, which is not there: pip install 'hydro-rasda\[searchers\]'"
    with pytest.raises(ImportError, match=told):
        named_searcher("cma", SPACE, TuneConfig())
    assert named_searcher("random", SPACE, TuneConfig()) is None


@pytest.mark.filterwarnings("ignore:Choices for a categorical distribution:UserWarning")
def test_an_unseeded_searcher_goes_on_with_classes_functions_and_tuples(problem: Problem, tmp_path: Path) -> None:
    acts = choice([nn.ReLU, nn.Tanh])
    nested = {"sizes": choice([(8, 8), (16,)]), "x": uniform(0.0, 1.0)}
    space = {"lr": loguniform(1e-4, 1.0), "act": acts, "score": score, "nested": nested}
    asked, found = problem.with_settings(num_samples=16), list[list[Any]]()
    for seed in (1, 2):
        searcher = OptunaSearch(seed=seed)
        prepare(searcher, space, asked.settings.comparison.objectives)
        with closing(Store.open(tmp_path / "run", {}, "auto")) as store, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the searcher does not repeat")
            found.append([trial.config for trial in SearcherSearch(searcher, space, Run(asked, store)).next_trials()])
    assert found[0] == found[1]
    assert {config["act"] for config in found[1]} == {nn.ReLU, nn.Tanh}


def test_a_searcher_with_a_space_of_its_own_is_refused() -> None:
    drawn = OptunaSearch.convert_search_space(to_ray({"lr": loguniform(1e-6, 1e-5)}))
    own = OptunaSearch(space=drawn, metric="loss", mode="min")
    with pytest.raises(ValueError, match=r"`sweep\.searcher` is .*, but must be a new one without a space of its own"):
        prepare(own, SPACE, TuneConfig().comparison.objectives)


class AtTheBound(Searcher):  # type: ignore[misc]
    def suggest(self, trial_id: str) -> dict[str, Any]:
        return {"lr": 0.1, "momentum": 1.0, "nested": {"x": 2.0}}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None: ...


def test_a_searcher_may_suggest_an_upper_bound_that_no_sample_reaches(problem: Problem, tmp_path: Path) -> None:
    """As Optuna's Gaussian process does, whose optimum often lies at a bound. `momentum` must be below 1."""
    space = {"lr": 0.1, "optimizer": "sgd", "momentum": uniform(0.5, 1.0), "nested": {"x": uniform(0.0, 2.0)}}
    prepare(searcher := AtTheBound(), space, problem.settings.comparison.objectives)
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        search = SearcherSearch(searcher, space, Run(problem.with_settings(num_samples=1), store))
        (trial,) = search.next_trials()
    assert trial.config["momentum"] == math.nextafter(1.0, 0.0)
    assert trial.config["nested"]["x"] == math.nextafter(2.0, 0.0)


def test_a_suggestion_that_the_library_cannot_train_is_refused(problem: Problem, tmp_path: Path) -> None:
    """A searcher of the user's need not keep to the space."""

    class Below(AtTheBound):
        def suggest(self, trial_id: str) -> dict[str, Any]:
            return {"lr": -1.0}

    prepare(searcher := Below(), space := {"lr": uniform(0.1, 1.0)}, problem.settings.comparison.objectives)
    with closing(Store.open(tmp_path / "run", {}, "auto")) as store:
        search = SearcherSearch(searcher, space, Run(problem.with_settings(num_samples=1), store))
        with pytest.raises(ValueError, match=r"`lr` is -1\.0, but must be a finite number > 0"):
            search.next_trials()
        assert not store.units()


def test_a_resumed_run_has_the_values_that_it_trained_with(quick: Quick) -> None:
    """Its space draws others in each process, here by the system's generator, and so meets constraints otherwise."""
    drawn = random.SystemRandom()
    space = {
        "lr": loguniform(1e-3, 0.3),
        "dropout": sample_from(lambda: drawn.uniform(0.0, 0.3)),
        "nested": {"x": sample_from(lambda config: drawn.random()), "fn": choice([score, play])},
        "by_number": {"of": {1: (2, 3)}},
    }
    asked: dict[str, Any] = {"space": space, "num_samples": 4, "sweep": {"constraints": has_little_dropout}}
    first = quick(**asked)
    with pytest.warns(UserWarning, match="`space` gives trial 0 other values than when the run began, which count"):
        again = quick(**asked)
    assert [trial.config for trial in again.trials] == [trial.config for trial in first.trials]
    assert again.best_config["by_number"] == {"of": {1: (2, 3)}}


def test_a_name_in_the_journal_stands_for_its_function_unless_two_have_it() -> None:
    twins = [lambda: 1, lambda: 2]
    config = {"fn": score, "twin": twins[1], "listed": [1, 2], "net": {"fn": play, "depth": 3}, "more": "x"}
    space = {
        "fn": choice([play, score]),
        "twin": choice(twins),
        "listed": choice([[1, 2], (1, 2)]),  # either is written as the other
        "net": {"fn": choice([score, play]), "depth": 3},
    }
    recorded = jsonable(config)
    assert with_objects(recorded, space) == {**config, "twin": recorded["twin"]}
    assert isinstance(recorded["twin"], str)


def has_little_dropout(config: dict[str, Any]) -> bool:
    few: bool = config["dropout"] < 0.15
    return few


@pytest.mark.parametrize("given", ["tpe", OptunaSearch(seed=0)])
def test_nothing_is_logged_of_a_searchers_study(
    given: Any, open_search: Open, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.addHandler(caplog.handler)
    try:
        open_search(given, num_samples=4)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.text == ""
    assert logger.level == level
