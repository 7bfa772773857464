"""How well scores rank configurations with a short cooldown before the comparison, and without.

A cooldown is a branch of a training, whose learning rate falls in a line to 0; see `About.branches`. Rankings are
compared with the end at full width, as the mean over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.policies import TOP_K
from benchmarks.replay.table import SHARES, Table
from benchmarks.replay.truth import Floats, after_cooldown, best_first, complete_seeds, goodness, seed_spread, truth


@dataclass(frozen=True)
class Ranking:
    """How well scores rank configurations; means over seeds.

    Attributes:
        rho: Spearman's correlation with the end at full width.
        regret: By how much the best of the first 4 is behind the best of all, in standard deviations between seeds.
    """

    rho: float
    regret: float


def ranking(table: Table, scores: Floats) -> Ranking:
    """How well scores [seed, config], higher is better, rank configurations."""
    seeds = complete_seeds(table, 1.0)
    known, spread = truth(table, seeds), seed_spread(table, seeds)
    rhos = [spearman(of_seed, known) for of_seed in scores]
    lost = [known.max() - known[best_first(of_seed)[:TOP_K]].max() for of_seed in scores]
    return Ranking(float(np.mean(rhos)), float(np.mean(lost) / spread))


def spearman(one: Floats, other: Floats) -> float:
    """Rank correlation; equal values, what diverged among them, share their mean rank."""
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def rankings(table: Table, width: float, epoch: int) -> dict[str, Ranking]:
    """By what is compared after an epoch at a width: the last step's weights, averaged ones, those after a cooldown."""
    seeds = complete_seeds(table, width)
    found = {
        name: ranking(table, goodness(table, width, ema=ema)[seeds, :, epoch - 1])
        for name, ema in (("as it is", False), ("averaged", True))
    }
    for share in SHARES:
        if (epoch, share) in table.about.branches:
            found[f"after {share:.0%}"] = ranking(table, after_cooldown(table, width, epoch, share)[seeds])
    return found


def page(tables: Mapping[str, Table]) -> str:
    """A row for each task, width and epoch: Spearman's correlation, and regret in brackets."""
    names = ["as it is", "averaged", *(f"after {share:.0%}" for share in SHARES)]
    lines = [f"| task | width | epoch | {' | '.join(names)} |", f"|{'---|' * (3 + len(names))}"]
    for task, table in tables.items():
        if not table.about.branches or len(complete_seeds(table, 1.0)) < 2:
            continue
        for width in table.about.widths:
            for epoch in sorted({epoch for epoch, _ in table.about.branches}):
                found = rankings(table, width, epoch)
                cells = [f"{found[n].rho:.2f} ({found[n].regret:.1f})" if n in found else "" for n in names]
                lines.append(f"| {task} | {width:g} | {epoch} of {table.about.max_t} | {' | '.join(cells)} |")
    return "\n".join(lines)
