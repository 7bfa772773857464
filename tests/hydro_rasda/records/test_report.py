from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from hydro_rasda.common.console import duration
from hydro_rasda.common.short_values import show
from hydro_rasda.plots.page.words import answer
from hydro_rasda.records.records import DIFFER, Cost, RunRecord, Status, TrialRecord
from hydro_rasda.records.report import (
    SHOWN,
    best_first,
    both_units,
    closing_lines,
    dropped_lines,
    live_line,
    progress_of,
    render,
    rungs,
)
from hydro_rasda.run.crash_log import DROPPED
from hydro_rasda.run.journal import keep_message
from hydro_rasda.schedulers import agreement
from hydro_rasda.settings.objectives import Comparison
from surrogate.transfer_verdict import RankComparison


def trial(
    number: int, narrow: tuple[int, float], full: tuple[int, float], status: Status, **config: Any
) -> TrialRecord:
    """A trial's epochs and score on its surrogate, and at full size."""
    epochs, metric = full
    chance = {0: math.nan, 2: 0.1, 4: 0.9}[epochs]
    return TrialRecord(number, config, status, narrow[1], narrow[0], metric, epochs, chance, epochs, (), None)


NEVER = (0, math.nan)

RECORD = RunRecord(
    best_config={"lr": 0.1, "optimizer": "sgd", "path": "[/red]2"},
    best_metric=0.25,
    best_trial=2,
    trials=(
        trial(0, (1, 0.9), NEVER, "stopped", lr=0.3, optimizer="sgd", path="[/red]0"),
        trial(1, (4, 0.5), (2, 0.1), "stopped", lr=0.2, optimizer="sgd", path="[/red]1"),
        trial(2, (4, 0.6), (4, 0.25), "finished", lr=0.1, optimizer="sgd", path="[/red]2"),
        trial(3, (2, 0.7), NEVER, "stopped", lr=0.4, optimizer="sgd", path="[/red]3"),
        trial(4, (1, 0.8), NEVER, "stopped", lr=0.5, optimizer="sgd", path="[/red]4"),
        trial(5, (4, math.nan), NEVER, "diverged", lr=0.6, optimizer="sgd", path="[/red]5"),
    ),
    metric="val_loss",
    mode="min",
    expected_gain=0.0125,
    cost=Cost(16, 8.0, 6, 12.0, 2.0, 20.0),
    transfer=None,
    agreement=None,
    path=Path("/runs/a"),
    finished=True,
    ended=True,
    max_t=4,
    _checkpoints={},
)

DOUBTFUL = tuple(replace(each, chance={2: 0.2, 1: 0.8}.get(each.trial, math.nan)) for each in RECORD.trials)


def printed(record: RunRecord) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(render(record))
    return captured.get()


def order(record: RunRecord) -> list[int]:
    return [each.trial for each in best_first(record)]


def test_who_came_furthest_is_first_then_who_is_best() -> None:
    assert order(RECORD) == [2, 1, 5, 3, 4, 0]
    mirrored = replace(RECORD, mode="max")
    assert order(mirrored) == [2, 1, 5, 3, 0, 4]
    level = replace(RECORD, best_trial=5, trials=tuple(replace(each, epochs=4) for each in RECORD.trials[1:3]))
    assert order(level) == [1, 2] == order(replace(level, mode="max"))[::-1]


def test_a_trial_that_diverged_at_full_size_is_placed_by_its_surrogate() -> None:
    lost = replace(RECORD.trials[1], status="diverged", metric=math.nan, sweep_epochs=1, sweep_metric=0.85)
    trials = tuple(lost if each.trial == 1 else each for each in RECORD.trials)
    assert order(replace(RECORD, trials=trials)) == [2, 5, 3, 4, 1, 0]


def test_the_winner_is_first_also_where_it_was_stopped() -> None:
    assert order(replace(RECORD, best_trial=1)) == [1, 2, 5, 3, 4, 0]


def test_a_line_says_how_sure_the_choice_is() -> None:
    told = "trial 2 won among 2 at full size (confidence 90%)"
    assert f"{told}; one more full training should lower val_loss by at most 0.0125\n" in printed(RECORD)
    assert "should raise val_loss by" in printed(replace(RECORD, mode="max"))
    assert f"{told}\n" in printed(replace(RECORD, expected_gain=math.nan))
    sure = replace(RECORD.trials[2], chance=0.9999)
    assert "(confidence over 99%)" in printed(replace(RECORD, trials=(*RECORD.trials[:2], sure, *RECORD.trials[3:])))
    nothing = f"{told}; no gain is expected from one more full training\n"
    assert nothing in printed(replace(RECORD, expected_gain=2e-11))
    other = "trial 1 was stopped after epoch 2 and may have become better (80%): raise `full_trainings` to find out\n"
    assert other in printed(replace(RECORD, trials=DOUBTFUL))
    alone = replace(RECORD, trials=tuple(replace(each, chance=math.nan) for each in RECORD.trials[:2]))
    assert "confidence" not in printed(alone)


def test_the_sampling_error_stands_beside_the_confidence(tmp_path: Path) -> None:
    """That of another winner, or of a second that another trial has beaten since, says nothing of these two."""

    def finished(*numbers: int, **scores: float) -> RunRecord:
        trials = [replace(t, status="finished") if t.trial in numbers else t for t in RECORD.trials]
        trials = [replace(t, metric=scores.get(f"of_{t.trial}", t.metric)) for t in trials]
        return replace(RECORD, path=tmp_path, trials=tuple(trials))

    record, differ = finished(5, of_5=0.3), f"{DIFFER.format(2, 5)}0.01 in val_loss, less than it"
    assert "(confidence 90%);" in printed(record)
    for text in (DIFFER.format(1, 2), DIFFER.format(2, 1), differ, DIFFER.format(2, 51), "the sweep is over"):
        keep_message(tmp_path, 1.0, text)
    assert "(confidence 90% on these validation examples); one more" in printed(record)
    assert printed(record).count(f"\n{differ}") == 1
    assert f"T{differ[1:]}." in answer(record)
    assert DIFFER.format(2, 1) not in printed(record)
    beaten = finished(4, 5, of_5=0.3, of_4=0.29)
    assert "(confidence 90%);" in printed(beaten)
    assert DIFFER.format(2, 5) not in printed(beaten)
    assert differ in printed(finished(4, 5, of_5=0.3, of_4=0.31))


def test_numbers_are_written_as_a_person_would() -> None:
    """3 full trainings of 4 epochs, each of 2 s."""
    told = [both_units(RECORD, seconds) for seconds in (2.8, 33.6, 1136.0)]
    assert [each.partition("(")[2] for each in told] == [f"{n} full trainings)" for n in ("0.35", "4.2", "140")]


BETTER = "trial 1 had a better val_loss, 0.1 after epoch 2 (`result.best_model(1)`), but "


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ("stopped", "it was behind others by its latest weights, and was stopped after epoch 2"),
        ("finished", "training left it worse than the winner in the end"),
        ("diverged", "it diverged later"),
    ],
)
def test_a_line_says_why_a_trial_with_a_better_score_did_not_win(status: Status, why: str) -> None:
    """In the table, in the last lines and on the page, also where a stopped trial is the likelier one."""
    for trials in (RECORD.trials, DOUBTFUL):
        record = replace(RECORD, trials=tuple(replace(t, status=status) if t.trial == 1 else t for t in trials))
        assert f"\n{BETTER}{why}" in printed(record)
        assert f"T{BETTER[1:]}{why}." in closing_lines(record, "runs/a")
        assert f"T{BETTER[1:]}{why}." in answer(record)
    for other in (replace(RECORD, mode="max"), replace(RECORD, trials=RECORD.trials[2:], best_trial=2)):
        assert "had a better" not in printed(other)


def test_a_better_trial_that_breaks_a_bound_by_more_than_the_winner_is_not_named() -> None:
    bounds = Comparison((("val_loss", "min"),), {"params": (None, 5.0)})

    def is_named(better: float, winner: float) -> bool:
        params = {1: better, 2: winner}
        trials = tuple(replace(each, costs={"params": params.get(each.trial, 1.0)}) for each in RECORD.trials)
        return "trial 1 had a better val_loss" in printed(replace(RECORD, trials=trials, _comparison=bounds))

    assert is_named(better=5.0, winner=1.0)
    assert not is_named(better=6.0, winner=5.0)
    assert is_named(better=6.0, winner=7.0)


def test_a_trial_that_the_time_budget_stopped_was_not_behind_others() -> None:
    short = replace(RECORD, finished=False, trials=DOUBTFUL)
    assert f"\n{BETTER}training ended after epoch 2\n" in printed(short)
    assert "may have become better (80%): raise `time_budget_s` to find out\n" in printed(short)


@pytest.mark.parametrize(
    ("numbers", "of", "it", "them"),
    [([4], "Trial 4 was", "it", "tries it"), ([3, 4], "Trials 3, 4 were", "each", "tries them")],
)
def test_trials_that_were_dropped_are_named(numbers: list[int], of: str, it: str, them: str) -> None:
    errors = dict.fromkeys(numbers, f"{DROPPED} of it 3 times in a row")
    trials = tuple(replace(each, error=errors.get(each.trial, "RuntimeError: other")) for each in RECORD.trials)
    again = f"the same call with `resume='changed'` {them} again"
    assert dropped_lines(replace(RECORD, trials=trials)) == [f"{of} dropped: {DROPPED} of {it} three times; {again}."]
    assert dropped_lines(RECORD) == []


def test_a_line_names_the_configuration_to_train_again_without_averages() -> None:
    def told(winner: float, other: float, name: str = "val_loss_unaveraged", **known: Any) -> str:
        ends = {2: {"val_loss": 0.25, "val_loss_unaveraged": winner}, 1: {"val_loss": 0.3, name: other}}
        trials = [
            replace(each, status="finished", history=({"heat": "race", "epoch": 4, **ends[each.trial]},))
            for each in RECORD.trials[1:3]
        ]
        return printed(replace(RECORD, trials=tuple(trials), **known))

    line = "as training left them in the end, trial 1 has val_loss 0.35, and the winner 0.5: to train again without "
    assert f"{line}averages, take the configuration of trial 1\n" in told(0.5, 0.35)
    assert "without averages" not in told(0.35, 0.5)
    assert "trial 1 has val_loss 0.3, and the winner 0.5" in told(0.5, 0.35, "val_loss_averaged")
    assert "without averages" not in told(0.5, 0.35, "val_accuracy")  # by patience, it ended between milestones
    assert "without averages" in told(0.35, 0.5, mode="max")
    several = Comparison((("val_loss", "min"), ("macs", "min")))
    assert "without averages" not in told(0.5, 0.35, _comparison=several)
    assert "without averages" not in printed(RECORD)


def test_a_line_says_which_weights_the_winner_keeps() -> None:
    """Of what the run's folder does not say, nothing is said."""

    def told(**known: Any) -> str:
        (line,) = (line for line in printed(replace(RECORD, **known)).splitlines() if "it keeps" in line)
        return line.rstrip()

    wins = "trial 2 wins, by val_loss (min); it keeps the weights after epoch 4 of 4"
    assert told(keep="best", averaged=True) == f"{wins}, averaged"
    assert told(keep="last", averaged=False) == f"{wins}, not averaged"
    assert told() == wins
    assert "it keeps" not in printed(replace(RECORD, best_metric=math.nan, keep="best"))


def test_a_line_says_whether_surrogates_and_full_size_agree() -> None:
    def told(*full: float) -> str:
        scores = {number: (float(number), score) for number, score in enumerate(full)}
        return printed(replace(RECORD, agreement=agreement(3, scores, "min")))

    line = "surrogates and full size on 4 finalists after epoch 3: "
    assert f"{line}rank correlation 1.00, they agree (chance alone: 4%)\n" in told(5, 6, 7, 8)
    disagree = f"{line}rank correlation -1.00, they disagree (chance alone: 4%)"
    assert f"{disagree}; `sweep=SweepConfig(check_transfer=True)` compares more\n" in told(8, 7, 6, 5)
    few = "4 finalists are too few to tell whether surrogates rank them as full size does\n"
    for full in ((5, 6, 8, 7), (5, 5, 5, 5)):
        assert few in told(*full)
        assert "rank correlation" not in told(*full)
    assert "surrogates and full size" not in told(5)
    assert "too few to tell" not in told(5)


def test_the_table_leaves_out_what_all_trials_share() -> None:
    table = printed(RECORD)
    assert "6 of 6 trials, by val_loss (min)" in table
    assert "lr=0.1" in table
    assert "optimizer=" not in table
    assert "20 s: 16 epochs of the sweep in 8 s, 6 epochs of the race in 12 s" in table
    assert "spared about 24 s" in table  # 16 epochs of 2 s, less the 8 s
    assert "transfer is" not in table
    checked = RankComparison(0.875, {1: 0.0}, 0.0, 1, "trusted", "")
    assert "; transfer is trusted (rank correlation 0.88); " in printed(replace(RECORD, transfer=checked))


def test_a_narrow_table_has_all_columns() -> None:
    console = Console(width=44)
    with console.capture() as captured:
        console.print(render(RECORD))
    for trial in RECORD.trials:
        assert f"lr={trial.config['lr']}" in captured.get()


def test_brackets_are_no_markup() -> None:
    assert "path=[/red]0" in printed(RECORD)


def test_the_table_has_the_best_few() -> None:
    many = replace(RECORD, trials=tuple(replace(RECORD.trials[0], trial=number) for number in range(100, 120)))
    assert "8 of 20 trials" in printed(many)


def test_values_are_shown_short() -> None:
    assert [show(v) for v in (0.123456, 1e-7, 3, "sgd", None, nn.ReLU)] == ["0.123", "1e-07", "3", "sgd", "", "ReLU"]


def test_times_in_words() -> None:
    seconds = (0.1234, 59, 60, 61, 3600, 2 * 3600 + 300, 24 * 3600, 100 * 3600)
    told = ["0.123 s", "59 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "2 h 5 min", "1 d 0 h", "4 d 4 h"]
    assert [*map(duration, seconds)] == told


@pytest.mark.parametrize(
    ("left", "idle", "told"),
    [
        (180.0, 0.0, "10 %, about 3 min left"),
        (180.0, 60.0, "10 %, about 2 min left"),
        (180.0, 179.0, "10 %"),
        (0.0, 0.0, "100 %"),
        (None, 0.0, ""),
    ],
)
def test_the_time_left_of_a_run_is_told_while_a_process_works_on_it(
    left: float | None, idle: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = replace(RECORD, finished=False, ended=False, seconds_left=left)
    assert progress_of(record, idle) == told.partition(",")[0]
    monkeypatch.setattr("hydro_rasda.records.report.held", lambda path: True)
    assert progress_of(record, idle) == told
    assert progress_of(RECORD, idle) == "100 %"
    assert progress_of(replace(RECORD, finished=False), idle) == ""


def test_rungs_count_who_came_so_far() -> None:
    assert rungs(RECORD) == {"sweep": {1: 6, 2: 4, 4: 3}, "race": {2: 2, 4: 1}}
    assert rungs(replace(RECORD, trials=())) == {}


def test_trials_that_train_at_full_size_show_their_last_epoch_and_score() -> None:
    """A score that was not finite is shown as such, and of many trials the furthest are named."""
    assert live_line(RECORD) == ""
    lines = [{"heat": "race", "epoch": epoch, "val_loss": 1 / epoch} for epoch in (3, 4, 5)]
    lost = [{"heat": "race", "epoch": 1, "val_loss": None, "train_loss": None}]
    live: dict[int, tuple[Mapping[str, Any], ...]] = {1: tuple(lines), 3: tuple(lost)}
    trials = tuple(replace(each, live=live.get(each.trial, ())) for each in RECORD.trials)
    record = replace(RECORD, trials=trials, max_t=27, finished=False, ended=False)
    told = "under way at full size: trial 1 at epoch 5 of 27 (val_loss 0.2), trial 3 at epoch 1 of 27 (val_loss nan)"
    assert live_line(record) == told
    assert told in printed(record)
    assert "at epoch 5" in next(line for line in printed(record).splitlines() if "lr=0.2" in line)
    assert rungs(record) == rungs(RECORD), "these are decisions"
    for count, end in ((SHOWN, "(val_loss 0.2)"), (SHOWN + 2, "(val_loss 0.2), 2 more")):
        many = replace(record, trials=tuple(replace(RECORD.trials[0], live=tuple(lines)) for _ in range(count)))
        assert live_line(many).endswith(end)
