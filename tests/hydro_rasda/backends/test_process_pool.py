"""Two devices of this machine, each with a process of its own: real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydro_rasda import LocalBackend, RaceConfig, SweepConfig, TuneResult, grid_search
from hydro_rasda.backends.process_pool import PROBLEM, read_shared, write_shared
from hydro_rasda.problem.objective import supervised
from tests.hydro_rasda.models import Config, mlp

Quick = Callable[..., TuneResult]
TWO = LocalBackend(["cpu", "cpu"])

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.slow
def test_two_devices_train_what_one_does(quick: Quick, tmp_path: Path) -> None:
    """Where one member at a time trains, nothing is grouped otherwise; the functions are no module's."""
    settings: dict[str, Any] = {
        "model_fn": lambda config, width_ratio=1.0: mlp(config, width_ratio),
        "sweep": SweepConfig(fusion=1),
    }
    pids = tmp_path / "pids"
    pids.mkdir()

    def objective(model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        (pids / str(os.getpid())).touch()
        return supervised()(model, batch)

    one, two = (
        quick(**settings, objective=objective, name=name, backend=of) for name, of in [("1", "local"), ("2", TWO)]
    )
    assert len(list(pids.iterdir())) == 3
    for a, b in zip(one.trials, two.trials, strict=True):
        shared = min(len(a.history), len(b.history))
        assert a.history[:shared] == b.history[:shared]
    assert two.cost.race_epochs > 0
    assert (one.best_config, one.best_metric) == (two.best_config, two.best_metric)
    assert not (tmp_path / "2" / PROBLEM).exists()


def killing(folder: Path, times: int) -> Callable[..., nn.Module]:
    """Builds models; those that are "deadly" kill the process that builds them, if not this one, so many times."""
    here = os.getpid()
    folder.mkdir()

    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        if config["deadly"] and os.getpid() != here and len(list(folder.iterdir())) < times:
            (folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp(config, width_ratio)

    return model_fn


@pytest.mark.parametrize(("times", "failed"), [(1, []), pytest.param(1000, [1], marks=pytest.mark.slow)])
def test_what_kills_its_process_costs_others_nothing(
    quick: Quick, tmp_path: Path, times: int, failed: list[int]
) -> None:
    deadly = {"deadly": grid_search([False, True]), "lr": 0.1, "batch_size": 64}
    model_fn = killing(tmp_path / "deaths", times)
    result = quick(model_fn=model_fn, space=deadly, num_samples=1, max_t=1, race=RaceConfig(top_k=1), backend=TWO)
    assert [record.trial for record in result.trials if record.status == "failed"] == failed
    trained = {record.trial: record.sweep_epochs for record in result.trials if record.trial not in failed}
    assert trained == dict.fromkeys({0, 1} - set(failed), 1)
    assert all("died 2 times: SIGKILL" in str(record.error) for record in result.trials if record.trial in failed)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """A script whose functions only it has, and that would tune again if its processes ran it."""
    script = f"""
        import os, signal, sys, time, warnings
        import torch
        from hydro_rasda import LocalBackend, SweepConfig, choice, tune
        warnings.simplefilter("ignore")
        here = os.getpid()
        torch.set_num_threads(1)
        def model_fn(config, width_ratio=1.0):
            width = int(16 * width_ratio)
            return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
        def objective(model, batch):
            if os.getpid() != here:
                os.write(1, b"%d\\n" % os.getpid())  # at once, whoever else writes
                if not os.path.exists("{tmp_path}/interrupted"):
                    open("{tmp_path}/interrupted", "x").close()
                    os.kill(here, signal.SIGINT)
                time.sleep(600)
            return {{"loss": model(batch[0]).square().mean()}}
        data = torch.rand(64, 4), torch.zeros(64)
        tune(model_fn, {{"lr": choice([0.1, 0.2])}}, train_data=data, val_data=data, objective=objective, num_samples=2,
             sweep=SweepConfig(fusion=1), backend=LocalBackend(["cpu", "cpu"]),
             storage_path={str(tmp_path)!r}, name="run", progress=False)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr, done.stderr
    pids = [int(line) for line in done.stdout.split()]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not (tmp_path / "run" / PROBLEM).exists()


def test_what_holds_an_open_file_trains_on_one_device(quick: Quick, tmp_path: Path) -> None:
    with (tmp_path / "data").open("wb") as file:

        def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
            assert not file.closed
            return mlp(config, width_ratio)

        with pytest.raises(ValueError, match=r"`device` is \['cpu', 'cpu'\], but must be one device for what holds"):
            quick(model_fn=model_fn, backend=TWO)


def test_tensors_are_mapped_and_what_is_written_into_them_stays_here(tmp_path: Path) -> None:
    data = torch.arange(1000.0), torch.zeros(0, 3), torch.tensor(7), torch.ones(2, 3, dtype=torch.bfloat16)
    model = nn.Linear(3, 2)
    write_shared(tmp_path / "shared", {"data": data, "model": model, "again": data[0]})
    size = (tmp_path / "shared").stat().st_size
    first, second = (read_shared(tmp_path / "shared") for _ in range(2))
    for of in (first, second):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(of["data"], data, strict=True))
        assert torch.equal(of["model"].weight, model.weight)
        assert of["again"] is of["data"][0]
    first["data"][0][0] = 5.0
    assert second["data"][0][0] == read_shared(tmp_path / "shared")["data"][0][0] == 0.0
    assert (tmp_path / "shared").stat().st_size == size < 4000 + 4000
