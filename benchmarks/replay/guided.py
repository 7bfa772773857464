"""A policy that learns from the long trainings which configurations are worth the next ones.

A first few are swept long. A Gaussian process over the configurations then says which of the others promise most;
they join, a few at a time, on the same terms. A configuration that the sweep dropped counts as no better than the worst
that it kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.replay.policies import Search, best_of, to_the_end
from benchmarks.replay.shares import swept_by
from benchmarks.replay.truth import Floats

LENGTHS = {"lr": 0.25, "momentum": 0.5, "schedule": 1.0, "batch_size": 1.5, "warmup": 0.7}
"""Over which share of a key's range scores stay alike; between two choices, over how many such steps."""
NOISE = 0.3


@dataclass(frozen=True)
class Guided:
    """See the module.

    Attributes:
        width: Of the sweep's models.
        first: Share of the configurations that is swept first.
        batches: How many join each time.
        rungs: After which share of a training, and which share of those that joined together goes on.
        finalists: How many train at full size.
        early: How many join the first that are best after one epoch, which all then train; the model knows the ranks
            after that epoch as well, and so learns whether they say anything of the end.
    """

    width: float
    first: float
    batches: tuple[int, ...]
    rungs: tuple[tuple[float, float], ...]
    finalists: int
    early: int = 0

    @property
    def name(self) -> str:
        """What it does, in short."""
        rungs = [f"{kept:.0%} go on at {share:.2f} T" for share, kept in self.rungs[:-1]]
        joining = " and ".join(map(str, self.batches))
        best = f" and the {self.early} best after an epoch" if self.early else ""
        tried = f"{self.first:.3g} of all{best} at width {self.width:g}, then {joining} by a model"
        return ", ".join([tried, *rungs, f"{self.finalists} to the end"])

    def __call__(self, search: Search) -> int:
        """The winner's number."""
        rows = features([search.tables.table.about.configs[n] for n in search.numbers])
        waiting, best = list(search.numbers), list[int]()
        if self.early:
            scores = {n: search.look(self.width, n, 1) for n in waiting}
            rows = np.column_stack([rows, normal_ranks(list(scores.values()))])
            best = best_of(scores, self.early)
        place = dict(zip(waiting, rows))
        joining = best + [n for n in waiting if n not in best][: round(self.first * len(waiting))]
        last: dict[int, float] = {}
        dropped: list[int] = []
        for count in (*self.batches, 0):
            waiting = [n for n in waiting if n not in joining]
            kept = swept_by(search, self.width, joining, self.rungs)
            last |= kept
            dropped += [n for n in joining if n not in kept]
            joining = self._next(place, last, dropped, waiting)[:count]
        return to_the_end(search, best_of(last, self.finalists))

    def _next(
        self, place: Mapping[int, Floats], last: Mapping[int, float], dropped: Sequence[int], waiting: Sequence[int]
    ) -> list[int]:
        """Those that wait, most promising first."""
        if not waiting:
            return []
        values = normal_ranks([*last.values(), *([min(last.values())] * len(dropped))])
        known = np.array([place[n] for n in [*last, *dropped]])
        promise = predicted(known, values, np.array([place[n] for n in waiting]))
        return best_of(dict(zip(waiting, promise.tolist())), len(waiting))


def features(configs: Sequence[dict[str, Any]]) -> Floats:
    """Places of configurations [C, D] such that a distance of 1 is far."""
    columns = [
        _scaled(np.log([c["lr"] / (1 - c.get("momentum", 0.0)) for c in configs])) / LENGTHS["lr"],
        _scaled(np.array([c.get("momentum", c.get("beta1", 0.0)) for c in configs])) / LENGTHS["momentum"],
        np.array([c["schedule"] == "cosine" for c in configs]) / LENGTHS["schedule"],
        np.log2([c["batch_size"] for c in configs]) / LENGTHS["batch_size"],
        _scaled(np.array([float(c.get("warmup_epochs", 0)) for c in configs])) / LENGTHS["warmup"],
    ]
    return np.stack(columns, 1).astype(np.float64)


def _scaled(values: np.ndarray) -> Floats:
    spread = values.max() - values.min()
    scaled: Floats = (values - values.min()) / (spread if spread > 0 else 1.0)
    return scaled


def normal_ranks(values: Sequence[float]) -> Floats:
    """Standard normal scores of the ranks (Blom 1958), equal values sharing theirs: scales differ, orders do not."""
    array = np.array(values)
    _, places, counts = np.unique(array, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return np.array([NormalDist().inv_cdf((rank - 0.375) / (len(array) + 0.25)) for rank in ranks])


def predicted(known: Floats, values: Floats, asked: Floats) -> Floats:
    """Mean of a Gaussian process of unit variance at the places that are asked for."""

    def kernel(a: Floats, b: Floats) -> Floats:
        similar: Floats = np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))
        return similar

    weights = np.linalg.solve(kernel(known, known) + NOISE**2 * np.eye(len(known)), values)
    mean: Floats = kernel(asked, known) @ weights
    return mean
