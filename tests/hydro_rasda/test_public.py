from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import hydro_rasda


def test_public_names() -> None:
    assert hydro_rasda.__all__ == [
        "AllTrialsFailed",
        "Backend",
        "BubbleBackend",
        "Callback",
        "CheckpointSaved",
        "Cost",
        "Drop",
        "EpochEnded",
        "EpochsTrained",
        "Event",
        "FinalistsChosen",
        "GoOn",
        "JournalEntry",
        "LocalBackend",
        "MessageSaid",
        "RASDAConfig",
        "RASDAScheduler",
        "RayBackend",
        "RescaledLR",
        "RunBegan",
        "RunEnded",
        "RunExists",
        "RungDecided",
        "StageBegan",
        "StageEnded",
        "SweepRule",
        "SweepState",
        "TrialConfigured",
        "TrialEnded",
        "TrialFailed",
        "TrialRecord",
        "TuneResult",
        "Worker",
        "bubbles",
        "choice",
        "elastic",
        "grid_search",
        "load",
        "loguniform",
        "lr_factor",
        "qloguniform",
        "quniform",
        "randint",
        "read_journal",
        "sample_from",
        "tune",
        "uniform",
    ]


def test_every_public_name_is_there_and_documented() -> None:
    for name in hydro_rasda.__all__:
        assert inspect.getdoc(getattr(hydro_rasda, name)), name


def test_every_argument_of_tune_is_documented() -> None:
    documented = inspect.getdoc(hydro_rasda.tune)
    assert documented is not None
    for name in inspect.signature(hydro_rasda.tune).parameters:
        assert f"    {name}: " in documented


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'hydro_rasda' has no attribute 'tuna'"):
        hydro_rasda.tuna  # noqa: B018


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("hydro_rasda.backends.ray.fork_server", ["torch", "ray.tune"]),
        ("hydro_rasda.training.ddp", ["ray.tune", "torch._dynamo"]),
        ("hydro_rasda.training.trainer", ["ray", "torch._dynamo"]),
        ("hydro_rasda.tuner", ["hydro_rasda.backends.ray", "torch._dynamo"]),
        ("hydro_rasda.backends.ray.scheduler", ["torch"]),
        ("hydro_rasda.run.reading", ["torch", "ray", "numpy", "pandas"]),
        ("surrogate", ["torch.fx.experimental.symbolic_shapes"]),
    ],
)
def test_imports_spare_what_is_not_needed(module: str, spared: list[str]) -> None:
    told = f"import sys, {module}; print(sorted(set({spared}) & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
