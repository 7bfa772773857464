from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from hydro_rasda import RaceConfig, SweepConfig, TuneResult, choice, load, loguniform
from hydro_rasda.settings.config import Keep

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]


class Tied(nn.Module):
    """A weight of two names, another that does not lie in order, and buffers of a count and of means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.out = nn.Linear(width, 10)
        self.out.weight = nn.Parameter(self.out.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(self.inner(x)))))
        output: Tensor = self.out(hidden)
        return output


def tied(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    return Tied(int(16 * width_ratio))


class Counted(nn.Module):
    """Its state holds more than tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        return output

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}


SMALL: dict[str, Any] = {
    "model_fn": tied,
    "space": {"lr": loguniform(1e-3, 0.3), "extra": {"activation": choice([nn.ReLU, nn.GELU])}},
    "num_samples": 3,
    "max_t": 2,
    "sweep": SweepConfig(surrogate=1),
}


@pytest.mark.parametrize("keep", ["best", "last"])
def test_what_is_written_is_the_best_model_and_its_configuration(quick: Quick, tmp_path: Path, keep: Keep) -> None:
    result = quick(**SMALL, race=RaceConfig(keep=keep, top_k=3), full_trainings=3)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.is_file()
    assert result.save_model(tmp_path / "new" / "best") == tmp_path / "new" / "best"
    again = load(result.path)
    assert again.best_checkpoint == result.best_checkpoint
    again.save_model(tmp_path / "again")
    modes = {file.stat().st_mode for file in (tmp_path / "again").iterdir()}
    assert len(modes) == 1
    with pytest.raises(ValueError, match=r"`path` is .*config.json'\), but must be the path of a folder"):
        again.save_model(tmp_path / "again" / "config.json")
    model = result.best_model()
    for folder in (tmp_path / "new" / "best", tmp_path / "again"):
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    rebuilt = again.best_model(model_fn=tied)
    tied({}).load_state_dict(weights)
    x = torch.ones(2, 64)
    assert torch.equal(rebuilt(x), model(x))
    written = {folder: (tmp_path / folder / "config.json").read_text() for folder in ("new/best", "again")}
    assert written["new/best"] == written["again"]
    assert json.loads(written["again"]) == {
        "lr": result.best_config["lr"],
        "extra": {"activation": result.best_config["extra"]["activation"].__name__},
    }
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        epoch = result.trials[result.best_trial].kept_epoch
        told = {"trial": str(result.best_trial), "val_loss": str(result.best_metric), "epoch": str(epoch)}
        assert file.metadata() == {"format": "pt", "run": "run", **told}


def test_another_finalist(quick: Quick, tmp_path: Path) -> None:
    result = quick(**SMALL)
    (other,) = result._checkpoints.keys() - {result.best_trial}
    weights = load_file(result.save_model(tmp_path / "other", trial=np.int64(other)) / "model.safetensors")  # type: ignore[arg-type]
    assert torch.equal(weights["out.weight"], result.best_model(other).state_dict()["out.weight"])
    assert json.loads((tmp_path / "other" / "config.json").read_text())["lr"] == result.trials[other].config["lr"]
    (loser,) = {0, 1, 2} - result._checkpoints.keys()
    with pytest.raises(ValueError, match=rf"`trial` is {loser}, but must be one of the finalists \["):
        result.save_model(tmp_path / "none", trial=loser)
    result._checkpoints[other].unlink()
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(result._checkpoints[other]))} is gone: "):
        result.save_model(tmp_path / "none", trial=other)
    result.path.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"the run's folder .* is gone: if it was moved, `hydro_rasda\.load`"):
        result.save_model(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_state_that_safetensors_cannot_hold(quick: Quick, tmp_path: Path) -> None:
    result = quick(model_fn=lambda config, width_ratio=1.0: Counted(int(16 * width_ratio)), num_samples=1, max_t=1)
    rule = r"the model's state has \['_extra_state'\], but safetensors hold tensors alone: .* has all"
    with pytest.raises(ValueError, match=rule):
        result.save_model(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_before_the_full_size_stage_there_is_no_checkpoint(quick: Quick, tmp_path: Path) -> None:
    result = quick(**SMALL)
    journal = result.path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[: next(i for i, line in enumerate(lines) if '"race' in line)]))
    early = load(result.path)
    assert early.best_checkpoint is None
    with pytest.raises(ValueError, match=r"no trial of the run in .* has trained at full size"):
        early.save_model(tmp_path / "none")


def in_complex_numbers(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, int(16 * width_ratio)), nn.ReLU(), nn.Linear(int(16 * width_ratio), 10))
    model.register_buffer("phases", torch.ones(3, dtype=torch.complex128))
    return model


def test_a_type_of_numbers_that_safetensors_cannot_hold(quick: Quick, tmp_path: Path) -> None:
    result = quick(model_fn=in_complex_numbers, num_samples=2, max_t=1)
    with pytest.raises(ValueError, match=f"hold no tensors of torch.complex128, but {result.best_checkpoint} has all"):
        result.save_model(tmp_path / "best")
