"""`tune_adapters` against `peft` and a plain loop: the same adapters, over a base that is held once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import TrainingArguments

from fusion import fuse
from fusion.streams import seed_generators
from hydro_rasda import RaceConfig, SweepConfig, choice, grid_search, loguniform, randint, uniform
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.data import make_batches
from hydro_rasda.integrations.peft import _largest_rank, adapters, tune_adapters
from hydro_rasda.integrations.transformers import tune_trainer
from tests import zoo
from tests.hydro_rasda.integrations.results import answers_as_tunes

pytestmark = [
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),
]

TOKENS = torch.randint(11, (24, 7), generator=torch.Generator().manual_seed(0))
LORA = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)


def next_token(model: Any, batch: tuple[torch.Tensor]) -> dict[str, torch.Tensor]:
    (tokens,) = batch
    logits = model(input_ids=tokens, use_cache=False).logits
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}


@pytest.fixture
def base() -> nn.Module:
    torch.manual_seed(0)
    return zoo.gpt2()


def test_equal_to_peft_alone_at_every_rank(base: nn.Module, tmp_path: Path) -> None:
    space = {
        "r": grid_search([1, 2, 4]),
        "lora_alpha": choice([4, 8]),
        "lr": loguniform(1e-2, 1e-1),
        "weight_decay": 0.1,
        "batch_size": 8,
    }
    before = copy.deepcopy(base.state_dict())
    result = tune_adapters(
        base,
        LORA,
        space,
        train_data=(TOKENS,),
        val_data=(TOKENS[:8],),
        objective=next_token,
        num_samples=1,
        max_t=3,
        sweep=SweepConfig(reduction_factor=2, fusion=3),
        race=RaceConfig(top_k=3, keep="last"),
        full_trainings=3,
        storage_path=tmp_path,
        name="run",
        progress=False,
    )
    assert answers_as_tunes(result)
    best, number = result.best_config, result.best_trial
    model = result.model()
    assert isinstance(model, PeftModel)
    assert (result.lora.r, result.lora.lora_alpha) == (best["r"], best["lora_alpha"])
    assert sorted(trial.config["r"] for trial in result.trials) == [1, 2, 4]
    lines = [json.loads(line) for line in (result.path / "journal.jsonl").read_text().splitlines()]
    assert [0, 1, 2] in next(line["value"]["groups"] for line in lines if "/group-" in line.get("key", ""))

    seed_generators(derive_seed(0, "weights", number))
    alone = get_peft_model(copy.deepcopy(base), result.lora)
    trained = [p for p in alone.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, best["lr"], weight_decay=best["weight_decay"])
    batches = make_batches((TOKENS,), "train_data", torch.device("cpu"), 0)
    for epoch in range(3):
        for batch in batches.epoch(8, epoch):
            optimizer.zero_grad()
            next_token(alone, batch)["loss"].backward()
            optimizer.step()
    ours = dict(model.named_parameters())
    for name, value in alone.named_parameters():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    model.save_pretrained(str(tmp_path / "adapters"))
    again = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "adapters"))
    torch.testing.assert_close(next_token(again.eval(), (TOKENS,)), next_token(model, (TOKENS,)))


def test_all_ranks_are_one_model_over_one_base(base: nn.Module) -> None:
    model_fn = adapters(base, LORA, max_rank=4)
    models = [model_fn({"r": rank, "lora_dropout": rank / 10, "lr": 1.0}) for rank in (1, 2, 4)]
    own = {id(p) for p in base.parameters()}
    assert all({id(p) for p in model.parameters() if not p.requires_grad} == own for model in models)
    fused = fuse(models)
    frozen = sum(p.nbytes for p in base.parameters())
    adapter = sum(p.nbytes for p in models[0].parameters() if p.requires_grad)
    assert sum(p.nbytes for p in fused.parameters()) == frozen + 3 * adapter


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_initial_adapters_that_would_change_the_shared_base_are_refused(base: nn.Module, init: Any) -> None:
    before = copy.deepcopy(base.state_dict())
    told = f"`init_lora_weights` is '{init}', but must be one that leaves the base as it is"
    with pytest.raises(ValueError, match=told):
        adapters(base, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=init))
    with pytest.raises(ValueError, match=told):
        adapters(base, LORA)({"init_lora_weights": init})
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_biases_that_a_trial_trains_are_its_own(base: nn.Module) -> None:
    model_fn = adapters(base, LORA)
    without, own = model_fn({"bias": "none"}), model_fn({"bias": "all"})
    biases = {id(p) for name, p in base.named_parameters() if name.endswith("bias")}
    assert not any(p.requires_grad for p in base.parameters())
    assert not any(p.requires_grad for p in without.parameters() if id(p) in biases)
    trained = [p for name, p in own.named_parameters() if name.endswith("bias") and p.requires_grad]
    assert len(trained) == len(biases)
    assert not biases & {id(p) for p in trained}


@pytest.mark.parametrize(
    ("space", "largest"),
    [
        ({"lr": 0.1}, None),
        ({"r": 4}, 4),
        ({"r": choice([2, 8, 4])}, 8),
        ({"r": {"grid_search": [2, 4]}}, 4),
        ({"r": randint(1, 9)}, 8),
        ({"branch": choice([{"r": 4}, {"r": randint(8, 17)}])}, 16),
    ],
)
def test_adapters_are_padded_to_the_largest_rank_of_the_space(space: dict[str, Any], largest: int | None) -> None:
    assert _largest_rank(space) == largest


def test_a_rounded_rank_of_ray_tune_reaches_its_upper_bound() -> None:
    tune = pytest.importorskip("ray.tune")
    assert _largest_rank({"r": tune.qrandint(4, 16, 4)}) == 16


@pytest.mark.parametrize(
    ("lora", "space", "match"),
    [
        (None, {"lr": uniform(0.1, 1)}, "`lora` is None, but must be of the class LoraConfig"),
        (LORA, {"lr": uniform(0.1, 1), "r": uniform(1, 4)}, r"`space\['r'\]` is .*, but must be a choice"),
        (LORA, {"lr": uniform(0.1, 1), "r": randint(0, 1)}, r"`space\['r'\]` is \[0\], but must be a choice"),
    ],
)
def test_what_is_refused(base: nn.Module, lora: Any, space: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tune_adapters(base, lora, space)
    with pytest.raises(ValueError, match="`base` is 'PeftModel', but must be a model without adapters"):
        adapters(get_peft_model(base, LORA), LORA)
    with pytest.raises(ValueError, match="`base` is 'gpt2', but must be of the class Module"):
        adapters("gpt2", LORA)  # type: ignore[arg-type]


def test_adapters_with_training_arguments(base: nn.Module, tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", num_train_epochs=2)
    result = tune_trainer(
        adapters(base, LORA, max_rank=4),
        args,
        {"learning_rate": loguniform(1e-2, 1e-1), "r": choice([1, 3])},
        train_dataset=data,
        eval_dataset=data[:8],
        sweep=SweepConfig(surrogate=1),
        num_samples=2,
        race=RaceConfig(top_k=1),
        progress=False,
    )
    model: Any = result.model()
    rank = result.best_config["r"]
    assert {p.shape[0] for name, p in model.named_parameters() if "lora_A" in name} == {rank}
    assert result.trainer().evaluate()["eval_loss"] == pytest.approx(result.best_metric, rel=1e-4)
    assert answers_as_tunes(result)
