"""`tune_trainer` against `transformers.Trainer` alone: the same weights from the same training arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    Trainer,
    TrainingArguments,
    Wav2Vec2FeatureExtractor,
    default_data_collator,
    get_scheduler,
)
from transformers.trainer_utils import SchedulerType

from hydro_rasda import RaceConfig, SweepConfig, choice, grid_search, loguniform, uniform
from hydro_rasda.integrations.transformers import TrainerResult, tune_trainer
from hydro_rasda.integrations.transformers.arguments import schedule_types, to_known
from hydro_rasda.integrations.transformers.data import FromConfig, FromInit, collator
from hydro_rasda.integrations.transformers.objective import (
    Predictions,
    TrainerObjective,
    TrainerSchedule,
    schedules_refused,
    trainer_objective,
)
from hydro_rasda.integrations.transformers.tune import _warmup_epochs
from tests import zoo

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed"),
    pytest.mark.filterwarnings("ignore:these training arguments have no effect here. disable_tqdm, save_strategy$"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

GENERATOR = torch.Generator().manual_seed(0)


def sentence(label: int | None = None) -> dict[str, Any]:
    """Three to seven tokens of ten, padded; what is padded is not predicted. Or one label for all."""
    length = int(torch.randint(3, 8, (), generator=GENERATOR))
    tokens = torch.randint(1, 11, (7,), generator=GENERATOR)
    mask = (torch.arange(7) < length).long()
    target = tokens.masked_fill(mask == 0, -100) if label is None else torch.tensor(label)
    return {"input_ids": tokens * mask, "attention_mask": mask, "labels": target, "unused": 7}


TEXT = [sentence() for _ in range(37)]
LABELLED = [sentence(label=i % 3) for i in range(37)]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return zoo.gpt2().double()


def llama() -> nn.Module:
    torch.manual_seed(0)
    return zoo.llama().double()


def bert() -> nn.Module:
    torch.manual_seed(0)
    return zoo.bert().double()


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "num_train_epochs": 3,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **changes})


def tuned(
    model: Any, args: TrainingArguments, space: dict[str, Any] | None = None, data: Any = TEXT, **options: Any
) -> TrainerResult:
    defaults = {"num_samples": 3, "race": RaceConfig(top_k=1), "progress": False, "name": "run"}
    space = {"learning_rate": loguniform(1e-3, 1e-1)} if space is None else space
    return tune_trainer(model, args, space, train_dataset=data, eval_dataset=data[:12], **{**defaults, **options})


def evaluated_at_once(trainer: Trainer) -> dict[str, float]:
    """The loss over the whole set: over several batches, `Trainer` weighs their means by sentences, not by tokens."""
    data: Any = trainer.eval_dataset
    trainer.args.per_device_eval_batch_size = len(data)
    evaluated: dict[str, float] = trainer.evaluate()
    return evaluated


CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "defaults": (gpt2, TEXT, {}),
    "schedule, accumulation, clipping": (
        gpt2,
        TEXT,
        {
            "lr_scheduler_type": "cosine",
            "warmup_steps": 4,
            "weight_decay": 0.5,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.3,
            "adam_beta2": 0.95,
        },
    ),
    "last part left out": (
        llama,
        TEXT[:35],
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 3, "warmup_steps": 0.3},
    ),
    "classes, sgd, no clipping": (
        bert,
        LABELLED,
        {"optim": "sgd", "weight_decay": 0.01, "max_grad_norm": 0.0, "lr_scheduler_type": "constant_with_warmup"},
    ),
    "smoothed labels": (gpt2, TEXT, {"label_smoothing_factor": 0.2, "lr_scheduler_type": "polynomial"}),
    "bf16": (bert, LABELLED, {"bf16": True}),
    "fp16, which `Trainer` has on GPUs alone": (bert, LABELLED, {"fp16": True}),
}


# The last case that is compared by its own metric, below, is in bf16, too; the others have what the first one has.
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in ("defaults", "bf16"))) for case in CASES]
)
def test_equal_to_trainer_alone(case: str, tmp_path: Path) -> None:
    """The winner's sweep, fused with two others, and its full-size training after that."""
    model_init, data, changes = CASES[case]
    args = arguments(tmp_path, **changes)
    result = tuned(model_init, args, data=data)
    assert args.learning_rate != result.args.learning_rate == result.best_config["lr"]
    alone = replace(result.args, fp16=False)
    trainer = Trainer(model_init(), alone, train_dataset=data, eval_dataset=data[:12])
    trainer.train()
    assert trainer.state.global_step > 8
    rounded = args.bf16 or args.fp16
    tolerance = 0.05 if rounded else 1e-5
    for name, value in result.model().named_parameters():
        expected = dict(trainer.model.named_parameters())[name]
        moved = (expected - dict(model_init().named_parameters())[name]).norm()
        assert (value - expected).norm() <= tolerance * moved + 1e-9, name
    expected = evaluated_at_once(trainer)["eval_loss"]
    assert result.best_metric == pytest.approx(expected, rel=0.02 if rounded else 1e-5)


def trimmed(features: list[Any]) -> dict[str, Any]:
    """A batch as long as its longest sentence, as tokenizers pad it."""
    batch = default_data_collator(features)
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: value[:, :longest] if value.ndim > 1 else value for name, value in batch.items()}


def of_logits(prediction: Any) -> dict[str, float]:
    """No mean over batches: how much the largest logits differ, and how often they are the labels'."""
    logits, labels = prediction.predictions, prediction.label_ids
    assert logits.shape[:-1] == labels.shape
    known = labels != -100
    return {"spread": logits.max(-1)[known].std(), "eval_hits": (logits.argmax(-1) == labels)[known].mean()}


def of_tokens(prediction: Any) -> dict[str, float]:
    known = prediction.label_ids != -100
    return {"hits": (prediction.predictions == prediction.label_ids)[known].mean(), "used": len(known)}


@pytest.mark.parametrize(
    ("model_init", "data", "changes", "options", "best"),
    [
        (gpt2, TEXT, {"metric_for_best_model": "eval_spread", "greater_is_better": False}, {}, min),
        (gpt2, TEXT, {"metric_for_best_model": "spread", "label_smoothing_factor": 0.2}, {}, max),
        pytest.param(bert, LABELLED, {"metric_for_best_model": "hits"}, {}, max, marks=pytest.mark.slow),
        (llama, TEXT, {}, {}, min),
        (
            llama,
            TEXT,
            {"metric_for_best_model": "hits", "bf16": True},
            {
                "compute_metrics": of_tokens,
                "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
            },
            max,
        ),
    ],
)
def test_compared_by_what_trainer_would_be(
    model_init: Any, data: Any, changes: Any, options: Any, best: Any, tmp_path: Path
) -> None:
    args = arguments(tmp_path, num_train_epochs=2, load_best_model_at_end=True, **changes)
    options = {"compute_metrics": of_logits, "data_collator": trimmed, "race": RaceConfig(top_k=2), **options}
    result = tuned(model_init, args, data=data, **options)
    evaluated = evaluated_at_once(result.trainer())
    name = (args.metric_for_best_model or "loss").removeprefix("eval_")
    assert result.best_metric == pytest.approx(evaluated[f"eval_{name}"], rel=2e-2 if args.bf16 else 1e-5)
    finalists = [trial for trial in result.trials if trial.epochs]
    assert len(finalists) == 2
    # These models start from the same weights, so that the sweep is at full width, too.
    found = [line[f"val_{name}"] for trial in finalists for line in trial.history]
    assert result.best_metric == pytest.approx(best(found), rel=1e-4)


def test_what_compute_metrics_cannot_be_given_is_refused(tmp_path: Path) -> None:
    def several() -> nn.Module:
        model: Any = bert()
        model.config.output_hidden_states = True
        return model  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match="returns logits, hidden_states beside its loss, for labels labels; here"):
        tuned(several, arguments(tmp_path), data=LABELLED, compute_metrics=of_logits, sweep=SweepConfig(surrogate=1))
    args = arguments(tmp_path, include_for_metrics=["inputs"], batch_eval_metrics=True)
    with pytest.raises(ValueError, match=r"\n- batch_eval_metrics=True: .*\n- include_for_metrics=\['inputs'\]: "):
        tuned(gpt2, args, compute_metrics=of_logits)
    with pytest.raises(ValueError, match=r"`metric` is 'val_f1', but must be one of .*'val_hits'"):
        tuned(gpt2, arguments(tmp_path, metric_for_best_model="f1"), compute_metrics=of_logits)


def test_several_outputs_are_reduced_to_one_by_the_function_for_it() -> None:
    """A model need not have a `config`, and its class names the labels."""

    class Plain(nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": x.sum(), "logits": x, "hidden": x}

    def first(logits: Any, labels: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = logits[0].argmax(-1)
        return reduced

    model, batch = Plain(), {"x": torch.eye(3), "labels": torch.arange(3)}
    found = Predictions(preprocess=first)(model, batch, model(**batch))
    assert [value.tolist() for value in found.values()] == [[0, 1, 2], [0, 1, 2]]
    with pytest.raises(ValueError, match="returns logits, hidden beside its loss, for labels labels; here"):
        Predictions()(model, batch, model(**batch))


@pytest.mark.parametrize("kind", schedule_types())
def test_every_schedule_at_every_step(kind: str) -> None:
    options = {"min_lr_rate": 0.1} if "with_min_lr" in kind else {"num_decay_steps": 5} if "stable" in kind else {}
    optimizer = SGD([torch.zeros(1)], lr=0.5)
    theirs = get_scheduler(kind, optimizer, 6, 20, scheduler_specific_kwargs=options)
    ours = TrainerSchedule(kind, 0.3, 0.5, tuple(options.items()))
    for step in range(20):
        assert 0.5 * ours(step, 20) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_sounds_are_padded_by_their_feature_extractor(tmp_path: Path) -> None:
    args = arguments(tmp_path, remove_unused_columns=False)
    collate = collator(nn.Identity(), args, None, Wav2Vec2FeatureExtractor())
    batch = collate([{"input_values": [1.0, 2.0]}, {"input_values": [1.0, 2.0, 3.0]}])
    assert batch["input_values"].tolist() == [[1, 2, 0], [1, 2, 3]]


@pytest.mark.parametrize(
    "init",
    [
        lambda: nn.Linear(2, 3),
        lambda config: nn.Linear(2, config["units"]),
        partial(lambda units: nn.Linear(2, units), units=3),
    ],
)
def test_a_model_init_is_called_as_by_trainer(init: Any) -> None:
    made: Any = FromInit(init, False)({"units": 3})
    assert made.out_features == 3


def test_several_labels_of_an_example_are_not_smoothed() -> None:
    model: Any = bert().float()
    model.config.problem_type = "multi_label_classification"
    batch = {"input_ids": torch.ones(4, 5, dtype=torch.long), "labels": torch.eye(4, model.config.num_labels)}
    losses = [TrainerObjective(smoothing, "linear", 0.0, ())(model.eval(), batch)["loss"] for smoothing in (0.0, 0.1)]
    assert losses[0] == losses[1]


def test_a_schedule_is_a_word_or_a_member_of_the_enumeration(tmp_path: Path) -> None:
    objective = trainer_objective(arguments(tmp_path))
    for kind in (SchedulerType.COSINE, "cosine"):
        settings = objective.optimizer_settings(nn.Linear(1, 1), {"lr": 0.1, "lr_scheduler_type": kind})
        assert settings.config["schedule"](5, 10) == pytest.approx(0.5)


def test_a_schedule_without_its_options_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lr_scheduler_type='cosine_with_min_lr': lr_scheduler_kwargs={} does not"):
        tuned(gpt2, arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr"))
    args = arguments(tmp_path, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1})
    assert schedules_refused(args, []) == schedules_refused(args, [SchedulerType.COSINE_WITH_MIN_LR]) == []
    (told,) = schedules_refused(args, ["constant", "linear"])
    assert told.startswith("lr_scheduler_type='linear': lr_scheduler_kwargs={'min_lr_rate': 0.1} does not make it")
    assert [*tmp_path.iterdir()] == []


LLAMA: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("warmup_steps", "space", "epochs"),
    [
        (0, {"batch_size": 8}, None),
        (0.5, {"batch_size": 8}, 1.5),
        (6, {"batch_size": 8}, 2.0),
        (6, {"batch_size": choice([4, 8, 16])}, 3.0),
        (6, {"batch_size": {"grid_search": [4, 8, 16]}}, 3.0),
        (6, {"branch": choice([{"batch_size": 8}, {"batch_size": 16}])}, 3.0),
        (6, {"batch_size": 8, "branch": choice([{"warmup_steps": 0}, {"depth": 2}])}, None),
    ],  # of 24 examples
)
def test_a_warmup_counts_as_the_longest_of_all_trials(
    warmup_steps: float, space: dict[str, Any], epochs: float | None, tmp_path: Path
) -> None:
    found = _warmup_epochs(space, arguments(tmp_path, warmup_steps=warmup_steps), 24)
    assert found == ({} if epochs is None else {"warmup_epochs": epochs})


def test_known_configurations_have_the_names_of_training_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=2)
    known = {"learning_rate": 0.01, "optim": "adamw_torch", "per_device_train_batch_size": 4, "n_layer": 2}
    assert to_known(known, args) == {"lr": 0.01, "optimizer": "adamw", "batch_size": 8, "n_layer": 2}
    assert to_known({"lr": 0.01}, args) == {"lr": 0.01}
    assert to_known("no configuration", args) == "no configuration"


def test_a_configuration_keeps_what_another_branch_would_change() -> None:
    """Models of a branch without `num_hidden_layers` failed."""
    make = FromConfig(LlamaConfig(**LLAMA), AutoModelForCausalLM, ("num_hidden_layers", "hidden_act"), False)
    made: list[Any] = [make(config) for config in ({"hidden_act": "relu"}, {"num_hidden_layers": 2})]
    assert [(of.config.hidden_act, of.config.num_hidden_layers) for of in made] == [("relu", 1), ("silu", 2)]


@pytest.mark.filterwarnings("error:neither .model_fn. nor the library reads")
def test_a_configuration_is_made_narrower_and_some_of_it_is_searched(tmp_path: Path) -> None:
    space = {
        "learning_rate": loguniform(1e-3, 1e-1),
        "optim": choice(["adamw_torch", "sgd"]),
        "lr_scheduler_type": choice(["linear", "cosine"]),
        "warmup_steps": choice([0, 5]),
        "per_device_train_batch_size": choice([4, 8]),
        "attention_dropout": choice([0.0, 0.1]),
    }
    args = arguments(tmp_path, gradient_accumulation_steps=2, load_best_model_at_end=True, eval_strategy="no", seed=3)
    config = LlamaConfig(**LLAMA)
    result = tuned(
        config,
        args,
        space,
        model_class=AutoModelForCausalLM,
        sweep=SweepConfig(surrogate=1 / 2),
        num_samples=6,
        race=RaceConfig(top_k=2),
    )
    best = result.best_config
    assert result.args.per_device_train_batch_size == best["batch_size"] // 2
    assert "accelerator_config" not in repr(result)  # nor any other of a hundred arguments
    assert (result.args.warmup_steps, result.args.lr_scheduler_type) == (
        best["warmup_steps"],
        best["lr_scheduler_type"],
    )
    model: Any = result.model()
    assert model.config.hidden_size == 32
    assert model.config.attention_dropout == best["attention_dropout"]
    assert config.attention_dropout == 0.0
    trainer = result.trainer(compute_metrics=lambda prediction: {"examples": len(prediction.predictions)})
    evaluated = evaluated_at_once(trainer)
    assert evaluated["eval_loss"] == pytest.approx(result.best_metric, rel=1e-4)
    assert evaluated["eval_examples"] == 12


def test_what_cannot_be_made_narrower_is_swept_at_full_width_which_is_said(tmp_path: Path) -> None:
    """Of all its widths, one unit would be left."""
    config = MambaConfig(
        vocab_size=11, hidden_size=4, num_hidden_layers=1, state_size=4, architectures=["MambaForCausalLM"]
    )
    data = [{"input_ids": example["input_ids"], "labels": example["labels"]} for example in TEXT]
    with pytest.warns(UserWarning, match=r"swept at its full width .*, not at 0.125: "):
        result = tuned(config, arguments(tmp_path, num_train_epochs=1), data=data, num_samples=1)
    assert result.best_metric < 3


def test_all_that_cannot_be_followed_is_told_at_once_before_any_work(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        fp16=False,
        max_steps=7,
        neftune_noise_alpha=5.0,
        optim="adafactor",
        num_train_epochs=1.5,
        metric_for_best_model="f1",
    )
    space = {
        "learning_rate": loguniform(1e-3, 1e-1),
        "lr_scheduler_type": choice(["linear", "reduce_lr_on_plateau"]),
        "optim": uniform(0, 1),
        "batch_size": choice([1, 2]),
        "seed": grid_search([1, 2]),
    }
    with pytest.raises(ValueError, match=r"^tune_trainer\(\) cannot follow:\n") as raised:
        tune_trainer(gpt2, args, space, train_dataset=iter(TEXT), eval_dataset={"a": TEXT}, max_t=3)
    with pytest.raises(ValueError, match="eval_dataset is a list of 2 data sets: one data set"):
        tune_trainer(gpt2, args, space, train_dataset=TEXT, eval_dataset=[TEXT, TEXT[:4]])
    with pytest.raises(ValueError, match="eval_dataset is empty: one example or more"):
        tune_trainer(gpt2, args, space, train_dataset=TEXT, eval_dataset=[])
    told = str(raised.value).splitlines()[1:]
    assert [line.split()[1].strip(":") for line in told] == [
        "max_steps=7",
        "neftune_noise_alpha=5.0",
        "optim='adafactor'",
        "num_train_epochs=1.5",
        "metric_for_best_model='f1'",
        "space['lr_scheduler_type']",
        "space['optim']",
        "space['batch_size']",
        "space['seed']",
        "max_t=",
        "train_dataset",
        "eval_dataset",
    ]
    assert [*tmp_path.iterdir()] == []


def test_a_collator_that_makes_no_dict_is_named(tmp_path: Path) -> None:
    def pair(features: list[Any]) -> Any:
        return torch.stack([each["input_ids"] for each in features]), torch.stack([each["labels"] for each in features])

    with pytest.raises(ValueError, match=r"`data_collator` made a tuple, but must make a dict of a model's inputs"):
        tuned(gpt2, arguments(tmp_path), data_collator=pair, sweep=SweepConfig(surrogate=1))


@pytest.mark.parametrize(
    ("best", "race", "told"),
    [
        (False, RaceConfig(patience=3), "race.patience=3: set load_best_model_at_end=True"),
        (True, RaceConfig(keep="last"), "race.keep='last': load_best_model_at_end=True says otherwise"),
    ],
)
def test_training_arguments_decide_which_weights_are_kept(
    best: bool, race: RaceConfig, told: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path, load_best_model_at_end=best)
    with pytest.raises(ValueError, match=rf"^tune_trainer\(\) cannot follow:\n- {re.escape(told)}$"):
        tuned(gpt2, args, race=race)


@pytest.mark.parametrize(
    ("model", "space", "match"),
    [
        (nn.Linear(1, 1), {}, "`model` is 'Linear', but must be a function that makes a model"),
        (LlamaConfig(**LLAMA), {}, "`model_class` is None, but must be given"),
        (
            LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"]),
            {"depth": 1},
            r"`space` is \['depth'\], but must be",
        ),
        (lambda: 1, {}, "`model` is 'int', but must be one that makes a torch.nn.Module"),
        (lambda: 1 / 0, {}, "`model` fails for .* ZeroDivisionError"),
    ],
)
def test_models_that_are_refused(model: Any, space: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        tuned(model, arguments(tmp_path), {"learning_rate": loguniform(1e-3, 1e-1), **space})
    assert [*tmp_path.iterdir()] == []
