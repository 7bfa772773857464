"""Trials that end the process that tries them: the search goes on without them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydro_rasda import SweepConfig, TuneResult, choice
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import make_batches
from hydro_rasda.dry_run.dry_run import MISFITS, dry_run
from hydro_rasda.dry_run.isolated_dry_run import survived_dry_run
from hydro_rasda.problem.objective import as_objective
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.width_argument import Plans
from hydro_rasda.processes.forks import Died, imap_forked
from hydro_rasda.run.crash_log import CrashLog
from tests.hydro_rasda.conftest import on_threads
from tests.hydro_rasda.models import Config, mlp

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes that have computed are forked on Linux alone"
)

ENDS: dict[str, Callable[[], Any]] = {
    "segmentation fault": lambda: ctypes.string_at(0),
    "success": lambda: os._exit(0),
}


def deadly(config: Config, width_ratio: float = 1.0) -> nn.Module:
    """Ends its process where it is to be built."""
    if config.get("deadly"):
        faulthandler.disable()  # which pytest has print all threads
        ENDS[config["deadly"]]()
    return mlp(config, width_ratio)


def given(*deadly: str | None) -> list[Trial]:
    return [Trial(number, {"lr": 0.1, "deadly": how}) for number, how in enumerate(deadly)]


@pytest.mark.parametrize("end", ENDS)
def test_a_dry_run_passes_over_what_ends_its_process(problem: Problem, end: str) -> None:
    found = survived_dry_run(replace(problem, model_fn=deadly), given(end, end, None, end), CrashLog())
    assert "0.weight" in found.parameters


@pytest.mark.parametrize("count", [1, MISFITS + 2])
def test_where_every_trial_ends_its_process_it_is_said_of_which(problem: Problem, count: int) -> None:
    with pytest.raises(ValueError, match=r"end the process that tries them, for .*'lr': 0.1.*exit code 0"):
        survived_dry_run(replace(problem, model_fn=deadly), given(*["success"] * count), CrashLog())


def test_a_trial_that_ends_its_process_after_another_was_refused_is_named(problem: Problem) -> None:
    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        if not config["deadly"]:
            raise ArithmeticError("refused")
        return deadly(config, width_ratio)

    with pytest.raises(ValueError, match=r"end the process that tries them, for .*'deadly': 'success'.*exit code 0"):
        survived_dry_run(replace(problem, model_fn=model_fn), given(None, "success"), CrashLog())


def test_a_refusal_is_that_of_the_dry_run(problem: Problem) -> None:
    def broken(config: Config, width_ratio: float = 1.0) -> nn.Module:
        raise ArithmeticError("never")

    with pytest.raises(ValueError, match=r"`model_fn` fails for every configuration.*ArithmeticError: never") as caught:
        survived_dry_run(replace(problem, model_fn=broken), given("success", None), CrashLog())
    assert isinstance(caught.value.__cause__, ArithmeticError)


@pytest.mark.parametrize("given_to", [0, 8, 640])
def test_a_loader_that_takes_no_notice_of_the_batch_size_is_told_once(problem: Problem, given_to: int) -> None:
    x, y = torch.rand(320, 64), torch.zeros(320, dtype=torch.int64)

    def make_loader(batch_size: int) -> Any:
        return DataLoader(TensorDataset(x, y), batch_size=given_to or batch_size)

    train = make_batches(make_loader, "train_data", torch.device("cpu"), 0)
    trial = Trial(0, {"lr": 0.1, "batch_size": 16})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        survived_dry_run(replace(problem, train_data=train), [trial], CrashLog())
    told = [str(w.message) for w in caught if "`batch_size` changes nothing" in str(w.message)]
    first = min(given_to, 320)
    asked = f"`train_data` was asked for batches of 16 examples, and the first has {first}"
    assert [text.partition(":")[0] for text in told] == ([asked] if given_to else [])


class DiesLater(nn.Module):
    """An MLP that ends its process in training mode, once it was called so often with gradients."""

    def __init__(self, config: Config, width_ratio: float) -> None:
        super().__init__()
        self.body, self.left = mlp(config, width_ratio), 4 if config["deadly"] else -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled() and len(x) > 4:
            self.left -= 1
            if self.left == 0:
                os._exit(0)
        y: torch.Tensor = self.body(x)
        return y


SPACE = {"lr": 0.1, "batch_size": 64, "deadly": choice([False, "success"])}


@pytest.mark.parametrize("model_fn", [deadly, DiesLater])
def test_on_one_thread_a_search_ends_in_the_morning(
    quick: Callable[..., TuneResult], model_fn: Callable[..., nn.Module]
) -> None:
    with on_threads(1):
        result = quick(model_fn=model_fn, space=SPACE, sweep=SweepConfig(fusion=1), num_samples=6)
    _all_but_the_deadly(result)


def _all_but_the_deadly(result: TuneResult) -> None:
    assert {t.status == "failed" for t in result.trials if t.config["deadly"]} == {True}
    assert {t.status == "failed" for t in result.trials if not t.config["deadly"]} == {False}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("model_fn", [deadly, DiesLater])
def test_where_nothing_is_forked_the_same_call_leaves_out_what_ended_it_three_times(
    quick: Callable[..., TuneResult], model_fn: Callable[..., nn.Module]
) -> None:
    """Each call is a process of its own here, which its trials may end."""

    def call(notify: Any) -> list[tuple[str, bool]]:
        result = quick(model_fn=model_fn, space=SPACE, sweep=SweepConfig(fusion=1), num_samples=4, seed=2)
        return [(trial.status, bool(trial.config["deadly"])) for trial in result.trials]

    calls = 0
    while True:
        ((_, found),) = imap_forked([call], 1, print)
        calls += 1
        if not isinstance(found, Died):
            break
        assert found.how == "exit code 0"
    ends = [is_deadly for _, is_deadly in found]
    tried_first = ends.index(False) if model_fn is deadly else 0
    assert {(status == "failed", is_deadly) for status, is_deadly in found} == {(True, True), (False, False)}
    # In the dry run, two deaths have a trial come after one that works.
    assert calls == 1 + 3 * sum(ends) + 2 * tried_first
    assert dict(imap_forked([call], 1, print)) == {0: found}


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[bool]]:
    """For each dry run so far, in any process, whether this process did it."""
    file = tmp_path / "dry-runs"

    def noted(*given: Any, **more: Any) -> Any:
        with file.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        return dry_run(*given, **more)

    monkeypatch.setattr("hydro_rasda.dry_run.isolated_dry_run.dry_run", noted)
    return lambda: [int(line) == os.getpid() for line in file.read_text().split()]


def test_a_dry_run_is_done_once_in_a_process_of_its_own(problem: Problem, dry_runs: Callable[[], list[bool]]) -> None:
    """This process builds one model, to read the data."""
    alone = dry_run(replace(problem, plans=Plans()), given(None))
    built = []

    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        built.append(width_ratio)
        return mlp(config, width_ratio)

    found = survived_dry_run(replace(problem, model_fn=model_fn), given(None), CrashLog())
    assert (dry_runs(), built) == ([False], [1.0])
    assert torch.equal(found.example_input[0], alone.example_input[0])
    timed = {"example_input", "peak", "epoch_seconds", "steady_epoch_seconds"}
    same = {field.name for field in fields(alone)} - timed
    assert {name: getattr(found, name) for name in same} == {name: getattr(alone, name) for name in same}
    assert 0 < found.steady_epoch_seconds <= found.epoch_seconds


class Unsendable(torch.Tensor):
    """A tensor that no other process can be sent."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not to be sent")


def test_findings_that_cannot_be_sent_are_found_again(problem: Problem, dry_runs: Callable[[], list[bool]]) -> None:
    def objective(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        output = model(x.as_subclass(Unsendable)).as_subclass(torch.Tensor)
        return {"loss": nn.functional.cross_entropy(output, y)}

    found = survived_dry_run(
        replace(problem, objective=as_objective(objective, nn.functional.cross_entropy)), given(None), CrashLog()
    )
    assert dry_runs() == [False, True]
    assert isinstance(found.example_input[0], Unsendable)


def test_warnings_of_a_dry_run_are_given_once(problem: Problem) -> None:
    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        if config["deadly"] is None:
            warnings.warn("this model is slow", stacklevel=1)
        return mlp(config, width_ratio)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        survived_dry_run(replace(problem, model_fn=model_fn), given(None), CrashLog())
    assert [str(one.message) for one in caught].count("this model is slow") == 1
