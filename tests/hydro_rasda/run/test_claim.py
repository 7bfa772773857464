"""Calls of `tune` that are killed, that come while another one works, or that are refused."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from torch import nn

from hydro_rasda import RunExists, SweepConfig, TuneResult, load, loguniform
from hydro_rasda.contracts import Event
from hydro_rasda.records.report import closing_lines
from hydro_rasda.run import claim as module
from hydro_rasda.run.claim import LOCK, Claim, held
from hydro_rasda.run.crash_log import DOING, DROPPED
from hydro_rasda.run.events import CheckpointSaved, EpochsTrained, HeatBegan
from hydro_rasda.run.files import Unsafe
from hydro_rasda.training import group_widths
from tests.hydro_rasda.forks import forked, is_killed
from tests.hydro_rasda.models import Config, mlp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes that have computed are forked")

Quick = Callable[..., TuneResult]


class Kills:
    """Kills its process in the first epoch of a heat, or in the first one after other trials were through."""

    def __init__(self, heat: str, others: int = 0) -> None:
        self._heat, self._others, self._now = heat, others, ""
        self._done: set[int] = set()

    def on_event(self, event: Event) -> None:
        if isinstance(event, HeatBegan):
            self._now, self._done = event.heat, set()
        elif isinstance(event, CheckpointSaved):
            self._done |= {*event.trials}
        elif isinstance(event, EpochsTrained) and self._now == self._heat and len(self._done) >= self._others:
            os.kill(os.getpid(), signal.SIGKILL)


def told(result: TuneResult) -> Any:
    return result.best_trial, result.best_metric, [(t.status, t.metric, t.sweep_metric) for t in result.trials]


ALONE: dict[str, Any] = {"sweep": SweepConfig(reduction_factor=2, surrogate=1 / 2, fusion=1), "num_samples": 4}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("heat", "others"), [("sweep", 3), pytest.param("race", 1, marks=pytest.mark.slow)])
def test_kills_of_the_tuner_in_one_epoch_drop_a_trial_only_when_no_other_is_left(
    quick: Quick, heat: str, others: int
) -> None:
    """After two, it trains last; after a third, it is dropped, until the user has it tried again."""
    whole = told(quick(**ALONE, name="whole"))
    for _ in range(2):
        assert is_killed(lambda: quick(**ALONE, callbacks=[Kills(heat)]))
    assert is_killed(lambda: quick(**ALONE, name="other", callbacks=[Kills(heat)]))
    assert is_killed(lambda: quick(**ALONE, name="other", callbacks=[Kills(heat)]))
    assert told(quick(**ALONE, name="other")) == whole
    assert is_killed(lambda: quick(**ALONE, callbacks=[Kills(heat, others)]))
    without = quick(**ALONE)
    (dropped,) = (trial for trial in without.trials if trial.status == "failed")
    assert (dropped.error or "").startswith(DROPPED)
    for result in (without, quick(**ALONE), load(without.path)):
        (line,) = (line for line in closing_lines(result, "runs/run") if DROPPED in line)
        assert line.startswith(f"Trial {dropped.trial} was dropped: {DROPPED} of it three times; ")
        assert "the same call with `resume='changed'` tries it again" in line
    for resume in ("changed", "auto", "must"):
        again = told(quick(**ALONE, resume=resume))
        # At full size, others have trained further meanwhile.
        assert again == whole if heat == "sweep" else again[:2] == whole[:2]
        assert not any(status == "failed" for status, *_ in again[2])


@pytest.mark.usefixtures("one_process")
def test_kills_in_one_epoch_of_a_group_drop_no_trial(quick: Quick) -> None:
    """It trains in halves then: the last digits may differ, and a rung may, too."""
    for _ in range(2):
        assert is_killed(lambda: quick(callbacks=[Kills("sweep")]))
    assert {trial.status for trial in quick().trials} <= {"finished", "stopped"}


@pytest.mark.usefixtures("one_process")
def test_a_measurement_that_ended_processes_is_left_out_until_the_user_has_it_tried_again(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def measures(*arguments: Any) -> Any:
        measured.append(arguments)
        return measure_widths(*arguments)

    measure_widths = group_widths.measure_widths
    measured, said = list[Any](), list[str]()
    asked: dict[str, Any] = {"sweep": {"fusion": "auto"}, "space": {"lr": loguniform(1e-3, 0.1)}, "num_samples": 4}
    asked |= {"max_t": 2, "callbacks": [lambda event: said.append(getattr(event, "text", ""))]}
    monkeypatch.setattr(group_widths, "MEASURED_FROM", 0)
    monkeypatch.setattr(group_widths, "measure_widths", dies)
    for _ in range(2):
        assert is_killed(lambda: quick(**asked))
    quick(**asked)
    told = "2 processes in a row died while they measured how many trials train fastest as one"
    assert any(line.startswith(told) and "`resume='changed'` measures again" in line for line in said)
    monkeypatch.setattr(group_widths, "measure_widths", measures)
    quick(**asked | {"num_samples": 6})
    assert not measured
    quick(**asked | {"num_samples": 8}, resume="changed")
    assert len(measured) == 1


def test_kills_in_dry_runs_with_a_success_between_are_no_crash(quick: Quick, one_process: None, tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        if flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return mlp(config, width_ratio)

    for _ in range(3):
        flag.touch()
        assert is_killed(lambda: quick(model_fn=model_fn, num_samples=1))
        flag.unlink()
        assert quick(model_fn=model_fn, num_samples=1).best_trial == 0
    assert not (tmp_path / "run" / DOING).exists()


def test_calls_that_come_while_another_one_works_are_told_so_and_count_nothing(
    quick: Quick, one_process: None, tmp_path: Path
) -> None:
    """The first is in its dry run, which later ones take for no death."""
    flag = tmp_path / "flag"
    flag.touch()

    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        while flag.exists():
            time.sleep(0.01)
        return mlp(config, width_ratio)

    first = forked(lambda: quick(model_fn=model_fn, num_samples=1))
    while not (tmp_path / "run" / DOING).exists():
        time.sleep(0.01)
    before = (tmp_path / "run" / DOING).read_bytes()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="another process is working on the run"):
            quick(num_samples=1)
    assert (tmp_path / "run" / DOING).read_bytes() == before
    flag.unlink()
    os.waitpid(first, 0)
    assert load(tmp_path / "run").finished


def test_a_call_without_locks_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(lock: FileLock, **_: Any) -> None:
        Path(lock.lock_file).touch()
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    (tmp_path / "there").mkdir()
    for name in ("there", "deep/new"):
        with pytest.raises(OSError, match="No locks available"):
            Claim(tmp_path / name, "auto")
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]


def test_a_call_that_is_taken_back_leaves_what_others_put_into_the_folders_that_it_made(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "runs" / "mine", "auto")
    (tmp_path / "runs" / "theirs").mkdir()
    claim.release(undo=True)
    assert [*tmp_path.rglob("*")] == [tmp_path / "runs", tmp_path / "runs" / "theirs"]


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_a_call_that_ends_before_it_has_written_what_it_asks_leaves_nothing(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    with contextlib.suppress(KeyboardInterrupt, ValueError), Claim(tmp_path / "runs" / "mine", "auto"):
        if error is not None:
            raise error
    assert not [*tmp_path.iterdir()]


def test_a_refused_call_to_try_again_forgets_no_death(quick: Quick, tmp_path: Path) -> None:
    quick(num_samples=2, max_t=2)
    note = tmp_path / "run" / DOING
    note.write_text(json.dumps({"now": None, "deaths": {"training [1] to epoch 2": [1, 3]}}))
    noted = note.read_bytes()
    with pytest.raises(RunExists, match="max_t was 2, now 3"):
        quick(num_samples=2, max_t=3, resume="changed")
    assert note.read_bytes() == noted
    quick(num_samples=2, max_t=2, resume="changed")
    assert not note.exists()


def no_dry_run(config: Config, width_ratio: float = 1.0) -> nn.Module:
    raise AssertionError("a dry run began")


def test_what_must_be_refused_is_refused_before_any_dry_run(quick: Quick, tmp_path: Path) -> None:
    quick(num_samples=2, max_t=2)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RunExists, "`resume` is 'never'", {"resume": "never"}),
        (RunExists, "max_t was 2, now 3", {"max_t": 3}),
        (RunExists, "`model_fn` is another function", {}),
        (FileNotFoundError, "`resume` is 'must'", {"resume": "must", "name": "none"}),
        (RunExists, "holds no run", {"name": "foreign"}),
        (RunExists, "is a file", {"name": "file"}),
    ]
    for error, words, arguments in cases:
        with pytest.raises(error, match=words):
            quick(**{"model_fn": no_dry_run, "num_samples": 2, "max_t": 2, **arguments})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "foreign", "run"]


def holding(value: float) -> Callable[..., nn.Module]:
    def model_fn(config: Config, width_ratio: float = 1.0) -> nn.Module:
        if os.environ.get("NO_DRY_RUN"):
            raise AssertionError("a dry run began")
        return nn.Sequential(mlp(config, width_ratio), nn.Threshold(value, value))

    return model_fn


@pytest.mark.parametrize("what", ["model_fn", "train_data", "val_data"])
def test_values_that_a_function_holds_and_tensors_are_compared_before_any_dry_run(
    what: str, quick: Quick, digits: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"model_fn": holding(-9.0), "num_samples": 2, "max_t": 2}
    others = {"model_fn": holding(-8.0), **{f"{n}_data": (x, 9 - y) for n, (x, y) in zip(("train", "val"), digits)}}
    quick(**given)
    monkeypatch.setenv("NO_DRY_RUN", "1")
    with pytest.raises(ValueError, match="a dry run began"):
        quick(**given)
    with pytest.raises(RunExists, match=f"`{what}` (is another function|has other content) than the run's"):
        quick(**given | {what: others[what]})


def test_a_refused_call_leaves_no_run_and_the_corrected_one_begins(quick: Quick, tmp_path: Path) -> None:
    """Whatever refuses it before the first epoch: constraints, a rule, a backend, the model."""

    class Raises(Kills):
        def on_event(self, event: Event) -> None:
            if isinstance(event, HeatBegan):
                raise KeyboardInterrupt

    bounds = {"sweep": SweepConfig(constraints={"params": (None, 1)})}
    with pytest.raises(ValueError, match="leaves nothing to try"):
        quick(**bounds)
    with pytest.raises(ValueError, match="a dry run began"):
        quick(model_fn=no_dry_run)
    assert not (tmp_path / "run").exists()
    with pytest.raises(KeyboardInterrupt):
        quick(num_samples=2, callbacks=[Raises("")])
    assert quick(num_samples=2, resume="must").finished


def test_fewer_configurations_than_asked_are_counted_and_told(quick: Quick) -> None:
    said: list[str] = []
    (only,) = quick(num_samples=1, max_t=1, name="one").trials
    sweep = SweepConfig(surrogate=1 / 2, fusion=8, constraints=lambda config: config["lr"] == only.config["lr"])
    result = quick(sweep=sweep, num_samples=3, callbacks=[lambda event: said.append(getattr(event, "text", ""))])
    assert len(result.trials) == 1
    assert any(line.startswith("1 of 3 configurations") and "`sweep.constraints`" in line for line in said)
    assert any(line.startswith("1 configuration, on ") for line in said)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder, with a finished run, that is mounted for reading alone."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    yield folder
    ctypes.CDLL(None).umount2(str(folder).encode(), 2)


def mount_read_only(folder: Path) -> bool:
    libc, bind, remount, only = ctypes.CDLL(None), 4096, 32, 1
    name = str(folder).encode()
    mounted = libc.mount(name, name, None, bind, None) == 0
    return bool(mounted and libc.mount(name, name, None, bind | remount | only, None) == 0)


def test_a_folder_that_cannot_be_written_is_named_before_any_dry_run(quick: Quick, read_only: Path) -> None:
    quick(storage_path=read_only, num_samples=2, max_t=2)
    if not mount_read_only(read_only):
        pytest.skip("nothing can be mounted here")
    for name in ("run", "new", None):
        with pytest.raises(OSError, match="make it writable, or choose another `storage_path`") as caught:
            quick(storage_path=read_only, name=name, num_samples=2, max_t=2, model_fn=no_dry_run)
        assert str(caught.value.filename).startswith(str(read_only))
    assert load(read_only / "run").finished


@pytest.mark.parametrize("place", [".lock", "checkpoints"])
def test_what_is_in_the_place_of_a_file_or_folder_of_the_run_is_named(tmp_path: Path, place: str) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / place).mkdir() if place == ".lock" else (path / place).touch()
    with pytest.raises(Unsafe, match=rf"{path / place} must be a (regular file|folder).*remove it, or choose another"):
        Claim(path, "auto")
    assert [found.name for found in path.iterdir() if found.name != "checkpoints"] == [place] * (place == ".lock")


def test_a_folder_in_the_place_of_a_checkpoint_is_named(quick: Quick, tmp_path: Path) -> None:
    result = quick(num_samples=2, max_t=2)
    for checkpoint in (result.path / "checkpoints").iterdir():
        checkpoint.unlink()
        checkpoint.mkdir()
    with pytest.raises(Unsafe, match=r"checkpoints/.*\.pt must be a regular file.*remove it"):
        quick(num_samples=2, max_t=2)
    for checkpoint in (result.path / "checkpoints").iterdir():
        checkpoint.rmdir() if checkpoint.is_dir() else checkpoint.unlink()
    assert quick(num_samples=2, max_t=2).best_metric == result.best_metric


def test_a_run_is_held_while_its_lock_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a file of the same number on another device is locked."""
    assert not held(tmp_path)
    with FileLock(tmp_path / LOCK):
        assert held(tmp_path)
        mine = f":{(tmp_path / LOCK).stat().st_ino} "
        (line,) = (line for line in Path("/proc/locks").read_text().splitlines() if mine in line and "->" not in line)
        for device, expected in ((line.split()[5].rpartition(":")[0], True), ("00:99", False)):
            before, _, after = line.partition(line.split()[5])
            (tmp_path / "locks").write_text(f"{before}{device}{mine.rstrip()}{after}\n")
            monkeypatch.setattr(module, "_LOCKS", tmp_path / "locks")
            assert held(tmp_path) is expected
        monkeypatch.undo()
    assert not held(tmp_path)
