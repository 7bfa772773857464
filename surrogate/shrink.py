"""`shrink`: a narrow stand-in for a module that takes no width argument."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from surrogate.attention import head_sizes
from surrogate.build import check_width_ratio, mark_as_target, parametrize
from surrogate.configs import narrow_by_config
from surrogate.initial import zero_modules
from surrogate.multipliers import width_plan
from surrogate.outputs import record_calls, run_for_shapes
from surrogate.slices import fill_from_target
from surrogate.widths import ParamWidth, compare_shapes, refuse_single_units, shapes_of


def shrink(module: nn.Module, width_ratio: float, example_input: Any, *, zero_readout: bool = False) -> nn.Module:
    """Build a narrow surrogate of `module`, which is the target.

    A model of the `transformers` library is built again from a narrower configuration. Any other module is
    followed on symbolic sizes (see `surrogate.tracing`): its channels, features and heads shrink, the sizes
    of its input and output, kernels, vocabularies and the depth stay. Heads become fewer and keep their size;
    sizes that do not divide are rounded up, which `width_plan.rounded` reports. Integer attributes that the
    forward pass uses as sizes are adapted; a width that is written into the forward pass as a number keeps
    its size.

    Initial weights are random parts of the module's own, scaled as muP asks, drawn from torch's global
    generator.

    Args:
        module: The target; it is not changed.
        width_ratio: Surrogate width over target width, in (0, 1]. At 1 the result is a copy of the target.
        example_input: One batch (a tensor, a tuple of positional or a dict of keyword arguments).
        zero_readout: As for `make_surrogate`.

    Returns:
        A module of the same classes and parameter names, with readout multipliers as forward-pre-hooks and
        its `WidthPlan` in the attribute `width_plan`.

    Raises:
        TypeError: `module` is no `nn.Module`, or `width_ratio` is no number.
        ValueError: `width_ratio` lies outside (0, 1], `module` has lazy parameters or cannot run on
            `example_input`, no width can be scaled, one falls to a single unit, or the result cannot run on
            `example_input`; the message names the module.
    """
    check_width_ratio(width_ratio)
    shapes = _check_target(module, example_input)
    if width_ratio == 1.0:
        return mark_as_target(copy.deepcopy(module))
    narrow = narrow_by_config(module, width_ratio)
    if narrow is None:
        narrow = _resized(module, width_ratio, example_input)
    if shapes_of(narrow) == shapes_of(module):
        raise ValueError(
            f"width_ratio={width_ratio:g} leaves every size of module as it is: heads keep their size, and sizes are "
            "rounded up; give the model a width argument and use make_surrogate"
        )
    params = compare_shapes(shapes_of(module), shapes_of(narrow))
    refuse_single_units(params, narrow, module)
    fill_from_target(narrow, module, params)
    parametrize(narrow, width_ratio, params, head_sizes(module), _report_rounding(params, width_ratio))
    _check_same_outputs(narrow, shapes, example_input)
    if zero_readout:
        zero_modules(narrow, tuple(width_plan(narrow).readouts))
    return narrow


def _check_target(module: nn.Module, example_input: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, but must be a torch.nn.Module")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name!r} of module is lazy: run the module once on a batch before shrink")
    try:
        return run_for_shapes(module, example_input)
    except Exception as error:
        raise ValueError(f"module cannot run on example_input: {type(error).__name__}: {error}") from error


def _resized(module: nn.Module, width_ratio: float, example_input: Any) -> nn.Module:
    # Symbolic sizes take as long to import as torch itself; a model that takes a width needs none.
    from surrogate.resize import resize
    from surrogate.sizes import scale_sizes
    from surrogate.tracing import trace_sizes

    trace = trace_sizes(module, example_input)
    return resize(module, trace, scale_sizes(trace, width_ratio))


def _check_same_outputs(narrow: nn.Module, shapes: Mapping[str, tuple[int, ...]], example_input: Any) -> None:
    running: list[str] = []
    handles = record_calls(narrow, running)
    try:
        found = run_for_shapes(narrow, example_input)
    except Exception as error:
        raise ValueError(
            f"the narrow model cannot run: module {running[-1] if running else ''!r} failed with "
            f"{type(error).__name__}: {error}; give the model a width argument and use make_surrogate"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for path, shape in shapes.items():
        if found.get(path) != shape:
            raise ValueError(f"the narrow model's {path} has shape {found.get(path)}, the target's has {shape}")


def _report_rounding(params: Mapping[str, ParamWidth], width_ratio: float) -> tuple[str, ...]:
    lines: dict[tuple[int, int], str] = {}
    for name, param in params.items():
        for full, size in zip(param.target_shape, param.shape):
            if size not in (full, full * width_ratio):
                line = f"{full} -> {size} instead of {full * width_ratio:g} (first in {name})"
                lines.setdefault((full, size), line)
    return tuple(lines.values())
