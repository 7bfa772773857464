"""The history of a run: its state, computed from the units of its journal in the order in which they finished.

A unit is the record of one finished piece of work. To resume a run, read its journal into a history, and continue.
Units hold facts and decisions. Facts are epochs, failures, checkpoints and the kinds of models; they count for as long
as the run lives. Decisions of the sweep count until a call of `tune` asks for more samples. Then the unit `call` resets
the sweep's state, and trials that have already trained reach their milestones at once. A heat is a part of the run that
trains trials at one width: the sweep, the middle heat, or the race at full size.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydro_rasda.common.heat_names import HEAT_NAMES, HeatName
from hydro_rasda.common.secret_masking import Place
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.lines import JournalLine, Unit, number_of
from hydro_rasda.history.scores import OWN_LOOP, Curves, averages_at, deciding_curve, goes_on
from hydro_rasda.history.unkept_values import changed, restored
from hydro_rasda.schedulers import Continue, SweepState
from hydro_rasda.schedulers.sweep_rule import Move, carry_out, move_of
from hydro_rasda.settings.config import TuneConfig

CALL = "call"
"""Key of the unit with which a call of `tune` resets the sweep. After it, the sweep's decisions are made anew."""

ADMITTED = "sweep/admitted"
"""Prefix of the names of units that admit configurations to the sweep."""

FINALISTS = "sweep/finalists"
"""Key of the decision that ends the sweep."""

SCHEDULES = "sweep/schedules"
"""Prefix of the name of the unit that maps each finalist to the trial whose schedule it trains by."""

KINDS_FROM, KIND_OF = "sweep/kinds-from-", "sweep/kind-of-"
"""Prefixes of the names of units that hold the kinds of trials. Trials of one kind can train as one fused model.
`KIND_OF` is for a trial whose model was built again."""

HEATS = "heats"
"""Key of the unit that holds the plan of the middle heat (`MiddlePlan`), or the reason why there is no such heat."""

MIDDLE_ENTERED = "middle/entered"
"""Key of the unit that lets trials enter the middle heat. After it, the heat's decisions are made anew."""

MIDDLE_FINALISTS = "middle/finalists"
"""Key of the decision that ends the middle heat: the trials that train at full size."""

ENTERED = "race/entered"
"""Prefix of the names of units that let finalists enter the race. After each, the race's decisions are made anew."""

DONE = "race/done"

SWEEP_DECISION = re.compile(r"sweep/(?:begin|to-(?P<epoch>\d+)/kept)/of-.*")
"""Pattern of the names of the sweep's decisions in the journal."""

RACE_DECISION = re.compile(r"race/(?:begin|to-(?P<epoch>\d+)/kept)/of-.*")
"""Pattern of the names of the race's decisions in the journal."""

GROUP = re.compile(r"sweep/to-(?P<stop>\d+)/from-(?P<start>\d+)/group-\d+(?:/again)*")
"""Pattern of the names of groups that trained, in the journal."""

FULL_TRAINING = re.compile(
    r"race/trial-(?P<trial>\d+)/(?P<what>at|to|failed-after|done-after|lost-after)-(?P<epoch>\d+)(?:/again)*"
)
"""Pattern of the names of full-size trainings in the journal."""

REFIT = re.compile(r"race/refit-(?P<trial>\d+)/to-\d+")


FUSED: tuple[HeatName, ...] = ("sweep", "middle")
"""The heats that train fused surrogates. Units of the middle heat have the sweep's names with another prefix."""

_LIVE = re.compile(r"race/trial-\d+/at-.*")


def is_live(key: str) -> bool:
    """Tell whether a unit of this name holds epochs of a full-size training that no checkpoint holds yet.

    These units only show progress. The training resumes from checkpoints, and no decision depends on these units.
    """
    return _LIVE.fullmatch(key) is not None


def heat_of(key: str) -> HeatName:
    """Return the heat to which the unit of this name belongs; a unit that belongs to no heat counts as the sweep's."""
    beginning = key.partition("/")[0]
    return "race" if beginning == "race" else "middle" if beginning == "middle" else "sweep"


def named_as_sweep(key: str) -> str:
    """Return the name that a unit of the middle heat would have in the sweep; return any other name as it is."""
    return "sweep" + key.removeprefix("middle") if key.startswith("middle/") else key


def by_epoch(lines: Iterable[JournalLine]) -> dict[int, JournalLine]:
    """Map each epoch to its line, among the journal lines of one trial."""
    return {line["epoch"]: line for line in lines}


@dataclass
class Live:
    """Epochs of a full-size training after its last checkpoint.

    Attributes:
        epoch: The epoch reached last. After an interruption, earlier epochs are trained and reported again.
        lines: The journal's line of each epoch, also of epochs that are being trained again.
    """

    epoch: int = 0
    lines: dict[int, JournalLine] = field(default_factory=dict)

    def take(self, epoch: int, lines: Iterable[JournalLine]) -> None:
        """Add lines of epochs; `epoch` is the last of them, which the training has just reached."""
        self.epoch = epoch
        self.lines |= by_epoch(lines)

    def trained(self) -> list[JournalLine]:
        """Return the lines up to the epoch reached last, in order."""
        return [line for at, line in sorted(self.lines.items()) if at <= self.epoch]

    def joined(self, unit: Unit, epoch: int) -> Unit:
        """Return a checkpoint's unit with the lines of all epochs that led to it, in order."""
        if not self.lines or unit.value.get("swept"):
            return unit
        known = {at: line for at, line in self.lines.items() if at <= epoch}
        return replace(unit, lines=[line for _, line in sorted((known | by_epoch(unit.lines)).items())])


def is_decision(key: str) -> bool:
    """Tell whether a unit of this name holds a decision on trials of the sweep."""
    return key.startswith(ADMITTED) or key == FINALISTS or SWEEP_DECISION.fullmatch(key) is not None


@dataclass(frozen=True)
class MiddlePlan:
    """The plan of a heat between sweep and race, on surrogates that are wider than the sweep's.

    Attributes:
        width: Width of the heat's surrogates relative to the full-size model.
        entrants: Largest number of the sweep's best trials that enter the heat.
        finalists: Number of the heat's best trials that train at full size.
        shares: Operations of an epoch relative to the full-size model: on the sweep's surrogates, and on this heat's.
    """

    width: float
    entrants: int
    finalists: int
    shares: Sequence[float]


@dataclass
class FusedHeat:
    """The history of a heat on surrogates: the sweep, or the middle heat.

    Attributes:
        state: The heat's state, by which its rule decides.
        kinds: A digest for each trial. Trials with equal digests can train as one fused model.
        copies: Maps each copy that population based training made to its source, the trial whose weights it continues
            with. Copies that have trained since are left out.
        sources: Maps each trial to the name of the checkpoint from which it can continue.
    """

    name: HeatName
    state: SweepState
    kinds: dict[int, str] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)


class History(Curves):
    """The content of a run's journal, as far as `take` has read its units.

    Attributes:
        trials: All configurations so far, by number.
        unkept: Maps each trial to the places, in its configuration, of values that JSON cannot keep; see `Place`.
        unread: Keys of each trial's configuration that nothing reads; nested ones are written `a.b`.
        middle: The plan of the middle heat; None if there is no middle heat.
        heats: The heats on surrogates, by name.
        race: The state of the race at full size, by which its rule decides.
        decisions: Number of decisions on trials of the sweep.
        entrants: The finalists that race each other, best first; None before the race begins.
        early: Maps each trial that trained at full size before it entered the race to the key and the unit of that
            training. The rest of the history ignores this training. It counts once the trial enters, and is dropped if
            others enter instead.
        rungs: The decisions of the race so far: the milestone, and the move of each trial that was compared there.
        samples: `num_samples` of the call that decides the sweep; None before the first trial is admitted.
        finalists: The trials that the sweep chose; None until the sweep is over.
        middle_finalists: The trials that the middle heat chose among them; None until that heat is over.
        checkpoints: Maps each trial that trained at full size to the name of its last checkpoint.
        refits: Maps a trial to the checkpoint of its model that was trained once more, on the examples of all folds.
        decided: Maps a full-size trial to True if it continues after its last checkpoint, to False if it stops there or
            has ended by itself. A trial has no entry before that is decided.
        live: Epochs at full size since the last checkpoint, by trial; see `is_live`.
        last: Key of the last unit.
        last_of_race: Key of the last unit of the race.
        over: The finalists of the race that has ended, sorted by number; None before a race has ended.
        left: The last estimate of the seconds that the run still takes; None if it was not known.
        seconds: Wall time of the run at its last unit that holds no live epochs.
        now: Wall time of the run at its last unit of any sort.
        spent: Total seconds of the units of each heat.
        epoch_seconds: For each full-size unit, the mean seconds of an epoch of one model, and the number of these
            epochs.
        epoch_cost: Maps each trial to the seconds that an epoch took in its last training on a surrogate.
        checked: Values of the units of the transfer check, by name.
        refitted: Number of epochs of models that were trained once more, on the examples of all folds.
    """

    def __init__(
        self,
        settings: TuneConfig,
        own_loop: bool = False,
        known: Mapping[int, Trial] | None = None,
        reads_any: bool = False,
    ) -> None:
        """Begin an empty history.

        Args:
            known: Trials whose configurations hold the space's own objects, such as classes. Other trials are restored
                from the journal.
            reads_any: True if a function of the user may read any key. Then no key counts as unread.
        """
        super().__init__(settings, own_loop)
        self._known, self._reads_any = {} if known is None else known, reads_any
        self.trials: dict[int, Trial] = {}
        self.unkept: dict[int, frozenset[Place]] = {}
        self.unread: dict[int, frozenset[str]] = {}
        self.middle: MiddlePlan | None = None
        self.heats = {heat: FusedHeat(heat, self.new_state(heat)) for heat in FUSED}
        self.race = self.new_state("race")
        self.decisions = 0
        self.entrants: list[int] | None = None
        self.early: dict[int, tuple[str, Unit]] = {}
        self.rungs: list[tuple[int, dict[int, Move]]] = []
        self.samples: int | None = None
        self.finalists: list[int] | None = None
        self.middle_finalists: list[int] | None = None
        self.checkpoints: dict[int, str] = {}
        self.refits: dict[int, str] = {}
        self.decided: dict[int, bool] = {}
        self.live: dict[int, Live] = {}
        self.last = self.last_of_race = ""
        self.over: list[int] | None = None
        self.left: float | None = None
        self.seconds = self.now = 0.0
        self.spent: dict[HeatName, float] = dict.fromkeys(HEAT_NAMES, 0.0)
        self.epoch_seconds: list[tuple[float, int]] = []
        self.epoch_cost: dict[int, float] = {}
        self.refitted = 0
        self.checked: dict[str, Any] = {}
        self._behind: dict[str, Mapping[str, int]] = {}
        self._uses = Counter[str]()
        self._released: list[str] = []
        self._begun: set[HeatName] = set()
        self._unplaced: set[int] = set()
        self._compared: dict[int, dict[int, Mapping[str, float]]] = {}

    def new_state(self, heat: HeatName) -> SweepState:
        """Return the state of a heat before its first trial."""
        settings, wanted = self.settings, self.settings.race.top_k
        if self.middle is not None:
            wanted = self.middle.entrants if heat == "sweep" else self.middle.finalists
        mode = "min" if settings.comparison.by_place else settings.mode
        return SweepState(mode, settings.max_t, wanted, settings.seed)

    @property
    def sweep(self) -> SweepState:
        """The state of the sweep, by which its rule decides."""
        return self.heats["sweep"].state

    @property
    def kinds(self) -> dict[int, str]:
        """The kinds of the sweep's trials; see `FusedHeat`."""
        return self.heats["sweep"].kinds

    @property
    def copies(self) -> dict[int, int]:
        """The sweep's copies; see `FusedHeat`."""
        return self.heats["sweep"].copies

    @property
    def sources(self) -> dict[int, str]:
        """The names of the sweep's checkpoints; see `FusedHeat`.

        After the sweep, only those remain from which full-size training can begin (`sweep.surrogate=1`).
        """
        return self.heats["sweep"].sources

    @property
    def at_full_size(self) -> list[int] | None:
        """The trials that the last heat on surrogates chose for full size; None until that heat is over."""
        return self.finalists if self.middle is None else self.middle_finalists

    def take(self, key: str, unit: Unit) -> None:
        """Update the history with the next unit, in the order in which units finished.

        The time that this takes is proportional to the unit's size.
        """
        heat = heat_of(key)
        self.last, self.left, self.now = key, unit.left, unit.at
        name = FULL_TRAINING.fullmatch(key) if heat == "race" else None
        if name is not None:
            number, epoch = int(name["trial"]), int(name["epoch"])
            if name["what"] == "at":
                self.live.setdefault(number, Live()).take(epoch, unit.lines)
                return
            live = self.live.pop(number, Live())
            unit = live.joined(unit, epoch) if name["what"] == "to" else unit
        self.seconds = max(self.seconds, unit.at)
        if key.startswith(f"{heat}/"):
            self.spent[heat] += unit.seconds
        if name is not None and self._comes_early(int(name["trial"]), key, unit):
            return
        for line in unit.lines:
            self._take_line(heat, line)
        if heat == "race":
            self.last_of_race = key
            self._take_full_size(key, unit)
        elif self._take_fused(self.heats[heat], key, unit):
            pass
        elif key.startswith(ADMITTED):
            self.samples = unit.value["samples"]
            for number in unit.value["trials"]:
                self.sweep.admit(number, self.trials[number].config)
        elif key == MIDDLE_ENTERED:
            self.heats[heat].state, self.middle_finalists = self.new_state(heat), None
            for number in unit.value:
                self.heats[heat].state.admit(number, self.trials[number].config)
        elif key == CALL:
            self.samples, self.finalists, self.middle_finalists = unit.value["samples"], None, None
            self.heats["sweep"].state, self._unplaced, self._compared = self.new_state("sweep"), set(), {}
            self.copies.clear()
        elif key == FINALISTS:
            self.finalists, self.middle_finalists = unit.value, None
            go_on = unit.value if self.settings.sweep.surrogate == 1 else ()
            self._forget("sweep", [number for number in self.sources if number not in go_on])
        elif key == MIDDLE_FINALISTS:
            self.middle_finalists = unit.value
            self._forget(heat, [*self.heats[heat].sources])
        elif key == HEATS:
            self.plan_middle(unit)
        elif key.startswith(SCHEDULES):
            self._take_schedules(unit.value)
        elif key.startswith("check/"):
            self.checked.pop(key, None)
            self.checked[key] = unit.value

    def plan_middle(self, unit: Unit) -> None:
        """Set `middle` to the plan in `unit`, or to None. All heats' states begin anew, so call it before any trial."""
        self.middle = MiddlePlan(**unit.value) if isinstance(unit.value, dict) else None
        for heat in self.heats.values():
            heat.state = self.new_state(heat.name)

    def _take_fused(self, heat: FusedHeat, key: str, unit: Unit) -> bool:
        """Update a heat on surrogates with a unit about groups, moves or kinds; return False for any other unit."""
        name = named_as_sweep(key)
        if GROUP.fullmatch(name) is not None:
            self._take_group(heat, key, unit)
        elif SWEEP_DECISION.fullmatch(name) is not None:
            self.decisions += heat.name == "sweep"
            # Skip a decision of an earlier middle heat. Its trials are not all in this middle heat.
            if heat.name == "sweep" or {number for number, *_ in unit.value} <= heat.state.trials.keys():
                self._take_moves(heat, unit.value)
        elif name.startswith((KINDS_FROM, KIND_OF)):
            heat.kinds |= {int(number): kind for number, kind in unit.value.items()}
        else:
            return False
        return True

    def _take_line(self, heat: HeatName, line: JournalLine) -> None:
        event, number = line["event"], line["trial"]
        if event == "metrics":
            known = self.metrics.setdefault((line["heat"], number), [])
            # If epochs were trained again from an earlier checkpoint, the new lines replace the old ones.
            while known and known[-1]["epoch"] >= line["epoch"]:
                known.pop()
            known.append(line)
            self._begun.add(line["heat"])
        elif event == "trial":
            self._configure(line)
        elif event == "failed":
            self.failed[heat, number] = line["error"]
        elif event == "retried":
            self.failed.pop((heat, number), None)

    def _configure(self, line: JournalLine) -> None:
        number, noted = line["trial"], line.get("literals", [])
        if (known := self._known.get(number)) is not None:
            self.trials[number] = known
        else:
            self.trials[number] = Trial(number, restored(line["config"], noted))
            self.unkept[number] = frozenset(tuple(place) for place, literal in noted if literal is None)
        if not self._reads_any:
            self.unread[number] = frozenset(line.get("unread", ()))
        self.costs[number] = {name: number_of(cost) for name, cost in line.get("costs", {}).items()}

    def _take_group(self, heat: FusedHeat, key: str, unit: Unit) -> None:
        members, failed = unit.value["members"], {line["trial"] for line in unit.lines if line["event"] == "failed"}
        if epochs := sum(line["event"] == "metrics" for line in unit.lines):
            self.epoch_cost |= dict.fromkeys(members, unit.seconds / epochs)
        if "behind" in unit.value:
            self._behind[key] = unit.value["behind"]
        for number in members:
            heat.copies.pop(number, None)
            self._set(heat.sources, number, None if number in failed else key)
        heat.state.spent += epochs
        if key not in self._uses:  # all members failed, so no trial continues from the group's checkpoint
            self._released.append(key)
        self._arrive(heat, members)

    def _take_moves(self, heat: FusedHeat, moves: Sequence[Sequence[Any]]) -> None:
        """Carry out the moves of a decision, which have the form of `plain_move`.

        A copy gets the weights that its source had before the decision, even if the source itself becomes a copy.
        """
        stopped = [number for number, to, *_ in moves if to is None]
        going_on = [(number, to, *copy) for number, to, *copy in moves if to is not None]
        copies = [(number, *copy) for number, _, *copy in going_on if copy]
        before = {source: (self.trials[source], heat.sources.get(source)) for _, source, _ in copies}
        for number in stopped:
            heat.state.drop(number)
        for number, source, changes in copies:
            trial, checkpoint = before[source]
            self.failed.pop((heat.name, number), None)
            self.trials[number] = Trial(number, changed(trial.config, changes))
            self.unkept[number] = self.unkept.get(source, frozenset())
            self.unread[number] = self.unread.get(source, frozenset())
            self.costs[number], heat.kinds[number] = self.costs.get(source, {}), heat.kinds[source]
            heat.copies[number] = source
            self._set(heat.sources, number, checkpoint)
        self._forget(heat.name, stopped)
        for number, to, *copy in going_on:
            heat.state.go_on(number, to, self.trials[number].config, *copy[:1])
        self._arrive(heat, [number for number, *_ in going_on])

    def _take_schedules(self, racing: Iterable[tuple[int, int, Mapping[str, Any]]]) -> None:
        """Configure finalists that train by the schedules of other trials.

        An item of `racing` is a finalist, the trial by whose schedule it trains, and the changes of the configuration.
        """
        for number, source, changes in racing:
            self.trials[number] = Trial(number, changed(self.trials[source].config, changes))
            self.unkept[number] = self.unkept.get(source, frozenset())

    def _arrive(self, heat: FusedHeat, numbers: Iterable[int]) -> None:
        """Let trials that have reached their milestones, in this call or in an earlier one, wait there for a decision.

        Trials that failed or diverged wait there, too. An earlier call with fewer samples may have trained trials
        beyond these milestones. The heat's rule does not see the epochs after a milestone.
        """
        by_place, name = self.settings.comparison.by_place, heat.name
        for number in numbers:
            standing = heat.state.training.get(number)
            if standing is None or standing.goal is None or number in heat.copies:
                continue
            is_own = heat.kinds.get(number) == OWN_LOOP
            if not self.passed(name, number, goal := standing.goal, is_own=is_own):
                continue
            if by_place:  # the heat is the sweep, because a run that compares by places has no middle heat
                self._unplaced.add(goal)
                values = self._compared.setdefault(goal, {})[number] = self.values_at(name, number, goal)
                whole = all(map(math.isfinite, values.values()))
                heat.state.come(number, {goal: 0.0 if whole else math.nan})
            else:
                epochs = range(standing.epoch + 1, goal + 1)
                heat.state.come(number, {epoch: self.score_at(name, number, epoch) for epoch in epochs})

    def place(self) -> None:
        """If places (`Comparison.places`) order trials, compute all at each milestone that another trial reached."""
        for stop in sorted(self._unplaced):
            self.sweep.place(stop, self.settings.comparison.places(self._compared[stop]))
        self._unplaced.clear()

    def _comes_early(self, number: int, key: str, unit: Unit) -> bool:
        """Set aside the full-size training of a trial that has not entered the race, and return True.

        Return False for any other unit.
        """
        if not (unit.value or {}).get("early") or number in self.race.trials:
            return False
        self.early[number] = key, unit
        return True

    def _enter(self, numbers: Sequence[int]) -> None:
        """Begin the race anew, between these trials only."""
        self.race, self.entrants, self.rungs = self.new_state("race"), list(numbers), []
        for number in numbers:
            self.race.admit(number, self.trials[number].config)
        early, self.early = self.early, {}
        for number, (key, unit) in early.items():
            if number in self.race.trials:
                for line in unit.lines:
                    self._take_line("race", line)
                self._take_full_size(key, unit)
            else:
                self._released.append(key)

    def _decide_race(self, epoch: int, moves: Iterable[Sequence[Any]]) -> None:
        """Carry out the moves of a decision of the race, at the milestone `epoch`."""
        decided = {number: move_of(plain) for number, *plain in moves}
        for number, move in decided.items():
            if number in self.checkpoints and self.epochs("race", number) == epoch:
                self.decided[number] = isinstance(move, Continue)
        if not decided.keys() <= self.race.trials.keys():
            return  # the decision belongs to an earlier race, between other trials
        carry_out(decided, self.race)
        if epoch:
            self.rungs.append((epoch, decided))
        for number in decided:
            self._arrive_in_race(number)

    def _arrive_in_race(self, number: int) -> None:
        """Let a full-size trial wait for a decision if it has reached its milestone, or cannot reach it."""
        standing = self.race.training.get(number)
        if standing is None or standing.goal is None or goes_on(self, number, stop := standing.goal):
            return
        curve = {at: score for at, score in self.curve("race", number).items() if at <= stop}
        averages = {} if self.settings.comparison.by_place else averages_at(self, stop, [number])
        self.race.come(number, curve, deciding_curve(self, number).get(stop, math.nan), averages.get(number))

    def _take_full_size(self, key: str, unit: Unit) -> None:
        if (name := FULL_TRAINING.fullmatch(key)) is not None:
            self._take_target(int(name["trial"]), name["what"], int(name["epoch"]), unit)
            self._arrive_in_race(int(name["trial"]))
        elif (name := REFIT.fullmatch(key)) is not None:
            for number in list(self.refits):
                self._set(self.refits, number, None)
            self._set(self.refits, int(name["trial"]), key)
            self.refitted += unit.value["epochs"]
        elif (decision := RACE_DECISION.fullmatch(key)) is not None:
            self._decide_race(int(decision["epoch"] or 0), unit.value)
        elif key.startswith(ENTERED):
            self._enter(unit.value)
        elif key == DONE:
            self.over = unit.value
            self.live.clear()  # drops the epochs of trials that began early and did not enter the race
        if count := sum(line["event"] == "metrics" for line in unit.lines):
            count *= self.settings.models("race")
            self.epoch_seconds.append((unit.seconds / count, count))

    def _take_target(self, number: int, what: str, epoch: int, unit: Unit) -> None:
        if what == "done-after":
            self.ended[number], self.decided[number] = epoch, False
        elif what == "lost-after":
            self._set(self.checkpoints, number, None)
            self.best.pop(number, None)
            self.metrics.pop(("race", number), None)
        elif what == "to":
            self.failed.pop(("sweep", number), None)
            self.failed.pop(("race", number), None)
            self._set(self.checkpoints, number, unit.value["checkpoint"])
            self.decided.pop(number, None)
            if (best := unit.value.get("best")) is not None:
                self.best[number] = best["epoch"], best["score"]
            if unit.value.get("swept"):
                swept = self.metrics["sweep", number]
                self.metrics["race", number] = [line for line in swept if line["epoch"] <= epoch]
                self._begun.add("race")

    def _set(self, names: dict[int, str], number: int, name: str | None) -> None:
        """Set in `names` the checkpoint from which a trial continues; `name` is None for no checkpoint.

        Release the trial's earlier checkpoint if no trial needs it any more.
        """
        before = names.pop(number, None)
        if name is not None:
            names[number] = name
            self._uses[name] += 1
        if before is not None:
            self._uses[before] -= 1
            if not self._uses[before]:
                del self._uses[before]
                self._released.append(before)

    def _forget(self, heat: HeatName, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._set(self.heats[heat].sources, number, None)

    def released(self) -> Iterator[str]:
        """Yield the names of checkpoints from which no trial continues any more. Each name is yielded once."""
        released, self._released = self._released, []
        yield from (name for name in released if name not in self._uses)

    def began(self, heat: HeatName) -> bool:
        """Tell whether any trial has trained an epoch of a heat."""
        return heat in self._begun

    def epochs_in(self, key: str, number: int) -> int:
        """Count the epochs that a trial of a heat on surrogates had trained when the checkpoint of this name was saved.

        The journal may hold more epochs. This happens if an earlier checkpoint was lost, and time ran out before all
        lost epochs were trained again.
        """
        return self._behind.get(key, {}).get(str(number), self.epochs(heat_of(key), number))
