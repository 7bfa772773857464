from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from surrogate import plain_score_fn, transfer_check
from surrogate.build import Config
from surrogate.transfer import ScoreFn
from tests.surrogate.models import mlp


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def digits_score_fn() -> ScoreFn:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    batches = list(zip(x.split(128), y.split(128)))
    return plain_score_fn(mlp, batches[:8] * 2, batches[8:], objective)


def test_learning_rates_on_digits() -> None:
    configs = [{"lr": 10**-power, "width": 256} for power in (1, 2, 3, 4, 5, 6)]
    found = transfer_check(digits_score_fn(), configs, narrow_width_ratio=1 / 8, wide_width_ratio=1.0)
    assert found.comparison.rho >= 0.8
    assert found.comparison.regret[3] == 0
    assert found.comparison.verdict == "trusted"
    assert len(found.narrow) == len(found.wide) == len(found.configs) == 6


def test_scores_do_not_depend_on_the_global_generator() -> None:
    score = digits_score_fn()
    first = score([{"lr": 0.01}], 1 / 4)
    torch.rand(5)
    assert score([{"lr": 0.01}], 1 / 4) == first


def test_seeds_reach_up_to_63_bits() -> None:
    images, labels = torch.ones(4, 64), torch.zeros(4, dtype=torch.long)
    scores = [
        plain_score_fn(mlp, [(images, labels)], [(images, labels)], objective, seed=seed)([{"lr": 0.01}], 1 / 4)
        for seed in (0, 2**63 - 1)
    ]
    assert scores[0] != scores[1]
    with pytest.raises(ValueError, match=rf"`seed` is {2**63}, but must be an integer from 0 to {2**63 - 1}"):
        plain_score_fn(mlp, [(images, labels)], [(images, labels)], objective, seed=2**63)


def narrow_is_upside_down(configs: object, width_ratio: float) -> list[float]:
    scores = [1.0, 2.0, 3.0, 4.0, 5.0]
    return scores if width_ratio == 1.0 else scores[::-1]


def test_a_ranking_that_does_not_transfer_is_refused() -> None:
    found = transfer_check(narrow_is_upside_down, [{}] * 5, wide_width_ratio=1.0, top_k=2)
    assert found.comparison.verdict == "refused"
    assert "full width" in found.comparison.advice


def silent(configs: object, width_ratio: float) -> Any:
    return None


def test_errors() -> None:
    configs: list[Config] = [{}] * 5
    with pytest.raises(ValueError, match=r"`narrow_width_ratio` is 0.5, but must be below `wide_width_ratio`, 0.25"):
        transfer_check(narrow_is_upside_down, configs, narrow_width_ratio=0.5)
    with pytest.raises(ValueError, match=r"`wide_width_ratio` is 1.5, but must be a number in"):
        transfer_check(narrow_is_upside_down, configs, wide_width_ratio=1.5)
    with pytest.raises(ValueError, match="`score_fn` returned 5 scores for 6 configs"):
        transfer_check(narrow_is_upside_down, [{}] * 6)
    with pytest.raises(ValueError, match="`score_fn` returned a NoneType, but must return a list of scores"):
        transfer_check(silent, configs)
