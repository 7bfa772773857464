"""`make_surrogate` builds a narrow model from a function that takes a width ratio."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from surrogate.argument_checks import PlanMismatch, check_flag, check_width_ratio, require
from surrogate.forward_multipliers import (
    find_logit_scales,
    find_readouts,
    find_spectral_scales,
    head_sizes,
    scale_inputs,
    scale_logits,
)
from surrogate.init_distributions import initial_laws
from surrogate.init_scale import corrections, measured_corrections, rescale, zero_modules
from surrogate.output_sizes import check_outputs
from surrogate.roles_and_multipliers import width_plan
from surrogate.widths import (
    PLAN_ATTRIBUTE,
    ParamWidth,
    WidthPlan,
    compare_widths,
    refuse_inner_readouts,
    refuse_single_units,
    shapes_of,
    with_data,
)

Config = Mapping[str, Any]
ModelFn = Callable[[Any, float], nn.Module]
"""`model_fn(config, width_ratio)`: the model at that fraction of its full width."""


@dataclass(frozen=True)
class SurrogatePlan:
    """Plain values about a surrogate and its target, so that `make_surrogate` need not build the target.

    Attributes:
        params: Parameter name -> its shapes in the surrogate and in the target.
        factors: Parameter name -> factor by which its initial values are multiplied.
        target_heads: Module name -> size of an attention head in the target.
    """

    width_ratio: float
    params: Mapping[str, ParamWidth]
    factors: Mapping[str, float]
    target_heads: Mapping[str, int]


def make_surrogate(
    model_fn: ModelFn,
    config: Config,
    width_ratio: float = 1 / 8,
    *,
    example_input: Any = None,
    zero_readout: bool = False,
    plan: SurrogatePlan | None = None,
) -> nn.Module:
    """Build a narrow model that ranks hyperparameters like the wide one.

    The wide model, called the target, is `model_fn(config, 1.0)`. It is built without memory for its parameters if its
    constructor allows that (see `surrogate.init_distributions`). Random numbers come from torch's global generator.

    Train the result with `lr_multipliers` and `weight_decay_multipliers`; train the target as usual.

    Args:
        model_fn: Called as `model_fn(config, width_ratio)`. Widths may change with the ratio; depth, parameter names
            and the sizes of the model's input and output may not.
        config: Passed to `model_fn` unchanged.
        width_ratio: Surrogate width over target width, in (0, 1]. At 1 the result is the target itself, in
            standard parametrization, and every multiplier is 1.
        example_input: One batch (a tensor, a tuple of positional or a dict of keyword arguments). If it is given,
            the surrogate runs on it once, and an output whose size depends on the width is an error.
        zero_readout: If True, the readouts (output layers) of a surrogate start at zero (Tensor Programs V, appendix
            D.2). Then surrogates of all widths compute the same function, 0, before the first step. Weights tied to
            an embedding stay, and the target (ratio 1) does, too. If False, readouts start at the scale of muP.
        plan: From `plan_surrogate`, at the same ratio, for a configuration with the same shapes and initial
            distributions. If None, the plan is made again, which takes longer; the result is the same.

    Returns:
        The module that `model_fn` built, with muP's initial scale, readout multipliers as forward-pre-hooks, and its
        `WidthPlan` in the attribute `width_plan`.

    Raises:
        ValueError: if `width_ratio` is no number in (0, 1]. If `model_fn` takes no width ratio, fails, ignores
            the ratio, or returns no `nn.Module`. If the model has other parameters at another width, or grows as the
            ratio falls. If it has a layer of one unit, lazy or meta tensors, or an output that depends on the width.
        PlanMismatch: if the model has other shapes than `plan`. PlanMismatch is a subclass of ValueError.
    """
    check_width_ratio(width_ratio)
    check_flag("zero_readout", zero_readout)
    require(plan is None or isinstance(plan, SurrogatePlan), "plan", plan, "None, or from `plan_surrogate`")
    _check_signature(model_fn, config)
    if width_ratio == 1.0:
        return mark_as_target(_build(model_fn, config, 1.0))
    surrogate = with_data(_build(model_fn, config, width_ratio))
    with torch.random.fork_rng(devices=[]):
        if plan is None:
            plan = _plan(model_fn, config, width_ratio, surrogate, measure=True)
            assert plan is not None
        else:
            _check_plan(plan, width_ratio, surrogate)
        if example_input is not None:
            check_outputs(surrogate, _build_other(model_fn, config, width_ratio), example_input)
    parametrize(surrogate, width_ratio, plan.params, plan.target_heads)
    rescale(surrogate, plan.factors)
    if zero_readout:
        zero_modules(surrogate, tuple(width_plan(surrogate).readouts))
    return surrogate


def plan_surrogate(model_fn: ModelFn, config: Config, width_ratio: float = 1 / 8) -> SurrogatePlan | None:
    """Make a plan with which `make_surrogate` need not build the target.

    The plan holds for all configurations with which `model_fn` builds the same shapes and initial distributions.

    Args:
        model_fn: As for `make_surrogate`.
        config: As for `make_surrogate`.
        width_ratio: Surrogate width over target width, in (0, 1).

    Returns:
        The plan. None if the constructor does not reveal the size of all initial weights, because `make_surrogate` then
        measures these sizes for each surrogate. The state of torch's random numbers does not change.

    Raises:
        ValueError: if `width_ratio` is no number in (0, 1), or as for `make_surrogate`.
    """
    check_width_ratio(width_ratio)
    require(width_ratio < 1.0, "width_ratio", width_ratio, "below 1: the target itself needs no plan")
    _check_signature(model_fn, config)
    with torch.random.fork_rng(devices=[]):
        return _plan(model_fn, config, width_ratio, _build(model_fn, config, width_ratio), measure=False)


def _plan(
    model_fn: ModelFn, config: Config, width_ratio: float, surrogate: nn.Module, *, measure: bool
) -> SurrogatePlan | None:
    """Compare `surrogate` with its target, and return the plan.

    Return None if initial weights would have to be measured, but `measure` is False.
    """
    build_narrow = functools.partial(_build, model_fn, config, width_ratio)
    build_target = functools.partial(_build, model_fn, config, 1.0)
    target, laws = initial_laws(build_target)
    params = compare_widths(target, surrogate)
    refuse_single_units(params, surrogate, target)
    refuse_inner_readouts(params, target)
    factors, unread = corrections(params, initial_laws(build_narrow)[1], laws)
    if unread and not measure:
        return None
    factors |= measured_corrections(params, unread, build_narrow, build_target)
    return SurrogatePlan(width_ratio, params, factors, head_sizes(target))


def _check_plan(plan: SurrogatePlan, width_ratio: float, surrogate: nn.Module) -> None:
    require(width_ratio == plan.width_ratio, "width_ratio", width_ratio, f"that of `plan`, {plan.width_ratio!r}")
    if shapes_of(surrogate) != {name: param.shape for name, param in plan.params.items()}:
        raise PlanMismatch("`plan` is of a model of other shapes, but must be of one like the surrogate")


def parametrize(
    module: nn.Module,
    width_ratio: float,
    params: Mapping[str, ParamWidth],
    target_heads: Mapping[str, int],
    rounded: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
) -> None:
    """Add the multipliers of muP's forward pass, and the `WidthPlan`, to a narrow module, in place.

    Args:
        target_heads: Module name -> size of an attention head in the target. The `WidthPlan` does not keep these sizes.
            It has only the factors of attention logits, for modules whose head size differs.
        rounded: One line for each width that was rounded up, to a whole number or to a size that fits other sizes.
        kept: One line for each size that stays, with the reason.
    """
    readouts, spectral = find_readouts(module, params), find_spectral_scales(module, params)
    logits = find_logit_scales(module, target_heads)
    scale_inputs(module, readouts | spectral)
    scale_logits(module, logits, target_heads)
    setattr(module, PLAN_ATTRIBUTE, WidthPlan(width_ratio, params, readouts, logits, rounded, kept, spectral))


def _check_signature(model_fn: ModelFn, config: Config) -> None:
    require(callable(model_fn), "model_fn", model_fn, "a function of (config, width_ratio)")
    try:
        signature = inspect.signature(model_fn)
    except (TypeError, ValueError):  # a function written in C may have no signature to check
        return
    try:
        signature.bind(config, 1.0)
    except TypeError:
        raise ValueError(
            f"`model_fn` takes {signature}, but must take (config, width_ratio); for a model without a width "
            "argument, use surrogate.shrink(module, width_ratio, example_input)"
        ) from None


def _build(model_fn: ModelFn, config: Config, width_ratio: float) -> nn.Module:
    try:
        module = model_fn(config, width_ratio)
    except Exception as error:
        raise ValueError(
            f"`model_fn` failed at width_ratio={width_ratio:g} with config={config!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"`model_fn` returned a {type(module).__name__} at width_ratio={width_ratio:g}, but must return a "
            "torch.nn.Module"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is lazy: it has no shape yet; give the layer its input size, or run the model "
                "once on a batch inside `model_fn`"
            )
    return module


def _build_other(model_fn: ModelFn, config: Config, width_ratio: float) -> nn.Module:
    """Build the model at a second width, to compare outputs. Narrow widths are tried first, because they cost least."""
    for other in (2 * width_ratio, width_ratio / 2):
        # Skip a width that the model cannot have, for example because heads do not divide it. The target always exists.
        with contextlib.suppress(ValueError):
            if other < 1.0:
                return _build(model_fn, config, other)
    return _build(model_fn, config, 1.0)


def mark_as_target(module: nn.Module) -> nn.Module:
    """Mark an ordinary module as a target, in place, and return it: all multipliers in its `WidthPlan` are 1."""
    shapes = shapes_of(module)
    params = {name: ParamWidth(shape, shape) for name, shape in shapes.items()}
    setattr(module, PLAN_ATTRIBUTE, WidthPlan(1.0, params, {}, {}))
    return module
