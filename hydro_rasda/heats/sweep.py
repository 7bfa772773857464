"""The sweep: many configurations train on fused surrogates; a rule lets fewer and fewer of them continue.

The state of a sweep is computed from the run's journal. So a resumed sweep reads the journal, and then asks its rule
for the next moves.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from hydro_rasda.common.secret_masking import hide
from hydro_rasda.common.short_values import show
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Devices
from hydro_rasda.heats.chance_baseline import warn_of_chance
from hydro_rasda.heats.cost_limits import Costs, all_fit
from hydro_rasda.heats.finalists import finalists_found, finalists_in_time, finalists_of_rule
from hydro_rasda.heats.fusion_kinds import find_kinds
from hydro_rasda.heats.group_queue import check_copies
from hydro_rasda.heats.race import Race
from hydro_rasda.heats.run_plan import RunPlan
from hydro_rasda.heats.search import Search
from hydro_rasda.heats.surrogate_heat import SurrogateHeat
from hydro_rasda.heats.transfer_check import check_transfer
from hydro_rasda.heats.unused_keys import Unread, warn_of_unread
from hydro_rasda.history.history import ADMITTED, CALL, GROUP, KIND_OF, KINDS_FROM, SWEEP_DECISION
from hydro_rasda.history.lines import Unit, retry_key
from hydro_rasda.problem.read_keys import paths
from hydro_rasda.processes.child_count import usable_children
from hydro_rasda.run.events import RungDecided, TrialConfigured
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import Continue, Move, Stop, SweepRule, named_rule
from hydro_rasda.schedulers.named_rules import POPULATION
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.schedulers.sweep_rule import checked_admission, checked_epochs, move_of
from hydro_rasda.space.space import derived, explored, tuned
from hydro_rasda.training.group_widths import MEASURING

BUILDING_S = 2.0
"""Least number of seconds for building models, however little of the time budget is left."""


def _named(run: Run) -> SweepRule:
    settings, asked = run.settings, run.settings.sweep
    assert isinstance(asked.rule, str)
    changed = explored(run.space, not run.problem.is_own("sweep")) if asked.rule == POPULATION else {}
    if changed and "lr" in tuned(run.space) and "lr" not in changed:
        run.say(f"copies keep `lr`, as it is no single range or list of floats: they change {', '.join(changed)}")
    return named_rule(
        asked.rule, settings.sweep_milestones, asked.reduction_factor, settings.mode, run.history.sweep.top_k, changed
    )


class Sweep(SurrogateHeat):
    """The sweep under way: many configurations train on surrogates until a rule lets none of them go on.

    Args:
        rule: Decides which trials continue; None for the rule that the run's settings name.
        race: See `SurrogateHeat`.
    """

    name = "sweep"

    def __init__(
        self, run: Run, search: Search, devices: Devices, rule: SweepRule | None = None, race: Race | None = None
    ) -> None:
        super().__init__(run, devices, _named(run) if rule is None else rule, race=race)
        self._search, self._costs = search, Costs(run)
        self._unread: Unread = {}
        self._read: set[str] = set()
        self._children = usable_children(run.problem)
        self._done = 0
        self._first_rung_is_over = False
        self._told_of = 0
        fresh = run.history.new_state(self.name)
        fresh.left = search.planned
        self._plan = RunPlan(run, devices, self._dispatcher, self._rule, fresh)
        run.begin_heat("sweep", checked_epochs(self._rule, self._rule.epochs(fresh)))
        self._resume()

    def _resume(self) -> None:
        """Read the units that earlier processes recorded. Queue again the trials that were training."""
        run, search, samples = self._run, self._search, self._run.settings.num_samples
        units = run.store.units()
        asked = [unit.value["samples"] for key, unit in units.items() if key == CALL or key.startswith(ADMITTED)]
        self._grows = bool(asked) and asked[-1] != samples
        run.fold(partial(self._hear, recalled=True))
        for number in [n for n in run.history.trials if run.store.done(retry_key(n))]:
            self._build_again(number)
        if self._grows:
            run.record(CALL, Unit({"samples": samples}), again=True)
        given = search.given or search.next_trials()
        self._candidates = deque(trial for trial in given if trial.number not in self.state.trials)
        self.state.left = self._left() if self.state.trials else len(self._candidates)
        self._warn_of_unread()
        for number, standing in self.state.training.items():
            self._dispatcher.add(number, standing.goal or 0)

    def finalists(self) -> list[int]:
        """Return the finalists of a sweep that is over or out of time: at most `top_k`, best first."""
        if found := self._found():
            finalists = finalists_found(self._run, self._search, found)
        elif self.state.training or self._has_no_time_to_build() or self._has_no_time_to_draw():
            finalists = self._finalists_in_time()
        else:
            finalists = finalists_of_rule(self._run, self._search, self._rule, self.state, self._tell)
        self._run.end_heat()
        return finalists

    def _finalists_in_time(self) -> list[int]:
        if self._candidates:
            count, planned = len(self.state.trials), self._search.planned
            self._run.say(f"there was time to build the models of {count} of {planned} configurations")
        return finalists_in_time(self._run, self._search, self._run.history.copies)

    def _has_no_time_to_build(self) -> bool:
        """Tell whether there is no time left to build the models of the remaining configurations."""
        run = self._run
        unseen = bool(self._candidates) and self._candidates[0].number not in run.history.trials
        return unseen and bool(self.state.trials) and run.out_of_time("sweep")

    def _has_no_time_to_draw(self) -> bool:
        """Tell whether time was up before all configurations were drawn, in this call and in each earlier one."""
        return self._search.late and self._run.history.finalists is None

    def _hear(self, key: str, unit: Unit, recalled: bool = False) -> None:
        """Tell the search and the user of a unit of the journal. `recalled` is True if an earlier process wrote it."""
        self._search.hear(key, unit)
        if GROUP.fullmatch(key) is not None:
            self._done += sum(line["event"] == "metrics" for line in unit.lines)
        elif key.startswith(KINDS_FROM):
            for line in unit.lines:
                if line["event"] == "trial":
                    unread = line.get("unread", {})
                    self._unread |= unread
                    self._read |= {*paths(self._run.history.trials[line["trial"]].config)} - unread.keys()
        elif SWEEP_DECISION.fullmatch(key) is not None and not (recalled and self._grows):
            # If the run grows, earlier decisions do not count, because the rule decides anew over more trials.
            self._tell_moves({number: move_of(plain) for number, *plain in unit.value}, recalled)

    def _tell_moves(self, moves: Mapping[int, Move], recalled: bool) -> None:
        run, stood = self._run, set[int]()
        for number, move in moves.items():
            standing = self.state.trials[number]
            stood.add(standing.epoch if isinstance(move, Stop) else standing.intervals[-1].start)
            if isinstance(move, Continue) and move.copy_of is not None:
                config = copy.deepcopy(hide(run.history.trials[number].config, run.hidden))
                run.notify(TrialConfigured, trial=number, config=config, recalled=recalled)
        for stop in sorted(stood):
            self._tell(stop, recalled)

    def _admit(self) -> bool:
        """Admit as many configurations as the rule wants.

        Return True if any were admitted or requested, so that the rule must be asked again.
        """
        run, state = self._run, self.state
        wanted = checked_admission(self._rule, self._rule.admit(state)) if state.left else 0
        if wanted and not self._candidates:
            # A searcher learns from the first milestone of one batch before it gives the next batch.
            learns = len(state.trials) < self._search.planned
            if learns and any(not trial.epoch for trial in state.training.values()):
                return False
            self._candidates.extend(self._search.next_trials())
            state.left = len(self._candidates)
        elif wanted and self._has_no_time_to_build():
            return False
        elif wanted:
            trials = [self._candidates.popleft() for _ in range(min(wanted, state.left))]
            self._candidates.extendleft(reversed(self._find_kinds(trials)))
            numbers = [trial.number for trial in trials if trial.number in run.history.trials]
            value = {"trials": numbers, "samples": run.settings.num_samples}
            run.record(f"{ADMITTED}-from-{numbers[0]}", Unit(value), again=True)
            state.left = self._left()
            self._warn_of_unread()
        return wanted > 0

    def _left(self) -> int:
        """Return the number of configurations that can be admitted; at least 1 while the search may have more."""
        return len(self._candidates) or max(1, self._search.planned - len(self.state.trials))

    def _find_kinds(self, trials: Sequence[Trial]) -> Sequence[Trial]:
        """Find the fusion kinds of trials. Return trials that must wait, because building their models takes too long.

        Models that an earlier call has built are not built again.
        """
        run, history = self._run, self._run.history
        unseen = [trial for trial in trials if trial.number not in history.trials]
        if unseen and (len(unseen) == len(trials) or not run.out_of_time("sweep")):
            until = time.monotonic() + max(BUILDING_S, MEASURING * run.seconds_left("sweep"))
            measured, costs = self._measured(unseen, until)
            find = partial(find_kinds, run.problem, measured, self._children, run.store.doing, costs, until)
            self._hear(key := f"{KINDS_FROM}{unseen[0].number}", run.unit(key, find))
        return [trial for trial in unseen if trial.number not in history.trials]

    def _measured(self, trials: Sequence[Trial], until: float) -> tuple[list[Trial], dict[int, dict[str, float]]]:
        """Measure the costs that trials are compared by, if there are any.

        Return the trials that were measured until time was up, at least one, and their costs.
        """
        measured, costs = list[Trial](), dict[int, dict[str, float]]()
        for trial in trials:
            if measured and time.monotonic() >= until:
                break
            measured.append(trial)
            if of := self._costs.of(trial.config):
                costs[trial.number] = of
        return measured, costs

    def _build_again(self, number: int) -> None:
        """Build again a trial's model whose first build failed, and find its kind. The configuration is recorded."""

        def built() -> Unit:
            unit = find_kinds(run.problem, [run.history.trials[number]], self._children, run.store.doing)
            return replace(unit, lines=[line for line in unit.lines if line["event"] == "failed"])

        run = self._run
        run.unit(f"{KIND_OF}{number}", built)

    def _warn_of_unread(self) -> None:
        run = self._run
        # Do not warn if the user's training function, or a function of `sample_from`, may read any key.
        told = run.problem.own_loop is None and not derived(run.space)
        if told and len(self.state.trials) >= self._search.planned:
            warn_of_unread({key: meant for key, meant in self._unread.items() if key not in self._read})

    def _prepare(self) -> bool:
        state, run = self.state, self._run
        run.history.place()
        if not state.waiting and not state.idle:
            return False
        first_rung = None if self._first_rung_is_over else self._first_rung()
        if first_rung is not None:
            self._first_rung_is_over = True
            if is_undecided := bool(run.history.finalists is None and state.waiting_at(first_rung[1])):
                warn_of_chance(run, *first_rung)
            # Trials that became copies no longer have the configurations that were scored, so the check cannot compare
            # them.
            copied = any(part.copy_of is not None for trial in state.trials.values() for part in trial.intervals)
            if run.settings.sweep.check_transfer and (is_undecided or not copied):
                check_transfer(run, *first_rung, self._devices, self.take)
                run.begin_heat("sweep", max(0, checked_epochs(self._rule, self._rule.epochs(state)) - self._done))
        return True

    def _possible(self, moves: Mapping[int, Move]) -> Mapping[int, Move]:
        """Return the rule's moves; a copy keeps its source's values if its changes break a constraint."""
        copies = {n: move for n, move in moves.items() if isinstance(move, Continue) and move.copy_of is not None}
        if not copies:
            return moves
        if (fits := all_fit(self._run.settings.sweep.constraints)) is not None:
            for number, move in copies.items():
                assert move.copy_of is not None
                config = self._run.history.trials[move.copy_of].config
                copies[number] = move if fits({**config, **move.changes}) else replace(move, changes={})
        check_copies(self._run, copies)
        return {**moves, **copies}

    def _tell_plan(self) -> None:
        self._plan.tell(self._done)

    def _decision_key(self, moves: Mapping[int, Move]) -> str:
        """Return the journal's name of a decision. It says where the sweep stands, and is unique within a call."""
        state = self.state
        at = min(
            (epoch for epoch in (0, *state.scores) if state.waiting_at(epoch)), default=max(state.scores, default=0)
        )
        over = f"to-{at}/kept/of-{len(state.scores[at])}" if at else f"begin/of-{len(state.trials)}"
        return f"sweep/{over}-{self._run.history.decisions}"

    def _first_rung(self) -> tuple[Mapping[int, float], int] | None:
        """Return the scores at the first milestone, and that milestone; None until all trials have reached it."""
        state = self.state
        first = min(state.scores, default=0)
        coming = not first or state.left or state.training_to(first)  # a cheap test first, because this is asked often
        if coming or any(trial.epoch < first for trial in state.trials.values()):
            return None
        if self._run.settings.comparison.by_place:
            return {number: self._run.history.score_at("sweep", number, first) for number in state.trials}, first
        return {number: trial.curve.get(first, math.nan) for number, trial in state.trials.items()}, first

    def _tell(self, stop: int, recalled: bool) -> None:
        """Tell the user once how many trials go on from a milestone, after the last trial has reached it."""
        state, run, scores = self.state, self._run, self.state.scores.get(stop, {})
        if stop <= self._told_of or any(state.training_to(earlier) for earlier in state.scores if earlier <= stop):
            return
        self._told_of, comparison = stop, run.settings.comparison
        alive = (n for n in sorted(scores) if not state.trials[n].dropped and math.isfinite(scores[n]))
        kept = ranked({n: scores[n] for n in alive}, state.mode)
        over = {"heat": "sweep", "epoch": stop, "candidates": tuple(sorted(scores)), "kept": tuple(kept)}
        run.notify(RungDecided, **over, recalled=recalled)
        if kept:
            told = f"trial {kept[0]} leads with {run.settings.metric} {show(scores[kept[0]], 4)}"
            by_place, of = comparison.by_place, run.history.values_at
            if by_place:
                count = len({*comparison.front({n: of("sweep", n, stop) for n in scores})} & {*kept})
                told = f"{count} of them {'is' if count == 1 else 'are'} on the front of all {len(scores)}"
            going = f"{len(kept)} of {len(scores)} go on; " * (len(kept) < len(scores) or by_place)
            run.say(f"sweep at epoch {stop}: {going}{told}")
