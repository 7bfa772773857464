"""Numbers that an update rule learns for each member: Prodigy's estimates, and the averaging weights of Schedule-Free.

Shape suffixes: R members of a run (adjacent members with one rule). Each member has three numbers, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fusion.keys import SCHEDULE_FREE
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.prodigy import ESTIMATES
from fusion.optim.schedule_free import AVERAGING

LEARNED: Mapping[str, tuple[str, ...]] = {"prodigy": ESTIMATES, **dict.fromkeys(SCHEDULE_FREE, AVERAGING)}
"""Optimizer -> names of its learned numbers. They are also the keys in a parameter group of torch's optimizer."""

Learn = Callable[[Sequence[Hyperparameters], dict[str, Tensor], Tensor, Tensor | None, Tensor, Tensor | None], None]
"""Type of functions with the arguments of `learn_distance`."""


def at_first(members: Sequence[Hyperparameters]) -> Tensor:
    """Return the three numbers that a rule learns for each member, as they are before the first step, [K, 3]."""
    of_each = [[hp.d0 if hp.kind == "prodigy" else 0.0, 0.0, 0.0] for hp in members]
    return torch.tensor(of_each, dtype=torch.float64)


def corrected(members: Sequence[Hyperparameters], vectors: Mapping[str, Tensor]) -> Tensor:
    """Return Prodigy's estimates [R, 1], with bias correction for members that have `use_bias_correction`."""
    if not any(hp.use_bias_correction for hp in members):
        return vectors["d"]
    after = vectors["k"] + 1
    bias = (1 - vectors["beta2"] ** after).sqrt() / (1 - vectors["beta1"] ** after)
    return vectors["d"] * torch.where(vectors["use_bias_correction"] > 0, bias, 1.0)


def learn_distance(
    members: Sequence[Hyperparameters],
    vectors: dict[str, Tensor],
    estimates_R3: Tensor,
    sums_R2: Tensor | None,
    factor_R1: Tensor,
    takes_R1: Tensor | None,
) -> None:
    """Update Prodigy's estimates of R members, in place, and set `vectors["rate"]` and `vectors["step"]`.

    `rate` multiplies the learning rate in the weight decay, and `step` multiplies it in the update.

    Args:
        vectors: [R, 1] each: the members' settings, and the columns of `estimates_R3`.
        estimates_R3: The numbers that `ESTIMATES` names.
        sums_R2: Two sums over all elements, as `prodigy_sums` returns them: of the gradient times (start - weight), and
            of the absolute values of the weighted gradient sums.
        factor_R1: The schedule's factor.
        takes_R1: True for members that take the step; None for all.
    """
    d, rate_R1 = vectors["d"], corrected(members, vectors)
    assert sums_R2 is not None
    way_R1, size_R1 = sums_R2.split(1, 1)
    weight_R1 = d / vectors["d0"] * rate_R1 * vectors["lr"] * factor_R1
    numerator_R1 = vectors["beta2"].sqrt() * vectors["d_numerator"] + weight_R1 * way_R1
    grown_R1 = torch.fmax(d, vectors["d_coef"] * numerator_R1 / size_R1)
    moves_R1 = size_R1 != 0 if takes_R1 is None else (size_R1 != 0) & takes_R1
    vectors["rate"] = rate_R1 * moves_R1
    vectors["step"] = vectors["rate"]
    # With beta1 = 0, the first moment is the gradient times the old estimate. Rescale it to the new estimate.
    if any(hp.beta1 == 0 for hp in members):
        vectors["step"] = vectors["rate"] * torch.where(vectors["beta1"] == 0, grown_R1 / d, 1.0)
    after_R3 = torch.cat([grown_R1, numerator_R1, vectors["k"] + 1], 1)
    estimates_R3.copy_(torch.where(moves_R1, after_R3, estimates_R3))


def learn_average(
    members: Sequence[Hyperparameters],
    vectors: dict[str, Tensor],
    estimates_R3: Tensor,
    sums: Tensor | None,
    factor_R1: Tensor,
    takes_R1: Tensor | None,
) -> None:
    """Update the numbers of `AVERAGING` for R Schedule-Free members, in place, and set `vectors["share"]`.

    This is the share of the new weights in the average. It is computed without learning rate multipliers, because they
    would not change it. `learn_distance` describes the arguments.
    """
    largest_R1 = torch.maximum(vectors["lr_max"], vectors["lr"] * factor_R1)
    weight_R1 = largest_R1.square()
    sum_R1 = vectors["weight_sum"] + weight_R1
    vectors["share"] = torch.where(sum_R1 > 0, weight_R1 / sum_R1, 0.0)
    after_R3 = torch.cat([largest_R1, sum_R1, vectors["k"] + 1], 1)
    estimates_R3.copy_(after_R3 if takes_R1 is None else torch.where(takes_R1, after_R3, estimates_R3))
