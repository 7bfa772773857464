"""The replay table: what is recorded is what `tune` and plain training give."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.__main__ import main, overview
from benchmarks.replay.record import SAMPLED_WITH, opened, record
from benchmarks.replay.record import train as train_group
from benchmarks.replay.table import COOLED, About, Table, branches_of, empty, load, recorded, save, widened
from benchmarks.tasks.load import TASKS, load_task
from benchmarks.tasks.task import Task
from benchmarks.vs_asha.methods import hydro_rasda
from benchmarks.vs_asha.search import configurations, seeds
from benchmarks.vs_asha.training import build as build_plain
from benchmarks.vs_asha.training import train

NOWHERE = Path("/nowhere")


def digits(max_t: int = 2, trials: int = 2) -> Task:
    return replace(load_task("digits", NOWHERE), num_samples=trials, max_t=max_t)


def table_of(widths: list[float], seeds: list[int], configs: int = 3, max_t: int = 2) -> Table:
    """Scores that say where they stand."""
    tried = [{"lr": 0.1 * i} for i in range(configs)]
    about = About("digits", "max", max_t, tried, widths, seeds, branches=branches_of(max_t))
    table = empty(about)
    table.scores[...] = np.arange(table.scores.size).reshape(table.scores.shape)
    table.seconds[...] = 1 + np.arange(len(widths))[:, None, None]
    return table


def test_recorded_curves_at_full_width_are_those_of_plain_training(tmp_path: Path) -> None:
    task = digits()
    record(task, [1.0], [1], tmp_path)
    table = load("digits", tmp_path)
    for number, config in enumerate(configurations(task, SAMPLED_WITH)):
        given = seeds(task, number, 1)
        for epoch, plain in enumerate(train(task, config, given, build_plain(task, config, given)), start=1):
            assert table.score(1.0, 1, number, epoch) == pytest.approx(plain["score"], abs=1e-3)
            assert table.score(1.0, 1, number, epoch, "test") == pytest.approx(plain["test"], abs=1e-3)


@pytest.mark.slow
def test_recorded_curves_of_surrogates_are_those_of_tunes_sweep(tmp_path: Path) -> None:
    task = digits(max_t=3, trials=3)
    record(task, [1 / 8], [SAMPLED_WITH], tmp_path)
    table = load("digits", tmp_path)
    swept = [event for event in hydro_rasda(task, SAMPLED_WITH).events if not event.full_size]
    assert {event.trial for event in swept} == {0, 1, 2}
    for event in swept:
        # Last digits differ with the width of groups: one example of 300 may.
        assert table.score(1 / 8, 0, event.trial, event.epoch) == pytest.approx(event.score, abs=4e-3)


def test_a_cooldown_is_the_end_of_a_training_whose_rate_falls_in_a_line_and_leaves_the_recorded_one_as_it_was() -> None:
    """The end: that of a plain training with the same steps, written out."""
    task, steps = digits(max_t=2, trials=1), 19
    config = {**configurations(task, 0)[0], "batch_size": 64, "optimizer": "adamw", "schedule": "cosine"}
    plain = train_group(task, {0: config}, 1.0, 0)
    curves = train_group(task, {0: config}, 1.0, 0, branches=[(1, 0.5)])
    np.testing.assert_array_equal(curves.scores, plain.scores)

    def factor(step: int, _: int) -> float:
        rest = round(0.5 * steps)
        cosine = (1 + math.cos(math.pi * step / (2 * steps))) / 2
        return cosine if step < steps else 0.5 * max(0.0, 1 - (step - steps) / rest)

    annealed = train_group(replace(task, max_t=2), {0: {**config, "schedule": factor}}, 1.0, 0)
    # Steps at a rate of 0 change nothing.
    np.testing.assert_allclose(curves.cooled[0, 0], annealed.scores[0, 1, 1 : 1 + len(COOLED)], rtol=1e-6)


def test_a_second_recording_trains_what_the_first_lacks(tmp_path: Path) -> None:
    task = digits(max_t=1)
    record(task, [1 / 8], [0], tmp_path)
    first = load("digits", tmp_path)
    lost = replace(first, seconds=first.seconds.copy(), scores=first.scores.copy())
    lost.seconds[0, 0, 1] = np.nan
    lost.scores[0, 0] = [[[7.0]], [[np.nan]]]
    save(lost, tmp_path)
    record(task, [1 / 8], [0, 1], tmp_path)
    table = load("digits", tmp_path)
    assert table.recorded.all()
    assert table.complete(1 / 8, 1)
    assert (table.scores[0, 0, 0] == 7.0).all()
    assert table.scores[0, 0, 1] == pytest.approx(first.scores[0, 0, 1], abs=1e-3)
    assert not np.array_equal(table.scores[0, 1, 1], table.scores[0, 0, 1])


def test_a_table_of_other_configurations_is_refused(tmp_path: Path) -> None:
    save(table_of([1.0], [0]), tmp_path)
    with pytest.raises(ValueError, match=r"the table of digits in .* is of other configurations"):
        opened(digits(), [1.0], [0], tmp_path)


def test_a_table_goes_on_where_a_machine_rounds_another_way(tmp_path: Path) -> None:
    task = digits()
    table = opened(task, [1.0], [0], tmp_path)
    others = [{**config, "lr": np.nextafter(config["lr"], 1.0).item()} for config in table.about.configs]
    save(replace(table, about=replace(table.about, configs=others)), tmp_path)
    assert opened(task, [1.0], [0], tmp_path).about.configs == others != table.about.configs


def test_a_diverged_training_has_no_scores_from_there_on() -> None:
    """Beside one that goes on, its member is lost alone."""
    task = digits(max_t=3)
    calm = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "batch_size": 64, "schedule": "constant"}
    curves = train_group(task, {0: calm, 1: {**calm, "lr": 1e6}}, 1 / 8, 0)
    assert np.isfinite(curves.scores[0]).all()
    assert np.isnan(curves.scores[1, -1]).all()
    assert np.isnan(train_group(task, {1: {**calm, "lr": 1e6}}, 1 / 8, 0).scores[:, -1]).all()


def test_a_table_is_read_as_it_was_written_but_for_its_last_bits(tmp_path: Path) -> None:
    table = table_of([1 / 8, 1.0], [0, 1])
    table.scores[0, 0, 0, 0, 0] = np.nan
    table.scores[0, 0, 0, 0, 1] = 1 / 3
    table.cooled[...] = np.arange(table.cooled.size).reshape(table.cooled.shape)
    save(table, tmp_path)
    read = load("digits", tmp_path)
    assert read.about == table.about
    assert np.isnan(read.scores[0, 0, 0, 0, 0])
    np.testing.assert_allclose(read.scores, table.scores, rtol=2**-15)
    np.testing.assert_array_equal(read.seconds, table.seconds)
    np.testing.assert_allclose(read.cooled, table.cooled, rtol=2**-15)
    np.testing.assert_array_equal(read.after_cooldown(1.0, 1, 0.25, "test"), read.cooled[1, ..., 1, 2])
    assert read.cost(1 / 8) == 0.5
    assert len(overview(recorded(tmp_path)).splitlines()) == 2 + 4
    with pytest.raises(FileNotFoundError, match=r"residual\.npz is missing; .* record residual"):
        load("residual", tmp_path)


def test_scores_are_found_by_what_they_are() -> None:
    table = table_of([1 / 8, 1.0], [0, 5])
    at = table.about.metrics.index("test_score_ema")
    assert table.score(1.0, 5, 2, 1, "test", ema=True) == table.scores[1, 1, 2, 0, at]
    assert table.curves(1.0, "test", ema=True, loss=True)[1, 2, 0] == table.scores[1, 1, 2, 0, at + 3]
    with pytest.raises(ValueError, match=r"epoch is 0, but must be one of 1 to 2"):
        table.score(1.0, 5, 2, 0)
    with pytest.raises(ValueError, match=r"width is 0.5, but must be one of \[0.125, 1.0\]"):
        table.score(0.5, 5, 2, 1)


def test_a_table_grows_around_what_it_has() -> None:
    table = table_of([1 / 8, 1.0], [1])
    wider = widened(table, [1 / 2, 1.0], [0], {"cpu": "a processor"})
    assert (wider.about.widths, wider.about.seeds) == ([1 / 8, 1 / 2, 1.0], [0, 1])
    assert wider.recorded.sum() == table.recorded.sum()
    assert wider.score(1.0, 1, 2, 2) == table.score(1.0, 1, 2, 2)
    assert wider.about.environments == [{"cpu": "a processor"}]
    assert widened(wider, [], [], {"cpu": "a processor"}).about == wider.about


def test_the_command_records_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = digits(max_t=1)
    monkeypatch.setitem(TASKS, "digits", lambda data, reduced: task)
    main(["record", "digits", "--widths", "0.125", "--seeds", "3", "--folder", str(tmp_path)])
    assert load("digits", tmp_path).complete(0.125, 3)
    assert "| digits | 0.125 | 3 | 2 of 2 |" in overview(recorded(tmp_path))
