"""Runs that were really made, once for all tests of the command line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

from hydro_rasda import RaceConfig, choice, loguniform, tune
from hydro_rasda.processes.child_count import ONE_PROCESS


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    width = int(32 * width_ratio)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def search(folder: Path, name: str, build: Callable[..., nn.Module] = model_fn, **arguments: Any) -> str:
    """A search of a second, in one process: 12 configurations on random data, 9 epochs."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 8, generator=generator), torch.randint(0, 3, (256,), generator=generator)
    domains = {"lr": loguniform(1e-4, 1), "optimizer": choice(["sgd", "adamw"]), "batch_size": choice([32, 64])}
    space = arguments.pop("space", domains)
    defaults: dict[str, Any] = {"num_samples": 12, "max_t": 9, "race": RaceConfig(top_k=3), "progress": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ONE_PROCESS, "1")
        tune(
            build,
            space,
            train_data=(x, y),
            val_data=(x, y),
            storage_path=folder,
            name=name,
            **{**defaults, **arguments},
        )
    return str(folder / name)


@pytest.fixture(scope="package")
def past(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that is over."""
    return search(tmp_path_factory.mktemp("runs"), "past")


@pytest.fixture
def part(past: str, tmp_path: Path) -> str:
    """The same, as it stood before its first full-size model, without checkpoints."""
    folder = tmp_path / "part"
    folder.mkdir()
    shutil.copy(Path(past) / "run.json", folder)
    swept, _, _ = (Path(past) / "journal.jsonl").read_text().partition('{"event": "metrics", "heat": "race"')
    (folder / "journal.jsonl").write_text(swept)
    return str(folder)


@pytest.fixture
def holding() -> Iterator[Callable[[Path], None]]:
    """Holds runs as the process does that works on them, until the test is over."""
    locks: list[FileLock] = []

    def hold(folder: Path) -> None:
        locks.append(FileLock(folder / ".lock"))
        locks[-1].acquire(blocking=False)

    yield hold
    for lock in locks:
        lock.release()
