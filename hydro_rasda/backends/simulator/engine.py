"""The event loop: trials, workers and virtual time.

Events are the ends of epochs, the failures of nodes and their repairs. Between milestones a rule is not asked: by the
contract of ``report`` it would change nothing there.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from hydro_rasda.schedulers import Decision, Queue, Running, Waiting, place

from .cluster import Allocation, Cluster, Slots
from .cost import CostModel, Spread
from .outcome import Outcome, Segment, TrialOutcome
from .resize import Growth
from .rules import AnyPlan
from .workload import Workload

LOOKAHEAD = 16
"""New trials that placement sees at a time, as a tuner has few pending ones; they are all due the same workers."""

MAX_RESTARTS = 1000
"""Failures of one trial after which a cluster is taken to be too unreliable to ever finish."""

Event = tuple[float, int, Literal["epoch", "failure", "repair"], int, int]
"""Time, sequence number, kind, trial or node, and the segment that an epoch belongs to."""


@dataclass
class _Trial:
    name: str
    scores: list[float]
    work: float
    workers: int
    epoch: int = 0
    saved: int = 0
    rung: int = 0
    segment: int = 0
    allocation: Allocation = field(default_factory=dict)
    spread: Spread = field(default_factory=lambda: Spread(1))
    since: float = 0.0
    until: float = math.inf
    started: float = 0.0
    ended: float = 0.0
    epoch_seconds: float = 0.0
    waited: float = 0.0
    restarts: int = 0
    lost_epochs: int = 0


def simulate(plan: AnyPlan, workload: Workload, cluster: Cluster, cost: CostModel, seed: int = 0) -> Outcome:
    """Runs all trials of a workload in virtual time.

    Args:
        plan: The scheduler.
        workload: The trials, which start in the order of the table as workers are free.
        cluster: Where they run.
        cost: What an epoch, a restart and a checkpoint take.
        seed: Draws epoch noise, slow nodes and failures; one seed, one outcome.

    Returns:
        Run time, GPU time and what became of each trial.

    Raises:
        ValueError: the curves are shorter than ``max_t``, or a new trial is due more workers than there are.

    >>> from hydro_rasda.backends.simulator import FixedWorkers, Plan, power_law
    >>> from hydro_rasda.schedulers import AsyncSuccessiveHalving
    >>> plan = Plan(FixedWorkers(AsyncSuccessiveHalving(max_t=9, reduction_factor=3), workers=2))
    >>> cost = CostModel(step_seconds=1.0, steps=10)
    >>> simulate(plan, power_law(trials=1, epochs=9, seed=0), Cluster.uniform(4), cost).seconds
    45.0
    """
    if workload.epochs < plan.rule.max_t:
        raise ValueError(f"`workload` has {workload.epochs} epochs, but must have >= max_t ({plan.rule.max_t})")
    if plan.rule.workers > cluster.gpus:
        raise ValueError(f"`workers` is {plan.rule.workers}, but must be <= the cluster's {cluster.gpus} GPUs")
    return _Simulation(plan, workload, cluster, cost, seed).run()


class _Simulation:
    def __init__(self, plan: AnyPlan, workload: Workload, cluster: Cluster, cost: CostModel, seed: int) -> None:
        self._plan, self._cluster, self._cost = plan, cluster, cost
        self._rng = random.Random(seed)
        self._slots = Slots(cluster, self._rng)
        self._rule = plan.rule
        self._state: Any = plan.rule.init()
        self._milestones = plan.rule.milestones
        curves = zip(workload.scores[:, : plan.rule.max_t].tolist(), workload.work.tolist())
        self._trials = [_Trial(str(i), c, w, plan.rule.workers) for i, (c, w) in enumerate(curves)]
        self._mode = workload.mode
        self._queue = Queue()
        self._begun = 0
        self._fresh = 0  # of the queue, those that have never run
        self._alive = len(self._trials)
        self._running: dict[int, _Trial] = {}
        self._heap: list[Event] = []
        self._sequence = 0
        self._events = 0
        self._now = 0.0
        self._segments: list[Segment] = []
        self._seconds: dict[int, float] = {}
        self._tried: dict[int, int] = {}

    def run(self) -> Outcome:
        if math.isfinite(self._cluster.mtbf):
            for node in range(self._slots.nodes):
                self._push(self._rng.expovariate(1 / self._cluster.mtbf), "failure", node)
        self._fill()
        while self._alive:
            self._now, _, kind, subject, segment = heapq.heappop(self._heap)
            if kind == "epoch":
                changed = segment == self._trials[subject].segment and self._end_epoch(subject)
            else:
                changed = self._fail(subject) if kind == "failure" else self._repair(subject)
            self._events += 1
            if changed:
                self._fill()
        return self._outcome()

    def _push(self, delay: float, kind: Literal["epoch", "failure", "repair"], subject: int, segment: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self._now + delay, self._sequence, kind, subject, segment))

    def _fill(self) -> None:
        """Starts whom placement lets start."""
        self._admit()
        if not self._someone_fits():
            return
        held = [Running(t.spread.workers, max(0.0, t.until - self._now)) for t in self._running.values()]
        while self._slots.free:
            self._queue, placement = place(self._queue, held, self._slots.free, self._plan.patience)
            if placement.start is None:
                return
            trial = self._start(int(placement.start.trial), placement.start.workers)
            held.append(Running(trial.spread.workers, trial.until - self._now))
            self._admit()

    def _someone_fits(self) -> bool:
        """Whether placement is worth asking: with nodes down it may also lower what a trial is due."""
        return bool(self._slots.free) and (
            self._slots.up < self._cluster.gpus
            or any(waiting.workers <= self._slots.free for waiting in self._queue.waiting)
        )

    def _admit(self) -> None:
        """Shows placement the next new trials, which have waited longest of all."""
        if self._fresh < LOOKAHEAD and self._begun < len(self._trials):
            new = self._trials[self._begun : self._begun + LOOKAHEAD - self._fresh]
            waiting = list(self._queue.waiting)
            waiting[self._fresh : self._fresh] = [self._waiting(trial) for trial in new]
            self._queue = Queue(tuple(waiting), self._queue.overtaken)
            self._begun += len(new)
            self._fresh += len(new)

    def _waiting(self, trial: _Trial) -> Waiting:
        spread = Spread(trial.workers, math.ceil(trial.workers / self._cluster.kinds[0].gpus))
        expected = self._cost.restart_seconds + self._to_milestone(trial, spread)
        return Waiting(trial.name, trial.workers, trial.rung, expected)

    def _to_milestone(self, trial: _Trial, spread: Spread) -> float:
        """Expected seconds of training until the trial's next milestone."""
        epochs = next(m for m in self._milestones if m > trial.epoch) - trial.epoch
        storage = self._cluster.storage / max(1, len(self._running))
        return epochs * self._cost.epoch(spread, trial.work, storage)

    def _start(self, index: int, workers: int) -> _Trial:
        trial = self._trials[index]
        self._fresh -= trial.segment == 0
        trial.allocation = self._slots.take(workers)
        trial.spread = self._slots.spread(trial.allocation)
        trial.waited += self._now - trial.since
        trial.started = self._now
        self._running[index] = trial
        trial.until = self._now + self._cost.restart_seconds + self._to_milestone(trial, trial.spread)
        self._next_epoch(index, self._cost.restart_seconds)
        return trial

    def _next_epoch(self, index: int, delay: float = 0.0) -> None:
        trial = self._trials[index]
        seconds = self._cost.epoch(trial.spread, trial.work, self._cluster.storage / len(self._running))
        if self._cost.epoch_noise:
            seconds *= self._rng.lognormvariate(0.0, self._cost.epoch_noise)
        trial.epoch_seconds = seconds
        if trial.epoch + 1 in self._milestones:
            delay += self._cost.checkpoint_seconds
        self._push(delay + seconds, "epoch", index, trial.segment)

    def _end_epoch(self, index: int) -> bool:
        """Returns whether workers came free."""
        trial = self._trials[index]
        trial.epoch += 1
        self._measure(trial)
        if trial.epoch not in self._milestones:
            self._next_epoch(index)
            return False
        trial.saved = trial.epoch
        score = trial.scores[trial.epoch - 1]
        self._state, verdict = self._rule.report(self._state, trial.name, trial.epoch, score)
        if verdict.decision is Decision.STOP:
            self._end(index, score)
            return True
        trial.rung = self._milestones.index(trial.epoch) + 1
        workers = min(self._plan.resize(self._growth(trial, verdict.workers)), self._cluster.gpus)
        if workers != trial.workers:
            trial.workers = workers
            self._requeue(index)
            return True
        trial.until = self._now + self._to_milestone(trial, trial.spread)
        self._next_epoch(index)
        return False

    def _measure(self, trial: _Trial) -> None:
        workers = trial.spread.workers
        count = self._tried[workers] = self._tried.get(workers, 0) + 1
        before = self._seconds.get(workers, 0.0)
        self._seconds[workers] = before + (trial.epoch_seconds / trial.work - before) / count

    def _growth(self, trial: _Trial, due: int) -> Growth:
        return Growth(trial.workers, due, self._rule.workers, self._alive, self._slots.up, self._seconds)

    def _end(self, index: int, score: float) -> None:
        trial = self._trials[index]
        self._state = self._rule.complete(self._state, trial.name, trial.epoch, score)
        self._release(index)
        trial.ended = self._now
        self._alive -= 1

    def _requeue(self, index: int) -> None:
        self._release(index)
        trial = self._trials[index]
        trial.since = self._now
        self._queue = self._queue.add(self._waiting(trial))

    def _release(self, index: int) -> None:
        trial = self._running.pop(index)
        self._slots.give(trial.allocation)
        self._segments.append(Segment(index, trial.started, self._now, trial.spread.workers))
        trial.segment += 1

    def _fail(self, node: int) -> bool:
        self._slots.fail(node)
        self._push(self._cluster.repair_seconds, "repair", node)
        for index in [i for i, trial in self._running.items() if node in trial.allocation]:
            trial = self._trials[index]
            trial.lost_epochs += trial.epoch - trial.saved
            trial.epoch = trial.saved
            trial.restarts += 1
            if trial.restarts > MAX_RESTARTS:
                raise RuntimeError(
                    f"trial {index} was hit by {MAX_RESTARTS} node failures: `mtbf` ({self._cluster.mtbf:g} s) is too "
                    "short for its epochs between two milestones"
                )
            self._requeue(index)
        return True

    def _repair(self, node: int) -> bool:
        self._slots.repair(node)
        self._push(self._rng.expovariate(1 / self._cluster.mtbf), "failure", node)
        return True

    def _outcome(self) -> Outcome:
        records = tuple(
            TrialOutcome(t.epoch, t.scores[t.epoch - 1], t.ended, t.waited, t.restarts, t.lost_epochs)
            for t in self._trials
        )
        return Outcome(records, tuple(self._segments), self._cluster.gpus, self._rule.max_t, self._mode, self._events)
