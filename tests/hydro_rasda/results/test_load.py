from __future__ import annotations

import enum
import io
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from hydro_rasda import AllTrialsFailed, RaceConfig, SweepConfig, TuneResult, choice, load, loguniform, uniform
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.history import DONE, ENTERED, FINALISTS
from hydro_rasda.history.lines import JournalLine, Unit, metric_lines
from hydro_rasda.problem.problem import Problem
from hydro_rasda.records.report import state_of
from hydro_rasda.results.result import make_result
from hydro_rasda.run.checkpoints import DamagedCheckpoint
from hydro_rasda.run.record_full_size import end_by_score, record_epochs, record_failure
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.state import Run
from tests.hydro_rasda import journals
from tests.hydro_rasda.heats.test_sweep_rules import Population
from tests.hydro_rasda.models import counted, mlp, stumbles_in_some

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
Pair = tuple[Tensor, Tensor]

FIELDS = [f.name for f in fields(TuneResult) if f.name != "_problem"]


def told(result: Any) -> dict[str, str]:
    """What a result says, field by field; a NaN is equal to another."""
    found = {name: getattr(result, name) for name in FIELDS}
    return {name: repr(value) for name, value in {**found, "trials": [asdict(each) for each in result.trials]}.items()}


def run_folder(path: Path, problem: Problem) -> Store:
    """A run's folder in which nothing has happened."""
    return Store.open(path, journals.asked(problem.settings), "auto")


def configured(number: int) -> Unit:
    """What the journal has of so many trials before any of them trains."""
    return Unit({}, [{"event": "trial", "trial": n, "config": {"lr": 0.1}, "unread": {}} for n in range(number)])


def epochs_of(heat: HeatName, number: int, scores: Sequence[float], first: int = 1) -> list[JournalLine]:
    """A trial's epochs, which scored so."""
    history = [(epoch, {"train_loss": score, "val_loss": score}) for epoch, score in enumerate(scores, first)]
    return metric_lines(heat, number, history)


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(path.rglob("*")) if p.is_file()}


ELSEWHERE = """
import pickle, sys
import hydro_rasda
result = hydro_rasda.load(sys.argv[1])
assert not {"tests", "sklearn"} & set(sys.modules)
with open(sys.argv[2], "wb") as file:
    pickle.dump(result, file)
"""


@pytest.mark.filterwarnings("ignore:transfer to full size")
def test_another_process_without_data_and_model_finds_what_tune_returned(
    quick: Quick, tmp_path: Path, digits: tuple[Pair, Pair]
) -> None:
    space = {
        "lr": choice([0.003, 0.01, 0.03, 0.1, 1e30]),
        "optimizer": "sgd",
        "stumbles": choice([0.0, 0.0, 0.0, 1.0]),
        "extra": {"depth": choice([1, 2])},
        "batch_size": 64,
    }
    made = quick(model_fn=stumbles_in_some, space=space, num_samples=16, sweep=SweepConfig(check_transfer=True))
    assert {record.status for record in made.trials} == {"finished", "stopped", "diverged", "failed"}
    assert made.transfer is not None
    assert made.finished
    before = contents(made.path)
    command = [sys.executable, "-c", ELSEWHERE, str(made.path), str(tmp_path / "result.pickle")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    loaded = pickle.loads((tmp_path / "result.pickle").read_bytes())
    assert told(loaded) == told(made)
    assert loaded.dataframe().equals(made.dataframe())
    assert contents(made.path) == before
    with pytest.raises(ValueError, match=r"`model_fn` did not come along .* `best_model\(model_fn=...\)` takes it"):
        loaded.best_model()
    with pytest.raises(ValueError, match=r"without `model_fn` and `objective`, which .* repeat the call of `tune`"):
        loaded.evaluate(digits[1])
    with pytest.raises(ValueError, match="`model_fn` is 3, but must be the model function of the run"):
        loaded.best_model(model_fn=3)
    with pytest.raises(ValueError, match=r"`model_fn` makes a model that does not fit the checkpoint of trial \d: "):
        loaded.best_model(model_fn=lambda config: nn.Linear(64, 10))
    model, again = made.best_model(), loaded.best_model(model_fn=stumbles_in_some)
    assert torch.equal(again(digits[1][0]), model(digits[1][0]))


class Act(enum.Enum):
    RELU = 1
    TANH = 2


def chosen(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """A classifier whose activation is a member of an Enum, compared by `is`, and whose shape is a tuple."""
    act = nn.Tanh() if config["act"] is Act.TANH else nn.ReLU()
    width = round(16 * width_ratio) if config["shape"] == (16, 1) else 1
    return nn.Sequential(nn.Linear(64, width), act, nn.Linear(width, 10))


class WithTanh(nn.Sequential):
    """The same classifier as a class, whatever activation its configuration names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(*chosen(config | {"act": Act.TANH}).children())


def test_a_choice_that_json_does_not_keep_never_gives_another_model(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """The class of the optimizer is read by the library alone."""
    space = {
        "lr": loguniform(1e-3, 1e-1),
        "act": choice([Act.TANH]),
        "shape": choice([(16, 1)]),
        "optimizer": choice([torch.optim.SGD]),
    }
    made = quick(model_fn=chosen, space=space, num_samples=4)
    found = load(made.path)
    assert found.best_config["shape"] == (16, 1)
    with pytest.raises(ValueError, match=r"`config\['act'\]` is only a text in the run's folder, '<Act.TANH: 2>'"):
        found.best_model(model_fn=chosen)
    model_fns: list[Callable[..., nn.Module]] = [lambda config: chosen(config | {"act": Act.TANH}), WithTanh]
    for model_fn in model_fns:
        again = found.best_model(model_fn=model_fn)
        assert torch.equal(again(digits[1][0]), made.best_model()(digits[1][0]))
    del space["optimizer"]  # a loaded run has only its name, which no recipe can call
    made = quick(model_fn=chosen, space=space, num_samples=4, name="other")
    for text in (made.recipe(), load(made.path).recipe()):
        assert "train(model_fn, train_data, loss_fn, *, act, device=None)" in text
        assert "call `model = train(model_fn, train_data, loss_fn, act=act)`" in text


@pytest.mark.parametrize(
    "asked",
    [
        {"race": RaceConfig(keep="last", grace_period=1)},
        {"sweep": SweepConfig(surrogate=1)},
        {"sweep": SweepConfig(rule=Population(0.5)), "space": {"lr": loguniform(1e-3, 0.3)}, "num_samples": 4},
        {"time_budget_s": 1e-3},
        {"race": RaceConfig(lr_rule=lambda growth: growth)},
    ],
    ids=["last", "full width", "copies", "out of time", "function"],
)
def test_every_kind_of_run_opens_as_it_was_returned(asked: dict[str, Any], quick: Quick) -> None:
    made = quick(**asked)
    assert told(load(made.path)) == told(made)
    assert made.finished is ("time_budget_s" not in asked)


def test_a_run_that_was_given_more_samples(quick: Quick) -> None:
    quick(num_samples=4)
    more = quick(num_samples=8)
    assert told(load(more.path)) == told(more)


@pytest.mark.parametrize("how", ["to the end", "by time", "by score"])
def test_one_function_says_how_a_run_has_ended(quick: Quick, how: str) -> None:
    """It is given more samples, none of which is any good: nothing trains at full size."""
    asked: dict[str, Any] = {
        "sweep": SweepConfig(first=[{"lr": 0.1}], fusion=1),
        "space": {"lr": loguniform(1e-9, 1e-8)},
        "race": RaceConfig(top_k=1),
    }
    asked |= {"by time": {"time_budget_s": 1e-3}, "by score": {"stop_at": 9.0}}.get(how, {})
    first = quick(**asked, num_samples=2)
    journal = (first.path / "journal.jsonl").read_bytes()
    again = quick(**asked, num_samples=2)
    assert (again.path / "journal.jsonl").read_bytes() == journal
    grown = quick(**asked, num_samples=4)
    assert grown.cost.race_epochs == first.cost.race_epochs
    expected = (how != "by time", True, "out of time" if how == "by time" else "finished")
    for found in (first, again, grown, load(grown.path)):
        assert (found.finished, found.ended, state_of(found)) == expected


def test_one_that_was_interrupted_tells_what_there_is_so_far(quick: Quick, tmp_path: Path) -> None:
    arguments = {"model_fn": counted([], interrupted_at=60), "num_samples": 4, "sweep": SweepConfig(fusion=1)}
    with pytest.raises(KeyboardInterrupt):
        quick(**arguments)
    found = load(tmp_path / "run")
    result = quick(**arguments)
    assert not found.finished
    for record, later in zip(found.trials, result.trials, strict=True):
        assert record.status in ("undecided", "not begun", later.status)
        assert later.history[: len(record.history)] == record.history
    assert any(record.history for record in found.trials)
    assert told(load(tmp_path / "run")) == told(result)


def test_at_any_point_it_opens_and_no_trial_counts_as_stopped_that_goes_on(quick: Quick, tmp_path: Path) -> None:
    result = quick(race=RaceConfig(checkpoint_every=1, grace_period=1))
    lines = (result.path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    units = [i for i, line in enumerate(lines) if b'"event": "unit"' in line]
    part = tmp_path / "part"
    shutil.copytree(result.path, part)
    seen = []
    for end in [-1, *units]:
        # The last line is one that is being written.
        (part / "journal.jsonl").write_bytes(b"".join(lines[: end + 1]) + b'{"event": "met')
        found = load(part)
        assert found.finished is (end == units[-1])
        for record, later in zip(found.trials, result.trials, strict=False):
            assert record.history == tuple(line for line in later.history if line in record.history)
            if record.status in ("stopped", "finished"):
                assert (record.status, record.history) == (later.status, later.history)
        seen += [record.status for record in found.trials]
        scored = [record.metric for record in found.trials if math.isfinite(record.metric)]
        assert found.best_metric == min(scored) if scored else math.isnan(found.best_metric)
        assert repr(found)
    assert set(seen) == {"not begun", "undecided", "stopped", "finished"}
    assert told(found) == told(result) | {name: told(found)[name] for name in ("path", "_checkpoints", "_needed")}


def test_before_the_full_size_stage_the_best_surrogate_leads(problem: Problem, tmp_path: Path) -> None:
    with run_folder(tmp_path / "run", problem) as store:
        run = Run(problem, store)
        assert (load(store.path).best_config, load(store.path).trials) == ({}, ())
        run.record("sweep/kinds-from-0", configured(3))
        scores = {0: [0.9, 0.5], 1: [0.9, 0.4], 2: [0.1]}
        lines = [line for number, of in scores.items() for line in epochs_of("sweep", number, of)]
        run.record("sweep/to-2/from-0/group-0", Unit({"members": [0, 1, 2]}, lines))
        found = load(store.path)
    assert (found.best_trial, found.best_config) == (1, {"lr": 0.1})
    assert math.isnan(found.best_metric)
    with pytest.raises(
        ValueError, match=r"no trial of the run in .*run has trained at full size, so that there is no model yet"
    ):
        found.best_model(model_fn=mlp)


def test_a_run_in_which_everything_failed(quick: Quick, tmp_path: Path) -> None:
    with pytest.raises(AllTrialsFailed):
        quick(space={"lr": uniform(1e29, 1e30), "optimizer": "sgd"}, num_samples=4)
    found = load(tmp_path / "run")
    assert [record.status for record in found.trials] == ["diverged"] * 4
    assert math.isnan(found.best_metric)


def test_one_whose_finalists_all_failed_at_full_size(problem: Problem, tmp_path: Path) -> None:
    trials = {n: Trial(n, {"lr": 0.1}) for n in range(3)}
    with run_folder(tmp_path / "run", problem) as store:
        run = Run(problem, store, known=trials)
        run.record("sweep/kinds-from-0", configured(3))
        swept = [line for number in trials for line in epochs_of("sweep", number, [number])]
        run.record("sweep/to-1/from-0/group-0", Unit({"members": [0, 1, 2]}, swept))
        run.record(FINALISTS, Unit([0, 1]), again=True)
        for number in (0, 1):
            record_epochs(run, number, epochs_of("race", number, [0.5]), {"model": {}})
            record_failure(run, number, "raised")
        run.end_by(DONE, [0, 1])
        found = load(store.path)
    assert [record.status for record in found.trials] == ["failed", "failed", "stopped"]
    assert found.finished
    assert (found.best_trial, math.isnan(found.best_metric)) == (2, True)
    console = Console(file=io.StringIO())
    console.print(found)


def test_one_whose_race_goes_on(problem: Problem, tmp_path: Path) -> None:
    """Before the first decision, after it, and at the end."""
    trials = {n: Trial(n, {"lr": 0.1}) for n in range(3)}
    weights: dict[str, Any] = {"model": {}}
    with run_folder(tmp_path / "run", problem) as store:
        run = Run(problem, store, known=trials)
        run.record("sweep/kinds-from-0", configured(3))
        swept = [line for number in trials for line in epochs_of("sweep", number, [number])]
        run.record("sweep/to-1/from-0/group-0", Unit({"members": [0, 1, 2]}, swept))
        record_epochs(run, 0, epochs_of("race", 0, [0.5]), weights, 1.0)
        record_epochs(run, 1, epochs_of("race", 1, [0.8]), weights, 1.0)
        undecided = [record.status for record in load(store.path).trials]
        run.record(FINALISTS, Unit([0, 1]), again=True)
        run.record(ENTERED, Unit([0, 1]))
        run.record("race/begin/of-2", Unit([[0, 1], [1, 1]]))
        run.record("race/to-1/kept/of-2", Unit([[1, 4], [0, None]]))
        record_epochs(run, 1, epochs_of("race", 1, [0.4, 0.3, 0.2], first=2), weights, 3.0)
        before_end = load(store.path)
        run.end_by(DONE, [0, 1])
        made, found = make_result(run, [0, 1]), load(store.path)
    assert undecided == ["undecided"] * 3
    assert [record.status for record in before_end.trials] == ["stopped", "finished", "stopped"]
    assert (found.best_config, found.best_metric, found.finished) == ({"lr": 0.1}, 0.2, True)
    assert told(found) == told(made)


def test_one_that_a_good_score_ended_has_the_winner_that_tune_had(problem: Problem, tmp_path: Path) -> None:
    """One trial came to its end; later, another one reached `stop_at` midway."""
    curves = {0: [0.5, 0.4, 0.35, 0.3], 1: [0.5, 0.2]}
    with run_folder(tmp_path / "run", problem) as store:
        run = Run(problem.with_settings(stop_at=0.25), store, known={n: Trial(n, {"lr": 0.1}) for n in curves})
        run.record("sweep/kinds-from-0", configured(2))
        run.record(FINALISTS, Unit([*curves]), again=True)
        for number, scores in curves.items():
            best = {"epoch": len(scores), "score": scores[-1], "model": {}}
            record_epochs(run, number, epochs_of("race", number, scores), {"model": {}, "best": best})
        end_by_score(run)
        made, found = make_result(run, [*curves]), load(store.path)
    assert made.best_trial == found.best_trial == 1
    assert told(found) == told(made)


def test_a_run_that_another_process_holds_can_be_read(problem: Problem, tmp_path: Path) -> None:
    """On a journal that has a line of its own at the end, which no process has finished writing."""
    with run_folder(tmp_path / "run", problem) as store:
        store.record("sweep/kinds-from-0", configured(1))
        with open(store.path / "journal.jsonl", "ab") as journal:
            journal.write(b'{"event": "met')
        before = contents(store.path)
        assert len(load(store.path).trials) == 1
        assert contents(store.path) == before


def test_a_checkpoint_that_a_run_has_left_behind_is_missed_by_name(quick: Quick) -> None:
    made = quick(num_samples=1, max_t=1)
    found = load(made.path)
    (checkpoint,) = found._checkpoints.values()
    checkpoint.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{re.escape(str(checkpoint))} is gone: .* load it again"):
        found.best_model(model_fn=mlp)


class Runs:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code in a checkpoint was run')",)


def test_nothing_in_the_folder_runs_code(quick: Quick) -> None:
    made = quick(num_samples=1, max_t=1)
    found = load(made.path)
    (checkpoint,) = found._checkpoints.values()
    torch.save({"model": Runs()}, checkpoint)
    with pytest.raises(DamagedCheckpoint, match=f"{re.escape(str(checkpoint))} cannot be read: it .* may run code"):
        found.best_model(model_fn=mlp)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            ValueError, match=rf"`path` is '{path}', but must be a run's folder.*: it holds no run.json"
        ):
            load(path)
    for text in ("[", "[]", '{"metric": "val_loss"}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=rf"`path` is '{tmp_path}', .*: its run.json is damaged, or not that of a"):
            load(tmp_path)


def test_which_weights_count_is_told_without_the_functions(quick: Quick) -> None:
    made = quick(num_samples=2, max_t=2)
    assert (load(made.path).keep, load(made.path).averaged) == (made.keep, made.averaged) == ("best", True)
    last = quick(num_samples=2, max_t=2, race=RaceConfig(keep="last"), name="last")
    assert (load(last.path).keep, load(last.path).averaged) == (last.keep, last.averaged) == ("last", False)
