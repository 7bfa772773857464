"""`tune_trainer(trainer_class=...)`: a subclass of `Trainer` trains in every heat as it would alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from hydro_rasda import RaceConfig, loguniform
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


@pytest.mark.filterwarnings("ignore:the model is swept at its full width")
@pytest.mark.filterwarnings("ignore:the model's initial weights are the same from every seed")
def test_a_subclass_comes_to_the_weights_that_it_has_alone(tmp_path: Path) -> None:
    """Over rungs, at each of which training is left and resumed."""
    args = arguments(tmp_path, train_sampling_strategy="random", lr_scheduler_type="cosine", weight_decay=0.1)
    result = tuned(gpt2, args, trainer_class=Squared, race=RaceConfig(top_k=2, keep="last"))
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
