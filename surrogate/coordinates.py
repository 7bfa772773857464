"""`coordinate_check`: whether activations keep their size as the width grows, at the start and after a few steps.

In muP the coordinates of every module's output, and their change since initialization, do not grow with the width
(Tensor Programs V, appendix D.1). If a layer's do, hyperparameters that suit the narrow model blow up the wide one.
Both are measured as a mean of absolute values, on one and the same batch after each step. The slope of log size over
log width is 0 in theory, or below 0 in the first steps, if outputs start smaller in a wider model. In an ordinary model
under Adam it is about 1/2 to 1 in the last layers.

Three moments show a single layer that is not scaled, before others make up for it. At the start, outputs may not grow,
and those of hidden layers may not shrink either: an unscaled initialization has a slope of 1/2. The first step's change
is small enough to be linear in each rate, and is held to a stricter limit. Later steps but the last are not judged:
right models overshoot there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surrogate.build import ModelFn, make_surrogate, mark_as_target
from surrogate.checks import check_flag, check_function, check_int, check_list, check_width_ratio, is_metric, require
from surrogate.multipliers import width_plan
from surrogate.recording import record_training
from surrogate.training import Objective

MAX_SLOPE = 0.25
_FIRST_STEP = 0.5
"""Of the largest slope, for the first step's change: right models show 0.08 at most, unscaled rates 0.16 or more."""


@dataclass(frozen=True)
class Coordinate:
    """The output of one module at one width, averaged over coordinates and seeds.

    Attributes:
        module: Its name; the model itself is named "".
        width_ratio: Width over the target's.
        step: Optimizer steps done before.
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
        rows: One for each module, width and step.
        size_slopes: Module name -> slope of log size over log width after the last step.
        change_slopes: The same for the change since initialization.
        max_slope: The largest slope that the verdict allows.
        start_slopes: Module name -> slope of the size before the first step.
        first_slopes: Module name -> slope of the first step's change.
        hidden: Modules with a hidden weight, one of two widths: their outputs may not shrink at the start.
    """

    rows: tuple[Coordinate, ...]
    size_slopes: Mapping[str, float]
    change_slopes: Mapping[str, float]
    max_slope: float
    start_slopes: Mapping[str, float] = field(default_factory=dict)
    first_slopes: Mapping[str, float] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    @property
    def growing(self) -> tuple[str, ...]:
        """Modules whose outputs, or their changes, grow with the width or are not finite, at the first step or last."""
        limits = [(self.size_slopes, 1.0), (self.change_slopes, 1.0), (self.start_slopes, 1.0)]
        limits.append((self.first_slopes, _FIRST_STEP))
        return tuple(
            name
            for name in self.size_slopes
            if not all(slopes.get(name, 0.0) <= share * self.max_slope for slopes, share in limits)
        )

    @property
    def shrinking(self) -> tuple[str, ...]:
        """Hidden layers whose outputs start smaller in a wider model."""
        return tuple(
            name for name, slope in self.start_slopes.items() if name in self.hidden and -slope > self.max_slope
        )

    @property
    def passed(self) -> bool:
        """Return whether no output grows with the width, and no hidden layer's starts smaller in a wider model."""
        return not self.growing and not self.shrinking

    def table(self) -> str:
        """Sizes and slopes after the last step, one line for each module, and the verdict."""
        last = max(row.step for row in self.rows)
        width_ratios = sorted({row.width_ratio for row in self.rows})
        sizes = {(row.module, row.width_ratio): row.size for row in self.rows if row.step == last}
        lines = [_row("module", [f"{width_ratio:.4g}" for width_ratio in width_ratios], "size slope", "change slope")]
        for name, slope in self.size_slopes.items():
            cells = [f"{sizes[name, width_ratio]:.4g}" for width_ratio in width_ratios]
            lines.append(_row(name or "(output)", cells, f"{slope:.2f}", f"{self.change_slopes[name]:.2f}"))
        growing = ", ".join(name or "(output)" for name in self.growing)
        shrinking = ", ".join(self.shrinking)
        found = "; ".join([*[growing] * bool(growing), *[f"{shrinking} shrinks at the start"] * bool(shrinking)])
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
    """Train a few steps at several widths and record what every module puts out.

    Args:
        model_fn: As for `make_surrogate`.
        config: Its hyperparameters (see `surrogate.training.make_optimizer`) are used at every width.
        width_ratios: At least 2.
        batches: One optimizer step for each; outputs are recorded on the first one.
        objective: `objective(model, batch)` -> loss.
        seeds: How many random initializations to average over.
        plain: True to do without muP: ordinary narrow models under ordinary optimizers, to see what failing looks
            like.
        max_slope: How steep log size over log width may be.

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
    hidden = set[str]()
    found: dict[tuple[str, float, int], list[tuple[float, float]]] = defaultdict(list)
    for seed in range(seeds):
        for width_ratio in width_ratios:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = build(model_fn, config, width_ratio)
                hidden |= {name.rpartition(".")[0] for name, p in width_plan(model).params.items() if p.is_matrix}
                for (name, step), pair in record_training(model, config, batches, objective).items():
                    found[name, width_ratio, step].append(pair)
    rows = tuple(Coordinate(*key, *map(_mean, zip(*pairs))) for key, pairs in found.items())

    def slopes(step: int, kind: str) -> dict[str, float]:
        return _slopes({(row.module, row.width_ratio): getattr(row, kind) for row in rows if row.step == step})

    sizes, changes = slopes(len(batches), "size"), slopes(len(batches), "change")
    return CoordinateCheck(rows, sizes, changes, max_slope, slopes(0, "size"), slopes(1, "change"), frozenset(hidden))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _build_plain(model_fn: ModelFn, config: Any, width_ratio: float) -> nn.Module:
    return mark_as_target(model_fn(config, width_ratio))


def _slopes(sizes: Mapping[tuple[str, float], float]) -> dict[str, float]:
    """Module name -> slope, from sizes by module name and width ratio."""
    points = defaultdict(list)
    for (name, width_ratio), size in sizes.items():
        points[name].append((math.log(width_ratio), size))
    return {name: _slope(found) for name, found in points.items()}


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares of log size over log width; infinite where a size is not finite, 0 where all are zero."""
    if not all(math.isfinite(size) for _, size in points):
        return math.inf
    if any(size == 0.0 for _, size in points):
        return 0.0 if all(size == 0.0 for _, size in points) else math.inf
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(math.log(size) for _, size in points) / len(points)
    covariance = sum((x - mean_x) * (math.log(size) - mean_y) for x, size in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)
