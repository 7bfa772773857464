"""Sampling by structure: all structures alike, then more configurations of the better ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fusion.hyperparameters import KEYS, is_group
from hydro_rasda.branches import restricted
from hydro_rasda.objectives import Fits
from hydro_rasda.run.journal import name_of
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.strata import first_shares, later_shares
from hydro_rasda.search import RandomSearch, fitting_sample
from hydro_rasda.space import Config, check_config
from hydro_rasda.trial import Trial

OF_GROUPS = ("batch_size", "accumulate")
"""Keys of the library in which all trials of a fused group agree."""


class StructureSearch:
    """Half of the samples are spread over all structures, and the others go to the structures that did best.

    A structure is what the values of a configuration that are no floats say, without the library's own keys but for
    those of groups. All structures get the same rates and other floats (common random numbers), so that structures are
    compared rather than draws. A structure is as good as its best trial after the first rung.

    Each round's shares are kept in the journal: a run that goes on, or is given more samples, keeps the rounds that it
    had.
    """

    def __init__(self, space: Mapping[str, Any], run: Run, fits: Fits | None = None) -> None:
        settings = run.settings
        self._space, self._run, self._fits, self._round, self._given = space, run, fits, 0, 0
        drawn = RandomSearch(space, settings.num_samples, settings.seed, strategy=settings.race.strategy, fits=fits)
        found = {_text(structure): structure for trial in drawn.trials if (structure := structure_of(trial.config))}
        self._structures = [*found.values()] or [{}]
        self._trials: list[list[int]] = [[] for _ in self._structures]

    def next_trials(self) -> list[Trial]:
        key, store = f"search/structures-{self._round}", self._run.store
        if self._given >= self._run.settings.num_samples and not store.done(key):
            return []
        shares = store.once(key, self._shares).value
        trials: list[Trial] = []
        for index, count in shares:
            members = self._members(index, count)
            numbers = range(self._given + len(trials), self._given + len(trials) + len(members))
            trials += [Trial(number, config) for number, config in zip(numbers, members, strict=True)]
            self._trials[index] += numbers
        self._given, self._round = self._given + len(trials), self._round + 1
        return trials

    def _members(self, index: int, count: int) -> list[Config]:
        """The next configurations of a structure."""
        settings, before = self._run.settings, len(self._trials[index])
        own = restricted(self._space, self._structures[index])
        configs = fitting_sample(own, before + count, settings.seed, self._fits)[before : before + count]
        for config in configs:
            check_config(config, settings.race.strategy)
        return configs

    def _shares(self) -> list[tuple[int, int]]:
        left = self._run.settings.num_samples - self._given
        if not self._round:
            return first_shares(len(self._structures), left)
        at = self._run.settings.sweep_milestones[0]
        values = {n: self._run.values_at("surrogate", n, at) for numbers in self._trials for n in numbers}
        places = self._run.settings.comparison.places(values)
        best = {
            index: min((place for n in numbers if math.isfinite(place := places[n])), default=math.inf)
            for index, numbers in enumerate(self._trials)
            if numbers
        }
        shares = later_shares(best, left)
        self._run.say(f"the best {len(shares)} of {len(best)} structures get {left} more configurations")
        return shares

    def tell(self, number: int, epoch: int, score: float) -> None:
        """The journal tells."""

    def close(self, number: int, epoch: int, score: float) -> None:
        """The journal tells."""


def structure_of(config: Mapping[str, Any]) -> Config:
    """Return the part of a configuration in which trials of one structure agree.

    >>> structure_of({"lr": 0.1, "optimizer": "sgd", "depth": 3, "dropout": 0.1, "batch_size": 32})
    {'depth': 3, 'batch_size': 32}
    """
    return {
        name: value
        for name, value in config.items()
        if name in OF_GROUPS or not (name in KEYS or is_group(name) or isinstance(value, float | Mapping))
    }


def _text(structure: Config) -> str:
    return json.dumps(structure, default=name_of, sort_keys=True)
