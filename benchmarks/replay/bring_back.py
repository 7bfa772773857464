"""Bringing back what the sweep dropped, where full size contradicts the surrogates: tried, and not worth its price.

After the first look at full size, a ridge regression over the finalists says by how much full size differs from the
surrogates, and so which of the configurations that were dropped would be ahead there. They join the race.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.replay.guided import features
from benchmarks.replay.policies import TOP_K, Search, best_of, first_look, race, rungs, sweep
from benchmarks.replay.truth import Floats, goodness
from hydro_rasda.schedulers import agreement

NARROW = 1 / 8
RIDGE = 1.0
"""Weight of the prior that widths differ by nothing but a constant, in observations of one standard deviation."""


@dataclass(frozen=True)
class BringBack:
    """`tune`, with some more that join its race after the first look.

    Attributes:
        count: How many.
        by: What the difference between the widths may depend on: the learning rate (that of SGD over 1 less its
            momentum), that and all else that is sampled and the gap between training and validation, or nothing.
        below: Only where the finalists' rank correlation between widths, after the first look, is below this.
    """

    count: int
    by: Literal["rate", "all", "nothing"]
    below: float = 2.0

    def __call__(self, search: Search) -> int:
        """The winner's number."""
        finalists = sweep(search, NARROW, TOP_K)
        stop = first_look(search)
        full = {n: search.look(1.0, n, stop, latest=True) for n in finalists}
        swept_to = min(stop, *(search.reached(n, NARROW) for n in finalists))
        scores = {n: (search.look(NARROW, n, swept_to, latest=True), full[n]) for n in full}
        agreed = agreement(stop, scores, "max").rho
        joined = self._joined(search, full) if not agreed >= self.below else []
        return race(search, [*finalists, *joined])

    def _joined(self, search: Search, full: dict[int, float]) -> list[int]:
        """Those dropped that are expected to be best at full size, as far as each was swept."""
        first = rungs(search.max_t, search.warmup)[0]
        narrow = {n: search.look(NARROW, n, first, latest=True) for n in search.numbers}
        differ = {n: full[n] - narrow[n] for n in full if np.isfinite(full[n] - narrow[n])}
        dropped = [n for n in search.numbers if n not in full and np.isfinite(narrow[n])]
        if not differ:
            return []
        rows = dict(zip(search.numbers, self._rows(search, first)))
        known, asked = (np.array([rows[n] for n in those]) for those in (differ, dropped))
        middle, values = known.mean(0), np.array([*differ.values()])
        spread = (known - middle).T @ (known - middle) + RIDGE * np.eye(known.shape[1])
        weights = np.linalg.solve(spread, (known - middle).T @ (values - values.mean()))
        more = (asked - middle) @ weights
        return best_of({n: narrow[n] + add for n, add in zip(dropped, more.tolist())}, self.count)

    def _rows(self, search: Search, epoch: int) -> Floats:
        """What each configuration is described by: [C, D]."""
        configs = [search.tables.table.about.configs[n] for n in search.numbers]
        if self.by == "nothing":
            return np.zeros((len(configs), 1))
        found = features(configs)[:, : 1 if self.by == "rate" else None]
        if self.by == "all":
            found = np.column_stack([found, _gaps(search, search.numbers, epoch)])
        scale: Floats = found.std(0)
        standardized: Floats = (found - found.mean(0)) / np.where(scale > 0, scale, 1.0)
        return standardized


def _gaps(search: Search, numbers: Sequence[int], epoch: int) -> Floats:
    """By how much surrogates score better on training than on validation examples, after an epoch: [C]."""
    at = np.s_[search.seed, list(numbers), epoch - 1]
    parts = (goodness(search.tables.table, NARROW, split)[at] for split in ("train", "validation"))
    gaps: Floats = np.subtract(*parts)
    return np.nan_to_num(gaps, nan=0.0, posinf=0.0, neginf=0.0)
