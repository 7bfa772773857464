"""What every scheduler promises, whatever its rule."""

import json
import math
import random
from collections.abc import Callable

import pytest

from hydro_rasda import schedulers
from hydro_rasda.schedulers import RASDA, AshaState, AsyncSuccessiveHalving, Decision, Mode, SuccessiveHalving

Scores = dict[str, float]
Rule = Callable[[Mode, Scores], tuple[str, ...]]


def synchronous(mode: Mode, scores: Scores) -> tuple[str, ...]:
    return SuccessiveHalving((1, 3, 9), 3, mode).promote(scores)


def asynchronous(mode: Mode, scores: Scores) -> tuple[str, ...]:
    scheduler = AsyncSuccessiveHalving(9, 1, 3, mode)
    state, promoted = scheduler.init(), []
    for trial, score in scores.items():
        state, decision = scheduler.report(state, trial, 1, score)
        promoted += [trial] * (decision is Decision.CONTINUE)
    return tuple(promoted)


def elastic(mode: Mode, scores: Scores) -> tuple[str, ...]:
    scheduler = RASDA(9, 1, 3, mode=mode)
    state, promoted = scheduler.init(), []
    for trial, score in scores.items():
        state, verdict = scheduler.report(state, trial, 1, score)
        promoted += [trial] * (verdict == (Decision.CONTINUE, 2))
    return tuple(promoted)


RULES = pytest.mark.parametrize("rule", [synchronous, asynchronous, elastic])


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


@pytest.mark.parametrize("scheduler", [AsyncSuccessiveHalving(9, 1, 3), RASDA(9, 1, 3)])
def test_state_round_trips_through_json(scheduler: AsyncSuccessiveHalving | RASDA) -> None:
    state = scheduler.init()
    for i, (trial, score) in enumerate(rung(0).items()):
        state, _ = scheduler.report(state, trial, (1, 3, 5)[i % 3], score)
    restored = AshaState.from_plain(json.loads(json.dumps(state.to_plain(), allow_nan=False)))
    assert restored == state
    for score in (0.01, 0.3, 0.9):
        assert scheduler.report(restored, "late", 3, score) == scheduler.report(state, "late", 3, score)


@pytest.mark.parametrize("scheduler", [AsyncSuccessiveHalving(9, 1, 3), RASDA(9, 1, 3)])
def test_the_state_handed_in_is_left_as_it_is(scheduler: AsyncSuccessiveHalving | RASDA) -> None:
    before, _ = scheduler.report(scheduler.init(), "a", 1, 0.5)
    plain = before.to_plain()
    scheduler.report(before, "b", 1, 0.1)
    scheduler.complete(before, "b", 3, 0.1)
    assert before.to_plain() == plain


def test_public_names() -> None:
    assert schedulers.__all__ == [
        "RASDA",
        "AshaState",
        "AsyncSuccessiveHalving",
        "Decision",
        "Ladder",
        "Mode",
        "Placement",
        "PlainAshaState",
        "Queue",
        "Running",
        "SuccessiveHalving",
        "Verdict",
        "Waiting",
        "first_milestone",
        "milestones",
        "place",
        "rank",
        "top",
        "worker_slots",
    ]
