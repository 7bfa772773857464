"""`tune_trainer(trainer_class=...)`: a subclass of `Trainer` trains in every heat as it would alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from hydro_rasda import RaceConfig, SweepConfig, choice, loguniform
from tests.hydro_rasda.integrations.test_transformers import TEXT, arguments, gpt2, tuned

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]


class Squared(Trainer):  # type: ignore[misc]
    """Has a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss.square()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model is swept at its full width")
@pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed")
@pytest.mark.parametrize("changes", [{}, {"save_only_model": True, "eval_on_start": True, "eval_delay": 2}])
def test_a_subclass_comes_to_the_weights_that_it_has_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    """Over rungs, at each of which training is left and resumed, however it saves and evaluates."""
    given = {"train_sampling_strategy": "random", "lr_scheduler_type": "cosine", "weight_decay": 0.1}
    args = arguments(tmp_path, **given, **changes)
    result = tuned(gpt2, args, trainer_class=Squared, race=RaceConfig(top_k=2, keep="last"))
    assert {line["epoch"] for record in result.trials for line in record.history} == {1, 2, 3}
    alone = Squared(gpt2(), result.args, train_dataset=TEXT, eval_dataset=TEXT[:12])
    alone.train()
    weights = alone.model.state_dict()
    for name, value in result.best_model().state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-12)
    assert isinstance(result.trainer(), Squared)
    assert result.best_metric == pytest.approx(alone.evaluate()["eval_loss"])


def test_narrow_models_sweep(tmp_path: Path) -> None:
    widths = set[int]()

    class Noting(Squared):
        def compute_loss(self, model: Any, inputs: Any, *of: Any, **named: Any) -> Any:
            widths.add(model.config.hidden_size)
            return super().compute_loss(model, inputs, *of, **named)

    config = LlamaConfig(
        vocab_size=11, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=8, pad_token_id=0
    )
    tuned(
        config,
        arguments(tmp_path),
        {"learning_rate": loguniform(1e-3, 1e-2), "num_attention_heads": 8},
        model_class=LlamaForCausalLM,
        trainer_class=partial(Noting, callbacks=[]),
    )
    assert widths == {4, 32}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model is swept at its full width")
@pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed")
def test_patience_is_a_trials_own_and_lasts_over_rungs(tmp_path: Path) -> None:
    """Rungs are after 1 and 3 epochs of 9. The first trial diverges, and so is worse at every epoch but the first."""
    stopping = EarlyStoppingCallback(2)
    args = arguments(tmp_path, num_train_epochs=9, metric_for_best_model="loss", greater_is_better=False)
    make = partial(Trainer, callbacks=[stopping])
    sweep = SweepConfig(first=[{"learning_rate": 30.0}])
    result = tuned(gpt2, args, trainer_class=make, sweep=sweep, race=RaceConfig(top_k=2))
    alone = Trainer(
        gpt2(), result.args, train_dataset=TEXT, eval_dataset=TEXT[:12], callbacks=[EarlyStoppingCallback(2)]
    )
    alone.args.eval_strategy = "epoch"
    alone.train()
    assert result.trials[result.best_trial].epochs == alone.state.epoch
    assert stopping.early_stopping_patience_counter == 0


@pytest.mark.filterwarnings("ignore:the model is swept at its full width")
@pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed")
def test_callbacks_read_that_the_best_weights_are_kept(tmp_path: Path) -> None:
    """`EarlyStoppingCallback` warned in each heat of each trial that they are not."""
    kept: list[bool] = []

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            kept.append(args.load_best_model_at_end)

    args = arguments(tmp_path, load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    tuned(gpt2, args, trainer_class=partial(Trainer, callbacks=[Noting()]), num_samples=1)
    assert {*kept} == {True}


@pytest.mark.filterwarnings("ignore:the model is swept at its full width")
@pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed")
def test_arguments_are_as_if_made_with_a_trials_values_for_its_device(tmp_path: Path) -> None:
    """The precision follows from `bf16`, and no trial splits its batches among the GPUs of the machine."""
    seen: set[Any] = set()

    class Noting(Trainer):  # type: ignore[misc]
        def training_step(self, *given: Any, **named: Any) -> Any:
            seen.add((self.accelerator.mixed_precision, self.args.train_batch_size, self.args.device))
            return super().training_step(*given, **named)

    args = arguments(tmp_path)
    args._n_gpu = 2
    space = {"learning_rate": loguniform(1e-3, 1e-2), "bf16": choice([True])}
    tuned(gpt2, args, space, trainer_class=Noting, num_samples=1)
    assert seen == {("bf16", 4, torch.device("cpu"))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model is swept at its full width")
@pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed")
def test_numbers_of_epochs_are_searched(tmp_path: Path) -> None:
    space = {"num_train_epochs": choice([1, 4]), "learning_rate": 1e-3}
    result = tuned(gpt2, arguments(tmp_path), space, trainer_class=Trainer, num_samples=4, race=RaceConfig(top_k=4))
    asked = {record.config["num_train_epochs"] for record in result.trials}
    ended = {
        (record.config["num_train_epochs"], record.epochs) for record in result.trials if record.status == "finished"
    }
    assert asked == {1, 4}
    assert ended == {(1, 1), (4, 4)}
    assert result.args.num_train_epochs == result.best_config["num_train_epochs"]


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"max_steps": 9}, {}, "`max_steps` is 9, but must be left out: a training has whole epochs"),
        ({}, {"space": {"max_steps": choice([6, 9])}}, "`max_steps` is .*, but must be left out"),
        ({"num_train_epochs": 2.5}, {}, r"`num_train_epochs` is 2\.5, but must be a whole number of epochs >= 1"),
        (
            {},
            {"sweep": SweepConfig(rule="pbt")},
            "`sweep.rule` is 'pbt', but must be another one where a trainer is run",
        ),
        ({}, {"space": {"optim": "adamx", "learning_rate": loguniform(0.1, 1)}}, "adamx is not a valid Optimizer"),
        ({}, {"data": []}, r"`train_dataset` is \[\], but must be a data set of one example or more"),
        ({}, {"space": []}, r"`space` is \[\], but must be a mapping"),
        ({}, {"seed": 3}, "tune_trainer.. cannot follow:\n- seed=: the training arguments and data sets decide it"),
    ],
)
def test_what_would_train_otherwise_is_refused(
    changes: dict[str, Any], options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        tuned(gpt2, arguments(tmp_path, **changes), trainer_class=Trainer, **options)
