"""The race at full size: finalists are compared at RASDA's milestones, and the least promising ones stop there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hydro_rasda.common.short_values import error_line, show
from hydro_rasda.contracts import Devices, Finished, Span, Task, full_size_task
from hydro_rasda.heats.chance_baseline import unbeaten_chance
from hydro_rasda.heats.heat import Heat
from hydro_rasda.heats.run_plan import race_pieces, tell_race
from hydro_rasda.heats.train_tasks import train_tasks
from hydro_rasda.history.full_size import found_enough, is_race_over, race_of, refit_key, tried_targets
from hydro_rasda.history.history import DONE, ENTERED
from hydro_rasda.history.lines import Unit, decision_key, metric_lines
from hydro_rasda.history.scores import averages_lost, deciding_curve, end_of, goes_on, kept_of, places_at
from hydro_rasda.history.winner import best_of
from hydro_rasda.run.events import RungDecided
from hydro_rasda.run.record_full_size import (
    end_by_score,
    failed_before_change,
    lost_winner,
    record_done,
    record_epochs,
    record_failure,
    record_refit,
    source_of,
    try_again,
)
from hydro_rasda.run.state import Run
from hydro_rasda.run.time_left import Piece
from hydro_rasda.schedulers.race_rule import RaceRule
from hydro_rasda.schedulers.sweep_rule import Continue, Move
from hydro_rasda.schedulers.sweep_state import SweepState
from hydro_rasda.training.best_weights import kept_epoch
from hydro_rasda.training.retry_policy import RETRIES

DEARER = 4.0
"""With `stop_at`, the first good score ends the race. So trials whose epochs are cheaper by this factor train first."""


def train_finalists(run: Run, finalists: Sequence[int], devices: Devices) -> list[int]:
    """Train the full-size models; the best continue at each of RASDA's milestones.

    Epochs that earlier processes trained count, whatever their backend. If the race is already over, nothing trains.

    Returns:
        All trials trained at full size, including finalists of earlier calls with fewer samples or less time.
    """
    return Race(run, devices).between(finalists)


class Race(Heat):
    """The race under way."""

    name = "race"
    _rule: RaceRule

    def __init__(self, run: Run, devices: Devices) -> None:
        settings, race = run.settings, race_of(run.history)
        # The last look compares trials with the leader, and stops those that are not worth their training. It stops
        # none on a Pareto front, which has no leader.
        by_worth = not settings.comparison.by_place
        super().__init__(run, devices, RaceRule(race, settings.race_milestones, settings.last_look, by_worth))
        self._raised = Counter[int]()
        self._leader: int | None = None
        self._told = 0
        self._began = False
        self._begun_early = set[int]()
        self._has_entered = self._is_announced = False

    @property
    def state(self) -> SweepState:
        return self._run.history.race

    def between(self, finalists: Sequence[int]) -> list[int]:
        """Train the finalists; see `train_finalists`."""
        run, history = self._run, self._run.history
        again = failed_before_change(run, finalists)
        lost = None if again else lost_winner(run, finalists)
        if again or lost is not None or history.entrants != list(finalists):
            key = ENTERED  # an earlier race keeps its name, so that what began early before it still counts
            while key in run.store.units():
                key += "/again"
            run.record(key, Unit(list(finalists)))
        # If the process is killed before these lines, the next one finds the same trials, which then enter once more.
        for number in again:
            try_again(run, number)
        if lost is not None:
            source_of(run, lost)
        if history.middle is None and self._rule.race.full_trainings >= len(finalists):
            self._rule = replace(self._rule, by_worth=False)  # the budget covers all of them
        self._has_entered, self._began = True, history.began(self.name)
        self.under_way &= {*finalists}  # forget trials that began early but did not enter
        was_over = is_race_over(history, finalists)
        if not was_over:
            for over in ("sweep", "transfer check", "middle"):  # these parts are over, perhaps because time ran out
                run.time_left.plan(over, [])
        self._tell_rungs(recalled=True, said=not was_over)
        if self.state.training:
            self._plan()
        self.train()
        self._end_heat()
        if found_enough(history):
            _refit(run, finalists, self._devices)
            end_by_score(run)
        elif self.state.training:
            run.end_by_time(self.name)
            run.say("`time_budget_s` is spent; repeat the call with a larger one to go on")
        else:
            self._tell_of_end(finalists, was_over)
            _refit(run, finalists, self._devices)
            run.end_by(DONE, sorted(finalists))
        return tried_targets(history, finalists)

    def begin_early(self, numbers: Iterable[int], beside: int) -> list[int]:
        """Let idle devices train trials that may enter the race, up to its first milestone; return those that begin.

        No decision uses this training before the trial enters; see `History.early`. A trial begins early only once.

        Args:
            beside: How many trials are expected to enter.
        """
        run, history = self._run, self._run.history
        begun = list[int]()
        if run.problem.goes_on:
            return begun
        known = {*self._begun_early, *history.early, *self.state.trials}
        for number in numbers:
            if number in known or history.epochs(self.name, number):
                continue
            task = self._task(number, self._rule.milestones[0], beside)
            if run.store.doing.suspected(task.key):
                continue
            if not (idle := self._devices.idle(task)):
                break
            self._start(idle[0], task)
            begun.append(number)
        self._begun_early.update(begun)
        return begun

    def _prepare(self) -> bool:
        run, state = self._run, self.state
        if state.training or found_enough(run.history):
            return False
        if state.waiting_at(0):
            return True
        self._end_heat()
        reached = max((trial.epoch for trial in state.trials.values()), default=0)
        state.spent = self._epochs_trained(reached)
        state.ended = {n: end for n in state.trials if (end := end_of(run.history, n)) is not None}
        if there := self._rule.compared(state):
            self._see_scores(state.trials[there[0]].epoch, there)
        return bool(there)

    def _see_scores(self, stop: int, there: Sequence[int]) -> None:
        """Add to the state how the trials `there` compare at the milestone `stop`, which they have reached.

        Note whether no trial beats a constant prediction. If places order the trials, note these (`Comparison.places`).
        """
        run, state = self._run, self.state
        scores = {number: deciding_curve(run.history, number).get(stop, math.nan) for number in there}
        if run.settings.comparison.by_place:
            state.place(stop, places_at(run.history, stop, scores))
        compares = stop < run.settings.max_t and len(there) > 1
        state.at_chance = compares and unbeaten_chance(run, self.name, scores) is not None
        if state.at_chance:
            run.say(f"no finalist's {run.settings.metric} differs from chance at epoch {stop}: none is stopped")

    def _decision_key(self, moves: Mapping[int, Move]) -> str:
        at = self.state.trials[next(iter(moves))].epoch
        return decision_key(f"race/to-{at}/kept" if at else "race/begin", moves)

    def _decided(self, key: str, unit: Unit) -> None:
        self._tell_rungs()
        if self.state.training:
            self._plan()

    def _tell_rungs(self, recalled: bool = False, said: bool = True) -> None:
        """Tell callbacks of each decision once; `recalled` is True if an earlier call took these decisions.

        If `said` is True, also tell the user how many trials go on, and which one leads.
        """
        run, rungs, by_place = self._run, self._run.history.rungs, self._run.settings.comparison.by_place
        for index in range(self._told, len(rungs)):
            stop, moves = rungs[index]
            goals = {number: move.to for number, move in moves.items() if isinstance(move, Continue)}
            kept = [*goals]
            over = {"heat": self.name, "epoch": stop, "candidates": tuple(sorted(moves)), "kept": tuple(kept)}
            run.notify(RungDecided, **over, recalled=recalled)
            before = {n: move for at, earlier in rungs[:index] if at == stop for n, move in earlier.items()}
            came = len(self.state.scores[stop].keys() - before.keys())
            if not said or not kept:
                continue
            if kept[0] in before:
                told = f"nobody is left; of those stopped at epoch {stop}, {kept} go on"
                run.say(f"race at epoch {goals[kept[0]]}: {told}")
            elif len(kept) < came:
                leads = "" if by_place else f"; {self._leads(kept[0], stop)}"
                run.say(f"race at epoch {stop}: {len(kept)} of {came} go on{leads}")
        self._told = len(rungs)

    def _leads(self, number: int, stop: int) -> str:
        """Return words that say that a trial leads at a milestone, with its best score up to there."""
        history, settings = self._run.history, self._run.settings
        epoch, score = history.best.get(number, (stop, history.score_at(self.name, number, stop)))
        if epoch > stop:  # it came later: a resumed run tells again of an earlier decision
            curve = {at: value for at, value in history.curve(self.name, number).items() if at <= stop}
            epoch = kept_epoch(curve, settings.mode)
            score = curve.get(epoch, math.nan)
        return f"trial {number} leads with {settings.metric} {show(score, 4)} (epoch {epoch})"

    def _tell_of_end(self, finalists: Sequence[int], was_over: bool) -> None:
        """If any trial reached the end, tell which trial wins. With several metrics, no trial wins."""
        run, state, settings = self._run, self.state, self._run.settings
        if not (kept := [*self._rule.finalists(state)]):
            return
        among = tuple(sorted(self._rule.compared(state)))
        over = {"heat": self.name, "epoch": settings.max_t, "candidates": among, "kept": tuple(kept)}
        run.notify(RungDecided, **over, recalled=was_over)
        if was_over:
            return
        winner, _ = best_of(run.history, tried_targets(run.history, finalists))  # it may have ended before `max_t`
        epoch, score = kept_of(run.history, winner)
        wins = f"; trial {winner} wins with {settings.metric} {show(score, 4)} (epoch {epoch})"
        run.say(f"race at epoch {settings.max_t}: done{'' if settings.comparison.by_place else wins}")

    def _plan(self) -> None:
        """Estimate the remaining time of the race, and announce the epochs up to the next milestone."""
        run, state, settings = self._run, self.state, self._run.settings
        stop = self._milestone()
        reached = max((at for at in self._rule.milestones if at < stop), default=0)
        epochs = sum(max(0, stop - run.history.epochs(self.name, n)) for n in state.training)
        plan = race_pieces(run, self._racing(), epochs, reached, self._epochs_trained(reached))
        was_planned = run.time_left.planned("race")
        run.time_left.plan("race", plan)
        if not was_planned:
            tell_race(run, plan, self._racing())
        if stop == self._rule.milestones[0] and self._leader is None:
            self._leader = self._first_to_its_end(stop, plan)
        beyond = 0
        if (leader := self._leader) is not None and goes_on(run.history, leader, settings.max_t):
            beyond = settings.max_t - max(stop, run.history.epochs(self.name, leader))
        run.begin_heat("race", epochs + beyond)
        self._is_announced = True

    def _epochs_trained(self, stop: int) -> int:
        """Count the epochs that trials trained in the race up to a milestone, without those of a full-width sweep."""
        metrics = self._run.history.metrics
        lines = [line for number in self.state.trials for line in metrics.get((self.name, number), ())]
        return len([line for line in lines if line["heat"] == self.name and line["epoch"] <= stop])

    def _end_heat(self) -> None:
        if self._is_announced:
            self._run.end_heat()
        self._is_announced = False

    def _milestone(self) -> int:
        """Return the milestone that trials are on their way to."""
        return max(trial.goal or 0 for trial in self.state.training.values())

    def _racing(self) -> int:
        """Count the trials that train to the milestone, and those that already wait there."""
        return len(self.state.training) + len(self.state.waiting)

    def _first_to_its_end(self, stop: int, plan: Sequence[Piece]) -> int | None:
        """Return the sweep's leader if it should train to its end before the finalists are compared; otherwise None.

        The leader should if the time budget probably covers its training, but not the race. The final model then comes
        from one whole training, rather than from the best of several half trainings. On recorded trainings, with half
        of the time that a search takes, this halves the regret (`benchmarks/results/replay_notes.md`).
        """
        run, racing, lanes = self._run, self._racing(), self._run.time_left.lanes
        leader, *_ = run.history.entrants or [0]
        end, epochs = run.settings.max_t, sum(piece.epochs for piece in plan)
        if run.store.doing.suspected(self._task(leader, end, racing).key):
            return None
        foreseen, left = run.time_left.foreseen(), run.seconds_left(self.name)
        if foreseen is None or foreseen <= left or lanes >= racing:
            return None
        alone = foreseen * lanes * (end - run.history.epochs(self.name, leader)) / epochs
        if alone > left or not goes_on(run.history, leader, end):
            return None
        told = f"trial {leader}, best in the sweep, trains to its end first"
        run.say(f"`time_budget_s` may end before the race does: {told}")
        return leader

    def _begin(self) -> bool:
        run = self._run
        while (task := self._next_task()) is not None and self._may_begin():
            if not (idle := self._devices.idle(task)):
                break
            if task.source is not None and source_of(run, task.number) is None:
                continue  # the checkpoint is damaged; the trial's next task starts anew
            self._began = True
            self._start(idle[0], task)
        return False

    def _may_begin(self) -> bool:
        """Tell whether there is time for another training. The first one may begin in any case."""
        return not found_enough(self._run.history) and not (self._began and self._run.out_of_time(self.name))

    def _next_task(self) -> Task | None:
        """Return the next task, which trains the trial that is furthest behind; None if no task is to begin."""
        run, state, end = self._run, self.state, self._run.settings.max_t
        if not state.training:
            return None
        stop, racing = self._milestone(), self._racing()
        if (leader := self._leader) is not None and goes_on(run.history, leader, end):
            if leader not in self.under_way:
                return self._task(leader, end, racing)
            if len(self.under_way) >= run.time_left.lanes:
                return None
        waiting = [self._task(n, stop, racing) for n in state.training if n not in self.under_way]
        # A trial at which processes died waits until all other trials have reached the milestone. The trial with the
        # fewest deaths then comes first.
        died = {task.key: run.store.doing.suspected(task.key) for task in waiting}
        if alive := [task for task in waiting if not died[task.key]]:
            return min(alive, key=lambda task: (task.span.start, self._dearness(task.number)))
        return None if self.under_way else min(waiting, key=lambda task: died[task.key], default=None)

    def _dearness(self, number: int) -> int:
        """Return a trial's position in the order of training; 0 comes first. Without `stop_at`, all trials have 0.

        The position is the logarithm of a ratio of costs, to base `DEARER` and rounded down. The cost is the time of an
        epoch in the trial's last training on a surrogate; the ratio is to the cheapest finalist. An unknown cost
        gives 0.
        """
        if self._run.settings.stop_at is None:
            return 0
        costs = {n: cost for n in self.state.trials if (cost := self._run.history.epoch_cost.get(n, 0.0)) > 0}
        if number not in costs:
            return 0
        return math.floor(math.log(costs[number] / min(costs.values()), DEARER))

    def _task(self, number: int, stop: int, beside: int) -> Task:
        """Return the task that trains a trial from its last checkpoint to its next one, at most to epoch `stop`."""
        run = self._run
        start, every = run.history.epochs(self.name, number), run.settings.race.checkpoint_every or stop
        span = Span(start, min(stop, start - start % every + every))
        key = f"race/trial-{number}/to-{span.stop}"
        return full_size_task(key, number, span, run.history.checkpoints.get(number), run.settings.seed, beside)

    def _is_under_way(self) -> bool:
        return bool(self.under_way & self.state.trials.keys()) or (self._next_task() is not None and self._may_begin())

    def _record(self, finished: Finished) -> None:
        """Record the outcome of a training. A trial that raised is tried again before it fails."""
        run, number, outcome = self._run, finished.task.number, finished.outcome
        early = number not in self.state.trials
        if early and (self._has_entered or outcome.error is not None or outcome.ended):
            return  # drop the outcome: if the trial enters the race, it starts anew
        if outcome.error is None:
            lines = metric_lines(self.name, number, outcome.epochs)
            # Record how many trials trained side by side, and on which device.
            shared = {"beside": finished.beside} if finished.beside > 1 else {}
            where = {"device": finished.device} if finished.device is not None else {}
            when = {"early": True} if early else {}
            if lines:
                more = {**shared, **where, **when, **outcome.more}
                record_epochs(run, number, lines, outcome.state, outcome.seconds, **more)
            if outcome.ended:
                record_done(run, number)
        elif outcome.died or self._raised[number] == RETRIES:
            record_failure(run, number, outcome.error, outcome.seconds)
        else:
            self._raised[number] += 1
            again = f"trial {number} is tried again at full size ({self._raised[number]} of {RETRIES}), as it raised"
            run.say(f"{again} {error_line(outcome.error)}")


def _refit(run: Run, finalists: Sequence[int], devices: Devices) -> None:
    """With cross-validation, train the winner once more on all examples, up to the epoch whose weights were kept."""
    settings = run.settings
    winner, score = best_of(run.history, tried_targets(run.history, finalists))
    epoch, _ = kept_of(run.history, winner)
    key = refit_key(winner, epoch)
    there = run.history.refits.get(winner) == key and run.can_load(key)
    if not settings.folds or not settings.race.refit or there or not math.isfinite(score):
        return
    if run.out_of_time("race"):
        run.say(f"`time_budget_s` is spent: trial {winner} is not trained on all examples, {_MEAN_OF_FOLDS}")
        return
    run.begin_heat("race", epoch)
    run.say(f"trial {winner} trains once more, on the examples of all {settings.folds} folds, to epoch {epoch}")
    is_average = not averages_lost(run.history.metrics["race", winner], epoch, settings.metric)
    task = full_size_task(key, winner, Span(0, epoch), None, settings.seed, refit=True, averaged=is_average)
    # Ignore what others end with, such as a trial that began early and did not enter the race.
    for outcome in (done.outcome for done in train_tasks(devices, [task]) if done.task.key == key):
        if outcome.error is None:
            record_refit(run, winner, epoch, outcome.state, outcome.seconds)
        else:
            why = error_line(outcome.error)
            run.say(f"trial {winner} cannot be trained on all examples ({why}), {_MEAN_OF_FOLDS}")
    run.end_heat()


_MEAN_OF_FOLDS = "and `best_model` gives the mean of its folds' models"
