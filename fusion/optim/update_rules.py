"""The table of update rules: the settings that each rule reads, its moments and its coefficients.

Shape suffixes: R members of a run (adjacent members with one rule), G groups of parameters with equal multipliers.
Coefficients are computed in float64, like the Python floats in torch.optim, and rounded once to the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fusion.optim import elementwise
from fusion.optim.learned import Learn, corrected, learn_average, learn_distance
from fusion.optim.optimizer_config import Hyperparameters

Coefficients = dict[str, Tensor | None]
Vectors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Now:
    """Values of the step that is about to be taken, on which coefficients depend.

    Attributes:
        lr_RG: Learning rates, including the schedule's factor.
        decay_RG: Weight decays if they are decoupled; 0 for members with coupled ones.
        steps_R1: Number of steps, including this one.
        factor_R1: The schedule's factor.
    """

    lr_RG: Tensor  # noqa: N815
    decay_RG: Tensor  # noqa: N815
    steps_R1: Tensor  # noqa: N815
    factor_R1: Tensor  # noqa: N815


Changing = Callable[[Sequence[Hyperparameters], Vectors, Now], Coefficients]
"""Computes the coefficients that change from step to step."""


@dataclass(frozen=True)
class UpdateRule:
    """One update rule.

    Attributes:
        kinds: Names of the optimizers whose members this rule updates together.
        reads: Names of the settings that the rule reads.
        moments: Name of each moment -> its key in torch's optimizer state, in the order of `update`'s arguments.
        constants: Takes the members and their vectors; returns the coefficients that never change, [R, 1] each, None if
            unused.
        coefficients: Returns the coefficients that change, [R, 1] or [R, G] each, and `shrink` of
            `elementwise.decayed` if needed.
        update: The function in `elementwise` that updates parameters; None if the rule works on whole parameters.
        before: Coefficients and function of a pass over all parameters before the update; None if there is no such
            pass. The function returns sums for each member, which `learn` takes.
        learn: Updates the learned numbers (`LEARNED`) before the update; None if there are none.
    """

    kinds: tuple[str, ...]
    reads: tuple[str, ...]
    moments: Mapping[str, str]
    constants: Callable[[Sequence[Hyperparameters], Vectors], Coefficients]
    coefficients: Changing
    update: Callable[..., None] | None
    before: tuple[Changing, Callable[..., Tensor]] | None = None
    learn: Learn | None = None


def _sgd_constants(members: Sequence[Hyperparameters], v: Vectors) -> Coefficients:
    return {
        "momentum": v["momentum"],
        "direct": v["nesterov"] if any(hp.nesterov for hp in members) else None,
        "buffered": torch.where(v["nesterov"] > 0, v["momentum"], 1.0),
    }


def _sgd_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    # As in torch, dampening has no effect in the first step, nor in a member without momentum.
    undamped = (now.steps_R1 == 1) | (v["momentum"] == 0)
    return {"lr": now.lr_RG, "gain": torch.where(undamped, 1.0, 1.0 - v["dampening"])}


def _adam_constants(members: Sequence[Hyperparameters], v: Vectors) -> Coefficients:
    return {"one_minus_beta1": 1 - v["beta1"], "one_minus_beta2": 1 - v["beta2"]}


def _adam_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    root = (1 - v["beta2"] ** now.steps_R1).sqrt()
    shrink = None
    if any(hp.decay and hp.decouples for hp in members):
        rate = now.lr_RG
        if any(hp.independent_weight_decay for hp in members):
            # If the learning rate is 0, for example because its multiplier is 0, weights do not decay. In torch's
            # optimizer they do not, either.
            rate = torch.where(v["independent"] > 0, now.factor_R1 * (rate > 0), rate)
        shrink = 1 - rate * now.decay_RG
    return {"step_size": now.lr_RG * root / (1 - v["beta1"] ** now.steps_R1), "eps": v["eps"] * root, "shrink": shrink}


def _adamax_constants(members: Sequence[Hyperparameters], v: Vectors) -> Coefficients:
    return {"one_minus_beta1": 1 - v["beta1"], "keep": v["beta2"], "least": v["eps"]}


def _adamax_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    return {"step_size": now.lr_RG / (1 - v["beta1"] ** now.steps_R1)}


def _nadam_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    root = (1 - v["beta2"] ** now.steps_R1).sqrt()
    mu, following = (v["beta1"] * _warming(now.steps_R1 + later) for later in (0, 1))
    product = momentum_product(v["beta1"], now.steps_R1)
    return {
        "of_gradient": now.lr_RG * root * (1 - mu) / (1 - product),
        "of_moment": now.lr_RG * root * following / (1 - product * following),
        "eps": v["eps"] * root,
    }


def _radam_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    """Return RAdam's coefficients (Liu et al. 2020, Algorithm 2).

    In the first steps the variance of the second moment is not known, so members are updated by SGD with momentum.
    """
    powers = v["beta2"] ** now.steps_R1
    most = 2 / (1 - v["beta2"]) - 1
    rho = most - 2 * now.steps_R1 * powers / (1 - powers)
    rectified = ((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)).clamp(min=0).sqrt()
    adapts = rho > 5
    return {
        "step_size": now.lr_RG / (1 - v["beta1"] ** now.steps_R1),
        "rectified": torch.where(adapts, rectified * (1 - powers).sqrt(), 0.0),
        "plain": torch.where(adapts, 0.0, 1.0),
        "eps": v["eps"],
    }


def _lion_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    decays = any(hp.decay for hp in members)
    return {"lr": now.lr_RG, "shrink": 1 - now.lr_RG * now.decay_RG if decays else None}


def _prodigy_sums(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    d = rate = v["d"]
    if any(hp.use_bias_correction or hp.safeguard_warmup for hp in members):
        safe = d / (v["lr"] * now.factor_R1)
        rate = torch.where(v["safeguard_warmup"] > 0, safe, corrected(members, v))
    return {
        "first": (now.steps_R1 == 1).double(),
        "momentum": v["beta1"],
        "gain": d * (1 - v["beta1"]),
        "square_keep": v["beta2"],
        "square_gain": d * d * (1 - v["beta2"]),
        "sum_keep": v["beta2"].sqrt(),
        "sum_gain": d / v["d0"] * rate * now.lr_RG,
    }


def _prodigy_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    shrink = 1 - v["rate"] * now.lr_RG * now.decay_RG if any(hp.decay for hp in members) else None
    return {"step_size": v["step"] * now.lr_RG, "eps": v["d"] * v["eps"], "shrink": shrink}


def _rmsprop_constants(members: Sequence[Hyperparameters], v: Vectors) -> Coefficients:
    return {
        "one_minus_alpha": 1 - v["alpha"],
        "eps": v["eps"],
        "momentum": v["momentum"],
        "gain": torch.ones_like(v["momentum"]),
    }


def _rmsprop_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    return {"lr": now.lr_RG}


def _schedule_free_constants(members: Sequence[Hyperparameters], v: Vectors) -> Coefficients:
    return {"one_minus_beta2": 1 - v["beta2"]} if "beta2" in v else {}


def _schedule_free_coefficients(members: Sequence[Hyperparameters], v: Vectors, now: Now) -> Coefficients:
    adapts, share = "beta2" in v, v["share"]
    root = (1 - v["beta2"] ** v["k"]).sqrt() if adapts else torch.ones_like(share)
    rate = now.lr_RG * root
    return {
        "first": (now.steps_R1 == 1).double(),
        "share": share,
        "move": rate * (v["beta1" if adapts else "momentum"] * (1 - share) - 1),
        "step_size": rate,
        "pull": now.decay_RG / root if any(hp.decay for hp in members) else None,
        **({"eps": v["eps"] * root} if adapts else {}),
    }


_BETAS = ("beta1", "beta2", "eps")
_ADAM = {"first": "exp_avg", "second": "exp_avg_sq"}

UPDATE_RULES = {
    "sgd": UpdateRule(
        ("sgd",),
        ("momentum", "dampening", "nesterov"),
        {"first": "momentum_buffer"},
        _sgd_constants,
        _sgd_coefficients,
        elementwise.sgd,
    ),
    "adam": UpdateRule(("adam", "adamw"), _BETAS, _ADAM, _adam_constants, _adam_coefficients, elementwise.adam),
    # This is AdamW's rule, for the parameters that Muon does not update. `fusion.optim.muon` updates Muon's matrices.
    "muon": UpdateRule(
        ("muon",), (*_BETAS, "momentum", "nesterov"), _ADAM, _adam_constants, _adam_coefficients, elementwise.adam
    ),
    "adafactor": UpdateRule(
        ("adafactor",),
        ("beta2_decay",),
        {"row": "row_var", "column": "col_var", "variance": "variance"},
        lambda members, vectors: {},
        lambda members, vectors, now: {},
        None,
    ),
    "adamax": UpdateRule(
        ("adamax",),
        _BETAS,
        {"first": "exp_avg", "second": "exp_inf"},
        _adamax_constants,
        _adamax_coefficients,
        elementwise.adamax,
    ),
    "lion": UpdateRule(
        ("lion",), ("beta1", "beta2"), {"first": "exp_avg"}, _adam_constants, _lion_coefficients, elementwise.lion
    ),
    "nadam": UpdateRule(("nadam",), _BETAS, _ADAM, _adam_constants, _nadam_coefficients, elementwise.nadam),
    "prodigy": UpdateRule(
        ("prodigy",),
        ("lr", *_BETAS, "d_coef", "d0", "use_bias_correction", "safeguard_warmup"),
        {**_ADAM, "sum": "s", "start": "p0"},
        lambda members, vectors: {},
        _prodigy_coefficients,
        elementwise.prodigy,
        (_prodigy_sums, elementwise.prodigy_sums),
        learn_distance,
    ),
    "radam": UpdateRule(("radam",), _BETAS, _ADAM, _adam_constants, _radam_coefficients, elementwise.radam),
    "rmsprop": UpdateRule(
        ("rmsprop",),
        ("alpha", "eps", "momentum"),
        {"second": "square_avg", "first": "momentum_buffer"},
        _rmsprop_constants,
        _rmsprop_coefficients,
        elementwise.rmsprop,
    ),
    "schedule_free_adamw": UpdateRule(
        ("schedule_free_adamw",),
        ("lr", *_BETAS),
        {"iterate": "z", "second": "exp_avg_sq"},
        _schedule_free_constants,
        _schedule_free_coefficients,
        elementwise.schedule_free,
        learn=learn_average,
    ),
    "schedule_free_sgd": UpdateRule(
        ("schedule_free_sgd",),
        ("lr", "momentum"),
        {"iterate": "z"},
        _schedule_free_constants,
        _schedule_free_coefficients,
        elementwise.schedule_free,
        learn=learn_average,
    ),
}
"""All rules by name. The updates of Muon's matrices and of Adafactor are in their own modules."""

RULE_OF = {kind: name for name, rule in UPDATE_RULES.items() for kind in rule.kinds}

_MOMENTUM_DECAY = 4e-3
"""The default of `momentum_decay` in `torch.optim.NAdam`."""


def _warming(steps: Tensor) -> Tensor:
    """Return NAdam's momentum at a step as a share of beta1, as in `torch.optim.NAdam` (Dozat 2016)."""
    return 1 - 0.5 * 0.96 ** (steps * _MOMENTUM_DECAY)


def momentum_product(beta1: Tensor, steps: Tensor) -> Tensor:
    """Return the product of NAdam's momenta at the steps 1 to `steps`; it is 1 for 0 steps.

    >>> product = momentum_product(torch.tensor(0.5), torch.tensor(2.0))
    >>> torch.allclose(product, 0.25 * _warming(torch.tensor([1.0, 2.0], dtype=torch.float64)).prod())
    True
    """
    sums = _log_products(2 ** int(steps.max()).bit_length()).to(steps.device)
    return beta1**steps * sums[steps.long()].exp()


@lru_cache
def _log_products(size: int) -> Tensor:
    """Return the logarithms of the products of the first 0, 1, ..., `size` results of `_warming`."""
    every = _warming(torch.arange(1, size + 1, dtype=torch.float64)).log().cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), every])
