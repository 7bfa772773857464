"""Placement groups that are taken back while Ray places them."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.air.execution import ResourceRequest

from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray.ray_private_names import SettledGroups, is_settled
from tests.hydro_rasda.backends.ray.curves import curve


@pytest.mark.parametrize(
    ("state", "scheduling", "settled"),
    [
        ("PENDING", "QUEUED", False),
        ("PENDING", "SCHEDULING_STARTED", False),
        ("PREPARED", "NO_RESOURCES", False),
        ("RESCHEDULING", "QUEUED", False),
        ("PENDING", "NO_RESOURCES", True),
        ("PENDING", "INFEASIBLE", True),
        ("CREATED", "FINISHED", True),
        ("REMOVED", "REMOVED", True),
    ],
)
def test_a_group_is_settled_unless_it_is_being_placed(state: str, scheduling: str, settled: bool) -> None:
    assert is_settled({"state": state, "stats": {"scheduling_state": scheduling}}) == settled
    assert is_settled({}), "it is gone"


@pytest.mark.slow
def test_requests_taken_back_at_any_moment_leave_every_worker_free(ray8: None) -> None:
    """Where they are removed at once, one to eight of the workers are lost in most runs."""
    groups, draw = SettledGroups(), random.Random(0)
    asked: list[ResourceRequest] = []
    for _ in range(1000):
        asked.append(ResourceRequest([{"CPU": 1.0}] * draw.choice([1, 1, 1, 2, 4, 8])))
        groups.request_resources(asked[-1])
        time.sleep(draw.random() * 0.01)
        while len(asked) > draw.randint(0, 6):
            groups.cancel_resource_request(asked.pop(draw.randrange(len(asked))))
    groups.clear()
    assert states() <= {"REMOVED"}


@pytest.mark.slow
def test_clear_leaves_no_group_behind(ray8: None) -> None:
    """Those placed, those being placed, and those that find no room."""
    groups = SettledGroups()
    for workers in (2, 2, 8, 4, 8):
        groups.request_resources(ResourceRequest([{"CPU": 1.0}] * workers))
    groups.clear()
    assert states() <= {"REMOVED"}
    assert not groups.get_resource_futures()


@pytest.mark.slow
def test_the_scheduler_has_them_taken_back_so(ray8: None, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Sees(RASDAScheduler):
        def choose_trial_to_run(self, tune_controller: Any) -> Any:
            controller = getattr(tune_controller, "_tune_controller", tune_controller)
            seen.append(type(controller._actor_manager._resource_manager))
            return super().choose_trial_to_run(tune_controller)

    tune.Tuner(
        curve,
        param_space={"x": tune.grid_search([0.0, 0.5])},
        tune_config=tune.TuneConfig(scheduler=Sees(max_t=2), metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert set(seen) == {SettledGroups}


def states() -> set[str]:
    return {row["state"] for row in ray.util.placement_group_table().values()}
