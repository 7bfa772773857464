"""RASDA as a Ray Tune scheduler, for any Ray Tune script.

The rules are those of `hydro_rasda.schedulers`; this file knows Ray alone. A survivor of a milestone is paused, which
frees its placement group, and goes on from its checkpoint in one of `scaling_factor` times the bundles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.result import DEFAULT_METRIC
from ray.tune.schedulers import TrialScheduler

from hydro_rasda.backends.ray.journal import Journal, JournalEntry, replay
from hydro_rasda.backends.ray.queue import WaitingQueue
from hydro_rasda.backends.ray.sizes import Sizes
from hydro_rasda.backends.ray.staging import ControllerStage
from hydro_rasda.checks import check_int
from hydro_rasda.schedulers import (
    RASDA,
    AshaState,
    Decision,
    Held,
    Mode,
    Placement,
    Queue,
    Waiting,
    place,
    worker_slots,
)


class RASDAScheduler(TrialScheduler):  # type: ignore[misc]
    """Halving in time, doubling in space: a drop-in for Ray Tune's `ASHAScheduler`.

    At its milestones it stops trials as `ASHAScheduler` does, and trains the survivors on `scaling_factor` times their
    workers. A worker is one bundle of the trial's placement group, so that a trainable learns its number of workers
    from `len(tune.get_context().get_trial_resources().bundles)`; `elastic` turns a training function into one that uses
    them. Resources given by `tune.with_resources` are overruled.

    Promoted trials start before new ones, deepest rung first, see `hydro_rasda.schedulers.place`. The rungs and all
    reports are kept in `rasda.jsonl` in the experiment's folder, from which `Tuner.restore` goes on.

    Args:
        max_t: Iterations after which a trial is done (`max_I` in the paper).
        grace_period: First milestone (`min_I`).
        reduction_factor: `rf`: one in `rf` trials survives a milestone.
        scaling_factor: `sf`: a survivor's workers grow by it, and so does the time to the next milestone:
            milestones lie at `grace_period * sf**k` (the paper's eq. 3), where ASHA's lie at
            `grace_period * rf**k`.
        workers: Workers of a new trial.
        resources_per_worker: In Ray's words; one CPU by default.
        max_workers: No trial gets more; None for what the cluster holds.
        metric: What trials report; None to take `TuneConfig`'s.
        mode: "min" or "max"; None to take `TuneConfig`'s.
        time_attr: What counts iterations in a report; a whole number that grows.
        patience: Starts out of turn before the longest waiting trial comes first.

    Raises:
        ValueError: where a number is out of range, or `mode` is unknown. `Tuner.fit` raises it where no worker fits on
            any node, a new trial does not fit on the cluster, or `reuse_actors` is set for a class that cannot be
            reset.
    """

    # Reports handed over in bulk could pass a milestone before it is decided.
    _supports_buffered_results = False

    def __init__(
        self,
        max_t: int = 100,
        grace_period: int = 1,
        reduction_factor: int = 2,
        scaling_factor: int = 2,
        workers: int = 1,
        resources_per_worker: Mapping[str, float] | None = None,
        max_workers: int | None = None,
        metric: str | None = None,
        mode: Mode | None = None,
        time_attr: str = "training_iteration",
        patience: int = 8,
    ) -> None:
        super().__init__()
        numbers = (max_t, grace_period, reduction_factor, scaling_factor, workers, max_workers)
        self._rule = RASDA(*numbers, mode="min" if mode is None else mode)
        self._mode = mode
        self._metric: Any = metric
        self._time_attr = time_attr
        self._patience = patience
        self._worker = {"CPU": 1.0} if resources_per_worker is None else dict(resources_per_worker)
        worker_slots((), self._worker)
        self._sizes = Sizes(self._worker)
        self._journal: Journal | None = None
        self._before: set[str] = set()
        self._stopped_before: dict[str, int] = {}
        self._state: AshaState | None = None
        self._earlier = AshaState()
        self._known: set[str] = set()
        self._rung_now: dict[str, int] = {}
        self._queue = WaitingQueue(self._rung)
        self._elsewhere = 0

    def hold(self, workers: int) -> None:
        """Counts so many of the cluster's workers as held by others than this scheduler's trials, until told otherwise.

        Trials that find too few left wait; what they are due stays as it is.

        Raises:
            ValueError: where `workers` is negative.
        """
        check_int("workers", workers, at_least=0)
        self._elsewhere = workers

    def begin_with(self, rungs: AshaState) -> None:
        """Measures trials by scores of before this experiment, too; those that go on here are named by their ids."""
        self._earlier, self._state = rungs, None

    @property
    def rule(self) -> RASDA:
        """The rule that decides, without Ray."""
        return self._rule

    def set_search_properties(self, metric: str | None, mode: Mode | None, **spec: Any) -> bool:
        """Takes metric and mode from `TuneConfig`; False where both sides name one."""
        if (self._metric and metric) or (self._mode and mode):
            return False
        self._metric = metric or self._metric
        self._mode = mode or self._mode
        if self._mode:
            self._metric = self._metric or DEFAULT_METRIC
            self._rule = replace(self._rule, mode=self._mode)
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Gives a new trial its first size, and a restored one the size that its checkpoint is due."""
        if self._journal is None:
            self._begin(tune_controller, trial)
        self._know(trial)
        if trial.is_finished():
            return
        # Ray names a trial's folder when it starts it, and then fails to list the trials that never started.
        trial.init_local_path()
        self._queue.join(trial)
        self._sizes.resize(trial, self._sizes.fitting(self._rule.workers_at(self._restart_t(trial))))

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Stops a trial, lets it go on, or pauses it until it can go on with more workers."""
        if self._time_attr not in result or self._metric not in result:
            return str(TrialScheduler.CONTINUE)
        t, score = result[self._time_attr], float(result[self._metric])
        self._rung_now[trial.trial_id] = self._rule.rungs_survived(t)
        decision, milestone = self._decide(trial, t, score)
        self._record(trial, result, milestone, decision)
        result["hyperband_info"] = {} if milestone is None else {"budget": milestone}
        if decision is Decision.STOP:
            # Ray tells the searcher of a stopped trial's end only; BOHB learns from milestones.
            tune_controller.search_alg.on_trial_result(trial.trial_id, result)
            return str(TrialScheduler.STOP)
        grows = self._sizes.fitting(self._rule.workers_at(t)) > self._sizes.of(trial)
        if not grows or not self._sizes.can_pause(trial, result, t):
            return str(TrialScheduler.CONTINUE)
        self._queue.join(trial)
        return str(TrialScheduler.PAUSE)

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Keeps the last score of a trial, by which later ones are measured."""
        self._queue.leave(trial)
        if self._time_attr not in result or self._metric not in result:
            return
        before, t = self._rungs(), result[self._time_attr]
        milestone = self._rule.halving.open_rung(before, trial.trial_id, t)
        if milestone is not None:
            self._state = before.recorded(milestone, trial.trial_id, float(result[self._metric]))
            self._record(trial, result, milestone, Decision.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Frees the trial's place; Ray adds the trial again where it may be repeated."""
        self._queue.leave(trial)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        """Frees the trial's place."""
        self._queue.leave(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The trial that starts next; None where all have to wait."""
        stage = ControllerStage(tune_controller)
        stage.clear(self._queue)
        stage.call_back(self._queue, self._sizes)
        waiting, holding = self._queue.waiting(), self._queue.holding()
        held = {trial.trial_id: self._sizes.of(trial) for trial in holding}
        free = max(0, self._sizes.slots.count() - sum(held.values()) - self._elsewhere)
        placement = self._place(waiting, holding, held, free)
        chosen = None
        if placement.start is not None:
            chosen = next(trial for trial in waiting if trial.trial_id == placement.start.trial)
            waiting.remove(chosen)
            free -= placement.start.workers
            self._start(chosen, placement.start.workers)
        stage.limit(waiting, holding, free, chosen)
        return chosen

    def debug_string(self) -> str:
        """One line for Ray's progress table."""
        rungs = ", ".join(f"{m}: {len(rung)} trials" for m, rung in sorted(self._rungs().rungs.items()))
        return f"Using RASDA: workers {self._rule.workers}, milestones reached by {rungs or 'none'}"

    def _begin(self, controller: Any, trial: Trial) -> None:
        if not self._metric or not self._mode:
            raise ValueError(
                f"`metric` is {self._metric!r} and `mode` is {self._mode!r}, but both must be given, "
                "to RASDAScheduler or to tune.TuneConfig"
            )
        self._sizes.slots.check(self._rule.workers)
        ControllerStage(controller).check_reuse(trial)
        self._journal = Journal(trial.storage.storage_filesystem, trial.storage.experiment_fs_path)
        # A killed run may have decided more than Ray had saved: what a restored trial repeats is not
        # decided anew.
        self._before = {entry.trial for entry in self._journal.entries}
        self._stopped_before = {
            entry.trial: entry.milestone
            for entry in self._journal.entries
            if entry.decision == Decision.STOP and entry.milestone is not None
        }

    def _know(self, trial: Trial) -> None:
        """Count a trial's scores, those of an earlier process among them."""
        if trial.trial_id in self._before and trial.trial_id not in self._known:
            self._state = None
        self._known.add(trial.trial_id)

    def _rungs(self) -> AshaState:
        if self._state is None:
            entries = self._journal.entries if self._journal else ()
            self._state = replay(entries, self._known, self._earlier)
        return self._state

    def _decide(self, trial: Trial, t: int, score: float) -> tuple[Decision, int | None]:
        before = self._rungs()
        if t >= self._stopped_before.get(trial.trial_id, self._rule.max_t):
            return Decision.STOP, None
        milestone = self._rule.halving.open_rung(before, trial.trial_id, t)
        self._state, verdict = self._rule.report(before, trial.trial_id, t, score)
        return verdict.decision, milestone

    def _record(self, trial: Trial, result: Mapping[str, Any], milestone: int | None, decision: Decision) -> None:
        assert self._journal is not None
        score = float(result[self._metric])
        self._journal.append(
            JournalEntry(
                trial=trial.trial_id,
                t=result[self._time_attr],
                score=score if math.isfinite(score) else None,
                workers=self._sizes.of(trial),
                milestone=milestone,
                decision=decision.value,
                global_batch_size=result.get("global_batch_size"),
            )
        )

    def _restart_t(self, trial: Trial) -> int:
        latest = trial.latest_checkpoint_result
        return int(latest.metrics.get(self._time_attr, 0)) if latest else 0

    def _place(self, waiting: list[Trial], holding: list[Trial], held: Mapping[str, int], free: int) -> Placement:
        if not waiting or not free:
            return Placement()
        queue, now = Queue(map(self._waiting, waiting), self._queue.overtaken), time.monotonic()
        back = self._queue.expected_back(holding, self._rung_now, now)
        elsewhere = ("elsewhere", self._elsewhere, math.inf)
        placement = place(queue, Held([elsewhere, *zip(held, held.values(), back)]), free, self._patience, now)
        if placement.start is not None:
            queue.start(placement.start.trial)
        self._queue.overtaken = queue.overtaken
        return placement

    def _rung(self, trial: Trial) -> int:
        return self._rule.rungs_survived(self._restart_t(trial))

    def _waiting(self, trial: Trial) -> Waiting:
        t = self._restart_t(trial)
        rung = self._rule.rungs_survived(t)
        return Waiting(trial.trial_id, self._rule.workers_at(t), rung, self._queue.usual_seconds(rung))

    def _start(self, trial: Trial, workers: int) -> None:
        due = self._waiting(trial)
        self._sizes.fitting(due.workers)
        self._sizes.resize(trial, workers)
        self._queue.start(trial, due.rung)
        self._rung_now[trial.trial_id] = due.rung
