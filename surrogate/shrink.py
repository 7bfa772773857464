"""`shrink`: a narrow stand-in for a module that takes no width argument."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn

from surrogate.build import mark_as_target
from surrogate.checks import check_flag, check_width_ratio, require
from surrogate.init_scale import zero_modules
from surrogate.multipliers import width_plan
from surrogate.shrink_plan import ShrinkPlan, check_operators, check_sizes, check_target, follow_plan, plan_shrink


def shrink(
    module: nn.Module,
    width_ratio: float,
    example_input: Any,
    *,
    zero_readout: bool = False,
    plan: ShrinkPlan | None = None,
) -> nn.Module:
    """Build a narrow surrogate of `module`, which is the target.

    A model of the `transformers` library is built again from a narrower configuration. Any other module is followed
    on symbolic sizes (see `surrogate.size_constraints`). Its channels, features and heads shrink. The sizes of its
    input and output, its kernels, its vocabularies and its depth stay. Heads become fewer and keep their size. Sizes
    that do not divide are rounded up, which `width_plan.rounded` reports. Integer attributes that the forward pass
    uses as sizes are adapted; a width that is written into the forward pass as a number keeps its size.

    Initial weights are random parts of the module's own, scaled as muP asks, drawn from torch's global generator.

    Args:
        module: The target; it is not changed.
        width_ratio: Surrogate width over target width, in (0, 1]. At 1 the result is a copy of the target.
        example_input: One batch (a tensor, a tuple of positional or a dict of keyword arguments).
        zero_readout: As for `make_surrogate`.
        plan: From `plan_shrink`, at the same ratio, for a module of the same structure; found anew where it is None,
            which takes far longer. The result is the same.

    Returns:
        A module of the same classes and parameter names, with readout multipliers as forward-pre-hooks and its
        `WidthPlan` in the attribute `width_plan`. `narrow.width_plan.summary` says in one line how many parameters are
        narrower, and which sizes stayed and why. If fewer than half are narrower, that line is a warning, too.

    Raises:
        ValueError: if `module` is no `nn.Module`, has lazy parameters or hooks on parameters, or cannot run on
            `example_input`. If `width_ratio` is no number in (0, 1]. If no width can be scaled, or one falls to one
            unit. If the result cannot run on `example_input`; the error names the module inside it that fails.
        PlanMismatch: if `plan` does not fit `module`; it is a ValueError.
    """
    check_width_ratio(width_ratio)
    check_flag("zero_readout", zero_readout)
    require(plan is None or isinstance(plan, ShrinkPlan), "plan", plan, "None, or from `plan_shrink`")
    if width_ratio == 1.0:
        check_target(module, example_input)
        return mark_as_target(copy.deepcopy(module))
    if plan is None:
        narrow = follow_plan(module, plan_shrink(module, width_ratio, example_input))
        if width_plan(narrow).mostly_wide:
            warnings.warn(f"the narrow model saves little: only {width_plan(narrow).summary}", stacklevel=2)
    else:
        narrow = _follow_checked(module, width_ratio, example_input, plan)
    if zero_readout:
        zero_modules(narrow, tuple(width_plan(narrow).readouts))
    return narrow


def _follow_checked(module: nn.Module, width_ratio: float, example_input: Any, plan: ShrinkPlan) -> nn.Module:
    require(width_ratio == plan.width_ratio, "width_ratio", width_ratio, f"that of `plan`, {plan.width_ratio!r}")
    check_sizes(plan, module)
    narrow = follow_plan(module, plan)
    check_operators(plan, narrow, example_input)
    return narrow
