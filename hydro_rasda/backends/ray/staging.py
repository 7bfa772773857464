"""What Ray Tune's controller keeps on its stage: trials for which it asks for a placement group, and then an actor.

Ray fills and clears it for schedulers that know nothing of sizes. Here one that gives trials sizes has its say.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pyarrow.fs import copy_files
from ray.air.execution import PlacementGroupResourceManager
from ray.tune import Trainable
from ray.tune.experiment import Trial
from ray.tune.result import EXPR_RESULT_FILE

from hydro_rasda.backends.ray.groups import SettledGroups
from hydro_rasda.backends.ray.queue import WaitingQueue
from hydro_rasda.backends.ray.sizes import Sizes

logger = logging.getLogger(__name__)

# What Ray's controller reads as "stage no trial by yourself"; 0 would mean "as many as you like".
_STAGE_NONE = -1


class ControllerStage:
    """The stage of a controller.

    Args:
        controller: As Ray hands it to a scheduler.
    """

    def __init__(self, controller: Any) -> None:
        # Ray hands some hooks a wrapper that warns of every name outside its list, and has no other public way.
        self._controller = getattr(controller, "_tune_controller", controller)

    def check_reuse(self, trial: Trial) -> None:
        """Refuse to have actors reused that cannot be reset.

        Raises:
            ValueError: where that was asked for.
        """
        cls = trial.get_trainable_cls()
        if self._controller._reuse_actors and cls.reset_config is Trainable.reset_config:
            raise ValueError(
                f"`reuse_actors` is True, but must be False for {trial.trainable_name!r}, which has no `reset_config`"
            )

    def lose_no_worker(self) -> None:
        """Have placement groups taken back as `SettledGroups` does; before any is asked for."""
        actors = self._controller._actor_manager
        groups = actors._resource_manager
        if type(groups) is PlacementGroupResourceManager and not groups._pg_to_request:
            actors._resource_manager = SettledGroups(groups.update_interval_s)

    def clear(self, queue: WaitingQueue) -> None:
        """Take trials that are over off the stage, and have those wait again whose actor was not free in time.

        Ray leaves a trial on its stage that failed while it was given another one's actor, and from then on
        keeps one actor of that size for it: a trial that needs all workers would wait for ever. And it tells
        nobody of those that failed only because the last training in that actor took too long to end.
        """
        for trial in [trial for trial in self._controller._staged_trials if trial.is_finished()]:
            self._controller._unstage_trial_with_resources(trial)
            place = queue.place(trial)
            if trial.status == Trial.ERROR and place is not None:
                logger.warning(
                    f"Trial {trial} starts again: the actor that it was to reuse could not be reset, or not within "
                    "TUNE_FUNCTION_THREAD_TIMEOUT_S (2 s if not set)."
                )
                failed = trial.run_metadata
                failed.num_failures -= 1
                failed.error_filename = failed.pickled_error_filename = None
                self._controller._requeue_trial(trial)
                queue.join(trial, place)

    def call_back(self, queue: WaitingQueue, sizes: Sizes) -> None:
        """Have trials wait again that were to start with more workers than a lost node left over."""
        held = sizes.slots.count()
        for trial in queue.given():
            if trial.status == Trial.PENDING and sizes.of(trial) > held:
                # Ray waits for a placement group for ever, whether or not the nodes for it exist.
                self._controller._unstage_trial_with_resources(trial)
                self._controller.pause_trial(trial, should_checkpoint=False)
                queue.join(trial)

    def limit(self, waiting: Sequence[Trial], holding: Sequence[Trial], free: int, chosen: Trial | None) -> None:
        """Keep the controller from starting trials by itself, and have it ask the searcher for one at a time.

        Args:
            waiting: Trials that could be next, after the chosen one.
            holding: Trials that hold workers.
            free: Workers that are left.
            chosen: The trial that the controller is told to start now.
        """
        new = [trial for trial in waiting if trial.status == Trial.PENDING]
        limit = _STAGE_NONE
        if not new and free:
            pending = sum(trial.status == Trial.PENDING for trial in holding)
            limit = pending + 1 + (chosen is not None)
        self._controller.update_max_pending_trials(limit)


def store_results(trial: Trial) -> None:
    """Bring a trial's `result.json` to the experiment's storage before the trial starts again.

    Ray's logger then takes the file from there, where it may lack the last rows: Ray stores it from time to time.
    """
    local, storage = Path(trial.local_path or "", EXPR_RESULT_FILE), trial.storage
    if trial.checkpoint and local.is_file():
        stored = str(PurePosixPath(storage.trial_fs_path) / EXPR_RESULT_FILE)
        copy_files(str(local), stored, destination_filesystem=storage.storage_filesystem)
