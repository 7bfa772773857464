"""RASDA as a Ray Tune scheduler, for any Ray Tune script.

The rules are in `hydro_rasda.schedulers`; this file only connects them to Ray. A survivor of a milestone is paused,
which frees its placement group. It resumes from its checkpoint in a placement group with `scaling_factor` times the
bundles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.result import DEFAULT_METRIC
from ray.tune.schedulers import TrialScheduler

from hydro_rasda.backends.ray.experiment import Experiment
from hydro_rasda.backends.ray.ray_private_names import ControllerStage
from hydro_rasda.backends.ray.report_journal import FILE_NAME, as_float, plain_number
from hydro_rasda.common.argument_checks import check_int, check_mode, check_text, is_number, require
from hydro_rasda.schedulers import RASDA, Decision, Mode, worker_slots
from hydro_rasda.schedulers.rasda import Grow

_SAVED = f"a RASDAScheduler keeps its state in the experiment's folder ({FILE_NAME}), where `Tuner.restore` finds it"


class RASDAScheduler(TrialScheduler):  # type: ignore[misc]
    """Halving in time, doubling in space: a replacement for Ray Tune's `ASHAScheduler`.

    At its milestones, it stops trials like `ASHAScheduler`, and trains the survivors on `scaling_factor` times their
    workers. It also stops a trial whose metric is NaN at a milestone, which `ASHAScheduler` lets continue. For an
    iteration without a measurement, report the last value again, or None: a report of None decides nothing.

    A worker is one bundle of the trial's placement group. So a trainable learns its number of workers from
    `len(tune.get_context().get_trial_resources().bundles)`. `elastic` makes a trainable that uses them from a training
    function. If a trial asks for other bundles than its workers have, the workers' bundles are used, with a warning.

    Promoted trials start before new ones, the deepest rung first; see `hydro_rasda.schedulers.place`. The rungs and all
    reports are kept in `rasda.jsonl` in the experiment's folder, from which `Tuner.restore` resumes.

    `wait=0, grow="due"` is the paper's algorithm. A trial that waits is paused, and other trials use its workers
    meanwhile.

    Args:
        max_t: Iterations after which a trial is done (`max_I` in the paper).
        grace_period: First milestone (`min_I`).
        reduction_factor: `rf`: one in `rf` trials survives a milestone.
        scaling_factor: `sf`: the factor by which a survivor's workers and the time to the next milestone grow.
            Milestones are at `grace_period * sf**k` (the paper's eq. 3), where ASHA's are at `grace_period * rf**k`.
        workers: Number of workers of a new trial.
        resources_per_worker: Resources of a worker, as Ray names them. None for the first bundle of the first trial,
            given by `tune.with_resources` for example. Ray's default is one CPU.
        max_workers: Largest number of workers of a trial; None for all that the cluster holds.
        metric: A key that trials report; None for that of `TuneConfig`.
        mode: "min" or "max"; None for that of `TuneConfig`.
        time_attr: The key that counts iterations in a report; its value is a growing integer. "a/b" names the key "b"
            of a nested mapping "a".
        patience: Number of starts out of turn before the longest waiting trial comes first.
        wait: Longest wait of a trial at a milestone for trials that began with it, relative to the time that it took to
            reach the milestone; see `hydro_rasda.schedulers.MilestoneBarrier`. Then all trials at the milestone are
            decided at once.
        grow: The rule for a survivor's workers: "due" or "efficient"; see `hydro_rasda.schedulers.rasda.efficient`.
            Efficiency is the reported "scaling_efficiency"; otherwise it is computed from "epoch_seconds", or from
            Ray's time of an iteration. The noise scale is the reported "gradient_noise_scale", in examples, beside
            "global_batch_size". `Worker.measure` reports both.
        least_efficiency: With "efficient", a survivor gets more workers only if its efficiency is above this; 0 accepts
            any.
        batch_over_noise: With "efficient", the largest global batch of a survivor, in units of its noise scale; inf
            accepts any.
        autoscale_wait_s: Longest wait in seconds of a survivor for Ray's autoscaler, if it is due more workers than the
            nodes hold. Afterwards it continues with the workers that the nodes hold. 0 does not ask the autoscaler.
        brackets: As for `ASHAScheduler`, but only 1 is allowed.
        stop_last_trials: As for `ASHAScheduler`, but only True is allowed: a trial ends at `max_t`.

    Attributes:
        rule: The rule that makes the decisions. It knows nothing of Ray.

    Raises:
        ValueError: if a number is out of range, or `mode` or `grow` is unknown. `Tuner.fit` raises it if no worker fits
            on any node, a new trial does not fit on the cluster, or `reuse_actors` is set for a class that cannot be
            reset.
    """

    # Ray must not deliver reports in bulk, because a trial could pass a milestone before it is decided.
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
        wait: float = 0.0,
        grow: Grow = "due",
        least_efficiency: float = 0.5,
        batch_over_noise: float = 1.0,
        autoscale_wait_s: float = 0.0,
        brackets: int = 1,
        stop_last_trials: bool = True,
    ) -> None:
        super().__init__()
        bounded = is_number(autoscale_wait_s) and autoscale_wait_s >= 0
        require(bounded, "autoscale_wait_s", autoscale_wait_s, "a finite number of seconds >= 0")
        self._autoscale_wait_s = autoscale_wait_s
        require(brackets == 1, "brackets", brackets, "1: there is one bracket")
        require(stop_last_trials is True, "stop_last_trials", stop_last_trials, "True: a trial ends at `max_t`")
        if mode is not None:
            check_mode(mode)
        numbers = (max_t, grace_period, reduction_factor, scaling_factor, workers, max_workers)
        self.rule = RASDA(
            *numbers,
            mode="min" if mode is None else mode,
            wait=wait,
            grow=grow,
            least_efficiency=least_efficiency,
            batch_over_noise=batch_over_noise,
        )
        require(wait < math.inf, "wait", wait, "finite")
        check_text("metric", metric, optional=True)
        check_text("time_attr", time_attr)
        check_int("patience", patience, at_least=1)
        self._own_metric, self._own_mode = metric, mode
        self._mode = mode
        self._metric: Any = metric
        self.time_attr = time_attr
        self._patience = patience
        if resources_per_worker is not None:
            worker_slots((), resources_per_worker)
        self._own_worker = None if resources_per_worker is None else dict(resources_per_worker)
        self._begin_anew({"CPU": 1.0})

    def _begin_anew(self, asked: Mapping[str, float]) -> None:
        worker = self._own_worker or asked
        self._folder: str | None = None
        self._refusal: Exception | None = None
        self._trials = Experiment(
            self.rule, worker, self._metric, self.time_attr, self._patience, self._autoscale_wait_s
        )

    def set_search_properties(self, metric: str | None, mode: Mode | None, **spec: Any) -> bool:
        """Take metric and mode from `TuneConfig`; return False if both sides give one."""
        if (self._own_metric and metric) or (self._own_mode and mode):
            return False
        # Begin from the scheduler's own metric and mode, not from those of an earlier experiment.
        self._metric = metric or self._own_metric
        self._mode = mode or self._own_mode
        if self._mode:
            self._metric = self._metric or DEFAULT_METRIC
            self.rule = replace(self.rule, mode=self._mode)
        self._begin_anew({"CPU": 1.0})
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Give a new trial its first number of workers, and a restored trial the number with which it continues."""
        if self._refusal is not None:
            raise self._refusal
        try:
            self._add(tune_controller, trial)
        except Exception as error:
            # Ray only logs an error while it restores an experiment. Then it would wait forever for the trials that it
            # has not restored, and would save a state without them. So `choose_trial_to_run` raises the error again.
            self._refusal = error
            raise

    def _add(self, tune_controller: Any, trial: Trial) -> None:
        if self._folder != trial.storage.experiment_fs_path:  # also true if the scheduler gets a second experiment
            self._begin(tune_controller, trial)
        new = self._trials.rung_history.know(trial.trial_id)
        if trial.is_finished():
            return
        # Name the trial's folder now. Ray names it only when the trial starts, and its list of results fails for a
        # trial that never started.
        trial.init_local_path()
        if new:
            self._trials.sizes.tell_overruled(trial, self.rule.workers)
        self._trials.sizes.resize(trial, self._trials.sizes.fitting(self._trials.due(trial)))
        if not self._trials.waits_still(trial):
            self._trials.queue.join(trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Stop a trial, let it continue, or pause it until it can continue with more workers."""
        if missing := self._missing(result):
            self._trials.sizes.tell_undecided(trial, missing)
            return str(TrialScheduler.CONTINUE)
        t, score = result[self.time_attr], float(result[self._metric])
        self._trials.rung_now[trial.trial_id] = self.rule.rungs_survived(t)
        self._trials.grants.note(trial, self._trials.sizes.of(trial), result)
        decision, reached = self._trials.decide(trial, t, score)
        milestone = reached
        if decision is Decision.STOP and t < self.rule.max_t and math.isnan(score):
            self._trials.sizes.tell_diverged(trial, t, self._metric)
        if decision is Decision.WAIT:
            decision, milestone = self._trials.gather(trial, result)
        elif decision is Decision.CONTINUE and milestone is not None:
            self._trials.grant([trial], [trial], milestone)
        self._trials.record(trial, result, milestone, decision)
        # BOHB learns from milestones, at which a trial may still wait for its decision.
        result["hyperband_info"] = {} if reached is None or t >= self.rule.max_t else {"budget": reached}
        if decision is Decision.STOP:
            # Tell the searcher of this report: of a trial that is stopped, Ray only tells it the end.
            tune_controller.search_alg.on_trial_result(trial.trial_id, result)
            return str(TrialScheduler.STOP)
        if decision is Decision.WAIT:
            self._trials.queue.leave(trial)
            return str(TrialScheduler.PAUSE)
        grows = self._trials.grows(trial, self._trials.due(trial, t))
        if not grows or not self._trials.sizes.can_pause(trial, result, t):
            if milestone is not None:
                self._trials.cohort.begin(trial, self._trials.milestone_after(t))
            return str(TrialScheduler.CONTINUE)
        self._trials.queue.join(trial)
        return str(TrialScheduler.PAUSE)

    def _missing(self, result: Mapping[str, Any]) -> list[str]:
        """Return the names of the numbers that a report needs for a decision, but lacks."""
        untimed = plain_number(result.get(self.time_attr)) is None
        return [self.time_attr] * untimed + [self._metric] * (as_float(result.get(self._metric)) is None)

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Keep the last score of a trial that has ended, because later trials are compared with it."""
        self._trials.leave(trial)
        if self._missing(result) or trial.trial_id in self._trials.rung_history.stopped:
            return
        rungs, t = self._trials.rung_history.rungs, result[self.time_attr]
        milestone = self.rule.open_rung(rungs, trial.trial_id, t)
        if milestone is not None:
            self._trials.rung_history.rungs = rungs.recorded(milestone, trial.trial_id, float(result[self._metric]))
            self._trials.record(trial, result, milestone, Decision.STOP)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Remove a failed trial from queue and cohort. Ray adds the trial again if it may be repeated."""
        self._trials.sizes.tell_full_disk(trial)
        self._trials.fail(trial)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._trials.leave(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return the trial that starts next; None if all must wait."""
        if self._refusal is not None:
            raise self._refusal
        self._trials.decide_gathered()
        stage, slots = ControllerStage(tune_controller), self._trials.sizes.slots
        self._trials.cohort.end_stopped(stage.stop)
        stage.clear(self._trials.queue)
        slots.heed_others(stage.stalls())
        stage.call_back(self._trials.queue, self._trials.sizes.of, slots.count())
        waiting, holding = self._trials.ready(), self._trials.holding()
        held = {trial.trial_id: self._trials.sizes.of(trial) for trial in holding}
        free = max(0, slots.count() - sum(held.values()))
        placement = self._trials.next_start(waiting, holding, held, free)
        chosen = None
        if placement.start is not None:
            chosen = next(trial for trial in waiting if trial.trial_id == placement.start.trial)
            waiting.remove(chosen)
            free -= placement.start.workers
            self._trials.start(chosen, placement.start.workers)
        stage.limit(waiting, holding, free, chosen)
        return chosen

    def save(self, checkpoint_path: str) -> None:
        """Raise NotImplementedError, because the state is always in `rasda.jsonl`."""
        raise NotImplementedError(_SAVED)

    def restore(self, checkpoint_path: str) -> None:
        """Raise NotImplementedError, because `Tuner.restore` also restores the state."""
        raise NotImplementedError(_SAVED)

    def debug_string(self) -> str:
        came = sorted(self._trials.rung_history.rungs.rungs.items())
        rungs = ", ".join(f"{milestone}: {len(rung)} trials" for milestone, rung in came)
        return f"Using RASDA: workers {self.rule.workers}, milestones reached by {rungs or 'none'}"

    def _begin(self, controller: Any, trial: Trial) -> None:
        if not self._metric or not self._mode:
            raise ValueError(
                f"`metric` is {self._metric!r} and `mode` is {self._mode!r}, but both must be given, "
                "to RASDAScheduler or to tune.TuneConfig"
            )
        if hasattr(trial.get_trainable_cls(), "base_scaling_config"):
            raise ValueError(
                f"`trainable` is {trial.trainable_name!r}, a Trainer of Ray Train, whose ScalingConfig says how many "
                "workers it has; hand its training function to `elastic` instead, or a function that runs the Trainer"
            )
        self._begin_anew(trial.placement_group_factory.bundles[0])
        self._trials.sizes.slots.check(self.rule.workers)
        stage = ControllerStage(controller)
        stage.check_reuse(trial)
        stage.lose_no_worker()
        self._trials.rung_history.open(trial.storage.storage_filesystem, trial.storage.experiment_fs_path)
        self._folder = trial.storage.experiment_fs_path
