from __future__ import annotations

import importlib
import inspect
import io
import pydoc
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest

import hydro_rasda
from hydro_rasda import LocalBackend, RaceConfig, RayBackend, SweepConfig, tune

PUBLIC = {
    *("tune", "load", "TuneResult", "SweepConfig", "RaceConfig", "RASDAScheduler", "elastic", "Worker"),
    *("LocalBackend", "RayBackend", "RunExists", "AllTrialsFailed"),
    *("choice", "grid_search", "loguniform", "qloguniform", "quniform", "randint", "sample_from", "secret", "uniform"),
}
ARGUMENTS_OF_TUNE = [
    *("model_fn", "space", "train_data", "val_data", "loss_fn", "objective", "metrics", "train", "metric"),
    *(
        "mode",
        "num_samples",
        "max_t",
        "full_trainings",
        "time_budget_s",
        "stop_at",
        "sweep",
        "race",
        "backend",
        "precision",
    ),
    *("storage_path", "name", "resume", "seed", "progress", "callbacks"),
]


def test_public_names() -> None:
    names = vars(hydro_rasda)["__all__"]
    assert names == sorted(PUBLIC)
    assert len(names) == 21
    assert {*names} <= {*dir(hydro_rasda)}
    everything: dict[str, Any] = {}
    exec("from hydro_rasda import *", everything)
    assert {*names} <= everything.keys()


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC:
        assert inspect.getdoc(getattr(hydro_rasda, name)), name


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("hydro_rasda.backends.ray", ["JournalEntry", "RescaledLR", "lr_factor", "read_journal"]),
        ("hydro_rasda.results", ["Cost", "TrialRecord"]),
        ("hydro_rasda.bubbles", ["BubbleBackend", "bubbles"]),
    ],
)
def test_names_of_submodules(module: str, names: list[str]) -> None:
    home = importlib.import_module(module)
    assert home.__all__ == names
    assert all(getattr(home, name).__doc__ for name in names)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'tuna'"):
        home.tuna  # noqa: B018


def test_tune_takes_25_arguments() -> None:
    assert [*inspect.signature(tune).parameters] == ARGUMENTS_OF_TUNE
    assert len(ARGUMENTS_OF_TUNE) == 25


@pytest.mark.parametrize("documented", [tune, SweepConfig, RaceConfig, LocalBackend, RayBackend])
def test_every_argument_is_documented(documented: Callable[..., Any]) -> None:
    told = inspect.getdoc(documented)
    assert told is not None
    for name in inspect.signature(documented).parameters:
        assert f"    {name}: " in told


def test_help_shows_a_signature_that_can_be_read() -> None:
    shown = io.StringIO()
    with redirect_stdout(shown):
        pydoc.Helper(output=shown).help(tune)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    signature = "\n".join(lines)[: "\n".join(lines).index("Find good hyperparameters")]
    assert "    sweep: SweepConfig = SweepConfig()," in signature
    assert "    loss_fn: LossFn | None = None," in signature
    assert "0x" not in signature
    assert str(inspect.signature(tune)) in "\n".join(lines)


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'hydro_rasda' has no attribute 'tuna'"):
        getattr(hydro_rasda, "tuna")  # noqa: B009


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'tuna'"):
        tune(None, {}, train_data=(), val_data=(), tuna=1)  # type: ignore[call-arg,arg-type]


SPARED = {
    "hydro_rasda.backends.ray.fork_server": ["torch", "ray.tune"],
    "hydro_rasda.backends.ray.scheduler": ["torch"],
    "hydro_rasda.records.record_from_journal": ["torch", "ray", "numpy", "pandas"],
    "hydro_rasda.training.full_size": ["ray.tune", "torch._dynamo"],
    "hydro_rasda.training.device": ["ray", "torch._dynamo"],
    "hydro_rasda.tuner": ["hydro_rasda.backends.ray", "torch._dynamo"],
    "surrogate": ["torch.fx.experimental.symbolic_shapes"],
}
EACH_IN_A_FORK = """
import importlib, os, sys
for torch_first in (False, True):
    if torch_first:
        import torch
    for module, spared in SPARED.items():
        if torch_first == ("torch" not in spared):
            if child := os.fork():
                os.waitpid(child, 0)
            else:
                importlib.import_module(module)
                print(module, sorted(set(spared) & set(sys.modules)), flush=True)
                os._exit(0)
"""


def test_imports_spare_what_is_not_needed() -> None:
    """Torch is loaded once for those that need it."""
    script = f"SPARED = {SPARED}\n{EACH_IN_A_FORK}"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert sorted(shown.stdout.splitlines()) == [f"{module} []" for module in sorted(SPARED)], shown.stderr
