"""Contracts of backends and other plug-ins: the classes that they implement or are handed."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.run.callbacks import Callback as Callback
from hydro_rasda.run.events import Event as Event
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.sweep_rule import SweepRule as SweepRule  # pure, so that it lives with the decisions


@dataclass(frozen=True)
class Span:
    """The part of a training that a unit of work covers.

    Attributes:
        start: Epochs trained before.
        stop: Epochs trained after.
    """

    start: int
    stop: int


EpochMetrics = dict[str, list[float]]
"""Of one epoch of a group: by metric ("train_*", "val_*"), one value for each member."""


History = list[tuple[int, dict[str, float]]]
"""Of one trial: for each epoch, how many epochs it has trained by then, and its metrics."""


T = TypeVar("T")


def evenly(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split into at most so many parts, in order, of which none is larger than another by more than one.

    >>> evenly([0, 1, 2, 3, 4], 2), evenly([0, 1], 4)
    ([[0, 1, 2], [3, 4]], [[0], [1]])
    """
    parts = min(parts, len(items))
    bounds = [-(-len(items) * i // parts) for i in range(parts + 1)]
    return [items[start:stop] for start, stop in pairwise(bounds)]


@dataclass(frozen=True)
class Group:
    """Trials that can train as one fused model.

    Attributes:
        kind: Digest of the fusion key that they share.
        fused: True if they train as one; otherwise they train one after another, which is faster for a few.
        micro_batches: Parts that each batch is split into, where a single member does not fit memory with whole ones.
        compiled: True if their step is compiled first, on a CPU.
    """

    kind: str
    members: tuple[int, ...]
    fused: bool
    micro_batches: int = 1
    compiled: bool = False

    def of(self, members: Sequence[int]) -> Group:
        """The same group with only these of its members; that compiling pays was decided for all of them."""
        return replace(self, members=tuple(members), fused=self.fused and len(members) > 1, compiled=False)


@dataclass(frozen=True)
class Task:
    """A unit of work: groups that train at the same time, or one full-size model, from one milestone to the next.

    `full_size_task` makes one for a full-size model.

    Attributes:
        key: Tells it from all others of the run. For groups, it names the checkpoint that the task leaves.
        groups: The trials; groups are independent of each other. A full-size model is a group of one.
        sources: Names of the checkpoints to go on from; empty for initial weights. A full-size model has one at most.
        copies: For each trial that goes on with another one's weights and optimizer state, that other one.
        width: Width of a middle heat's surrogates over that of the model; None for the sweep's, or a full-size model.
        heat: "race" for a full-size model. The attributes below have a meaning for it alone.
        seed: Determines the initial weights, and dropout.
        beside: How many trials are trained to this milestone, itself included: they share the devices.
        horizon: Epochs over which its schedule runs; None: those of a full training.
        refit: True to train one model on the examples of all folds, without validation.
        averaged: False if the weights that it leaves are wanted, where training averages weights besides.
    """

    key: str
    groups: tuple[Group, ...]
    sources: tuple[str, ...]
    span: Span
    copies: Mapping[int, int] = field(default_factory=dict)
    heat: HeatName = "sweep"
    seed: int = 0
    beside: int = 1
    horizon: int | None = None
    refit: bool = False
    averaged: bool = True
    width: float | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The trials of all groups."""
        return tuple(number for group in self.groups for number in group.members)

    @property
    def number(self) -> int:
        """The trial of a task that has a single one."""
        (number,) = self.members
        return number

    @property
    def source(self) -> str | None:
        """The checkpoint that a full-size model goes on from; None if it begins anew."""
        return self.sources[0] if self.sources else None

    def parts(self) -> list[Task]:
        """A task for each group."""
        return [replace(self, groups=(group,)) for group in self.groups]

    def smaller(self) -> list[Task]:
        """Return tasks that take less memory: its groups by themselves; of a single group, each half of its members.

        Of a single member, the same with batches in twice as many parts. Each is a unit of its own.
        """
        groups = self.groups
        if len(groups) == 1:
            (group,) = groups
            if len(group.members) == 1:
                groups = (replace(group, micro_batches=2 * group.micro_batches),)
            else:
                groups = tuple(group.of(half) for half in evenly(group.members, 2))
        return [self.of(group) for group in groups]

    def of(self, *groups: Group) -> Task:
        """Return the same with only these groups, under their own name."""
        members = [number for group in groups for number in group.members]
        return replace(self, key=group_key(self.span, members, self.width), groups=groups)


def full_size_task(
    key: str, number: int, span: Span, source: str | None, seed: int, beside: int = 1, **more: Any
) -> Task:
    """Return the task that trains a trial's full-size model, from a checkpoint or anew; `more` are fields of `Task`."""
    groups, sources = (Group("full size", (number,), fused=False),), () if source is None else (source,)
    return Task(key, groups, sources, span, heat="race", seed=seed, beside=beside, **more)


def group_key(span: Span, members: Iterable[int], width: float | None = None) -> str:
    """Name of the unit that trains these trials for a span; `width` is that of a middle heat.

    A trial begins the same span twice only if its checkpoint was lost.
    """
    return f"{'sweep' if width is None else 'middle'}/to-{span.stop}/from-{span.start}/group-{min(members)}"


@dataclass
class Outcome:
    """Outcome of training a task.

    Attributes:
        checkpoint: To go on from: for each model, fused or full-size, that was trained, its "members" and its "state".
        history: For each trial that began, the epochs trained, with the metrics after each.
        failures: For each trial that raised, the traceback.
        died: True if a full-size model failed by the end of its process, so often that it is not to be tried again.
        ended: True if a full-size training ended by itself, before its span or at its end, and is not to go on.
        more: Further plain values for the run's record, for the backend that goes on from it.
    """

    checkpoint: list[dict[str, Any]]
    history: dict[int, History]
    failures: dict[int, str]
    seconds: float = 0.0
    died: bool = False
    ended: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_model(cls, number: int, state: Any, history: History, seconds: float, **more: Any) -> Outcome:
        """Return the outcome of a full-size model, from its state; `more` are further fields."""
        return cls([{"members": [number], "state": state}], {number: history}, {}, seconds, **more)

    @classmethod
    def failed(cls, number: int, error: str, seconds: float = 0.0, died: bool = False) -> Outcome:
        """Return the outcome of a trial that failed by itself, with the traceback."""
        return cls([], {number: []}, {number: error}, seconds, died)

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of a full-size model that has not failed."""
        (part,) = self.checkpoint
        state: Mapping[str, Any] = part["state"]
        return state

    @property
    def epochs(self) -> History:
        """The history of a full-size model."""
        (history,) = self.history.values()
        return history

    @property
    def error(self) -> str | None:
        """The traceback of a full-size model that has failed."""
        return next(iter(self.failures.values()), None)


@dataclass(frozen=True)
class Widths:
    """How to group the trials of one kind.

    Attributes:
        most: Members of the largest group; 1 where fusing never pays.
        least: Members from which a group trains faster as one than one after another.
        throughput: Steps of a trial per second, by width, as far as measured; at 1: one after another.
        share: Of the device's memory that the largest group takes; 0 where that is little, or not known.
        compiled: How many times as fast the largest groups train once their step is compiled; 1 where that was not
            tried, or cannot be done.
        assumed: True if nothing was measured: then `throughput` is no ground to foretell a time.
    """

    most: int
    least: int = 2
    throughput: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    share: float = 0.0
    compiled: float = 1.0
    compile_seconds: float = 0.0
    assumed: bool = field(default=False, repr=False)

    @property
    def rate(self) -> float:
        """Steps of a trial per second, in the largest groups."""
        return self.throughput.get(self.most, self.throughput[1])

    def seconds(self, members: int) -> float:
        """How long a group of so many members takes for a step; between two measured widths, interpolated linearly.

        >>> widths = Widths(4, 3, {1: 100.0, 4: 200.0})
        >>> widths.seconds(2), widths.seconds(3), widths.seconds(4)
        (0.02, 0.0166..., 0.02)
        """
        if members < self.least:
            return members / self.throughput[1]
        known = sorted(self.throughput)
        at = bisect.bisect_left(known, members)
        if at == len(known):
            return members / self.throughput[known[-1]]
        above, below = known[at], known[max(0, at - 1)]
        slow, quick = above / self.throughput[above], below / self.throughput[below]
        return slow if above == below else quick + (slow - quick) * (members - below) / (above - below)


@dataclass(frozen=True)
class Finished:
    """A task that is done.

    Attributes:
        device: Name of the device that trained it, of several the first; None if there is only one.
        beside: How many full-size models shared the device, itself included. It trained for that many times
            `outcome.seconds`.
    """

    task: Task
    outcome: Outcome
    device: int | None = None
    beside: int = 1


class Devices(Protocol):
    """Devices that a backend opens for a run.

    A device trains one task of groups at a time, or several full-size models beside each other. Those begin together,
    at the latest when `finished` is called. The backend decides how many they are, and which further devices a
    full-size model gets.
    """

    def idle(self, task: Task | None = None) -> Sequence[int]:
        """The devices that have nothing to do; given a task, those that can be given it now.

        A device can be given a full-size model beside others, until these begin. If a full-size model is due on more
        devices than are idle, it waits for them, and no device is idle meanwhile.
        """
        ...

    def start(self, device: int, task: Task) -> None:
        """Have a device of `idle(task)` train a task, and perhaps others of them with it."""
        ...

    def finished(self) -> Sequence[Finished]:
        """Tasks that are done since the last call; waits for one, or for a moment."""
        ...

    def busy(self) -> bool:
        """Return whether any task is under way, or a device is waited for that will be able to begin one."""
        ...

    def speed(self, device: int, kind: str) -> float | None:
        """Epochs of a trial of this kind per second, as measured; None before."""
        ...

    def machine(self, device: int) -> str:
        """Equal for devices that are equally fast."""
        ...

    def cores(self, device: int) -> int:
        """How many groups, or full-size models, a device trains at the same time."""
        ...

    def plan(
        self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None
    ) -> Mapping[str, Widths]:
        """How a device would best group the trials of each kind, on surrogates of the `width` of `Task`.

        If its process ends meanwhile, the device is not idle; if its whole machine ends, the answer is empty.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """Place at which trials train; `tune(backend=...)` takes one. It is made without a run, and can be opened for
    several.

    `hydro_rasda.testing` checks that an implementation keeps these promises. It may also have attributes
    `loader_workers` and `graph`, as `LocalBackend` has; without them, the defaults hold.

    Attributes:
        device: Device of the models that the tuner itself builds, before any training and after it.
    """

    @property
    def device(self) -> torch.device: ...

    def open(self, run: Run) -> AbstractContextManager[Devices]:
        """Start the devices for a run.

        Returns:
            A context that gives the devices. Once it is left, for whatever reason, nothing of them runs any more.

        Raises:
            ValueError: on entering, where the backend cannot train this run.
        """
        ...
