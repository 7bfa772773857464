"""Sources of configurations: random samples of the space, or a searcher of Ray Tune, which needs no Ray cluster."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from fusion.streams import preserved_generators, seed_generators
from fusion.warn import warn
from hydro_rasda.common.argument_checks import require
from hydro_rasda.common.secret_masking import hide, restore, secrets_of
from hydro_rasda.common.seeds import derive_seed
from hydro_rasda.common.trial import Trial
from hydro_rasda.history.history import GROUP, KINDS_FROM, SWEEP_DECISION
from hydro_rasda.history.lines import Unit, jsonable
from hydro_rasda.problem.read_keys import is_plain
from hydro_rasda.records.optuna_study import quiet
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.sweep_rule import Stop, move_of
from hydro_rasda.settings.config import SEARCHERS, TuneConfig
from hydro_rasda.settings.objectives import Fits, Objectives, few_fit, refuse_if_none
from hydro_rasda.space.branches import (
    chosen,
    indexed,
    is_branching,
    is_nested,
    leaves,
    reachable,
    restricted,
    unknown_keys,
)
from hydro_rasda.space.domains import is_a, is_grid, plain, rounded, to_ray
from hydro_rasda.space.space import Config, check_config, check_value, sample

if TYPE_CHECKING:
    from ray.tune.search import Searcher

DRAWS = 100
"""At most `DRAWS * num_samples` configurations are drawn to find `num_samples` that meet the constraints."""

SEARCHER_ROUNDS = 4
"""Number of batches that a searcher gives. It learns from the first rung of each batch before it gives the next."""

_BATCH = "search/from-"


class Search(Protocol):
    """A source of trials. It may learn from their results."""

    planned: int  # number of trials that it expects to give in all
    given: list[Trial]  # the trials that it has given so far
    late: bool  # True if time was up before all configurations were drawn

    def next_trials(self) -> list[Trial]:
        """Return the next batch of trials; an empty list if there are no more."""
        ...

    def hear(self, key: str, unit: Unit) -> None:
        """Learn from a unit of the run's journal. A resumed run also passes the units of earlier processes."""
        ...

    def close(self, number: int) -> None:
        """Learn that a trial will not train any further in the sweep."""
        ...


class RandomSearch:
    """All configurations in one batch, sampled from one seed.

    Args:
        num_samples: See `sample`. It includes the configurations of `first`, unless the space has a grid, because a
            grid is tried in full.
        first: Known configurations, or parts of them, which are tried first. Missing keys are sampled.
        fits: Tells whether a configuration may be tried. If not, another one is drawn; points of a grid are left out
            instead. If `fits` is None, all configurations may be tried.
        strategy: `race.strategy`, which restricts the values of some keys; None if the library reads no keys.
        enough: Called with the number of configurations found; returns True if drawing must end because time is up.

    Attributes:
        late: True if time was up before enough configurations were drawn.
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        num_samples: int,
        seed: int,
        first: Sequence[Mapping[str, Any]] = (),
        strategy: str | None = "ddp",
        fits: Fits | None = None,
        enough: Callable[[int], bool] = lambda found: False,
    ) -> None:
        known = [_completed(space, config, derive_seed(seed, "first", i)) for i, config in enumerate(first)]
        for i, config in enumerate(known):
            check_config(config, strategy, f"sweep.first[{i}]")
        for i, config in enumerate(known if fits is not None else ()):
            rule = "one that meets `sweep.constraints`"
            require(fits is None or fits(config), f"sweep.first[{i}]", hide(config, secrets_of(space)), rule)
        sampled, is_grid, self.late = fitting_sample(space, num_samples, seed, fits, enough)
        configs = [*known, *(sampled if is_grid else sampled[: max(0, num_samples - len(known))])]
        self.trials = [Trial(number, config) for number, config in enumerate(configs)]
        self.planned, self.given = len(self.trials), list[Trial]()
        for trial in self.trials:
            check_config(trial.config, strategy)

    def recall(self, run: Run) -> None:
        """Give each trial that the run has recorded its recorded configuration. Make all trials known to the run."""
        self.trials = as_recorded(self.trials, run)
        run.known |= {trial.number: trial for trial in self.trials}

    def next_trials(self) -> list[Trial]:
        if self.given:
            return []
        self.given = self.trials
        return self.trials

    def hear(self, key: str, unit: Unit) -> None:
        """Do nothing, because random sampling does not learn."""

    def close(self, number: int) -> None:
        """Do nothing, because random sampling does not learn."""


def fitting_sample(
    space: Mapping[str, Any], wanted: int, seed: int, fits: Fits | None, enough: Callable[[int], bool]
) -> tuple[list[Config], bool, bool]:
    """Sample configurations until `wanted` of them fit, or until `DRAWS * wanted` have been drawn.

    `enough` is called with the number of configurations found so far. It returns True if time is up.

    Returns:
        The configurations; True if they are the fitting points of a grid, whose number may differ from `wanted`; True
        if time was up before enough were drawn.
    """
    sampled = sample(space, wanted, seed)
    drawn, is_grid = len(sampled), len(sampled) > wanted
    if fits is None:
        return sampled, is_grid, False
    fitting, more, late = list[Config](), sampled, False
    while more:
        for config in more:
            if len(fitting) == wanted and not is_grid:
                break
            if late := enough(len(fitting)):
                break
            fitting += [config] * fits(config)
        over = late or is_grid or len(fitting) >= wanted or drawn >= DRAWS * wanted
        # The same seed draws the earlier configurations again, so cut these off.
        more = [] if over else sample(space, min(2 * drawn, DRAWS * wanted), seed)[drawn:]
        drawn += len(more)
    refuse_if_none(bool(fitting), drawn)
    return fitting if is_grid else fitting[:wanted], is_grid, late


def check_first(first: Sequence[Mapping[str, Any]], space: Mapping[str, Any]) -> None:
    """Raise ValueError if an entry of `first` is neither a configuration of the space nor a part of one."""
    for i, config in enumerate(first):
        require(isinstance(config, Mapping), f"sweep.first[{i}]", config, "a configuration: a dict")
        for name, value in config.items():
            check_value(f"sweep.first[{i}][{name!r}]", value)
        unknown = unknown_keys(config, space)
        rule = f"of the keys of `space`, which has no {', '.join(unknown)}"
        require(not unknown, f"sweep.first[{i}]", hide(config, secrets_of(space)), rule)


def _completed(space: Mapping[str, Any], config: Mapping[str, Any], seed: int) -> Config:
    """Complete a part of a configuration. Missing keys are sampled, and a grid gives its first point."""
    (completed, *_) = sample(restricted(space, config), 1, seed)
    return completed


def check_searcher(searcher: object) -> None:
    """Raise ValueError unless this is a searcher of Ray Tune that is not wrapped in a `ConcurrencyLimiter`."""
    from ray.tune.search import ConcurrencyLimiter, Searcher

    rule = f"one of {SEARCHERS}, or one of Ray Tune's searchers, such as OptunaSearch()"
    require(isinstance(searcher, Searcher), "sweep.searcher", searcher, rule)
    rule = "the searcher that it wraps: `tune` asks for whole batches"
    require(not isinstance(searcher, ConcurrencyLimiter), "sweep.searcher", searcher, rule)


def prepare(searcher: Searcher, space: Mapping[str, Any], objectives: Objectives) -> None:
    """Tell a searcher the space, the metrics and their modes. Raise ValueError if it cannot search this space.

    If there are several metrics, only an `OptunaSearch` is accepted. A searcher that already has a space of its own is
    refused, because it would silently keep that space.
    """
    from ray.tune.search import Searcher

    several = len(objectives) > 1
    rule = "an `OptunaSearch`, or None, where `metric` is a list: no other one learns from several metrics"
    require(not several or type(searcher).__name__ == "OptunaSearch", "sweep.searcher", searcher, rule)
    _check_places(space)
    metric, mode = ([*each] if several else each[0] for each in zip(*objectives, strict=True))
    try:
        with quiet():  # an `OptunaSearch` makes its study here, and Optuna would log it
            told = searcher.set_search_properties(metric, mode, to_ray(indexed(space)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`space` cannot be searched by {type(searcher).__name__}: {error}") from error
    listens = type(searcher).set_search_properties is not Searcher.set_search_properties
    rule = "a new one without a space of its own: `tune` tells it `space`, `metric` and `mode`"
    require(told is not False or not listens, "sweep.searcher", searcher, rule)


def _check_places(space: Mapping[str, Any], where: str = "space") -> None:
    """Raise ValueError for a domain in a place where a searcher does not look, and for a key that it would split."""
    for key, value in space.items():
        if not isinstance(key, str) or "/" in key:
            raise ValueError(f"`{where}` has the key {key!r}, but a searcher needs names without '/'")
        place = f"{where}[{key!r}]"
        if is_nested(value):
            _check_places(value, place)
        elif is_branching(value):
            for i, branch in enumerate(value.categories):
                _check_places(branch, f"{place}[{i}]")
        else:
            held = value.categories if is_a(value, "Categorical") else value
            inner = leaves({key: [*held]}) if isinstance(held, list | tuple) else ()
            if any(is_a(leaf, "Domain") or is_grid(leaf) for _, leaf in inner):
                told = "holds a domain in a list or a choice, where a searcher does not look"
                raise ValueError(f"`{place}` {told}: give it a key of its own, or leave out `sweep.searcher`")


def named_searcher(name: str, space: Mapping[str, Any], settings: TuneConfig) -> Searcher | None:
    """Make the searcher of this name from a sampler of Optuna; return None for "random"."""
    if name == "random":
        return None
    needed = ["optuna", *{"gp": ["scipy"], "cma": ["cmaes"]}.get(name, [])]
    if missing := [package for package in needed if find_spec(package) is None]:
        told = f"`sweep.searcher` {name!r} needs {', '.join(missing)}, which is not there"
        raise ImportError(f"{told}: pip install 'hydro-rasda[searchers]'")
    from optuna import samplers
    from ray.tune.search.optuna import OptunaSearch

    several = settings.comparison.several
    rule = "another one where `metric` is a list: CMA-ES learns from one metric"
    require(name != "cma" or not several, "sweep.searcher", name, rule)
    seed = derive_seed(settings.seed, "searcher") % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns that some samplers are experimental
        make: Mapping[str, Callable[..., Any]] = {
            "tpe": partial(samplers.TPESampler, constant_liar=True),
            "gp": partial(samplers.GPSampler, warn_independent_sampling=False),
            "cma": partial(samplers.CmaEsSampler, warn_independent_sampling=False),
            "qmc": partial(samplers.QMCSampler, scramble=True, warn_independent_sampling=False),
        }
        sampler = make[name](seed=seed)
    searcher = OptunaSearch(sampler=sampler)
    prepare(searcher, space, settings.comparison.objectives)
    if name == "qmc":
        # Optuna infers the space from complete trials. Before there are any, the sampler would draw at random, so the
        # space is given here.
        drawn = OptunaSearch.convert_search_space(to_ray(indexed(space)))
        numeric = {key: of for key, of in drawn.items() if not hasattr(of, "choices")}
        sampler.infer_relative_search_space = lambda study, trial: numeric
    return searcher


class SearcherSearch:
    """Trials from a searcher of Ray Tune, one batch at a time.

    Most searchers learn only from complete trials. So when another batch is requested, the searcher is told that the
    trials of the previous batch are complete, although they have only reached their first milestone. It is told of
    later rungs only for the last of all batches.

    A resumed run repeats all requests and results, which brings the searcher to its earlier state. A searcher without a
    seed may suggest other configurations. Then the recorded trials count, and the searcher does not learn from them.
    """

    def __init__(
        self,
        searcher: Searcher,
        space: Mapping[str, Any],
        run: Run,
        fits: Fits | None = None,
        strategy: str | None = "ddp",
    ) -> None:
        """Take a searcher that `prepare` has told the space, the metric and the mode."""
        num_samples, self._run, self._fits, self._refused = run.settings.num_samples, run, fits, 0
        self._told_of_few = False
        self.planned, self.given = num_samples, list[Trial]()
        self._ids: dict[int, str] = {}
        self._searcher, self._space, self._metric = searcher, space, run.settings.metric
        self._left, self._batch, self.late = num_samples, -(-num_samples // SEARCHER_ROUNDS), False
        self._strategy = strategy
        self._seed, self._warned = run.settings.seed, False
        self._open: dict[int, tuple[int, float]] = {}
        self._hidden = secrets_of(space)

    def next_trials(self) -> list[Trial]:
        for number in sorted(self._open):
            self._close(number, *self._open[number])
        first, key = len(self.given), f"{_BATCH}{len(self.given)}"
        # A run that was given more samples repeats its first batches in their recorded sizes.
        known = self._run.store.units().get(key)
        is_new, wanted = known is None, len(known.value) if known is not None else min(self._batch, self._left)
        suggested: list[Config] = []
        # Seed the global generators: some searchers, such as TuneBOHB, draw from them, even if they were given a seed.
        with preserved_generators():
            seed_generators(derive_seed(self._seed, "search", first))
            while len(suggested) < wanted and (config := self._fitting(first + len(suggested), is_new)) is not None:
                suggested.append(config)
        if not suggested and known is None:
            return []
        recorded = self._run.unit(key, lambda: Unit([hide(config, self._hidden) for config in suggested])).value
        self._left -= len(recorded)
        found = [
            Trial(first + i, self._agree(first + i, suggested[i : i + 1], kept)) for i, kept in enumerate(recorded)
        ]
        self.given += found
        self._run.known |= {trial.number: trial for trial in found}
        return found

    def _fitting(self, number: int, is_new: bool) -> Config | None:
        """Return the next suggestion that fits; None if there is none. Report suggestions that do not fit as failed.

        If `is_new` is True, also return None if time is up. Otherwise, an earlier process has drawn the batch in time.
        """
        for _ in range(DRAWS * self._run.settings.num_samples):
            if number and is_new and self._fits is not None and self._run.out_of_time("sweep"):
                self.late = True
                return None
            config = self._suggest(number)
            if config is None or self._fits is None or self._fits(config):
                return config
            self._searcher.on_trial_complete(self._id(number), error=True)
            self._refused += 1
            # A searcher gives only one suggestion for each name, so ask under a new name.
            self._ids[number] = f"{_id(number)}-{self._refused}"
        refuse_if_none(number > 0, self._refused)
        if not self._told_of_few:
            self._told_of_few = True
            self._run.say(few_fit(number, self._run.settings.num_samples))
        return None

    def _suggest(self, number: int) -> Config | None:
        suggestion = self._searcher.suggest(self._id(number))
        if suggestion is None or suggestion == self._searcher.FINISHED:
            return None
        config: Config = plain(chosen(self._space, _merged(indexed(self._space), suggestion)))
        check_config(config, self._strategy)
        return config

    def _agree(self, number: int, suggested: list[Config], recorded: Config) -> Config:
        """Return the recorded configuration of a trial.

        If the searcher suggested the same, return the suggestion itself, and let the searcher learn from the trial.
        """
        recorded = with_objects(restore(recorded, self._hidden, self._space), self._space)
        if jsonable(suggested[:1]) == jsonable([recorded]):
            self._open[number] = (0, math.nan)
            return suggested[0]
        if not self._warned:
            self._warned = True
            warn(
                f"the searcher does not repeat its suggestion for trial {number}: give it a seed, so that it learns "
                "from the trials before the break, too"
            )
        if suggested:
            self._searcher.on_trial_complete(self._id(number), error=True)
        return recorded

    def hear(self, key: str, unit: Unit) -> None:
        history = self._run.history
        if key.startswith(_BATCH) and int(key.removeprefix(_BATCH)) == len(self.given):
            self.next_trials()  # an earlier process recorded this batch, so let the searcher suggest it again
        elif GROUP.fullmatch(key) is not None:
            for number in unit.value["members"]:
                self._tell(number, history.epochs("sweep", number), history.score("sweep", number))
        elif SWEEP_DECISION.fullmatch(key) is not None:
            for number, *plain in unit.value:
                move = move_of(plain)
                if isinstance(move, Stop) or move.copy_of is not None:
                    self.close(number)

    def _tell(self, number: int, epoch: int, score: float) -> None:
        if number in self._open:
            self._open[number] = (epoch, score)
            if math.isfinite(score):
                self._searcher.on_trial_result(self._id(number), self._result(number, epoch, score))

    def close(self, number: int) -> None:
        history, standing = self._run.history, self._run.history.sweep.trials.get(number)
        is_under_way = standing is None or standing.goal is not None
        score = history.score("sweep", number) if is_under_way or standing is None else standing.score
        self._close(number, history.epochs("sweep", number), score)

    def _close(self, number: int, epoch: int, score: float) -> None:
        if self._open.pop(number, None) is None:
            return
        if math.isfinite(score):
            self._searcher.on_trial_complete(self._id(number), result=self._result(number, epoch, score))
        else:
            self._searcher.on_trial_complete(self._id(number), error=True)

    def _id(self, number: int) -> str:
        return self._ids.get(number, _id(number))

    def _result(self, number: int, epoch: int, score: float) -> dict[str, Any]:
        # With several metrics, the score is only a rank among trials. So give the searcher the metrics themselves.
        by_place = self._run.settings.comparison.by_place
        scores = self._run.history.values_at("sweep", number, epoch) if by_place else {self._metric: score}
        # BOHB reads its budget from "hyperband_info", where Ray's HyperBandForBOHB would put it.
        return {**scores, "training_iteration": epoch, "hyperband_info": {"budget": epoch}}


def _id(number: int) -> str:
    return f"trial-{number}"


def _merged(space: Mapping[str, Any], suggestion: Mapping[str, Any]) -> Config:
    """Return the suggestion with the constants of the space, which some searchers leave out."""
    config: Config = {}
    for key, value in {**space, **suggestion}.items():
        inner = space.get(key, {})  # a choice is no mapping, even if its values are mappings
        if key in suggestion and isinstance(suggestion[key], Mapping) and isinstance(inner, Mapping):
            config[key] = _merged(inner, suggestion[key])
        else:
            # Round here, because Optuna does not round values that it draws on a logarithmic scale.
            config[key] = rounded(space.get(key), copy.deepcopy(suggestion.get(key, value)))
    return config


def with_objects(recorded: Mapping[str, Any], space: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded configuration with the space's classes and functions in place of their names."""
    found: dict[str, Any] = {}
    values = reachable(space)
    for key, value in recorded.items():
        listed = values.get(key, [])
        drawn = [each for of in listed for each in (of.categories if is_a(of, "Categorical") else [of])]
        alike = [each for each in drawn if jsonable(each) == value]
        # If functions share a name, it is unclear which one was meant. Then the name stays.
        if alike and (all(each is alike[0] for each in alike) or all(map(is_plain, alike))):
            found[key] = copy.deepcopy(alike[0])
        else:
            inner = listed[0] if listed and is_nested(listed[0]) and isinstance(value, Mapping) else None
            found[key] = value if inner is None else with_objects(value, inner)
    return found


def as_recorded(trials: Sequence[Trial], run: Run) -> list[Trial]:
    """Return newly sampled trials with the values that the journal has recorded; warn if these differ.

    They can differ because a function of `sample_from` may draw other values in another process.
    """
    recorded = {
        line["trial"]: with_objects(restore(line["config"], run.hidden, run.space), run.space)
        for key, unit in run.store.units().items()
        if key.startswith(KINDS_FROM)
        for line in unit.lines
        if line["event"] == "trial"
    }
    found = [replace(t, config=_with_values(t.config, recorded.get(t.number, t.config))) for t in trials]
    other = [was.number for was, now in zip(trials, found) if jsonable(was.config) != jsonable(now.config)]
    if other:
        warn(
            f"`space` gives trial {other[0]} other values than when the run began, which count. Have functions of "
            "`sample_from` draw from the global generators of Python, NumPy or torch, which `tune` seeds"
        )
    return found


def _with_values(config: Mapping[str, Any], recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {}
    for key, value in recorded.items():
        own = config.get(key, value)
        # Keep an object (a value that is not plain): the journal has its name, which may differ between processes.
        if jsonable(own) == jsonable(value) or (is_plain(value) and not is_plain(own) and not isinstance(own, Mapping)):
            found[key] = own
        elif isinstance(own, Mapping) and isinstance(value, Mapping):
            found[key] = _with_values(own, value)
        else:
            found[key] = value
    return found
