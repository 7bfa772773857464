"""The sweep's choice of finalists: the trials that its rule names, or the best so far if the time runs out."""

from __future__ import annotations

import math
from collections.abc import Callable

from hydro_rasda.results.result import AllTrialsFailed
from hydro_rasda.run.events import FinalistsChosen
from hydro_rasda.run.state import FINALISTS, Run
from hydro_rasda.schedulers import SweepRule, SweepState, rank
from hydro_rasda.schedulers.sweep_rule import checked_finalists
from hydro_rasda.search import Search
from hydro_rasda.stages.found_schedules import by_found_schedules


def finalists_of_rule(
    run: Run, search: Search, rule: SweepRule, state: SweepState, tell: Callable[[int, bool], None]
) -> list[int]:
    """Have the rule name the finalists of a sweep that is over.

    A surrogate as wide as the model is the model: its training continues at full size.

    Args:
        tell: Called with the last milestone and whether the finalists were named before, once there are some.

    Raises:
        AllTrialsFailed: If no trial has a finite metric.
        ValueError: If the rule names no finalists.
    """
    chosen = checked_finalists(rule, rule.finalists(state), state)
    last = max(state.scores, default=0)
    left = [n for n, standing in state.trials.items() if not standing.dropped and math.isfinite(standing.score)]
    if not state.best(1) or not (chosen or left):
        raise _all_failed(run, len(state.scores.get(last, state.trials)), last)
    if not chosen:
        raise ValueError(f"`sweep.rule` {type(rule).__name__} names no finalists, but must name at least one")
    chosen, told = by_found_schedules(run, chosen)
    recalled = run.decided(FINALISTS, run.trials)
    tell(last, recalled)
    for line in told:
        run.say(line)
    for number in sorted(n for n, standing in state.trials.items() if not standing.dropped):
        search.close(number, run.epochs("surrogate", number), state.trials[number].score)
    finalists = run.decide(FINALISTS, run.trials, lambda: chosen)
    among = tuple(sorted(run.trials))
    run.notify(FinalistsChosen, candidates=among, kept=tuple(finalists), recalled=recalled)
    go_on = finalists if run.settings.sweep.surrogate == 1 else []
    run.forget([n for n in run.sources if n not in go_on])
    return finalists


def finalists_in_time(run: Run, search: Search) -> list[int]:
    """Choose finalists if the time budget ended a rung early: those that trained longest, of them the best.

    Raises:
        AllTrialsFailed: If no trial has a finite metric.
    """
    run.end_by_time("surrogate")
    run.say("the sweep's share of `time_budget_s` is spent: going on with the best so far")
    numbers = sorted(run.trials)
    scores = {n: run.score("surrogate", n) for n in numbers}
    best_first = [numbers[i] for i in rank(list(scores.values()), run.settings.mode)]
    if (comparison := run.settings.comparison).by_place:
        last = {
            n: run.values_at("surrogate", n, run.epochs("surrogate", n)) for n in numbers if math.isfinite(scores[n])
        }
        places = comparison.places(last)
        best_first = sorted((n for n in last if math.isfinite(places[n])), key=places.__getitem__)
    left = [n for n in best_first if math.isfinite(scores[n])]
    if not left:
        raise _all_failed(run, len(numbers), max(run.epochs("surrogate", n) for n in numbers))
    for n in numbers:
        search.close(n, run.epochs("surrogate", n), scores[n])
    return sorted(left, key=lambda n: -run.epochs("surrogate", n))[: run.settings.race.top_k]


def _all_failed(run: Run, count: int, stop: int) -> AllTrialsFailed:
    metric, journal = run.settings.metric, run.store.path / "journal.jsonl"
    last = [lines[-1] for (stage, _), lines in run.metrics.items() if stage == "surrogate" and lines]
    learnt = [line for line in last if line.get("train_loss") is not None]
    if len(run.failures) >= count:
        advice = f"each of them raised, see {journal}"
    elif learnt:
        advice = f"look at what gives {metric}, since {len(learnt)} of them have a finite train_loss; see {journal}"
    else:
        advice = f"lower `lr` or look into {journal}"
    told = f"all {count} trials diverged or failed by epoch {stop} of the sweep: no finite {metric}; {advice}"
    if run.failures:
        number, error = next(iter(run.failures.items()))
        told += f"\n\nTrial {number} failed with\n{error}"
    return AllTrialsFailed(told)
