"""RASDA's decisions on the trials of a Ray Tune experiment: which continue, when, and with how many workers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.utils import flatten_dict

from hydro_rasda.backends.ray.nodes import NodeRequests
from hydro_rasda.backends.ray.ray_private_names import store_results
from hydro_rasda.backends.ray.report_journal import JournalEntry, RungHistory, plain_number
from hydro_rasda.backends.ray.waiting import Cohort, Grants, WaitingQueue
from hydro_rasda.backends.ray.worker_counts import Sizes
from hydro_rasda.schedulers import RASDA, Decision, Held, Placement, Queue, Waiting, place


class Experiment:
    """The trials of an experiment, and all decisions on them."""

    def __init__(
        self,
        rule: RASDA,
        worker: Mapping[str, float],
        metric: Any,
        time_attr: str,
        patience: int,
        autoscale_wait_s: float,
    ) -> None:
        self._rule, self._metric, self._time_attr = rule, metric, time_attr
        self._patience, self._autoscale_wait_s = patience, autoscale_wait_s
        self.sizes = Sizes(worker)
        self._nodes = NodeRequests(worker, autoscale_wait_s)
        self.rung_history = RungHistory()
        self.rung_now: dict[str, int] = {}
        self.queue = WaitingQueue(self._kind)
        self.cohort = Cohort(rule.wait)
        self.grants = Grants(rule)
        # Maps each trial that was told to stop to the milestone at which that was decided.
        self._ending: dict[str, int] = {}

    def decide(self, trial: Trial, t: int, score: float) -> tuple[Decision, int | None]:
        """Decide whether a trial that reports continues, stops or waits.

        Return the decision and the milestone to which the report belongs. The milestone is None if the report belongs
        to none, or if the trial was stopped before.
        """
        if t >= self.rung_history.stopped.get(trial.trial_id, math.inf):
            return Decision.STOP, None
        rungs = self.rung_history.rungs
        milestone = self._rule.open_rung(rungs, trial.trial_id, t)
        if t >= self._rule.max_t:
            self.rung_history.rungs = self._rule.complete(rungs, trial.trial_id, t, score)
            self.rung_history.stopped[trial.trial_id] = self._rule.max_t
            return Decision.STOP, milestone
        self.rung_history.rungs, decision = self._rule.report(rungs, trial.trial_id, t, score)
        return decision, milestone

    def gather(self, trial: Trial, result: Mapping[str, Any]) -> tuple[Decision, int | None]:
        """Let a trial wait at its milestone, unless it is decided at once.

        Return the decision and its milestone; the milestone is None if the trial waits.
        """
        t, score = result[self._time_attr], float(result[self._metric])
        milestone = self._rule.open_rung(self.rung_history.rungs, trial.trial_id, t)
        assert milestone is not None
        if not self.sizes.can_pause(trial, result, t):
            return self._carry_out(milestone, {trial.trial_id: score}, [trial])[trial.trial_id], milestone
        self.cohort.come(trial, milestone, score, self._entry(trial, result, None, Decision.WAIT))
        decided = self.decide_gathered(reporting=trial)
        return (decided[trial.trial_id], milestone) if trial.trial_id in decided else (Decision.WAIT, None)

    def decide_gathered(self, reporting: Trial | None = None) -> dict[str, Decision]:
        """Decide on trials that have waited long enough, or whose cohort is complete.

        Return the decisions. The caller carries out the decision on the trial `reporting`.
        """
        decided: dict[str, Decision] = {}
        for milestone, (scores, undecided) in self.cohort.take().items():
            decided |= self._carry_out(milestone, scores, [trial for trial, _ in undecided.values()])
            for name, (trial, report) in undecided.items():
                if trial is not reporting:
                    self.rung_history.append(replace(report, milestone=milestone, decision=decided[name].value))
                    self._release(trial, milestone, decided[name])
        return decided

    def _carry_out(self, milestone: int, scores: Mapping[str, float], trials: Sequence[Trial]) -> dict[str, Decision]:
        """Decide on trials at a milestone, and on the number of workers of the survivors."""
        self.rung_history.rungs, decisions = self._rule.decide(self.rung_history.rungs, milestone, scores)
        self.grant([t for t in trials if decisions[t.trial_id] is Decision.CONTINUE], trials, milestone)
        return decisions

    def _release(self, trial: Trial, milestone: int, decision: Decision) -> None:
        """Let a trial that waited for its cohort wait for workers instead, or for its end."""
        if decision is Decision.CONTINUE:
            self.queue.join(trial)
        else:
            self.rung_history.stopped[trial.trial_id] = milestone
            self.cohort.stop(trial)

    def grant(self, survivors: Sequence[Trial], decided: Sequence[Trial], milestone: int) -> None:
        """Decide the number of workers of a milestone's survivors; `decided` are the trials decided together."""
        if self._rule.grow == "due":
            return
        names, slots = {trial.trial_id for trial in decided}, self.sizes.slots.count()
        held = sum(self.sizes.of(trial) for trial in self.holding() if trial.trial_id not in names)
        free, idle = max(0, slots - held), self.queue.idle()
        self.grants.give([(trial, self.sizes.of(trial)) for trial in survivors], milestone, slots, free, idle)

    def due(self, trial: Trial, t: int | None = None) -> int:
        """Return how many workers a trial should have after iteration `t`; None is the iteration of its checkpoint."""
        if self._rule.grow == "due":
            return self._rule.workers_at(self.restart_t(trial) if t is None else t)
        return self.grants.of(trial)

    def grows(self, trial: Trial, due: int) -> bool:
        """Return whether a trial can get more workers, at most `due`, or waits for nodes that hold them."""
        if due <= self.sizes.of(trial):
            return False
        count = self.sizes.slots.count()
        self._nodes.ask(due, sum(self.sizes.of(other) for other in self.holding() if other is not trial), count)
        if self._nodes.awaited(due, count) or min(due, count) > self.sizes.of(trial):
            return True  # the caller checks that the trial can be paused; `start` warns if it gets fewer
        self.sizes.fitting(due)  # only for its warning that the cluster holds no more workers
        return False

    def ready(self) -> list[Trial]:
        """Return the trials that may start next: the waiting trials, except those that wait for new nodes."""
        if not self._autoscale_wait_s:
            return self.queue.waiting()
        count = self.sizes.slots.count()
        self._nodes.settle(count)
        return [trial for trial in self.queue.waiting() if not self._nodes.awaited(self.due(trial), count)]

    def milestone_after(self, t: int) -> int:
        """Return the next milestone of a trial after iteration `t`."""
        return self._rule.milestones[self._rule.rungs_survived(t)]

    def waits_still(self, trial: Trial) -> bool:
        """Return whether a trial that is added again waits for a decision, or for its end.

        It then joins its cohort again. It waits for its end if its checkpoint is of the milestone at which it was
        stopped: Ray has not saved that it was.
        """
        report, t = self.rung_history.undecided.pop(trial.trial_id, None), self.restart_t(trial)
        if t >= self.rung_history.stopped.get(trial.trial_id, self._rule.max_t):
            self.cohort.stop(trial)
            return True
        if report is None or int(report.t) != t or report.score is None:
            return False
        milestone = self._rule.open_rung(self.rung_history.rungs, trial.trial_id, t)
        if milestone is None:
            return False
        self.cohort.come(trial, milestone, report.score, report)
        return True

    def holding(self) -> list[Trial]:
        """Return the trials that hold workers, including those that still save a checkpoint before they wait."""
        return self.queue.holding() + self.cohort.saving()

    def fail(self, trial: Trial) -> None:
        """Remove a failed trial, which may begin again. If it was told to stop, it will stop at the same milestone."""
        if (milestone := self._ending.get(trial.trial_id)) is not None:
            self.rung_history.stopped[trial.trial_id] = milestone
        self.leave(trial)

    def leave(self, trial: Trial) -> None:
        """Remove from queue and cohort a trial that is over, or that failed and may begin again."""
        self.queue.leave(trial)
        self.cohort.leave(trial)

    def record(self, trial: Trial, result: Mapping[str, Any], milestone: int | None, decision: Decision) -> None:
        """Append a trial's report, and the decision on it, to the experiment's journal."""
        self.rung_history.append(self._entry(trial, result, milestone, decision))
        if decision is Decision.STOP and milestone is not None:
            self._ending[trial.trial_id] = milestone

    def _entry(
        self, trial: Trial, result: Mapping[str, Any], milestone: int | None, decision: Decision
    ) -> JournalEntry:
        score = float(result[self._metric])
        return JournalEntry(
            trial=trial.trial_id,
            t=plain_number(result[self._time_attr]),
            score=score if math.isfinite(score) else None,
            workers=self.sizes.of(trial),
            milestone=milestone,
            decision=decision.value,
            global_batch_size=plain_number(result.get("global_batch_size")),
        )

    def restart_t(self, trial: Trial) -> int:
        """Return the iteration of a trial's checkpoint; 0 without one, or if its metrics have no number `time_attr`."""
        latest = trial.latest_checkpoint_result
        if latest is None:
            return 0
        metrics = latest.metrics if self._time_attr in latest.metrics else flatten_dict(latest.metrics)
        return int(plain_number(metrics.get(self._time_attr)) or 0)

    def next_start(self, waiting: list[Trial], holding: list[Trial], held: Mapping[str, int], free: int) -> Placement:
        """Choose the trial that starts next, and with how many of the `free` workers.

        `held` maps the id of each trial in `holding`, in the same order, to the number of workers that it holds.
        """
        if not waiting or not free:
            return Placement()
        queue, now = Queue(map(self._waiting, waiting), self.queue.overtaken), time.monotonic()
        back = self.queue.expected_back(holding, self.rung_now, now)
        placement = place(queue, Held(zip(held, held.values(), back)), free, self._patience, now)
        if placement.start is not None:
            queue.start(placement.start.trial)
        self.queue.overtaken = queue.overtaken
        return placement

    def _kind(self, trial: Trial) -> tuple[int, int]:
        return self._rule.rungs_survived(self.restart_t(trial)), self.due(trial)

    def _waiting(self, trial: Trial) -> Waiting:
        rung, workers = self._kind(trial)
        return Waiting(trial.trial_id, workers, rung, self.queue.usual_seconds(rung))

    def start(self, trial: Trial, workers: int) -> None:
        due = self._waiting(trial)
        self.sizes.fitting(due.workers)
        self.sizes.resize(trial, workers)
        self.sizes.tell_repeats(trial, self.restart_t(trial))
        store_results(trial)
        self.queue.start(trial, due.rung)
        self.rung_now[trial.trial_id] = due.rung
        self.cohort.begin(trial, self._rule.milestones[due.rung])
