"""Digits, small and large, and a call of `tune` that takes a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice, loguniform, tune, uniform
from hydro_rasda.cli import main
from hydro_rasda.data import make_batches
from hydro_rasda.heats import middle_heat
from hydro_rasda.problem.objective import supervised
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.child_count import ONE_PROCESS
from hydro_rasda.settings.config import TuneConfig
from tests.hydro_rasda.browser import browser as browser
from tests.hydro_rasda.models import mlp
from tests.hydro_rasda.parts import over

Pair = tuple[Tensor, Tensor]
Said = Callable[..., str]
"""Runs a command of `hydro-rasda`, which must succeed, and returns what it prints; words may be paths."""


class Clock:
    """Takes the place of the module `time` in a module under test. The test sets `now`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def digits() -> tuple[Pair, Pair]:
    """320 examples to train on, 160 to validate with."""
    data = load_digits()
    x = torch.tensor(data.data / 16, dtype=torch.float32)
    y = torch.tensor(data.target)
    return (x[:320], y[:320]), (x[320:480], y[320:480])


@pytest.fixture
def problem(digits: tuple[Pair, Pair]) -> Problem:
    """The small MLP at half its width on the small digits."""
    cpu = torch.device("cpu")
    return Problem(
        model_fn=mlp,
        objective=supervised(),
        train_data=make_batches(digits[0], "train_data", cpu, 0),
        val_data=make_batches(digits[1], "val_data", cpu, 0),
        settings=TuneConfig(sweep=SweepConfig(surrogate=0.5), max_t=4),
        device=cpu,
    )


@pytest.fixture(autouse=True, scope="session")
def machine_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is measured on this machine, kept for this session alone."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDRO_RASDA_CACHE", str(path))
        yield path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def printed(*words: object) -> str:
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return printed


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Torch computes on this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def in_one_process() -> Iterator[None]:
    """On one thread, and all that `tune` does is done in this process."""
    with on_threads(1), pytest.MonkeyPatch.context() as patch:
        patch.setenv(ONE_PROCESS, "1")
        yield


@pytest.fixture
def one_process() -> Iterator[None]:
    with in_one_process():
        yield


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many models have been followed on symbolic sizes, in this process and those forked from it."""
    from surrogate import size_constraints  # takes as long to import as torch itself

    file = tmp_path / "traces"
    file.touch()
    trace_sizes = size_constraints.trace_sizes

    def noting(module: nn.Module, example_input: Any) -> size_constraints.SizeTrace:
        with file.open("a") as opened:
            opened.write("x")
        return trace_sizes(module, example_input)

    monkeypatch.setattr(size_constraints, "trace_sizes", noting)
    return lambda: len(file.read_text())


SPACE: dict[str, Any] = {
    "lr": loguniform(1e-3, 0.3),
    "momentum": uniform(0.5, 0.95),
    "optimizer": choice(["sgd", "adamw"]),
    "activation": choice(["relu", "tanh"]),
    "batch_size": choice([32, 64]),
}


def tuned(digits: tuple[Pair, Pair], folder: Path, **arguments: Any) -> TuneResult:
    """`tune` with defaults that make it quick; any argument can be given in their place."""
    defaults: dict[str, Any] = {
        "model_fn": mlp,
        "space": SPACE,
        "train_data": digits[0],
        "val_data": digits[1],
        "num_samples": 9,
        "max_t": 4,
        "sweep": SweepConfig(reduction_factor=2, surrogate=1 / 2, fusion=8),
        "race": RaceConfig(top_k=2),
        "full_trainings": 1,
        "storage_path": folder,
        "name": "run",
        "progress": False,
    }
    return tune(**over(defaults, arguments))


@pytest.fixture
def smallest_have_a_middle_heat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests have a middle heat with models that train in no time."""
    monkeypatch.setattr(middle_heat, "LEAST_STEP", 0)


@pytest.fixture
def quick(digits: tuple[Pair, Pair], tmp_path: Path) -> Callable[..., TuneResult]:
    return partial(tuned, digits, tmp_path)
