"""The event loop that simulates a search in virtual time.

Events are the end of an epoch, the failure of a node, and its repair. If trials share a storage of finite bandwidth,
the beginning and the end of reading an epoch's data are events, too. If trials wait for others at a milestone, the end
of a wait is an event. Rules are asked only at milestones, because by the contract of `Rule.report` they decide nothing
between milestones.

Here, an epoch is a unit of progress. If a larger batch needs more examples, an epoch is more than one pass over the
data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from hydro_rasda.common.argument_checks import is_int
from hydro_rasda.schedulers import Decision, Growth, Held, MilestoneBarrier, Queue, Waiting, place
from hydro_rasda.simulator.clock import Clock, SharedStorage
from hydro_rasda.simulator.cluster import Cluster, Launching, SimulatedTrial, Slots
from hydro_rasda.simulator.outcome import Outcome, Segment, TrialOutcome
from hydro_rasda.simulator.rules import AnyPlan
from hydro_rasda.simulator.training_time import CostModel, Spread
from hydro_rasda.simulator.workload import Workload

LOOKAHEAD = 16
"""Number of new trials that wait at a time; a real tuner also has few pending trials. More would change no decision,
because all new trials get the same number of workers and start in order."""

MAX_RESTARTS = 1000
"""Most node failures that may hit one trial. After more, the simulation raises RuntimeError, as it might never end."""


class Simulation:
    """One search in virtual time; see `simulate`."""

    def __init__(self, plan: AnyPlan, workload: Workload, cluster: Cluster, cost: CostModel, seed: int) -> None:
        self._plan, self._cluster, self._cost = plan, cluster, cost
        self._rng = random.Random(seed)
        self._slots = Slots(cluster, self._rng)
        self._gpus = cluster.gpus
        self._rule = plan.rule
        self._state: Any = plan.rule.init()
        self._resize = plan.resize or plan.rule.resize
        self._gathering = MilestoneBarrier(plan.rule.wait) if plan.rule.wait else None
        self._milestones = plan.rule.milestones
        self._rungs = {milestone: rung for rung, milestone in enumerate(self._milestones, start=1)}
        reads = cost.dataset_bytes > 0 and math.isfinite(cluster.storage)  # if True, trials slow each other's reading
        self._storage = SharedStorage(cluster.storage) if reads else None
        self._training = cache(cost.training)
        curves = zip(workload.scores[:, : plan.rule.max_t].tolist(), workload.work.tolist())
        self._trials = [SimulatedTrial(str(i), c, w, plan.rule.workers) for i, (c, w) in enumerate(curves)]
        self._mode = workload.mode
        self._queue = Queue()
        self._held = Held()
        self._begun = 0
        self._fresh = 0  # number of queued trials that have never run
        self._alive = len(self._trials)
        self._running: dict[int, SimulatedTrial] = {}
        self._clock = Clock()
        self._launching = Launching(cluster, cost)
        self._events = 0
        self._segments: list[Segment] = []
        self._seconds: dict[int, float] = {}
        self._tried: dict[int, int] = {}

    def run(self) -> Outcome:
        if math.isfinite(self._cluster.mtbf):
            for node in range(self._slots.nodes):
                self._clock.after(self._rng.expovariate(1 / self._cluster.mtbf), "failure", node)
        for trial in self._trials:
            self._expect(trial)
        self._fill()
        while self._alive:
            if self._storage and self._storage.due() <= self._clock.due():
                self._end_reading(self._storage)
                continue
            kind, subject, segment = self._clock.advance()
            if kind == "epoch":
                changed = segment == self._trials[subject].segment and self._end_epoch(subject)
            elif kind == "reading":
                self._begin_reading(subject, segment)
                continue
            elif kind == "patience":
                self._decide_gathered()
                self._fill()
                continue
            else:
                changed = self._fail(subject) if kind == "failure" else self._repair(subject)
            self._events += 1
            if changed:
                self._decide_gathered()
                self._fill()
        return self._outcome()

    def _fill(self) -> None:
        self._admit()
        while self._someone_fits():
            placement = place(self._queue, self._held, self._slots.free, self._plan.patience, self._clock.now)
            if placement.start is None:
                return
            self._queue.start(placement.start.trial)
            self._start(int(placement.start.trial), placement.start.workers)
            self._admit()

    def _someone_fits(self) -> bool:
        """Return whether any trial can start.

        While nodes are down, a trial that needs too many workers starts with fewer.
        """
        free = self._slots.free
        if not free or not self._queue:
            return False
        return self._slots.up < self._gpus or self._queue.fewest <= free

    def _admit(self) -> None:
        """Queue the next new trials, before the trials that have run, because new trials have waited longer."""
        while self._fresh < LOOKAHEAD and self._begun < len(self._trials):
            self._queue.add(self._waiting(self._trials[self._begun]), self._begun - len(self._trials))
            self._begun += 1
            self._fresh += 1

    def _waiting(self, trial: SimulatedTrial) -> Waiting:
        spread = Spread(trial.workers, math.ceil(trial.workers / self._cluster.kinds[0].gpus))
        expected = self._cost.restart_seconds + self._to_milestone(trial, spread)
        return Waiting(trial.name, trial.workers, trial.rung, expected)

    def _to_milestone(self, trial: SimulatedTrial, spread: Spread) -> float:
        epochs = self._milestones[trial.rung] - trial.epoch
        return epochs * self._epoch_seconds(self._training(spread) * trial.work) * self._cost.passes(spread.workers)

    def _epoch_seconds(self, training: float) -> float:
        """Return the expected seconds of an epoch whose steps take `training` seconds, if as many trials run as now."""
        return self._cost.with_reading(training, self._cluster.storage / max(1, len(self._running)))

    def _start(self, index: int, workers: int) -> None:
        trial = self._trials[index]
        self._fresh -= trial.segment == 0
        trial.allocation = self._slots.take(workers)
        trial.spread = self._slots.spread(trial.allocation)
        trial.training = self._training(trial.spread) * trial.work
        trial.waited += self._clock.now - trial.since
        trial.started = self._clock.now
        self._running[index] = trial
        self._on_its_way(trial)
        if self._storage:
            self._storage.share(len(self._running), self._clock.now)
        trial.first_step = self._launching.first_step(workers, self._clock.now)
        self._held.add(trial.name, workers, trial.first_step + self._to_milestone(trial, trial.spread))
        self._next_epoch(index, trial.first_step - self._clock.now)

    def _next_epoch(self, index: int, delay: float = 0.0) -> None:
        trial = self._trials[index]
        trial.noise = self._cost.passes(trial.spread.workers)
        if self._cost.epoch_noise:
            trial.noise *= self._rng.lognormvariate(0.0, self._cost.epoch_noise)
        if self._storage:
            self._clock.after(delay, "reading", index, trial.segment)
            return
        trial.epoch_seconds = self._cost.with_reading(trial.training, math.inf) * trial.noise
        self._clock.after(delay + trial.epoch_seconds + self._checkpoint(trial), "epoch", index, trial.segment)

    def _checkpoint(self, trial: SimulatedTrial) -> float:
        return self._cost.checkpoint_seconds if trial.epoch + 1 in self._rungs else 0.0

    def _begin_reading(self, index: int, segment: int) -> None:
        trial = self._trials[index]
        if self._storage and segment == trial.segment:
            trial.began = self._clock.now
            self._storage.begin(index, self._cost.dataset_bytes * trial.noise, self._clock.now)

    def _end_reading(self, storage: SharedStorage) -> None:
        self._clock.now = storage.due()
        index = storage.end_next()
        trial = self._trials[index]
        read = self._clock.now - trial.began
        trial.epoch_seconds = max(trial.training * trial.noise, read) + self._cost.serial_seconds * trial.noise
        self._clock.after(trial.epoch_seconds - read + self._checkpoint(trial), "epoch", index, trial.segment)

    def _end_epoch(self, index: int) -> bool:
        """End an epoch of a trial; at a milestone, decide on the trial. Return whether workers were freed."""
        trial = self._trials[index]
        trial.epoch += 1
        self._measure(trial)
        if trial.epoch not in self._rungs:
            self._next_epoch(index)
            return False
        trial.saved = trial.epoch
        score = trial.scores[trial.epoch - 1]
        self._state, decision = self._rule.report(self._state, trial.name, trial.epoch, score)
        return self._wait(index, score) if decision is Decision.WAIT else self._carry_out({index: decision})

    def _wait(self, index: int, score: float) -> bool:
        """Let a trial wait at its milestone without workers, unless it is decided at once."""
        assert self._gathering is not None
        trial = self._trials[index]
        self._gathering.come(trial.name, trial.epoch, score, self._clock.now)
        self._decide_gathered()
        if self._gathering.waits(trial.name):
            self._release(index)
            trial.since = self._clock.now
            if (until := self._gathering.until(trial.epoch)) < math.inf:
                self._clock.at(until, "patience", trial.epoch)
        return True

    def _decide_gathered(self) -> None:
        """Decide on trials that have waited long enough, or whose cohort has arrived."""
        while self._gathering and (taken := self._gathering.take(self._clock.now)):
            for milestone, scores in taken.items():
                self._state, decisions = self._rule.decide(self._state, milestone, scores)
                self._carry_out({int(name): decision for name, decision in decisions.items()})

    def _carry_out(self, decisions: Mapping[int, Decision]) -> bool:
        """Carry out decisions on trials at a milestone; return whether workers were freed."""
        going_on = [index for index, decision in decisions.items() if decision is not Decision.STOP]
        for index, decision in decisions.items():
            if decision is Decision.STOP:
                self._end(index)
        free = self._slots.free + sum(self._trials[i].spread.workers for i in going_on if i in self._running)
        sharing = len(going_on) + len(self._queue)
        went_on = [self._go_on(index, free, sharing) for index in going_on]
        return len(going_on) < len(decisions) or not all(went_on)

    def _go_on(self, index: int, free: int, sharing: int) -> bool:
        """Let a survivor continue; return True if it keeps its workers, False if it queues for workers."""
        trial = self._trials[index]
        trial.rung = self._rungs[trial.epoch]
        workers = self._resize(
            Growth(
                held=trial.workers,
                due=self._rule.workers_at(trial.epoch),
                base=self._rule.workers,
                alive=self._alive,
                capacity=self._slots.up,
                seconds=self._seconds,
                free=free,
                sharing=sharing,
                own=trial.own_seconds,
                noise_scale=self._cost.noise_scale,
            )
        )
        if not is_int(workers) or workers < 1:
            raise ValueError(f"`resize` gave {workers}, but must give an integer >= 1")
        trial.workers = min(workers, self._gpus)
        # Compare with the workers that the trial really has: fewer than granted if nodes were down when it started.
        if index not in self._running or min(trial.workers, self._slots.up) != trial.spread.workers:
            self._requeue(index)
            return False
        self._on_its_way(trial)
        self._held.expect(trial.name, self._clock.now + self._to_milestone(trial, trial.spread))
        self._next_epoch(index)
        return True

    def _expect(self, trial: SimulatedTrial) -> None:
        if self._gathering:
            self._gathering.expect(trial.name, self._milestones[trial.rung])

    def _on_its_way(self, trial: SimulatedTrial) -> None:
        if self._gathering:
            self._gathering.begin(trial.name, self._milestones[trial.rung], self._clock.now)

    def _measure(self, trial: SimulatedTrial) -> None:
        workers = trial.spread.workers
        count = self._tried[workers] = self._tried.get(workers, 0) + 1
        before = self._seconds.get(workers, 0.0)
        seconds = trial.epoch_seconds / self._cost.passes(workers)
        self._seconds[workers] = before + (seconds / trial.work - before) / count
        trial.own_seconds[workers] = seconds

    def _end(self, index: int) -> None:
        trial = self._trials[index]
        self._state = self._rule.complete(self._state, trial.name, trial.epoch, trial.scores[trial.epoch - 1])
        if index in self._running:
            self._release(index)
        if self._gathering:
            self._gathering.leave(trial.name)
        trial.ended = self._clock.now
        self._alive -= 1

    def _requeue(self, index: int) -> None:
        trial = self._trials[index]
        if index in self._running:
            self._release(index)
            trial.since = self._clock.now
        self._expect(trial)
        self._queue.add(self._waiting(trial))

    def _release(self, index: int) -> None:
        trial = self._running.pop(index)
        if self._storage:
            self._storage.stop(index)
            self._storage.share(len(self._running), self._clock.now)
        self._held.remove(trial.name)
        self._slots.give(trial.allocation)
        now = self._clock.now
        restart = min(trial.first_step, now) - trial.started
        self._segments.append(Segment(index, trial.started, now, trial.spread.workers, restart))
        trial.segment += 1

    def _fail(self, node: int) -> bool:
        self._slots.fail(node)
        self._clock.after(self._cluster.repair_seconds, "repair", node)
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
        self._clock.after(self._rng.expovariate(1 / self._cluster.mtbf), "failure", node)
        return True

    def _outcome(self) -> Outcome:
        records = tuple(
            TrialOutcome(t.epoch, t.scores[t.epoch - 1], t.ended, t.waited, t.restarts, t.lost_epochs)
            for t in self._trials
        )
        return Outcome(records, tuple(self._segments), self._cluster.gpus, self._rule.max_t, self._mode, self._events)
