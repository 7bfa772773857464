"""`transfer_check` trains a few configurations at two widths, and tests whether both widths rank them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surrogate.argument_checks import check_function, check_int, check_list, check_width_ratio, require
from surrogate.build import Config, ModelFn, make_surrogate
from surrogate.training import Objective, evaluate, train
from surrogate.transfer_verdict import Mode, RankComparison, check_comparison, compare_rankings

ScoreFn = Callable[[Sequence[Config], float], Sequence[float]]
"""`score_fn(configs, width_ratio)`: one score for each configuration, trained at that width."""


@dataclass(frozen=True)
class TransferCheck:
    """Trained configurations, and the agreement of the widths.

    Attributes:
        narrow_width_ratio: Width ratio of the surrogate that is checked.
        wide_width_ratio: The larger width ratio, with which the surrogate is compared.
        narrow: Scores at `narrow_width_ratio`, in the order of `configs`.
        wide: Scores at `wide_width_ratio`.
        comparison: Rank correlation, regrets and the verdict.
    """

    configs: tuple[Config, ...]
    narrow_width_ratio: float
    wide_width_ratio: float
    narrow: tuple[float, ...]
    wide: tuple[float, ...]
    comparison: RankComparison


def transfer_check(
    score_fn: ScoreFn,
    configs: Sequence[Config],
    *,
    narrow_width_ratio: float = 1 / 8,
    wide_width_ratio: float = 1 / 4,
    mode: Mode = "min",
    top_k: int = 3,
    tolerance: float = 0.0,
) -> TransferCheck:
    """Check on a few configurations whether a width ranks them like a wider one.

    Args:
        score_fn: Trains and scores configurations at one width; `plain_score_fn` makes one.
        configs: At least 4, spread over the search space.
        narrow_width_ratio: Width ratio of the surrogate that is checked.
        wide_width_ratio: The larger width ratio, with which the surrogate is compared. 1 is the target; a smaller ratio
            costs less.
        mode: As for `compare_rankings`.
        top_k: As for `compare_rankings`.
        tolerance: As for `compare_rankings`.

    Raises:
        ValueError: if the width ratios are out of range or order, `score_fn` returns another number of scores, or
            the arguments of `compare_rankings` are out of range.
    """
    check_function("score_fn", score_fn, 2)
    check_list("configs", configs, Mapping, least=4)
    check_width_ratio(narrow_width_ratio, "narrow_width_ratio")
    check_width_ratio(wide_width_ratio, "wide_width_ratio")
    rule = f"below `wide_width_ratio`, {wide_width_ratio:g}"
    require(narrow_width_ratio < wide_width_ratio, "narrow_width_ratio", narrow_width_ratio, rule)
    check_comparison(len(configs), mode, top_k, tolerance)
    narrow, wide = (_scores(score_fn, configs, width_ratio) for width_ratio in (narrow_width_ratio, wide_width_ratio))
    if len(narrow) != len(configs):
        raise ValueError(
            f"`score_fn` returned {len(narrow)} scores for {len(configs)} configs, but must return one for each"
        )
    comparison = compare_rankings(narrow, wide, mode=mode, top_k=top_k, tolerance=tolerance)
    return TransferCheck(tuple(configs), narrow_width_ratio, wide_width_ratio, narrow, wide, comparison)


def _scores(score_fn: ScoreFn, configs: Sequence[Config], width_ratio: float) -> tuple[float, ...]:
    scores: object = score_fn(configs, width_ratio)
    if not isinstance(scores, Iterable):
        told = f"`score_fn` returned a {type(scores).__name__}"
        raise ValueError(f"{told}, but must return a list of scores, one for each configuration")
    return tuple(scores)


def plain_score_fn(
    model_fn: ModelFn, train_batches: Sequence[Any], val_batches: Sequence[Any], objective: Objective, *, seed: int = 0
) -> ScoreFn:
    """Make a `score_fn` that trains one model after another with torch's optimizers; the score is the validation loss.

    Args:
        model_fn: As for `make_surrogate`.
        train_batches: One optimizer step is done for each batch.
        val_batches: Batches for the loss after the last step.
        objective: `objective(model, batch)` -> loss.
        seed: Seed of the initial weights of every configuration; torch's global generator does not change.
    """

    check_function("model_fn", model_fn, 2)
    check_list("train_batches", train_batches, object)
    check_list("val_batches", val_batches, object)
    check_function("objective", objective, 2)
    check_int("seed", seed, at_least=0, at_most=2**63 - 1)

    def score(configs: Sequence[Config], width_ratio: float) -> list[float]:
        scores = []
        for config in configs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = make_surrogate(model_fn, config, width_ratio)
                train(model, config, train_batches, objective)
                scores.append(evaluate(model, val_batches, objective))
        return scores

    return score
