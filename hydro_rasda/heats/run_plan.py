"""The plan of a run: how many epochs each heat trains. The user sees it, and the estimate of the time left uses it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction

from hydro_rasda.common.short_values import counted
from hydro_rasda.contracts import Devices
from hydro_rasda.heats.group_queue import Dispatcher
from hydro_rasda.heats.transfer_check import CHECKED
from hydro_rasda.history.full_size import race_of
from hydro_rasda.history.history import MiddlePlan
from hydro_rasda.records.summary import models_in_words
from hydro_rasda.run.state import Run
from hydro_rasda.run.time_left import Piece
from hydro_rasda.schedulers import Bracket, PopulationBasedTraining, SweepRule, SweepState
from hydro_rasda.schedulers.sweep_rule import checked_epochs

_VERSIONS = re.compile(r"(, \d+ threads)?, torch [^,]*$")


class RunPlan:
    """The plan of a run: how many epochs each heat trains.

    It is made before the first group begins, and shown to the user once the sizes of groups are known.
    """

    def __init__(self, run: Run, devices: Devices, dispatcher: Dispatcher, rule: SweepRule, state: SweepState) -> None:
        self._run, self._dispatcher, self._count = run, dispatcher, state.left
        self._one_interval = isinstance(rule, PopulationBasedTraining) and rule.last <= rule.interval
        copies = isinstance(rule, PopulationBasedTraining) and not self._one_interval
        self._finds_schedules = copies and run.settings.sweep.surrogate < 1
        # Ask the rule before any trial is admitted. Later, the rule cannot know whether more trials will come.
        self._rungs: list[tuple[float, float]] = [(self._count, checked_epochs(rule, rule.epochs(state)) / self._count)]
        if isinstance(rule, Bracket):
            self._rungs = [*rule.rungs(state)]
        idle = devices.idle()
        self._machines = Counter(_VERSIONS.sub("", devices.machine(device)) for device in idle)
        self._cores = run.time_left.lanes = sum(devices.cores(device) for device in idle) or 1
        self._told = False

    def tell(self, done: int) -> None:
        """Tell the user the plan of training, and estimate how long it takes. Further calls do nothing.

        `done` is the number of epochs that the sweep has already trained.
        """
        if self._told:
            return
        self._told, run, settings = True, self._run, self._run.settings
        sweep = [*_without(done, self._sweep_pieces())]
        race = race_pieces(run, self._finalists)
        run.time_left.plan("sweep", sweep)
        run.time_left.plan("race", race)
        if (middle := run.history.middle) is not None:
            entrants = min(middle.entrants, self._count)
            run.time_left.plan("middle", [middle_piece(run, middle, entrants * settings.max_t)])
        if settings.sweep.check_transfer:
            first = next(iter(race), Piece(0, 0.0))
            run.time_left.plan("transfer check", [Piece(settings.sweep.grace_period * (CHECKED + 1), first.seconds)])
        run.time_left.begin("sweep", run.store.seconds)
        for line in self._lines(sum(piece.epochs for piece in sweep), sum(piece.epochs for piece in race)):
            run.say(line)

    def _sweep_pieces(self) -> Iterator[Piece]:
        for size, epochs in self._rungs:
            yield Piece(size * epochs, self._dispatcher.foreseen(size, self._cores) / size)

    def _lines(self, swept: float, raced: float) -> Iterator[str]:
        if not self._run.callbacks:
            return
        settings, kinds = self._run.settings, len({*self._run.history.kinds.values()})
        where = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in self._machines.items())
        # A searcher has suggested only its first configurations, so the number of structures may not be known yet.
        known = len(self._run.history.trials) == self._count
        each = f", each with {told}" if (told := models_in_words(settings, "sweep")) else ""
        shared = settings.sweep.fusion != 1 and known and 1 < kinds < self._count
        of = f" Models of one structure train together; these have {kinds} structures." if shared else ""
        yield f"{counted(self._count, 'configuration')}{each}{f', on {where}' if where else ''}.{of}"
        ratio = Fraction(settings.sweep.surrogate).limit_denominator(64)
        width = f"surrogates of {ratio} of the width" if ratio < 1 else "models at full width"
        if settings.sweep.depth < 1:
            width += f" and {Fraction(settings.sweep.depth).limit_denominator(64)} of the depth"
        yield f"First, {width} train for {counted(round(swept * settings.models('sweep')), 'epoch')} in all."
        if (middle := self._run.history.middle) is not None:
            yield from self._middle_lines(middle, swept, raced)
            return
        if self._one_interval:
            yield "No trial is copied, as the sweep ends with the first interval of its rule: raise `max_t` for more."
        finalists = self._finalists
        best = f"the best {finalists} train" if finalists > 1 else "the best one trains"
        raced *= settings.models("race")
        each = f", each with {told}" if (told := models_in_words(settings, "race")) else ""
        yield f"Then {best} at full size{each}, for about {counted(round(raced), 'epoch')} in all."
        if self._finds_schedules:
            yield "They train by the schedules that the population found, smoothed, and beside them by a linear decay."

    @property
    def _finalists(self) -> int:
        """Return how many trials enter the race."""
        middle = self._run.history.middle
        return min(self._run.settings.race.top_k if middle is None else middle.finalists, self._count)

    def _middle_lines(self, middle: MiddlePlan, swept: float, raced: float) -> Iterator[str]:
        """Yield lines that tell the user of the heats after the sweep, and of the cost of all heats in full trainings.

        Costs are estimated by counted operations. `swept` and `raced` are the epochs of the sweep and of the race.
        """
        settings, (narrow, wider) = self._run.settings, middle.shares
        epochs, models = min(middle.entrants, self._count) * settings.max_t, settings.models("middle")
        ratio = Fraction(middle.width).limit_denominator(64)
        told = f"Then the best {min(middle.entrants, self._count)} train anew on surrogates of {ratio} of the width"
        yield f"{told}, to their ends, for {counted(epochs * models, 'epoch')} in all."
        best = f"the best {self._finalists} of them train" if self._finalists > 1 else "the best of them trains"
        yield f"Last, {best} at full size, for about {counted(round(raced * settings.models('race')), 'epoch')} in all."
        whole = settings.max_t * settings.models("race")
        costs = [swept * models * narrow / whole, epochs * models * wider / whole, raced / settings.max_t]
        heats = " + ".join(f"{cost:.2f}" for cost in costs)
        yield f"Cost of the three heats, by counted operations: about {heats} full trainings."


def middle_piece(run: Run, middle: MiddlePlan, epochs: float) -> Piece:
    """Estimate the time of epochs in the middle heat, from that of a full-size epoch and the ratio of operations."""
    of_each = run.settings.models("middle") / run.settings.models("race")  # a trial's epoch trains all its models
    seconds = run.problem.steady_epoch_seconds * of_each * middle.shares[-1]
    return Piece(epochs, seconds / max(1, run.time_left.lanes))


def tell_race(run: Run, pieces: Iterable[Piece], finalists: int) -> None:
    """Tell the user how many epochs the race still trains. A resumed run calls this if its sweep is over."""
    if run.callbacks:
        epochs = counted(round(run.settings.models("race") * sum(piece.epochs for piece in pieces)), "more epoch")
        told = f"at full size, {counted(finalists, 'finalist')} will train for about {epochs} in all"
        run.say(f"The sweep is over: {told}.")


def race_pieces(run: Run, finalists: int, first: int | None = None, start: int = 0, trained: int = 0) -> list[Piece]:
    """Return the remaining epochs of the race, by milestone, with their times.

    The estimate assumes that the last look stops no trial, and that no trial continues only for its averaged weights.

    Args:
        finalists: Number of trials that train to the next milestone.
        first: Epochs left up to the next milestone; None if nothing has trained since `start`.
        start: The previous milestone.
        trained: Epochs trained at full size up to `start`.
    """
    rule, found, left = race_of(run.history), list[Piece](), finalists
    for stop in run.settings.race_milestones:
        if stop <= start:
            continue
        epochs = left * (stop - start) if found or first is None else first
        # On a CPU, all cores count: if there are fewer models than cores, each model trains on several threads.
        lanes = run.time_left.lanes if run.problem.device.type == "cpu" else min(left, run.time_left.lanes)
        found.append(Piece(epochs, run.problem.steady_epoch_seconds / max(1, lanes)))
        trained, start = trained + left * (stop - start), stop
        if stop != run.settings.last_look:
            left = min(left, max(left // rule.reduction_factor, rule.affordable(stop, trained)))
    return found


def _without(done: float, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces without their first `done` epochs."""
    for epochs, seconds in pieces:
        yield Piece(max(0.0, epochs - done), seconds)
        done = max(0.0, done - epochs)
