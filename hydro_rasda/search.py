"""Where configurations come from: random sampling of the space, or one of Ray Tune's searchers, without Ray running."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from ray.tune.search import Searcher

from .problem import Trial
from .run import Run
from .space import Config, check_config, sample

SEARCHER_ROUNDS = 4
"""A searcher is asked for this many batches: it learns from the first rung of each before it gives the next."""


class Search(Protocol):
    """A source of trials that learns, or not, from what became of them."""

    def next_trials(self) -> list[Trial]:
        """The next batch; empty once there are no more."""
        ...

    def tell(self, number: int, epoch: int, score: float) -> None:
        """A trial's metric at a milestone."""
        ...

    def close(self, number: int, epoch: int, score: float) -> None:
        """A trial's last metric."""
        ...


class RandomSearch:
    """All configurations at once, sampled from one seed."""

    def __init__(self, space: Mapping[str, Any], num_samples: int, seed: int) -> None:
        self.trials = [Trial(number, config) for number, config in enumerate(sample(space, num_samples, seed))]
        self._given = False
        for trial in self.trials:
            check_config(trial.config)

    def next_trials(self) -> list[Trial]:
        given, self._given = self._given, True
        return [] if given else self.trials

    def tell(self, number: int, epoch: int, score: float) -> None:
        """Random sampling does not learn."""

    def close(self, number: int, epoch: int, score: float) -> None:
        """Random sampling does not learn."""


class SearcherSearch:
    """One of Ray Tune's searchers, asked for a batch at a time.

    A resumed run asks the searcher again and tells it again what it was told, so that it is where it was. Where it does
    not repeat its suggestions (it has no seed), the trials of the journal count, and it goes on without them.
    """

    def __init__(self, searcher: Searcher, space: Mapping[str, Any], run: Run) -> None:
        metric, num_samples = run.settings.metric, run.settings.num_samples
        searcher.set_search_properties(metric, run.settings.mode, dict(space))
        self._searcher, self._space, self._metric, self._store = searcher, space, metric, run.store
        self._left, self._given, self._batch = num_samples, 0, -(-num_samples // SEARCHER_ROUNDS)
        self._forgotten: set[int] = set()

    def next_trials(self) -> list[Trial]:
        first, wanted = self._given, min(self._batch, self._left)
        suggested: list[Config] = []
        while len(suggested) < wanted:
            config = self._suggest(first + len(suggested))
            if config is None:
                break
            suggested.append(config)
        recorded = self._store.once(f"search/from-{first}", lambda: suggested).value
        self._left -= len(recorded)
        self._given += len(recorded)
        return [Trial(first + i, self._agree(first + i, suggested[i : i + 1], kept)) for i, kept in enumerate(recorded)]

    def _suggest(self, number: int) -> Config | None:
        suggestion = self._searcher.suggest(_id(number))
        if suggestion is None or suggestion == Searcher.FINISHED:
            return None
        config = _merged(self._space, suggestion)
        check_config(config)
        return config

    def _agree(self, number: int, suggested: list[Config], recorded: Config) -> Config:
        """The configuration that the journal has, as the searcher gave it where it gave the same."""
        if suggested and json.loads(json.dumps(suggested[0], default=_name)) == recorded:
            return suggested[0]
        warnings.warn(
            f"the searcher does not repeat its suggestion for trial {number}: give it a seed, so that it learns from "
            "the trials before the break, too",
            stacklevel=2,
        )
        self._forgotten.add(number)
        if suggested:
            self._searcher.on_trial_complete(_id(number), error=True)
        return recorded

    def tell(self, number: int, epoch: int, score: float) -> None:
        if number not in self._forgotten and math.isfinite(score):
            self._searcher.on_trial_result(_id(number), self._result(epoch, score))

    def close(self, number: int, epoch: int, score: float) -> None:
        if number in self._forgotten:
            return
        if math.isfinite(score):
            self._searcher.on_trial_complete(_id(number), result=self._result(epoch, score))
        else:
            self._searcher.on_trial_complete(_id(number), error=True)

    def _result(self, epoch: int, score: float) -> dict[str, Any]:
        # BOHB reads its budget from where Ray's own HyperBandForBOHB puts it.
        return {self._metric: score, "training_iteration": epoch, "hyperband_info": {"budget": epoch}}


def _id(number: int) -> str:
    return f"trial-{number}"


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


def _merged(space: Mapping[str, Any], suggestion: Mapping[str, Any]) -> Config:
    """The suggestion, with the constants of the space, which some searchers leave out."""
    config: Config = {}
    for key, value in {**space, **suggestion}.items():
        if key in suggestion and isinstance(suggestion[key], Mapping):
            config[key] = _merged(space.get(key, {}), suggestion[key])
        else:
            config[key] = copy.deepcopy(suggestion.get(key, value))
    return config
