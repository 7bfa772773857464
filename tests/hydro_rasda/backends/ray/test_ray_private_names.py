"""The installed Ray has each private name that is used, and no module but one uses any."""

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import hydro_rasda
from hydro_rasda.backends.ray import ray_private_names

PRIVATE: Mapping[str, Mapping[str, str]] = {
    "ray.tune.execution.tune_controller.TuneController": {
        "_actor_manager": "find who holds the placement groups; without, leave `lose_no_worker` out",
        "_mark_trial_to_checkpoint": "leave it out if Ray itself saves the status of a paused trial that is stopped",
        "_requeue_trial": "have the trial added again as Ray does for one that may be repeated",
        "_set_trial_status": "find how a searcher is told the last result of a paused trial that is stopped",
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
        "num_live_actors": "find out whether no trial holds workers; without, leave `Slots.heed_others` out",
        "num_pending_actors": "likewise",
        "_resource_manager": "find who holds the placement groups; without, leave `lose_no_worker` out",
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
"""Maps classes of Ray to their private names in use, each with what to do if a version of Ray lacks it."""

ROOM = Path(hydro_rasda.__file__).parent
NAMES = {name for names in PRIVATE.values() for name in names}


@pytest.mark.parametrize("place", PRIVATE)
def test_ray_has_them(place: str) -> None:
    module, _, name = place.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    source = inspect.getsource(cls)
    for private, otherwise in PRIVATE[place].items():
        there = hasattr(cls, private) or re.search(rf"self\.{private}\b", source)
        assert there, f"{place}.{private}: {otherwise}"


def test_the_table_has_all_that_are_used() -> None:
    used = set(re.findall(r"(?:_controller|actors|groups)\.(_\w+|num_\w+)", inspect.getsource(ray_private_names)))
    used |= set(re.findall(r"self\.(_(?:request|pg|staging)_\w+)", inspect.getsource(ray_private_names.SettledGroups)))
    used |= set(re.findall(r'get\("(_\w+)"\)', inspect.getsource(ray_private_names)))
    assert used <= NAMES
    assert {"_staged_trials", "_request_to_staged_pgs", "_trainable_func"} <= used


def test_no_other_module_uses_one() -> None:
    elsewhere = [path for path in ROOM.rglob("*.py") if path != Path(ray_private_names.__file__)]
    found = {name for path in elsewhere for name in NAMES if re.search(rf"\b{name}\b", path.read_text())}
    assert found == {"_supports_buffered_results"}, "a scheduler says that of itself"
