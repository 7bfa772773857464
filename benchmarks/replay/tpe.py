"""Optuna's TPE with its successive-halving pruner, on the configurations of a replay table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.replay.policies import REDUCTION_FACTOR, Search, best_of
from benchmarks.replay.table import Config
from hydro_rasda.schedulers import milestones

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

STARTUP = 10
"""Configurations before TPE has a model, as Optuna's default."""


@dataclass(frozen=True)
class TPE:
    """Full-width trials that TPE proposes and `SuccessiveHalvingPruner` stops, at ASHA's rungs; the best that finished.

    TPE proposes a point of the whole space, the table has some configurations of it: the nearest that is left is
    trained, and TPE is told that one, not its proposal. The first ten are at random, as Optuna's are: the search's
    first. Compared with Optuna in the open space, this costs TPE what lies between the configurations, as it cannot
    come closer to a good one than its neighbour; and it favours TPE once most have been tried, as no trial is spent
    on what lies far from any. With all tried it stops, whatever is left of the budget.

    Attributes:
        budget: In full trainings. Once they are spent no further configuration begins; one that has begun goes on.
        seed: Of TPE's random numbers.
    """

    budget: float
    seed: int = 0

    @property
    def name(self) -> str:
        """What it does, in short."""
        return f"Optuna's TPE, halved at full size, {self.budget:g} trainings"

    def __call__(self, search: Search) -> int:
        """The winner's number."""
        configs = search.tables.table.about.configs
        study, space = _study(self.seed), distributions(configs)
        waiting, finished = list(search.numbers), dict[int, float]()
        while waiting and search.spent < self.budget:
            number = waiting[0]
            if len(search.numbers) - len(waiting) >= STARTUP:
                number = nearest(_proposed(study, space), {n: configs[n] for n in waiting}, space)
            waiting.remove(number)
            finished |= _tried(study, space, search, number)
        (winner,) = best_of(finished, 1)
        return winner


def distributions(configs: Sequence[Config]) -> dict[str, BaseDistribution]:
    """What configurations differ in, as Optuna samples it: `lr` by its logarithm, choices in no order.

    The bounds are the least and the largest value.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    space: dict[str, BaseDistribution] = {}
    for key in configs[0]:
        values = sorted({config[key] for config in configs})
        if isinstance(values[0], float):
            space[key] = FloatDistribution(values[0], values[-1], log=key == "lr")
        else:
            space[key] = CategoricalDistribution(values)
    return {key: distribution for key, distribution in space.items() if not distribution.single()}


def nearest(asked: Config, configs: Mapping[int, Config], space: Mapping[str, BaseDistribution]) -> int:
    """The number of the configuration that is closest to what is asked for, the first where several are.

    Squares of differences are summed: of a float's in shares of its range, on the scale that it is sampled on; of a
    choice's, 1 where it is another one.
    """

    from optuna.distributions import FloatDistribution

    def away(key: str, config: Config) -> float:
        distribution, one, other = space[key], asked[key], config[key]
        if not isinstance(distribution, FloatDistribution):
            return float(one != other)
        if distribution.log:
            return math.log(one / other) / math.log(distribution.high / distribution.low)
        return float((one - other) / (distribution.high - distribution.low))

    return min(configs, key=lambda n: sum(away(key, configs[n]) ** 2 for key in space))


def _study(seed: int) -> Study:
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            'TPE is replayed by Optuna, which is missing: pip install "hydro-rasda[searchers]"'
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION_FACTOR)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)


def _proposed(study: Study, space: dict[str, BaseDistribution]) -> Config:
    """A point of the space. Its trial counts as failed, so that TPE learns nothing from what was never trained."""
    from optuna.trial import TrialState

    trial = study.ask(space)
    study.tell(trial, state=TrialState.FAIL)
    return trial.params


def _tried(study: Study, space: dict[str, BaseDistribution], search: Search, number: int) -> dict[int, float]:
    """Train a configuration to where it is pruned; its score by its number if it comes to the end."""
    from optuna.trial import TrialState

    config: dict[str, Any] = search.tables.table.about.configs[number]
    study.enqueue_trial({key: config[key] for key in space})
    trial = study.ask(space)
    score = -math.inf
    for epoch in milestones(1, search.max_t, REDUCTION_FACTOR):
        score = search.look(1.0, number, epoch)
        trial.report(score, epoch)
        if epoch < search.max_t and trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
            return {}
    study.tell(trial, score)
    return {number: score}
