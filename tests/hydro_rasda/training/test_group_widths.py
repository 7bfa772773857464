"""Widths are measured once, remembered, and never fuse where fusing loses."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusionWarning, optim
from fusion.width import probe
from fusion.width.probe import Compiled
from hydro_rasda import RaceConfig, SweepConfig, TuneResult, loguniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Widths
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run import cache
from hydro_rasda.run.cache import WEEKS, cache_folder, remember
from hydro_rasda.training import group_widths
from hydro_rasda.training.group_widths import (
    _processor,
    _widths,
    of_trials,
    planned_widths,
    recall,
    widths_from,
)
from tests.hydro_rasda.models import Config, mlp

Pair = tuple[Tensor, Tensor]


@pytest.fixture
def problem(problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problem:
    """On a machine where nothing was measured yet."""
    monkeypatch.setenv("HYDRO_RASDA_CACHE", str(tmp_path / "cache"))
    return problem


def trials(count: int, **config: Any) -> list[Trial]:
    return [Trial(n, {"lr": 0.1, "batch_size": 32, **config}) for n in range(count)]


def test_measured_once_and_remembered(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned_widths(problem, {"kind": trials(8)})["kind"]
    measured = json.loads(entry().read_text())
    assert first == widths_from({int(k): rate for k, rate in measured["throughput"].items()}, measured["width"])
    assert 1 <= first.most <= 8
    refuse_to_measure(monkeypatch)
    assert planned_widths(problem, {"kind": trials(8)}) == {"kind": first}
    for other in (
        {"another kind": trials(8)},
        {"kind": trials(7)},
        {"kind": trials(8, optimizer="sgd", grad_clip=1.0)},
    ):
        with pytest.raises(Measured):
            planned_widths(problem, other)
    weeks_later = measured["at"] + WEEKS * 7 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: weeks_later - 1)
    assert planned_widths(problem, {"kind": trials(8)}) == {"kind": first}
    monkeypatch.setattr(time, "time", lambda: weeks_later)
    with pytest.raises(Measured):
        planned_widths(problem, {"kind": trials(8)})


@pytest.mark.parametrize("what", ["_processor", "_code"])
def test_another_machine_or_other_code_is_measured_anew(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    planned_widths(problem, {"kind": trials(2)})
    refuse_to_measure(monkeypatch)
    monkeypatch.setattr(group_widths, what, lambda: "another")
    with pytest.raises(Measured):
        planned_widths(problem, {"kind": trials(2)})


class Measured(BaseException):
    """Instead of remembered."""


def refuse_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*arguments: Any) -> None:
        raise Measured

    monkeypatch.setattr(group_widths, "measure_widths", measure)


def entry() -> Path:
    (file,) = cache_folder().iterdir()
    return file


@pytest.mark.parametrize("forked", [False, True])
def test_trials_that_cannot_be_measured_are_said_to_train_one_after_another(problem: Problem, forked: bool) -> None:
    def fails(model: nn.Module, batch: Any) -> Any:
        raise OSError("no descriptor is left")

    lost = replace(problem, objective=fails)
    with pytest.warns(UserWarning, match="trials train one after another, because .* OSError: no descriptor is left"):
        assert planned_widths(lost, {"kind": trials(8)}, forked=forked) == {"kind": Widths(1, assumed=True)}
    assert not cache_folder().exists()


def test_a_single_trial_is_not_measured(problem: Problem) -> None:
    assert planned_widths(problem, {"kind": trials(1)}) == {"kind": Widths(1, assumed=True)}
    assert not cache_folder().exists()


def test_a_sweep_that_is_as_short_as_a_measurement_is_not_measured(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has groups of a width that suits most models; each bound on the sweep makes it long enough."""
    refuse_to_measure(monkeypatch)
    tried = replace(problem, steady_epoch_seconds=0.25, peak=10.0)
    steps = problem.train_data.steps(32)
    assert steps is not None
    rate = steps / 0.25
    for max_t, memory, most in ((27, None, 160), (27, 1599.0, 20), (81, None, 20)):
        found = planned_widths(tried.with_settings(max_t=max_t), {"kind": trials(8)}, memory=memory)
        assert found == {"kind": Widths(most, 2, {1: rate, most: 2 * rate}, assumed=True)}
    many = tried.with_settings(max_t=81, sweep=SweepConfig(repeats=30))
    assert planned_widths(many, {"kind": trials(8)})["kind"].most == 1
    assert not cache_folder().exists()
    for long, memory in (
        (tried.with_settings(max_t=3**9), None),
        (replace(tried, steady_epoch_seconds=1e3), None),
        (replace(tried, steady_epoch_seconds=math.inf), None),
        (tried, 199.0),
    ):
        with pytest.raises(Measured):
            planned_widths(long, {"kind": trials(8)}, memory=memory)


def test_nothing_that_is_measured_outlasts_the_time_left(problem: Problem) -> None:
    """A step of trainings so long would be compiled, for half a minute, to see whether that pays."""
    long = replace(problem, steady_epoch_seconds=1e3).with_settings(max_t=10**6)
    with pytest.warns(UserWarning, match="there was no time left for it"):
        assert planned_widths(long, {"kind": trials(8)}, seconds=0.0) == {"kind": Widths(1, assumed=True)}
    assert not cache_folder().exists()
    found = planned_widths(long, {"kind": trials(8)}, seconds=200.0)["kind"]
    assert found.most > 1
    assert (found.compiled, found.compile_seconds) == (1.0, 0.0)


SIZES = {"fixed": 0, "each": 10}
SOUND = {"key": "k", "at": 1e9, "width": 2, "throughput": {"1": 1.0, "2": 2.0}, "obstacle": "", **SIZES}
ODD: list[Any] = [
    [],
    None,
    3,
    "width",
    {},
    {**SOUND, "key": "another"},
    {**SOUND, "at": None},
    {**SOUND, "at": 2e9},
    {**SOUND, "at": 10**400},
    {**SOUND, "width": 0},
    {**SOUND, "width": -2},
    {**SOUND, "width": 4},
    {**SOUND, "width": "2"},
    {**SOUND, "width": True},
    {**SOUND, "throughput": []},
    {**SOUND, "throughput": {}},
    {**SOUND, "throughput": {"2": 2.0}},
    {**SOUND, "throughput": {"0": 1.0, "1": 1.0, "2": 2.0}},
    {**SOUND, "throughput": {"1": 1.0, "2": math.nan}},
    {**SOUND, "throughput": {"1": 1.0, "2": -1.0}},
    {**SOUND, "throughput": {"1": 1.0, "2": "fast"}},
    {**SOUND, "throughput": {"1": 1.0, "two": 2.0}},
    {**SOUND, "throughput": {"1": 1.0, "9" * 9999: 2.0}},
    {**SOUND, "obstacle": None},
    {**SOUND, "each": -1},
    {**SOUND, "fixed": None},
]


def test_odd_content_is_ignored(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    remember("k", {"width": 1, "throughput": {"1": 1.0}, "obstacle": ""})
    file = entry()
    for content in [*map(json.dumps, ODD), "", "{half a", "[" * 99999, "\udcff"]:
        file.write_bytes(content.encode(errors="surrogateescape"))
        assert recall("k") is None, content[:200]
    file.write_text(json.dumps(SOUND))
    assert recall("k") == SOUND


@pytest.mark.parametrize("how", ["a file in its place", "full disk", "no home"])
def test_what_cannot_be_kept_is_measured_again_and_said_once(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    cache._warn_not_kept.cache_clear()
    if how == "a file in its place":
        (tmp_path / "cache").write_text("")
    elif how == "full disk":
        monkeypatch.setattr(cache, "write_atomically", full)
    else:
        monkeypatch.delenv("HYDRO_RASDA_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(UserWarning, match="cannot be kept for later runs"):
        assert planned_widths(problem, {"kind": trials(2)})["kind"].throughput.keys() == {1, 2}
    assert planned_widths(problem, {"kind": trials(2)})["kind"].throughput.keys() == {1, 2}


WRITE = """
import sys
from hydro_rasda.run.cache import remember
from hydro_rasda.training.group_widths import recall
for i in range(20):
    remember("one", {"width": 1, "throughput": {"1": 1.0}, "obstacle": "x" * 5000, "fixed": 0, "each": 1})
    remember(f"{sys.argv[1]}-{i}", {"width": 1, "throughput": {"1": 1.0}, "obstacle": "", "fixed": 0, "each": 1})
    assert recall("one") is not None
"""


def test_processes_that_write_at_once_lose_nothing(problem: Problem) -> None:
    writers = [subprocess.Popen([sys.executable, "-W", "error::UserWarning", "-c", WRITE, name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert recall("one") is not None
    assert all(recall(f"{name}-{i}") is not None for name in "ab" for i in range(20))
    assert len(list(cache_folder().iterdir())) == 41


def test_what_is_measured_are_the_trials_as_they_will_train(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own configuration, clipped, by muP's multipliers; no more are built than are measured."""
    built: list[int] = []
    asked: list[Any] = []

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if width_ratio < 1:
            built.append(config["n"])
        return mlp(config, width_ratio)

    def fused_optimizer(fused: Any, configs: Any, **multipliers: Any) -> Any:
        asked.append(([config["n"] for config in configs], multipliers))
        return original(fused, configs, **multipliers)

    original = optim.fused_optimizer
    clipped: list[Any] = []
    monkeypatch.setattr(probe, "fused_optimizer", fused_optimizer)
    monkeypatch.setattr(probe, "clip_grad_norm_", lambda fused, norms: clipped.append(norms))
    monkeypatch.setattr(probe, "next_width", lambda speedup, *rest: None if speedup else 3)
    configs: list[Config] = [
        {"optimizer": "adamw", "lr": 0.1, "grad_clip": None if n else 1.0, "n": n} for n in range(9)
    ]
    of_kind = [Trial(n, config) for n, config in enumerate(configs)]
    planned_widths(replace(problem, model_fn=model_fn), {"kind": of_kind})
    assert set(built) == {0, 1, 2}
    assert [members for members, _ in asked] == [[0], [0, 1, 2]]
    assert all(set(given) == {"lr_multipliers", "weight_decay_multipliers"} for _, given in asked)
    assert [1.0, math.inf, math.inf] in clipped


def test_widths_where_fusing_loses() -> None:
    losing, paying = widths_from({1: 100.0, 2: 90.0, 4: 95.0}, most=1), widths_from({1: 100.0, 2: 130.0}, most=2)
    assert (losing.most, losing.least, losing.rate) == (1, 2, 100.0)
    assert (paying.most, paying.least, paying.rate) == (2, 2, 130.0)


def test_where_there_is_less_memory_than_when_it_was_measured_a_narrower_group_trains() -> None:
    throughput = {"1": 100.0, "2": 180.0, "4": 320.0, "8": 600.0}
    measured = {"throughput": throughput, "width": 8, "fixed": 10.0, "each": 5.0}
    most = {room: _widths(measured, room).most for room in (50.0, 49.9, 33.0, 32.9, 1.0)}
    assert most == {50.0: 8, 49.9: 4, 33.0: 4, 32.9: 2, 1.0: 1}
    assert _widths(None, math.inf) == Widths(1, assumed=True)


def test_widths_of_models_become_widths_of_trials() -> None:
    widths = Widths(10, 2, {1: 100.0, 5: 250.0, 10: 400.0}, compiled=2.0)
    assert of_trials(widths, 1) is widths
    several = of_trials(widths, 5)
    assert (several.most, several.least, several.throughput) == (2, 1, {1: 50.0, 2: 80.0})
    assert of_trials(replace(widths, least=6), 5).least == 2
    assert of_trials(replace(widths, least=5), 5).least == 1
    assert [*of_trials(replace(widths, most=9), 2).throughput] == [1, 2, 4]
    few = of_trials(Widths(4, 2, {1: 100.0, 4: 200.0}), 5)
    assert (few.most, few.least, few.throughput) == (1, 2, {1: 20.0})


def test_a_processor_has_the_name_that_its_system_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(text: str | None) -> str:
        def read(path: Path) -> str:
            if text is None:
                raise FileNotFoundError(path)
            return text

        monkeypatch.setattr(Path, "read_text", read)
        return _processor.__wrapped__()

    monkeypatch.setattr(platform, "machine", lambda: "a machine")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert told("processor: 0\nmodel name\t: One 9000 \nmodel name\t: Two\n") == "One 9000"
    assert told("processor: 0\n") == told(None) == "a machine"
    monkeypatch.setattr(platform, "processor", lambda: "a processor")
    assert told(None) == "a processor"


def test_kinds_are_measured_beside_each_other(problem: Problem) -> None:
    """Each on a core, for the part of the trials that a core trains; one that cannot be survived is not fused."""

    def model_fn(config: Config, width_ratio: float) -> nn.Module:
        if "deadly" in config and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp(config, width_ratio)

    here = os.getpid()
    deadly = trials(9, deadly=True)
    asked = replace(problem, model_fn=model_fn)
    with pytest.warns(UserWarning, match="measuring how fast groups train failed: SIGKILL"):
        widths = planned_widths(asked, {"kind": trials(9), "deadly": deadly}, cores=2, forked=True)
    assert max(widths["kind"].throughput) <= 5
    assert widths["deadly"] == Widths(1, assumed=True)
    assert entry().exists()


def test_auto_finds_what_a_fixed_width_finds(quick: Callable[..., TuneResult]) -> None:
    auto, fixed = quick(sweep={"fusion": "auto"}, name="auto"), quick(sweep=SweepConfig(fusion=3), name="fixed")
    assert auto.best_config == fixed.best_config
    for one, other in zip(auto.trials, fixed.trials, strict=True):
        assert one.sweep_metric == pytest.approx(other.sweep_metric, rel=1e-3)


class Reader(nn.Module):
    """Divides by a number read out of a tensor, which vmap cannot follow."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y / max(1.0, y.detach().abs().max().item())


def reader(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return Reader(mlp(config, width_ratio))


# Of so few trials, two cores have a group each.
ONE_KIND: dict[str, Any] = {
    "sweep": {"fusion": "auto"},
    "space": {"lr": loguniform(1e-3, 0.1)},
    "num_samples": 12,
}
ONE_KIND |= {"max_t": 2, "race": RaceConfig(top_k=1)}


def test_a_model_that_vmap_cannot_follow_trains_one_by_one_and_says_so_once(
    quick: Callable[..., TuneResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRO_RASDA_CACHE", str(tmp_path / "cache"))
    for name in ("assumed", "measured", "remembered"):
        if name == "measured":
            assert not (tmp_path / "cache").exists()
            monkeypatch.setattr(group_widths, "MEASURED_FROM", 0)
        with pytest.warns(FusionWarning, match=r"one after another, module itself \(Reader\)") as caught:
            result = quick(model_fn=reader, name=name, **ONE_KIND)
        assert len([w for w in caught if w.category is FusionWarning]) == 1
        assert all(math.isfinite(trial.sweep_metric) for trial in result.trials)
    assert entry()


def test_an_objective_with_a_branch_on_data(quick: Callable[..., TuneResult]) -> None:
    def objective(model: nn.Module, batch: Pair) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss * 2 if loss > 1 else loss, "seen": torch.tensor(loss.item())}

    with pytest.warns(FusionWarning, match="one after another"):
        result = quick(objective=objective, **ONE_KIND)
    assert all(math.isfinite(trial.sweep_metric) for trial in result.trials)


def test_what_one_objective_measured_is_not_anothers(problem: Problem) -> None:
    def halting(model: nn.Module, batch: Pair) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss * 2 if loss > 1 else loss}

    kinds = {"one": [Trial(number, {"lr": 0.1}) for number in range(4)]}
    with pytest.warns(FusionWarning, match="one after another"):
        assert planned_widths(replace(problem, objective=halting), kinds)["one"].most == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(planned_widths(problem, kinds)["one"].throughput) > 1


class SequenceFirst(nn.Module):
    """[T, N, 64] -> [N, 10]."""

    def __init__(self, config: Config, width_ratio: float) -> None:
        super().__init__()
        self.body = mlp(config, width_ratio)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x.mean(0))
        return y


def test_tensors_that_differ_in_their_first_dimension(
    quick: Callable[..., TuneResult], digits: tuple[Pair, Pair]
) -> None:
    """Sequence first, [3, N, 64] against [N]: planned and trained, but not split."""

    def loader(data: Pair) -> Callable[[int], Any]:
        return lambda size: [(x.expand(3, *x.shape), y) for x, y in zip(data[0].split(size), data[1].split(size))]

    result = quick(
        model_fn=SequenceFirst,
        train_data=loader(digits[0]),
        val_data=loader(digits[1]),
        **ONE_KIND,
    )
    assert all(math.isfinite(trial.sweep_metric) for trial in result.trials)


def test_compiling_is_tried_where_groups_train_for_long(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; what compiled steps win is remembered beside the widths."""
    tried: list[int] = []

    def measured(modules: Any, *others: Any, **further: Any) -> Compiled:
        tried.append(len(modules))
        return Compiled(3.0, 20.0, 0.1)

    monkeypatch.setattr(group_widths, "compiled_speedup", measured)
    monkeypatch.setattr(group_widths, "best_width", lambda *of: 4)
    monkeypatch.setattr(probe, "best_width", lambda *of: 4)
    asked = {"kind": trials(8)}
    assert planned_widths(problem, asked)["kind"].compiled == 1.0
    monkeypatch.setattr(group_widths, "MEASURED_FROM_S", 0.0)
    monkeypatch.setattr(group_widths, "COMPILED_FROM", 1e-9)
    for _ in range(2):
        widths = planned_widths(problem, asked)["kind"]
        assert (widths.compiled, widths.compile_seconds) == (3.0, 20.0)
    assert tried == [4]
    assert planned_widths(problem.with_settings(graph=False), asked)["kind"].compiled == 1.0
    for name in cache_folder().iterdir():
        name.write_text(name.read_text().replace("3.0", "-3.0"))
    assert planned_widths(problem, asked)["kind"].compiled == 3.0
    assert tried == [4, 4]
