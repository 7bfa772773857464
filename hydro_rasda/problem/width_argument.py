"""How a model function makes narrower models: the argument for the width ratio, and plans that similar models share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from hydro_rasda.common.argument_checks import require
from hydro_rasda.problem.read_keys import Reads, all_of
from surrogate import ShrinkPlan, SurrogatePlan

DEPTH = "depth_ratio"
"""Name of the argument by which a model function builds shallower models."""

WidthForm = Literal["named", "second"]
"""How a model function takes the width ratio: as the argument `width_ratio`, or as the second argument."""


def width_form(model_fn: Callable[..., nn.Module]) -> WidthForm | None:
    """Return the form in which a model function takes the width ratio; None if it takes none.

    A second argument of another name counts as the width ratio if it has no default. It also counts if its name is that
    of a ratio, its default is 1.0, and no other argument looks like a ratio.

    >>> width_form(lambda config, width_ratio=1.0: None), width_form(lambda config, depth=2: None)
    ('named', None)
    >>> width_form(lambda config, r=1.0: None), width_form(lambda config, dropout=1.0: None)
    ('second', None)
    """
    parameters = list(inspect.signature(model_fn).parameters.values())
    if any(p.name == "width_ratio" for p in parameters):
        return "named"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    if len(required) >= 2:
        return "second"
    ratios = [p for p in parameters if _is_ratio(p)]
    taken = len(ratios) == 1 and parameters[1:2] == ratios and ratios[0].kind in positional
    return "second" if taken else None


_RATIO_NAMES = frozenset({"mult", "multiplier", "r", "ratio", "scale"})


def _is_ratio(p: inspect.Parameter) -> bool:
    """Return whether an argument has the name and the default (1.0) of a width ratio."""
    return type(p.default) is float and p.default == 1.0 and ("width" in p.name or p.name in _RATIO_NAMES)


def about_width_argument(model_fn: Callable[..., nn.Module]) -> str | None:
    """Return a line that tells users which argument is, or could be, the width ratio; None if there is no doubt."""
    form, parameters = width_form(model_fn), list(inspect.signature(model_fn).parameters.values())
    if form == "named":
        return None
    if form == "second":
        return f"the width ratio is the second argument of `model_fn`, `{parameters[1].name}`"
    left = [p for p in parameters if type(p.default) is float and p.default == 1.0]
    shown = ", ".join(f"`{p.name}={p.default!r}`" for p in left)
    return f"`model_fn` keeps {shown}: to build narrower models by it, call it `width_ratio`" if left else None


def check_width_argument(argument: str, model_fn: Any, surrogate: float) -> None:
    """Raise ValueError if an optional width ratio has another name, so that surrogates would never be narrower."""
    if surrogate == 1 or width_form(model_fn) is not None:
        return
    parameters = inspect.signature(model_fn).parameters.values()
    ratios = [p for p in parameters if _is_ratio(p)]
    if len(ratios) > 1:
        shown = ", ".join(f"`{p.name}={p.default!r}`" for p in ratios)
        raise ValueError(f"`{argument}` has {shown}, each of which may be the width ratio: call that one `width_ratio`")
    for p in parameters:
        # A default such as 64 is allowed: it is the width itself, not a ratio, and the library narrows such a model.
        if "width" in p.name and isinstance(p.default, int | float) and p.default == 1:
            raise ValueError(
                f"`{argument}` has an argument `{p.name}={p.default!r}` that is not used: call it `width_ratio`"
            )


def check_second_argument(model_fn: Any, keys: Container[str]) -> None:
    """Raise ValueError if a model function takes hyperparameters as arguments of their own, not in one `config`.

    Otherwise, its second argument would be taken as the width ratio. `keys` are those of the space.
    """
    if width_form(model_fn) != "second":
        return
    name = list(inspect.signature(model_fn).parameters)[1]
    if name in keys:
        raise ValueError(
            f"`model_fn` has the second argument `{name}`, which would be the width ratio, but `space` has a key of "
            f"that name. `model_fn` takes (config) or (config, width_ratio): read config[{name!r}]"
        )


def check_depth_argument(model_fn: Any, depth: float, surrogate: float) -> None:
    """Raise ValueError if surrogates should be shallower, but the model function has no argument for the depth."""
    if depth == 1:
        return
    p = inspect.signature(model_fn).parameters.get(DEPTH)
    rule = "1, as the sweep trains the model itself with `sweep=SweepConfig(surrogate=1)`"
    require(surrogate < 1, "sweep.depth", depth, rule)
    told = p is not None and p.default == 1.0 and width_form(model_fn) is not None
    rule = f"1, unless `model_fn` takes (config, width_ratio, {DEPTH}=1.0), with that default"
    require(told, "sweep.depth", depth, rule)


def call_model_fn(model_fn: Callable[..., Any], form: WidthForm | None, config: dict[str, Any], ratio: float) -> Any:
    """Call a model function with a configuration and, in the form that it takes, a width ratio."""
    if form is None:
        return model_fn(config)
    return model_fn(config, width_ratio=ratio) if form == "named" else model_fn(config, ratio)


MOST = 256
"""Largest number of plans of each kind that are kept. If models need more plans, they rarely share one, so keeping more
would not help."""


@dataclass
class Plans:
    """Plans by which the models of one model function become narrower, as plain values.

    Attributes:
        by_structure: Map a digest of a full-size model's structure to its plan, for a model function that takes no
            width ratio.
        by_reads: Map a width ratio, and the keys and values that were read from a configuration, to the plan; None if
            no plan is possible. These plans are for a model function that takes a width ratio.
        roles: Map the names and shapes of a full-size model's parameters to the roles of the parameters; see
            `lr_roles`.
    """

    by_structure: dict[str, ShrinkPlan] = field(default_factory=dict)
    by_reads: dict[tuple[float, Reads], SurrogatePlan | None] = field(default_factory=dict)
    roles: dict[tuple[tuple[str, tuple[int, ...]], ...], Mapping[str, str]] = field(default_factory=dict)

    def update(self, other: Plans) -> None:
        """Add the plans and roles that another process found."""
        for structure, shrink_plan in other.by_structure.items():
            self.keep_for_structure(structure, shrink_plan)
        for (width_ratio, reads), plan in other.by_reads.items():
            self.keep_for_reads(width_ratio, reads, plan)
        self.roles.update(other.roles)

    def keep_for_structure(self, structure: str, plan: ShrinkPlan) -> None:
        """Keep the plan for full-size models of a structure, unless `MOST` plans are kept already."""
        if len(self.by_structure) < MOST:
            self.by_structure[structure] = plan

    def keep_for_reads(self, width_ratio: float, reads: Reads, plan: SurrogatePlan | None) -> None:
        if len(self.by_reads) < MOST:
            self.by_reads[width_ratio, reads] = plan

    def known_for(self, width_ratio: float, config: Mapping[str, Any]) -> tuple[float, Reads] | None:
        """Return the key of `by_reads` that applies to a configuration; None if there is no such key yet."""
        own = all_of(config)
        return next((key for key in self.by_reads if key[0] == width_ratio and key[1] <= own), None)
