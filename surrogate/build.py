"""`make_surrogate`: a narrow model from a function that takes a width ratio."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from surrogate.attention import find_logit_scales, head_sizes, scale_logits
from surrogate.forward import find_readouts, scale_readouts
from surrogate.initial import corrections, rescale, zero_modules
from surrogate.laws import initial_laws
from surrogate.multipliers import width_plan
from surrogate.outputs import check_outputs
from surrogate.widths import PLAN_ATTRIBUTE, ParamWidth, WidthPlan, compare_shapes, refuse_single_units, shapes_of

Config = Mapping[str, Any]
ModelFn = Callable[[Any, float], nn.Module]
"""`model_fn(config, width_ratio)`: the model at that fraction of its full width."""


def make_surrogate(
    model_fn: ModelFn,
    config: Config,
    width_ratio: float = 1 / 8,
    *,
    example_input: Any = None,
    zero_readout: bool = False,
) -> nn.Module:
    """Build a narrow model that ranks hyperparameters like the wide one.

    The target is `model_fn(config, 1.0)`; it is built without memory for its parameters where its constructor
    allows that (see `surrogate.laws`).

    Train the result with `lr_multipliers` and `weight_decay_multipliers`; train the target as usual.

    Random numbers come from torch's global generator: seed it, and the same seed gives the same surrogate.

    Args:
        model_fn: Called as `model_fn(config, width_ratio)`. Widths may change with the ratio; depth,
            parameter names and the sizes of the model's input and output may not.
        config: Handed to `model_fn` as it is.
        width_ratio: Surrogate width over target width, in (0, 1]. At 1 the result is the target itself, in
            standard parametrization, and every multiplier is 1.
        example_input: One batch (a tensor, a tuple of positional or a dict of keyword arguments). If given,
            the surrogate runs on it once, and an output whose size depends on the width is an error.
        zero_readout: Start readouts at zero (Tensor Programs V, appendix D.2), so that surrogate and target
            compute the same function, 0, before the first step. A readout that is tied to an embedding keeps
            its weights.

    Returns:
        The module that `model_fn` built, with muP's initial scale, readout multipliers as forward-pre-hooks,
        and its `WidthPlan` in the attribute `width_plan`.

    Raises:
        TypeError: `model_fn` takes no width ratio, or returns something else than an `nn.Module`.
        ValueError: `width_ratio` lies outside (0, 1], `model_fn` fails, ignores the ratio, builds other
            parameters at another width, a wider model or a layer of one unit, has lazy modules, or its
            output depends on the width.
    """
    check_width_ratio(width_ratio)
    _check_signature(model_fn, config)
    if width_ratio == 1.0:
        return mark_as_target(_build(model_fn, config, 1.0))
    build_narrow = functools.partial(_build, model_fn, config, width_ratio)
    build_target = functools.partial(_build, model_fn, config, 1.0)
    surrogate = build_narrow()
    with torch.random.fork_rng(devices=[]):
        target, laws = initial_laws(build_target)
        params = compare_shapes(shapes_of(target), shapes_of(surrogate))
        refuse_single_units(params, surrogate, target)
        factors = corrections(params, initial_laws(build_narrow)[1], laws, build_narrow, build_target)
        if example_input is not None:
            check_outputs(surrogate, _build_other(model_fn, config, width_ratio), example_input)
    parametrize(surrogate, width_ratio, params, head_sizes(target))
    rescale(surrogate, factors)
    if zero_readout:
        zero_modules(surrogate, tuple(width_plan(surrogate).readouts))
    return surrogate


def parametrize(
    module: nn.Module,
    width_ratio: float,
    params: Mapping[str, ParamWidth],
    target_heads: Mapping[str, int],
    rounded: tuple[str, ...] = (),
) -> None:
    """Give a narrow module muP's forward multipliers and its plan, in place; its weights stay as they are."""
    readouts = find_readouts(module, params)
    logits = find_logit_scales(module, target_heads)
    scale_readouts(module, readouts)
    scale_logits(module, logits)
    setattr(module, PLAN_ATTRIBUTE, WidthPlan(width_ratio, params, readouts, logits, rounded))


def check_width_ratio(width_ratio: float) -> None:
    """Refuse anything that is not a number in (0, 1].

    Raises:
        TypeError: Not a number.
        ValueError: Outside (0, 1], or NaN.
    """
    if isinstance(width_ratio, bool) or not isinstance(width_ratio, int | float):
        raise TypeError(f"width_ratio is {width_ratio!r}, but must be a number in (0, 1]")
    if not 0.0 < width_ratio <= 1.0:
        raise ValueError(
            f"width_ratio is {width_ratio!r}, but must lie in (0, 1]: a surrogate is no wider than its target"
        )


def _check_signature(model_fn: ModelFn, config: Config) -> None:
    try:
        signature = inspect.signature(model_fn)
    except (TypeError, ValueError):  # callables written in C have none to look at
        return
    try:
        signature.bind(config, 1.0)
    except TypeError:
        raise TypeError(
            f"model_fn takes {signature}, but must take (config, width_ratio); for a model without a width "
            "argument, use surrogate.shrink(module, width_ratio, example_input)"
        ) from None


def _build(model_fn: ModelFn, config: Config, width_ratio: float) -> nn.Module:
    try:
        module = model_fn(config, width_ratio)
    except Exception as error:
        raise ValueError(
            f"model_fn failed at width_ratio={width_ratio:g} with config={config!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model_fn returned {type(module).__name__} at width_ratio={width_ratio:g}, but must return a "
            "torch.nn.Module"
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} is lazy: it has no shape yet; give the layer its input size, or run "
                "the model once on a batch inside model_fn"
            )
    return module


def _build_other(model_fn: ModelFn, config: Config, width_ratio: float) -> nn.Module:
    """A second width to compare outputs with: narrow ones first, since they cost least."""
    for ratio in (2 * width_ratio, width_ratio / 2):
        # Not every width need exist (heads may not divide it); the target always does.
        with contextlib.suppress(TypeError, ValueError):
            if ratio < 1.0:
                return _build(model_fn, config, ratio)
    return _build(model_fn, config, 1.0)


def mark_as_target(module: nn.Module) -> nn.Module:
    """Give an ordinary module the plan of width ratio 1, in place, and return it."""
    shapes = shapes_of(module)
    params = {name: ParamWidth(shape, shape) for name, shape in shapes.items()}
    setattr(module, PLAN_ATTRIBUTE, WidthPlan(1.0, params, {}, {}))
    return module
