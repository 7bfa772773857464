"""The queue of a heat: an idle device takes the trials that are furthest behind, in groups of the fastest size.

Only trials of one kind can be fused, and so form a group. In population based training, trials continue as copies of
others; `check_copies` tells whether they can.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, overload

from fusion.graph.compiled import compiling_pays
from fusion.keys import KEYS, KINDS, is_of_part, optimizer_names, read
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Devices, Group, Span, Task, Widths, group_key
from hydro_rasda.heats.choose_groups import WaitingKind, next_groups
from hydro_rasda.heats.fusion_kinds import find_kinds
from hydro_rasda.history.history import History
from hydro_rasda.history.lines import WIDTHS_OF, Unit
from hydro_rasda.run.crash_log import training_of
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import Continue
from hydro_rasda.training.group_widths import COMPILED_FROM, MEASURING

_QueuePlace = tuple[tuple[int, ...], int]


class _DeviceEnded(Exception):
    """A device's process or machine ended while it measured."""


class _Numbers(Sequence[int]):
    """The numbers of queued trials, as a view that copies nothing."""

    def __init__(self, places: Sequence[_QueuePlace]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [number for _, number in self._places[index]]
        return self._places[index][1]


class _IdleDevices:
    """Idle devices that take tasks in turn. For each kind, the speeds of all devices are summed up only once.

    Attributes:
        left: The devices that have no task yet. The last item is the next device.
        of_type: The same devices by machine type.
    """

    def __init__(self, devices: Devices, idle: Sequence[int]) -> None:
        self._devices, self.left = devices, [*reversed(idle)]
        self.of_type: dict[str, list[int]] = {}
        for device in self.left:
            self.of_type.setdefault(devices.machine(device), []).append(device)
        self._measured: dict[str, list[float]] = {}
        self._foreseen: dict[str, list[float]] = {}

    def take(self) -> int:
        """Remove the next device; return its number."""
        machine = self._devices.machine(self.left[-1])
        self.of_type[machine].pop()
        if not self.of_type[machine]:
            del self.of_type[machine]
        return self.left.pop()

    def share(self, kind: str, rates: Mapping[str, float]) -> float:
        """Return which share of a kind's trials the next device should take: its part of the speed of all devices left.

        Args:
            rates: `rates[machine]` is the planned speed of a machine type. It is used unless all devices left have a
                measured speed.
        """
        totals, speed = self._measured, self._devices.speed(self.left[-1], kind)
        if kind not in totals:
            speeds = [self._devices.speed(device, kind) for device in self.left]
            known = speeds.index(None) if None in speeds else len(speeds)
            totals[kind] = [*accumulate(of for of in speeds[:known] if of is not None)]
        if speed is None or len(totals[kind]) < len(self.left):
            totals, speed = self._foreseen, rates[self._devices.machine(self.left[-1])]
            if kind not in totals:
                totals[kind] = [*accumulate(rates[self._devices.machine(device)] for device in self.left)]
        return speed / totals[kind][len(self.left) - 1]


class Dispatcher:
    """Queue the trials of a heat that wait for a device, and put them into tasks for idle devices.

    Args:
        heat: Name of the heat.
        width: Width of the heat's surrogates, as in `Task`.
    """

    def __init__(self, run: Run, devices: Devices, heat: HeatName = "sweep", width: float | None = None) -> None:
        self._run, self._devices, self._heat, self._width = run, devices, run.history.heats[heat], width
        # `_queues[span][kind]` is sorted by optimizer. So trials with the same optimizer are neighbors in a group, and
        # the optimizer updates one slice of each fused parameter.
        self._queues: dict[Span, dict[str, list[_QueuePlace]]] = {}
        self._spans: dict[int, Span] = {}
        self._widths: dict[tuple[str, str], Widths] = {}

    def add(self, number: int, stop: int) -> None:
        """Queue a trial to train up to epoch `stop`, from its last checkpoint or, without one, from the beginning."""
        run, heat = self._run, self._heat
        source, reached = heat.sources.get(number), 0
        if source is not None and run.can_load(source):
            # If the trial is a copy, this is the checkpoint of another trial, whose epochs count.
            reached = run.history.epochs_in(source, heat.copies.get(number, number))
        self._spans[number] = span = Span(reached, stop)
        insort(self._queues.setdefault(span, {}).setdefault(heat.kinds[number], []), self._place(number))

    def _remove(self, task: Task) -> None:
        """Remove the trials of a task from the queue."""
        kinds, members = self._queues[task.span], {*task.members}
        for kind, last in {group.kind: group.members[-1] for group in task.groups}.items():
            # The task's trials are the first of their kind, but trials at which processes died may stand between them.
            places = kinds[kind]
            end = bisect_right(places, self._place(last))
            places[:end] = [place for place in places[:end] if place[1] not in members]
            if not places:
                del kinds[kind]
        if not kinds:
            del self._queues[task.span]
        for number in members:
            del self._spans[number]

    def _place(self, number: int) -> _QueuePlace:
        return tuple(map(KINDS.index, optimizer_names(self._library_keys(number)))), number

    def _library_keys(self, number: int) -> Mapping[str, Any]:
        return self._run.problem.library_keys(self._run.history.trials[number].config)

    def __bool__(self) -> bool:
        """Tell whether any trial waits in the queue."""
        return bool(self._queues)

    def tasks(self, idle: Sequence[int]) -> Iterator[tuple[int, Task]]:
        """Yield each of the idle devices with its next task, until no device or no trial is left.

        If a device's process or machine ends meanwhile, stop, so that the caller asks again which devices are idle.
        """
        left = _IdleDevices(self._devices, idle)
        with contextlib.suppress(_DeviceEnded):
            while left.left and self:
                task = self._task(left)
                self._remove(task)
                yield left.take(), task

    def foreseen(self, count: float, lanes: int) -> float:
        """Estimate the wall seconds of one epoch of `count` trials, with kinds in the same proportion as in the heat.

        Each of the `lanes` cores trains one group at a time. Return NaN if the group sizes of a kind were not measured.
        """
        widths = {kind: of for (_, kind), of in self._widths.items()}
        kinds = self._heat.kinds
        if not widths.keys() >= {*kinds.values()} or self._run.settings.sweep.fusion != "auto":
            return math.nan
        if any(of.assumed for of in widths.values()):
            return math.nan
        one_of = {kind: number for number, kind in kinds.items()}
        seconds = 0.0
        for kind, size in Counter(kinds.values()).items():
            members = count * size / len(kinds)
            width = min(widths[kind].most, max(1, math.ceil(members / lanes)))
            seconds += members * self._steps(one_of[kind]) * widths[kind].seconds(width) / width
        return seconds / lanes

    def _task(self, idle: _IdleDevices) -> Task:
        """Return a task for the next idle device, made of queued trials whose next milestone is the earliest."""
        run, device = self._run, idle.left[-1]
        queues = self._queues if not run.store.doing.suspects else self._without_suspects()
        span = min(queues, key=lambda span: (span.stop, span.start))
        kinds = queues[span]
        in_order = {kind: kinds[kind] for kind in sorted(kinds, key=lambda kind: kinds[kind][0])}
        of_kind = {kind: _Numbers(places) for kind, places in in_order.items()}
        first = next(iter(of_kind))
        widths = {machine: self._planned(of_type[-1], of_kind) for machine, of_type in idle.of_type.items()}
        share = idle.share(first, {machine: of[first].rate for machine, of in widths.items()})
        own = widths[self._devices.machine(device)]
        waiting = {kind: WaitingKind(of, own[kind], self._steps(of[0])) for kind, of in of_kind.items()}
        cores, beside, state = self._devices.cores(device), 1, self._heat.state
        if run.problem.is_own("sweep"):
            beside = len(state.scores.get(span.stop, ())) + len(state.training_to(span.stop))
            if cores > 1:  # let the device take more trials than it has cores; each core trains one after another
                cores = max(cores, sum(map(len, of_kind.values())))
        groups = [
            replace(group, compiled=True) if self._is_compiled(group, waiting[group.kind], span) else group
            for group in next_groups(waiting, cores, share)
        ]
        members = [number for group in groups for number in group.members]
        sources = [self._heat.sources[n] for n in members] if span.start else []
        return Task(
            key=group_key(self._heat.name, span, members),
            groups=tuple(groups),
            sources=tuple(sources if run.problem.is_own("sweep") else sorted({*sources})),
            span=span,
            heat=self._heat.name,
            beside=beside,
            width=self._width,
            copies={n: self._heat.copies[n] for n in members if n in self._heat.copies} if span.start else {},
        )

    def _without_suspects(self) -> Mapping[Span, Mapping[str, Sequence[_QueuePlace]]]:
        """Return the queues without the trials at which processes died.

        If only such trials are left, return one of them alone.
        """
        died = {
            number: count
            for number, span in self._spans.items()
            if (count := self._run.store.doing.suspected(training_of([number], span.stop)))
        }
        if not died:
            return self._queues
        left: dict[Span, dict[str, Sequence[_QueuePlace]]] = {}
        for span, kinds in self._queues.items():
            for kind, places in kinds.items():
                if others := [place for place in places if place[1] not in died]:
                    left.setdefault(span, {})[kind] = others
        if left:
            return left
        last = min(died, key=lambda number: (died[number], number))
        return {self._spans[last]: {self._heat.kinds[last]: [self._place(last)]}}

    def _is_compiled(self, group: Group, of: WaitingKind, span: Span) -> bool:
        """Tell whether compiling a group's step pays off before its next milestone and the end of the time budget.

        The measured speedup is that of the largest groups. Smaller groups gain more, because they spend less of their
        time on arithmetic.
        """
        seconds = of.seconds(len(group.members)) * (span.stop - span.start)
        seconds = min(seconds, self._run.seconds_left("sweep"))
        return group.fused and compiling_pays(seconds, of.widths.compiled, of.widths.compile_seconds)

    def _steps(self, number: int) -> float:
        """Return the number of optimizer steps in a trial's epoch; 1 if the data have no length."""
        return self._run.problem.train_data.steps(read(self._library_keys(number), "batch_size")) or 1.0

    def _planned(self, device: int, of_kind: Mapping[str, Sequence[int]]) -> dict[str, Widths]:
        """Return, for each kind, how to group its trials on a device."""
        fusion = self._run.settings.sweep.fusion
        if fusion != "auto":
            return dict.fromkeys(of_kind, Widths(fusion, 1 if self._run.settings.models("sweep") > 1 else 2))
        machine = self._devices.machine(device)
        self._plan(device, {kind: of for kind, of in of_kind.items() if (machine, kind) not in self._widths})
        return {kind: self._widths[machine, kind] for kind in of_kind}

    def _plan(self, device: int, of_kind: Mapping[str, Iterable[int]]) -> None:
        """Set in `_widths` how a device groups the trials of these kinds.

        If the journal has no earlier measurement for this type of device, let the device measure now.
        """
        run, machine = self._run, self._devices.machine(device)
        names = {kind: f"{self._heat.name}{WIDTHS_OF}{kind} on {machine}" for kind in of_kind}
        trials = {
            kind: [run.history.trials[n] for n in of] for kind, of in of_kind.items() if not run.store.done(names[kind])
        }
        if trials:
            if run.problem.steady_epoch_seconds * run.settings.max_t >= COMPILED_FROM and not self._widths:
                run.say("measuring the best group size, and whether compiling pays: this can take a minute")
            started, left = time.perf_counter(), run.seconds_left("sweep")
            planned = self._devices.plan(device, trials, self._width)
            seconds = time.perf_counter() - started
            for kind, widths in planned.items():
                if not widths.assumed or seconds < MEASURING * left:
                    run.record(names[kind], Unit(asdict(widths), [], seconds / len(trials)))
                else:  # not recorded: time may have cut the measuring short, so the next call measures again
                    self._widths[machine, kind] = widths
            if device not in self._devices.idle():
                raise _DeviceEnded
        known = {kind: name for kind, name in names.items() if run.store.done(name)}
        self._widths |= {(machine, kind): _widths(run.store.units()[name].value) for kind, name in known.items()}


def _widths(value: Mapping[str, Any]) -> Widths:
    """Make `Widths` from a value of the journal, whose keys are strings."""
    throughput = {int(width): rate for width, rate in value["throughput"].items()}
    more = {name: value[name] for name in ("share", "compiled", "compile_seconds", "assumed") if name in value}
    return Widths(value["most"], value["least"], throughput, **more)


def check_copies(run: Run, copies: Mapping[int, Continue]) -> None:
    """Check that the trials that are to continue as copies of others can do so.

    Raises:
        ValueError: If a copy or its source has already trained further, or if a changed key would give the copy's model
            another structure.
    """
    history = run.history
    of = {number: move.copy_of for number, move in copies.items() if move.copy_of is not None}
    for number in {*of, *of.values()}:
        if history.epochs("sweep", number) > history.sweep.trials[number].epoch:
            raise cannot_grow(number)
    differs = cache(partial(_differs_in_a_structure, history))  # cached, because it looks at all trials
    for number, copied in of.items():
        _check_structure(run, number, copied, copies[number].changes, differs)


def _check_structure(
    run: Run,
    number: int,
    copied: int,
    changes: Mapping[str, Any],
    differs: Callable[[str], bool],
) -> None:
    """Raise ValueError if a changed key that only the user reads would give the copy's model another structure."""
    config = run.history.trials[copied].config
    for key, value in changes.items():
        ours = key in KEYS or is_of_part(key)
        if ours or value == config.get(key) or differs(key):
            continue
        copy = Trial(number, {**config, key: value})
        if find_kinds(run.problem, [copy], 0).value.get(number) != run.history.kinds[copied]:
            raise ValueError(
                f"`sweep.rule` changes `{key}` of trial {number} to {value!r}, but trials that differ in it have "
                "models of different structures: leave it out of what the rule explores"
            )


def _differs_in_a_structure(history: History, key: str) -> bool:
    """Tell whether any two trials whose models have the same structure differ in the value of a key."""
    values: dict[str, set[str]] = {}
    for trial, kind in history.kinds.items():
        values.setdefault(kind, set()).add(repr(history.trials[trial].config.get(key)))
    return any(len(of_kind) > 1 for of_kind in values.values())


def cannot_grow(number: int) -> ValueError:
    """Return the error of a call that gives a run more samples although the run's rule has copied trials."""
    return ValueError(
        f"`num_samples` is more than the run had, but what its trial {number} has trained since then does not count "
        "among more: its sweep rule copies weights; begin another run, under a new `name`"
    )
