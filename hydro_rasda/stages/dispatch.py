"""The queue of the sweep: a free device takes the trials behind first, in groups of the best width measured.

In population based training, trials continue as copies of others.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fusion.graph.compiled import compiling_pays
from fusion.hyperparameters import KEYS, KINDS
from fusion.padding import keeps_zeros
from fusion.part_settings import is_of_part, optimizer_names
from hydro_rasda.contracts import Devices, Group, GroupTask, Span, Widths, group_key
from hydro_rasda.run.events import TrialConfigured
from hydro_rasda.run.journal import Unit
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import Continue, SweepState
from hydro_rasda.search import Search
from hydro_rasda.secret_masking import hide
from hydro_rasda.stages.fusion_groups import find_kinds
from hydro_rasda.stages.next_groups_and_rounds import Waiting, joining_pays, next_groups
from hydro_rasda.stages.wider_groups import find_wider, form
from hydro_rasda.trial import Trial

_Place = tuple[tuple[int, ...], int]


class _Gone(Exception):
    """A device ended while it measured."""


class Dispatcher:
    """Trials that may begin, and the tasks that they make.

    Attributes:
        kinds: By trial, a digest that is equal for trials that can train as one fused model.
        copies: By trial that continues with another trial's weights, that other trial.
    """

    def __init__(self, run: Run, devices: Devices) -> None:
        self._run, self._devices = run, devices
        self.kinds: dict[int, str] = {}
        self.copies: dict[int, int] = {}
        # By kind, the next wider kind to whose shapes its models can be padded, and its share of the parameters.
        self._wider: dict[str, tuple[str, float]] = {}
        self._compared: set[str] = set()
        # By milestone and the epoch to go on from, by kind: members of one optimizer lie side by side, so that their
        # update is one slice of each fused parameter.
        self._queues: dict[Span, dict[str, list[_Place]]] = {}
        self._spans: dict[int, Span] = {}
        self._widths: dict[tuple[str, str], Widths] = {}

    def find_wider(self, children: int) -> None:
        """See which kinds differ in nothing but widths, where new ones have come; `children` as of `find_kinds`."""
        run, before = self._run, self._compared
        examples = {kind: run.trials[number] for number, kind in sorted(self.kinds.items(), reverse=True)}
        sizes, new = Counter(map(form, examples)), {form(kind) for kind in examples.keys() - before}
        several = {kind: of for kind, of in examples.items() if form(kind) in new and sizes[form(kind)] > 1}
        self._compared = before | examples.keys()
        if several and run.settings.sweep.fusion == "auto":
            key = f"surrogate/wider-of-{len(self._compared)}-kinds"
            unit = run.unit(key, partial(find_wider, run.problem, several, children))
            self._wider |= {kind: (wider, share) for kind, (wider, share) in unit.value.items()}

    def add(self, number: int, stop: int) -> None:
        """Let a trial begin as soon as a device takes it: from its last checkpoint, or anew if it has none."""
        run = self._run
        source, reached = run.sources.get(number), 0
        if source is not None and run.can_load(source):
            # A copy goes on from the checkpoint of its source.
            reached = run.epochs_in(source, self.copies.get(number, number))
        self._spans[number] = span = Span(reached, stop)
        insort(self._queues.setdefault(span, {}).setdefault(self.kinds[number], []), self._place(number))

    def remove(self, number: int) -> bool:
        """Take a trial out of the queue; return whether it was there."""
        if (span := self._spans.pop(number, None)) is None:
            return False
        kinds = self._queues[span]
        places = kinds[kind := self.kinds[number]]
        del places[bisect_left(places, self._place(number))]
        if not places:
            del kinds[kind]
        if not kinds:
            del self._queues[span]
        return True

    def _place(self, number: int) -> _Place:
        return tuple(map(KINDS.index, optimizer_names(self._run.trials[number].config))), number

    def __bool__(self) -> bool:
        """Tell whether any trial may begin."""
        return bool(self._queues)

    def start_next(self) -> None:
        """Have the first idle device begin the groups that it is to train next; nothing if a device ended meanwhile."""
        device = self._devices.idle()[0]
        try:
            task = self._task(device)
        except _Gone:
            return
        for number in task.members:
            self.remove(number)
        self._devices.start(device, task)

    def foreseen(self, count: float, lanes: int) -> float:
        """Wall seconds of an epoch of so many trials, of all kinds alike, on cores that each train a group; NaN where
        that was not measured."""
        widths = {kind: of for (_, kind), of in self._widths.items()}
        for kind in self._wider:  # of a kind that joins a wider one, nothing else was measured
            known = (widths[other] for other, _ in self._wider_than(kind) if other in widths)
            if kind not in widths and (of_wider := next(known, None)) is not None:
                widths[kind] = of_wider
        if not widths.keys() >= {*self.kinds.values()} or self._run.settings.sweep.fusion != "auto":
            return math.nan
        if any(of.assumed for of in widths.values()):
            return math.nan
        one_of = {kind: number for number, kind in self.kinds.items()}
        seconds = 0.0
        for kind, size in Counter(self.kinds.values()).items():
            members = count * size / len(self.kinds)
            width = min(widths[kind].most, max(1, math.ceil(members / lanes)))
            seconds += members * self._steps(one_of[kind]) * widths[kind].seconds(width) / width
        return seconds / lanes

    def _task(self, device: int) -> GroupTask:
        run, devices = self._run, self._devices
        span = min(self._queues, key=lambda span: (span.stop, span.start))
        kinds = self._queues[span]
        in_order = {kind: kinds[kind] for kind in sorted(kinds, key=lambda kind: kinds[kind][0])}
        of_kind = {kind: [number for _, number in places] for kind, places in self._joined(device, in_order).items()}
        kind = next(iter(of_kind))
        idle = devices.idle()
        widths = {d: self._planned(d, of_kind) for d in idle}
        measured = {d: speed for d in idle if (speed := devices.speed(d, kind)) is not None}
        speeds = measured if len(measured) == len(idle) else {d: widths[d][kind].rate for d in idle}
        waiting = {kind: Waiting(of, widths[device][kind], self._steps(of[0])) for kind, of in of_kind.items()}
        groups = [
            replace(group, compiled=_is_compiled(group, waiting[group.kind], span), widest=self._widest(group))
            for group in next_groups(waiting, devices.cores(device), speeds[device] / sum(speeds.values()))
        ]
        members = [number for group in groups for number in group.members]
        return GroupTask(
            key=group_key(span, members),
            groups=tuple(groups),
            sources=tuple(sorted({run.sources[n] for n in members})) if span.start else (),
            span=span,
            copies={n: self.copies[n] for n in members if n in self.copies} if span.start else {},
        )

    def _joined(self, device: int, of_kind: Mapping[str, Sequence[_Place]]) -> dict[str, Sequence[_Place]]:
        """Have trials join those of a wider kind where that takes less time than groups of their own.

        It never does where each kind has a core to itself.
        """
        joined, cores = dict(of_kind), self._devices.cores(device)
        if self._run.settings.sweep.fusion != "auto":
            return joined
        # The narrowest first, so that those that joined them go on with them to the next wider kind.
        for kind in sorted(of_kind, key=lambda kind: -len([*self._wider_than(kind)])):
            more = [place for place in joined[kind] if keeps_zeros(self._run.trials[place[1]].config)]
            for wider, share in self._wider_than(kind) if more else ():
                if wider not in joined or len(joined) <= cores:
                    continue
                there = joined[wider]
                all_that_may = [
                    *there,
                    *(p for k in joined if any(wider == of for of, _ in self._wider_than(k)) for p in joined[k]),
                ]
                widths = self._planned(device, {wider: [number for _, number in all_that_may]})[wider]
                if joining_pays(widths, len(there), len(more), share):
                    joined[wider] = sorted([*there, *more])
                    joined[kind] = sorted({*joined[kind]} - {*more})
                    break
            if not joined[kind]:
                del joined[kind]
        return joined

    def _wider_than(self, kind: str) -> Iterator[tuple[str, float]]:
        """Yield the wider kinds to whose shapes a kind's models can be padded, the next one first."""
        share = 1.0
        while kind in self._wider:
            kind, of_next = self._wider[kind]
            share *= of_next
            yield kind, share

    def _is_narrower(self, kind: str, number: int) -> bool:
        """Tell whether a trial in a group of this kind is of another kind, whose models are padded."""
        return self.kinds[number] != kind

    def _widest(self, group: Group) -> Trial | None:
        """Return a trial of the kind to which a group's narrower members are padded; None if it has none of these."""
        if not any(self._is_narrower(group.kind, number) for number in group.members):
            return None
        return self._run.trials[min(number for number, kind in self.kinds.items() if kind == group.kind)]

    def _steps(self, number: int) -> float:
        """Optimizer steps of an epoch; 1 where the data have no length."""
        return self._run.problem.train_data.steps(self._run.trials[number].batch_size) or 1.0

    def _planned(self, device: int, of_kind: Mapping[str, Sequence[int]]) -> dict[str, Widths]:
        """Return the widths of groups on a device, for each kind of trials."""
        fusion = self._run.settings.sweep.fusion
        if fusion != "auto":
            return dict.fromkeys(of_kind, Widths(fusion, 1 if self._run.settings.models("surrogate") > 1 else 2))
        machine = self._devices.machine(device)
        self._plan(device, {kind: of for kind, of in of_kind.items() if (machine, kind) not in self._widths})
        return {kind: self._widths[machine, kind] for kind in of_kind}

    def _plan(self, device: int, of_kind: Mapping[str, Iterable[int]]) -> None:
        """Recall from the journal how to group these kinds, or have the device measure it."""
        run, machine = self._run, self._devices.machine(device)
        names = {kind: f"surrogate/widths-of-{kind} on {machine}" for kind in of_kind}
        # Those of the kind itself first: narrower models that join them are measured in their shapes.
        ordered = {kind: sorted(of, key=partial(self._is_narrower, kind)) for kind, of in of_kind.items()}
        trials = {kind: [run.trials[n] for n in of] for kind, of in ordered.items() if not run.store.done(names[kind])}
        if trials:
            started = time.perf_counter()
            planned = self._devices.plan(device, trials)
            seconds = (time.perf_counter() - started) / len(trials)
            for kind, widths in planned.items():
                run.record(names[kind], Unit(asdict(widths), [], seconds))
            if device not in self._devices.idle():
                raise _Gone
        self._widths |= {(machine, kind): _widths(run.store.units()[name].value) for kind, name in names.items()}


def _widths(value: Mapping[str, Any]) -> Widths:
    """From the journal, whose keys are strings."""
    throughput = {int(width): rate for width, rate in value["throughput"].items()}
    more = {name: value[name] for name in ("share", "compiled", "compile_seconds", "assumed") if name in value}
    return Widths(value["most"], value["least"], throughput, **more)


def _is_compiled(group: Group, of: Waiting, span: Span) -> bool:
    """Tell whether compiling a group's step pays by its next milestone.

    Narrower groups win more than the measured speedup, as more of their time is not arithmetic.
    """
    seconds = of.seconds(len(group.members)) * (span.stop - span.start)
    return group.fused and compiling_pays(seconds, of.widths.compiled, of.widths.compile_seconds)


def make_copies(
    run: Run, state: SweepState, search: Search, dispatcher: Dispatcher, moves: Mapping[int, Continue], recalled: bool
) -> None:
    """Let trials continue with other trials' weights and configurations, as these were before any copy.

    If `recalled`, an earlier process made this decision. Raise ValueError if a copy has trained further already, or if
    a change would make another model.
    """
    of = {number: move.copy_of for number, move in moves.items() if move.copy_of is not None}
    trials = dict(run.trials)
    for number in {*of, *of.values()}:
        if run.epochs("surrogate", number) > state.trials[number].epoch:
            raise cannot_grow(number)
    for number, copied in of.items():
        _check_structure(run, dispatcher, number, copied, moves[number].changes)
    sources = {number: run.sources[copied] for number, copied in of.items()}
    kinds = {number: dispatcher.kinds[copied] for number, copied in of.items()}
    for number, copied in of.items():
        search.close(number, run.epochs("surrogate", number), state.trials[number].score)
        run.failures.pop(number, None)
        run.trials[number] = Trial(number, {**trials[copied].config, **moves[number].changes})
        run.unread[number] = run.unread.get(copied, frozenset())
        run.costs[number] = run.costs.get(copied, {})
        config = hide(run.trials[number].config, run.hidden)
        run.notify(TrialConfigured, trial=number, config=config, recalled=recalled)
    before = {number: run.sources[number] for number in of if number in run.sources}
    run.sources |= sources
    run.store.discard(set(before.values()) - set(run.sources.values()))
    dispatcher.kinds |= kinds
    dispatcher.copies |= of


def _check_structure(run: Run, dispatcher: Dispatcher, number: int, copied: int, changes: Mapping[str, Any]) -> None:
    """Refuse to change a key of the user's if the copy's model would have another structure than its source's."""
    config = run.trials[copied].config
    for key, value in changes.items():
        ours = key in KEYS or is_of_part(key)
        if ours or value == config.get(key) or _differs_in_a_structure(run, dispatcher, key):
            continue
        copy = Trial(number, {**config, key: value})
        if find_kinds(run.problem, [copy], 0).value.get(number) != dispatcher.kinds[copied]:
            raise ValueError(
                f"`sweep.rule` changes `{key}` of trial {number} to {value!r}, but trials that differ in it have "
                "models of different structures: leave it out of what the rule explores"
            )


def _differs_in_a_structure(run: Run, dispatcher: Dispatcher, key: str) -> bool:
    """Tell whether two trials of one structure have different values of a key."""
    values: dict[str, set[str]] = {}
    for trial, kind in dispatcher.kinds.items():
        values.setdefault(kind, set()).add(repr(run.trials[trial].config.get(key)))
    return any(len(of_kind) > 1 for of_kind in values.values())


def cannot_grow(number: int) -> ValueError:
    """Return the error of a run that is given more samples although its rule has copied a trial."""
    return ValueError(
        f"`num_samples` is more than the run had, but what its trial {number} has trained since then does not count "
        "among more: its sweep rule copies weights; begin another run, under a new `name`"
    )
