"""Forecasts, their reasons and recommendations, in closed form."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hydro_rasda.simulator import (
    RULES,
    Cluster,
    CostModel,
    PastRun,
    Plan,
    Scenario,
    Spending,
    SweepCost,
    Workload,
    forecast,
    power_law,
    random_search,
    recommend,
    simulate,
    spending,
    why,
)
from hydro_rasda.simulator.scenario import cost_model, plans
from tests.hydro_rasda.simulator.test_engine import constant

HOURLY = PastRun(power_law(trials=8, epochs=8, seed=0), epoch_seconds=3600.0)
EXACT = Scenario(gpus=8, serial=0.0, jitter=0.0, restart_seconds=0.0, seeds=2)


def test_rules_differ_as_their_names_say() -> None:
    by_name = plans(replace(EXACT, max_t=9, grace_period=1, reduction_factor=2, scaling_factor=3), _of(epochs=9))
    assert set(by_name) == set(RULES)
    assert by_name["asha"].rule.milestones == by_name["synchronous"].rule.milestones == (1, 2, 4, 8, 9)
    assert by_name["rasda"].rule.milestones == by_name["both"].rule.milestones == (1, 3, 9)
    assert {name: plan.rule.wait for name, plan in by_name.items()} == {
        "random": 0.0,
        "synchronous": math.inf,
        "asha": 0.0,
        "rasda": 0.0,
        "waiting": 0.1,
        "efficient": 0.0,
        "both": 0.1,
    }


def _of(epochs: int) -> PastRun:
    return PastRun(power_law(trials=4, epochs=epochs, seed=0), epoch_seconds=1.0)


@pytest.mark.parametrize("diverged", [0, 1])
def test_regret_is_what_the_winner_lacks(diverged: int) -> None:
    """Four constant trials but for one, which starts last and ends first: halving loses it.

    A trial that diverges counts neither as the best nor towards the median.
    """
    scores = np.array([[9.0, math.nan]] * diverged + [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 0.5]])
    run = PastRun(Workload(scores, np.ones(4 + diverged)), epoch_seconds=60.0)
    scenario = replace(EXACT, gpus=4 + diverged, grace_period=1, seeds=8)  # each has the trials in another order
    found = {f.rule: f for f in forecast(run, scenario)}
    assert found["random"].regret == 0
    assert found["synchronous"].regret == 0.5
    assert found["synchronous"].relative_regret == 0.5 / (1.5 - 0.5)
    assert found["random"].hours == pytest.approx(2 / 60)


def test_what_gpu_time_goes_into_sums_up_to_the_clusters() -> None:
    cost = CostModel(step_seconds=1.0, steps=10, serial_seconds=5.0, restart_seconds=3.0, jitter=0.05)
    for plan in plans(replace(EXACT, grace_period=1), HOURLY).values():
        outcome = simulate(plan, HOURLY.workload, Cluster.uniform(8), cost)
        spent = spending(outcome, cost, workers=1, gpus_per_node=4)
        assert spent.reserved == pytest.approx(outcome.gpus * outcome.seconds)
        assert spent.held == pytest.approx(outcome.gpu_seconds)
        assert spent.restarts == pytest.approx(3.0 * sum(s.workers for s in outcome.segments))
        assert spent.training == pytest.approx(15.0 * outcome.epochs, rel=0.01)
        assert (spent.growing > 1) == any(s.workers > 1 for s in outcome.segments)


@pytest.mark.parametrize(
    ("slower", "reason"),
    [
        (Spending(100, 0, 300, 0), "restarts are 75% of GPU time (3.0 times as much)"),
        (Spending(300, 0, 100, 0), "it trains 300 epochs, not 100"),
        (Spending(100, 0, 100, 200), "its trials hold 4 GPUs on average, not 8"),
        (Spending(100, 200, 100, 0), "growing wastes 50% of GPU time, not 0%"),
    ],
)
def test_why_is_what_makes_up_most_of_the_difference(slower: Spending, reason: str) -> None:
    faster = Spending(100, 0, 100, 0)
    assert why(slower, faster, (slower.training, faster.training), gpus=8) == reason


def test_tune_sweeps_first_as_long_as_its_slowest_groups_or_its_share_of_all() -> None:
    """Twice the trials take twice the device time, on GPUs of twice the speed; two finalists train for 8 h / 2."""
    run = replace(
        HOURLY,
        sweep=SweepCost(trials=8, device_seconds=7200.0, longest=3600.0, epochs=24),
        finalists=power_law(trials=2, epochs=8, seed=1),
        settings={
            "max_t": 8,
            "top_k": 2,
            "rasda": {"grace_period": 8, "reduction_factor": 2, "scaling_factor": 2},
        },
    )
    found = {
        gpus: forecast(run, replace(EXACT, gpus=gpus, trials=16, speed=2.0, rules=("random",)))[-1] for gpus in (2, 8)
    }
    assert (found[2].sweep_hours, found[8].sweep_hours) == (1.0, 0.5)
    assert found[2].hours == pytest.approx(1.0 + 4.0)
    assert found[2].gpu_hours == pytest.approx(2 * 7200 / 3600 / 2 + 2 * 4)
    assert found[2].reserved_gpu_hours == pytest.approx(5.0 * 2)
    assert found[2].utilization == pytest.approx(found[2].gpu_hours / found[2].reserved_gpu_hours)
    assert math.isnan(found[2].regret)


def test_finalists_of_tune_are_compared_first_at_half_of_a_training_unless_the_run_says_otherwise() -> None:
    settings = {"max_t": 8, "top_k": 2, "rasda": {"grace_period": None, "reduction_factor": 2, "scaling_factor": 2}}
    sweep, finalists = SweepCost(8, 7200.0, 3600.0, 24), power_law(trials=2, epochs=8, seed=1)
    run = replace(HOURLY, sweep=sweep, finalists=finalists, settings=settings)
    assert forecast(run, replace(EXACT, gpus=2, rules=("random",)))[-1].epochs == 8 + 4


def test_a_restart_takes_what_the_study_says_or_else_the_run() -> None:
    run = replace(HOURLY, restart_seconds=7.0)
    assert cost_model(replace(EXACT, restart_seconds=None), run).restart_seconds == 7.0
    assert cost_model(EXACT, run).restart_seconds == 0.0
    assert cost_model(replace(EXACT, restart_seconds=None), HOURLY).restart_seconds == 30.0


def test_recommends_the_cheapest_in_time_or_the_fastest_within_a_budget() -> None:
    """Eight trials of eight hours: 64 GPU hours on 1, 2, 4 or 8 GPUs."""
    scenario = replace(EXACT, gpus=16, max_workers=1, rules=("random",))
    found = recommend(HOURLY, scenario, within_hours=17)
    assert found.rule is not None
    assert found.rule.gpus == 4
    assert found.rule.hours == pytest.approx(16.0)
    found = recommend(HOURLY, scenario, gpu_hours=64.5)
    assert found.rule is not None
    assert found.rule.gpus == 8
    assert found.rule.hours == pytest.approx(8.0)
    found = recommend(HOURLY, scenario, within_hours=1)
    assert (found.rule, found.nearest.gpus) == (None, 8)


def test_a_limit_is_kept_for_each_seed() -> None:
    """With noise, eight hours are a little more for one seed, and a little less for another."""
    scenario = replace(EXACT, max_workers=1, rules=("random",), jitter=0.1, seeds=3)
    eight = next(each for each in forecast(HOURLY, scenario) if each.gpus == 8)
    assert eight.hours < eight.hours_range[1]
    between = (eight.hours + eight.hours_range[1]) / 2
    assert recommend(HOURLY, scenario, within_hours=between).rule is None
    assert recommend(HOURLY, scenario, gpu_hours=eight.hours_range[1] * 8 * 1.001).rule is not None


def test_bad_input() -> None:
    for change, message in (
        ({"workers": 16}, r"`workers` is 16, but must be <= `gpus` \(8\)"),
        ({"rules": ()}, r"`rules` is \(\), but must be one or more of \['random'"),
        ({"parameters": 0}, "`parameters` is 0, but must be an integer >= 1"),
        ({"parameters": 10}, "`steps` is None, but must be given"),
        ({"serial": "0.1"}, "`serial` is '0.1', but must be >= 0 and < 1"),
        ({"jitter": None}, "`jitter` is None, but must be >= 0 and <= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            forecast(HOURLY, replace(EXACT, **change))
    with pytest.raises(ValueError, match="`run` is 'runs/a', but must be of the class PastRun"):
        forecast("runs/a", EXACT)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`epoch_seconds` is None, but must be given"):
        forecast(replace(HOURLY, epoch_seconds=None), EXACT)
    with pytest.raises(ValueError, match="`within_hours` and `gpu_hours` are None"):
        recommend(HOURLY, EXACT)
    with pytest.raises(ValueError, match="`within_hours` is 0, but must be a number > 0"):
        recommend(HOURLY, EXACT, within_hours=0)


TEN_SECONDS = CostModel(step_seconds=1.0, steps=10)


def ended(cluster: Cluster, workload: Workload, workers: int = 1, cost: CostModel = TEN_SECONDS) -> list[float]:
    outcome = simulate(Plan(random_search(1, workers)), workload, cluster, cost)
    return [trial.ended for trial in outcome.trials]


def test_the_head_node_starts_one_process_after_another() -> None:
    """Four trials of two workers each: the i-th begins once 2 i processes are there; then its own start."""
    cluster = replace(Cluster.uniform(8), launch_seconds=0.5)
    cost = replace(TEN_SECONDS, restart_seconds=3.0)
    four = constant(1, 2, 3, 4, epochs=1)
    assert ended(cluster, four, 2, cost) == pytest.approx([1 + 3 + 5, 2 + 3 + 5, 3 + 3 + 5, 4 + 3 + 5])


def test_a_restart_waits_for_the_head_node_and_says_so() -> None:
    cluster = replace(Cluster.uniform(2), launch_seconds=2.0)
    outcome = simulate(Plan(random_search(1)), constant(1, 2, epochs=1), cluster, TEN_SECONDS)
    assert [segment.restart for segment in outcome.segments] == [2.0, 4.0]


def test_no_first_step_before_all_nodes_have_their_data() -> None:
    """Three nodes copy 100 bytes each, at 10 bytes/s together: 30 s; the next trial on a node finds them there."""
    cluster = replace(Cluster.uniform(3, gpus_per_node=1), storage=10.0, staged_bytes=100.0)
    assert ended(cluster, constant(1, 2, 3, 4, epochs=1)) == pytest.approx([40, 40, 40, 50])


def test_a_node_keeps_its_speed_and_a_trial_runs_at_its_slowest_nodes() -> None:
    cluster = replace(Cluster.uniform(4, gpus_per_node=1), speed_spread=0.2)
    alone = ended(cluster, constant(*range(8), epochs=1))
    assert len({round(seconds, 6) for seconds in alone[:4]}) == 4
    together = ended(cluster, constant(1, epochs=1), workers=4)
    assert together[0] == pytest.approx(max(alone[:4]) / 4)


def test_bad_input_search() -> None:
    for argument, value in (("launch_seconds", -1.0), ("staged_bytes", float("inf")), ("speed_spread", 2.0)):
        with pytest.raises(ValueError, match=f"`{argument}` is {value}, but must be"):
            replace(Cluster.uniform(4), **{argument: value})  # type: ignore[arg-type]
