"""A heat on surrogates: fused groups train at the heat's width until its rule lets no trial go on.

An idle device takes the next groups, one for each of its cores. The trials of a group are of one kind and train as one
fused model. Each device leaves a share of the trials to the other idle devices. On one device, all trials of a rung
train to the same milestone before they are compared. So neither the order of training nor the grouping matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from hydro_rasda.contracts import Devices, Finished
from hydro_rasda.heats.finalists import is_found
from hydro_rasda.heats.group_queue import Dispatcher
from hydro_rasda.heats.heat import Heat
from hydro_rasda.heats.race import Race
from hydro_rasda.history.full_size import found_early
from hydro_rasda.history.lines import Unit, failure_line, metric_lines
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import SweepRule, SweepState
from hydro_rasda.schedulers.sweep_rule import RuleToLast


class SurrogateHeat(Heat):
    """A heat on surrogates under way.

    Args:
        width: Width of its surrogates relative to the model; None for the width in the sweep's settings.
        race: The race, in which leading trials may begin while other trials still train here; None if no trial may
            begin early.
    """

    def __init__(
        self,
        run: Run,
        devices: Devices,
        rule: SweepRule,
        width: float | None = None,
        race: Race | None = None,
    ) -> None:
        super().__init__(run, devices, rule)
        self._race = race
        self._dispatcher = Dispatcher(run, devices, self.name, width)
        self._good_enough: list[int] | None = None

    @property
    def state(self) -> SweepState:
        return self._run.history.heats[self.name].state

    def _hear(self, key: str, unit: Unit) -> None:
        """React to a unit of the journal that the run has recorded or read."""

    def _tell_plan(self) -> None:
        """Tell the user the plan of training. The heat calls this whenever a task begins."""

    def _decided(self, key: str, unit: Unit) -> None:
        self._hear(key, unit)
        for number, *_ in unit.value:
            if number in self.state.training:
                self._dispatcher.add(number, self.state.training[number].goal or 0)

    def _has_found_enough(self) -> bool:
        return bool(self._found())

    def _found(self) -> list[int]:
        """Return the trials whose full-size models have reached `stop_at`. If there are any, the heat ends."""
        run = self._run
        if run.settings.stop_at is None:
            return []
        if self._good_enough is None:
            self._good_enough = self._as_good_as_asked(self.state.trials)
        return found_early(run.history) or [number for number in self._good_enough if is_found(run, number)]

    def _begin(self) -> bool:
        devices, dispatcher, state = self._devices, self._dispatcher, self.state
        if not devices.busy():
            self._queue_again()
        self._begin_good_enough()
        while dispatcher and self._may_begin() and (idle := devices.idle()):
            for device, task in dispatcher.tasks(idle):
                self._start(device, task)
                self._tell_plan()
                if not self._may_begin():
                    break
        nothing_trains = not state.training and not self.under_way
        if dispatcher or not (devices.idle() or nothing_trains) or not (self._may_begin() or nothing_trains):
            return False
        state.idle = True
        moved = self._decide()
        state.idle = False
        if not moved and self._race is not None:
            self._begin_race_early(self._race)
        return moved

    def _queue_again(self) -> None:
        """Queue again the trials of tasks that no device trains any more."""
        for number in sorted(self.under_way):
            if (standing := self.state.training.get(number)) is not None:
                self._dispatcher.add(number, standing.goal or 0)
        self.under_way.clear()

    def _begin_good_enough(self) -> None:
        """Let trials train at full size at once if their surrogates have reached `stop_at`.

        If the full-size model is as good, too, the run ends. So this training may save the rest of the heat, which
        would cost more.
        """
        run = self._run
        for number in self._race.begin_early(self._good_enough or (), beside=1) if self._race is not None else ():
            reached = f"{run.settings.metric} of trial {number}'s surrogate is as good as `stop_at` asks"
            run.say(f"{reached}: it trains at full size, before others go on")

    def _as_good_as_asked(self, numbers: Iterable[int]) -> list[int]:
        """Return the trials whose surrogates reached `stop_at` in some epoch of this heat."""
        history, good = self._run.history, self._run.settings.good_enough
        return [n for n in numbers if any(map(good, history.curve(self.name, n).values()))]

    def _begin_race_early(self, race: Race) -> None:
        """Let idle devices begin the leaders' full-size models, once all other trials train to the last milestone.

        A leader is a trial that has reached the last milestone, and stays among the best `top_k` whatever the others
        score. The best trial at the last milestone counts as a leader in any case (Hydro's eager transfer). Trials that
        have continued as copies are never leaders.
        """
        state = self.state
        last, training = max(state.scores, default=0), len(state.training)
        if state.left or not training or len(state.training_to(last)) < training:
            return
        if isinstance(self._rule, RuleToLast) and last < self._rule.last:
            return
        best = [state.trials[number] for number in state.best(state.top_k)]
        own = [trial for trial in best if trial.epoch == last and all(p.copy_of is None for p in trial.intervals)]
        leaders = [trial.number for trial in own[: max(1, state.top_k - training)]]
        race.begin_early(leaders, beside=min(state.top_k, len(state.scores[last]) + training))

    def _is_under_way(self) -> bool:
        return bool(self.under_way or (self._dispatcher and self._may_begin()))

    def take(self, finished: Finished) -> None:
        """Record the outcome of a task of this heat, or of a task of the race that began early."""
        if self._race is not None and finished.task.heat == self._race.name:
            self._race.take(finished)
        else:
            super().take(finished)

    def _may_begin(self) -> bool:
        """Tell whether there is time for another group. The very first group may begin in any case."""
        nothing_yet = not self._run.history.began(self.name) and not self.under_way
        return nothing_yet or not self._run.out_of_time("sweep")

    def _record(self, finished: Finished) -> None:
        """Record the training of a task: save its checkpoint first, then write the journal's lines."""
        run, outcome, task, key = self._run, finished.outcome, finished.task, finished.task.key
        epochs, copied = partial(run.history.epochs, self.name), run.history.heats[self.name].copies
        while run.store.done(key):  # a trial that lost its checkpoint trains the span once more
            key += "/again"
        run.save(key, {"parts": outcome.checkpoint}, task.members)
        # Leave out epochs that are recorded already. A trial that has lost its checkpoint repeats its first epochs.
        fresh = {n: [at for at in h if at[0] > epochs(n)] for n, h in outcome.history.items()}
        lines = [line for n, history in fresh.items() for line in metric_lines(self.name, n, history)]
        lines += [failure_line(number, error) for number, error in outcome.failures.items()]
        # Record the groups that trained, because the last digits of a score depend on a group's size. They may be
        # smaller than the planned groups, which are split if memory runs out.
        groups = [part["members"] for part in outcome.checkpoint]
        value = {"members": list(task.members), "stop": task.span.stop, "groups": groups}
        # If the checkpoint of a copy's source is damaged, the copy trains from the beginning. Then `task.copies` leaves
        # it out, but it still counts as a copy here.
        copies = {n: copied[n] for n in task.members if n in copied}
        behind = {n: h[-1][0] for n, h in outcome.history.items() if h and h[-1][0] < epochs(n)}
        more = {"device": finished.device, "copies": copies or None, "behind": behind or None}
        value |= {name: of for name, of in more.items() if of is not None}
        self._hear(key, run.record(key, Unit(value, lines, outcome.seconds)))
        if self._good_enough is not None:
            new = [number for number in task.members if number not in self._good_enough]
            self._good_enough += self._as_good_as_asked(new)
