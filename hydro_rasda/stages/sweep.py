"""Stages 1 and 2: many configurations on fused surrogates; a rule lets fewer and fewer of them continue.

A free device takes the next groups, one for each of its cores. The trials of a group are of one kind and train as one
fused model. The device leaves the other free devices their share. On one device, each rung trains all trials that are
left to the same milestone, then compares them all at once. So the order of training does not matter, nor the grouping.

A sweep that continues in another process is replayed. The groups in the journal come in in the order in which they were
finished, and each decision is taken from the journal.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fusion.part_settings import check_settings
from hydro_rasda.config_access import paths
from hydro_rasda.contracts import Devices, Finished
from hydro_rasda.processes.child_count import usable_children
from hydro_rasda.run.events import SURROGATES, RungDecided
from hydro_rasda.run.journal import JOURNAL, DamagedJournal, Unit
from hydro_rasda.run.state import Run, failure_line, metric_lines, retry_key
from hydro_rasda.schedulers import Continue, Move, Stop, SweepRule, SweepState, named_rule
from hydro_rasda.schedulers.named_rules import POPULATIONS
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.schedulers.sweep_rule import checked_admission, checked_epochs, checked_moves, move_of, plain_move
from hydro_rasda.search import Search
from hydro_rasda.short_values import show
from hydro_rasda.space import derived, explored, tuned
from hydro_rasda.stages.chance_baseline import warn_of_chance
from hydro_rasda.stages.cost_limits import Costs, all_fit
from hydro_rasda.stages.dispatch import Dispatcher, cannot_grow, make_copies
from hydro_rasda.stages.fusion_groups import Unread, find_kinds, warn_of_unread
from hydro_rasda.stages.run_plan import RunPlan
from hydro_rasda.stages.transfer_of_finalists import check_transfer, finalists_in_time, finalists_of_rule
from hydro_rasda.training.group_widths import MEASURING
from hydro_rasda.trial import Trial

BUILDING_S = 2.0
"""Seconds of building models that there are in any case, whatever is left of the time."""


def sweep(run: Run, search: Search, devices: Devices, rule: SweepRule | None = None) -> list[int]:
    """Try configurations on their surrogates, until a rule lets none of them go on.

    Args:
        rule: Decides which trials continue; None for the rule that the run's settings name.

    Returns:
        The finalists' numbers, best first; at most `top_k`.
    """
    under_way = _Sweep(run, search, devices, rule or _named(run))
    with run.store.sweeping():
        finalists = under_way.finalists()
    run.end_stage()
    return finalists


def _named(run: Run) -> SweepRule:
    settings, asked = run.settings, run.settings.sweep
    assert isinstance(asked.rule, str)
    changed = explored(run.space) if asked.rule in POPULATIONS else {}
    if changed and "lr" in tuned(run.space) and "lr" not in changed:
        run.say(f"copies keep `lr`, as it is no single range or list of floats: they change {', '.join(changed)}")
    return named_rule(
        asked.rule, settings.sweep_milestones, asked.reduction_factor, settings.mode, settings.race.top_k, changed
    )


class _Sweep:
    """A sweep under way: what the rule sees, what waits for a device, and what the journal still has of it."""

    def __init__(self, run: Run, search: Search, devices: Devices, rule: SweepRule) -> None:
        settings = run.settings
        self._run, self._search, self._devices, self._rule = run, search, devices, rule
        self._by_place = settings.comparison.by_place
        self._state = SweepState(
            "min" if self._by_place else settings.mode, settings.max_t, settings.race.top_k, settings.seed
        )
        self._candidates = deque(search.next_trials())
        self._state.left = search.planned
        self._dispatcher, self._costs = Dispatcher(run, devices), Costs(run)
        self._plan = RunPlan(run, devices, self._dispatcher, rule, self._state)
        self._unread: Unread = {}
        self._read: set[str] = set()
        self._children = usable_children(run.problem)
        self._done = 0
        self._first_rung_is_over = False
        self._told_of = 0
        self._unplaced: set[int] = set()
        # Groups of an earlier process, and of this one, that have not come in yet; in the order of their ends.
        self._recorded = deque(key for key in run.store.units() if "/group-" in key)
        self._finished: deque[str] = deque()

    def finalists(self) -> list[int]:
        self._show()
        self._state.left = len(self._candidates)
        while True:
            # Asked in this order after each group, in whichever process it was trained: so all states come again.
            if self._decide() or self._admit():
                continue
            if self._finished:
                self._decide_arrival(self._finished.popleft())
            elif (key := self._next_recorded()) is not None:
                self._advance(key, self._run.recall(key))
                self._decide_arrival(key)
            elif not self._dispatch():
                if not self._devices.busy():
                    if self._state.training or self._has_no_time_to_build():
                        return self._finalists_in_time()
                    return finalists_of_rule(self._run, self._search, self._rule, self._state, self._tell)
                for finished in self._devices.finished():
                    self._record(finished)

    def _finalists_in_time(self) -> list[int]:
        if self._candidates:
            count, planned = len(self._state.trials), self._search.planned
            self._run.say(f"there was time to build the models of {count} of {planned} configurations")
        return finalists_in_time(self._run, self._search, self._dispatcher.copies)

    def _has_no_time_to_build(self) -> bool:
        """Tell whether configurations are left, but no time for them; those of a recorded group had theirs."""
        needed = not self._state.trials or self._lacks_trials()
        return bool(self._candidates) and not needed and self._run.out_of_time("surrogate")

    def _show(self) -> None:
        self._run.begin_stage(
            SURROGATES, max(0, checked_epochs(self._rule, self._rule.epochs(self._state)) - self._done)
        )

    def _admit(self) -> bool:
        """Take in as many configurations as the rule wants; whether there are more now, or are known to be none."""
        state = self._state
        wanted = checked_admission(self._rule, self._rule.admit(state)) if state.left else 0
        if wanted and not self._candidates:
            # A searcher learns from the first milestone of each batch before it gives the next one.
            learns = len(state.trials) < self._search.planned
            if learns and any(not trial.epoch for trial in state.training.values()):
                return False
            self._candidates.extend(self._search.next_trials())
            state.left = len(self._candidates)
        elif wanted and self._has_no_time_to_build():
            return False
        elif wanted:
            trials = [self._candidates.popleft() for _ in range(min(wanted, state.left))]
            self._run.trials |= {trial.number: trial for trial in trials}
            left = self._find_kinds(trials)
            for trial in trials:
                if trial.number in self._run.trials:
                    state.admit(trial.number, trial.config)
            self._candidates.extendleft(reversed(left))
            state.left = len(self._candidates) or max(1, self._search.planned - len(state.trials))
        return wanted > 0

    def _find_kinds(self, unseen: Sequence[Trial]) -> Sequence[Trial]:
        """See which trials can train as one; take back those that have to wait, as building models takes too long.

        A run that was given more samples, or more time, has built the first of them before.
        """
        run, count, anew = self._run, len(unseen), False
        costs = {trial.number: of for trial in unseen if (of := self._costs.of(trial.config))}
        while unseen and not anew:
            anew = not run.store.done(key := f"surrogate/kinds-from-{unseen[0].number}")
            if anew and len(unseen) < count and run.out_of_time("surrogate"):
                break
            until = time.monotonic() + max(BUILDING_S, MEASURING * run.seconds_left("surrogate"))
            find = partial(find_kinds, run.problem, unseen, self._children, run.store.doing, costs, until)
            unit = run.unit(key, find)
            self._dispatcher.kinds |= {int(number): kind for number, kind in unit.value.items()}
            seen = {line["trial"] for line in unit.lines}
            if unseen[0].number not in seen:
                raise DamagedJournal(f"the unit {key!r} of {run.store.path / JOURNAL} tells of no trial: begin anew")
            unseen = [trial for trial in unseen if trial.number not in seen]
            for line in unit.lines:
                if line["event"] == "failed" and run.store.done(retry_key(line["trial"])):
                    self._build_again(line["trial"])
            for line in unit.lines:
                if line["event"] == "trial":
                    unread = line.get("unread", {})
                    self._unread |= unread
                    self._read |= {*paths(run.trials[line["trial"]].config)} - unread.keys()
        for trial in unseen:
            del run.trials[trial.number]
        # A training function of the user's own may read any key.
        told = run.problem.full_size is None and not derived(run.space)
        if not told:
            run.unread.clear()
        if len(run.trials) >= self._search.planned and told:
            warn_of_unread({key: meant for key, meant in self._unread.items() if key not in self._read})
        return unseen

    def _build_again(self, number: int) -> None:
        """See with which trials one can train whose model failed to be built before; its configuration is recorded."""

        def built() -> Unit:
            unit = find_kinds(run.problem, [run.trials[number]], self._children, run.store.doing)
            return replace(unit, lines=[line for line in unit.lines if line["event"] == "failed"])

        run = self._run
        run.recall(retry_key(number))
        kinds = run.unit(f"surrogate/kind-of-{number}", built).value
        self._dispatcher.kinds |= {int(trial): kind for trial, kind in kinds.items()}

    def _decide(self) -> bool:
        """Have the rule decide, or the journal where it was decided before; whether any trial goes on or is dropped."""
        state, run = self._state, self._run
        self._place()
        if not state.waiting and not state.idle:
            return False
        first_rung = None if self._first_rung_is_over else self._first_rung()
        key = self._decision_key()
        if recalled := run.store.done(key):
            moves = {number: move_of(plain) for number, *plain in run.store.units()[key].value}
        else:
            if first_rung is not None:
                warn_of_chance(run, *first_rung)
            moves = checked_moves(self._rule, self._rule.decide(state), state, check_settings)
            moves = {number: self._fitting(move) for number, move in moves.items()}
            if moves:
                run.record(key, Unit([[number, *plain_move(move)] for number, move in moves.items()]))
        if first_rung is not None:
            self._first_rung_is_over = True
            # Copies take the places of configurations that were scored.
            if run.settings.sweep.check_transfer:
                run.transfer = check_transfer(run, *first_rung, self._devices)
                self._show()
        self._carry_out(moves, recalled)
        return bool(moves)

    def _fitting(self, move: Move) -> Move:
        """Have a copy keep its source's values if the changed ones break a constraint on configurations."""
        fits = all_fit(self._run.settings.sweep.constraints)
        if fits is None or not isinstance(move, Continue) or move.copy_of is None:
            return move
        config = {**self._run.trials[move.copy_of].config, **move.changes}
        return move if fits(config) else replace(move, changes={})

    def _place(self) -> None:
        """If one score does not order trials, place those that came to a milestone anew once more have come there."""
        run, state = self._run, self._state
        for stop in sorted(self._unplaced):
            values = {n: run.values_at("surrogate", n, stop) for n in state.scores[stop]}
            state.place(stop, run.settings.comparison.places(values))
        self._unplaced.clear()

    def _decision_key(self) -> str:
        """Name of a decision in the journal, which says where the sweep stands; so more samples make it another one."""
        state = self._state
        at = min(
            (epoch for epoch in (0, *state.scores) if state.waiting_at(epoch)), default=max(state.scores, default=0)
        )
        over = f"to-{at}/kept/of-{len(state.scores[at])}" if at else f"begin/of-{len(state.trials)}"
        return f"surrogate/{over}-{state.digest}"

    def _first_rung(self) -> tuple[Mapping[int, float], int] | None:
        """The scores at the first milestone, and which it is, once all trials have come to it."""
        state = self._state
        first = min(state.scores, default=0)
        coming = not first or state.left or state.training_to(first)  # asked often: it looks at no trial
        if coming or any(trial.epoch < first for trial in state.trials.values()):
            return None
        if self._by_place:
            return {number: self._run.score_at("surrogate", number, first) for number in state.trials}, first
        return {number: trial.curve.get(first, math.nan) for number, trial in state.trials.items()}, first

    def _carry_out(self, moves: Mapping[int, Move], recalled: bool) -> None:
        state, run = self._state, self._run
        stood = sorted({state.trials[number].epoch for number in moves})
        dropped = sorted(number for number, move in moves.items() if isinstance(move, Stop))
        for number in dropped:
            self._search.close(number, run.epochs("surrogate", number), state.trials[number].score)
            state.drop(number)
        going_on = {number: move for number, move in moves.items() if isinstance(move, Continue)}
        copies = {number: move for number, move in going_on.items() if move.copy_of is not None}
        make_copies(run, state, self._search, self._dispatcher, copies, recalled)
        run.forget(dropped)
        for number, move in going_on.items():
            state.go_on(number, move.to, run.trials[number].config, move.copy_of)
            if not self._has_arrived(number):
                self._dispatcher.add(number, move.to)
        for stop in stood:
            self._tell(stop, recalled)

    def _tell(self, stop: int, recalled: bool) -> None:
        """Tell the user how many go on from a milestone, once, when nobody is on the way to it any more."""
        state, run, scores = self._state, self._run, self._state.scores.get(stop, {})
        if stop <= self._told_of or any(state.training_to(earlier) for earlier in state.scores if earlier <= stop):
            return
        self._told_of = stop
        alive = (n for n in sorted(scores) if not state.trials[n].dropped and math.isfinite(scores[n]))
        kept = ranked({n: scores[n] for n in alive}, state.mode)
        over = {"stage": "surrogate", "epoch": stop, "candidates": tuple(sorted(scores)), "kept": tuple(kept)}
        run.notify(RungDecided, **over, recalled=recalled)
        if kept:
            told = f"trial {kept[0]} leads with {run.settings.metric} {show(scores[kept[0]], 4)}"
            if self._by_place:
                front = run.settings.comparison.front({n: run.values_at("surrogate", n, stop) for n in scores})
                told = f"the front of all has {len({*front} & {*kept})} of them"
            going = f"{len(kept)} of {len(scores)} go on; " * (len(kept) < len(scores) or self._by_place)
            run.say(f"surrogates at epoch {stop}: {going}{told}")

    def _dispatch(self) -> bool:
        """Have idle devices begin what waits; where nothing does, whether the rule now has anyone go on."""
        devices, dispatcher = self._devices, self._dispatcher
        while dispatcher and self._may_begin() and devices.idle():
            dispatcher.start_next()
            self._plan.tell(self._done)
        nothing_trains = not self._state.training and not devices.busy()
        if dispatcher or not devices.idle() or not (self._may_begin() or nothing_trains):
            return False
        self._state.idle = True
        moved = self._decide()
        self._state.idle = False
        return moved

    def _may_begin(self) -> bool:
        """Tell whether there is time for a group; the very first group begins in any case."""
        nothing_yet = not any(stage == "surrogate" for stage, _ in self._run.metrics) and not self._devices.busy()
        return nothing_yet or not self._run.out_of_time("surrogate")

    def _record(self, finished: Finished) -> None:
        """Keep what a device has done: first the checkpoint, then the journal's lines."""
        run, outcome, key = self._run, finished.outcome, finished.task.key
        while run.store.done(key):  # a trial that has lost its checkpoint may begin a span once more
            key += "/again"
        task = replace(finished.task, key=key)
        run.save(task.key, {"parts": outcome.checkpoint}, task.members)
        # A trial that was brought back after its checkpoint was gone has trained its first epochs again.
        fresh = {n: [at for at in h if at[0] > run.epochs("surrogate", n)] for n, h in outcome.history.items()}
        lines = [line for n, history in fresh.items() for line in metric_lines("surrogate", n, history)]
        lines += [failure_line(number, error) for number, error in outcome.failures.items()]
        # The last digits depend on how many train as one, which memory may have decided.
        groups = [part["members"] for part in outcome.checkpoint]
        value = {"members": list(task.members), "stop": task.span.stop, "groups": groups}
        # Not the task's: a copy whose source's checkpoint is damaged trains anew, and is a copy all the same.
        copies = {n: self._dispatcher.copies[n] for n in task.members if n in self._dispatcher.copies}
        behind = {n: h[-1][0] for n, h in outcome.history.items() if h and h[-1][0] < run.epochs("surrogate", n)}
        more = {"device": finished.device, "copies": copies or None, "behind": behind or None}
        value |= {name: of for name, of in more.items() if of is not None}
        self._advance(task.key, run.record(task.key, Unit(value, lines, finished.seconds)))
        self._finished.append(task.key)

    def _next_recorded(self) -> str | None:
        """The next group that an earlier process recorded, once its trials are admitted."""
        return self._recorded.popleft() if self._recorded and not self._lacks_trials() else None

    def _lacks_trials(self) -> bool:
        """Tell whether a trial of the next group that an earlier process recorded is not admitted yet."""
        units, kinds = self._run.store.units(), self._dispatcher.kinds
        return bool(self._recorded) and not kinds.keys() >= set(units[self._recorded[0]].value["members"])

    def _advance(self, key: str, unit: Unit) -> None:
        """A recorded group's members go on from there; those that copied others have a checkpoint of their own now."""
        members, copies = unit.value["members"], unit.value.get("copies", {})
        for number in members:
            copied = self._dispatcher.copies.pop(number, None)
            if copies.get(str(number)) != copied:
                raise cannot_grow(number)
        failed = {line["trial"] for line in unit.lines if line["event"] == "failed"}
        self._run.go_on_from(key, members, failed)

    def _decide_arrival(self, key: str) -> None:
        """A group is done: those that reached their milestone wait for a decision."""
        run, state, unit = self._run, self._state, self._run.store.units()[key]
        for number in unit.value["members"]:
            if self._has_arrived(number):
                self._dispatcher.remove(number)
            elif self._dispatcher.remove(number):  # the time budget ended its last group before the milestone
                self._dispatcher.add(number, state.training[number].goal or 0)
            self._search.tell(number, run.epochs("surrogate", number), run.score("surrogate", number))
        self._done += sum(line["event"] == "metrics" for line in unit.lines)

    def _has_arrived(self, number: int) -> bool:
        """Tell whether a trial has reached its milestone, perhaps in an earlier process; if so, it waits there.

        With fewer samples, an earlier call may have trained it further. The rule does not see those epochs.
        """
        run, standing = self._run, self._state.training.get(number)
        if standing is None or standing.goal is None or number in self._dispatcher.copies:
            return False
        if not run.passed("surrogate", number, standing.goal):
            return False
        if self._by_place:
            self._unplaced.add(standing.goal)
            whole = all(map(math.isfinite, run.values_at("surrogate", number, standing.goal).values()))
            self._state.come(number, {standing.goal: 0.0 if whole else math.nan})
            return True
        epochs = range(standing.epoch + 1, standing.goal + 1)
        self._state.come(number, {epoch: run.score_at("surrogate", number, epoch) for epoch in epochs})
        return True
