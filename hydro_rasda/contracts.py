"""Contracts of backends and other plug-ins: the classes that plug-ins implement or receive."""

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
from hydro_rasda.run.events import Callback as Callback
from hydro_rasda.run.events import Event as Event
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.sweep_rule import SweepRule as SweepRule  # defined in `schedulers`, which needs no torch


@dataclass(frozen=True)
class Span:
    """The epochs of a training that one task covers.

    Attributes:
        start: Number of epochs that were trained before the task.
        stop: Number of epochs that have been trained once the task is done, the first `start` epochs included.
    """

    start: int
    stop: int


EpochMetrics = dict[str, list[float]]
"""The metrics of a group after an epoch. Maps each name, "train_*" or "val_*", to a value for each member."""


History = list[tuple[int, dict[str, float]]]
"""The epochs of a trial, as pairs: the number of epochs trained so far, and the metrics after the last of them."""


T = TypeVar("T")


def evenly(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split items, in order, into at most `parts` parts whose sizes differ by at most one.

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
        kind: Digest of the fusion key that the trials share.
        members: The numbers of the trials.
        fused: True if the trials train as one. False if they train one after another, which is faster for few trials.
        micro_batches: Number of parts of each batch, if a single member does not fit memory with whole batches.
        compiled: True if the group's training step is compiled first, on a CPU.
    """

    kind: str
    members: tuple[int, ...]
    fused: bool
    micro_batches: int = 1
    compiled: bool = False

    def of(self, members: Sequence[int]) -> Group:
        """Return the group with only these members. It is not compiled, because compiling may not pay for fewer."""
        return replace(self, members=tuple(members), fused=self.fused and len(members) > 1, compiled=False)


@dataclass(frozen=True)
class Task:
    """A unit of work of one heat, from one milestone to the next.

    A task of the sweep or of the middle heat has groups of surrogates, which train at the same time. A task of the race
    is one full-size model; `full_size_task` makes it.

    Attributes:
        key: A name that no other task of the run has. For groups, the checkpoint that the task leaves has this name.
        groups: The trials; groups are independent of each other. A full-size model is a group of one. For the user's
            own loop, there may be more groups than the device has cores. Then some groups begin only when others have
            ended.
        sources: Names of the checkpoints to go on from; empty for initial weights. A full-size model has one at most.
            For the user's own loop, there is one for each trial, in the order of the trials.
        heat: The heat that the task belongs to.
        width: In the middle heat, the width of the surrogates as a ratio of the full width; None in other heats.
        copies: Maps each copy to its source, the trial whose weights and optimizer state it continues with.
        seed: Determines the initial weights, and dropout. Only full-size models use this attribute and those below.
        beside: Number of trials, this one included, that train to this milestone and share the devices. Surrogates that
            the user's own loop trains use it, too.
        horizon: Number of epochs over which the schedule runs; None for those of a full training.
        refit: True to train one model on the examples of all folds, without validation.
        averaged: True to keep the averaged weights if training averages weights; False to keep those of the last step.
    """

    key: str
    groups: tuple[Group, ...]
    sources: tuple[str, ...]
    span: Span
    heat: HeatName = "sweep"
    width: float | None = None
    copies: Mapping[int, int] = field(default_factory=dict)
    seed: int = 0
    beside: int = 1
    horizon: int | None = None
    refit: bool = False
    averaged: bool = True

    def __post_init__(self) -> None:
        if (self.heat == "middle") != (self.width is not None):
            raise ValueError(f"`width` is {self.width}, but must be given in the middle heat, and only there")

    @property
    def is_full_size(self) -> bool:
        """True for a full-size model; False for groups of surrogates."""
        return self.heat == "race"

    @property
    def members(self) -> tuple[int, ...]:
        """The trials of all groups."""
        return tuple(number for group in self.groups for number in group.members)

    @property
    def number(self) -> int:
        """The number of the trial, for a task with a single trial."""
        (number,) = self.members
        return number

    @property
    def source(self) -> str | None:
        """The checkpoint from which a full-size model continues; None if it begins anew."""
        return self.sources[0] if self.sources else None

    def parts(self) -> list[Task]:
        """Return a task for each group. All of them keep the key of this task."""
        return [replace(self, groups=(group,)) for group in self.groups]

    def apart(self) -> list[Task]:
        """Split a task of the user's own loop into one task for each trial, with its own key and checkpoint."""
        sources: Sequence[tuple[str, ...]] = [(source,) for source in self.sources] or [()] * len(self.groups)
        return [replace(self.of(group), sources=of) for group, of in zip(self.groups, sources, strict=True)]

    def smaller(self) -> list[Task]:
        """Return tasks that take less memory than this one, each a unit of work with its own key.

        Several groups become a task each. A single group is halved. A single member gets twice as many micro-batches.
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
        """Return a task with only these groups, under its own key."""
        members = [number for group in groups for number in group.members]
        return replace(self, key=group_key(self.heat, self.span, members), groups=groups)


def full_size_task(
    key: str, number: int, span: Span, source: str | None, seed: int, beside: int = 1, **more: Any
) -> Task:
    """Return the task that trains a trial's full-size model; `more` are further fields of `Task`.

    Args:
        source: Name of the checkpoint to continue from; None to begin anew.
    """
    groups, sources = (Group("full size", (number,), fused=False),), () if source is None else (source,)
    return Task(key, groups, sources, span, "race", seed=seed, beside=beside, **more)


def group_key(heat: HeatName, span: Span, members: Iterable[int]) -> str:
    """Return the key of the task that trains these trials for a span.

    The key names a group by its smallest trial number. No two groups of a heat and span share this number, because a
    trial trains a span only once, unless its checkpoint was lost.
    """
    return f"{heat}/to-{span.stop}/from-{span.start}/group-{min(members)}"


@dataclass
class Outcome:
    """Outcome of training a task.

    Attributes:
        checkpoint: The "members" and "state" of each model, fused or full-size, to continue from.
        history: Maps each trial that began to its epochs and their metrics.
        failures: Maps each trial that raised to its traceback.
        seconds: Wall seconds of the training.
        died: True if a full-size model failed because its process died so often that it should not be tried again.
        ended: True if a full-size training ended by itself, at or before the end of its span, and must not continue.
        more: Further plain values that the run records beside the checkpoint. The backend needs them to continue from
            the checkpoint.
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
        """Return the outcome of a single model from its state; `more` are further fields."""
        return cls([{"members": [number], "state": state}], {number: history}, {}, seconds, **more)

    @classmethod
    def failed(cls, number: int, error: str, seconds: float = 0.0, died: bool = False) -> Outcome:
        """Return the outcome of a single trial that failed; `error` is the traceback."""
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
        most: Number of members of the largest group; 1 if fusing never pays.
        least: Fewest members with which a group trains faster as one than one after another.
        throughput: Maps measured widths (members of a group) to steps per second, summed over the members. Width 1
            means that members train one after another.
        share: Share of the device's memory that the largest group takes; 0 if it is small or unknown.
        compiled: Speedup of the largest groups by a compiled step; 1 if compiling was not tried or is impossible.
        compile_seconds: Seconds to compile the step.
        assumed: True if nothing was measured. Then `throughput` must not be used to predict times.
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
        """Steps per second, summed over the members, of the largest groups."""
        return self.throughput.get(self.most, self.throughput[1])

    def seconds(self, members: int) -> float:
        """Return the seconds that a group of `members` takes for a step, interpolated between measured widths.

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
        device: Number of the device that trained the task, or of the first of several; None if there is only one.
        beside: Number of full-size models that shared the device, this one included. `outcome.seconds` is the task's
            share of the device's time; the training itself took `beside * outcome.seconds`.
    """

    task: Task
    outcome: Outcome
    device: int | None = None
    beside: int = 1


class Devices(Protocol):
    """Devices that a backend opens for a run.

    A device trains one task of groups at a time, or several full-size models (`Task.is_full_size`) at the same time.
    Such models begin together, at the latest when `finished` is called. The backend decides how many models train on a
    device, and which further devices a full-size model gets.
    """

    def idle(self, task: Task | None = None) -> Sequence[int]:
        """Return the devices that have nothing to do; with `task`, the devices that can accept this task now.

        A device with full-size models can accept another one until they begin. If a full-size model needs more devices
        than are idle, it waits for them, and no device counts as idle meanwhile.

        Each returned device may get a task of groups without another call of `idle`. Only `start`, `plan` and
        `finished` may change the answer.
        """
        ...

    def start(self, device: int, task: Task) -> None:
        """Let a device of `idle(task)` train a task, perhaps together with other devices of `idle(task)`."""
        ...

    def finished(self) -> Sequence[Finished]:
        """Wait until a task is done, or for a moment. Return the tasks that were done since the last call.

        A task of the user's own loop may be returned in parts. If it may not go on, because time is over or a score is
        good enough, trials that have not begun are left out.
        """
        ...

    def busy(self) -> bool:
        """Return whether a task is under way, or whether the backend expects a device that could begin one."""
        ...

    def speed(self, device: int, kind: str) -> float | None:
        """Return the measured epochs per second of trials of this kind; None before any measurement."""
        ...

    def machine(self, device: int) -> str:
        """Return the name of the device's type. Devices that are equally fast have the same name."""
        ...

    def cores(self, device: int) -> int:
        """Return the number of groups, or full-size models, that a device trains at the same time."""
        ...

    def plan(
        self, device: int, kinds: Mapping[str, Sequence[Trial]], width: float | None = None
    ) -> Mapping[str, Widths]:
        """Return for each kind how a device should group the trials; `width` is that of their tasks (`Task.width`).

        If the device's process dies meanwhile, `idle` does not return the device afterwards. If its machine is lost,
        the result is empty.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """The place where trials train, for `tune(backend=...)`. A backend can be opened for several runs.

    `hydro_rasda.testing` checks an implementation against this protocol. The attributes `loader_workers` and `graph` of
    `LocalBackend` are optional: a backend without them gets the defaults of `LocalBackend`.

    Attributes:
        device: Device of the models that the tuner itself builds, before and after training.
    """

    @property
    def device(self) -> torch.device: ...

    def open(self, run: Run) -> AbstractContextManager[Devices]:
        """Start the devices for a run.

        Returns:
            A context that gives the devices. When it is left, for any reason, all work on the devices must end.

        Raises:
            ValueError: On entering, if the backend cannot train this run.
        """
        ...
