"""Whole runs in virtual time: by hand where that can be done, by what must hold where it cannot."""

import gc
import random
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving, Mode
from hydro_rasda.simulator import (
    AnyPlan,
    Cluster,
    CostModel,
    FixedWorkers,
    NodeKind,
    Outcome,
    Plan,
    Workload,
    engine,
    power_law,
    random_search,
    simulate,
    synchronous_halving,
)
from tests.hydro_rasda.simulator.other_rules import VaryingFactors, WhilePaying, fill_cluster

TEN_SECONDS = CostModel(step_seconds=1.0, steps=10)
"""An epoch on one worker; on two it takes 5 s."""

NOISY = replace(TEN_SECONDS, epoch_noise=0.1, restart_seconds=3.0, checkpoint_seconds=1.0, serial_seconds=1.0)

TROUBLED = Cluster(
    (NodeKind(8, 4), NodeKind(4, 8, speed=2.0)), slow_share=0.25, slow_speed=0.5, mtbf=2000.0, repair_seconds=50.0
)

PLANS: dict[str, AnyPlan] = {
    "ASHA": Plan(FixedWorkers(AsyncSuccessiveHalving(40, 5, 2), 2)),
    "RASDA": Plan(RASDA(40, 5, workers=2)),
    "varying": Plan(VaryingFactors((5, 10, 20, 40), (4, 2, 2), (2, 4, 1), 2)),
    "paying": Plan(RASDA(40, 5, workers=2), WhilePaying(0.8)),
    "filling": Plan(RASDA(40, 5, workers=2), fill_cluster),
    "waiting": Plan(RASDA(40, 5, workers=2, wait=0.1)),
    "efficient": Plan(RASDA(40, 5, workers=2, wait=0.1, grow="efficient")),
    "synchronous": Plan(synchronous_halving(40, 5, 2, 2)),
}


def asha(max_t: int, workers: int = 1, mode: Mode = "min") -> AnyPlan:
    return Plan(FixedWorkers(AsyncSuccessiveHalving(max_t, 1, 2, mode=mode), workers))


def constant(*scores: float, epochs: int = 4, mode: Mode = "min") -> Workload:
    """Trials whose score never changes."""
    return Workload(np.repeat(np.array(scores)[:, None], epochs, axis=1), np.ones(len(scores)), mode)


def test_one_trial_on_one_worker() -> None:
    """4 epochs of 10 s and 1 s more, a restart, and checkpoints at epochs 1, 2 and 4."""
    cost = replace(TEN_SECONDS, serial_seconds=1.0, restart_seconds=7.0, checkpoint_seconds=2.0)
    outcome = simulate(asha(4), constant(0.5), Cluster.uniform(1), cost)
    assert outcome.seconds == outcome.gpu_seconds == 7 + 4 * 11 + 3 * 2
    assert (outcome.epochs, outcome.events, outcome.finished, outcome.utilization) == (4, 4, (0,), 1.0)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_asha_one_after_another_by_hand(mode: Mode) -> None:
    """Best first: the others are worse than the median of those before and stop after 1 of 4 epochs. Best last: each
    is better than all before, and none stops."""
    sign = 1.0 if mode == "min" else -1.0
    rising, falling = constant(sign * 1, sign * 2, sign * 3, mode=mode), constant(sign * 3, sign * 2, sign, mode=mode)
    best_first = simulate(asha(4, mode=mode), rising, Cluster.uniform(1), TEN_SECONDS)
    best_last = simulate(asha(4, mode=mode), falling, Cluster.uniform(1), TEN_SECONDS)
    assert [t.epochs for t in best_first.trials] == [4, 1, 1]
    assert best_first.seconds == (4 + 1 + 1) * 10
    assert [t.ended for t in best_last.trials] == [40, 80, 120]
    assert (best_first.best_trial, best_last.best_trial) == (0, 2)


def test_asha_side_by_side_by_hand() -> None:
    """Two at a time: 0 and 1 report at 10 s, 1 stops and 2 begins; 2 stops at 20 s, 0 ends at 40 s."""
    outcome = simulate(asha(4), constant(1, 2, 3), Cluster.uniform(2), TEN_SECONDS)
    assert [t.ended for t in outcome.trials] == [40, 10, 20]
    assert [t.waited for t in outcome.trials] == [0, 0, 10]
    assert outcome.gpu_seconds == 40 + 10 + 10


def test_rasda_takes_the_workers_of_those_that_stop_by_hand() -> None:
    """2 workers each: 5 s to epoch 1. The survivor has 4 from there: 2.5 s to epoch 2. ASHA takes 10 s."""
    both = constant(1, 2, epochs=2)
    plan = Plan(RASDA(max_t=2, workers=2))
    outcome = simulate(plan, both, Cluster.uniform(4), TEN_SECONDS)
    assert outcome.seconds == 5 + 2.5
    assert [(s.trial, s.start, s.stop, s.workers) for s in outcome.segments] == [
        (0, 0, 5, 2),
        (1, 0, 5, 2),
        (0, 5, 7.5, 4),
    ]
    assert simulate(asha(2, workers=2), both, Cluster.uniform(4), TEN_SECONDS).seconds == 10


def test_each_resize_costs_a_restart_by_hand() -> None:
    cost = replace(TEN_SECONDS, restart_seconds=100.0)
    outcome = simulate(Plan(RASDA(max_t=4)), constant(1), Cluster.uniform(4), cost)
    assert outcome.seconds == (100 + 10) + (100 + 5) + (100 + 2 * 2.5)


def test_survivors_wait_for_workers_by_hand() -> None:
    """Both survive epoch 1 and are due the whole cluster: one waits for the other."""
    outcome = simulate(Plan(RASDA(max_t=2, workers=2)), constant(2, 1, epochs=2), Cluster.uniform(4), TEN_SECONDS)
    assert [t.ended for t in outcome.trials] == [7.5, 10.0]
    assert [t.waited for t in outcome.trials] == [0.0, 2.5]


def test_a_cluster_that_is_too_small_lowers_what_is_due() -> None:
    outcome = simulate(Plan(RASDA(max_t=8)), constant(1, epochs=8), Cluster.uniform(3), TEN_SECONDS)
    assert [s.workers for s in outcome.segments] == [1, 2, 3]
    assert outcome.seconds == pytest.approx(10 + 5 + 6 * 10 / 3)


def test_diverged_trials_stop_at_the_first_milestone() -> None:
    outcome = simulate(asha(4), constant(np.nan, 1.0, np.nan), Cluster.uniform(1), TEN_SECONDS)
    assert [t.epochs for t in outcome.trials] == [1, 4, 1]
    assert outcome.best_trial == 1


def test_a_trial_that_diverges_in_its_last_stretch_does_not_win() -> None:
    """The first of two goes on after each milestone, alone, and its last score is not finite."""
    curves = Workload(np.array([[1.0, 1.0, 1.0, np.nan], [2.0, 2.0, 2.0, 2.0]]), np.ones(2))
    outcome = simulate(asha(4), curves, Cluster.uniform(1), TEN_SECONDS)
    assert [t.epochs for t in outcome.trials] == [4, 1]
    assert outcome.finished == (0,)
    assert (outcome.best_trial, outcome.best_score) == (1, 2.0)


def test_slow_nodes_slow_down_by_hand() -> None:
    slow = replace(Cluster.uniform(4), slow_share=1.0, slow_speed=0.5)
    assert simulate(asha(4), constant(1), slow, TEN_SECONDS).seconds == 80


def test_storage_is_shared_by_hand() -> None:
    """800 bytes an epoch at 100 bytes/s: 8 s alone, hidden by 10 s of compute; 16 s when two read."""
    cost = replace(TEN_SECONDS, dataset_bytes=800.0)
    shared = replace(Cluster.uniform(2), storage=100.0)
    assert simulate(asha(1), constant(1), shared, cost).seconds == 10
    assert [t.ended for t in simulate(asha(1), constant(1, 2), shared, cost).trials] == [16, 16]


def test_storage_goes_to_those_that_run_at_any_time_by_hand() -> None:
    """800 bytes an epoch at 100 bytes/s, 1 s of compute; the second trial computes 20 s, during which it reads, too.

    Two share until 16 s, when the first ends and the third begins; until 20 s, it reads 200 bytes, then 600 alone."""
    cost = replace(TEN_SECONDS, step_seconds=0.1, dataset_bytes=800.0)
    curves = replace(constant(1, 2, 3), work=np.array([1.0, 20.0, 1.0]))
    outcome = simulate(asha(1), curves, replace(Cluster.uniform(2), storage=100.0), cost)
    assert [t.ended for t in outcome.trials] == [16, 20, 26]


def test_a_trial_that_stops_leaves_its_storage_to_those_that_go_on_by_hand() -> None:
    """Both come to epoch 1 at 16 s; the second stops there, and the first reads alone, for 8 s more."""
    cost = replace(TEN_SECONDS, step_seconds=0.1, dataset_bytes=800.0)
    outcome = simulate(asha(2), constant(1, 2), replace(Cluster.uniform(2), storage=100.0), cost)
    assert [t.ended for t in outcome.trials] == [24, 16]
    assert outcome.events == 3


def test_an_epoch_is_expected_to_take_as_long_as_its_share_of_the_storage_now() -> None:
    cost = replace(TEN_SECONDS, step_seconds=0.1, dataset_bytes=800.0)
    simulation = engine.Simulation(asha(1), constant(1, 2), replace(Cluster.uniform(2), storage=100.0), cost, seed=0)
    expected = [simulation._epoch_seconds(1.0)]
    for index in range(2):
        simulation._start(index, 1)
        expected.append(simulation._epoch_seconds(1.0))
    assert expected == [8, 8, 16]


def test_storage_that_never_makes_anyone_wait_changes_nothing() -> None:
    workload = power_law(40, 40, seed=2, work_spread=0.3)
    read = replace(NOISY, dataset_bytes=1.0)
    plenty = simulate(PLANS["RASDA"], workload, replace(TROUBLED, storage=1e9), read, 7)
    endless = simulate(PLANS["RASDA"], workload, TROUBLED, read, 7)
    assert plenty.seconds == pytest.approx(endless.seconds)
    assert [t.epochs for t in plenty.trials] == [t.epochs for t in endless.trials]
    assert plenty.events == endless.events


def held_at_once(outcome: Outcome) -> int:
    """The most workers that segments hold at any time."""
    starts = [(s.start, 1, s.workers) for s in outcome.segments]
    stops = [(s.stop, 0, -s.workers) for s in outcome.segments]
    return max(accumulate(change for _, _, change in sorted(starts + stops)))


@pytest.mark.parametrize("cluster", [Cluster.uniform(64), TROUBLED], ids=["perfect", "troubled"])
@pytest.mark.parametrize("name", PLANS)
def test_workers_and_epochs_are_conserved_and_no_trial_starves(name: str, cluster: Cluster) -> None:
    workload = power_law(80, 40, seed=5, work_spread=0.3)
    outcome = simulate(PLANS[name], workload, cluster, NOISY, seed=1)
    assert held_at_once(outcome) <= cluster.gpus
    assert outcome.gpu_seconds <= outcome.gpus * outcome.seconds
    assert 0 < outcome.utilization <= 1
    stops = {5, 10, 20, 40}
    assert all(t.epochs in stops and t.ended > 0 and t.waited < outcome.seconds for t in outcome.trials)
    assert len(outcome.segments) >= len(outcome.trials)
    assert outcome.finished


@pytest.mark.parametrize("name", PLANS)
def test_one_seed_one_outcome(name: str) -> None:
    workload = power_law(40, 40, seed=2)
    assert simulate(PLANS[name], workload, TROUBLED, NOISY, 7) == simulate(PLANS[name], workload, TROUBLED, NOISY, 7)
    assert simulate(PLANS[name], workload, TROUBLED, NOISY, 7) != simulate(PLANS[name], workload, TROUBLED, NOISY, 8)


def test_rasda_that_may_not_grow_is_asha() -> None:
    workload = power_law(60, 40, seed=3)
    capped: AnyPlan = Plan(RASDA(40, 5, workers=2, max_workers=2))
    assert simulate(capped, workload, TROUBLED, NOISY) == simulate(PLANS["ASHA"], workload, TROUBLED, NOISY)


@pytest.mark.parametrize("lookahead", [1, 1000])
def test_how_many_new_trials_placement_sees_changes_nothing(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """New trials of one cost are alike to placement, which starts them in turn."""
    workload = power_law(60, 40, seed=6)
    expected = simulate(PLANS["RASDA"], workload, Cluster.uniform(16), NOISY)
    monkeypatch.setattr(engine, "LOOKAHEAD", lookahead)
    assert simulate(PLANS["RASDA"], workload, Cluster.uniform(16), NOISY) == expected


def test_factors_that_do_not_vary_are_rasda() -> None:
    workload = power_law(60, 40, seed=4)
    plan = Plan(VaryingFactors((5, 10, 20, 40), (2, 2, 2), (2, 2, 2), 2))
    assert simulate(plan, workload, TROUBLED, NOISY) == simulate(PLANS["RASDA"], workload, TROUBLED, NOISY)


def test_failures_cost_time_and_epochs_but_no_trial() -> None:
    workload = power_law(20, 40, seed=0)
    sound = Cluster.uniform(16)
    failing = replace(sound, mtbf=200.0, repair_seconds=100.0)
    before, after = (simulate(PLANS["RASDA"], workload, c, TEN_SECONDS) for c in (sound, failing))
    assert sum(t.restarts for t in before.trials) == sum(t.lost_epochs for t in before.trials) == 0
    assert sum(t.restarts for t in after.trials) > 0
    assert sum(t.lost_epochs for t in after.trials) > 0
    assert after.seconds > before.seconds
    assert all(t.epochs >= 5 for t in after.trials)


def test_a_failed_trial_goes_on_from_its_last_milestone_by_hand() -> None:
    """One trial, one node: the failure is drawn first, so it is known; epochs since milestone 1 are lost."""
    rng = random.Random(0)
    failure = rng.expovariate(1 / 35.0)
    assert 20 < failure < 80
    fragile = replace(Cluster.uniform(1), mtbf=35.0, repair_seconds=1000.0)
    outcome = simulate(asha(8), constant(1, epochs=8), fragile, TEN_SECONDS)
    first = outcome.segments[0]
    assert (first.start, first.stop) == (0.0, failure)
    assert outcome.segments[1].start == pytest.approx(failure + 1000.0)


@pytest.mark.parametrize(
    ("repair_seconds", "segments"),
    [(8.0, [(0, 6, 4), (6, 16, 2), (16, 26, 4)]), (1000.0, [(0, 6, 4), (6, 36, 2)])],
    ids=["repaired", "down"],
)
def test_a_trial_gets_its_workers_back_once_the_node_is_repaired_by_hand(
    repair_seconds: float, segments: list[tuple[float, float, int]]
) -> None:
    """4 workers on two nodes, one of which fails at 6 s, after 2 epochs of 2.5 s: two more take 5 s each on 2 workers,
    until the milestone at 4 epochs. Where the node is back by then, the last 4 epochs take 2.5 s each, otherwise 5."""
    rng = random.Random(139)
    first, *others = (rng.expovariate(1.0) for _ in range(4))
    mtbf = 6 / first
    assert min(others) * mtbf > 60
    fragile = replace(Cluster.uniform(4, 2), mtbf=mtbf, repair_seconds=repair_seconds)
    outcome = simulate(asha(8, workers=4), constant(1, epochs=8), fragile, TEN_SECONDS, seed=139)
    held = [(s.start, s.stop, s.workers) for s in outcome.segments]
    assert held == [pytest.approx(segment) for segment in segments]


def costing(work: list[float], *scores: float, epochs: int = 2) -> Workload:
    return replace(constant(*scores, epochs=epochs), work=np.array(work))


def test_a_trial_waits_for_its_fellow_and_both_are_decided_at_once_by_hand() -> None:
    """The worse comes first, at 5 s, and waits without workers until the better is there, at 5.4 s."""
    waiting: AnyPlan = Plan(RASDA(max_t=2, workers=2, wait=0.1))
    outcome = simulate(waiting, costing([1.0, 1.08], 2, 1), Cluster.uniform(4), TEN_SECONDS)
    assert [(s.trial, s.start, s.stop, s.workers) for s in outcome.segments] == [
        (0, 0, 5, 2),
        (1, 0, 5.4, 2),
        (1, 5.4, pytest.approx(8.1), 4),
    ]
    assert [(t.ended, t.waited) for t in outcome.trials] == [(5.4, 0), (pytest.approx(8.1), 0)]
    at_once = simulate(Plan(RASDA(max_t=2, workers=2)), costing([1.0, 1.08], 2, 1), Cluster.uniform(4), TEN_SECONDS)
    assert [t.epochs for t in at_once.trials] == [2, 2]


def test_a_fellow_that_takes_too_long_keeps_nobody_waiting_by_hand() -> None:
    """It would be there at 10 s; the other one goes on at 5.5 s."""
    waiting: AnyPlan = Plan(RASDA(max_t=2, workers=2, wait=0.1))
    outcome = simulate(waiting, costing([1.0, 2.0], 1, 2), Cluster.uniform(8), TEN_SECONDS)
    assert [(s.trial, s.start, s.stop, s.workers) for s in outcome.segments] == [
        (0, 0, 5, 2),
        (0, 5.5, 8, 4),
        (1, 0, 10, 2),
    ]


def test_a_fellow_whose_node_fails_keeps_nobody_waiting_by_hand() -> None:
    """One worker a node. The second trial's node fails at 10.5 s, when the first has waited half of its share."""
    seed = next(s for s in range(10_000) if _fails_between(s, 10.2, 10.9))
    fragile = replace(Cluster.uniform(2, 1), mtbf=30.0, repair_seconds=1000.0)
    waiting: AnyPlan = Plan(FixedWorkers(AsyncSuccessiveHalving(2, 1, 2, wait=0.1)))
    workload = costing([1.0, 1.3], 1, 2)
    outcome = simulate(waiting, workload, fragile, TEN_SECONDS, seed)
    failed = next(s.stop for s in outcome.segments if s.trial == 1)
    assert 10.2 < failed < 10.9
    assert next(s.start for s in outcome.segments if s.trial == 0 and s.start) == failed


def _fails_between(seed: int, low: float, high: float) -> bool:
    """Whether of two nodes the second fails then, and the first much later."""
    rng = random.Random(seed)
    first, second = rng.expovariate(1 / 30.0), rng.expovariate(1 / 30.0)
    return low < second < high and first > 40


def test_growth_that_others_wait_for_is_not_taken_by_hand() -> None:
    """Four trials of two workers on four: two begin, one survives, and the others take what it would have grown to."""
    cost = replace(TEN_SECONDS, step_seconds=2.0)
    rule = RASDA(max_t=2, workers=2, wait=0.1, grow="efficient")
    outcome = simulate(Plan(rule), constant(1, 2, 3, 4, epochs=2), Cluster.uniform(4), cost)
    assert [s.workers for s in outcome.segments if s.trial == 0] == [2, 2]
    alone = simulate(Plan(rule), constant(1, 2, epochs=2), Cluster.uniform(4), cost)
    assert [s.workers for s in alone.segments if s.trial == 0] == [2, 4]


@pytest.mark.parametrize(("noise_scale", "most"), [(4.0, 4), (7.0, 4), (8.0, 8)])
def test_growth_ends_at_the_noise_scale(noise_scale: float, most: int) -> None:
    cost = replace(TEN_SECONDS, noise_scale=noise_scale)
    plan: AnyPlan = Plan(RASDA(max_t=16, grow="efficient"))
    outcome = simulate(plan, constant(1, epochs=16), Cluster.uniform(64), cost)
    assert max(s.workers for s in outcome.segments) == most


def test_growth_ends_where_half_of_it_is_lost() -> None:
    """10 s of an epoch are serial, 10 are not: on 2 workers the efficiency is 0.67, on 4 it is 0.4."""
    cost = replace(TEN_SECONDS, serial_seconds=10.0)
    plan: AnyPlan = Plan(RASDA(max_t=16, grow="efficient"))
    outcome = simulate(plan, constant(1, epochs=16), Cluster.uniform(64), cost)
    assert [s.workers for s in outcome.segments] == [1, 2, 4]


def test_larger_batches_take_more_passes_by_hand() -> None:
    """A noise scale of two workers' batches: 1.5 / 1.5 passes on one worker, 2 / 1.5 on two, 3 / 1.5 on four."""
    cost = replace(TEN_SECONDS, noise_scale=2.0)
    outcome = simulate(Plan(RASDA(max_t=4)), constant(1), Cluster.uniform(4), cost)
    assert outcome.seconds == pytest.approx(10 + 5 * 2 / 1.5 + 2 * 2.5 * 3 / 1.5)


def test_synchronous_halving_by_hand() -> None:
    """Nine trials on two slots: five rounds of 10 s, the last half empty; three best, two rounds of 20 s; one, 60 s."""
    scores = [5.0, 1.0, 9.0, 4.0, 2.0, 8.0, 7.0, 3.0, 6.0]
    outcome = simulate(Plan(synchronous_halving(9, 1, 3)), constant(*scores, epochs=9), Cluster.uniform(2), TEN_SECONDS)
    assert [t.epochs for t in outcome.trials] == [1, 9, 1, 1, 3, 1, 1, 3, 1]
    assert outcome.seconds == 50 + 40 + 60
    troubled = simulate(Plan(synchronous_halving(9, 1, 3)), constant(*scores, epochs=9), TROUBLED, TEN_SECONDS)
    assert [t.epochs for t in troubled.trials] == [t.epochs for t in outcome.trials]


def test_random_search_trains_all_to_the_end() -> None:
    outcome = simulate(Plan(random_search(4)), constant(1, 2, np.nan), Cluster.uniform(1), TEN_SECONDS)
    assert [t.epochs for t in outcome.trials] == [4, 4, 4]
    assert (outcome.seconds, outcome.best_trial) == (120, 0)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`workload` has 4 epochs, but must have >= max_t \(8\)"):
        simulate(asha(8), constant(1), Cluster.uniform(1), TEN_SECONDS)
    with pytest.raises(ValueError, match=r"`workers` is 8, but must be <= the cluster's 4 GPUs"):
        simulate(asha(4, workers=8), constant(1), Cluster.uniform(4), TEN_SECONDS)
    with pytest.raises(ValueError, match=r"`plan` has mode 'min', but must have that of `workload`, 'max'"):
        simulate(asha(4), constant(1, mode="max"), Cluster.uniform(1), TEN_SECONDS)
    with pytest.raises(ValueError, match=r"`resize` gave 0, but must give an integer >= 1"):
        simulate(Plan(RASDA(4), lambda growth: 0), constant(1), Cluster.uniform(1), TEN_SECONDS)
    with pytest.raises(RuntimeError, match=r"hit by 1000 node failures: `mtbf` \(0.1 s\) is too short"):
        simulate(asha(4), constant(1), replace(Cluster.uniform(1), mtbf=0.1), TEN_SECONDS)


@pytest.mark.usefixtures("set_aside")
@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_before_and_has_nothing_to_collect(collects: bool) -> None:
    """It is off meanwhile, for which no cycles may be left."""
    cost = CostModel(step_seconds=1.0, steps=10, epoch_noise=0.1)
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if collects:
            gc.enable()
        simulate(Plan(RASDA(max_t=8)), power_law(trials=20, epochs=8, seed=0), Cluster.uniform(8), cost)
        assert gc.isenabled() is collects
        assert gc.collect() == 0 or collects
        with pytest.raises(RuntimeError, match="node failures"):
            simulate(asha(4), constant(1), replace(Cluster.uniform(1), mtbf=0.1), TEN_SECONDS)
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
