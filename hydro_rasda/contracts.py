"""Contracts of backends and other plug-ins: the classes that they implement or are handed."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from hydro_rasda.run.callbacks import Callback as Callback
from hydro_rasda.run.events import Event as Event
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.sweep_rule import SweepRule as SweepRule  # pure, so that it lives with the decisions
from hydro_rasda.trial import Trial


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
class GroupTask:
    """A unit of work: groups that train at the same time, from one milestone to the next.

    Attributes:
        key: Name of the unit in the journal and of the checkpoint that it leaves.
        groups: The trials; groups are independent of each other.
        sources: Keys of the earlier tasks that trained them; empty at the first rung.
        copies: For each trial that goes on with another one's weights and optimizer state, that other one.
    """

    key: str
    groups: tuple[Group, ...]
    sources: tuple[str, ...]
    span: Span
    copies: Mapping[int, int] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """The trials of all groups."""
        return tuple(number for group in self.groups for number in group.members)

    def parts(self) -> list[GroupTask]:
        """A task for each group."""
        return [replace(self, groups=(group,)) for group in self.groups]

    def smaller(self) -> list[GroupTask]:
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
        return [replace(self, key=group_key(self.span, group.members), groups=(group,)) for group in groups]


def group_key(span: Span, members: Iterable[int]) -> str:
    """Name of the unit that trains these trials for a span.

    A trial begins the same span twice only if its checkpoint was lost.
    """
    return f"surrogate/to-{span.stop}/from-{span.start}/group-{min(members)}"


@dataclass
class GroupOutcome:
    """Outcome of training a group.

    Attributes:
        checkpoint: To go on from: for each fused model that was trained, its members and its state.
        failures: For each trial that raised, the traceback.
    """

    checkpoint: list[dict[str, Any]]
    history: dict[int, History]
    failures: dict[int, str]


@dataclass(frozen=True)
class FullSizeTask:
    """A unit of work: one full-size model, for a span of epochs.

    Attributes:
        key: Tells it from all others of the run.
        source: Name of the checkpoint to go on from; None starts from the trial's initial weights.
        seed: Determines those, and dropout.
        beside: How many trials are trained to this milestone, itself included: they share the devices.
        horizon: Epochs over which its schedule runs; None: those of a full training.
        refit: True to train one model on the examples of all folds, without validation.
        averaged: False if the weights that it leaves are wanted, where training averages weights besides.
    """

    key: str
    number: int
    span: Span
    source: str | None
    seed: int
    beside: int = 1
    horizon: int | None = None
    refit: bool = False
    averaged: bool = True


@dataclass(frozen=True)
class FullSizeOutcome:
    """Outcome of training a full-size model.

    Attributes:
        state: To go on from; None where it failed.
        history: Epochs trained, with the metrics after each.
        error: Traceback, where it failed.
        died: True if it failed by the end of its process, so often that it is not to be tried again.
        beside: How many shared the device, itself included: its training took that many times `seconds`.
        device: Name of the device that trained it, of several the first; None if there is only one.
        ended: True if it ended by itself, before its span or at its end, and is not to go on.
        more: Further plain values for the run's record, for the backend that goes on from it.
    """

    task: FullSizeTask
    state: Mapping[str, Any] | None
    history: History
    error: str | None
    seconds: float
    died: bool = False
    beside: int = 1
    device: int | None = None
    ended: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


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


class FullSizeTrainer(Protocol):
    """Trains full-size models."""

    def train_each(self, tasks: Iterable[FullSizeTask]) -> Iterator[FullSizeOutcome]:
        """Train full-size models, each as far as the time budget goes.

        Args:
            tasks: Independent of each other. The next is taken when it can begin.

        Yields:
            The outcome of each, as they are done.
        """
        ...


@dataclass(frozen=True)
class Finished:
    """A group that a device has trained.

    Attributes:
        device: Name of the device that trained it; None if there is only one.
    """

    task: GroupTask
    outcome: GroupOutcome
    seconds: float
    device: int | None = None


class Devices(FullSizeTrainer, Protocol):
    """Devices that a backend opens for a run; each trains one task at a time."""

    def idle(self) -> Sequence[int]:
        """The devices that have nothing to do."""
        ...

    def busy(self) -> bool:
        """Return whether any group is under way."""
        ...

    def speed(self, device: int, kind: str) -> float | None:
        """Epochs of a trial of this kind per second, as measured; None before."""
        ...

    def machine(self, device: int) -> str:
        """Equal for devices that are equally fast."""
        ...

    def cores(self, device: int) -> int:
        """How many groups a device trains at the same time."""
        ...

    def plan(self, device: int, kinds: Mapping[str, Sequence[Trial]]) -> Mapping[str, Widths]:
        """How a device would best group the trials of each kind.

        If its process ends meanwhile, the device is not idle; if its whole machine ends, the answer is empty.
        """
        ...

    def start(self, device: int, task: GroupTask) -> None:
        """Have an idle device train a group."""
        ...

    def finished(self) -> Sequence[Finished]:
        """Groups that are done since the last call; waits for one."""
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
