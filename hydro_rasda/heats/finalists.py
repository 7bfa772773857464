"""From the sweep to full size: the choice of finalists, and where their training begins.

The sweep's rule names the finalists. If time runs out first, the best trials so far become finalists. After population
based training, finalists train at full size with the schedules that the population found, and also with a linear decay.
If the sweep's models are as wide as the user's model, finalists continue from the sweep's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from hydro_rasda.common.short_values import all_of
from hydro_rasda.heats.cost_limits import all_fit
from hydro_rasda.heats.search import Search
from hydro_rasda.history.history import FINALISTS, SCHEDULES
from hydro_rasda.history.lineage import Ancestor, lineages, may_decay, schedule_of, smoothed
from hydro_rasda.history.lines import JournalLine, Unit, decision_key
from hydro_rasda.problem.precision import as_given
from hydro_rasda.records.summary import AllTrialsFailed
from hydro_rasda.run.events import FinalistsChosen
from hydro_rasda.run.record_full_size import record_swept
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import SweepRule, SweepState
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.schedulers.sweep_rule import checked_finalists
from hydro_rasda.training.best_weights import bettered, kept_epoch
from hydro_rasda.training.full_size import states_together
from hydro_rasda.training.fused_learner import State
from hydro_rasda.training.group_training import states_of
from hydro_rasda.training.user_loop import state_in


def finalists_of_rule(
    run: Run, search: Search, rule: SweepRule, state: SweepState, tell: Callable[[int, bool], None]
) -> list[int]:
    """Ask the rule for the finalists of a sweep that is over.

    If all remaining trials diverged or failed, the finalists are the best of the trials that the rule stopped earlier.

    Args:
        tell: Called with the last milestone, and with True if an earlier call of `tune` has named the finalists.
    """
    chosen = checked_finalists(rule, rule.finalists(state), state)
    last = max(state.scores, default=0)
    left = [n for n, standing in state.trials.items() if not standing.dropped and math.isfinite(standing.score)]
    if not (best := state.best(state.top_k)):
        if not last and not run.history.failures:
            raise AllTrialsFailed(f"`sweep.rule` {type(rule).__name__} has none of {len(state.trials)} trials train")
        raise _all_failed(run, len(state.scores.get(last, state.trials)), last)
    if left and not chosen:
        raise ValueError(f"`sweep.rule` {type(rule).__name__} names no finalists, but must name at least one")
    if not chosen:
        run.say(f"sweep at epoch {last}: nobody is left; of those stopped before, the best go on: {best}")
    chosen, told = by_found_schedules(run, chosen or best)
    recalled = run.history.finalists is not None
    tell(last, recalled)
    for line in told:
        run.say(line)
    for number in sorted(n for n, standing in state.trials.items() if not standing.dropped):
        search.close(number)
    finalists = run.history.finalists
    if finalists is None:
        finalists = run.record(FINALISTS, Unit(chosen), again=True).value
    return _announced(run, finalists, recalled)


def finalists_in_time(run: Run, search: Search, copies: Collection[int] = ()) -> list[int]:
    """Choose finalists if the time budget ended the sweep. Longer trained trials come first; in a tie, better ones.

    Args:
        copies: Trials that were to continue as copies of others. They are left out, because none of them has trained
            with its new configuration.
    """
    run.end_by_time("sweep")
    run.say("the sweep's share of `time_budget_s` is spent: going on with the best so far")
    history = run.history
    epochs, numbers = partial(history.epochs, "sweep"), sorted(history.sweep.trials.keys() - set(copies))
    scores = {n: history.score("sweep", n) for n in numbers}
    best_first = ranked(scores, run.settings.mode)
    if (comparison := run.settings.comparison).by_place:
        last = {n: history.values_at("sweep", n, epochs(n)) for n in numbers if math.isfinite(scores[n])}
        places = comparison.places(last)
        best_first = sorted((n for n in last if math.isfinite(places[n])), key=places.__getitem__)
    left = [n for n in best_first if math.isfinite(scores[n])]
    if not left:
        began = [n for n in numbers if epochs(n) or n in history.failures]
        raise _all_failed(run, len(began), max(map(epochs, numbers)), " that had time to begin")
    for n in numbers:
        search.close(n)
    finalists = sorted(left, key=lambda n: -epochs(n))[: run.settings.race.top_k]
    for line in _of_last_values(_lineages(run), finalists):
        run.say(line)
    return finalists


def finalists_found(run: Run, search: Search, found: Sequence[int]) -> list[int]:
    """End the sweep, because full-size models of the trials `found` reached `stop_at`. Return at most `top_k`."""
    for number in sorted(run.history.sweep.trials):
        search.close(number)
    finalists = [*found[: run.settings.race.top_k]]
    return _announced(run, finalists, recalled=run.history.entrants == finalists)


def _announced(run: Run, finalists: list[int], recalled: bool) -> list[int]:
    """Tell callbacks of the finalists, and return them. `recalled` is True if an earlier call has chosen the trials."""
    among = tuple(sorted(run.history.trials))
    run.notify(FinalistsChosen, candidates=among, kept=tuple(finalists), recalled=recalled)
    return finalists


def _all_failed(run: Run, count: int, stop: int, which: str = "") -> AllTrialsFailed:
    metric, journal = run.settings.metric, run.store.path / "journal.jsonl"
    last = [lines[-1] for (heat, _), lines in run.history.metrics.items() if heat == "sweep" and lines]
    learnt = [line for line in last if line.get("train_loss") is not None]
    if len(run.history.failures) >= count:
        advice = f"each of them raised, see {journal}"
    elif learnt:
        advice = f"look at what gives {metric}, since {len(learnt)} of them have a finite train_loss; see {journal}"
    else:
        advice = f"lower `lr` or look into {journal}"
    who = all_of(count, "trial")
    told = f"{who}{which} diverged or failed by epoch {stop} of the sweep: no finite {metric}; {advice}"
    if run.history.failures:
        number, error = next(iter(run.history.failures.items()))
        told += f"\n\nTrial {number} failed with\n{error}"
    return AllTrialsFailed(told)


LINEAR: Mapping[str, Any] = {"schedule": "linear", "decay_start": 0.0, "floor": 0.0}


def by_found_schedules(run: Run, finalists: Sequence[int]) -> tuple[list[int], list[str]]:
    """Give finalists the schedules that population based training found, smoothed and stretched to `max_t`.

    A finalist's schedule is that of its lineage, the trials from which it has its weights. Each configuration also
    races with a linear decay, so that a schedule which does not transfer costs little. Both variants become new trials,
    which the sweep did not train. There are still `top_k` finalists, so they come from half as many lineages.

    Finalists keep their own schedules if the sweep copied no trial, or if it ran at full width, because then their
    training continues. They also keep them if nothing would read a schedule: the user's function trains the models, or
    the objective has `optimizer_settings`.

    Returns:
        The finalists, and the lines that tell the user about them.
    """
    found = _lineages(run)
    if not any(len(of) > 1 for of in found.values()):
        return list(finalists), []
    own = getattr(as_given(run.problem.objective), "optimizer_settings", None)
    if run.settings.sweep.surrogate == 1 or run.problem.own_loop is not None or own is not None:
        return list(finalists), _of_last_values(found, finalists)

    def decided() -> Unit:
        entrants = [(of, changes) for of in finalists for changes in _variants(run, of, smoothed(found[of]))]
        new = count(len(run.history.sweep.trials))
        racing = entrants[: run.history.sweep.top_k]
        value: list[list[Any]] = [[next(new) if changes else of, of, changes] for of, changes in racing]
        return Unit(value, [_configured(run, *entrant) for entrant in value if entrant[2]])

    told: list[str] = []
    unit = run.unit(decision_key(SCHEDULES, run.history.sweep.trials), decided)
    for number, source, changes in unit.value:
        if changes:
            how = "with a linear decay" if changes.items() >= LINEAR.items() else "by its schedule, smoothed"
            told.append(f"trial {number} trains as trial {source} did, {how}: {_shown(changes)}")
    return [number for number, _, _ in unit.value], told


def _lineages(run: Run) -> dict[int, list[Ancestor]]:
    return lineages(run.store.units(), {number: run.history.epochs("sweep", number) for number in run.history.trials})


def _of_last_values(found: Mapping[int, Sequence[Ancestor]], finalists: Sequence[int]) -> list[str]:
    """Return a line that tells the user which keys' last values the finalists keep; no line if no key changed."""
    changed = ", ".join({key: None for number in finalists for key in schedule_of(found[number])})
    line = f"finalists go on with their last values of {changed}: `best_schedule` has the earlier ones"
    return [line] if changed else []


def _variants(run: Run, number: int, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the changes to its schedule with which a finalist may train, without those that break a constraint.

    If every change breaks a constraint, return a single empty change.
    """
    config, fits = run.history.trials[number].config, all_fit(run.settings.sweep.constraints)
    found = [dict(changes), {**changes, **LINEAR}] if may_decay(config) else [dict(changes)]
    return [each for each in found if fits is None or fits({**config, **each})] or [{}]


def _configured(run: Run, number: int, source: int, changes: Mapping[str, Any]) -> JournalLine:
    """Return the journal's line for trial `number`, which is trial `source` with changes to its schedule."""
    config = {**run.history.trials[source].config, **changes}
    unread = dict.fromkeys(sorted(run.history.unread.get(source, ())))
    costs = dict(run.history.costs.get(source, {}))
    return {"event": "trial", "trial": number, "config": config, "unread": unread, "costs": costs}


def _shown(changes: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in changes.items()
    )


def hand_over(run: Run, finalists: Sequence[int]) -> None:
    """Let full-size training start from the states that a sweep at full width has trained.

    Args:
        run: A run whose sweep is over or out of time. If it is out of time, its checkpoints stay for a call with more
            time.
        finalists: The finalists. A finalist that has trained at full size for as long as in the sweep keeps that
            training.
    """
    if run.problem.goes_on:
        for number in finalists:
            if _goes_on(run, number):
                record_swept(run, number, _state(run, number))
    if run.history.finalists is not None:
        run.store.discard(run.history.sources.values())


def is_found(run: Run, number: int) -> bool:
    """Tell whether a sweep at full width has kept the weights of a model that reaches `stop_at`.

    Args:
        number: A trial that reached `stop_at` in some epoch of the sweep. If the user's own loop trains, checkpoints
            hold the weights of the best epoch. Otherwise they hold the weights of the last epoch.
    """
    if not (run.problem.goes_on and _has_own_scores(run)):
        return False
    curve = run.history.curve("sweep", number)
    has_weights = run.problem.is_own("sweep") or run.settings.good_enough(curve[max(curve)])
    return has_weights and _goes_on(run, number)


def _has_own_scores(run: Run) -> bool:
    """Tell whether the sweep's scores are those of the models that go on, not means over more models (`repeats`)."""
    return run.settings.models("sweep") == run.settings.models("race")


def _goes_on(run: Run, number: int) -> bool:
    curve = run.history.curve("sweep", number)
    source = run.history.sources.get(number)
    if source is None or not run.can_load(source) or run.history.epochs("race", number) >= max(curve):
        return False
    if run.history.epochs_in(source, number) < max(curve):
        return False
    if run.problem.is_own("sweep"):  # a checkpoint of the user's own loop holds the best epoch's weights
        return True
    # The sweep kept only the last weights. If the race must keep those of an earlier epoch, the finalist starts anew.
    kept = max(curve) if run.settings.race.keep == "last" else kept_epoch(curve, run.settings.mode)
    return math.isfinite(run.history.score("sweep", number)) and kept == max(curve)


def _model(state: State) -> State:
    model: State = state["model"]
    return model


def _state(run: Run, number: int) -> State:
    load = partial(run.store.load, device=run.problem.device)
    if run.problem.is_own("sweep"):
        return dict(state_in(load(run.history.sources[number]), number) or {})
    states = states_of(run.problem, run.history.trials, number, run.history.sources[number], load)
    for state in states if run.settings.race.keep == "best" and _has_own_scores(run) else ():
        for epoch, score in run.history.curve("sweep", number).items():
            state["best"] = bettered(state.get("best"), epoch, score, run.settings.mode, partial(_model, state))
    return states_together(states)
