"""A table of learning curves: the scores of every configuration of a task after every epoch, at several widths.

A policy that chooses configurations can be replayed on it in milliseconds, because it looks up scores and trains
nothing.

One file `NAME.npz` for each task:

- `scores` [width, seed, config, epoch, metric], float32 with mantissas of 14 bits: the metrics of `About.metrics`. NaN
  if a cell is not recorded, and from the first epoch on whose training loss was not finite.
- `seconds` [width, seed, config], float32: CPU seconds of one thread for a training to the end with one evaluation an
  epoch. Members of a fused group share theirs evenly. NaN says that a cell is not recorded.
- `cooled` [width, seed, config, branch, metric], float32, if branches are recorded: the scores and losses of the
  three splits after a cooldown (see `About.branches`). A branch does not change the training itself.
- `about`: JSON of an `About`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hydro_rasda.training.best_weights import FAR_OFF, TOLERANCE

Split = Literal["train", "validation", "test"]
Config = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "results" / "replay"
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
METRICS = (
    "running_loss",
    *(f"{split}_{what}{ema}" for ema in ("", "_ema") for what in ("score", "loss") for split in SPLITS),
)
"""`running_loss` is the mean loss of an epoch's training batches, which `tune` reports as `train_loss`. The others are
measured after the epoch. "_ema" stands for averaged weights. "train" is measured on as many training examples as there
are validation examples."""
COOLED = tuple(f"{split}_{what}" for what in ("score", "loss") for split in SPLITS)
"""Metrics of a branch, measured with its last step's weights."""
SHARES = (0.1, 0.25, 0.5)
"""Lengths of cooldowns, as shares of the epochs before. The longest is used only after one or two epochs."""


def branches_of(max_t: int) -> list[tuple[int, float]]:
    """Return where trainings branch off into a cooldown: (after this many epochs, for this share of them).

    The epochs are a sweep's rungs and their doubles, before the end.

    >>> branches_of(4)
    [(1, 0.1), (1, 0.25), (1, 0.5), (2, 0.1), (2, 0.25), (2, 0.5), (3, 0.1), (3, 0.25)]
    """
    epochs = sorted({factor * 3**k for factor in (1, 2) for k in range(max_t) if factor * 3**k < max_t})
    return [(epoch, share) for epoch in epochs for share in SHARES if share < max(SHARES) or epoch <= 2]


@dataclass(frozen=True)
class About:
    """Description of a table.

    Attributes:
        max_t: Epochs of a full training.
        widths: Widths of the models, as shares of the full width, in the order of the table.
        seeds: Seeds of initial weights and the order of examples, in the order of the table.
        environments: Hardware and versions with which cells were recorded.
        branches: Cooldowns (epochs, share), in the order of the table. A cooldown is a branch of the training after
            `epochs`, which lasts for `share` of them. In it, the learning rate falls linearly from the schedule's
            value to 0. Empty in tables that were recorded before there were branches.
    """

    task: str
    mode: Literal["min", "max"]
    max_t: int
    configs: list[Config]
    widths: list[float]
    seeds: list[int]
    metrics: list[str] = field(default_factory=lambda: list(METRICS))
    environments: list[dict[str, Any]] = field(default_factory=list)
    branches: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Branches that were read from JSON are lists, because JSON has no tuples.
        object.__setattr__(self, "branches", [(epoch, share) for epoch, share in self.branches])


@dataclass(frozen=True)
class Table:
    """Learning curves of one task; see the module for shapes."""

    about: About
    scores: NDArray[np.float32]
    seconds: NDArray[np.float32]
    cooled: NDArray[np.float32]

    @property
    def recorded(self) -> NDArray[np.bool_]:
        """Return which cells are recorded: [width, seed, config]."""
        return np.isfinite(self.seconds)

    def complete(self, width: float, seed: int) -> bool:
        """Tell whether all configurations are recorded at a width with a seed."""
        about = self.about
        if width not in about.widths or seed not in about.seeds:
            return False
        return bool(self.recorded[about.widths.index(width), about.seeds.index(seed)].all())

    def curves(
        self, width: float, split: Split = "validation", *, ema: bool = False, loss: bool = False
    ) -> NDArray[np.float32]:
        """Return the scores of all configurations at a width: [seed, config, epoch].

        Args:
            width: The width as a share of the full one.
            split: Examples that are scored.
            ema: If True, return the scores of averaged weights.
            loss: If True, return the loss rather than the score. They differ if the score is an accuracy.
        """
        name = f"{split}_{'loss' if loss else 'score'}{'_ema' if ema else ''}"
        curves: NDArray[np.float32] = self.scores[self._at(width), ..., self.about.metrics.index(name)]
        return curves

    def after_cooldown(
        self, width: float, epoch: int, share: float, split: Split = "validation", *, loss: bool = False
    ) -> NDArray[np.float32]:
        """Return the scores of all configurations at a width after a cooldown from an epoch: [seed, config]."""
        branch = self.about.branches.index((epoch, share))
        metric = COOLED.index(f"{split}_{'loss' if loss else 'score'}")
        cooled: NDArray[np.float32] = self.cooled[self._at(width), ..., branch, metric]
        return cooled

    def score(
        self, width: float, seed: int, config: int, epoch: int, split: Split = "validation", ema: bool = False
    ) -> float:
        """Return a score after `epoch` epochs (1 to `max_t`); NaN if the cell is not recorded or has diverged."""
        if not 1 <= epoch <= self.about.max_t:
            raise ValueError(f"epoch is {epoch}, but must be one of 1 to {self.about.max_t}")
        return float(self.curves(width, split, ema=ema)[self.about.seeds.index(seed), config, epoch - 1])

    def cost(self, width: float) -> float:
        """Return the cost of a training at a width, in trainings at full width: a ratio of median CPU seconds."""
        at, full = self.seconds[self._at(width)], self.seconds[self._at(1.0)]
        return float(np.nanmedian(at) / np.nanmedian(full))

    def _at(self, width: float) -> int:
        if width not in self.about.widths:
            raise ValueError(f"width is {width}, but must be one of {self.about.widths} of table {self.about.task!r}")
        return self.about.widths.index(width)


def empty(about: About) -> Table:
    """Make a table in which no cell is recorded."""
    shape = (len(about.widths), len(about.seeds), len(about.configs))
    scores = np.full((*shape, about.max_t, len(about.metrics)), np.nan, np.float32)
    cooled = np.full((*shape, len(about.branches), len(COOLED)), np.nan, np.float32)
    return Table(about, scores, np.full(shape, np.nan, np.float32), cooled)


def widened(table: Table, widths: Sequence[float], seeds: Sequence[int], environment: Mapping[str, Any]) -> Table:
    """Return the same table with room for further widths and seeds, which this environment will record."""
    about = table.about
    environments = [*about.environments, *([] if environment in about.environments else [dict(environment)])]
    all_widths, all_seeds = sorted({*about.widths, *widths}), sorted({*about.seeds, *seeds})
    wider = empty(About(**{**asdict(about), "widths": all_widths, "seeds": all_seeds, "environments": environments}))
    place = np.ix_([all_widths.index(w) for w in about.widths], [all_seeds.index(s) for s in about.seeds])
    wider.scores[place], wider.seconds[place], wider.cooled[place] = table.scores, table.seconds, table.cooled
    return wider


def load(name: str, folder: Path = FOLDER) -> Table:
    """Read a task's table.

    Raises:
        FileNotFoundError: if there is none. The message says how to record it.
    """
    path = folder / f"{name}.npz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; `python -m benchmarks.replay record {name}` records it")
    with np.load(path) as archive:
        about, seconds = About(**json.loads(str(archive["about"]))), archive["seconds"]
        cooled = archive["cooled"] if "cooled" in archive else np.empty((*seconds.shape, 0, len(COOLED)), np.float32)
        return Table(about, archive["scores"], seconds, cooled)


def recorded(folder: Path = FOLDER) -> dict[str, Table]:
    """Read all tables of a folder, by task."""
    return {path.stem: load(path.stem, folder) for path in sorted(folder.glob("*.npz"))}


def sample_folder(sample: int, folder: Path = FOLDER) -> Path:
    """Return the folder for tables of the configurations that `tune` samples with another seed than 0."""
    return folder / f"sample-{sample}"


def samples(folder: Path = FOLDER) -> dict[int, dict[str, Table]]:
    """Read all tables: `samples(folder)[seed that sampled the configurations][task]`."""
    others = sorted(folder.glob("sample-*"))
    return {0: recorded(folder), **{int(other.name.split("-")[1]): recorded(other) for other in others}}


def pooled(folder: Path = FOLDER) -> dict[str, Table]:
    """Read tables by task, with the configurations of all samples that are recorded at the same widths and seeds."""
    first, *others = samples(folder).values()
    return {
        name: joined([table, *(other[name] for other in others if name in other and _alike(table, other[name]))])
        for name, table in first.items()
    }


def _alike(table: Table, other: Table) -> bool:
    same = all(getattr(table.about, name) == getattr(other.about, name) for name in ("widths", "seeds", "branches"))
    return same and np.array_equal(table.recorded.all(-1), other.recorded.all(-1))


def joined(tables: Sequence[Table]) -> Table:
    """Return one table with the configurations of several tables, in their order. All else is alike in the tables."""
    abouts = [table.about for table in tables]
    environments = [told for about in abouts for told in about.environments]
    about = replace(
        abouts[0],
        configs=[config for about in abouts for config in about.configs],
        environments=[told for i, told in enumerate(environments) if told not in environments[:i]],
    )
    return Table(
        about,
        np.concatenate([table.scores for table in tables], 2),
        np.concatenate([table.seconds for table in tables], 2),
        np.concatenate([table.cooled for table in tables], 2),
    )


def save(table: Table, folder: Path = FOLDER) -> None:
    """Write a table, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.about.task}.npz"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        about = np.array(json.dumps(asdict(table.about)))
        scores, seconds, cooled = map(_rounded, (table.scores, table.seconds, table.cooled))
        np.savez_compressed(file, about=about, scores=scores, seconds=seconds, cooled=cooled)
    os.replace(partial, path)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to 14 bits of mantissa, a relative error of 3e-5, because the other bits are noise, and do not compress."""
    bits = values.view(np.uint32)
    cut = ((bits + np.uint32(1 << 8)) & np.uint32(0xFFFFFFFF ^ ((1 << 9) - 1))).view(np.float32)
    return np.where(np.isfinite(values), cut, np.float32(np.nan))


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Keep = Literal["last", "best"]
"""The weights that are handed back: those after the last epoch, or those that `tune` keeps."""


def goodness(
    table: Table, width: float, split: Split = "validation", *, ema: bool = False, keep: Keep = "last"
) -> Floats:
    """Return learning curves [seed, config, epoch] in which higher is better, and -inf means diverged.

    Args:
        ema: If True, use averaged weights.
        keep: If "best", each epoch has the score of the weights that `tune` keeps up to there. These are averaged
            weights or, in the end, the weights that training left, if they validate better.
    """
    if keep == "last":
        return better_is_higher(table, table.curves(width, split, ema=ema))
    own, averaged = (goodness(table, width, ema=ema) for ema in (False, True))
    left = np.zeros(own.shape, bool)
    left[..., -1] = own[..., -1] > averaged[..., -1]
    counts = np.where(left, goodness(table, width, split), goodness(table, width, split, ema=True))
    return np.take_along_axis(counts, _kept_so_far(np.where(left, own, averaged)), -1)


def after_cooldown(table: Table, width: float, epoch: int, share: float) -> Floats:
    """Return validation scores after a cooldown, [seed, config], in which higher is better."""
    return better_is_higher(table, table.after_cooldown(width, epoch, share))


def better_is_higher(table: Table, scores: NDArray[np.float32]) -> Floats:
    """Convert scores of a table: negate them if less is better, and replace NaN (diverged) by -inf."""
    values = scores.astype(np.float64)
    return np.where(np.isnan(values), -np.inf, values if table.about.mode == "max" else -values)


def _kept_so_far(curves: Floats) -> Ints:
    """Return, for each epoch, the place of the epoch that `tune` keeps up to there (`training.best_weights`)."""
    first, top, kept = curves[..., 0], curves[..., 0], np.zeros(curves.shape, int)
    for epoch in range(1, curves.shape[-1]):
        score = curves[..., epoch]
        first = np.where(np.isfinite(first), first, score)
        top = np.maximum(top, score)
        with np.errstate(invalid="ignore"):  # a training may have diverged from the first epoch on
            gain = np.minimum(top - first, FAR_OFF * abs(top))
            keeps = np.isfinite(score) & (top - score <= TOLERANCE * gain)
        kept[..., epoch] = np.where(keeps, epoch, kept[..., epoch - 1])
    return kept


def complete_seeds(table: Table, *widths: float) -> list[int]:
    """Return the places of the seeds with which all configurations are recorded at all of these widths."""
    seeds = enumerate(table.about.seeds)
    return [place for place, seed in seeds if all(table.complete(width, seed) for width in widths)]


def truth(table: Table, seeds: Sequence[int], split: Split = "validation", keep: Keep = "last") -> Floats:
    """Return, for each configuration, the mean over seeds (places in the table) of its final score at full width."""
    last: Floats = goodness(table, 1.0, split, keep=keep)[list(seeds), :, -1].mean(0)
    return last


def seed_spread(table: Table, seeds: Sequence[int], split: Split = "validation", keep: Keep = "last") -> float:
    """Return the standard deviation between seeds of the final score at full width, pooled over the better quarter.

    It is NaN if there is only one seed.
    """
    if len(seeds) < 2:
        return math.nan
    good = best_first(truth(table, seeds, split, keep))[: max(4, len(table.about.configs) // 4)]
    last = goodness(table, 1.0, split, keep=keep)[list(seeds), :, -1]
    variances = last[:, good].var(0, ddof=1)
    return float(np.sqrt(variances[np.isfinite(variances)].mean()))


def best_first(scores: Floats) -> Ints:
    """Return the places of scores, best first. If scores are equal, the lower place comes first, as in `tune`."""
    return np.argsort(-scores, kind="stable")


def halvings(configs: int, count: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield random halves of `configs` configurations, and the rest, in random order; the same in every call."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        order = generator.permutation(configs)
        yield order[: configs // 2], order[configs - configs // 2 :]
