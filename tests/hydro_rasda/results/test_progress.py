from __future__ import annotations

import io
import math
import random
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from hydro_rasda import TuneResult, choice, loguniform, uniform
from hydro_rasda.common.console import PrintableConsole
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.short_values import show
from hydro_rasda.records.report import closing_lines
from hydro_rasda.results.progress import NotebookProgress, Progress
from hydro_rasda.run.events import (
    EpochEnded,
    EpochsTrained,
    Event,
    FinalistsChosen,
    HeatBegan,
    HeatEnded,
    MessageSaid,
    RunBegan,
    RungDecided,
)
from tests.hydro_rasda.records.test_report import RECORD

pytestmark = pytest.mark.usefixtures("one_process")


def shown(*events: Event, mode: Literal["min", "max"] = "min", **console: Any) -> tuple[Progress, io.StringIO]:
    """The progress of a run that has begun, after these events, and the file that it writes."""
    file = io.StringIO()
    progress = Progress(Console(file=file, highlight=False, **console))
    progress.on_event(RunBegan(seconds=0.0, path=Path("run"), metric="val_loss", mode=mode, settings={}))
    for event in events:
        progress.on_event(event)
    return progress, file


BAR: dict[str, Any] = {"width": 80, "force_terminal": True, "color_system": None}


def scored(heat: HeatName, trial: int, value: float | None, epoch: int = 1, loss: float | None = 1.0) -> EpochEnded:
    metrics = {"train_loss": loss, "val_loss": value}
    return EpochEnded(seconds=0.0, heat=heat, trial=trial, epoch=epoch, metrics=metrics)


def test_progress_tells_of_each_decision(capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]) -> None:
    quick(progress=True, space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"sweep at epoch 1: 2 of 4 go on; trial \d leads with val_loss", said)
    assert re.search(r"race at epoch 1: 1 of 2 go on; trial \d leads with val_loss \S+ \(epoch 1\)", said)
    assert "race at epoch 2: done" in said
    assert "structure" not in said  # all have one
    quick(progress=True, space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    assert "resuming the run: " in capsys.readouterr().out
    quick(progress=False, name="silent", space={"lr": loguniform(1e-3, 0.3)}, num_samples=4, max_t=2)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_the_best_score_told_is_that_of_the_epoch_that_is_kept(
    capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]
) -> None:
    """Here more is better, and losses fall: the first epoch is kept."""
    with pytest.warns(UserWarning, match="`mode` is 'max'"):
        result = quick(progress=True, mode="max", space={"lr": loguniform(1e-3, 0.3)}, num_samples=1, max_t=4)
    (record,) = result.trials
    assert (record.kept_epoch, record.epochs) == (1, 4)
    said = " ".join(capsys.readouterr().out.split())
    assert f"race at epoch 4: done; trial 0 wins with val_loss {result.best_metric:.4g} (epoch 1)" in said


def test_the_first_lines_say_where_and_what_and_the_last_ones_what_was_found(
    capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]
) -> None:
    space = {"lr": loguniform(1e-3, 0.3), "optimizer": "adamw", "momentum": uniform(0.1, 0.9), "schedule": "linear"}
    with pytest.warns(UserWarning, match="nor the library reads `momentum`"):
        result = quick(progress=True, space=space, num_samples=4, max_t=2, sweep={"fusion": "auto"})
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0] == f"Run folder: {result.path}"
    assert lines[1] == f"Follow it from another terminal: hydro-rasda watch {result.path}"
    assert lines[2].startswith("4 configurations, on ")
    assert lines[3] == "First, surrogates of 1/2 of the width train for 4 epochs in all."
    assert lines[4] == "Then the best 2 train at full size, for about 3 epochs in all."
    used = result.trials[result.best_trial].used
    assert [*used] == ["lr", "optimizer", "schedule"]
    settings = " ".join(f"{name}={show(value)}" for name, value in used.items())
    best, score, cost, following = lines[-4:]
    assert best == f"Best configuration (trial {result.best_trial}): {settings}"
    winner = result.trials[result.best_trial]
    kept = f"at full size after epoch {winner.kept_epoch} of {winner.epochs}"
    assert score == f"Its val_loss on the validation data is {result.best_metric:.4g}, {kept}."
    assert cost.startswith("Cost: ")
    assert "full trainings); 4 epochs of the sweep in" in cost
    assert following == f"For figures and all trials: hydro-rasda report {result.path}"
    assert "momentum=" not in shown


def test_a_resumed_run_whose_sweep_is_over_says_what_is_left(quick: Callable[..., TuneResult]) -> None:
    def killed(event: Event) -> None:
        if isinstance(event, FinalistsChosen):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(name="a", callbacks=[killed], num_samples=4, max_t=2)
    texts = [message.text for message in quick(name="a", callbacks=[print], num_samples=4, max_t=2).messages]
    (told,) = [text for text in texts if text.startswith("The sweep is over")]
    assert told.startswith("The sweep is over: at full size, 2 finalists will train for about 3 more epochs in all.")


def test_ctrl_c_shows_how_to_go_on_and_hardly_a_frame(quick: Callable[..., TuneResult]) -> None:
    def pressed(event: Event) -> None:
        if isinstance(event, RungDecided):
            raise KeyboardInterrupt

    for progress, most in ((True, 5), (False, 50)):
        with pytest.raises(KeyboardInterrupt, match=r"the same call with storage_path=.* goes on") as raised:
            quick(progress=progress, callbacks=[pressed], num_samples=4, max_t=2, name=f"{progress}")
        frames = traceback.extract_tb(raised.tb)
        assert len(frames) <= most
        assert any("/heats/" in frame.filename for frame in frames) != progress
    with pytest.raises(KeyboardInterrupt, match="name='new', resume='auto' goes on"):
        quick(callbacks=[pressed], num_samples=4, max_t=2, name="new", resume="never")


def test_failures_are_counted_in_the_last_lines() -> None:
    record = replace(RECORD, trials=(*RECORD.trials, replace(RECORD.trials[0], trial=6, status="failed", error="E: x")))
    lines = closing_lines(record, "runs/a")
    assert lines[-2] == "1 of 7 trials failed and 1 diverged; to see why: hydro-rasda show runs/a"
    assert lines[3].startswith("Cost: 20 s (2.5 full trainings); ")  # 6 epochs of 4, and 8 s of 4 times 2 s
    longer = closing_lines(replace(record, max_t=9), "runs/a")
    assert longer[1].endswith("at full size after epoch 4 of 4 (a full training has 9).")
    unfinished = replace(record, best_metric=math.nan, finished=False)
    lines = closing_lines(unfinished, "runs/a")
    assert lines[1].startswith("Its val_loss on the validation data is 0.6, on its surrogate: no full-size model")
    assert lines[-2] == "The run is out of time; repeat the call with a larger `time_budget_s` to go on."


def test_a_message_is_shown_as_it_is() -> None:
    progress = Progress(Console(width=20))
    with progress.console.capture() as captured:
        progress.on_event(MessageSaid(seconds=0.0, text="going on with [/red] in a folder of a long name"))
    assert captured.get() == "going on with [/red] in a folder of a long name\n"


@pytest.mark.parametrize(("terminal", "term"), [(False, "xterm"), (True, "dumb"), (True, "xterm")])
def test_without_a_terminal_a_line_a_minute_says_how_far_it_is(
    terminal: bool, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a bar fit a terminal whose lines cannot be written again."""
    monkeypatch.setenv("TERM", term)
    file = io.StringIO()
    progress = Progress(Console(file=file, force_terminal=terminal, highlight=False))
    progress.on_event(HeatBegan(seconds=1000.0, heat="sweep", epochs=500))
    for i in range(500):
        if i == 100:
            progress.on_event(MessageSaid(seconds=1100.5, text="7 of 9 go on"))
        left = 500.0 - i if i < 100 else None
        note = "val_loss 0.5" if i < 200 else ""
        progress.on_event(EpochsTrained(seconds=1001.0 + i, epochs=1, note=note, seconds_left=left))
    progress.on_event(HeatEnded(seconds=1501.0))
    progress.on_event(EpochsTrained(seconds=9999.0, epochs=1))
    lines = file.getvalue().splitlines()
    if terminal and term != "dumb":
        assert lines == ["7 of 9 go on"]
        return
    assert lines[:4] == [
        "sweep: 71% of the run after 17 min 41 s, about 7 min left, val_loss 0.5",
        "7 of 9 go on",
        "sweep: 161 of 500 epochs after 19 min 21 s, val_loss 0.5",
        "sweep: 221 of 500 epochs after 20 min 21 s",
    ]
    assert len(lines) == 2 + (500 - 101) // 60


def test_a_notebook_has_a_bar_and_no_line_a_minute() -> None:
    file = io.StringIO()
    progress = NotebookProgress(Console(file=file, highlight=False))
    progress._drawn = math.inf  # there is no notebook to draw in
    progress.on_event(HeatBegan(seconds=0.0, heat="sweep", epochs=500))
    for i in range(500):
        progress.on_event(EpochsTrained(seconds=1.0 + i, epochs=1, seconds_left=500.0 - i))
    progress.on_event(MessageSaid(seconds=501.0, text="7 of 9 go on"))
    assert file.getvalue() == "7 of 9 go on\n"


def test_the_plan_counts_structures_if_there_are_several(
    capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]
) -> None:
    space = {"lr": loguniform(1e-3, 0.3), "activation": choice(["relu", "tanh"])}
    quick(progress=True, space=space, num_samples=8, max_t=1)
    assert "Models of one structure train together; these have 2 structures." in capsys.readouterr().out


def test_a_log_has_neither_broken_lines_nor_boxes_nor_padding(
    capsys: pytest.CaptureFixture[str], quick: Callable[..., TuneResult]
) -> None:
    result = quick(progress=True, num_samples=4, max_t=2)
    lines = capsys.readouterr().out.splitlines()
    names = [f"{name}=" for name in result.trials[result.best_trial].used]
    assert sum(all(name in line for name in names) for line in lines) == 1
    assert all(line == line.rstrip() for line in lines)
    assert not any(set(line) & set("─│━╸") for line in lines)


@pytest.mark.parametrize(
    ("mode", "surrogate", "target"),
    [("min", (1, 0.2), (0, 0.6)), ("max", (2, 0.7), (0, 0.8))],
)
def test_it_tells_which_trial_leads(
    mode: Literal["min", "max"], surrogate: tuple[int, float], target: tuple[int, float]
) -> None:
    progress, file = shown(mode=mode)
    heats: tuple[tuple[HeatName, float], ...] = (("sweep", 0.0), ("race", 100.0))
    for heat, at in heats:
        progress.on_event(HeatBegan(seconds=at, heat=heat, epochs=9))
        progress.on_event(EpochsTrained(seconds=at, epochs=1))
        if heat == "sweep":
            for trial, value in enumerate((0.5, 0.2, 0.7)):
                progress.on_event(scored("sweep", trial, value))
            progress.on_event(scored("sweep", 3, None))
            progress.on_event(scored("sweep", 4, {"min": 0.1, "max": 0.9}[mode], loss=None))
        else:
            progress.on_event(scored("race", 0, {"min": 0.6, "max": 0.8}[mode]))
            progress.on_event(scored("race", 1, {"min": 0.65, "max": 0.75}[mode]))
            progress.on_event(scored("race", 2, {"min": 0.1, "max": 0.9}[mode], loss=None))
        progress.on_event(EpochsTrained(seconds=at + 70, epochs=1))
        progress.on_event(HeatEnded(seconds=at + 70))
    assert file.getvalue().splitlines() == [
        "Run folder: run",
        "Follow it from another terminal: hydro-rasda watch run",
        "sweep: 2 of 9 epochs after 1 min 10 s, trial {} leads with val_loss {} (epoch 1)".format(*surrogate),
        "race: 2 of 9 epochs after 2 min 50 s, trial {} leads with val_loss {} (epoch 1)".format(*target),
    ]


def test_a_training_of_the_users_that_reports_no_training_loss_leads_too() -> None:
    untold = EpochEnded(seconds=1.0, heat="race", trial=3, epoch=1, metrics={"val_loss": 0.25})
    progress, file = shown(HeatBegan(seconds=0.0, heat="race", epochs=9), untold)
    for seconds in (1.0, 62.0):
        progress.on_event(EpochsTrained(seconds=seconds, epochs=1))
    assert file.getvalue().splitlines()[-1].endswith("trial 3 leads with val_loss 0.25 (epoch 1)")


def test_a_transfer_check_shows_the_leader_of_the_sweep() -> None:
    sweep = HeatBegan(seconds=0.0, heat="sweep", epochs=9)
    check = replace(sweep, heat="transfer check")
    progress, file = shown(sweep, scored("sweep", 4, 0.25), check)
    for seconds in (10.0, 130.0):
        progress.on_event(EpochsTrained(seconds=seconds, epochs=1))
    assert file.getvalue().splitlines()[-1].endswith("trial 4 leads with val_loss 0.25 (epoch 1)")


def test_a_trial_that_was_stopped_leads_no_more() -> None:
    _, file = shown(
        HeatBegan(seconds=0.0, heat="sweep", epochs=9),
        *(scored("sweep", trial, value) for trial, value in enumerate((0.1, 0.2, 0.3))),
        scored("sweep", 0, 0.5, epoch=2),
        EpochsTrained(seconds=1.0, epochs=1),
        EpochsTrained(seconds=62.0, epochs=1),
        RungDecided(seconds=63.0, heat="sweep", epoch=1, candidates=(0, 1, 2), kept=(2,)),
        EpochsTrained(seconds=124.0, epochs=1),
    )
    later, last = file.getvalue().splitlines()[-2:]
    assert later.endswith("trial 1 leads with val_loss 0.2 (epoch 1)")
    assert last.endswith("trial 2 leads with val_loss 0.3 (epoch 1)")


def test_one_bar_goes_on_through_all_heats() -> None:
    progress, file = shown(**BAR)
    with progress:
        heats: tuple[tuple[HeatName, int], ...] = (("sweep", 0), ("race", 40), ("race", 80))
        for heat, begins in heats:
            progress.on_event(HeatBegan(seconds=begins, heat=heat, epochs=4))
            for at in range(begins + 10, begins + 41, 10):
                progress.on_event(EpochsTrained(seconds=at, epochs=1, seconds_left=120.0 - at))
                progress._bars.refresh()
            progress.on_event(HeatEnded(seconds=begins + 40))
    shares = [int(found) for found in re.findall(r"(\d+)%", file.getvalue())]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (8, 100)


@pytest.mark.parametrize(("left", "share"), [(None, "128/384"), (3.0, "25%")])
def test_in_80_columns_nothing_of_the_bar_is_cut_short_and_it_tells_what_is_best_at_once(
    left: float | None, share: str
) -> None:
    """One measure of how far it is: the share of the run's time, once that is known."""
    trained = EpochsTrained(seconds=1.0, epochs=128, seconds_left=left)
    progress, file = shown(HeatBegan(seconds=0.0, heat="sweep", epochs=384), trained, **BAR)
    with progress:
        progress.on_event(scored("sweep", 100, 0.0123456))
    bar = file.getvalue().rstrip().rsplit("sweep", 1)[-1]
    assert share in bar
    assert "trial 100 leads: 0.01235 (epoch 1)" in bar
    assert "…" not in bar


def test_in_40_columns_the_leader_is_cut_short_and_not_the_time_left() -> None:
    trained = EpochsTrained(seconds=1.0, epochs=128, seconds_left=3.0)
    progress, file = shown(HeatBegan(seconds=0.0, heat="sweep", epochs=384), trained, **BAR | {"width": 40})
    with progress:
        progress.on_event(scored("sweep", 100, 0.0123456))
    assert re.search(r"sweep \S+ +25% 0:00:0\d left trial 1…\n", file.getvalue())


def test_at_full_size_no_surrogate_leads() -> None:
    """Nor in a run that is resumed there."""
    recalled = replace(scored("sweep", 7, 0.125, epoch=9), recalled=True)
    progress, file = shown(recalled, **BAR)
    with progress:
        progress.on_event(HeatBegan(seconds=2.0, heat="race", epochs=9))
        progress.on_event(EpochsTrained(seconds=3.0, epochs=1))
        progress._bars.refresh()
        before = file.getvalue()
        progress.on_event(replace(recalled, heat="race", trial=4, epoch=1))
        progress._bars.refresh()
    assert "leads" not in before
    assert "trial 4 leads: 0.125 (epoch 1)" in file.getvalue()


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_a_run_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    """As on a full disk, or on a terminal that is gone."""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", SPEAKING, str(tmp_path / "ended")], stdout=full, check=False)
    assert (tmp_path / "ended").exists()
    assert ended.returncode in (0, 120)  # 120: Python tells that it could not flush


def test_characters_that_an_encoding_lacks_are_escaped() -> None:
    file = io.TextIOWrapper(io.BytesIO(), "ascii")
    PrintableConsole(file=file).print("nä 日 [1]", markup=False)
    file.seek(0)
    assert file.read() == "n\\xe4 \\u65e5 [1]\n"


def test_a_removed_working_directory_costs_no_result(
    quick: Callable[..., TuneResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = quick(progress=True, space={"lr": loguniform(1e-3, 0.3)}, num_samples=2, max_t=1)
    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"Run folder: {result.path}"
    assert said.endswith(f"hydro-rasda report {result.path}\n")


class Counted(dict[int, tuple[float, int]]):
    """Scores that count how often all of them are read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_leader_is_found_without_reading_all_scores_at_each_epoch(mode: Literal["min", "max"]) -> None:
    progress, _ = shown(HeatBegan(seconds=0.0, heat="sweep", epochs=900), mode=mode)
    progress._scores["sweep"] = scores = Counted()
    draw, best = random.Random(0), min if mode == "min" else max
    for trial in range(300):
        progress.on_event(scored("sweep", trial, draw.random()))
        assert progress._leader().startswith(f"trial {best(scores, key=lambda n: scores[n][0])} leads")
    assert scores.reads <= 300 + 3  # those of this test
    for _ in range(300):
        value = draw.choice([None, draw.random()])
        progress.on_event(scored("sweep", draw.randrange(300), value, epoch=2))
        assert progress._leader().startswith(f"trial {best(scores, key=lambda n: scores[n][0])} leads")
