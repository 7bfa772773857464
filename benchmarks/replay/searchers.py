"""Searchers on recorded configurations: a suggestion counts as the nearest configuration that is not tried yet.

Distances are those of the unit cube, with learning rates on a logarithmic scale; another choice is a distance of 1.
As in `tune`, a quarter of the configurations is asked for at a time, and the searcher learns the scores of the first
rung, of the configurations that were tried in place of its suggestions.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from ray.tune.search.optuna import OptunaSearch

from benchmarks.replay.policies import REDUCTION_FACTOR, Search, today
from hydro_rasda import choice, loguniform, uniform
from hydro_rasda.config import TuneConfig
from hydro_rasda.schedulers import Range, first_milestone
from hydro_rasda.search import SEARCHER_ROUNDS, named_searcher, prepare
from hydro_rasda.sweep_config import SearcherName

Config = Mapping[str, Any]
Domains = Mapping[str, Range | Sequence[Any]]
FEW = 8
"""Different values up to which a key counts as a choice."""


@dataclass(frozen=True)
class Searched:
    """Today's rule on a share of the configurations, which a searcher chooses.

    Attributes:
        searcher: Its name; "random" suggests uniform points, so that all searchers have the same way to the table.
    """

    searcher: SearcherName
    share: float = 1 / 2

    def __call__(self, search: Search) -> int:
        """The winner's number."""
        search.numbers = [number for number, _ in self.tried(search)]
        return today(search)

    def tried(self, search: Search) -> Iterator[tuple[int, Config]]:
        """Yield the configurations that are tried, each with the suggestion that it stands for."""
        configs, left = search.tables.table.about.configs, [*search.numbers]
        count = round(self.share * len(left))
        domains = domains_of([configs[number] for number in left])
        asked = _searcher(self.searcher, domains, zlib.crc32(repr(left).encode()))
        rung = first_milestone(1, search.max_t, REDUCTION_FACTOR, search.warmup)
        batch, found = -(-count // SEARCHER_ROUNDS), list[int]()
        for place in range(count):
            if place % batch == 0:
                for number in found[-batch:]:
                    score = search.look(1 / 8, number, rung)
                    told = {key: configs[number][key] for key in domains}
                    asked.add_evaluated_point(told, score, error=not math.isfinite(score))
            suggested = asked.suggest(f"{place}")
            asked.on_trial_complete(f"{place}", error=True)
            found.append(min(left, key=lambda number: distance(suggested, configs[number], domains)))
            left.remove(found[-1])
            yield found[-1], suggested


def domains_of(configs: Sequence[Config]) -> dict[str, Range | list[Any]]:
    """The values of each key in which configurations differ: between the least and the greatest, or a list of few."""
    domains: dict[str, Range | list[Any]] = {}
    for key in configs[0]:
        values = list(dict.fromkeys(config[key] for config in configs))
        if 1 < len(values) <= FEW:
            domains[key] = values
        elif len(values) > 1:
            domains[key] = Range(min(values), max(values), log=key == "lr")
    return domains


def distance(config: Config, other: Config, domains: Domains) -> float:
    """Distance of two configurations in the unit cube; another choice counts as 1."""
    apart = [
        of.share(config[key]) - of.share(other[key]) if isinstance(of, Range) else float(config[key] != other[key])
        for key, of in domains.items()
    ]
    return math.hypot(*apart)


def _searcher(name: SearcherName, domains: Domains, seed: int) -> Any:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: _domain(of) if isinstance(of, Range) else choice(list(of)) for key, of in domains.items()}
    settings = TuneConfig(metric="score", mode="max", seed=seed)
    if name != "random":
        return named_searcher(name, space, settings)
    searcher = OptunaSearch(sampler=optuna.samplers.RandomSampler(seed))
    prepare(searcher, space, settings.comparison.objectives)
    return searcher


def _domain(of: Range) -> Any:
    return (loguniform if of.log else uniform)(of.low, of.high)
