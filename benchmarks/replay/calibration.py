"""How much a surrogate, and a part of the full-size training, say about how finalists end: standard deviations.

What a race that weighs both by their precision has to know. Among the eight that end best at 1/8 of the width, the
difference between what is foreseen and the score in the end at full width, less its mean over the eight: who wins is
decided by differences alone. In standard deviations between seeds. Scores in the end are those of the weights
themselves, whether or not averages foresee them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.recall import RESAMPLES, SHARE
from benchmarks.replay.table import Table
from benchmarks.replay.truth import Floats, Ints, Keep, best_first, complete_seeds, goodness, seed_spread, subsets

FINALISTS = 8
LOOKS = (1 / 9, 1 / 3, 2 / 3)


@dataclass(frozen=True)
class Look:
    """What is foreseen after a part of the full-size training; standard deviations of what is left.

    Attributes:
        alone: By the score there.
        change: By that and what the surrogate's score changed by from there on, as `tune` foresees.
        share: Of the change, that leaves least.
        shared: By the score there and this share of the change.
    """

    alone: float
    change: float
    share: float
    shared: float


def apart(table: Table, keep: Keep = "last") -> tuple[float, float]:
    """How far finalists lie apart in the end, and how far their differences from their surrogates' last scores."""
    full, narrow = (goodness(table, width, keep=keep)[..., -1] for width in (1.0, 1 / 8))
    unit = seed_spread(table, complete_seeds(table, 1.0), keep=keep)
    ends, left = (
        np.array([values[seed, eight] for seed, eight in finalists(table, keep)]) for values in (full, full - narrow)
    )
    return _deviation(ends) / unit, _deviation(left) / unit


def look(table: Table, share: float, *, ema: bool = False, keep: Keep = "last") -> Look:
    """See `Look`.

    Args:
        table: Where to look.
        share: Of the training, at which the score is taken.
        ema: Whether averaged weights foresee: at full width, and the surrogate's change.
        keep: Which epoch's weights count.
    """
    at = math.ceil(share * table.about.max_t) - 1
    end = goodness(table, 1.0, keep=keep)[..., -1]
    full, narrow = (goodness(table, width, ema=ema, keep=keep) for width in (1.0, 1 / 8))
    runs = list(finalists(table, keep))
    left = _centred(np.array([end[s, eight] - full[s, eight, at] for s, eight in runs]))
    change = _centred(np.array([narrow[s, eight, -1] - narrow[s, eight, at] for s, eight in runs]))
    best = float((left * change).sum() / max((change**2).sum(), 1e-12))
    unit = seed_spread(table, complete_seeds(table, 1.0), keep=keep)
    alone, whole, shared = (_deviation(left - part * change) / unit for part in (0.0, 1.0, best))
    return Look(alone, whole, best, shared)


def finalists(table: Table, keep: Keep) -> Iterator[tuple[int, Ints]]:
    """For each seed and many halves of the configurations, the eight that end best at 1/8 of the width."""
    narrow, full = (goodness(table, width, keep=keep) for width in (1 / 8, 1.0))
    for seed in complete_seeds(table, 1 / 8, 1.0):
        for half in subsets(len(table.about.configs), SHARE, RESAMPLES):
            eight = half[best_first(narrow[seed, half, -1])[:FINALISTS]]
            if np.isfinite(full[seed, eight]).all() and np.isfinite(narrow[seed, eight]).all():
                yield seed, eight


def _centred(values: Floats) -> Floats:
    centred: Floats = values - values.mean(1, keepdims=True)
    return centred


def _deviation(values: Floats) -> float:
    return float(np.sqrt(_centred(values).var(1, ddof=1).mean()))


def page(tables: Mapping[str, Table], keep: Keep = "last") -> str:
    """Two rows for each task: weights themselves, and averaged ones."""
    head = ["task", "weights", "ends", "by surrogate"]
    for share in LOOKS:
        head += [f"{share:.2f} T", "and change", "best share", "with it"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, table in tables.items():
        if len(complete_seeds(table, 1 / 8, 1.0)) > 1:
            ends, left = apart(table, keep)
            for ema in (False, True):
                cells = [name, "averaged" if ema else "as they are", f"{ends:.2f}", f"{left:.2f}"]
                for share in LOOKS:
                    found = look(table, share, ema=ema, keep=keep)
                    cells += [f"{v:.2f}" for v in (found.alone, found.change, found.share, found.shared)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
