"""The role of each weight of a model, and multipliers of its learning rate and weight decay.

The role (embedding, hidden or head) follows from the widths that a layer reads and writes. A layer reads a width if its
input size is a width, and writes one if its output size is a width. Multipliers: Tensor Programs V, table 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal

from mup.infshape import InfShape
from torch import nn

from surrogate.argument_checks import check_flag, require
from surrogate.forward_multipliers import reads_and_writes
from surrogate.widths import PLAN_ATTRIBUTE, ParamWidth, WidthPlan, input_weight


def _sgd(infshape: InfShape) -> float:
    widths = [float(side.width_mult()) for side in infshape if side.isinf()]
    # Divide the two widths here. If a parameter holds several matrices, mup would take their number for the fan-out.
    return widths[0] / widths[1] if len(widths) == 2 else math.prod(widths)


def _adam(infshape: InfShape) -> float:
    return 1.0 / float(infshape.width_mult()) if infshape.ninf() == 2 else 1.0


def _adafactor(infshape: InfShape) -> float:
    """Return Adafactor's multiplier of the learning rate: the square root of Adam's.

    Adafactor multiplies the learning rate by the root mean square of the weights. In a hidden layer, this root mean
    square starts in proportion to 1 / sqrt(fan-in).
    """
    return math.sqrt(_adam(infshape))


def _muon(infshape: InfShape, *, original: bool) -> float:
    """Return the learning rate's multiplier that gives Muon's update muP's spectral norm (Yang et al. 2023, eq. 4).

    muP needs a norm in proportion to sqrt(rows / columns). An orthogonalized update has norm 1, and Muon's
    `adjust_lr_fn` multiplies it by another function of the shape. The factor is muP's norm over Muon's, divided by the
    same ratio in the target. If `original` is True, `adjust_lr_fn` is "original", else "match_rms_adamw".
    """
    rows, columns = (side.dim for side in infshape)
    target_rows, target_columns = (side.dim if side.base_dim is None else side.base_dim for side in infshape)
    wanted = math.sqrt(rows / columns * target_columns / target_rows)
    if original:
        return wanted * math.sqrt(max(1.0, target_rows / target_columns) / max(1.0, rows / columns))
    return wanted * math.sqrt(max(target_rows, target_columns) / max(rows, columns))


_ADAPTIVE = (
    *("adam", "adamw", "adadelta", "adagrad", "adamax", "lion", "nadam", "prodigy", "radam", "rmsprop"),
    "schedule_free_adamw",
)

_RULES: dict[str, Callable[[InfShape], float]] = {
    **dict.fromkeys(("sgd", "asgd", "schedule_free_sgd"), _sgd),
    **dict.fromkeys(_ADAPTIVE, _adam),
    "adafactor": _adafactor,
    "muon": partial(_muon, original=False),
    "muon.original": partial(_muon, original=True),
}


def lr_multipliers(surrogate: nn.Module, optimizer: str) -> dict[str, float]:
    """Return the factor of each parameter's learning rate on a surrogate.

    The numbers are those of `mup.MuSGD`, `mup.MuAdam` and `mup.MuAdamW`. In this table, m is the width multiplier
    (surrogate width over target width, below 1):

    | parameter                  | SGD, ASGD            | adaptive | Adafactor   |
    |----------------------------|----------------------|----------|-------------|
    | hidden (two widths)        | m_fan_out / m_fan_in | 1 / m    | 1 / sqrt(m) |
    | input, output, bias, norm  | m                    | 1        | 1           |
    | no width                   | 1                    | 1        | 1           |

    The fan-in of an `nn.Bilinear` is the product of its two inputs' sizes, because it reads all of their products.

    Adaptive optimizers divide a gradient by its own size: Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, Lion,
    Prodigy and Schedule-Free AdamW. The column of SGD also holds for Schedule-Free SGD.
    Adadelta is adaptive only while `eps` is far below the squared gradients. Its default of 1e-6 often is not.

    Prodigy multiplies all rates by an estimate, the quotient of two numbers. The estimate equals the target's if it is
    computed for the weights divided by these multipliers. The first number is the product of the gradients and the
    change of the weights so far. To first order, it is the decrease of the loss, which is similar at all widths. The
    second number is the sum of absolute gradients. For hidden weights it grows with the width, but multiplied by 1 / m
    it does not.

    Adafactor's steps are also in proportion to the size of the weights, so its column holds only for hidden layers that
    do not start at zero. Its learning rate is at most 1 / sqrt(steps so far), whatever the multiplier.

    Muon's multipliers hold for the 2-D parameters that it updates. The multiplier of a hidden weight is 1 / sqrt(m)
    with `adjust_lr_fn="match_rms_adamw"` ("muon"), and 1 with "original" ("muon.original"). AdamW updates all other
    parameters, so they have the multipliers of AdamW.

    Args:
        surrogate: A module from `make_surrogate` or `shrink`, or a deep copy of one.
        optimizer: Name of one of these optimizers in lower case, such as "schedule_free_sgd". For Muon, "muon" or
            "muon.original".

    Returns:
        Parameter name -> multiplier, for every name of `surrogate.named_parameters()`; all 1.0 at width ratio 1.

    Raises:
        ValueError: if `optimizer` is another word, or `surrogate` has no width plan.
    """
    require(isinstance(optimizer, str) and optimizer in _RULES, "optimizer", optimizer, f"one of {sorted(_RULES)}")
    rule = _RULES[optimizer]
    # Muon updates only matrices: AdamW updates all other parameters.
    of_others = _adam if optimizer.startswith("muon") else rule
    params = width_plan(surrogate).params
    return {name: (rule if len(p.shape) == 2 else of_others)(p.infshape()) for name, p in params.items()}


def weight_decay_multipliers(surrogate: nn.Module, optimizer: str, *, independent: bool = True) -> dict[str, float]:
    """Return the factor of each parameter's weight decay on a surrogate.

    Learning rate x weight decay is the fraction of a weight that one step removes. Independent weight decay keeps this
    fraction the same as on the target, so its multiplier is 1 / (learning rate multiplier). `mup`'s optimizers do the
    same.

    Args:
        surrogate: As for `lr_multipliers`.
        optimizer: As for `lr_multipliers`.
        independent: If True, weight decay is independent. If False, it changes with the multiplied learning rate, and
            every multiplier is 1.

    Returns:
        Parameter name -> multiplier, as `lr_multipliers` does.

    Raises:
        ValueError: as for `lr_multipliers`.
    """
    check_flag("independent", independent)
    rates = lr_multipliers(surrogate, optimizer)
    return {name: 1.0 / rate if independent else 1.0 for name, rate in rates.items()}


def width_plan(surrogate: nn.Module) -> WidthPlan:
    """Return the plan that `make_surrogate` or `shrink` left on a module.

    Raises:
        ValueError: if there is none.
    """
    plan = getattr(surrogate, PLAN_ATTRIBUTE, None)
    if not isinstance(plan, WidthPlan):
        raise ValueError(
            f"`surrogate` is a {type(surrogate).__name__} without a width plan, but must come from make_surrogate or "
            "shrink"
        )
    return plan


Role = Literal["embedding", "hidden", "head"]


def parameter_roles(model: nn.Module, params: Mapping[str, ParamWidth] | None = None) -> dict[str, Role]:
    """Return the roles of a model's weights.

    - "embedding": weights of embeddings, and of layers that read an input and write a width;
    - "hidden": weights that read one width and write another;
    - "head": weights of layers that read a width and write an output.

    Biases, norms, depthwise convolutions, and weights of the same size at each width have no role. A weight that an
    embedding shares with the head has the role "embedding".

    Args:
        model: A surrogate, or its target if `params` is given.
        params: Parameter name -> its shapes in surrogate and target. If None, the plan of the surrogate has them.

    Returns:
        Parameter name -> role.

    Raises:
        ValueError: if `params` is None and `model` has no width plan.
    """
    params = width_plan(model).params if params is None else params
    hidden: dict[str, Role] = {name: "hidden" for name, width in params.items() if width.is_matrix}
    return hidden | dict(sorted(_roles_of_layers(model, params), key=lambda found: found[1] == "embedding"))


def _roles_of_layers(model: nn.Module, params: Mapping[str, ParamWidth]) -> Iterator[tuple[str, Role]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer in model.modules():
        weight = input_weight(layer)
        name = "" if weight is None else names.get(id(weight), "")
        if not name or params[name].shape == params[name].target_shape:
            continue
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            yield name, "embedding"
            continue
        sides = reads_and_writes(layer, params[name])
        if sides == (True, False):
            yield name, "head"
        elif sides == (False, True) and getattr(layer, "groups", 1) == 1:
            yield name, "embedding"
