"""The full-size stage on Ray Tune, beside the sweep: trials are offered while others train.

Tune runs in a thread of its own. The run's store belongs to the main thread: it reads what happened from the event
log whenever it calls :meth:`FullSize.poll`, keeps each epoch once, however often Tune repeats it, and copies each
checkpoint into the store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from ray import tune
from ray.tune import PlacementGroupFactory, ResumeConfig
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Experiment
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler

from hydro_rasda.backends.elastic import elastic
from hydro_rasda.backends.ray_feed import EventLog, Feed, Witness
from hydro_rasda.backends.ray_named import MUTABLE, checkpoint_interval, make_scheduler
from hydro_rasda.backends.ray_scheduler import RASDAScheduler
from hydro_rasda.backends.ray_sizes import Slots
from hydro_rasda.backends.worker import CHECKPOINT_FILE, Worker
from hydro_rasda.problem import Trial
from hydro_rasda.run import Run
from hydro_rasda.store import Line, Unit

FOLDER = "ray"
"""Tune's own folder in the run's."""

MAX_FAILURES = 2
"""How often a trial goes on from its last checkpoint after it failed."""

_LOOK_S = 0.1
_DONE = "target/done"
_BRIEF_S = 0.01
_STUCK_S = 60.0


class FullSize:
    """Trains full-size models on a Ray cluster, as they are offered.

    What an earlier process began goes on at once. All methods belong to the main thread.

    Args:
        run: Gets each epoch, failure and checkpoint.
        worker: Resources of one worker, in Ray's words.
        scheduler: "rasda", "asha", "hyperband", "median" or "pbt", or one of Ray's own. All but RASDA train with
            `rasda.workers` workers throughout.
        space: The search space; PBT draws from it.
        train: What each rank of a trial runs.

    Raises:
        ValueError: `scheduler` is unknown, no worker fits on any node, or the cluster holds fewer than `rasda.workers`.
        TypeError: `scheduler` is no scheduler.
    """

    def __init__(
        self,
        run: Run,
        worker: Mapping[str, float],
        scheduler: str | TrialScheduler = "rasda",
        *,
        space: Mapping[str, Any],
        train: Callable[[Worker], None],
    ) -> None:
        self._run = run
        self._scheduler = make_scheduler(scheduler, run.settings, worker, space)
        # A scheduler of the user's may name its own.
        if not self._scheduler.set_search_properties(run.problem.metric, run.problem.mode):
            self._scheduler.set_search_properties(None, run.problem.mode)
        Slots(worker).check(run.settings.rasda.workers)
        self._folder = run.store.path.resolve() / FOLDER
        self._workers: dict[int, int] = {}
        self._trained_with: dict[int, tuple[int, Mapping[str, Any]]] = {}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._recall()
        self._over = run.store.done(_DONE)
        if self._over:
            return
        every = checkpoint_interval(self._scheduler, run.settings)
        trainable = elastic(train, self._scheduler, data=run.problem, checkpoint_every=every)
        self._experiment = Experiment(
            FOLDER,
            trainable,
            storage_path=str(self._folder.parent),
            # PBT's trials may still need what another one would have removed.
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=3 if isinstance(self._scheduler, PopulationBasedTraining) else 1
            ),
            max_failures=MAX_FAILURES,
        )
        grows = isinstance(self._scheduler, RASDAScheduler)
        self._size = None if grows else PlacementGroupFactory([dict(worker)] * run.settings.rasda.workers)
        self._feed = Feed(self._experiment, self._size)
        self._log = EventLog(self._folder / "events.jsonl")
        self._resumes = self._forget_older_states()
        if self._resumes:
            self._start()

    def offer(self, numbers: Sequence[int]) -> None:
        """Have trials of the run trained, best first; better ones may be offered later, while others train."""
        if self._over or not numbers:
            return
        self._feed.offer({number: self._run.trials[number].config for number in numbers})
        if self._thread is None:
            self._start()

    def hold(self, workers: int) -> None:
        """Keep so many of the cluster's workers for others, until told otherwise."""
        if isinstance(self._scheduler, RASDAScheduler):
            self._scheduler.hold(workers)

    def poll(self) -> None:
        """Take in what happened since; stop where the time budget is spent.

        Raises:
            Exception: what Tune raised.
        """
        if self._over:
            return
        self._take_in()
        if self._error is not None:
            error, self._error = self._error, None
            self._end()
            raise error
        if self._thread is not None and self._run.out_of_time("target") and self._run.checkpoints:
            self._run.end_by_time("target")
            self._run.progress.say("`time_budget_s` is spent: the same call with more goes on from here")
            self.stop()

    def finish(self) -> None:
        """Wait until everything offered is done; nothing more will be offered."""
        if self._over:
            self._settle()
        else:
            self._feed.close()
        while not self._over:
            ended = not self._alive()
            self.poll()
            if ended and not self._over:
                self._end(_DONE)
            elif self._thread is not None:
                self._thread.join(_LOOK_S)
        if not self._run.store.done(_DONE):
            self._forget_unsaved()

    def stop(self) -> None:
        """Have all trials stop soon; the same run goes on from their last checkpoints."""
        if self._over:
            return
        self._stopping.set()
        self._feed.close()
        while self._alive():
            self._take_in()
            time.sleep(_LOOK_S)
        self._take_in()
        self._end()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _end(self, key: str | None = None) -> None:
        self._over = True
        if key is None:
            self._log.close()
        else:
            self._run.record(key, Unit(None))
            self._log.remove()
        self._settle()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._tune, name="tune", daemon=True)
        self._thread.start()

    def _tune(self) -> None:
        try:
            with _quiet(logging.getLogger("ray.tune")):
                self._loop()
        except BaseException as error:
            self._error = error

    def _loop(self) -> None:
        # What `tune.run` does, less its output and its log files, with an end that can be told from outside.
        resumed = ResumeConfig(errored=ResumeConfig.ResumeType.RESUME) if self._resumes else None
        controller = TuneController(
            search_alg=self._feed,
            scheduler=self._scheduler,
            resume_config=resumed,
            callbacks=[Witness(self._log)],
            metric=self._run.problem.metric,
            trial_checkpoint_config=self._experiment.checkpoint_config,
            reuse_actors=True,
            storage=self._experiment.storage,
        )
        try:
            self._turn(controller)
            controller.checkpoint(force=True, wait=True)
        finally:
            controller.cleanup()

    def _turn(self, controller: TuneController) -> None:
        """To the end of the experiment, or until told to stop."""
        self._feed.meet(controller.get_trials())
        if self._size is not None:
            controller.update_pending_trial_resources(self._size)
        moved = time.monotonic()
        while not controller.is_finished() and not self._stopping.is_set():
            since = time.monotonic()
            controller.step()
            live = [trial.status for trial in controller.get_live_trials()]
            if TuneTrial.RUNNING in live or TuneTrial.PENDING in live or not self._feed.is_finished():
                moved = since
            elif since - moved > _STUCK_S:
                name, paused = type(self._scheduler).__name__, live.count(TuneTrial.PAUSED)
                raise RuntimeError(f"`scheduler` is {name}, but must start the {paused} trials that it paused")
            # Without an actor to wait for, the loop would turn without a rest.
            if time.monotonic() - since < _BRIEF_S and TuneTrial.RUNNING not in live:
                self._feed.wait(_LOOK_S)

    def _forget_older_states(self) -> bool:
        """Leave the newest of Tune's own records, to which each process adds one; False where there is none."""
        states = sorted(self._folder.glob("experiment_state-*.json"))
        for old in states[:-1]:
            old.unlink()
        return bool(states)

    def _recall(self) -> None:
        """Take in what earlier processes recorded."""
        for key in self._run.store.units():
            if key.startswith("target/trial-"):
                self._note(self._run.recall(key))

    def _take_in(self) -> None:
        events = list(self._log.read())
        newest = {event["trial"]: place for place, event in events if event["event"] == "saved"}
        for place, event in events:
            if event["event"] == "metrics":
                self._take_epoch(event)
            elif event["event"] == "saved":
                if newest[event["trial"]] == place:
                    self._take_checkpoint(place, event)
            else:
                self._take_ending(place, event)

    def _take_epoch(self, event: Line) -> None:
        number, epoch = event["trial"], event["epoch"]
        if epoch <= self._run.epochs("target", number):
            return  # repeated after a failure, or on going on
        line = {"event": "metrics", "stage": "target", "trial": number, "epoch": epoch, **event["metrics"]}
        before = self._workers.get(number)
        self._keep(f"target/trial-{number}/epoch-{epoch}", Unit(None, [line], event["seconds"]))
        if before not in (None, self._workers[number]):
            self._run.progress.say(
                f"full size: trial {number} goes on with {self._workers[number]} workers from epoch {epoch}"
            )

    def _take_checkpoint(self, place: int, event: Line) -> None:
        number = event["trial"]
        key = f"target/trial-{number}/saved-{place}"
        if self._run.store.done(key):
            return
        try:
            saved = torch.load(os.path.join(event["path"], CHECKPOINT_FILE), map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return  # Tune has a newer one, which is next
        name = f"target/trial-{number}/epoch-{saved['iteration']}"
        self._run.store.save(name, saved["state"])
        before = self._run.checkpoints.get(number)
        config = event["config"]
        mutable = {name: config[name] for name in MUTABLE if name in config}
        value = {"trial": number, "checkpoint": name, "origin": event["origin"], "mutable": mutable}
        changed = self._trained_with.get(number, (number, mutable)) != (event["origin"], mutable)
        lines = [{"event": "trial", "trial": number, "config": config}] if changed else []
        self._keep(key, Unit(value, lines))
        if before not in (None, name):
            self._run.store.discard([before])

    def _take_ending(self, place: int, event: Line) -> None:
        number, kind = event["trial"], event["event"]
        key = f"target/trial-{number}/{kind}-{place}"
        if self._run.store.done(key):
            return
        lines = [{"event": "failed", "trial": number, "error": event["error"]}] if kind == "failed" else []
        self._keep(key, Unit({"trial": number, "ended": kind}, lines))
        self._run.progress.say(f"full size: trial {number} {self._told(event)}")

    def _told(self, event: Line) -> str:
        epoch = self._run.epochs("target", event["trial"])
        if event["event"] == "ended":
            score = self._run.score("target", event["trial"])
            how = "is done" if epoch >= self._run.settings.max_t else "stops"
            return f"{how} after epoch {epoch}, {self._run.problem.metric} {score:.4g}"
        what = "failed" if event["event"] == "failed" else "goes on from its last checkpoint"
        return f"{what} after epoch {epoch}: {event['error'].splitlines()[0]}"

    def _keep(self, key: str, unit: Unit) -> None:
        self._run.record(key, unit)
        self._note(unit)

    def _note(self, unit: Unit) -> None:
        """What a unit says besides its metrics and failures."""
        for line in unit.lines:
            if line["event"] == "metrics":
                self._run.failures.pop(line["trial"], None)
                self._workers[line["trial"]] = line.get("workers", 1)
        if not isinstance(unit.value, Mapping):
            return
        if "checkpoint" in unit.value:
            number = unit.value["trial"]
            self._run.checkpoints[number] = unit.value["checkpoint"]
            self._trained_with[number] = (unit.value["origin"], unit.value["mutable"])
        elif unit.value.get("ended") == "ended":
            self._run.failures.pop(unit.value["trial"], None)

    def _forget_unsaved(self) -> None:
        """Have trials that were stopped count as far as their models are there: the rest is trained again."""
        for stage, number in list(self._run.metrics):
            if stage == "target":
                saved = int(self._run.checkpoints.get(number, "-0").rpartition("-")[2])
                lines = self._run.metrics.pop((stage, number))
                if saved:
                    self._run.metrics[stage, number] = [line for line in lines if line["epoch"] <= saved]

    def _settle(self) -> None:
        """Have the run's configurations say what the checkpoints were trained with: PBT changes them on the way."""
        sampled = dict(self._run.trials)
        for number, (origin, mutable) in self._trained_with.items():
            if number in sampled and origin in sampled:
                self._run.trials[number] = Trial(number, {**sampled[origin].config, **mutable})
        self._trained_with = {}


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """What Tune logs is left out: the run says it in its own words."""
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
