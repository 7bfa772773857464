"""`coordinate_check` tests whether activations keep their size as the width grows, at the start and after a few steps.

In muP, the coordinates (elements) of every module's output do not grow with the width, and neither does their change
since initialization (Tensor Programs V, appendix D.1). If they grow in a layer, hyperparameters that suit the narrow
model make the wide model diverge. Size and change are means of absolute values, measured on the same batch after each
step. In theory, the slope of log size over log width is 0. It is below 0 in the first steps if outputs start smaller in
a wider model. In an ordinary model under Adam, the slope is about 1/2 to 1 in the last layers.

Outputs are judged early, because after more steps, other layers compensate for a single unscaled layer. At the start,
outputs may not grow with the width. Outputs of hidden layers may not shrink either, because an unscaled initialization
has a slope of 1/2. The change in the first step has a stricter limit, because it is small enough to be linear in each
learning rate. In later steps, only the last step's outputs are judged, because correct models overshoot in between.

Parameters are judged at each step. They show which layer is wrong: a layer's output also depends on earlier layers, but
its parameters do not. For a hidden weight, two quantities must not depend on the width. The first is its initial values
times the square root of its fan-in. The second is each step's change times its fan-in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch
from torch import nn

from surrogate.argument_checks import (
    check_flag,
    check_function,
    check_int,
    check_list,
    check_width_ratio,
    is_metric,
    require,
)
from surrogate.build import ModelFn, make_surrogate, mark_as_target
from surrogate.roles_and_multipliers import width_plan
from surrogate.training import Objective, Recording, record_training
from surrogate.widths import ParamWidth, Shape, shapes_as_read, shapes_of

MAX_SLOPE = 0.25
_FIRST_STEP = 0.5
"""Limit for the slope of the first step's change, as a share of `max_slope`. Correct models have slopes of at most
0.08, and models with unscaled learning rates have slopes of 0.16 or more."""


_EACH_STEP = 2.0
"""Limit for the slope of a hidden weight's change in each step, as a multiple of `max_slope`. Correct models have
slopes of at most 0.3, and models with unscaled learning rates have a slope of 1."""


@dataclass(frozen=True)
class Coordinate:
    """The output of one module at one width, averaged over coordinates and seeds.

    Attributes:
        module: Name of the module; the model itself is named "".
        width_ratio: Width over the width of the target.
        step: Number of optimizer steps before the measurement.
        size: Mean of |x|.
        change: Mean of |x - x at step 0|.
    """

    module: str
    width_ratio: float
    step: int
    size: float
    change: float


@dataclass(frozen=True)
class CoordinateCheck:
    """Measurements of `coordinate_check`.

    Attributes:
        rows: One row for each module, width and step. A module is left out if at some width its output is empty, or
            changes its size from step to step.
        size_slopes: Module name -> slope of log size over log width after the last step.
        change_slopes: Module name -> slope of the change since initialization, after the last step.
        max_slope: The largest slope that the verdict allows.
        start_slopes: Module name -> slope of the size before the first step.
        first_slopes: Module name -> slope of the first step's change.
        hidden: Modules whose weight reads and writes a width. Their outputs may not start smaller in a wider model.
        parameter_slopes: Parameter name -> slope of its initial values and, for a hidden weight, of each step's change.
            Slopes are relative to muP's rule, so 0 is correct.
    """

    rows: tuple[Coordinate, ...]
    size_slopes: Mapping[str, float]
    change_slopes: Mapping[str, float]
    max_slope: float
    start_slopes: Mapping[str, float] = field(default_factory=dict)
    first_slopes: Mapping[str, float] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    parameter_slopes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def growing(self) -> tuple[str, ...]:
        """Return the modules whose outputs, or changes of outputs, grow with the width or are not finite.

        Outputs are judged before the first step and after the last one, changes after the first and the last step.
        """
        limits = [(self.size_slopes, 1.0), (self.change_slopes, 1.0), (self.start_slopes, 1.0)]
        limits.append((self.first_slopes, _FIRST_STEP))
        return tuple(
            name
            for name in self.size_slopes
            if not all(slopes.get(name, 0.0) <= share * self.max_slope for slopes, share in limits)
        )

    @property
    def shrinking(self) -> tuple[str, ...]:
        """Return the hidden layers whose outputs start smaller in a wider model."""
        return tuple(
            name for name, slope in self.start_slopes.items() if name in self.hidden and -slope > self.max_slope
        )

    @property
    def unscaled(self) -> dict[str, str]:
        """Map each parameter that does not follow muP's rules to a description of the error.

        The slope of initial values may be at most `max_slope`, up or down. The limit for changes of a hidden weight is
        twice as large, because gradients of a few examples are noisy. Changes may not grow with the width at any step.
        They may shrink at some steps, but not at every step. If initial values are wrong, only they are reported,
        because they also cause wrong changes of other parameters.
        """
        starts = {name: slopes[0] for name, slopes in self.parameter_slopes.items()}
        wrong = {name: slope for name, slope in starts.items() if not abs(slope) <= self.max_slope}
        if wrong:
            return {name: f"starts {'smaller' if wrong[name] < 0 else 'larger'} in a wider model" for name in wrong}
        found = {}
        for name, (_, *changes) in self.parameter_slopes.items():
            grown = next((i for i, slope in enumerate(changes, 1) if not slope <= _EACH_STEP * self.max_slope), None)
            if grown is not None:
                found[name] = f"changes more in a wider model, at step {grown}"
            elif changes and max(changes) < -_EACH_STEP * self.max_slope:
                found[name] = "changes less in a wider model, at each step"
        return found

    @property
    def passed(self) -> bool:
        """Return whether no output grows with the width or starts smaller, and each parameter follows muP."""
        return not self.growing and not self.shrinking and not self.unscaled

    def table(self) -> str:
        """Return a text with one line for each module (its sizes and slopes after the last step), and the verdict."""
        last = max(row.step for row in self.rows)
        width_ratios = sorted({row.width_ratio for row in self.rows})
        sizes = {(row.module, row.width_ratio): row.size for row in self.rows if row.step == last}
        lines = [_row("module", [f"{width_ratio:.4g}" for width_ratio in width_ratios], "size slope", "change slope")]
        for name, slope in self.size_slopes.items():
            cells = [f"{sizes[name, width_ratio]:.4g}" for width_ratio in width_ratios]
            lines.append(_row(name or "(output)", cells, f"{slope:.2f}", f"{self.change_slopes[name]:.2f}"))
        growing = ", ".join(name or "(output)" for name in self.growing)
        shrinking = ", ".join(self.shrinking)
        told = [*[growing] * bool(growing), *[f"{shrinking} shrinks at the start"] * bool(shrinking)]
        found = "; ".join([*told, *(f"parameter {name} {what}" for name, what in self.unscaled.items())])
        lines.append(f"failed after step {last}: {found}" if found else f"passed after step {last}")
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Write a figure of log size over log width, one panel for each step (needs matplotlib)."""
        from matplotlib.figure import Figure

        steps = sorted({row.step for row in self.rows})
        figure = Figure(figsize=(3.2 * len(steps), 3.2), layout="constrained")
        for axis, step in zip(figure.subplots(1, len(steps), sharey=True, squeeze=False)[0], steps):
            for name in self.size_slopes:
                points = sorted((r.width_ratio, r.size) for r in self.rows if (r.module, r.step) == (name, step))
                axis.loglog(*zip(*points), marker="o", markersize=3, label=name or "(output)", base=2)
            axis.set(title=f"step {step}", xlabel="width ratio", ylabel="mean |x|" if step == steps[0] else "")
        figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize="x-small")
        figure.savefig(path)


def _row(name: str, cells: Sequence[str], *slopes: str) -> str:
    return f"{name:<28}" + "".join(f"{cell:>11}" for cell in cells) + "".join(f"{slope:>14}" for slope in slopes)


def coordinate_check(
    model_fn: ModelFn,
    config: Mapping[str, Any],
    width_ratios: Sequence[float],
    batches: Sequence[Any],
    objective: Objective,
    *,
    seeds: int = 3,
    plain: bool = False,
    max_slope: float = MAX_SLOPE,
) -> CoordinateCheck:
    """Train a few steps at several widths and record the outputs of every module.

    Args:
        model_fn: As for `make_surrogate`.
        config: Its hyperparameters (see `surrogate.training.make_optimizer`) are used at every width.
        width_ratios: At least 2 different ratios.
        batches: One optimizer step is done for each batch; outputs are recorded on the first batch.
        objective: `objective(model, batch)` -> loss.
        seeds: Number of random initializations to average over.
        plain: If True, check ordinary narrow models without muP under ordinary optimizers, as an example of a failure.
            If False, check surrogates.
        max_slope: The largest slope of log size over log width that passes.

    Raises:
        ValueError: if there are fewer than 2 width ratios, no batch or no seed, or as for `make_surrogate`.
    """
    check_list("width_ratios", width_ratios, float | int)
    for i, width_ratio in enumerate(width_ratios):
        check_width_ratio(width_ratio, f"width_ratios[{i}]")
    require(len(set(width_ratios)) > 1, "width_ratios", list(width_ratios), "at least 2 different numbers")
    check_function("model_fn", model_fn, 2)
    require(isinstance(config, Mapping), "config", config, "a mapping of names to values")
    check_list("batches", batches, object, least=0)
    require(len(batches) > 0, "batches", batches, "at least 1 batch")
    check_function("objective", objective, 2)
    check_int("seeds", seeds, at_least=1)
    check_flag("plain", plain)
    require(is_metric(max_slope) and max_slope >= 0, "max_slope", max_slope, "a number >= 0")
    build = _build_plain if plain else make_surrogate
    measured = _Measured()
    for seed in range(seeds):
        for width_ratio in width_ratios:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = build(model_fn, config, width_ratio)
                measured.add(width_ratio, model, record_training(model, config, batches, objective))
    at_all = set.intersection(*({name for name, own, _ in measured.outputs if own == ratio} for ratio in width_ratios))
    found = ((key, pairs) for key, pairs in measured.outputs.items() if key[0] in at_all)
    rows = tuple(Coordinate(*key, *map(fmean, zip(*pairs))) for key, pairs in found)

    def slopes(step: int, kind: str) -> dict[str, float]:
        return _slopes({(row.module, row.width_ratio): getattr(row, kind) for row in rows if row.step == step})

    sizes, changes = slopes(len(batches), "size"), slopes(len(batches), "change")
    at_first = (slopes(0, "size"), slopes(1, "change"), frozenset(measured.hidden))
    return CoordinateCheck(rows, sizes, changes, max_slope, *at_first, measured.parameter_slopes(len(batches)))


class _Measured:
    """Measurements of all widths and seeds."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[str, float, int], list[tuple[float, float]]] = defaultdict(list)
        self.hidden = set[str]()
        self._parameters: dict[tuple[str, int, float], list[float]] = defaultdict(list)
        self._shapes: dict[float, dict[str, Shape]] = {}

    def add(self, width_ratio: float, model: nn.Module, recording: Recording) -> None:
        """Add the measurements of one training."""
        params = width_plan(model).params
        matrices = (name.replace(".parametrizations.weight", "") for name, p in params.items() if p.is_matrix)
        self.hidden |= {name.rpartition(".")[0] for name in matrices}
        self._shapes[width_ratio] = shapes_of(model) | shapes_as_read(model)
        for (name, step), pair in recording.outputs.items():
            self.outputs[name, width_ratio, step].append(pair)
        for (name, step), size in recording.parameters.items():
            self._parameters[name, step, width_ratio].append(size)

    def parameter_slopes(self, steps: int) -> dict[str, tuple[float, ...]]:
        """Return, for each parameter with a width, the slopes of its initial values and of each step's change.

        In muP, the values of a hidden weight are proportional to 1 / sqrt(fan-in), and its changes to 1 / fan-in, under
        every optimizer (Yang et al. 2023, "A spectral condition"). The values of other parameters do not depend on the
        width. Changes of other parameters are not judged, because the gradient of a bias before a norm is only noise.
        """
        full = self._shapes[max(self._shapes)]
        slopes = {}
        for name, shape in full.items():
            widths = {ratio: ParamWidth(shape, own[name]) for ratio, own in self._shapes.items()}
            matrix = any(width.is_matrix for width in widths.values())
            if any(width.shape != shape for width in widths.values()):
                slopes[name] = tuple(
                    self._slope(name, step, {r: w.width_mult if matrix else 1.0 for r, w in widths.items()})
                    for step in range(1 + steps * matrix)
                )
        return slopes

    def _slope(self, name: str, step: int, fan_in: Mapping[float, float]) -> float:
        sizes = {ratio: fmean(self._parameters[name, step, ratio]) for ratio in fan_in}
        return _slope([(math.log(r), sizes[r] * fan_in[r] ** (1.0 if step else 0.5)) for r in fan_in])


def _build_plain(model_fn: ModelFn, config: Any, width_ratio: float) -> nn.Module:
    return mark_as_target(model_fn(config, width_ratio))


def _slopes(sizes: Mapping[tuple[str, float], float]) -> dict[str, float]:
    """Return the slope of each module; `sizes[module, width_ratio]` is the size or change of its output."""
    points = defaultdict(list)
    for (name, width_ratio), size in sizes.items():
        points[name].append((math.log(width_ratio), size))
    return {name: _slope(found) for name, found in points.items()}


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of log size over log width.

    It is 0 if all sizes are zero, and infinite if only some are zero or one is not finite.
    """
    if not all(math.isfinite(size) for _, size in points):
        return math.inf
    if any(size == 0.0 for _, size in points):
        return 0.0 if all(size == 0.0 for _, size in points) else math.inf
    return linear_regression([x for x, _ in points], [math.log(size) for _, size in points]).slope
