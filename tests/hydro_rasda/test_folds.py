"""`tune` over folds, and with several seeds: what it decides by, hands back, keeps, and refuses."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from sklearn.model_selection import KFold, LeaveOneOut, PredefinedSplit, StratifiedKFold, TimeSeriesSplit
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hydro_rasda import RaceConfig, SweepConfig, TuneResult, load, uniform
from hydro_rasda.cli import main
from hydro_rasda.contracts import Event
from hydro_rasda.plots.page.words import call_of
from hydro_rasda.results.result import MeanOfModels
from hydro_rasda.run.events import CheckpointSaved, EpochEnded, RunBegan
from hydro_rasda.run.run_json import read_asked
from tests.hydro_rasda.conftest import SPACE, in_one_process, tuned

pytestmark = pytest.mark.usefixtures("one_process")

Quick = Callable[..., TuneResult]
Pair = tuple[Tensor, Tensor]
CPU = torch.device("cpu")

BOTH: dict[str, Any] = {"num_samples": 6, "space": SPACE | {"batch_size": 32}, "max_t": 4, "full_trainings": 6.0}
FOLDS: dict[str, Any] = BOTH | {"val_data": StratifiedKFold(3)}


def records(result: TuneResult) -> list[Any]:
    return [(t.trial, t.config, t.status, t.metric, t.spread, t.history, t.error) for t in result.trials]


def said(result: TuneResult) -> list[str]:
    return [message.text for message in result.messages]


def test_a_result_of_folds_is_pickled_without_the_data(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    class Locked(TensorDataset):
        def __init__(self, *tensors: Tensor) -> None:
            super().__init__(*tensors)
            self.lock = threading.Lock()  # which cannot be pickled

    result = quick(**FOLDS | {"num_samples": 2, "max_t": 2, "train_data": Locked(*digits[0])})
    again = pickle.loads(pickle.dumps(result))
    assert again._problem.folds is None
    for one, other in zip(result.best_model().parameters(), again.best_model().parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_mean_of_models_is_that_of_each_field_of_their_outputs() -> None:
    @dataclass
    class Output:
        logits: Tensor
        name: str

    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x), "a")

    models, x = [Named(3, 2) for _ in range(2)], torch.randn(4, 3)
    found = MeanOfModels(models)(x)
    assert (type(found), found.name) == (Output, "a")
    torch.testing.assert_close(found.logits, (models[0](x).logits + models[1](x).logits) / 2)


def test_tune_over_folds(quick: Quick, digits: tuple[Pair, Pair], tmp_path: Path) -> None:
    result = quick(**FOLDS)
    (x, y), (test_x, test_y) = digits
    assert result.over == "3 folds"
    winner = result.trials[result.best_trial]
    assert winner.spread is not None
    assert winner.spread > 0
    model = result.best_model()
    assert isinstance(model, nn.Sequential)
    assert any("trains once more, on the examples of all 3 folds" in line for line in said(result))
    # Another finalist has a model for each fold, each of which trained on the others' examples.
    (other,) = [n for n in result._checkpoints if n != result.best_trial]
    ensemble = result.best_model(other)
    assert isinstance(ensemble, MeanOfModels)
    torch.testing.assert_close(ensemble(test_x), torch.stack([own(test_x) for own in ensemble.models]).mean(0))
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(own(x[torch.as_tensor(val)]), y[torch.as_tensor(val)]).item()
            for own, (_, val) in zip(ensemble.models, StratifiedKFold(3).split(x, y), strict=True)
        ]
    assert result.trials[other].metric == pytest.approx(fmean(losses), rel=1e-4)
    assert result.trials[other].spread == pytest.approx(stdev(losses), rel=1e-3)
    assert result.evaluate((test_x, test_y))["accuracy"] > 0.3
    # What it cost counts all models: 6 trials of 3 at epoch 1, and at least one to epoch 2.
    assert result.cost.sweep_epochs % 3 == 0
    assert result.cost.sweep_epochs >= 3 * 7
    refits = [unit for unit in _units(tmp_path / "run") if "/refit-" in unit["key"]]
    assert [unit["value"] for unit in refits] == [{"epochs": winner.kept_epoch}]
    # Opened from its folder, and begun again, it is the same.
    opened = load(tmp_path / "run")
    assert (opened.over, records(opened), opened.cost) == (result.over, records(result), result.cost)
    assert opened.best_checkpoint == result.best_checkpoint
    again = quick(**FOLDS)
    assert records(again) == records(result)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.best_model().state_dict().items())
    # The recipe trains the same model; of one that was not trained on all examples, it trains none.
    without = dict.fromkeys(result._checkpoints, result._checkpoints[other])
    for folds in (2, 3):
        other_folds = replace(result, _checkpoints=without, _problem=result._problem.with_settings(folds=folds))
        told = rf"it is {folds} models, whose mean counts; `race=RaceConfig\(refit=True\)` makes one"
        with pytest.raises(ValueError, match=told):
            other_folds.recipe()
    made: dict[str, Any] = {}
    exec(result.recipe(), made)
    trained = made["train"](quick_model, (x, y), nn.functional.cross_entropy)
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_the_recipe_of_folds_swept_at_full_width_averages_from_the_start(
    quick: Quick, digits: tuple[Pair, Pair]
) -> None:
    """As the training on all examples does; those on single folds average from where the sweep left them."""
    space = {"lr": uniform(0.5, 0.51), "momentum": 0.9, "optimizer": "sgd", "batch_size": 16}
    whole = {"sweep": SweepConfig(surrogate=1), "race": RaceConfig(ema=0.5), "num_samples": 2, "max_t": 3}
    result = quick(**FOLDS | {"space": space} | whole)
    assert result.averaged
    assert result.trials[result.best_trial].history[0]["heat"] == "sweep"
    made: dict[str, Any] = {}
    exec(result.recipe(), made)
    trained = made["train"](quick_model, digits[0], nn.functional.cross_entropy, device="cpu")
    torch.testing.assert_close(trained.state_dict(), result.best_model().state_dict(), rtol=1e-4, atol=1e-5)


def quick_model(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    from tests.hydro_rasda.models import mlp

    return mlp(config, width_ratio)


def _units(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "unit"]


def smoothed(output: Tensor, target: Tensor, config: dict[str, Any]) -> Tensor:
    assert config["activation"] in ("relu", "tanh")
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


def test_without_refit_the_models_of_the_folds_are_handed_back(
    quick: Quick, digits: tuple[Pair, Pair], tmp_path: Path
) -> None:
    result = quick(**FOLDS, race=RaceConfig(refit=False), loss_fn=smoothed)
    assert isinstance(result.best_model(), MeanOfModels)
    assert result.evaluate(digits[1])["loss"] > 0
    assert isinstance(load(tmp_path / "run").best_model(model_fn=quick_model), MeanOfModels)
    with pytest.raises(ValueError, match=f"trial {result.best_trial} is 3 models, whose mean counts"):
        result.save_model(tmp_path / "model")
    with pytest.raises(ValueError, match=r"no plain loop trains trial .* 3 models"):
        result.recipe()
    again = quick(**FOLDS, loss_fn=smoothed)
    assert isinstance(again.best_model(), nn.Sequential)
    assert again.best_metric == result.best_metric


@pytest.fixture(scope="module")
def whole(digits: tuple[Pair, Pair], tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """A run over folds, which no test changes."""
    with in_one_process():
        return tuned(digits, tmp_path_factory.mktemp("whole"), **FOLDS)


def test_cleaned_of_what_nothing_needs_nothing_trains_again(quick: Quick, whole: TuneResult, tmp_path: Path) -> None:
    """Neither the winner's models of the folds, from which it goes on, nor, without them, that of all examples."""
    shutil.copytree(whole.path, tmp_path / "run")
    events = list[Event]()
    for options, files in ([], 3), (["--best-only"], 1):
        assert main(["clean", str(tmp_path / "run"), "--yes", *options]) == 0
        assert len([*(tmp_path / "run" / "checkpoints").iterdir()]) == files
        assert quick(**FOLDS, callbacks=[events.append]).best_metric == whole.best_metric
    assert not [event for event in events if isinstance(event, EpochEnded) and not event.recalled]


def stopped_after(count: int) -> Callable[[Event], None]:
    """A callback that ends the run at its n-th checkpoint, before the journal has the unit."""
    left = iter(range(count))

    def stop(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and not event.recalled and next(left, None) is None:
            raise KeyboardInterrupt

    return stop


def test_a_run_over_folds_goes_on_where_it_was_killed(quick: Quick, whole: TuneResult) -> None:
    for at in range(100):
        try:
            result = quick(**FOLDS, name="killed", callbacks=[stopped_after(1)] if at % 2 else [stopped_after(2)])
            break
        except KeyboardInterrupt:
            pass
    assert at > 2
    assert records(result) == records(whole)
    for name, value in whole.best_model().state_dict().items():
        assert torch.equal(result.best_model().state_dict()[name], value)


@pytest.mark.parametrize(("full_trainings", "seeds"), [(3.0, 1), (6.0, 2), (30.0, 3)])
def test_finalists_repeat_as_often_as_the_budget_allows(quick: Quick, full_trainings: float, seeds: int) -> None:
    events: list[Event] = []
    asked: dict[str, Any] = {"num_samples": 4, "full_trainings": full_trainings, "sweep": SweepConfig(repeats=3)}
    result = quick(**asked, callbacks=[events.append])
    assert result.over == ("" if seeds == 1 else f"{seeds} seeds")
    winner = result.trials[result.best_trial]
    swept = [line for line in winner.history if line["heat"] == "sweep"]
    assert all("val_loss_std" in line for line in swept)
    assert (winner.spread is not None) == (seeds > 1)
    assert isinstance(result.best_model(), nn.Sequential)
    epochs = sum(line["heat"] == "race" for trial in result.trials for line in trial.history)
    assert result.cost.race_epochs == seeds * epochs
    with pytest.raises(ValueError, match=r"sweep\.repeats was 3, now 1"):
        quick(**asked | {"sweep": SweepConfig()})
    (begun,) = [event for event in events if isinstance(event, RunBegan)]
    assert begun.settings["repeats"] == 3


def test_the_spread_is_shown_wherever_scores_are(
    quick: Quick, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = quick(**FOLDS, progress=True)
    said_last = capsys.readouterr().out
    winner = result.trials[result.best_trial]
    spread = f"{winner.spread:.2g}"
    assert f"Its val_loss over 3 folds (standard deviation {spread}) is" in said_last
    assert "each with 3 folds" in said_last
    path = str(tmp_path / "run")
    assert main(["show", path]) == 0
    assert f"± {spread}" in capsys.readouterr().out
    assert main(["trials", path]) == 0
    assert "± over models" in capsys.readouterr().out
    assert main(["trials", path, "--json"]) == 0
    told = {row["trial"]: row["spread"] for row in json.loads(capsys.readouterr().out)}
    assert told[result.best_trial] == winner.spread
    assert result.dataframe()["spread"].tolist() == [trial.spread for trial in result.trials]
    call = call_of(read_asked(tmp_path / "run"))
    assert "val_data=StratifiedKFold(n_splits=3, random_state=None, shuffle=False)" in call
    assert "folds=" not in call
    page = result.report(tmp_path / "page.html").read_text()
    assert "StratifiedKFold" in page


def share_right(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return {"right": float((outputs.argmax(1) == targets).float().mean())}


def test_with_metrics_of_the_whole_set_the_winner_trains_once_more(quick: Quick) -> None:
    result = quick(**FOLDS | {"num_samples": 2, "max_t": 2}, metrics=share_right)
    assert isinstance(result.best_model(), nn.Sequential)


def test_a_sweep_of_the_model_itself_goes_on_with_all_of_its_models(quick: Quick) -> None:
    asked: dict[str, Any] = {"sweep": SweepConfig(surrogate=1), "race": RaceConfig(keep="last", ema=0)}
    result = quick(**(FOLDS | asked))
    assert result.over == "3 folds"
    swept = [unit for unit in _units(result.path) if isinstance(unit["value"], dict) and unit["value"].get("swept")]
    assert swept


def loaders(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(8, 64), torch.zeros(8).long()), batch_size)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.rand(64), 0)])


class Overlapping:
    """A splitter that validates on what it trains on."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def __repr__(self) -> str:
        return "Overlapping()"

    def split(self, X: Any, y: Any = None) -> Any:
        return self.pairs

    def get_n_splits(self) -> int:
        return len(self.pairs)


def contrast(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """A metric that needs two classes, as AUC does."""
    if len(targets.unique()) < 2:
        raise ValueError("one class")
    return {"contrast": 1.0}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a fold of one class": (
        {"val_data": Overlapping([(range(9), range(9, 99)), (range(9, 18), [0])]), "metrics": contrast},
        r"`metrics` fails on the whole validation set of fold 1, \[\(1, 10\) .*: ValueError: one class",
    ),
    "its class": ({"val_data": KFold}, r"`val_data` is the class KFold, but must be a splitter: `KFold\(\)`"),
    "loaders": ({"train_data": loaders}, "splits by indices, but `train_data` is a function that makes loaders"),
    "a stream": ({"train_data": Stream()}, "`train_data` is a Stream, whose batch size or order is fixed"),
    "a loader": ({"train_data": loaders(4)}, "`train_data` is a DataLoader, whose batch size or order is fixed"),
    "too many": ({"val_data": LeaveOneOut()}, "at most 100 folds; it makes 320"),
    "too few": ({"val_data": PredefinedSplit([0] * 160 + [-1] * 160)}, "two folds or more; it makes 1"),
    "unequal": ({"val_data": TimeSeriesSplit(5)}, "training sets are about equally large; they have 55 to 267"),
    "it fails": (
        {"val_data": StratifiedKFold(200)},
        "fails on the 320 examples of `train_data` with ValueError: n_spl",
    ),
    "overlap": ({"val_data": Overlapping([([0, 1, 2], [2]), ([1, 2], [0])])}, "fold 0 has 1 in both"),
    "one example": ({"val_data": Overlapping([([0], [1]), ([1], [0])])}, "leaves 2 examples or more to train on"),
    "no example": ({"val_data": Overlapping([([0, 1], []), ([1, 2], [0])])}, "fold 0 has 2 and 0"),
    "outside": ({"val_data": Overlapping([([0, 320], [1]), ([1, 2], [0])])}, "pairs of indices below 320"),
    "no indices": ({"val_data": Overlapping([([0.5, 1.5], [1]), ([1, 2], [0])])}, "pairs of indices below 320"),
    "workers": ({"race": RaceConfig(workers=2)}, "`race.workers` is 2, but must be 1 where a finalist trains several"),
    "train": (
        {"train": print},
        "`train` is .*, but must be None where a trial trains several",
    ),
    "repeats": ({"sweep": {"repeats": 0}}, "`sweep.repeats` is 0, but must be"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_folded_is_refused_before_any_work(quick: Quick, tmp_path: Path, case: str) -> None:
    asked, told = CASES[case]
    with pytest.raises(ValueError, match=told):
        quick(**(FOLDS | {"name": "refused"} | asked))
    assert not (tmp_path / "refused").exists()


def test_other_folds_are_other_validation_data(quick: Quick) -> None:
    asked: dict[str, Any] = FOLDS | {"num_samples": 2}
    quick(**asked)
    with pytest.raises(ValueError, match="`val_data` has other content than the run's"):
        quick(**asked | {"val_data": StratifiedKFold(3, shuffle=True, random_state=0)})


@pytest.mark.filterwarnings("ignore:no trial's val_loss differs from chance")
def test_the_argument_that_tells_more_is_named_where_chance_chose(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    x, y = digits[0]
    asked: dict[str, Any] = {"num_samples": 2, "full_trainings": 4.0, "space": {"lr": uniform(1e-5, 2e-5)}}
    (line,) = _undecided(quick(**asked, name="alike", seed=SEED_OF_LIKES))
    assert "less than the sampling error of 160 validation examples" in line
    assert line.endswith("To choose by more, use `val_data=KFold(5)`")
    of_loaders = asked | {"train_data": partial(loader, x, y)}
    (line,) = _undecided(quick(**of_loaders, name="loaders", seed=SEED_OF_LIKES))
    assert line.endswith("To choose by more, use `sweep=SweepConfig(repeats=3)`")
    apart = asked | {"sweep": SweepConfig(first=[{"lr": 1e-6}, {"lr": 0.03}])}
    assert _undecided(quick(**apart, name="apart")) == []
    few = asked | {"val_data": (x[:60], y[:60])}
    assert _undecided(quick(**few, name="few", seed=SEED_OF_LIKES)) == []


SEED_OF_LIKES = 1
"""With it, two untrained models are about as good."""


def loader(x: Tensor, y: Tensor, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size)


def _undecided(result: TuneResult) -> list[str]:
    return [line for line in said(result) if "sampling error" in line]
