"""Ray Tune's controller and placement groups, by private names. No other module uses private names of Ray.

Ray's controller stages trials: it makes them ready to start. It does so for schedulers that do not set the number of
workers. `RASDAScheduler` sets it, so it takes control here. `test_ray_private_names.py` looks up each name in the
installed Ray, and says what to do if a version of Ray lacks it.
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

_SETTLES_WITHIN_S = 5.0
"""Longest wait in seconds for Ray to place groups. It takes milliseconds, unless the cluster has other problems."""


class SettledGroups(PlacementGroupResourceManager):  # type: ignore[misc]
    """Ray Tune's placement groups, which are not removed while Ray is placing them.

    Tune cancels a request if an actor that it can reuse becomes free first. Ray may then remove a group after it has
    reserved the bundles on the nodes, but before it commits them. Their resources stay reserved until the cluster ends
    (Ray 2.60; ray-project/ray#64693), and a survivor that is due every worker waits forever. At least five of 3,300
    groups that were removed at random moments were lost in this way. This class removed 6,000 groups, and lost none.
    """

    def __init__(self, update_interval_s: float = 0.1) -> None:
        super().__init__(update_interval_s)
        self._leaving: set[PlacementGroup] = set()

    def cancel_resource_request(self, resource_request: ResourceRequest) -> None:
        """Cancel a request. Its group is removed at once, or when it has been placed."""
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
        """Update which groups are placed, and remove those that are not requested any more."""
        super().update_state()
        self._remove_settled()

    def clear(self) -> None:
        """Remove all groups; wait at most some seconds for those that are being placed."""
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
    """Return the function of which Ray made a trainable class; None if the class was not made from a function."""
    return vars(cls).get("_trainable_func")


def is_settled(row: Mapping[str, Any]) -> bool:
    """Return whether a group can be removed: it is placed, has found no room, or does not exist any more.

    `row` is the group's row of `placement_group_table`.
    """
    state = row.get("state")
    if state in ("PENDING", "RESCHEDULING"):
        return row["stats"]["scheduling_state"] not in ("QUEUED", "SCHEDULING_STARTED")
    return state != "PREPARED"


logger = logging.getLogger(__name__)

# With this limit of pending trials, Ray's controller stages none by itself. With 0, it would stage any number.
_STAGE_NONE = -1


class ControllerStage:
    """The trials that a controller has staged: those that it is about to start."""

    def __init__(self, controller: Any) -> None:
        # Unwrap the controller: Ray gives some hooks a wrapper, which warns when most of its attributes are read. Only
        # a private attribute of the wrapper leads to the controller.
        self._controller = getattr(controller, "_tune_controller", controller)

    def check_reuse(self, trial: Trial) -> None:
        """Warn of the cost if actors are reused. Raise ValueError if they are reused but cannot be reset."""
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
        """Let `SettledGroups` manage placement groups, so that no worker is lost; only before a group is requested."""
        actors = self._controller._actor_manager
        groups = actors._resource_manager
        if type(groups) is PlacementGroupResourceManager and not groups._pg_to_request:
            actors._resource_manager = SettledGroups(groups.update_interval_s)

    def clear(self, queue: WaitingQueue) -> None:
        """Unstage trials that are over, and let those wait again whose actor was not free in time.

        If a trial failed while it was given another trial's actor, Ray leaves it staged, and keeps one actor of its
        size for it. Then a trial that needs all workers would wait forever. Ray also reports nothing about trials that
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

    def stop(self, trial: Trial) -> None:
        """Stop a paused trial, and tell the searcher its last result. Ray tells the results of running trials only."""
        self._controller._set_trial_status(trial, Trial.RUNNING)
        self._controller.stop_trial(trial)
        self._controller._mark_trial_to_checkpoint(trial)  # Ray does not save the status of a trial without an actor

    def stalls(self) -> bool:
        """Return whether trials wait for placement groups while no actor lives that could free workers for them."""
        actors = self._controller._actor_manager
        return bool(actors.num_pending_actors) and not actors.num_live_actors

    def call_back(self, queue: WaitingQueue, size_of: Callable[[Trial], int], held: int) -> None:
        """Let trials wait again that were to start with more than the `held` workers that the nodes hold now.

        The nodes hold fewer workers than before if one of them was lost.
        """
        for trial in queue.given():
            if trial.status == Trial.PENDING and size_of(trial) > held:
                # Take the request back: Ray would wait forever for a placement group, even if no nodes can hold it.
                self._controller._unstage_trial_with_resources(trial)
                self._controller.pause_trial(trial, should_checkpoint=False)
                queue.join(trial)

    def limit(self, waiting: Sequence[Trial], holding: Sequence[Trial], free: int, chosen: Trial | None) -> None:
        """Keep the controller from starting trials by itself; let it ask the searcher for one trial at a time.

        `waiting` trials may start after the `chosen` trial, which the controller starts now.
        """
        new = [trial for trial in waiting if trial.status == Trial.PENDING]
        limit = _STAGE_NONE
        if not new and free:
            pending = sum(trial.status == Trial.PENDING for trial in holding)
            limit = pending + 1 + (chosen is not None)
        self._controller.update_max_pending_trials(limit)


def store_results(trial: Trial) -> None:
    """Copy a trial's `result.json` to the experiment's storage before the trial starts again.

    Ray's logger then continues the stored file. Without the copy, the file may lack the last rows, because Ray stores
    it only from time to time.
    """
    local, storage = Path(trial.local_path or "", EXPR_RESULT_FILE), trial.storage
    if trial.checkpoint and local.is_file():
        stored = str(PurePosixPath(storage.trial_fs_path) / EXPR_RESULT_FILE)
        try:
            copy_files(str(local), stored, destination_filesystem=storage.storage_filesystem)
        except OSError as error:
            logger.warning(f"{stored} may lack rows: it could not be written before trial {trial} goes on: {error}")
