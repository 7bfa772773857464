"""The full-size stage on Ray Tune, beside the sweep: trials are offered while others train.

Tune runs in a thread of its own. The run's store belongs to the main thread, and is all that outlives the process: the
main thread records there what happened whenever it calls `FullSize.poll`, and has each trial start from its last
checkpoint there, whichever backend trained it that far. Tune's own folder is made anew by each process.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from ray import tune
from ray.tune import PlacementGroupFactory
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Experiment
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler

from hydro_rasda.backends.ray.elastic import elastic
from hydro_rasda.backends.ray.event_log import EventLog, EventLogger
from hydro_rasda.backends.ray.groups import SettledGroups
from hydro_rasda.backends.ray.rank_worker import CHECKPOINT_FILE
from hydro_rasda.backends.ray.run_recorder import RunRecorder
from hydro_rasda.backends.ray.scheduler import RASDAScheduler
from hydro_rasda.backends.ray.schedulers_by_name import checkpoint_interval, make_scheduler
from hydro_rasda.backends.ray.sizes import Slots
from hydro_rasda.backends.ray.trial_feed import Offer, TrialFeed
from hydro_rasda.run.state import Run
from hydro_rasda.run.summary import winner_is_lost
from hydro_rasda.run.targets import (
    decided_targets,
    end_by_score,
    end_targets,
    ended_early,
    forget_unsaved,
    found_enough,
    recall_targets,
    record_end,
    saved_epochs,
    settle_configs,
    source_of,
    trained_config,
)
from hydro_rasda.training.deaths import RETRIES
from hydro_rasda.training.worker import Worker

FOLDER = "ray"
"""Tune's own folder in the run's."""

EVENTS = "events.jsonl"
"""What Tune said, in its folder."""

_LOOK_S = 0.1
_BRIEF_S = 0.01
_STUCK_S = 60.0


class FullSize:
    """Trains full-size models on a Ray cluster, as they are offered.

    What an earlier process began, on whichever backend, goes on at once. All methods belong to the main thread.

    Args:
        run: Gets each epoch, failure and checkpoint; what is recorded there is where trials go on from.
        worker: Resources of one worker, in Ray's words.
        scheduler: "rasda", "asha", "hyperband", "median" or "pbt", or one of Ray's own. All but RASDA train with
            `rasda.workers` workers throughout.
        space: The search space; PBT draws from it.
        train: What each rank of a trial runs.

    Raises:
        ValueError: where `scheduler` is unknown, no worker fits on any node, or the cluster holds fewer than
            `rasda.workers`.
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
        if not self._scheduler.set_search_properties(run.settings.metric, run.settings.mode):
            self._scheduler.set_search_properties(None, run.settings.mode)
        Slots(worker).check(run.settings.rasda.workers)
        self._folder = run.store.path.resolve() / FOLDER
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._ended = False
        recall_targets(run)
        self._take_in_leftovers()
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
            max_failures=RETRIES,
        )
        grows = isinstance(self._scheduler, RASDAScheduler)
        self._size = None if grows else PlacementGroupFactory([dict(worker)] * run.settings.rasda.workers)
        self._feed = TrialFeed(self._experiment, self._size)
        self._log = EventLog(self._folder / EVENTS)
        self._recorder = RunRecorder(run, self._log)
        self._settled: set[int] = set()
        """Trials that are over, or offered."""
        self.offer(self._begun())

    def _take_in_leftovers(self) -> None:
        """What a process that was killed had not recorded yet; then nothing of Tune's is needed any more."""
        if (self._folder / EVENTS).exists():
            log = EventLog(self._folder / EVENTS)
            RunRecorder(self._run, log).record_new()
            log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begun(self) -> list[int]:
        """Trials that were begun and can go on."""
        run = self._run
        decided = decided_targets(run)
        for number in set(run.failures) - {n for n, goes_on in decided.items() if not goes_on}:
            if run.epochs("target", number):
                del run.failures[number]  # it gets another chance
        forget_unsaved(run)
        winner_is_lost(run, [number for stage, number in run.metrics if stage == "target"])  # as it then is not begun
        begun = [number for stage, number in run.metrics if stage == "target"]
        for number in self._cut(set(begun) - set(decided)):
            record_end(run, number)
            decided[number] = False
        self._settled = {
            n
            for n in begun
            if not decided.get(n, True) or saved_epochs(run, n) >= run.settings.max_t or ended_early(run, n)
        }
        return [number for number in begun if number not in self._settled]

    def _cut(self, undecided: Iterable[int]) -> list[int]:
        """Those that RASDA would not have go on from where they stand; its rungs get the scores of all."""
        if not isinstance(self._scheduler, RASDAScheduler):
            return []
        run, rule = self._run, self._scheduler.rule
        rungs = rule.recalled({str(n): run.curve("target", n) for stage, n in run.metrics if stage == "target"})
        self._scheduler.begin_with(rungs)
        return [n for n in undecided if rule.halving.falls_short(rungs, str(n), run.epochs("target", n))]

    def offer(self, numbers: Iterable[int]) -> None:
        """Have trials of the run trained, best first; better ones may be offered later, while others train."""
        new = [number for number in numbers if number not in self._settled]
        if self._ended or not new:
            return
        self._settled |= set(new)
        self._feed.offer({number: offer_of(self._run, number, self._folder) for number in new})
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
        if self._ended:
            return
        self._recorder.record_new()
        if self._error is not None:
            self._end()
        elif self._thread is not None and found_enough(self._run):
            self.stop()
            end_by_score(self._run)
        elif self._thread is not None and self._run.out_of_time("target") and self._run.checkpoints:
            self.stop()
            self._run.end_by_time("target")
            self._run.say("`time_budget_s` is spent: the same call with more goes on from here")
        if self._error is not None:  # also what it raised while it was stopped
            error, self._error = self._error, None
            raise error

    def finish(self, finalists: Sequence[int]) -> None:
        """Wait until everything offered is done; nothing more will be offered.

        Args:
            finalists: For whom the stage is then over.
        """
        self._feed.close()
        while not self._ended:
            over = not self._alive()
            self.poll()
            if over and not self._ended:
                end_targets(self._run, finalists)
                self._end()
            elif self._thread is not None:
                self._thread.join(_LOOK_S)

    def stop(self) -> None:
        """Have all trials stop soon; the same run goes on from their last checkpoints."""
        if self._ended:
            return
        self._stopping.set()
        self._feed.close()
        while self._alive():
            self._recorder.record_new()
            time.sleep(_LOOK_S)
        self._recorder.record_new()
        self._end()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _end(self) -> None:
        self._ended = True
        self._log.remove()
        settle_configs(self._run)

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
        controller = TuneController(
            search_alg=self._feed,
            scheduler=self._scheduler,
            callbacks=[EventLogger(self._log)],
            metric=self._run.settings.metric,
            trial_checkpoint_config=self._experiment.checkpoint_config,
            reuse_actors=True,
            storage=self._experiment.storage,
            resource_manager_factory=SettledGroups,
        )
        try:
            self._turn(controller)
        finally:
            controller.cleanup()

    def _turn(self, controller: TuneController) -> None:
        """To the end of the experiment, or until told to stop."""
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


def offer_of(run: Run, number: int, folder: Path) -> Offer:
    """A trial as Tune gets it: it goes on from its last checkpoint, of which a copy is put in this folder."""
    name = source_of(run, number)
    origin, config = trained_config(run, number)
    epoch = saved_epochs(run, number)
    if name is None or epoch == 0:
        return Offer(origin, config)
    unit = run.store.units()[name].value
    saved = {
        "state": run.store.load(name, torch.device("cpu")),
        "iteration": epoch,
        "rescaled": unit.get("rescaled", []),
        "measured": unit.get("measured", {}),
    }
    start = folder / f"start-{number}"
    start.mkdir(parents=True)
    torch.save(saved, start / CHECKPOINT_FILE)
    return Offer(
        origin, config, str(start), {**run.metrics["target", number][-1], "training_iteration": epoch, "epoch": epoch}
    )


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """What Tune logs is left out: the run says it in its own words."""
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
