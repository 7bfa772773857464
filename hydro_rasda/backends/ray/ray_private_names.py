"""Ray Tune's controller and its placement groups, by private names: no other module uses one of Ray's.

Ray fills and clears its controller's stage for schedulers that know nothing of sizes. Here one that gives trials sizes
has its say. `PRIVATE` says of each name what to do where it is gone; a test looks each up in the installed Ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import ray
from pyarrow.fs import copy_files
from ray.air.execution import PlacementGroupResourceManager, ResourceRequest
from ray.tune import Trainable
from ray.tune.experiment import Trial
from ray.tune.result import EXPR_RESULT_FILE
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from hydro_rasda.backends.ray.waiting import WaitingQueue

PRIVATE: Mapping[str, Mapping[str, str]] = {
    "ray.tune.execution.tune_controller.TuneController": {
        "_actor_manager": "find who holds the placement groups; without, leave `lose_no_worker` out",
        "_requeue_trial": "have the trial added again as Ray does for one that may be repeated",
        "_reuse_actors": "leave `check_reuse` out: Ray's own error names no cause",
        "_staged_trials": "leave `clear` out where Ray itself clears trials that are over",
        "_unstage_trial_with_resources": "look for what takes a trial's request for a placement group back",
    },
    "ray.tune.trainable.function_trainable.FunctionTrainable": {
        "_trainable_func": "find where Ray keeps the function; without, `reads_checkpoint` says yes"
    },
    "ray.tune.schedulers.TrialScheduler": {
        "_supports_buffered_results": "look for what else has Ray hand each report over at once"
    },
    "ray.air.execution._internal.actor_manager.RayActorManager": {
        "_resource_manager": "find who holds the placement groups; without, leave `lose_no_worker` out"
    },
    "ray.air.execution.PlacementGroupResourceManager": {
        "_pg_to_request": "see whether ray-project/ray#64693 is fixed: then `SettledGroups` goes",
        "_pg_to_staging_future": "likewise",
        "_request_to_staged_pgs": "likewise",
        "_staging_future_to_pg": "likewise",
    },
    "ray.tune.execution.tune_controller.TrialRunnerWrapper": {
        "_tune_controller": "hand the controller on as it is: Ray has dropped its wrapper"
    },
}
"""By class, each private name of Ray's that is used, and what to do where a version of Ray has it no more."""

_SETTLES_WITHIN_S = 5.0
"""A group is being placed for milliseconds; a cluster that takes longer has trouble of its own."""


class SettledGroups(PlacementGroupResourceManager):  # type: ignore[misc]
    """Ray Tune's placement groups, removed only while Ray is not just placing them.

    Tune takes a request back where an actor that it can reuse comes free first. Ray may remove a group between
    reserving its bundles on the nodes and having them committed there. Their resources then stay reserved for nobody
    until the cluster ends (Ray 2.60; ray-project/ray#64693). A survivor that is due every worker waits for ever. Of
    3,300 groups that were removed at random moments five or more were lost so; of 6,000 removed as here, none.
    """

    def __init__(self, update_interval_s: float = 0.1) -> None:
        super().__init__(update_interval_s)
        self._leaving: set[PlacementGroup] = set()

    def cancel_resource_request(self, resource_request: ResourceRequest) -> None:
        """Takes a request back; its group goes at once, or when it has been placed."""
        staged = self._request_to_staged_pgs[resource_request]
        if not staged:
            super().cancel_resource_request(resource_request)
            return
        group = staged.pop()
        future = self._pg_to_staging_future.pop(group)
        del self._staging_future_to_pg[future], self._pg_to_request[group]
        ray.cancel(future)
        self._leaving.add(group)
        self._remove_settled()

    def update_state(self) -> None:
        """Learns which groups are placed, and removes those that nobody asks for any more."""
        super().update_state()
        self._remove_settled()

    def clear(self) -> None:
        """Removes all groups; waits some seconds, at most, for those that are being placed."""
        if not ray.is_initialized():
            return
        for request, staged in self._request_to_staged_pgs.items():
            for _ in list(staged):
                self.cancel_resource_request(request)
        until = time.monotonic() + _SETTLES_WITHIN_S
        while self._leaving and time.monotonic() < until:
            time.sleep(0.01)
            self._remove_settled()
        for group in self._leaving:
            remove_placement_group(group)
        super().clear()

    def _remove_settled(self) -> None:
        for group in list(self._leaving):
            if is_settled(placement_group_table(group)):
                remove_placement_group(group)
                self._leaving.remove(group)


def training_function(cls: type) -> Any:
    """The function that Ray made a trainable class of; None where it made it of none."""
    return vars(cls).get("_trainable_func")


def is_settled(row: Mapping[str, Any]) -> bool:
    """Return whether a group can be removed: placed, without room, or gone, by its row of `placement_group_table`."""
    state = row.get("state")
    if state in ("PENDING", "RESCHEDULING"):
        return row["stats"]["scheduling_state"] not in ("QUEUED", "SCHEDULING_STARTED")
    return state != "PREPARED"


logger = logging.getLogger(__name__)

# With it, Ray's controller stages no trial by itself; with 0, it would stage as many as it likes.
_STAGE_NONE = -1


class ControllerStage:
    """The stage of a controller."""

    def __init__(self, controller: Any) -> None:
        # Ray hands some hooks a wrapper that warns of every name outside its list, and has no other public way.
        self._controller = getattr(controller, "_tune_controller", controller)

    def check_reuse(self, trial: Trial) -> None:
        """Refuse to have actors reused that cannot be reset, and warn of what reuse costs."""
        if not self._controller._reuse_actors:
            return
        if trial.get_trainable_cls().reset_config is Trainable.reset_config:
            raise ValueError(
                f"`reuse_actors` is True, but must be False for {trial.trainable_name!r}, which has no `reset_config`"
            )
        logger.warning(
            "`reuse_actors` is True: Ray hands an actor that comes free to a new trial, out of turn, so that survivors "
            "may wait until no new trial is left. With False, they go first."
        )

    def lose_no_worker(self) -> None:
        """Have placement groups taken back as `SettledGroups` does; before any is asked for."""
        actors = self._controller._actor_manager
        groups = actors._resource_manager
        if type(groups) is PlacementGroupResourceManager and not groups._pg_to_request:
            actors._resource_manager = SettledGroups(groups.update_interval_s)

    def clear(self, queue: WaitingQueue) -> None:
        """Take trials that are over off the stage, and have those wait again whose actor was not free in time.

        Ray leaves a trial on its stage that failed while it was given another one's actor. From then on, Ray keeps one
        actor of that size for it: a trial that needs all workers would wait for ever. And it tells nobody of those that
        failed only because the last training in that actor took too long to end.
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

    def call_back(self, queue: WaitingQueue, size_of: Callable[[Trial], int], held: int) -> None:
        """Have trials wait again that were to start with more workers than a lost node left over."""
        for trial in queue.given():
            if trial.status == Trial.PENDING and size_of(trial) > held:
                # Ray waits for a placement group for ever, whether or not the nodes for it exist.
                self._controller._unstage_trial_with_resources(trial)
                self._controller.pause_trial(trial, should_checkpoint=False)
                queue.join(trial)

    def limit(self, waiting: Sequence[Trial], holding: Sequence[Trial], free: int, chosen: Trial | None) -> None:
        """Keep the controller from starting trials by itself, and have it ask the searcher for one at a time.

        `waiting` could be next, after the `chosen` trial, which the controller is told to start now.
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
