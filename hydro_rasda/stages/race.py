"""The race of the finalists at full size: at RASDA's milestones, together, those that promise least are stopped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from hydro_rasda.contracts import Devices, Finished, Span, Task, full_size_task
from hydro_rasda.history.full_size import (
    averages_at,
    averages_lost,
    deciding_curve,
    done_early,
    ended_early,
    found_enough,
    kept_of,
    places_at,
    race_of,
    refit_key,
    targets_over,
    tried_targets,
)
from hydro_rasda.history.lines import Unit, decision_key, metric_lines
from hydro_rasda.history.winner import best_of
from hydro_rasda.processes.retry_policy import RETRIES
from hydro_rasda.run.events import CHECK, FULL_SIZE, SURROGATES, RungDecided
from hydro_rasda.run.record_full_size import (
    another_chance,
    drop_lost_winner,
    end_by_score,
    end_targets,
    record_done,
    record_epochs,
    record_failure,
    record_refit,
    source_of,
)
from hydro_rasda.run.state import Run
from hydro_rasda.run.time_left import Piece
from hydro_rasda.schedulers.race_rule import RaceRule
from hydro_rasda.schedulers.sweep_rule import Continue, carry_out, move_of, plain_move
from hydro_rasda.schedulers.sweep_state import End, SweepState
from hydro_rasda.short_values import show
from hydro_rasda.stages.chance_baseline import unbeaten_chance
from hydro_rasda.stages.run_plan import race_pieces, tell_race
from hydro_rasda.stages.train_tasks import train_tasks
from hydro_rasda.training.kept_weights import kept_epoch


def train_finalists(run: Run, finalists: Sequence[int], devices: Devices) -> list[int]:
    """Train the full-size models; the best continue at each of RASDA's milestones.

    Epochs that earlier processes trained count, on any backend. A stage that is over trains nothing.

    Returns:
        All trials trained at full size: the finalists, and those of an earlier call with fewer samples or less time.
    """
    if another_chance(run, finalists) or not targets_over(run.history, finalists) or drop_lost_winner(run, finalists):
        _race(run, finalists, devices)
    else:  # of more samples, say, the same ones were chosen
        _recall_decisions(run, finalists)
        _refit(run, finalists, devices)
        end_targets(run, finalists)
    return tried_targets(run.history, finalists)


def _race(run: Run, finalists: Sequence[int], devices: Devices) -> None:
    settings = run.settings
    rule, state = _entered(run, finalists)
    for over in (SURROGATES, CHECK):  # perhaps ended by the time budget
        run.time_left.plan(over, [])
    stops, raised = settings.race_milestones, Counter[int]()
    while left := [*state.training]:
        stop = max(trial.goal or 0 for trial in state.training.values())
        reached = max((at for at in stops if at < stop), default=0)
        epochs = sum(max(0, stop - run.history.epochs("target", n)) for n in left)
        plan = race_pieces(run, len(left), epochs, reached, _epochs_trained(run, finalists, reached))
        told = run.time_left.planned(FULL_SIZE)
        run.time_left.plan(FULL_SIZE, plan)
        if not told:
            tell_race(run, plan, len(left))
        leader = _first_to_its_end(run, left, stop, plan) if stop == stops[0] else None
        beyond = 0 if leader is None else settings.max_t - max(stop, run.history.epochs("target", leader))
        run.begin_stage(FULL_SIZE, epochs + beyond)
        if leader is not None:
            _train_to_its_end(leader, stop, run, left, devices, raised)
        _train_to(stop, run, left, devices, raised)
        run.end_stage()
        if found_enough(run.history):
            _refit(run, finalists, devices)
            end_by_score(run)
            return
        if any(_goes_on(run, n, stop) for n in left):
            run.end_by_time("target")
            run.say("`time_budget_s` is spent; repeat the call with a larger one to go on")
            return
        for at, kept in _decide(run, rule, state):
            if at < stop:
                run.say(f"full size at epoch {stop}: nobody is left; of those stopped at epoch {at}, {kept} go on")
            elif kept and (len(kept) < len(left) or stop == stops[-1]):
                _tell(run, finalists, kept, len(left), stop)
    _refit(run, finalists, devices)
    end_targets(run, finalists)


def _recall_decisions(run: Run, finalists: Sequence[int]) -> None:
    """Send callbacks the decisions of a race that is over; a race that goes on repeats them when it reaches them."""
    rule, state = _entered(run, finalists)
    while state.training:
        list(_decide(run, rule, state, ask=False))


def _entered(run: Run, finalists: Sequence[int]) -> tuple[RaceRule, SweepState]:
    """Return the rule of the race, and its state once the finalists are on their way to the first milestone."""
    settings, race = run.settings, race_of(run.history)
    by_place = settings.comparison.by_place
    # A front has no leader to improve on; a budget for all is a wish to see all end.
    by_worth = not by_place and race.full_trainings < settings.race.top_k
    rule = RaceRule(race, settings.race_milestones, settings.last_look, by_worth)
    state = run.history.new_sweep()
    for number in finalists:
        state.admit(number, run.history.trials[number].config)
    carry_out(rule.decide(state), state)
    return rule, state


def _decide(run: Run, rule: RaceRule, state: SweepState, ask: bool = True) -> Iterator[tuple[int, list[int]]]:
    """Have all trials come to their milestone, and decide until somebody goes on.

    Yields a milestone for each decision, and the trials that go on from there, best first.

    Args:
        ask: False to take decisions from the journal alone.
    """
    for number in [*state.training]:
        _come(run, number, state)
    stop, kept = max(trial.epoch for trial in state.trials.values()), list[int]()
    state.spent = _epochs_trained(run, [*state.trials], stop)
    ended = {number: end for number in state.trials if (end := _end_of(run, number)) is not None}
    before = {
        n: end for n, end in ended.items() if run.history.epochs("target", n) < stop + (n not in run.history.failures)
    }
    while not kept:
        # Others may have ended after the milestone, before the run was interrupted. Then the journal's decision counts.
        for known in (before, ended):
            state.ended = known
            there = rule.compared(state)
            at = max((state.trials[number].epoch for number in there), default=0)
            if recalled := run.store.done(key := decision_key(f"target/to-{at}/kept", there)):
                break
        if not there or not (ask or recalled):
            return
        _see_scores(run, at, there, state, ask=not recalled)
        decided = run.unit(key, lambda: Unit([[n, *plain_move(move)] for n, move in rule.decide(state).items()]))
        moves = {number: move_of(values) for number, *values in decided.value}
        kept = [n for n, move in moves.items() if isinstance(move, Continue)] or [*rule.finalists(state)]
        carry_out(moves, state)
        among = tuple(sorted(there))
        run.notify(RungDecided, stage="target", epoch=at, candidates=among, kept=tuple(kept), recalled=recalled)
        yield at, kept


def _come(run: Run, number: int, state: SweepState) -> None:
    """Have a trial come to its milestone in the state, with what it trained up to there."""
    stop = state.trials[number].goal or 0
    curve = {at: score for at, score in run.history.curve("target", number).items() if at <= stop}
    averages = {} if run.settings.comparison.by_place else averages_at(run.history, stop, [number])
    state.come(number, curve, deciding_curve(run.history, number).get(stop, math.nan), averages.get(number))


def _end_of(run: Run, number: int) -> End | None:
    if done_early(run.history, number):
        return "done"
    if number in run.history.failures:
        return "failed"
    return "diverged" if ended_early(run.history, number) else None


def _see_scores(run: Run, stop: int, there: Sequence[int], state: SweepState, ask: bool) -> None:
    """Put what a decision needs to know of all trials of a milestone into the state: their places, and chance."""
    scores = {number: deciding_curve(run.history, number).get(stop, math.nan) for number in there}
    if run.settings.comparison.by_place:
        state.place(stop, places_at(run.history, stop, scores))
    compares = ask and stop < run.settings.max_t and len(there) > 1
    state.at_chance = compares and unbeaten_chance(run, "target", scores) is not None
    if state.at_chance:
        run.say(f"no finalist's {run.settings.metric} differs from chance at epoch {stop}: none is stopped")


def _tell(run: Run, finalists: Sequence[int], left: Sequence[int], racing: int, stop: int) -> None:
    """Tell how many go on from a milestone, and who leads or wins; with several metrics, nobody does."""
    ends, metric, leader = stop == run.settings.max_t, run.settings.metric, left[0]
    kept = "done" if ends else f"{len(left)} of {racing} go on"
    epoch, score = run.history.best.get(leader, (stop, run.history.score_at("target", leader, stop)))
    if epoch > stop:  # a run that goes on repeats its decisions
        curve = {at: value for at, value in run.history.curve("target", leader).items() if at <= stop}
        epoch = kept_epoch(curve, run.settings.mode)
        score = curve.get(epoch, math.nan)
    if ends:  # perhaps one that ended early, or a finalist of an earlier call
        leader, _ = best_of(run.history, tried_targets(run.history, finalists))
        epoch, score = kept_of(run.history, leader)
    leads = f"; trial {leader} {'wins' if ends else 'leads'} with {metric} {show(score, 4)} (epoch {epoch})"
    run.say(f"full size at epoch {stop}: {kept}{'' if run.settings.comparison.by_place else leads}")


def _refit(run: Run, finalists: Sequence[int], devices: Devices) -> None:
    """Train the winner once more where there are folds: on all examples, to the epoch that is kept of it."""
    settings = run.settings
    winner, _ = best_of(run.history, tried_targets(run.history, finalists))
    epoch, _ = kept_of(run.history, winner)
    key = refit_key(winner, epoch)
    there = run.history.refits.get(winner) == key and run.can_load(key)
    if not settings.folds or not settings.race.refit or there or not epoch:
        return
    if run.out_of_time("target"):
        run.say(f"`time_budget_s` is spent: trial {winner} is not trained on all examples, {_MEAN_OF_FOLDS}")
        return
    run.begin_stage(FULL_SIZE, epoch)
    run.say(f"trial {winner} trains once more, on the examples of all {settings.folds} folds, to epoch {epoch}")
    is_average = not averages_lost(run.history.metrics["target", winner], epoch, settings.metric)
    task = full_size_task(key, winner, Span(0, epoch), None, settings.seed, refit=True, averaged=is_average)
    for outcome in (finished.outcome for finished in train_tasks(devices, [task])):
        if outcome.error is None:
            record_refit(run, winner, epoch, outcome.state, outcome.seconds)
        else:
            why = outcome.error.strip().splitlines()[-1]
            run.say(f"trial {winner} cannot be trained on all examples ({why}), {_MEAN_OF_FOLDS}")
    run.end_stage()


_MEAN_OF_FOLDS = "and `best_model` gives the mean of its folds' models"


def _epochs_trained(run: Run, numbers: Sequence[int], stop: int) -> int:
    """Epochs up to a milestone that trials have trained at full size; those of a sweep at full width are no part."""
    lines = [line for number in numbers for line in run.history.metrics.get(("target", number), ())]
    return len([line for line in lines if line["stage"] == "target" and line["epoch"] <= stop])


def _first_to_its_end(run: Run, numbers: Sequence[int], stop: int, plan: Sequence[Piece]) -> int | None:
    """Return the sweep's leader if it should train to its end before the finalists are compared; None otherwise.

    It should if the time budget seems enough for its training, but not for the race. The model in hand then comes from
    a whole training, instead of being the best of several half-trained ones. On recorded trainings, given half of a
    search's time, that halves the regret (`benchmarks/results/replay_notes.md`).
    """
    leader, lanes, epochs = numbers[0], run.time_left.lanes, sum(piece.epochs for piece in plan)
    if run.store.doing.suspected(_next_task(run, leader, run.settings.max_t, len(numbers)).key):
        return None
    foreseen, left = run.time_left.foreseen(), run.seconds_left("target")
    compared = not any(_goes_on(run, n, stop) for n in numbers)
    if foreseen is None or foreseen <= left or compared or lanes >= len(numbers):
        return None
    alone = foreseen * lanes * (run.settings.max_t - run.history.epochs("target", leader)) / epochs
    if alone > left or not _goes_on(run, leader, run.settings.max_t):
        return None
    run.say(f"`time_budget_s` may end before the race does: trial {leader}, best in the sweep, trains to its end first")
    return leader


def _train_to_its_end(
    leader: int, stop: int, run: Run, numbers: Sequence[int], devices: Devices, raised: Counter[int]
) -> None:
    """Train the leader to its end, and others to a milestone where a device has more lanes than one."""
    while _goes_on(run, leader, run.settings.max_t):
        others = [n for n in numbers if n != leader and _goes_on(run, n, stop)]
        tasks = [_next_task(run, leader, run.settings.max_t, len(numbers))]
        tasks += [_next_task(run, n, stop, len(numbers)) for n in others[: run.time_left.lanes - 1]]
        if not _train(run, tasks, devices, raised):
            return


def _train_to(stop: int, run: Run, numbers: Sequence[int], devices: Devices, raised: Counter[int]) -> None:
    """Train finalists to a milestone, in spans that end where a checkpoint is due, or as far as time goes."""
    while tasks := [_next_task(run, n, stop, len(numbers)) for n in numbers if _goes_on(run, n, stop)]:
        # Those at which processes died come when all others are there, the one with the fewest deaths first.
        died = {task.key: run.store.doing.suspected(task.key) for task in tasks}
        next_ones = [t for t in tasks if not died[t.key]] or [min(tasks, key=lambda task: died[task.key])]
        # Those that were interrupted last time catch up first.
        if not _train(run, sorted(next_ones, key=lambda task: task.span.start), devices, raised):
            return


def _train(run: Run, tasks: Sequence[Task], devices: Devices, raised: Counter[int]) -> bool:
    """Train the tasks that the time budget allows to begin, the first of all in any case; return whether any began."""
    began = run.history.began("target")

    def may_begin() -> bool:
        nonlocal began
        before, began = began, True
        return not found_enough(run.history) and not (before and run.out_of_time("target"))

    trained = False
    for finished in train_tasks(devices, tasks, may_begin):
        trained = True
        _record(run, finished, raised)
    return trained


def _goes_on(run: Run, number: int, stop: int) -> bool:
    """Tell whether a full-size trial still has epochs to train before a milestone."""
    return (
        run.history.epochs("target", number) < stop
        and not ended_early(run.history, number)
        and not done_early(run.history, number)
    )


def _next_task(run: Run, number: int, stop: int, beside: int) -> Task:
    """Return the task that trains a finalist from its last checkpoint to the milestone."""
    source = source_of(run, number)
    start, every = run.history.epochs("target", number), run.settings.race.checkpoint_every or stop
    span = Span(start, min(stop, start - start % every + every))
    key = f"target/trial-{number}/to-{span.stop}"
    return full_size_task(key, number, span, source, run.settings.seed, beside)


def _record(run: Run, finished: Finished, raised: Counter[int]) -> None:
    """Keep what a full-size training gave; one that raised is tried again before it fails."""
    number, outcome = finished.task.number, finished.outcome
    if outcome.error is None:
        lines = metric_lines("target", number, outcome.epochs)
        # For who wants to see who trained beside whom.
        shared = {"beside": finished.beside} if finished.beside > 1 else {}
        where = {"device": finished.device} if finished.device is not None else {}
        if lines:
            record_epochs(run, number, lines, outcome.state, outcome.seconds, **shared, **where, **outcome.more)
        if outcome.ended:
            record_done(run, number)
    elif outcome.died or raised[number] == RETRIES:
        record_failure(run, number, outcome.error, outcome.seconds)
    else:
        raised[number] += 1
        again = f"trial {number} is tried again at full size ({raised[number]} of {RETRIES}), as it raised"
        run.say(f"{again} {outcome.error.strip().splitlines()[-1]}")
