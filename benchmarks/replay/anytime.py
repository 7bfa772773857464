"""Draw the regret of methods that are stopped early, by cost.

A stopped method hands over the model that validated best among all that it trained at full width so far, as far as it
is trained. The method itself might choose another one. Trainings are followed epoch by epoch, even if a method asks for
several epochs at once. Before anything is trained at full width, a run counts as `MOST` standard deviations behind the
best. No run counts as further behind than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.replay.policies import Policy, Search, Tables, Tune, asha, at_random, one_epoch, swept, today
from benchmarks.replay.table import Floats, Ints, Table, complete_seeds, seed_spread
from benchmarks.replay.yardsticks import MOST, RESAMPLES, draws, halves
from benchmarks.result_files import columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GRID = np.geomspace(0.25, 14, 300)
"""Costs at which curves are drawn, in full trainings."""
LAST = 4.0
"""Full trainings up to which today's rule is compared with others at every cost."""
RIVALS = "ASHA", "random search"
AHEAD = "`tune` has less regret than {rival} from "
SHARES = np.array([0.25, 0.5, 0.75, 1])
"""Shares of the cost of a whole search by today's rule, at which methods are compared."""
TIMED = """Regret if a search is given a share of the time that a whole search by today's rule takes, in standard
deviations between seeds. The leader trains to its end first if `time_budget_s` seems enough for that, but not for the
race."""
LEAST = 0.1
"""A smaller regret is drawn as this one, because it is only noise, and zero has no logarithm."""


@dataclass(frozen=True)
class DrawnPolicy:
    """A policy and the look of its curve. Colors are those of Okabe and Ito (2008), without yellow."""

    policy: Policy
    color: str
    dashes: str = "-"


METHODS = {
    "today: tune's defaults": DrawnPolicy(today, "#000000"),
    "the leader to its end first": DrawnPolicy(Tune(leader_first=True), "#000000", ":"),
    "first look after a ninth": DrawnPolicy(Tune(first_look=1 / 9, by="best epochs"), "#56B4E9"),
    "Hyperband in the sweep": DrawnPolicy(Tune(rule="hyperband"), "#009E73"),
    "median stopping in the sweep": DrawnPolicy(Tune(rule="median"), "#009E73", "--"),
    "no stopping in the sweep": DrawnPolicy(Tune(rule="none"), "#009E73", ":"),
    "Hydro: the best surrogate's alone": DrawnPolicy(swept(1), "#0072B2", "--"),
    "one epoch each, two to the end": DrawnPolicy(one_epoch(2), "#CC79A7"),
    "random search": DrawnPolicy(at_random(14), "#7F7F7F", "--"),
    "ASHA": DrawnPolicy(asha, "#D55E00"),
}
IN_TIME = "the leader to its end first", "today: tune's defaults", *RIVALS


def incumbents(search: Search) -> tuple[Floats, Ints, Ints]:
    """Return, after each epoch at full width, the cost so far, the best configuration so far, and its epochs.

    The best is the one that validated best, if best epochs are kept. If scores are equal, the lower number is best, as
    in `tune`.
    """
    curves, price = search.tables.kept[search.seed], search.tables.costs[1.0]
    reached, best, rows = dict[int, int](), (-np.inf, -len(curves)), list[tuple[float, int, int]]()
    for spent, number, last in search.trained:
        for epoch in range(reached.get(number, 0) + 1, last + 1):
            reached[number] = epoch
            best = max(best, (float(curves[number, epoch - 1]), -number))
            rows.append((spent - price * (last - epoch), -best[1], reached[-best[1]]))
    costs, numbers, epochs = (np.array(column) for column in zip(*rows))
    return costs, numbers, epochs


@dataclass(frozen=True)
class InHand:
    """Regret of the model that a search would hand over, by the cost at which it is stopped.

    Attributes:
        spent: Costs at which this model changed.
        regret: Regret before the first of these costs, and after each.
        whole: Cost of the whole search.
    """

    spent: Floats
    regret: Floats
    whole: float

    def at(self, costs: Floats) -> Floats:
        """Return the regret at some costs."""
        # Costs are sums of floats, so a training that ends at a cost of 2 may end a little above 2.
        return self.regret[np.searchsorted(self.spent, costs * (1 + 1e-9), side="right")]


def in_hand(table: Table, policies: Sequence[Policy], resamples: int, by_width: bool = False) -> Iterator[list[InHand]]:
    """Yield, for each search of one task, the `InHand` of each policy. Best epochs are kept.

    Args:
        by_width: See `Tables`.
    """
    tables = Tables(table, by_width)
    spread = seed_spread(table, complete_seeds(table, 1.0), keep="best")
    for draw in draws(table, resamples, "best"):
        found = list[InHand]()
        for policy in policies:
            search = Search(tables, draw.seed, draw.subset.tolist())
            policy(search)
            spent, numbers, epochs = incumbents(search)
            ends = tables.kept[draw.others][:, numbers, epochs - 1].mean(0)
            known = np.concatenate([[MOST], np.minimum((draw.best - ends) / spread, MOST)])
            found.append(InHand(spent, known, search.spent))
        yield found


def regrets(table: Table, policy: Policy, resamples: int = RESAMPLES) -> tuple[Floats, float]:
    """Return a method's mean regret on one task at each cost of `GRID`, and its median cost."""
    found = [one for (one,) in in_hand(table, [policy], resamples)]
    return np.mean([one.at(GRID) for one in found], 0), float(np.median([one.whole for one in found]))


def in_time(table: Table, resamples: int = RESAMPLES) -> Floats:
    """Return the mean regret on one task at `SHARES` of the cost of today's rule, with a row for each of `IN_TIME`."""
    searches = in_hand(table, [today, *(METHODS[name].policy for name in IN_TIME)], resamples)
    found: Floats = np.mean([[one.at(SHARES * full.whole) for one in others] for full, *others in searches], 0)
    return found


@dataclass(frozen=True)
class Curve:
    """A method's mean over tasks.

    Attributes:
        regret: Regret at each cost of `GRID`, in standard deviations between seeds.
        costs: Median cost of a whole search, for each task.
    """

    regret: Floats
    costs: Sequence[float]


def page(tables: Mapping[str, Table], path: Path, resamples: int = RESAMPLES) -> str:
    """Draw the means over either half of the tasks to a PNG file, and return a page with it; empty without tasks."""
    panels: dict[str, dict[str, Curve]] = {}
    for which, half in zip(("tasks that chose earlier rules", "tasks that chose none"), halves(tables)):
        if half:
            panels[f"mean over {len(half)} {which}"] = means = {}
            for name, method in METHODS.items():
                found, costs = zip(*(regrets(table, method.policy, resamples) for table in half.values()))
                means[name] = Curve(np.mean(found, 0), costs)
    if not panels:
        return ""
    plot(panels, path)
    told = [
        f"- {title[0].upper()}{title[1:]}: {AHEAD.format(rival=rival)}{ahead_from(means, rival)} trainings on."
        for title, means in panels.items()
        for rival in RIVALS
    ]
    rows = []
    for which, half in zip(("first", "second"), halves(tables)):
        timed = np.mean([in_time(table, resamples) for table in half.values()], 0) if half else ()
        rows += [[which, name, *(f"{regret:.2f}" for regret in row)] for name, row in zip(IN_TIME, timed)]
    given = columns(["half", "method", *(f"{share:.0%} of the time" for share in SHARES)], rows)
    return "\n".join([*told, "", f"![Regret by cost of each method]({path.name})", "", TIMED, "", given])


def ahead_from(curves: Mapping[str, Curve], rival: str) -> str:
    """Return the cost from which on today's rule has less regret than another search, up to `LAST`."""
    ours, theirs = curves["today: tune's defaults"].regret, curves[rival].regret
    behind = np.flatnonzero((ours >= theirs) & (GRID <= LAST))
    return f"{GRID[behind[-1] + 1 if len(behind) else 0]:.2f}"


def plot(panels: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Draw a panel for each title, with one line for each of `METHODS`. The legend has the order of their right ends.

    A dot marks the cost at which a method's searches are over. Beyond it, lines are faint.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5 * len(panels)), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items()):
        _panel(axis, title, curves)
    figure.savefig(path, dpi=110)


def _panel(axis: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    shown = {name: Curve(np.maximum(curve.regret, LEAST), curve.costs) for name, curve in curves.items()}
    for name, curve in sorted(shown.items(), key=lambda named: -named[1].regret[-1]):
        _draw(axis, METHODS[name], curve, f"{name} ({np.mean(curve.costs):.1f})")
    axis.set(xscale="log", yscale="log", title=f"What a search has in hand when stopped, {title}")
    axis.set_xlabel("cost in full trainings (beside names: of a whole search; dots: over on every task)")
    axis.set_ylabel("regret of the best so far,\nin standard deviations between seeds")
    for ticks, along in (
        ([0.25, 0.5, 1, 2, 3, 4, 6, 8, 12], axis.xaxis),
        ([0.1, 0.2, 0.5, 1, 2, 3, 5, 10], axis.yaxis),
    ):
        along.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        along.set_ticks([], minor=True)
    axis.set(xlim=GRID[[0, -1]], ylim=(0.8 * min(curve.regret.min() for curve in shown.values()), 1.15 * MOST))
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _draw(axis: Axes, method: DrawnPolicy, curve: Curve, name: str) -> None:
    over = min(int(np.searchsorted(GRID, max(curve.costs))), len(GRID) - 1)
    width, order = (2.8, 4) if method.policy is today else (1.7, 3)
    for part, strength in ((slice(over + 1), 1.0), (slice(over, None), 0.35)):
        axis.step(
            GRID[part],
            curve.regret[part],
            where="post",
            color=method.color,
            linestyle=method.dashes,
            linewidth=width * strength,
            alpha=strength,
            zorder=order,
            label=name if part.start is None else None,
        )
    axis.plot(GRID[over], curve.regret[over], "o", color=method.color, zorder=order)
