from __future__ import annotations

import math
import random
import re
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from ray.tune.search.optuna import OptunaSearch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from hydro_rasda import (
    AllTrialsFailed,
    RaceConfig,
    RunExists,
    SweepConfig,
    TuneResult,
    choice,
    grid_search,
    loguniform,
    sample_from,
    uniform,
)
from hydro_rasda.contracts import Event
from hydro_rasda.schedulers import PopulationBasedTraining, Range
from hydro_rasda.tuner import _claim
from tests.hydro_rasda.models import (
    Config,
    Stumbling,
    counted,
    fixed_mlp,
    mlp,
    next_token,
    refuses_some,
    regressor,
    stumbles_in_some,
)
from tests.hydro_rasda.test_folds import stopped_after

Quick = Callable[..., TuneResult]
Pair = tuple[Tensor, Tensor]

LR: dict[str, Any] = {"lr": loguniform(1e-3, 0.3)}


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def records(result: TuneResult) -> list[Any]:
    return [[t.trial, t.config, t.status, t.sweep_epochs, t.epochs, t.history, t.error] for t in result.trials]


class NoTerms(nn.ModuleList):
    """A loss of modules, of which there are none yet."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return 100 + F.cross_entropy(output, target)


def test_a_loss_without_items_is_a_loss(quick: Quick) -> None:
    assert quick(loss_fn=NoTerms(), num_samples=1, max_t=1).best_metric > 100


def test_same_seed_same_records(quick: Quick) -> None:
    one, two, other = quick(name="one"), quick(name="two"), quick(name="other", seed=1)
    assert records(one) == records(two)
    assert (one.best_config, one.best_metric) == (two.best_config, two.best_metric)
    assert records(one) != records(other)
    for name, value in one.best_model().state_dict().items():
        assert torch.equal(two.best_model().state_dict()[name], value)


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:transfer to full size")
def test_the_largest_seed_is_one(quick: Quick) -> None:
    assert quick(seed=2**63 - 1, num_samples=4, max_t=1, sweep=SweepConfig(check_transfer=True)).transfer is not None


@pytest.mark.usefixtures("one_process")
def test_halving_and_transfer(quick: Quick) -> None:
    result = quick(num_samples=9, max_t=4, sweep=SweepConfig(reduction_factor=2), race=RaceConfig(top_k=2, keep="last"))
    epochs = sorted(record.sweep_epochs for record in result.trials)
    assert epochs == [1] * 5 + [2] * 2 + [2] * 2  # 9 trials, 4 go on to epoch 2, the best 2 to full size
    assert sorted(record.epochs for record in result.trials) == [0] * 7 + [2, 4]
    (winner,) = [record for record in result.trials if record.epochs == 4]
    assert winner.status == "finished"
    assert winner.config == result.best_config
    assert winner.metric == result.best_metric == winner.history[-1]["val_loss"]
    assert result.cost.sweep_epochs == 9 + 4
    assert result.cost.race_epochs == 2 + 4


@pytest.mark.parametrize(("code", "raised"), [(0, RuntimeError), (None, RuntimeError), (3, SystemExit)])
def test_nothing_that_is_called_ends_a_script_with_success(
    quick: Quick, code: int | None, raised: type[BaseException]
) -> None:
    def leave(event: Event) -> None:
        sys.exit(code)

    with pytest.raises(raised, match="would have ended the script with success" if raised is RuntimeError else "3"):
        quick(callbacks=[leave])


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_it_trains_where_the_caller_has_switched_gradients_off(quick: Quick, off: Callable[[], Any]) -> None:
    with off():
        result = quick(num_samples=2, max_t=1)
        assert not torch.is_grad_enabled()
    assert [trial.status for trial in result.trials] == ["finished"] * 2


@pytest.mark.slow
def test_globals_are_left_alone_and_do_not_matter(quick: Quick) -> None:
    def states() -> list[Any]:
        return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]

    torch.manual_seed(1)
    before = states()
    one = quick(name="one", num_samples=3)
    one.evaluate((torch.rand(8, 64), torch.zeros(8, dtype=torch.int64)))
    torch.manual_seed(1)
    assert states()[:2] == before[:2]
    torch.manual_seed(1)
    quick(name="one", num_samples=3)
    assert states() == before
    torch.manual_seed(2)
    assert records(quick(name="two", num_samples=3)) == records(one)


@pytest.mark.usefixtures("one_process")
def test_a_finished_run_called_again_does_not_train(quick: Quick) -> None:
    calls: list[bool] = []
    first = quick(model_fn=counted(calls), num_samples=3)
    trained = len(calls)
    again = quick(model_fn=counted(calls), num_samples=3)
    # The dry run: a batch of each data set, the first of them twice again, the example at two widths; and those whose
    # targets are beyond the others'.
    assert len(calls) - trained <= 10
    assert trained > 20
    assert records(again) == records(first)
    assert again.cost.sweep_seconds == pytest.approx(first.cost.sweep_seconds, abs=1e-3)


def test_runs_that_begin_at_once_without_a_name_have_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = [*pool.map(lambda _: _claim(tmp_path, None, "auto"), range(32))]
    assert len({claim.path for claim in claims}) == 32
    for claim in [*claims, _claim(tmp_path, "named", "auto")]:
        claim.release(undo=True)
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("one_process")
def test_runs_without_a_name_are_runs_of_their_own(quick: Quick, tmp_path: Path) -> None:
    one, two = (quick(name=None, num_samples=1, max_t=1) for _ in range(2))
    assert one.path != two.path
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("surrogate", "keep"),
    [(1 / 2, "last"), *(pytest.param(1, keep, marks=pytest.mark.slow) for keep in ("best", "last"))],
)
def test_schedule_free_winners_are_handed_back_as_they_are_validated(
    quick: Quick, digits: tuple[Pair, Pair], surrogate: float, keep: Literal["best", "last"]
) -> None:
    """At their averages, also in a run that was interrupted in the sweep and at full size."""
    asked: dict[str, Any] = {
        "space": {
            "lr": loguniform(0.03, 0.3),
            "optimizer": choice(["schedule_free_sgd", "schedule_free_adamw"]),
            "warmup": 0.1,
            "batch_size": 32,
        },
        "sweep": SweepConfig(reduction_factor=2, surrogate=surrogate, fusion=8),
        "race": RaceConfig(top_k=2, keep=keep),
    }
    whole = quick(name="whole", **asked)
    for at in range(100):
        try:
            again = quick(name="cut", callbacks=[stopped_after(1 + at % 2)], **asked)
            break
        except KeyboardInterrupt:
            pass
    assert at > 2
    assert records(again) == records(whole)
    assert whole.averaged is again.averaged is None
    x, y = digits[1]
    for result in (whole, again):
        with torch.no_grad():
            loss = F.cross_entropy(result.best_model()(x), y).item()
        assert loss == pytest.approx(whole.best_metric, rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_interrupted_in_process_it_goes_on(quick: Quick) -> None:
    impatient = counted([], interrupted_at=40)
    with pytest.raises(KeyboardInterrupt, match=r"the same call with storage_path=.*, name='run' goes on from"):
        quick(model_fn=impatient)
    result = quick(model_fn=impatient)
    assert records(result) == records(quick(model_fn=impatient, name="unbroken"))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", ["dataset", "loader", "objective", "regression", "sequences", "max", "full width"])
def test_forms_of_the_problem(kind: str, quick: Quick, digits: tuple[Pair, Pair]) -> None:
    (x, y), (vx, vy) = digits

    def by_hand(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(batch["x"])
        return {"loss": F.cross_entropy(logits, batch["y"]), "top": (logits.argmax(1) == batch["y"]).float().mean()}

    examples = [{"x": a, "y": b} for a, b in zip(x, y)]
    arguments: dict[str, dict[str, Any]] = {
        "dataset": {"train_data": TensorDataset(x, y), "val_data": TensorDataset(vx, vy)},
        "loader": {"train_data": lambda n: list(zip(x.split(n), y.split(n)))},
        "objective": {
            "train_data": examples,
            "val_data": examples,
            "objective": by_hand,
            "metric": "val_top",
            "mode": "max",
        },
        "regression": {
            "model_fn": regressor,
            "train_data": (x, y[:, None].float()),
            "val_data": (vx, vy[:, None].float()),
            "loss_fn": F.mse_loss,
            "metric": "val_mae",
        },
        "sequences": {
            "model_fn": next_token,
            "train_data": (y.view(-1, 8), y.roll(-1).view(-1, 8)),
            "val_data": (vy.view(-1, 8), vy.roll(-1).view(-1, 8)),
            "loss_fn": lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
            "metric": "val_accuracy",
            "mode": "max",
        },
        "max": {"metric": "val_accuracy", "mode": "max"},
        "full width": {"sweep": SweepConfig(surrogate=1)},
    }
    result = quick(num_samples=3, max_t=2, **arguments[kind])
    assert math.isfinite(result.best_metric)
    assert (
        result.evaluate(arguments[kind].get("val_data", (vx, vy)))[result.metric.removeprefix("val_")]
        == result.best_metric
    )


class Filed(Dataset[Pair]):
    """Examples in a file that is open: one position, for all who read from it."""

    def __init__(self, x: Tensor, y: Tensor, path: Path) -> None:
        path.write_bytes(torch.cat([x, y[:, None].float()], 1).numpy().tobytes())
        self.file, self.length, self.width = open(path, "rb", buffering=0), len(x), x.shape[1] + 1  # noqa: SIM115

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Pair:
        self.file.seek(4 * i * self.width)
        row = torch.frombuffer(bytearray(self.file.read(4 * self.width)), dtype=torch.float32)
        return row[:-1], row[-1].long()


@dataclass(frozen=True)
class Example:
    x: Tensor
    y: Tensor


class Examples(Dataset[Example]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Example:
        return Example(self.x[i], self.y[i])


def of_object(model: nn.Module, batch: Example) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(batch.x), batch.y)}


@pytest.mark.usefixtures("one_process")
def test_batches_may_be_objects_of_tensors(quick: Quick, digits: tuple[Pair, Pair]) -> None:
    """Fused, at full size, in parts and in evaluation."""
    (x, y), _ = digits
    given: dict[str, Any] = {"num_samples": 4, "max_t": 2, "space": {**LR, "accumulate": 2}, "val_data": (x, y)}
    plain = quick(name="plain", train_data=TensorDataset(x, y), **given)
    given["val_data"] = Examples(x, y)
    objects = quick(name="objects", train_data=Examples(x, y), objective=of_object, **given)
    assert [t.sweep_metric for t in objects.trials] == pytest.approx([t.sweep_metric for t in plain.trials])
    assert objects.evaluate(Examples(x, y))["loss"] == pytest.approx(objects.best_metric)


@pytest.mark.slow
def test_data_in_an_open_file_are_read_by_one_process(quick: Quick, digits: tuple[Pair, Pair], tmp_path: Path) -> None:
    (x, y), _ = digits
    one, other = TensorDataset(x, y), Filed(x, y, tmp_path / "examples")
    in_memory, in_file = (quick(train_data=data, name=name) for data, name in ((one, "one"), (other, "other")))
    other.file.close()
    for trial, same in zip(in_file.trials, in_memory.trials, strict=True):
        assert trial.sweep_metric == pytest.approx(same.sweep_metric, rel=1e-3)


@pytest.mark.usefixtures("one_process")
def test_a_model_without_a_width_is_shrunk(quick: Quick) -> None:
    result = quick(model_fn=fixed_mlp, num_samples=3, max_t=2)
    assert math.isfinite(result.best_metric)


def test_models_of_one_structure_are_followed_once(quick: Quick, traces: Callable[[], int]) -> None:
    """In whatever process a trial's surrogate is built: to find its kind, to measure, to train."""
    space = {"lr": loguniform(1e-3, 0.3), "batch_size": choice([32, 64])}
    quick(model_fn=fixed_mlp, space=space, num_samples=9, sweep={"fusion": "auto"})
    assert traces() == 1


def test_fusion_is_planned_by_itself(quick: Quick) -> None:
    assert math.isfinite(quick(num_samples=4, max_t=2, sweep={"fusion": "auto"}, space=LR).best_metric)


@pytest.mark.parametrize(
    ("model_fn", "key", "cause"),
    [
        (refuses_some, "bad", "this configuration cannot be built"),
        (stumbles_in_some, "stumbles", "this forward pass cannot be done"),
    ],
)
def test_a_configuration_that_raises_fails_alone(model_fn: Any, key: str, cause: str, quick: Quick) -> None:
    result = quick(model_fn=model_fn, space={**LR, key: grid_search([1.0, 0.0, 0.0, 0.0])}, num_samples=1)
    assert [record.status == "failed" for record in result.trials] == [True, False, False, False]
    error = result.trials[0].error
    assert error is not None
    assert "Traceback" in error
    assert cause in error
    assert math.isnan(result.trials[0].sweep_metric)
    assert all(record.error is None for record in result.trials[1:])
    assert math.isfinite(result.best_metric)


def fails_at_full_size(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return Stumbling({**config, "stumbles": float(width_ratio == 1 and config["lr"] == 0.1)}, width_ratio)


def test_a_finalist_that_raises_at_full_size_fails_alone(quick: Quick) -> None:
    result = quick(model_fn=fails_at_full_size, space={"lr": grid_search([0.05, 0.1])}, num_samples=1)
    assert [record.status for record in result.trials] == ["finished", "failed"]
    assert math.isfinite(result.trials[1].sweep_metric) or result.trials[1].sweep_epochs == 1
    assert "this forward pass cannot be done" in (result.trials[1].error or "")
    assert result.best_config["lr"] == 0.05


@pytest.mark.usefixtures("one_process")
def test_all_diverged_says_so_and_where_to_look(quick: Quick, tmp_path: Path) -> None:
    wild = {"lr": uniform(1e29, 1e30), "optimizer": "sgd"}
    for _ in range(2):
        with pytest.raises(AllTrialsFailed, match=r"all 4 trials diverged or failed .*journal\.jsonl"):
            quick(space=wild, num_samples=4)
    assert (tmp_path / "run" / "journal.jsonl").stat().st_size > 0


@pytest.mark.usefixtures("one_process")
def test_a_diverged_trial_is_recorded_as_such(quick: Quick) -> None:
    result = quick(space={"lr": grid_search([0.1, 1e30]), "optimizer": "sgd"}, num_samples=1)
    tame, wild = result.trials
    assert (tame.status, wild.status) == ("finished", "diverged")
    assert math.isnan(wild.sweep_metric)
    assert wild.history[0]["train_loss"] is None


@pytest.mark.usefixtures("one_process")
def test_out_of_time_it_ends_with_a_model_and_goes_on_with_more(quick: Quick) -> None:
    hasty = quick(time_budget_s=1e-3, num_samples=4)
    assert math.isfinite(hasty.best_metric)
    assert (hasty.cost.race_epochs, max(r.sweep_epochs for r in hasty.trials)) == (1, 1)
    hasty.best_model()
    longer = quick(time_budget_s=1e6, num_samples=4)
    assert max(record.epochs for record in longer.trials) == 4
    for before, after in zip(hasty.trials, longer.trials):
        assert after.history[: len(before.history)] == before.history
    assert math.isfinite(longer.best_metric)


@pytest.mark.usefixtures("one_process")
def test_with_more_time_all_that_had_none_get_their_turn(quick: Quick) -> None:
    calls: list[bool] = []
    arguments = {"model_fn": counted(calls), "num_samples": 4, "sweep": SweepConfig(fusion=1), "max_t": 2, "space": LR}
    hasty = quick(time_budget_s=1e-3, **arguments)
    assert [record.status for record in hasty.trials] == ["finished", "not begun", "not begun", "not begun"]
    trained = calls.count(True)
    again = quick(time_budget_s=1e-3, **arguments)
    # The dry run's: of the model thrice, a surrogate, and this one's fused copy.
    assert calls.count(True) == trained + 5
    assert records(again) == records(hasty)
    whole = quick(name="whole", **arguments)
    longer = quick(time_budget_s=1e6, **arguments)
    assert [t.sweep_epochs for t in longer.trials] == [t.sweep_epochs for t in whole.trials] == [1] * 4
    assert longer.best_metric == whole.best_metric


@pytest.mark.usefixtures("one_process")
def test_a_run_can_be_given_more_samples(quick: Quick) -> None:
    arguments = {"sweep": SweepConfig(fusion=1), "max_t": 2, "space": LR, "race": RaceConfig(top_k=1)}
    few = quick(num_samples=2, **arguments)
    more = quick(num_samples=4, **arguments)
    whole = quick(name="whole", num_samples=4, **arguments)
    assert (more.best_config, more.best_metric) == (whole.best_config, whole.best_metric)
    for grown, same in zip(more.trials, whole.trials, strict=True):
        assert grown.config == same.config
        assert [line for line in same.history if line not in grown.history] == []
    assert [line for t, s in zip(few.trials, more.trials) for line in t.history if line not in s.history] == []
    with pytest.raises(RunExists, match="num_samples was 4, now 3, but a run can only grow"):
        quick(num_samples=3, **arguments)


@pytest.mark.usefixtures("one_process")
def test_a_time_budget_ends_a_long_run(quick: Quick) -> None:
    result = quick(time_budget_s=4.0, num_samples=4, max_t=100_000, sweep=SweepConfig(grace_period=50_000))
    assert 4.0 <= result.cost.seconds < 600.0  # of hours
    assert math.isfinite(result.best_metric)
    assert result.cost.race_epochs >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_finalists_that_had_no_time_are_not_forgotten(quick: Quick) -> None:
    full = quick(name="full", num_samples=4, race=RaceConfig(grace_period=1))
    finalists = {record.trial for record in full.trials if record.epochs}
    assert len(finalists) == 2

    def out_of_time(run: Any, heat: str) -> bool:
        return heat == "race" and any(of == "race" for of, _ in run.history.metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydro_rasda.run.state.Run.out_of_time", out_of_time)
        short = quick(num_samples=4, time_budget_s=1e6, race=RaceConfig(grace_period=1))
    assert [record.epochs for record in short.trials if record.epochs] == [1]
    assert records(quick(num_samples=4, race=RaceConfig(grace_period=1))) == records(full)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"space": LR},
        {"race": RaceConfig(top_k=1)},
        {"race": RaceConfig(keep="last")},
        {"sweep": SweepConfig(searcher=OptunaSearch(seed=0))},
    ],
)
def test_another_run_of_the_name_is_refused_and_left_alone(change: Any, quick: Quick, tmp_path: Path) -> None:
    quick(num_samples=1, max_t=1)
    before = contents(tmp_path)
    with pytest.raises(RunExists, match=r"`name` is 'run', but the run of that name in .* is another: "):
        quick(**{"num_samples": 1, "max_t": 1, **change})
    assert contents(tmp_path) == before


def ignores_width(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp(config)


def other_names(config: Config, width_ratio: float = 1.0) -> nn.Module:
    return mlp(config) if width_ratio == 1 else nn.Sequential(mlp(config, width_ratio))


def broken(config: Config, width_ratio: float = 1.0) -> nn.Module:
    raise OSError("no weights here")


def closing(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for group in params for p in group["params"]], lr=lr)


def of_user(params: Any, lr: float, nesterov: bool = False) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=nesterov)


@pytest.mark.usefixtures("one_process")
def test_any_optimizer(quick: Quick) -> None:
    """By name, by class and by function: those that are SGD score as SGD does, on surrogates and at full size."""
    of_library = {"lr": grid_search([0.03, 0.1]), "optimizer": "sgd", "momentum": 0.9, "nesterov": True}
    of_function = {"lr": of_library["lr"], "optimizer": of_user, "nesterov": True}
    theirs = quick(space=of_library, num_samples=1, name="theirs")
    ours = quick(space=of_function, num_samples=1, name="ours")
    for one, other in zip(theirs.trials, ours.trials, strict=True):
        assert one.sweep_metric == pytest.approx(other.sweep_metric, rel=1e-3)
    assert theirs.best_metric == pytest.approx(ours.best_metric, rel=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixed = quick(space={"lr": 0.01, "optimizer": grid_search(["rmsprop", torch.optim.NAdam, of_user])})
    assert [trial.error for trial in mixed.trials] == [None] * len(mixed.trials)


class Nobodys(torch.optim.Optimizer):
    """Of no class of torch, so that nobody knows how its rates follow the width."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("optimizer", "rule"), [(closing, "needs no closure"), (Nobodys, "or set `sweep=SweepConfig(surrogate=1)`")]
)
def test_optimizers_that_cannot_work_are_refused_before_any_training(optimizer: Any, rule: str, quick: Quick) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusion.optim.fused.FusedOptimizer.step", pytest.fail)
        with pytest.raises(ValueError, match=f"`optimizer` is .* but must be .*{re.escape(rule)}"):
            quick(space={**LR, "optimizer": optimizer})


@pytest.mark.filterwarnings("ignore:no trial's val_loss differs from chance")
@pytest.mark.usefixtures("one_process")
def test_an_optimizer_whose_rates_follow_no_rule_may_train_at_full_width(quick: Quick) -> None:
    alone = {"num_samples": 1, "max_t": 1, "sweep": SweepConfig(surrogate=1)}
    assert quick(space={**LR, "optimizer": Nobodys}, **alone).finished


X, Y = torch.rand(8, 64), torch.arange(8)
SPLIT = {"race": RaceConfig(strategy="fsdp")}
EXPLORES_RATE = PopulationBasedTraining({"rate": Range(0.1, 1.0)}, last=4)


class Centres(nn.Module):
    """A loss with a centre for each class, which is to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.of_class = nn.Embedding(10, 10)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, self.of_class(target))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"metric": "loss"}, ValueError, r"`metric` is 'loss', but must be one of \['train_accuracy'"),
        ({"mode": "best"}, ValueError, "`mode` is 'best', but must be 'min' or 'max'"),
        ({"space": {"lr": 0.1}}, ValueError, "`space` is .*, but must be one with a domain"),
        ({"space": {"momentum": uniform(0, 1)}}, ValueError, "a space with the key 'lr'"),
        ({"space": {"lr": uniform(0, 1)}}, ValueError, r"`space\['lr'\]` is float uniform\(0, 1\), but must be"),
        ({"space": {"lr": sample_from(lambda config: -1)}}, ValueError, "`lr` is -1, but must be"),
        ({"space": {**LR, "optimizer": "lamb"}}, ValueError, r"`space\['optimizer'\]` is 'lamb', but must be one of"),
        ({"space": {**LR, "optimizer": torch.optim.LBFGS}}, ValueError, r"'optimizer'\].* lbfgs needs a closure"),
        ({"space": {**LR, "schedule": choice(["warp"])}}, ValueError, r"`space\['schedule'\]` is choice\(\['warp'\]\)"),
        ({"space": [0.1]}, ValueError, "`space` is"),
        ({"space": {**LR, "accumulate": choice([1, 2])}, **SPLIT}, ValueError, r"`space\['accumulate'\]` is .* 1 with"),
        (
            {"space": {**LR, "optimizer": choice(["lion", "adafactor"])}, **SPLIT},
            ValueError,
            "another one with race.strat",
        ),
        ({"space": {**LR, "accumulate": sample_from(lambda _: 2)}, **SPLIT}, ValueError, "`accumulate` is 2.* 1 with"),
        ({"sweep": {"grace_period": 5}}, ValueError, r"`sweep.grace_period` is 5, but must be <= max_t \(4\)"),
        ({"race": {"grace_period": 5}}, ValueError, r"`race.grace_period` is 5, but must be <= max_t"),
        (
            {"sweep": {"reduction_factor": 1}},
            ValueError,
            r"`sweep\.reduction_factor` is 1, but must be an integer >= 2",
        ),
        ({"model_fn": broken}, ValueError, "`model_fn` fails for every configuration, .*OSError: no weights here"),
        (
            {"model_fn": lambda config: "mlp"},
            ValueError,
            "`model_fn` returned a str, but must return a torch.nn.Module",
        ),
        ({"model_fn": "mlp"}, ValueError, "`model_fn` is 'mlp', but must be a function"),
        ({"model_fn": nn.Linear(1, 1)}, ValueError, "`model_fn` is a model, a Linear, but must be a function"),
        ({"model_fn": ignores_width}, ValueError, "model_fn.*width_ratio"),
        ({"model_fn": other_names}, ValueError, "model_fn.*width_ratio"),
        ({"train_data": (X[:, :9], Y)}, ValueError, r"the model cannot take a batch \[\(8, 9\) float32.*`train_data`"),
        ({"val_data": (X[:, :9], Y)}, ValueError, r"the model cannot take a batch \[\(8, 9\) float32.*`val_data`"),
        ({"train_data": (X, Y[:, None])}, ValueError, "`loss_fn` .* cannot take the model's output .* of `train_data`"),
        ({"val_data": (X, Y.float())}, ValueError, "`loss_fn` .* cannot take the model's output .* of `val_data`"),
        ({"train_data": (X[:0], Y[:0])}, ValueError, "`train_data` is empty"),
        ({"val_data": TensorDataset(X[:0])}, ValueError, "`val_data` is empty"),
        ({"val_data": lambda batch_size: []}, ValueError, "`val_data` is empty"),
        ({"train_data": "digits.csv"}, ValueError, "`train_data` is a str"),
        ({"objective": lambda m, b: m(b[0]).sum(), "loss_fn": F.mse_loss}, ValueError, "`loss_fn` and `objective`"),
        (
            {"objective": lambda m, b: m(b[0]).sum()},
            ValueError,
            "`objective` returned a Tensor, but must return a",
        ),
        (
            {"loss_fn": Centres()},
            ValueError,
            r"`loss_fn` is 'Centres', .*train, such as \['of_class.weight'\]: put the",
        ),
        ({"objective": Centres()}, ValueError, "`objective` is 'Centres', but must be a function without parameters"),
        (
            {"objective": {"0": Centres()}},
            ValueError,
            r"`objective\['0'\]` is 'Centres', but must be a function without",
        ),
        ({"race": {"keep": "first"}}, ValueError, "`race.keep` is 'first', but must be one of"),
        ({"backend": "moon"}, ValueError, "`backend` is 'moon'"),
        ({"resume": "maybe"}, ValueError, "`resume` is 'maybe', but must be one of"),
        ({"resume": "must"}, FileNotFoundError, "`resume` is 'must', but there is no run"),
        (
            {"resume": "must", "name": None},
            ValueError,
            "`name` is None, but must be that of the run, with resume='must'",
        ),
        ({"name": "a/b"}, ValueError, "`name` is 'a/b', but must be a folder's name"),
        ({"name": ""}, ValueError, "`name` is '', but must be a folder's name"),
        ({"sweep": {"searcher": "optuna"}}, ValueError, "`sweep.searcher` is 'optuna'"),
        ({"sweep": {"rule": EXPLORES_RATE}}, ValueError, "`sweep.rule` is .*keys of `space`, which has no rate"),
        (
            {"sweep": {"rule": EXPLORES_RATE}, "space": {**LR, "rate": choice([1, 2])}},
            ValueError,
            "`sweep.rule` is .*has floats of `space`: a copy cannot change rate",
        ),
        ({"num_samples": 0}, ValueError, "`num_samples` is 0, but must be an integer from 1 to 1000000"),
        ({"race": {"top_k": 0}}, ValueError, "`race.top_k` is 0, but must be an integer >= 1"),
    ],
)
def test_bad_input_is_refused_before_any_training(
    arguments: dict[str, Any], kind: type[Exception], message: str, quick: Quick, tmp_path: Path
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a step was trained")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Optimizer, "zero_grad", forbidden)
        patch.setattr("fusion.optim.fused.FusedOptimizer.step", forbidden)
        with pytest.raises(kind, match=message):
            quick(**arguments)
    assert not list(tmp_path.iterdir())


def rungs(result: TuneResult) -> tuple[set[int], set[int]]:
    """After how many epochs trials ended, on surrogates and at full size."""
    return {t.sweep_epochs for t in result.trials}, {t.epochs for t in result.trials}


@pytest.mark.usefixtures("one_process")
def test_no_rung_before_the_longest_warmup_is_over(quick: Quick, capsys: pytest.CaptureFixture[str]) -> None:
    result = quick(space={**LR, "warmup_epochs": choice([0.0, 1.5])}, race=RaceConfig(top_k=1), progress=True)
    assert rungs(result)[0] == {2}
    told = "warm-ups last up to 1.5 epochs: the first rungs are at epoch 2 of the sweep and 2 at full size"
    assert told in capsys.readouterr().out
    assert rungs(quick(name="none", race=RaceConfig(top_k=1)))[0] == {1, 2}


@pytest.mark.usefixtures("one_process")
def test_a_warmup_without_end(quick: Quick) -> None:
    with pytest.warns(UserWarning, match="`warmup_epochs` is up to 9, and `max_t` is 4: no trial is halved before"):
        result = quick(space={**LR, "warmup_epochs": 9})
    assert rungs(result) == ({4}, {0, 4})
