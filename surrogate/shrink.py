"""`shrink` makes a narrow stand-in for a module without a width argument.

`plan_shrink` makes a plan that `shrink` can use for all modules of one structure.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from surrogate.argument_checks import PlanMismatch, check_flag, check_width_ratio, require
from surrogate.build import mark_as_target, parametrize
from surrogate.forward_multipliers import head_sizes
from surrogate.init_scale import zero_modules
from surrogate.output_sizes import main_outputs, record_calls, run_for_shapes
from surrogate.resize import NarrowSizes, fill_from_target, resize, size_of
from surrogate.roles_and_multipliers import width_plan
from surrogate.transformers_config import narrow_by_config
from surrogate.widths import (
    ParamWidth,
    Shape,
    compare_widths,
    refuse_inner_readouts,
    refuse_single_units,
    shapes_of,
    with_data,
)


def shrink(
    module: nn.Module,
    width_ratio: float,
    example_input: Any,
    *,
    zero_readout: bool = False,
    plan: ShrinkPlan | None = None,
) -> nn.Module:
    """Build a narrow surrogate of `module`, which is the target.

    A model of the `transformers` library is built again from a narrower configuration, if the result has the same
    layers and runs. Any other module is run once on symbolic sizes (see `surrogate.size_constraints`). Its channels,
    features and heads shrink. The sizes of its input and output, its kernels, its vocabularies and its depth stay.
    Heads become fewer and keep their size. Sizes that are not whole at this ratio, or do not fit other sizes, are
    rounded up; `width_plan.rounded` lists them. Integer attributes that the forward pass uses as sizes are adapted. A
    width that is written into the forward pass as a number keeps its size.

    Initial weights are random parts of the module's own weights, scaled as muP asks. Torch's global generator draws
    these parts.

    Args:
        module: The target; it is not changed.
        width_ratio: Surrogate width over target width, in (0, 1]. At 1 the result is a copy of the target.
        example_input: One batch (a tensor, a tuple of positional or a dict of keyword arguments).
        zero_readout: As for `make_surrogate`.
        plan: From `plan_shrink`, at the same ratio, for a module of the same structure. If None, the plan is made
            again, which takes far longer. The result is the same.

    Returns:
        A module of the same classes and parameter names, with readout multipliers as forward-pre-hooks and its
        `WidthPlan` in the attribute `width_plan`. `narrow.width_plan.summary` says in one line how many parameters are
        narrower, and which sizes stayed and why. If fewer than half are narrower and `plan` is None, `shrink` also
        warns with that line.

    Raises:
        ValueError: if `module` is no `nn.Module`, is compiled or scripted, has lazy parameters, hooks on parameters or
            tensors on the device "meta", or cannot run on `example_input`. If `width_ratio` is no number in (0, 1]. If
            no width can be scaled, or one falls to one unit. If the result cannot run on `example_input`; the error
            names the module inside it that fails.
        PlanMismatch: if `plan` does not fit `module`. PlanMismatch is a subclass of ValueError.
    """
    check_width_ratio(width_ratio)
    check_flag("zero_readout", zero_readout)
    require(plan is None or isinstance(plan, ShrinkPlan), "plan", plan, "None, or from `plan_shrink`")
    if width_ratio == 1.0:
        _check_target(module, example_input)
        return mark_as_target(copy.deepcopy(module))
    if plan is None:
        narrow = _follow(module, plan_shrink(module, width_ratio, example_input))
        if width_plan(narrow).mostly_wide:
            warnings.warn(f"the narrow model saves little: only {width_plan(narrow).summary}", stacklevel=2)
    else:
        narrow = _follow_checked(module, width_ratio, example_input, plan)
    if zero_readout:
        zero_modules(narrow, tuple(width_plan(narrow).readouts))
    return narrow


@dataclass(frozen=True)
class ShrinkPlan:
    """How to make modules of one structure narrower, as plain values.

    Attributes:
        target: Parameter or buffer name -> its shape in the module.
        sizes: Sizes of the copy; None if the module is built again from its `transformers` configuration.
        operators: A digest of the operators that the narrow model calls.
    """

    width_ratio: float
    target: Mapping[str, Shape]
    sizes: NarrowSizes | None
    operators: str


def plan_shrink(module: nn.Module, width_ratio: float, example_input: Any) -> ShrinkPlan:
    """Make a plan with which `shrink` makes `module`, and other modules of the same structure, narrower.

    Running a deep module on symbolic sizes takes seconds. Modules that differ only in their weights, and in floating
    point attributes such as a dropout probability, can share one plan. `shrink` refuses a plan that does not fit.

    Args:
        module: The target; it is not changed, and neither are torch's random numbers.
        width_ratio: Surrogate width over target width, in (0, 1).
        example_input: One batch, as for `shrink`.

    Raises:
        ValueError: if `width_ratio` is no number in (0, 1), or as for `shrink`.
    """
    check_width_ratio(width_ratio)
    require(width_ratio < 1.0, "width_ratio", width_ratio, "below 1: a copy of the module needs no plan")
    outputs = _check_target(module, example_input)
    with torch.random.fork_rng(devices=[]):
        sizes = None
        narrow = narrow_by_config(module, width_ratio)
        if narrow is None or not _runs(narrow, example_input):  # for example, a part may have a fixed size
            # Import these modules only here. They take as long as torch itself, and models with a width argument do not
            # need them.
            from surrogate.size_constraints import trace_sizes
            from surrogate.sizes import narrow_sizes

            trace = trace_sizes(module, example_input)
            lists = {len(child) for child in module.modules() if isinstance(child, nn.ModuleList)}
            sizes = narrow_sizes(trace, width_ratio, lists)
            narrow = resize(module, sizes)
        _check_widths(narrow, module, width_ratio)
        _fill_and_parametrize(narrow, module, width_ratio, _kept(sizes))
        same = main_outputs(outputs) if sizes is None else outputs
        return ShrinkPlan(width_ratio, _all_shapes(module), sizes, _check_run(narrow, same, example_input))


def _follow(module: nn.Module, plan: ShrinkPlan) -> nn.Module:
    """Make the narrow copy of `module` that `plan` describes; the module must have the structure of the plan."""
    narrow = narrow_by_config(module, plan.width_ratio) if plan.sizes is None else resize(module, plan.sizes)
    if narrow is None:
        raise PlanMismatch("`plan` is of a model built from its configuration, but must be of one like `module`")
    _fill_and_parametrize(narrow, module, plan.width_ratio, _kept(plan.sizes))
    return narrow


def _follow_checked(module: nn.Module, width_ratio: float, example_input: Any, plan: ShrinkPlan) -> nn.Module:
    """Call `_follow` with the plan of another module. Raise PlanMismatch unless sizes and operators are the same."""
    require(width_ratio == plan.width_ratio, "width_ratio", width_ratio, f"that of `plan`, {plan.width_ratio!r}")
    if _all_shapes(module) != plan.target or not _holds(plan.sizes, module):
        raise PlanMismatch("`plan` is of a module of other sizes, but must be of one like `module`")
    narrow = _follow(module, plan)
    try:
        operators = run_for_operators(narrow, example_input)[1]
    except Exception as error:  # a model may raise anything if its sizes do not fit together
        raise PlanMismatch(f"`plan` is of a module like none that runs: {type(error).__name__}: {error}") from error
    if operators != plan.operators:
        raise PlanMismatch("`plan` is of a module that computes something else, but must be of one like `module`")
    return narrow


def _check_target(module: nn.Module, example_input: Any) -> dict[str, Shape]:
    """Return the shapes of a module's outputs. Raise ValueError if it has lazy or hooked parameters, or cannot run."""
    require(isinstance(module, nn.Module), "module", module, "a torch.nn.Module")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"parameter {name!r} of `module` is lazy: run the module once on a batch before")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"parameter {name!r} of `module` has a hook, which a copy of another width does not have")
    with_data(module)
    _refuse_programs(module)
    try:
        return run_for_shapes(module, example_input)
    except Exception as error:
        raise ValueError(f"`module` cannot run on `example_input`: {type(error).__name__}: {error}") from error


def _refuse_programs(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if (made := type(part).__module__).startswith(("torch.jit", "torch._dynamo")):
            maker = "torch.jit" if made.startswith("torch.jit") else "torch.compile"
            told = f"module {name or 'itself'} comes from {maker}, which hides its sizes"
            raise ValueError(f"{told}: pass the module from before")


def _fill_and_parametrize(narrow: nn.Module, module: nn.Module, width_ratio: float, kept: tuple[str, ...]) -> None:
    """Fill the narrow copy of a module with parts of the module's weights, and add muP's multipliers, in place."""
    params = compare_widths(module, narrow)
    fill_from_target(narrow, module, params)
    parametrize(narrow, width_ratio, params, head_sizes(module), _report_rounding(params, width_ratio), kept)


def _check_widths(narrow: nn.Module, module: nn.Module, width_ratio: float) -> None:
    if shapes_of(narrow) == shapes_of(module):
        raise ValueError(
            f"`width_ratio` is {width_ratio:g}, which leaves every size of `module` as it is: heads keep their size, "
            "and sizes are rounded up; give the model a `width_ratio` argument and use make_surrogate"
        )
    params = compare_widths(module, narrow)
    refuse_single_units(params, narrow, module)
    refuse_inner_readouts(params, module)


def _runs(narrow: nn.Module, example_input: Any) -> bool:
    try:
        run_for_shapes(narrow, example_input)
    except Exception:  # a model may raise anything if its sizes do not fit together
        return False
    return True


def _check_run(narrow: nn.Module, outputs: Mapping[str, Shape], example_input: Any) -> str:
    """Return the digest of a narrow model's operators. Raise ValueError if it fails or has other output shapes."""
    running: list[str] = []
    handles = record_calls(narrow, running)
    try:
        found, operators = run_for_operators(narrow, example_input)
    except Exception as error:
        raise ValueError(
            f"the narrow model cannot run: module {running[-1] if running else ''!r} failed with "
            f"{type(error).__name__}: {error}; give the model a `width_ratio` argument and use make_surrogate"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    for path, shape in outputs.items():
        if found.get(path) != shape:
            raise ValueError(f"the narrow model's {path} has shape {found.get(path)}, the target's has {shape}")
    return operators


def _kept(sizes: NarrowSizes | None) -> tuple[str, ...]:
    return () if sizes is None else sizes.kept


def _all_shapes(module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of all parameters and buffers, by name."""
    return {**shapes_of(module), **{name: tuple(buffer.shape) for name, buffer in module.named_buffers()}}


def _holds(sizes: NarrowSizes | None, module: nn.Module) -> bool:
    """Return whether a module's attributes have the values that they had in the module for which `sizes` was made."""
    attributes = {} if sizes is None else sizes.attributes
    layers = dict(module.named_modules())
    return all(
        path in layers and hasattr(layers[path], name) and size_of(layers[path], name) == full
        for (path, name), (full, _) in attributes.items()
    )


def _report_rounding(params: Mapping[str, ParamWidth], width_ratio: float) -> tuple[str, ...]:
    lines: dict[tuple[int, int], str] = {}
    for name, param in params.items():
        for full, size in zip(param.target_shape, param.shape):
            if size not in (full, full * width_ratio):
                line = f"{full} -> {size} instead of {full * width_ratio:g} (first in {name})"
                lines.setdefault((full, size), line)
    return tuple(lines.values())


def run_for_operators(module: nn.Module, example_input: Any) -> tuple[dict[str, Shape], str]:
    """Run a copy of a module on one batch, as `run_for_shapes` does.

    Returns:
        The shapes of its outputs, and a digest of the operators that it called. The digest depends on their order, on
        shapes and types of tensors, and on all other arguments except floating point numbers.
    """
    record = _Record()
    shapes = run_for_shapes(module, example_input, record)
    return shapes, record.digest.hexdigest()


class _Record(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise, torch would import its compiler, which takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.digest.update(repr((str(func), pytree.tree_map(_counted, (args, kwargs)))).encode())
        return func(*args, **kwargs)


def _counted(value: Any) -> Any:
    """Return the part of an argument that enters the digest: for a tensor its shape and type, for a float its type."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return float if isinstance(value, float | torch.Generator) else value
