"""`tune_module` against `lightning.Trainer` alone: the same weights from the same module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from hydro_rasda import RaceConfig, SweepConfig, choice, loguniform
from hydro_rasda.integrations.lightning import LightningResult, tune_module
from hydro_rasda.integrations.lightning.objective import StepObjective, optimizer_settings
from hydro_rasda.integrations.lightning.refusals import unfollowed_loader
from hydro_rasda.integrations.lightning.tune import _warn_of_replaced, monitored
from tests.hydro_rasda.integrations.results import answers_as_tunes
from tests.hydro_rasda.parts import over

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(52, 8, generator=GENERATOR, dtype=torch.float64)
Y = (X[:, :3] * X[:, 3:6]).argmax(1)
TRAIN = DataLoader(TensorDataset(X, Y), 8)
VALIDATION = DataLoader(TensorDataset(X[:21], Y[:21]), 9)

Configure = Callable[["Classifier"], Any]


class Classifier(pl.LightningModule):
    """Two layers, or as many units as a width leaves."""

    def __init__(self, config: dict[str, Any], configure: Configure, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters({"config": config})
        self.body = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 3)
        self.rate: float = config["rate"]
        self.configure = configure

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        accuracy = (logits.argmax(1) == batch[1]).float().mean()
        self.log_dict({"val_loss": F.cross_entropy(logits, batch[1]), "val_acc": accuracy}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def adam(module: Classifier) -> Any:
    return torch.optim.Adam(module.parameters(), module.rate)


def by_epoch(module: Classifier) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), 10 * module.rate, momentum=0.9, nesterov=True, weight_decay=0.01)
    return [optimizer], [StepLR(optimizer, 2, 0.1)]


def by_step(module: Classifier) -> Any:
    """One cycle over all steps; the head learns faster, and biases do not decay."""
    weights = [p for p in module.body.parameters() if p.ndim > 1]
    biases = [p for p in module.body.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": 0.3, "lr": module.rate},
        {"params": biases, "weight_decay": 0.0, "lr": module.rate},
        {"params": [*module.head.parameters()], "weight_decay": 0.3, "lr": 5 * module.rate},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95))
    most = [float(group["lr"]) for group in groups]
    steps = int(module.trainer.estimated_stepping_batches)
    scheduler = OneCycleLR(optimizer, most, total_steps=steps, cycle_momentum=False)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def seeded(configure: Configure) -> Callable[[dict[str, Any]], Classifier]:
    def module_fn(config: dict[str, Any]) -> Classifier:
        torch.manual_seed(0)
        return Classifier(config, configure).double()

    return module_fn


def trainer(**changes: Any) -> pl.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    arguments: dict[str, Any] = {"max_epochs": 3, "accelerator": "cpu", **dict.fromkeys(off, False), **changes}
    return pl.Trainer(**arguments)


def tuned(module_fn: Any, folder: Path, space: dict[str, Any] | None = None, **changes: Any) -> LightningResult:
    defaults: dict[str, Any] = {
        "num_samples": 3,
        "race": RaceConfig(top_k=1, keep="last"),
        "progress": False,
        "sweep": SweepConfig(surrogate=1),
    }
    defaults |= {"train_dataloaders": TRAIN, "val_dataloaders": VALIDATION, "trainer": trainer()}
    space = {"rate": loguniform(1e-3, 1e-1)} if space is None else space
    return tune_module(module_fn, space, storage_path=folder, name="run", **over(defaults, changes))


def test_a_module_in_place_of_its_function_is_refused(tmp_path: Path) -> None:
    made = seeded(adam)({"rate": 0.1})
    with pytest.raises(ValueError, match=r"`module_fn` is 'Classifier', but must be a function of \(config\)"):
        tuned(made, tmp_path)


def by_third_step(module: Classifier) -> Any:
    """Lightning counts the seven steps of an epoch anew in each: it decays after the third and the sixth."""
    optimizer = adam(module)
    return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 3}]


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("configure", [adam, by_epoch, by_step, by_third_step])
def test_equal_to_trainer_alone(configure: Configure, clip: float | None, tmp_path: Path) -> None:
    """The winner's sweep, fused with two others, and its full-size training after that."""
    module_fn = seeded(configure)
    result = tuned(module_fn, tmp_path, sweep=SweepConfig(fusion=3), trainer=trainer(gradient_clip_val=clip))
    alone = module_fn(result.config)
    by_itself = trainer(gradient_clip_val=clip)
    by_itself.fit(alone, TRAIN, VALIDATION)
    ours, start = dict(result.module().named_parameters()), dict(module_fn(result.config).named_parameters())
    for name, value in alone.named_parameters():
        assert (value - ours[name]).norm() <= 1e-6 * (value - start[name]).norm(), name
    (measured,) = by_itself.validate(result.module(), VALIDATION, verbose=False)
    assert measured["val_loss"] == pytest.approx(result.best_metric, rel=1e-5)
    last = result.trials[result.best_trial].history[-1]
    assert last["val_acc"] == pytest.approx(measured["val_acc"])


SOME_IGNORED = Y.masked_fill(torch.arange(52) % 7 < 4, -100)
SOME_IGNORED[:9] = -100  # a whole batch of the validation set


class Logging(Classifier):
    """Logs with the number of examples, and an accuracy with the number of targets that count."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, counted = self(batch[0]), batch[1] != -100
        accuracy = (logits.argmax(1) == batch[1]).sum() / counted.sum()
        self.log("val_loss", F.cross_entropy(logits, batch[1]), batch_size=len(batch[1]))
        self.log("val_acc", accuracy, batch_size=counted.sum())


def test_ignored_targets_count_nothing(tmp_path: Path) -> None:
    def module_fn(config: dict[str, Any]) -> Logging:
        torch.manual_seed(0)
        return Logging(config, adam).double()

    x, y = X[:21], SOME_IGNORED[:21]
    train, val = DataLoader(TensorDataset(X, SOME_IGNORED), 8), DataLoader(TensorDataset(x, y), 9)
    space = {"rate": loguniform(1e-3, 1e-1), "accumulate": 4}
    result = tuned(
        module_fn, tmp_path, space, sweep=SweepConfig(fusion=3), train_dataloaders=train, val_dataloaders=val
    )
    with torch.no_grad():
        logits = result.module()(x)
    assert result.tuned.best_metric == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-6)
    last = result.tuned.trials[result.tuned.best_trial].history[-1]
    hits = (logits.argmax(1) == y)[y != -100].double().mean()
    assert last["val_acc"] == pytest.approx(hits.item(), rel=1e-6)
    whole = module_fn(result.config)
    trainer().fit(whole, train, val)
    for name, value in whole.named_parameters():
        torch.testing.assert_close(value, dict(result.module().named_parameters())[name], rtol=1e-6, atol=1e-9)


class Data(pl.LightningDataModule):
    """The same data."""

    def setup(self, stage: str) -> None:
        self.train = TensorDataset(X.float(), Y)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, 8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return VALIDATION_FLOAT


VALIDATION_FLOAT = DataLoader(TensorDataset(X[:21].float(), Y[:21]), 9)


def test_a_module_is_made_narrower_and_compared_by_what_it_logs(tmp_path: Path) -> None:
    def module_fn(config: dict[str, Any]) -> Classifier:
        return Classifier(config, by_step)

    space = {"rate": loguniform(1e-3, 1e-1), "batch_size": choice([4, 8])}
    more: dict[str, Any] = {"datamodule": Data(), "train_dataloaders": None, "val_dataloaders": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = tuned(
            module_fn,
            tmp_path,
            space,
            **more,
            monitor="val_acc",
            mode="max",
            sweep=SweepConfig(surrogate=1 / 2),
            race={"keep": "best"},
        )
    assert result.config.keys() == space.keys()
    module: Any = result.module()
    assert module.body[0].out_features == 16
    assert {trial.config["batch_size"] for trial in result.trials} <= {4, 8}
    assert result.config.items() <= result.best_config.items()
    assert answers_as_tunes(result)


class WithoutIndex(Classifier):
    """Lightning gives a step no index that it has no argument for."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


def test_steps_without_an_index() -> None:
    module, batch = WithoutIndex({"rate": 0.1}, adam).double(), (X[:8], Y[:8])
    for part in (module.train(), module.eval()):
        loss = StepObjective(52, 3, False)(part, batch)["loss"]
        torch.testing.assert_close(loss, F.cross_entropy(module(batch[0]), batch[1]))


class Annealing(Classifier):
    """A weight of the loss grows with the epoch, in training or in validation."""

    def __init__(self, *args: Any, name: str, part: str) -> None:
        super().__init__(*args)
        self.name, self.part = name, part

    def forward(self, x: Tensor) -> Tensor:
        beta = min(1.0, getattr(self, self.name) / 2) if self.training is (self.part == "training") else 0.0
        logits: Tensor = super().forward(x) + beta
        return logits


@pytest.mark.parametrize("part", ["training", "validation"])
@pytest.mark.parametrize("name", ["current_epoch", "global_step"])
def test_a_step_that_reads_the_epoch_is_refused(name: str, part: str, tmp_path: Path) -> None:
    def module_fn(config: dict[str, Any]) -> Classifier:
        return Annealing(config, adam, name=name, part=part).double()

    told = rf"{part}_step\(\) asks for `trainer\.{name}`, but here it can only ask for max_epochs"
    with pytest.raises(ValueError, match=told):
        tuned(module_fn, tmp_path)


def test_what_a_step_knows_of_its_trainer() -> None:
    class Knowing(WithoutIndex):
        def forward(self, x: Tensor) -> Tensor:
            assert (self.trainer.max_epochs, self.trainer.training, self.global_rank) == (3, self.training, 0)
            assert self.logger is None
            return super().forward(x)

    module = Knowing({"rate": 0.1}, adam).double()
    for part in (module.train(), module.eval()):
        StepObjective(52, 3, False)(part, (X[:8], Y[:8]))
    assert module._trainer is None
    assert module.current_epoch == 0


class LogsAnother(Classifier):
    """In both steps, the loss that is logged is not the one that is returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", 3 * loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", 3 * loss)
        return loss


def test_training_has_the_loss_that_is_returned_and_validation_the_one_that_is_logged() -> None:
    module, batch = LogsAnother({"rate": 0.1}, adam).double(), (X[:8], Y[:8])
    for training, factor in ((True, 1), (False, 3)):
        loss = StepObjective(52, 3, False)(module.train(training), batch)["loss"]
        torch.testing.assert_close(loss, factor * F.cross_entropy(module(batch[0]), batch[1]))


class LogsOneElement(Classifier):
    """A metric with a dimension, which Lightning squeezes."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1])[None])


@pytest.mark.parametrize(
    ("monitor", "metric"),
    [("val/acc", "val_acc"), ("acc", "val_acc"), ("train_loss", "train_loss"), ("train/acc", "train_acc")],
)
def test_what_is_monitored_may_be_a_metric_of_training(monitor: str, metric: str) -> None:
    assert monitored(monitor) == metric


def test_logged_tensors_of_one_element_are_scalars() -> None:
    module, batch = LogsOneElement({"rate": 0.1}, adam).double(), (X[:8], Y[:8])
    assert StepObjective(52, 3, False)(module.eval(), batch)["loss"].shape == ()


class ByParts(Classifier):
    """Its steps call a part of it, and never the module itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.body(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def test_steps_that_do_not_call_the_module_are_told_how(tmp_path: Path) -> None:
    def module_fn(config: dict[str, Any]) -> Classifier:
        return ByParts(config, adam).double()

    with pytest.warns(UserWarning, match=r"swept at its full width .*`self.net\(x\)`.* Have them call `self\(x\)`"):
        result = tuned(module_fn, tmp_path, sweep=SweepConfig(surrogate=1 / 2))
    assert answers_as_tunes(result)


class Peculiar(Classifier):
    """Much that no fused group can follow."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, adam)
        self.automatic_optimization = False

    def on_train_epoch_end(self) -> None: ...

    def optimizer_step(self, *arguments: Any, **more: Any) -> None: ...


def test_all_that_cannot_be_followed_is_told_at_once_before_any_work(tmp_path: Path) -> None:
    stops = EarlyStopping("val_loss")
    unlike = trainer(limit_train_batches=0.5, precision="64-true", callbacks=[stops], accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"^tune_module\(\) cannot follow:\n") as raised:
        tuned(Peculiar, tmp_path, trainer=unlike, val_dataloaders=[VALIDATION, VALIDATION])
    assert str(raised.value).splitlines()[1:] == [
        "- val_dataloaders: a list, but must be one DataLoader",
        "- Trainer(limit_train_batches=0.5)",
        "- Trainer(accumulate_grad_batches=2): use the key `accumulate` of the space",
        "- Trainer(precision='64-true'): one of 32-true, 32, bf16-mixed, 16-mixed",
        "- EarlyStopping: a callback",
        "- Peculiar.on_train_epoch_end(): it is overridden",
        "- Peculiar.optimizer_step(): it is overridden",
        "- Peculiar: its optimization is manual (`automatic_optimization=False`)",
    ]
    assert [*tmp_path.iterdir()] == []


class Augmenting(Data):
    """Changes batches on their way to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


def test_a_data_module_that_changes_batches_after_its_loaders_is_refused(tmp_path: Path) -> None:
    more: dict[str, Any] = {"datamodule": Augmenting(), "train_dataloaders": None, "val_dataloaders": None}
    with pytest.raises(ValueError, match=r"\n- Augmenting.on_after_batch_transfer\(\): it is overridden$"):
        tuned(seeded(adam), tmp_path, **more)


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(X, num_samples=16), RandomSampler(X, replacement=True), SequentialSampler(X[:16])],
)
def test_samplers_that_do_not_take_each_example_once_are_refused(sampler: Any) -> None:
    (told,) = unfollowed_loader("train_dataloaders", DataLoader(TensorDataset(X, Y), 8, sampler=sampler))
    assert told.startswith(f"train_dataloaders: its sampler draws {len(sampler)} examples, but must take each")


def rmsprop(module: Classifier) -> Any:
    return torch.optim.RMSprop(module.parameters())


def two(module: Classifier) -> Any:
    return [adam(module), adam(module)]


def plateau(module: Classifier) -> Any:
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}


def cycling(module: Classifier) -> Any:
    optimizer = adam(module)
    return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=21), "interval": "step"}]


def uneven(module: Classifier) -> Any:
    groups = [{"params": module.head.parameters(), "lr": 0.1}, {"params": module.body.parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups)
    return [optimizer], [CosineAnnealingLR(optimizer, 3, eta_min=0.05)]


def still(module: Classifier) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    return [optimizer], [CosineAnnealingLR(optimizer, 3)]


def begins_still(module: Classifier) -> Any:
    groups = [{"params": module.head.parameters(), "lr": 0.1}, {"params": module.body.parameters(), "lr": 0.0}]
    optimizer = torch.optim.SGD(groups)
    return [optimizer], [CosineAnnealingLR(optimizer, 3, eta_min=0.05)]


def partial(module: Classifier) -> Any:
    return torch.optim.SGD(module.head.parameters(), 0.1)


def without(**changes: Any) -> Configure:
    def configure(module: Classifier) -> Any:
        optimizer = adam(module)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1), **changes}]

    return configure


def test_a_group_with_a_rate_of_zero_stays_as_it_is() -> None:
    def still_body(module: Classifier) -> Any:
        groups = [{"params": module.body.parameters(), "lr": 0.0}, {"params": module.head.parameters(), "lr": 0.1}]
        optimizer = torch.optim.SGD(groups)
        return [optimizer], [StepLR(optimizer, 1, 0.5)]

    found = optimizer_settings(Classifier({"rate": 0.1}, still_body), {"rate": 0.1}, epochs=3, steps=9)
    assert {factor for name, factor in found.lr_factors.items() if name.startswith("body.")} == {0.0}
    assert (found.config["lr"], found.config["schedule"].factors) == (0.1, (1.0, 0.5, 0.25))


def test_a_schedule_may_begin_at_zero() -> None:
    def warming(module: Classifier) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: epoch / 2)]

    found = optimizer_settings(Classifier({"rate": 0.1}, warming), {"rate": 0.1}, epochs=3, steps=9)
    assert (found.config["lr"], found.config["schedule"].factors) == (0.1, (0.0, 0.5, 1.0))


@pytest.mark.parametrize(
    ("change", "told"),
    [({"momentum": 0.5}, "groups with different momentum"), ({"maximize": True}, "maximize=True")],
    ids=["momentum", "maximize"],
)
def test_what_one_group_alone_asks_for_is_refused(change: dict[str, Any], told: str) -> None:
    def apart(module: Classifier) -> Any:
        groups = [{"params": module.body.parameters()}, {"params": module.head.parameters(), **change}]
        return torch.optim.SGD(groups, 0.1)

    with pytest.raises(ValueError, match=told):
        optimizer_settings(Classifier({"rate": 0.1}, apart), {"rate": 0.1}, epochs=3, steps=9)


def test_keys_for_the_optimizer_that_the_module_does_not_read_are_told(tmp_path: Path) -> None:
    """Beside `tune`, which reads them: here they changed nothing, and the best configuration named them."""

    def module_fn(config: dict[str, Any]) -> Classifier:
        return Classifier({"rate": config["lr"]}, adam).double()

    config, objective = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.5, "batch_size": 8}, StepObjective(52, 3, False)
    with pytest.warns(UserWarning, match="does not read `weight_decay`, and its configure_optimizers"):
        _warn_of_replaced(module_fn, config, [*config], objective)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_replaced(module_fn, config, ["lr", "momentum"], objective)  # `momentum` is not adamw's
        _warn_of_replaced(lambda config: module_fn({**config}), config, [*config], objective)
    with pytest.warns(UserWarning, match="does not read `lr`"):
        tuned(
            lambda config: Classifier({"rate": config["rate"]}, adam).double(),
            tmp_path,
            {"rate": 0.1, "lr": loguniform(1e-3, 1e-1)},
            num_samples=1,
        )


def test_a_trainer_that_does_not_train_yet_says_what_it_knows() -> None:
    def asking(module: Classifier) -> Any:
        trainer: Any = module.trainer
        return torch.optim.SGD(module.parameters(), 0.1 / len(trainer.datamodule.train_dataloader()))

    told = (
        r"asks for `trainer.datamodule`, but here it can only ask for estimated_stepping_batches, max_epochs, max_steps"
    )
    with pytest.raises(AttributeError, match=told):
        optimizer_settings(Classifier({"rate": 0.1}, asking), {"rate": 0.1}, epochs=3, steps=9)


@pytest.mark.parametrize(
    ("configure", "match"),
    [
        (rmsprop, "RMSprop: SGD, Adam and AdamW are followed"),
        (two, "returns 2 optimizers: one is followed"),
        (plateau, "ReduceLROnPlateau: it is no function of the step"),
        (cycling, "OneCycleLR: it changes momenta, too"),
        (uneven, "CosineAnnealingLR: groups change by different factors"),
        (still, "all learning rates are 0"),
        (begins_still, "CosineAnnealingLR: groups change by different factors"),
        (partial, "no group has the parameter 'body.0.bias': freeze it"),
        (lambda module: {"lr_scheduler": None}, "returns NoneType, no optimizer"),
        (without(interval="batch"), "'interval': 'batch'.*it must have .* an 'interval' of 'step' or 'epoch'"),
        (without(frequency=0), "'frequency': 0.*it must have .* a 'frequency' of 1 or more"),
        (without(scheduler=None), "'scheduler': None.*it must have 'scheduler'"),
    ],
)
def test_optimizers_that_cannot_be_followed(configure: Configure, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        tuned(seeded(configure), tmp_path)
