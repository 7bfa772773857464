"""The middle heat: the sweep's best trials train to `max_t` on wider surrogates. The best of these enter the race.

The heat makes a budget of `full_trainings` below 3 possible. Without it, only one or two of the sweep's finalists could
train at full size, and the sweep alone chooses them poorly. On recorded trainings, final scores at 1/4 of the width
choose far better (`benchmarks/results/replay_ladder.md`). With `full_trainings=3`, a race of the sweep's finalists
chooses better than this heat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from hydro_rasda.common.short_values import show
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Devices
from hydro_rasda.heats.fusion_kinds import find_kinds
from hydro_rasda.heats.race import Race
from hydro_rasda.heats.run_plan import middle_piece, race_pieces
from hydro_rasda.heats.surrogate_heat import SurrogateHeat
from hydro_rasda.history.history import HEATS, MIDDLE_ENTERED, MIDDLE_FINALISTS, MiddlePlan
from hydro_rasda.history.lines import Unit, decision_key
from hydro_rasda.problem.model_costs import model_costs
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.child_count import usable_children
from hydro_rasda.run.events import RungDecided
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import Move
from hydro_rasda.schedulers.named_rules import NoStopping
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.settings.config import FULL_TRAININGS, TuneConfig

WIDTH = 1 / 4
"""Width of the heat's surrogates, as a ratio of the model's width."""

ENTRANTS = 8
"""Trials that enter the heat, at most."""

DEAREST = 1.0
"""Highest cost of `ENTRANTS` trials in the heat, in full trainings by counted operations. In return, training at full
size costs one or two full trainings less than without the heat."""

LEAST_STEP = 3e8
"""Least number of multiplications in the full-size model's forward pass on a batch for which a middle heat is planned.

A step of a smaller model takes as long as its kernel launches, whatever the width. So counted operations do not predict
the heat's time. On two cores, the heat took as long as 1.0 trainings of a model with 4e8 multiplications. For models
with 1e8 or less, it took as long as 1.1 to 1.9 trainings (`benchmarks/results/replay_notes.md`). That is more than the
heat saves.
"""


def planned(settings: TuneConfig, finalists: int, operations: Sequence[float]) -> MiddlePlan | str:
    """Return the plan of the middle heat, or the reason why there is none.

    Args:
        finalists: How many trials train at full size after it; see `finalists_after`.
        operations: Multiplications of a forward pass on a batch: of the full-size model, of the sweep's surrogate, and
            of the middle heat's surrogate. NaN if a surrogate cannot be built.
    """
    if any(map(math.isnan, operations)):
        return "models of 1/4 of the width cannot be built"
    whole, *narrow = operations
    if whole < LEAST_STEP:
        return "models of 1/4 of the width take about as long to train as models this small"
    shares = tuple(each / whole for each in narrow)
    trainings = ENTRANTS * shares[-1] * settings.models("middle") / settings.models("race")
    if trainings > DEAREST:
        return f"it would cost {trainings:.2g} full trainings"
    return MiddlePlan(WIDTH, ENTRANTS, finalists, shares)


def finalists_after(settings: TuneConfig, count: int) -> int:
    """Return how many of `count` trials train at full size after a middle heat; 0 if the settings ask for none."""
    finalists = min(int(settings.full_trainings / max(1, settings.folds)), settings.race.top_k)
    narrow, one_score = settings.sweep.surrogate < WIDTH, not settings.comparison.by_place
    asked = settings.full_trainings < FULL_TRAININGS and narrow and one_score and count > finalists
    return finalists if asked else 0


def plan_middle_heat(run: Run, trial: Trial, count: int) -> None:
    """Decide, once for the whole run, whether it has a middle heat, by the counted operations of a trial's models.

    `count` is the number of configurations that the run plans to try.
    """
    settings = run.settings
    finalists = finalists_after(settings, count)
    if not finalists or run.problem.own_loop is not None:
        return

    def chosen() -> Unit:
        plan = planned(settings, finalists, _operations(run.problem, trial))
        return Unit(plan if isinstance(plan, str) else asdict(plan))

    run.history.plan_middle(unit := run.unit(HEATS, chosen))
    if run.history.middle is None:
        same = f"`full_trainings={settings.full_trainings:g}` trains as much as {FULL_TRAININGS:g}"
        run.say(f"no middle heat: {unit.value}, so {same}")


def _operations(problem: Problem, trial: Trial) -> Sequence[float]:
    """Count the multiplications of a forward pass on a batch: of the model, and of the surrogates of both heats.

    NaN if a surrogate cannot be built.
    """
    widths = 1.0, problem.settings.sweep.surrogate, WIDTH
    try:
        return [trial.batch_size * model_costs(problem, trial, ["macs"], width)["macs"] for width in widths]
    except (Exception, SystemExit):  # the user's model may not allow such a width
        return [math.nan] * len(widths)


class MiddleHeat(SurrogateHeat):
    """The middle heat under way.

    Args:
        race: The race, in which leading trials may begin while other trials still train here.
    """

    name = "middle"

    def __init__(self, run: Run, devices: Devices, plan: MiddlePlan, race: Race) -> None:
        settings = run.settings
        rule = NoStopping(settings.max_t, settings.race.checkpoint_every or settings.first_look)
        super().__init__(run, devices, rule, plan.width, race)
        self._plan = plan

    def between(self, swept: Sequence[int]) -> list[int]:
        """Train the sweep's finalists on wider surrogates to `max_t`. Return those for the race, best first."""
        run, history, count = self._run, self._run.history, self._plan.finalists
        if self._has_found_enough():
            return [*swept]
        # Leave the heat out if the sweep ran out of time, or if no more trials are left than train at full size.
        if history.finalists is None or len(swept) <= count:
            if history.finalists is not None and history.middle_finalists != [*swept]:
                run.record(MIDDLE_FINALISTS, Unit([*swept]), again=True)
            return [*swept[:count]]
        self._enter(swept)
        for number, standing in self.state.training.items():
            self._dispatcher.add(number, standing.goal or 0)
        if history.middle_finalists is None:
            self._announce()
            self.train()
            run.end_heat()
        if found := self._found():
            return found[:count]
        return self._ended_in_time(swept) if self.state.training else self._ended(swept)

    def _enter(self, swept: Sequence[int]) -> None:
        """Let the sweep's finalists enter this heat, and find their fusion kinds.

        Trials that an earlier call let enter keep the epochs that they have trained.
        """
        run, heat, width = self._run, self._run.history.heats[self.name], self._plan.width
        unseen = [n for n in swept if n not in heat.kinds and ("middle", n) not in run.history.failed]
        if unseen:
            trials = [run.history.trials[number] for number in unseen]
            children = usable_children(run.problem)
            found = find_kinds(run.problem.at_width(width), trials, children, run.store.doing)
            failed = [line for line in found.lines if line["event"] == "failed"]
            run.record(decision_key(f"middle/kinds-from-{unseen[0]}", unseen), replace(found, lines=failed))
        if [*self.state.trials] != [*swept]:
            run.record(MIDDLE_ENTERED, Unit([*swept]), again=True)

    def _announce(self) -> None:
        run, state = self._run, self.state
        left = sum(run.settings.max_t - run.history.epochs(self.name, number) for number in state.trials)
        run.time_left.plan("sweep", [])
        run.time_left.plan("middle", [middle_piece(run, self._plan, left)])
        run.time_left.plan("race", race_pieces(run, self._plan.finalists))
        run.begin_heat("middle", left)

    def _prepare(self) -> bool:
        return bool(self.state.waiting)

    def _decision_key(self, moves: Mapping[int, Move]) -> str:
        at = self.state.trials[next(iter(moves))].epoch
        return decision_key(f"middle/to-{at}/kept" if at else "middle/begin", moves)

    def _may_begin(self) -> bool:
        return not self._run.out_of_time("sweep")

    def _ended(self, swept: Sequence[int]) -> list[int]:
        """Record and announce the heat's finalists; if no trial has a score, take those that the sweep ranked first."""
        run, end, finalists = self._run, self._run.settings.max_t, self._run.history.middle_finalists
        recalled, best = finalists is not None, [*self._rule.finalists(self.state)]
        if finalists is None:
            kept = best or [*swept[: self._plan.finalists]]
            finalists = run.record(MIDDLE_FINALISTS, Unit(kept), again=True).value
        over = {"heat": self.name, "epoch": end, "candidates": tuple(sorted(self.state.trials))}
        run.notify(RungDecided, **over, kept=tuple(finalists), recalled=recalled)
        told = f"no trial has a score: those that led the sweep go on: {finalists}"
        if best:
            score = f"{run.settings.metric} {show(self.state.scores[end][best[0]], 4)}"
            told = f"{len(best)} of {len(self.state.trials)} go on; trial {best[0]} leads with {score}"
        run.say(f"middle heat at epoch {end}: {told}")
        return finalists

    def _ended_in_time(self, swept: Sequence[int]) -> list[int]:
        """Choose finalists if time ended the heat. Longer trained trials come first; in a tie, better ones."""
        run, heat = self._run, self.name
        run.end_by_time("sweep")
        run.say("the share of `time_budget_s` for surrogates is spent: the best of the middle heat so far go on")
        scores = {n: score for n in swept if math.isfinite(score := run.history.score(heat, n))}
        found = sorted(ranked(scores, run.settings.mode), key=lambda n: -run.history.epochs(heat, n))
        return (found or [*swept])[: self._plan.finalists]
