"""Placement groups that are taken back while Ray places them."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import tune
from ray.air.execution import PlacementGroupResourceManager, ResourceRequest
from ray.air.execution.resources import placement_group

from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray import ray_private_names
from hydro_rasda.backends.ray.ray_private_names import ControllerStage, SettledGroups, is_settled
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


class Group:
    """A placement group that Ray places when the test says so."""

    state = "PENDING"

    def ready(self) -> Group:
        return self


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Stand in for the cluster; return the groups that were removed, in order."""
    found: list[Group] = []

    def wait(futures: list[Group], **_: Any) -> tuple[list[Group], list[Group]]:
        ready = [group for group in futures if group.state == "CREATED"]
        return ready, [group for group in futures if group not in ready]

    def row(group: Group) -> dict[str, Any]:
        return {"state": group.state, "stats": {"scheduling_state": "SCHEDULING_STARTED"}}

    monkeypatch.setattr(ResourceRequest, "to_placement_group", lambda request: Group())
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "cancel", lambda future: None)
    monkeypatch.setattr(ray.util, "remove_placement_group", found.append)
    for module in (ray_private_names, placement_group):
        monkeypatch.setattr(module, "remove_placement_group", found.append)
    monkeypatch.setattr(ray_private_names, "placement_group_table", row)
    return found


def test_a_request_that_is_taken_back_keeps_its_group_until_ray_has_placed_it(removed: list[Group]) -> None:
    groups, request = SettledGroups(), ResourceRequest([{"CPU": 1.0}])
    groups.request_resources(request)
    (taken_back,) = groups.get_resource_futures()
    groups.cancel_resource_request(request)
    assert (groups.get_resource_futures(), removed) == ([], [])
    groups.request_resources(request)
    groups.update_state()
    assert removed == []
    (wanted,) = groups.get_resource_futures()
    taken_back.state = wanted.state = "CREATED"
    groups.update_state()
    assert removed == [taken_back]
    assert groups.has_resources_ready(request)
    groups.cancel_resource_request(request)
    assert removed == [taken_back, wanted], "it is placed"
    groups.clear()
    assert removed == [taken_back, wanted]


def test_clear_gives_ray_some_seconds_to_place_a_group_and_removes_it_anyway(
    removed: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_private_names, "_SETTLES_WITHIN_S", 0.05)
    groups, request = SettledGroups(), ResourceRequest([{"CPU": 1.0}])
    for _ in range(3):
        groups.request_resources(request)
    ready, placed, placing = groups.get_resource_futures()
    ready.state = "CREATED"
    groups.update_state()
    placed.state = "CREATED"
    began = time.monotonic()
    groups.clear()
    assert time.monotonic() - began >= 0.05
    assert {*removed} == {ready, placed, placing}
    assert removed.index(placed) < removed.index(placing)
    assert len(removed) == 3
    assert groups.get_resource_futures() == []
    assert not groups.has_resources_ready(request)


def test_only_rays_own_manager_without_requests_is_replaced(removed: list[Group]) -> None:
    """A group that the manager has requested already would be lost with it. A user's own manager stays."""

    class Own(PlacementGroupResourceManager):  # type: ignore[misc]
        pass

    idle, busy, own = PlacementGroupResourceManager(0.3), PlacementGroupResourceManager(), Own()
    busy.request_resources(ResourceRequest([{"CPU": 1.0}]))
    found = list[Any]()
    for manager in (idle, busy, own):
        controller = SimpleNamespace(_actor_manager=SimpleNamespace(_resource_manager=manager))
        ControllerStage(controller).lose_no_worker()
        found.append(controller._actor_manager._resource_manager)
    assert (type(found[0]), found[0].update_interval_s) == (SettledGroups, 0.3)
    assert found[1:] == [busy, own]


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
