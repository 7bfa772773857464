from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from hydro_rasda import TuneResult, loguniform
from hydro_rasda.results.progress import Progress
from hydro_rasda.run.events import EpochEnded, EpochsTrained, MessageSaid, RunBegan, StageBegan, StageEnded


def test_progress_tells_of_each_decision(capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]) -> None:
    quick(progress=True, space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    said = " ".join(capsys.readouterr().out.split())
    assert "surrogates at epoch 1: 2 of 4 go on, best val_loss" in said
    assert "full size at epoch 1: 1 of 2 go on" in said
    assert "full size at epoch 2: done" in said
    assert "4 of 4 trials, by val_loss (min)" in said
    quick(progress=True, space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    assert "going on with the run in" in capsys.readouterr().out
    quick(progress=False, name="silent", space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_the_best_score_told_is_that_of_the_epoch_that_is_kept(
    capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]
) -> None:
    """Here more is better, and losses fall: the first epoch is kept."""
    result = quick(progress=True, mode="max", space={"lr": loguniform(1e-3, 0.3)}, num_samples=1, max_t=4)
    (record,) = result.trials
    assert record.kept_epoch < record.epochs == 4
    said = " ".join(capsys.readouterr().out.split())
    assert f"full size at epoch 4: done, best val_loss {result.best_metric:.4g} (trial 0)" in said


def test_a_message_is_shown_as_it_is() -> None:
    progress = Progress(Console(width=20))
    with progress.console.capture() as captured:
        progress.on_event(MessageSaid(seconds=0.0, text="going on with [/red] in a folder of a long name"))
    assert captured.get() == "going on with [/red] in a folder of a long name\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_terminal_a_line_a_minute_says_how_far_it_is(terminal: bool) -> None:
    file = io.StringIO()
    progress = Progress(Console(file=file, force_terminal=terminal, highlight=False))
    progress.on_event(StageBegan(seconds=1000.0, title="surrogates", epochs=500))
    for i in range(500):
        if i == 100:
            progress.on_event(MessageSaid(seconds=1100.5, text="7 of 9 go on"))
        progress.on_event(EpochsTrained(seconds=1001.0 + i, epochs=1, note="val_loss 0.5" if i < 200 else ""))
    progress.on_event(StageEnded(seconds=1501.0))
    progress.on_event(EpochsTrained(seconds=9999.0, epochs=1))
    lines = file.getvalue().splitlines()
    if terminal:
        assert lines == ["7 of 9 go on"]
        return
    assert lines[:4] == [
        "surrogates: 61 of 500 epochs after 17 min 41 s, val_loss 0.5",
        "7 of 9 go on",
        "surrogates: 161 of 500 epochs after 19 min 21 s, val_loss 0.5",
        "surrogates: 221 of 500 epochs after 20 min 21 s",
    ]
    assert len(lines) == 2 + (500 - 101) // 60


def test_no_line_of_a_log_is_broken(capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]) -> None:
    result = quick(progress=True, num_samples=4, max_t=2)
    names = " ".join(f"{name}=" for name in result.best_config)
    lines = capsys.readouterr().out.splitlines()
    assert sum(all(name in line for name in names.split()) for line in lines) == 4
    assert any("training one more would be expected to gain" in line for line in lines[-2:])


@pytest.mark.parametrize(
    ("mode", "surrogate", "target"),
    [("min", "0.2 (trial 1)", "0.6 (trial 0)"), ("max", "0.7 (trial 2)", "0.8 (trial 0)")],
)
def test_it_tells_the_best_so_far(mode: Literal["min", "max"], surrogate: str, target: str) -> None:
    file = io.StringIO()
    progress = Progress(Console(file=file, highlight=False))
    progress.on_event(RunBegan(seconds=0.0, path=Path("run"), metric="val_loss", mode=mode, settings={}))

    def trained(
        stage: Literal["surrogate", "target"], trial: int, value: float | None, loss: float | None = 1.0
    ) -> None:
        metrics = {"train_loss": loss, "val_loss": value}
        progress.on_event(EpochEnded(seconds=0.0, stage=stage, trial=trial, epoch=1, metrics=metrics))

    for title, at in (("surrogates", 0.0), ("full size", 100.0)):
        progress.on_event(StageBegan(seconds=at, title=title, epochs=9))
        progress.on_event(EpochsTrained(seconds=at, epochs=1))
        if title == "surrogates":
            for trial, value in enumerate((0.5, 0.2, 0.7)):
                trained("surrogate", trial, value)
            trained("surrogate", 3, None)
            trained("surrogate", 4, {"min": 0.1, "max": 0.9}[mode], loss=None)
        else:
            trained("target", 0, {"min": 0.6, "max": 0.8}[mode])
            trained("target", 1, {"min": 0.65, "max": 0.75}[mode])
        progress.on_event(EpochsTrained(seconds=at + 70, epochs=1))
        progress.on_event(StageEnded(seconds=at + 70))
    assert file.getvalue().splitlines() == [
        f"surrogates: 2 of 9 epochs after 1 min 10 s, best val_loss {surrogate}",
        f"full size: 2 of 9 epochs after 2 min 50 s, best val_loss {target}",
    ]


def test_in_80_columns_nothing_of_the_bar_is_cut_short_and_it_tells_what_is_best_at_once() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=80, force_terminal=True, color_system=None)) as progress:
        progress.on_event(RunBegan(seconds=0.0, path=Path("run"), metric="val_loss", mode="min", settings={}))
        progress.on_event(StageBegan(seconds=0.0, title="surrogates", epochs=384))
        progress.on_event(EpochsTrained(seconds=1.0, epochs=128))
        metrics = {"train_loss": 1.0, "val_loss": 0.0123456}
        progress.on_event(EpochEnded(seconds=1.0, stage="surrogate", trial=100, epoch=1, metrics=metrics))
    bar = file.getvalue().rstrip().rsplit("surrogates", 1)[-1]
    assert "128/384" in bar
    assert "best val_loss 0.01235" in bar
    assert "…" not in bar


SPEAKING = """
import sys
from pathlib import Path
from hydro_rasda.results.progress import Progress
with Progress() as shown:
    for _ in range(1000):
        shown.console.print("said " * 100)
Path(sys.argv[1]).touch()
"""


def test_a_run_goes_on_where_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """As in a pipe to `head`."""
    ended = tmp_path / "ended"
    with subprocess.Popen(
        [sys.executable, "-c", SPEAKING, str(ended)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert ended.exists()
