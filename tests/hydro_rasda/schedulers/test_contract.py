"""What every scheduler promises, whatever its rule."""

import math
import random
from collections.abc import Callable
from functools import partial

import pytest

from hydro_rasda import schedulers
from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving, Decision, Mode, SuccessiveHalving

Scores = dict[str, float]
Rule = Callable[[Mode, Scores], tuple[str, ...]]


def synchronous(mode: Mode, scores: Scores) -> tuple[str, ...]:
    return SuccessiveHalving((1, 3, 9), 3, mode).promote(scores)


def asynchronous(
    mode: Mode, scores: Scores, kind: type[AsyncSuccessiveHalving] = AsyncSuccessiveHalving
) -> tuple[str, ...]:
    scheduler = kind(9, 1, 3, mode=mode)
    state, promoted = scheduler.init(), []
    for trial, score in scores.items():
        state, decision = scheduler.report(state, trial, 1, score)
        promoted += [trial] * (decision is Decision.CONTINUE)
    return tuple(promoted)


def together(mode: Mode, scores: Scores) -> tuple[str, ...]:
    scheduler = AsyncSuccessiveHalving(9, 1, 3, mode=mode, wait=0.1)
    finite = {}
    state = scheduler.init()
    for trial, score in scores.items():
        state, decision = scheduler.report(state, trial, 1, score)
        if decision is Decision.WAIT:
            finite[trial] = score
    return tuple(t for t, decision in scheduler.decide(state, 1, finite)[1].items() if decision is Decision.CONTINUE)


RULES = pytest.mark.parametrize("rule", [synchronous, asynchronous, together, partial(asynchronous, kind=RASDA)])


def rung(seed: int, size: int = 30) -> Scores:
    rng = random.Random(seed)
    kinds = [math.nan, math.inf, -math.inf, 0.5, 0.25]
    return {f"t{i}": rng.choice(kinds) if rng.random() < 0.4 else rng.random() for i in range(size)}


@RULES
@pytest.mark.parametrize("seed", range(5))
def test_same_inputs_same_decisions(rule: Rule, seed: int) -> None:
    scores = rung(seed)
    before = dict(scores)
    random.seed(seed)
    first = rule("min", scores)
    random.seed(seed + 1)
    assert rule("min", scores) == first
    assert list(scores) == list(before)


@RULES
@pytest.mark.parametrize("seed", range(5))
def test_max_mirrors_min(rule: Rule, seed: int) -> None:
    scores = rung(seed)
    assert rule("min", scores) == rule("max", {trial: -score for trial, score in scores.items()})


@RULES
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_finite_is_never_promoted(rule: Rule, mode: Mode) -> None:
    for seed in range(5):
        scores = rung(seed)
        promoted = rule(mode, scores)
        assert promoted
        assert all(math.isfinite(scores[trial]) for trial in promoted)
    assert rule(mode, {"a": math.nan, "b": math.inf, "c": -math.inf}) == ()


@pytest.mark.parametrize("seed", range(5))
def test_order_does_not_matter_where_all_are_decided_at_once(seed: int) -> None:
    scores = rung(seed)
    shuffled = list(scores.items())
    random.Random(seed).shuffle(shuffled)
    assert synchronous("min", dict(shuffled)) == synchronous("min", scores)
    assert set(together("min", dict(shuffled))) == set(together("min", scores))


@pytest.mark.parametrize("scheduler", [AsyncSuccessiveHalving(9, 1, 3), RASDA(9, 1, 3)])
def test_the_state_handed_in_is_left_as_it_is(scheduler: AsyncSuccessiveHalving) -> None:
    before, _ = scheduler.report(scheduler.init(), "a", 1, 0.5)
    scores = {milestone: dict(came) for milestone, came in before.rungs.items()}
    scheduler.report(before, "b", 1, 0.1)
    scheduler.complete(before, "b", 3, 0.1)
    assert {milestone: dict(came) for milestone, came in before.rungs.items()} == scores


def test_public_names() -> None:
    assert schedulers.__all__ == [
        *("RASDA", "Agreement", "AshaState", "AsyncSuccessiveHalving", "Bracket", "Continue", "Decision"),
        *("ExpectedEnd", "Growth", "Held", "Hyperband", "Interval", "Job", "MedianStopping", "MilestoneBarrier"),
        *("Mode", "Move", "NoStopping", "Placed", "Placement", "Policy", "PopulationBasedTraining", "Queue", "Race"),
        *("RaceRule", "Range", "Resize", "Room", "Standing", "Stop", "SuccessiveHalving", "SweepRule", "SweepState"),
        *("Waiting", "agreement", "chances", "efficient", "expected_gain", "final_score", "first_fit"),
        *("first_fit_decreasing", "first_milestone", "milestones", "named_rule", "one_a_device", "parallel_efficiency"),
        *("place", "rank", "worker_slots", "worst_fit", "worst_fit_decreasing", "worst_fit_overcommitted"),
    ]
