"""The main path, from `tune` to one step of a fused group, as CONTRIBUTING tells it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from fusion import FusedOptimizer
from hydro_rasda import TuneResult
from hydro_rasda.training.loop import train_epochs

ROOT = Path(__file__).parents[2]
MOST_FRAMES = 12


def tour() -> list[str]:
    """The frames that CONTRIBUTING lists, as `file:function`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(r"^ *\d+\. `([\w/]+\.py:\w+)`", text, flags=re.MULTILINE)


@pytest.mark.usefixtures("one_process")
def test_the_tour_is_the_path_of_a_fused_step(
    quick: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of the three packages alone: Python's and torch's own are passed over."""
    paths: list[list[str]] = []
    step = FusedOptimizer.step

    def watched(self: FusedOptimizer, takes: Tensor | None = None) -> None:
        frames = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()[:-1]]
        ours = [(path.relative_to(ROOT), name) for path, name in frames if path.is_relative_to(ROOT)]
        below = ours[next((i for i, (_, name) in enumerate(ours) if name == "tune"), len(ours)) :]
        paths.append([*(f"{path}:{name}" for path, name in below), "fusion/optim/fused.py:step"])
        step(self, takes)

    monkeypatch.setattr(FusedOptimizer, "step", watched)
    quick(num_samples=2, max_t=1)
    trained = [path for path in paths if any(frame.endswith(f":{train_epochs.__name__}") for frame in path)]
    assert trained
    assert all(len(path) <= MOST_FRAMES for path in trained)
    assert trained[0] == tour()
