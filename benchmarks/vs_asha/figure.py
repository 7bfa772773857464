"""The figure of the comparison: the average test score of the best six trials over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.vs_asha.statistics import Cell, curve, maximizes


def plot(cells: Mapping[str, Mapping[str, Sequence[Cell]]], names: Mapping[str, str], path: Path) -> None:
    """Draw one panel for each task, with one line for each method and seed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    rows, columns = -(-len(cells) // 2), min(len(cells), 2)
    figure = Figure(figsize=(6.5 * columns, 4.2 * rows), layout="constrained")
    axes = [*figure.subplots(rows, columns, squeeze=False).flat]
    for unused in axes[len(cells) :]:
        unused.set_axis_off()
    colors = {method: f"C{i}" for i, method in enumerate(names)}
    for axis, (task, methods) in zip(axes, cells.items()):
        for method, of_method in methods.items():
            for i, cell in enumerate(of_method):
                points = curve(cell)
                label = names[method].replace("`", "") if i == 0 else None
                axis.step(
                    [point.seconds for point in points],
                    [point.test for point in points],
                    where="post",
                    color=colors[method],
                    alpha=0.7,
                    linewidth=1,
                    label=label,
                )
                if points and i == 0:
                    axis.annotate(
                        f"{points[-1].finished}",
                        (points[-1].seconds, points[-1].test),
                        color=colors[method],
                        fontsize=8,
                        xytext=(3, 2),
                        textcoords="offset points",
                    )
        first = next(iter(methods.values()))[0]
        axis.set(xscale="log", xlabel="seconds", ylabel=f"test {first['score']}, mean of the best 6 trials")
        if not maximizes(first):
            axis.set_yscale("log")
        for scaled in (axis.xaxis, axis.yaxis):
            if scaled.get_scale() == "log":
                # Label 1, 2 and 5 in each decade. By default, an axis shorter than a decade has no labels, and labels
                # at all ticks would overlap.
                scaled.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                scaled.set_minor_formatter(NullFormatter())
        axis.set_title(f"{task}{' (reduced)' * first['reduced']}; numbers: trials finished", fontsize=10)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=90)
