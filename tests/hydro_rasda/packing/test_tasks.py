"""Jobs as they are handed in."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from hydro_rasda.packing import Estimate, Task
from hydro_rasda.packing.tasks import tasks_of


def test_jobs_are_named_by_their_place_and_are_of_a_kind_by_what_they_run() -> None:
    tasks = tasks_of([["/usr/bin/python", "train.py", "--lr", "1"], Task(["true"], name="mine"), math.tau.hex])
    assert [task.name for task in tasks] == ["0", "mine", "2"]
    assert [task.kind for task in tasks] == ["python train.py", "true", "builtins.float.hex"]
    assert tasks_of([partial(int, "1")])[0].what == ["builtins.int"]
    assert tasks_of([Task(["true"], kind="small")])[0].kind == "small"


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="`name` is '1'"):
        tasks_of([Task(["true"], name="1"), ["true"]])


@pytest.mark.parametrize("run", ["true", [], ["sleep", 1], None])
def test_what_cannot_be_run_is_refused(run: Any) -> None:
    with pytest.raises(ValueError, match="`run`"):
        Task(run)


@pytest.mark.parametrize("name", ["memory", "share", "seconds"])
def test_an_estimate_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` is 0"):
        Estimate(**{name: 0})
