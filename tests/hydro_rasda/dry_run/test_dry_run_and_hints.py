"""What would end every trial late is told before any of them trains."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydro_rasda import AllTrialsFailed, RaceConfig, SweepConfig, TuneResult, choice, loguniform
from hydro_rasda.common.trial import Trial
from hydro_rasda.dry_run.dry_run import dry_run
from hydro_rasda.dry_run.dry_run_and_hints import get_ready
from hydro_rasda.problem.objective import as_objective
from tests.hydro_rasda.models import Config, mlp, regressor
from tests.hydro_rasda.problems import LABELS, X, problem, trials

Quick = Callable[..., TuneResult]
LR = {"lr": loguniform(1e-3, 0.3)}
MANY, TARGETS = torch.rand(100, 64), torch.arange(100) % 10

pytestmark = pytest.mark.usefixtures("one_process")


def raises(step: int, steps: int) -> float:
    raise RuntimeError("no such step")


def late(step: int, steps: int) -> float:
    return 1.0 if 2 * step < steps else raises(step, steps)


def refused(quick: Quick, told: str, **arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusion.optim.fused.FusedOptimizer.step", pytest.fail)
        with pytest.raises(ValueError, match=told):
            quick(**arguments)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (lambda step, steps: math.nan, r"step 0 of 20 .*`schedule\(step, steps\)` is nan, but must be a finite number"),
        (lambda step, steps: None, "step 0 of 20 .* is None, but must be"),
        (lambda step, steps: -1.0, "step 0 of 20 .* is -1.0, but must be"),
        (lambda step, steps: "1", "step 0 of 20 .* is '1', but must be"),
        (lambda step, steps: 1 - 2 * step / steps, "step 11 of 20 .* is -0.1"),
        (raises, "step 0 of 20 with RuntimeError: no such step"),
        (late, "step 10 of 20 with RuntimeError: no such step"),
    ],
)
@pytest.mark.parametrize("given", [lambda schedule: schedule, lambda schedule: choice([*["cosine"] * 20, schedule])])
def test_a_schedule_that_gives_no_factors(schedule: Any, told: str, given: Any, quick: Quick) -> None:
    refused(quick, f"`schedule` is <function .*, which fails at {told}", space={**LR, "schedule": given(schedule)})


def test_a_schedule_of_one_argument(quick: Quick) -> None:
    refused(quick, r"`space\['schedule'\]` is .*function of the step", space={**LR, "schedule": lambda step: 1.0})


def never(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * math.nan


def endless(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + math.inf


def with_metric(value: Any) -> Any:
    return lambda model, batch: {"loss": F.cross_entropy(model(batch[0]), batch[1]), "f": torch.tensor(value)}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"loss_fn": never}, r"`loss_fn` \(or `objective`\) gives a loss of nan for each batch of `train_data`"),
        ({"loss_fn": endless}, "gives a loss of inf for each batch of `train_data`"),
        (
            {"objective": with_metric(math.nan), "metric": "val_f"},
            "`metric` is 'val_f', which is nan for the untrained",
        ),
        ({"objective": with_metric(-math.inf), "metric": "train_f"}, "`metric` is 'train_f', which is -inf for"),
        ({"objective": with_metric(1j)}, "`objective` returned 'f' of torch.complex64, but must return real numbers"),
        ({"metrics": lambda o, t: {"auc": math.nan}, "metric": "val_auc"}, "`metric` is 'val_auc', which is nan for"),
        ({"metrics": lambda o, t: {"auc": 1j}}, r"`metrics` returned \{'auc': 1j\}, but must return a dict of numbers"),
    ],
)
def test_what_is_never_finite(arguments: dict[str, Any], told: str, quick: Quick) -> None:
    refused(quick, told, **arguments)


def test_metrics_may_not_have_the_names_of_the_objectives(quick: Quick) -> None:
    told = r"`metrics` is \['accuracy', 'loss'\], but must be a function whose names are not the objective's, too"
    refused(quick, told, metrics=lambda outputs, targets: {"loss": 1.0, "auc": 0.5, "accuracy": 1.0})


def begins_at_zero(config: Config, width_ratio: float = 1.0) -> nn.Module:
    model = regressor(config, width_ratio)
    nn.init.zeros_(model[-1].weight)  # type: ignore[index]
    return model


def correlation(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    return {"r": float(torch.corrcoef(torch.stack([outputs[:, 0], targets[:, 0]]))[0, 1])}


def test_a_metric_that_only_constant_predictions_lack() -> None:
    assert math.isnan(correlation(torch.ones(4, 1), X[:4, :1])["r"])
    asked = problem(begins_at_zero, (X, X[:, :1]), metric="val_r")
    dry_run(replace(asked, objective=as_objective(None, F.mse_loss, collected=True), metrics=correlation), trials())


def test_a_validation_batch_of_ignored_targets() -> None:
    labels = torch.where(torch.arange(12) < 4, -100, LABELS)
    found = dry_run(problem(mlp, (X, labels)), trials())
    assert found.parameters


def dropping(rows: int) -> Any:
    data = TensorDataset(MANY[:rows], TARGETS[:rows])
    return lambda batch_size: DataLoader(data, batch_size, drop_last=True)


def dropping_without_a_length(batch_size: int) -> Iterator[Any]:
    return (
        (MANY[at : at + batch_size], TARGETS[at : at + batch_size]) for at in range(0, 101 - batch_size, batch_size)
    )


def read_before(batches: int) -> Any:
    iterator = iter([(MANY[:64], TARGETS[:64])] * batches)
    return lambda batch_size: iterator


LOADED = {**LR, "batch_size": 64}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"val_data": dropping(100)}, r"evaluation \(4 times `batch_size`\) of 256 examples.*`val_data` is empty"),
        ({"val_data": dropping_without_a_length}, "of 256 examples: .* `drop_last=True` needs 256 examples"),
        ({"val_data": dropping(100), "space": {**LR, "batch_size": choice([4, 32])}}, "of 128 examples"),
        ({"train_data": dropping(50)}, "`train_data` raises at its first batch of 64 .*`train_data` is empty"),
        ({"train_data": dropping(100), "space": {**LR, "batch_size": choice([4, 128])}}, "of 128 .* is empty"),
        ({"train_data": read_before(1), "space": LOADED}, "`train_data` is empty, .* that was read has none left"),
        ({"train_data": read_before(9), "space": LOADED}, "`train_data` raises at its first batch, read once more,"),
        ({"val_data": read_before(9)}, "`val_data` raises at its first batch, read once more,"),
    ],
)
def test_loaders_that_have_no_batch_when_training_asks(arguments: dict[str, Any], told: str, quick: Quick) -> None:
    refused(quick, told, **arguments)


MORE = (
    *("acc", "acc@5", "accuracy_top1", "f1_macro", "macroF1", "auroc", "roc_auc", "recall", "recall@10", "precision"),
    *("top5", "top_5", "bleu4", "rougeL", "mIoU", "iou_mean", "dice", "mAP50_95", "r2", "PSNR", "log_likelihood"),
)
LESS = ("loss", "error", "perplexity", "rmse", "mae", "wer", "brier_score", "nll", "l1Loss")
UNSURE = (
    "score",
    "top1_error",
    "negative_mse",
    "neg_loss",
    "one_minus_accuracy",
    "dice_loss",
    "params_used",
    "laptop",
    "tests",
)


@pytest.mark.parametrize(("asked", "told"), [({}, False), ({"batch_size": 12}, False), ({"batch_size": 16}, True)])
def test_a_batch_size_above_the_data_is_told(asked: Config, told: bool) -> None:
    config = {"lr": 0.1, "schedule": "linear", **asked}
    hint = (
        "hint: `batch_size` is up to 16, but `train_data` has only 12 examples. Sizes above 12 train as 12 does, in one"
    )
    messages = get_ready(problem(), config, [Trial(0, {**config, "batch_size": 4}), Trial(1, config)]).messages
    assert any(message.startswith(hint) for message in messages) == told


def test_a_direction_that_does_not_suit_the_name_of_a_metric_is_said() -> None:
    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {**dict.fromkeys((*MORE, *LESS, *UNSURE), loss), "loss": loss}

    def doubted(mode: Literal["min", "max"]) -> list[str]:
        compared = tuple((f"val_{name}", mode) for name in (*MORE, *LESS, *UNSURE))
        asked = problem(objective=as_objective(objective, F.cross_entropy))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            get_ready(asked.with_settings(metric=compared[0][0], objectives=compared), LR, trials())
        told = "`mode` is '{}', so that the trial with the {} val_{} wins: set `mode='{}'` if {} is better"
        words = {"min": ("lowest", "max", "more"), "max": ("highest", "min", "less")}[mode]
        said = {str(warning.message) for warning in caught}
        return [
            name for name in (*MORE, *LESS, *UNSURE) if told.format(mode, words[0], name, words[1], words[2]) in said
        ]

    assert doubted("min") == [*MORE]
    assert doubted("max") == [*LESS]


def told(space: Config, configs: int = 9, **settings: Any) -> set[str]:
    """Which hints a problem gets, each by some of its words."""
    words = ("no trial is halved", "first rungs are", "can enter the race", "never decays")
    own = {name: value for name, value in space.items() if name != "lr"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ready = get_ready(problem().with_settings(**settings), {**LR, **own}, trials(*[own] * configs))
    said = [*ready.messages, *(str(warning.message) for warning in caught)]
    return {hint for hint in words if any(hint in text for text in said)}


def test_hints_come_where_they_help_and_nowhere_else() -> None:
    cosine = {"schedule": "cosine"}
    whole: dict[str, Any] = {"sweep": SweepConfig(surrogate=1), "num_samples": 9}
    assert told({**cosine, "warmup_epochs": 1.0}, **whole) == set()
    assert told({**cosine, "warmup_epochs": 3.9}, **whole) == {"first rungs are"}
    assert told({**cosine, "warmup_epochs": 4.0}, **whole) == {"first rungs are", "no trial is halved"}
    assert told({"schedule": "constant"}, **whole) == {"never decays"}
    assert told({"schedule": "constant", "optimizer": "schedule_free_adamw"}, **whole) == set()
    few: dict[str, Any] = {"race": RaceConfig(top_k=3)}
    assert told(cosine, configs=3, num_samples=3, **few) == {"can enter the race"}
    assert told(cosine, configs=3, num_samples=4, **few) == set()
    assert told(cosine, configs=4, num_samples=3, **few) == set(), "a grid may have more trials than that"
    assert told(cosine, configs=3, num_samples=3, **few, sweep=SweepConfig(surrogate=1)) == set()


class Later:
    """Does as it should the first few times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def over(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.filterwarnings("ignore:calls of `loss_fn` change `left`")
def test_where_only_training_shows_it_the_message_does_not_blame_the_learning_rate(quick: Quick) -> None:
    later = Later(1)

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {"auc": math.nan if later.over() else 0.5}

    with pytest.raises(AllTrialsFailed, match="no finite val_auc; look at what gives val_auc, since 9 of them") as told:
        quick(metrics=metrics, metric="val_auc", mode="max", name="nan")
    assert "lower `lr`" not in str(told.value)
    batches = Later(20)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if batches.over():
            raise RuntimeError("it had enough")
        return F.cross_entropy(output, target)

    with pytest.raises(AllTrialsFailed, match=r"each of them raised, see .*(?s:.*)it had enough") as told:
        quick(loss_fn=loss_fn, name="raised")
    assert "lower `lr`" not in str(told.value)
