"""Settings of a run, as frozen dataclasses that are checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from hydro_rasda.common.argument_checks import (
    check_choice,
    check_flag,
    check_function,
    check_int,
    check_mode,
    check_number,
    is_int,
    is_number,
    require,
)
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.seeds import MOST_SEED
from hydro_rasda.schedulers.milestones import first_look, last_look, milestones, race_milestones, sweep_milestones
from hydro_rasda.schedulers.named_rules import RULES, RuleName
from hydro_rasda.schedulers.pareto import Spread
from hydro_rasda.schedulers.ranking import Mode as Mode
from hydro_rasda.schedulers.rasda import GROW, Grow
from hydro_rasda.schedulers.sweep_rule import RuleToLast, SweepRule
from hydro_rasda.settings.objectives import PLACE, Comparison, Constraints, Objectives, bounds_of, check_constraints

if TYPE_CHECKING:
    from ray.tune.search import Searcher

Keep = Literal["last", "best"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Graph = bool | Literal["auto"]
SearcherName = Literal["random", "tpe", "gp", "cma", "qmc"]
Strategy = Literal["ddp", "fsdp"]
LRRule = Literal["auto", "paper", "linear", "sqrt", "none"]

KEEP: tuple[str, ...] = get_args(Keep)
PRECISIONS: tuple[str, ...] = get_args(Precision)
RESUME: tuple[str, ...] = ("auto", "must", "never", "changed")
BACKENDS: tuple[str, ...] = ("local", "ray")
STRATEGIES: tuple[str, ...] = get_args(Strategy)
LR_RULES: tuple[str, ...] = get_args(LRRule)
SEARCHERS: tuple[str, ...] = get_args(SearcherName)
MOST_REPEATS = 100
MOST_TRIALS = 1_000_000
"""Largest number of configurations of a run. A larger number is a mistake, and would not fit into memory."""
MOST_EPOCHS = 1_000_000
"""Largest number of epochs of a trial. A larger number is a mistake, for example a number of steps."""
MOST_WORKERS = 1024
"""Largest number of worker processes that load data. A larger number is a mistake."""
GLOBAL_BATCH = "global_batch_size"
"""Key of reports and of a trial's history: the number of examples in a step over all workers."""
NOISE_SCALE = "gradient_noise_scale"
"""Key of a report: the trial's gradient noise scale, in examples. The report must also have `GLOBAL_BATCH`."""
SCALING_EFFICIENCY = "scaling_efficiency"
"""Key of a report: the trial's parallel efficiency, compared with the fewest workers that it has had."""
HISTORY = ("workers", GLOBAL_BATCH, "lr_multiplier", NOISE_SCALE, SCALING_EFFICIENCY)
"""Keys of a report that a trial's history keeps besides the metrics "train_*" and "val_*"."""
FULL_TRAININGS = 3.0
"""Default budget of the race in full trainings. Each further seed of the finalists (`sweep.repeats`) needs this budget
once more. With folds, a seed needs this budget for each fold."""
UNSPLIT: Mapping[str, tuple[Callable[[object], bool], str]] = {
    # With micro-batches, the ranks' shares could have different numbers of them. Ranks would then wait for each other
    # forever.
    "accumulate": (lambda parts: parts == 1, "1 with race.strategy 'fsdp', more workers in its place"),
    "optimizer": (
        lambda name: name != "adafactor",
        "another one with race.strategy 'fsdp': torch's Adafactor cannot update parameters that ranks split",
    ),
}
"""Maps each key that `race.strategy="fsdp"` restricts to a check of its value, and to the rule in words."""


def check_unsplit(name: str, key: str, value: object, shown: object = None) -> None:
    """Raise ValueError if `race.strategy="fsdp"` forbids `value` for `key`.

    The error calls the value `name`. If `shown` is given, the error shows it in place of `value`.
    """
    if key in UNSPLIT:
        holds, rule = UNSPLIT[key]
        require(holds(value), name, value if shown is None else shown, rule)


class Part:
    """Base of `SweepConfig` and `RaceConfig`. `repr` shows only fields that differ from their defaults."""

    def __repr__(self) -> str:
        own: Any = fields(self)  # type: ignore[arg-type]
        given = [(field.name, getattr(self, field.name)) for field in own]
        shown = [f"{name}={value!r}" for (name, value), field in zip(given, own) if value != field.default]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepConfig(Part):
    """How the sweep tries many configurations on narrow surrogates.

    Attributes:
        surrogate: Width of the surrogates as a ratio of the full width, in (0, 1]. With 1, the sweep trains the model
            itself, and full-size training continues from its weights.
        depth: Depth of the surrogates as a ratio of the full depth, in (0, 1]. Below 1, `model_fn` gets the ratio as
            its argument `depth_ratio=1.0`. `model_fn` must build that fraction of its residual blocks, and divide the
            output of their branches by the ratio (CompleteP: Dey et al. 2025, arXiv:2505.01618).
        grace_period: Epochs of the first rung. Rungs that lie before the end of the space's longest warm-up are left
            out.
        reduction_factor: One in this many trials continues from each rung. Rungs lie at
            `grace_period * reduction_factor**k` epochs. Rungs after the first lie at `max_t / reduction_factor` at
            most, because from there on full-size models tell more for their cost than surrogates do.
        rule: Decides which trials continue, and ends the sweep at its last rung. "halving": successive halving.
            "hyperband": brackets of successive halving; later brackets train longer before their first decision (Li et
            al. 2018). "median": after each epoch, a trial stops if its best score is worse than the median of the
            others' averages (Golovin et al. 2017). "pbt": population based training (Jaderberg et al. 2017). After each
            `grace_period` epochs, the worst quarter of the trials continues as copies of the best quarter. With each
            copy, floats that the space draws change by a factor of 0.8 or 1.2, or are drawn anew. "none": no trial
            stops. "epsilon-net": "halving" for several metrics, where the trials that cover a Pareto front best
            continue first (Schmucker et al. 2021). Or an object of your own subclass of
            `hydro_rasda.schedulers.SweepRule`, which ignores `grace_period` and `reduction_factor`.
        searcher: The source of configurations. "random", or None, samples all of them at once. Optuna's samplers
            propose a batch at a time, seeded by `tune(seed=...)`: "tpe", "gp" (a Gaussian process), "cma" (CMA-ES), and
            "qmc" (scrambled Sobol points, which learn nothing). They need `hydro-rasda[searchers]`. Or a Ray Tune
            searcher, such as `OptunaSearch(seed=0)`.
        constraints: A dict of bounds, such as `{"macs": (None, 1e9)}`, or a function `fits(config)`. The values of the
            dict may also be such functions. A configuration that does not fit is never trained, and another one is
            drawn. The same holds if it breaks a bound of the full-size model's cost (see `metric` of `tune`). A trial
            that breaks a bound of a metric loses against any trial that keeps the bound.
        first: Configurations that are known to be good. They are tried first and count as samples. Keys that they leave
            out are sampled.
        fusion: Largest number of trials in one fused model. "auto" measures the fastest number, once on a machine.
            Measurements are kept below HYDRO_RASDA_CACHE, or in the user's cache folder. In short sweeps on a CPU,
            "auto" measures nothing and takes 20, or 160 if trials have fewer than 100 steps. Random numbers do not
            depend on `fusion`, but the last digits of results do, because sums have another order.
        check_transfer: True to train 6 configurations at full size to the first milestone, and compare their ranking
            with that of their surrogates (`TuneResult.transfer`).
        repeats: Number of models that each configuration trains in the sweep, at the same time. Each has its own seed,
            which determines its initial weights, the order of its examples and its dropout. The mean of their scores
            decides. At full size, a finalist trains one model for each 3 of `full_trainings`, but at least one and at
            most `repeats`. For example, it trains two with `full_trainings=6`. If it trains fewer than in a sweep with
            `surrogate=1`, `race.keep="best"` ignores the sweep's epochs, whose scores are means over more models.
    """

    surrogate: float = 1 / 8
    depth: float = 1.0
    grace_period: int = 1
    reduction_factor: int = 3
    rule: RuleName | SweepRule = "halving"
    searcher: SearcherName | Searcher | None = None
    constraints: Constraints | None = None
    first: Sequence[Mapping[str, Any]] = ()
    fusion: int | Literal["auto"] = "auto"
    check_transfer: bool = False
    repeats: int = 1

    def __post_init__(self) -> None:
        width, fusion, rule = self.surrogate, self.fusion, self.rule
        require(is_number(width) and 0 < width <= 1, "sweep.surrogate", width, "a width ratio in (0, 1]")
        holds = is_number(self.depth) and 0 < self.depth <= 1
        require(holds, "sweep.depth", self.depth, "a depth ratio in (0, 1]")
        check_int("sweep.grace_period", self.grace_period, at_least=1)
        check_int("sweep.reduction_factor", self.reduction_factor, at_least=2)
        known = isinstance(rule, SweepRule) or (isinstance(rule, str) and rule in RULES)
        told = f"one of {RULES}, or an object of a subclass of `hydro_rasda.schedulers.SweepRule`"
        require(known, "sweep.rule", rule, told)
        check_constraints(self.constraints)
        require(isinstance(self.first, list | tuple), "sweep.first", self.first, "a list of configurations")
        if isinstance(self.searcher, str):
            told = f"None, one of {SEARCHERS}, or one of Ray Tune's searchers"
            require(self.searcher in SEARCHERS, "sweep.searcher", self.searcher, told)
        own = not self.first or self.searcher in (None, "random")
        told = "left out with a `searcher`; those of Ray Tune have a way of their own (`points_to_evaluate`)"
        require(own, "sweep.first", list(self.first), told)
        if not (isinstance(fusion, str) and fusion == "auto"):
            require(is_int(fusion) and fusion >= 1, "sweep.fusion", fusion, "'auto' or an integer >= 1")
        check_flag("sweep.check_transfer", self.check_transfer)
        check_int("sweep.repeats", self.repeats, at_least=1, at_most=MOST_REPEATS)


@dataclass(frozen=True, kw_only=True, repr=False)
class RaceConfig(Part):
    """How the finalists train at full size, and how they are halved (RASDA, Aach et al. 2024, Sec. 3).

    Attributes:
        top_k: Number of configurations that move to the full-size model; with `full_trainings` below 3, fewer may move.
        keep: Weights that a full-size training hands back. "last": the weights after the last epoch. "best": the
            weights after the latest epoch that is as good as the best one, or worse by at most 1 % of what the training
            has gained. The gain counts up to ten times the best score, because the first epoch may be far off. In both
            cases, trials are compared by their last epochs. The winner's configuration then also holds when you train
            it again, longer, elsewhere or on more data. There are two exceptions. With `patience`, the best epochs are
            compared. If no trial reached its end (time ran out, all diverged, or `stop_at` was reached), the best kept
            weights win.
        patience: A full-size training ends after this many epochs without improvement. None never ends it early. The
            sweep has no patience, because its rungs decide. `tune(train=...)` has none either: the function returns
            when it chooses.
        ema: Horizon of an exponential average of weights and running statistics, as a share of a full training's steps.
            With `keep="best"`, the averaged weights are validated and kept, which takes memory for another copy. At
            milestones, the last step's weights are validated, too, as `METRIC_unaveraged`. These scores compare trials,
            but the trial with the best averages continues, too. At the end, the unaveraged score counts. If it is worse
            than the averages' score by more than 15 % of the training's gain, only these 15 % count. If the last step's
            weights are better at the end, only they count and are handed back; the averages' score is then
            `METRIC_averaged`. With several metrics, averages do not count, but are handed back. With `keep="last"` or
            `ema=0`, nothing is averaged.
        checkpoint_every: Epochs between checkpoints; None checkpoints at milestones only.
        grace_period: Epochs that every finalist gets before any is stopped; None for half of `max_t`, rounded up. From
            there, two finalists continue by default, and the one with the best averages (`ema`). Midway to the end, at
            the last look, a finalist behind the leader stops if its possible gain is not worth the remaining epochs.
            There is no last look if fewer than two epochs would be left, if `full_trainings` is enough for all
            finalists, or with several metrics.
        reduction_factor: The paper's rf: at least one in this many finalists continues at each milestone.
        scaling_factor: The paper's sf. Milestones lie at `grace_period * sf**k`. On several workers, each survivor
            gets sf times the workers.
        workers: Number of workers of a full-size trial before its first milestone. They share the configuration's
            batch. On this machine, workers are devices; if it has fewer devices than workers, the devices share the
            batch.
        max_workers: Largest number of workers of a trial. With 1, each device trains whole trials, so that results do
            not depend on the number of devices. None: as many as the cluster or this machine has. But on this machine
            with `workers=1`, None means 1.
        lr_rule: Factor of the learning rate when the workers, and so the global batch, grow by f (section 3.2):
            "linear" is f, "sqrt" its square root, "none" 1. It may also be a function of f. "auto" is linear for SGD,
            Adam and AdamW, as measured (benchmarks/results/large_batch.md), and sqrt for other adaptive optimizers.
            "paper" is linear for SGD, and sqrt for all adaptive optimizers. Each change is reached over a warm-up. Its
            length in epochs is the key `rescale_warmup_epochs` of the configuration, 1 by default.
        grow: Number of workers with which a survivor continues. "due": sf times the workers at each milestone, as in
            the paper. "efficient": the smaller of this number and an even share of the free workers. More workers must
            then pay by `least_efficiency` and `batch_over_noise`.
        least_efficiency: With "efficient", a survivor gets more workers only if its parallel efficiency is above this;
            0 for any. The efficiency is `scaling_efficiency` in its history, measured by step times.
        batch_over_noise: With "efficient", the largest global batch of a survivor, as a multiple of its gradient noise
            scale; inf for any. The scale is `gradient_noise_scale` in its history, measured on two or more workers.
        strategy: Division of a model between several workers. "ddp": each worker holds the whole model. "fsdp": each
            worker holds a shard of every parameter, gradient and optimizer state, for models that do not fit one worker
            (FSDP2). Entries of an `nn.ModuleList` are gathered one at a time, when their `forward` is called: call no
            other method of them. Checkpoints are the same. Float16, and `accumulate` in a configuration, need "ddp".
        refit: The model that is handed back if finalists train several models. True: with folds, the winner is trained
            once more, on all examples of `train_data`, to the epoch that was best over the folds. With
            `sweep.repeats` but no folds, the model of the first seed is handed back. False: all models are handed back
            as one, whose output is the mean of their outputs.
    """

    top_k: int = 4
    keep: Keep = "best"
    patience: int | None = None
    ema: float = 0.03
    checkpoint_every: int | None = None
    grace_period: int | None = None
    reduction_factor: int = 2
    scaling_factor: int = 2
    workers: int = 1
    max_workers: int | None = None
    lr_rule: LRRule | Callable[[float], float] = "auto"
    grow: Grow = "due"
    least_efficiency: float = 0.5
    batch_over_noise: float = 1.0
    strategy: Strategy = "ddp"
    refit: bool = True

    def __post_init__(self) -> None:
        self._check_training()
        self._check_halving()

    def _check_training(self) -> None:
        check_int("race.top_k", self.top_k, at_least=1)
        check_choice("race.keep", self.keep, KEEP)
        check_int("race.patience", self.patience, at_least=1, optional=True)
        rule = "None where `keep` is 'last': the last epoch of one that stopped early is not its best"
        require(self.patience is None or self.keep == "best", "race.patience", self.patience, rule)
        holds = is_number(self.ema) and 0 <= self.ema < 1
        require(holds, "race.ema", self.ema, "a share of a training's steps, in [0, 1)")
        check_int("race.checkpoint_every", self.checkpoint_every, at_least=1, optional=True)
        check_flag("race.refit", self.refit)

    def _check_halving(self) -> None:
        check_int("race.grace_period", self.grace_period, at_least=1, optional=True)
        check_int("race.reduction_factor", self.reduction_factor, at_least=2)
        check_int("race.scaling_factor", self.scaling_factor, at_least=2)
        check_int("race.workers", self.workers, at_least=1)
        check_int("race.max_workers", self.max_workers, at_least=self.workers, optional=True)
        if not isinstance(self.lr_rule, str):
            told = f"one of {LR_RULES}, or a function of how many times as many workers there are"
            check_function("race.lr_rule", self.lr_rule, 1, rule=told)
        else:
            check_choice("race.lr_rule", self.lr_rule, LR_RULES)
        check_choice("race.grow", self.grow, GROW)
        check_choice("race.strategy", self.strategy, STRATEGIES)
        least, most = self.least_efficiency, self.batch_over_noise
        require(is_number(least) and 0 <= least < 1, "race.least_efficiency", least, "a number in [0, 1)")
        check_number("race.batch_over_noise", most, above=0)


@dataclass(frozen=True)
class TuneConfig:
    """The arguments of `tune` that are numbers or words; see `tune`.

    Four fields are not arguments of `tune`. `objectives` holds all metrics and modes, if `metric` is a list. `graph`
    and `loader_workers` come from the backend. `folds` is the number of folds of `val_data`, 0 without folds.
    """

    metric: str = "val_loss"
    mode: Mode = "min"
    objectives: Objectives = ()
    num_samples: int = 64
    max_t: int = 27
    full_trainings: float = FULL_TRAININGS
    time_budget_s: float | None = None
    stop_at: float | None = None
    sweep: SweepConfig = SweepConfig()
    race: RaceConfig = RaceConfig()
    precision: Precision = "fp32"
    graph: Graph = "auto"
    loader_workers: int | None = None
    seed: int = 0
    folds: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.metric, str) and bool(self.metric), "metric", self.metric, "the name of a metric")
        check_mode(self.mode)
        check_int("num_samples", self.num_samples, at_least=1, at_most=MOST_TRIALS)
        check_int("max_t", self.max_t, at_least=1, at_most=MOST_EPOCHS)
        spent, budget = self.full_trainings, self.time_budget_s
        require(is_number(spent) and spent >= 0, "full_trainings", spent, "a finite number >= 0")
        holds = budget is None or (is_number(budget) and budget > 0)
        require(holds, "time_budget_s", budget, "None or a finite number of seconds > 0")
        good = self.stop_at is None or is_number(self.stop_at)
        require(good, "stop_at", self.stop_at, "None or a finite score of `metric`")
        check_choice("precision", self.precision, PRECISIONS)
        check_int("seed", self.seed, at_least=0, at_most=MOST_SEED)
        check_steps(self.graph, self.loader_workers)
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise ValueError if `sweep` or `race` has a wrong type, or cannot be combined with other settings."""
        sweep, race, at_most = self.sweep, self.race, f"<= max_t ({self.max_t})"
        require(isinstance(sweep, SweepConfig), "sweep", sweep, "a `SweepConfig`")
        require(isinstance(race, RaceConfig), "race", race, "a `RaceConfig`")
        require(sweep.grace_period <= self.max_t, "sweep.grace_period", sweep.grace_period, at_most)
        last = sweep.rule.last if isinstance(sweep.rule, RuleToLast) else 1
        require(last <= self.max_t, "sweep.rule", sweep.rule, f"one whose `last` is {at_most}")
        require((race.grace_period or 1) <= self.max_t, "race.grace_period", race.grace_period, at_most)
        rule = "None where `race.keep` is 'last': one that trained longer would win"
        require(self.stop_at is None or race.keep == "best", "stop_at", self.stop_at, rule)
        for name in self.comparison.trained:
            argument = "metric" if name in dict(self.comparison.objectives) else "sweep.constraints"
            require(name not in PLACE, argument, name, f"another name than {', '.join(PLACE)}, which the journal needs")
        rule = "None where `metric` is a list, or `sweep.constraints` bounds a metric of training"
        require(self.stop_at is None or not self.comparison.by_place, "stop_at", self.stop_at, rule)
        rule = "another one for a single metric, without bounds on metrics: 'epsilon-net' orders a front"
        require(sweep.rule != "epsilon-net" or self.comparison.by_place, "sweep.rule", sweep.rule, rule)
        scaled_apart = self.precision == "fp16" and race.strategy == "fsdp"
        require(not scaled_apart, "precision", self.precision, "another one with race.strategy 'fsdp'")
        one, several = self.models("race") == 1, "where a finalist trains several models, of folds or seeds"
        require(one or race.workers == 1, "race.workers", race.workers, f"1 {several}: a device trains all of them")

    def plain(self) -> TuneConfig:
        """Return the settings without the user's objects (rule, searcher, `first`, functions).

        Other processes do not need these objects, and may be unable to load them.
        """
        rule = self.sweep.rule if isinstance(self.sweep.rule, str) else SweepConfig.rule
        bounds = bounds_of(self.sweep.constraints)
        return replace(
            self,
            sweep=replace(self.sweep, rule=rule, searcher=None, first=(), constraints=bounds or None),
        )

    def models(self, heat: HeatName) -> int:
        """Return the number of models of each trial in the sweep, middle heat or race: one for each fold and seed."""
        seeds = self.sweep.repeats
        if heat == "race":
            seeds = max(1, min(seeds, math.floor(self.full_trainings / FULL_TRAININGS / max(1, self.folds))))
        return seeds * max(1, self.folds)

    @property
    def spread(self) -> str:
        """Name of the metric's standard deviation over the models of a trial, if a trial trains several."""
        return f"{self.metric}_std"

    @cached_property  # cached, because it is read whenever a trial arrives
    def comparison(self) -> Comparison:
        """The comparison of trials: by `metric`, or by all of several metrics, within the bounds."""
        spread: Spread = "epsilon-net" if self.sweep.rule == "epsilon-net" else "crowding"
        objectives = self.objectives or ((self.metric, self.mode),)
        return Comparison(objectives, bounds_of(self.sweep.constraints), spread)

    @property
    def first_look(self) -> int:
        """Epoch at which the race first stops finalists: `race.grace_period`, or half of `max_t`, rounded up."""
        return first_look(self.race.grace_period, self.max_t)

    @property
    def sweep_milestones(self) -> tuple[int, ...]:
        """Epochs after which successive halving compares surrogates; the sweep ends at the last of them."""
        return sweep_milestones(self.sweep.grace_period, self.max_t, self.sweep.reduction_factor)

    @property
    def race_milestones(self) -> tuple[int, ...]:
        """Epochs after which finalists are compared; the last of them is the end of a training."""
        return race_milestones(self.first_look, self.max_t, self.race.scaling_factor)

    @property
    def last_look(self) -> int | None:
        """The epoch after which finalists continue only if their remaining epochs pay; None in short trainings."""
        return last_look(milestones(self.first_look, self.max_t, self.race.scaling_factor))

    def good_enough(self, score: float) -> bool:
        """Return whether a score has reached `stop_at`, so that the training of a full-size model may end."""
        if self.stop_at is None or not math.isfinite(score):
            return False
        return score <= self.stop_at if self.mode == "min" else score >= self.stop_at

    def out_of_patience(self, epochs: int) -> bool:
        """Return whether a full-size training ends after `epochs` epochs without improvement."""
        return self.race.patience is not None and epochs >= self.race.patience


def unaveraged(metric: str) -> str:
    """Return the name under which a metric of the last step's weights is reported beside that of averaged weights."""
    return f"{metric}_unaveraged"


def averaged(metric: str) -> str:
    """Return the name under which a metric of averaged weights is reported if the last step's weights count instead."""
    return f"{metric}_averaged"


def check_reported(metric: str, names: Iterable[str]) -> None:
    """Raise ValueError if the user's code reports a name that the library itself gives to scores of `metric`."""
    taken = sorted({unaveraged(metric), averaged(metric)}.intersection(names))
    require(not taken, "metric", metric, f"one beside which nothing reports {', '.join(taken)}: `race.ema` does")


def check_steps(graph: object, loader_workers: object) -> None:
    """Raise ValueError for wrong arguments `graph` or `loader_workers` of a backend."""
    known = isinstance(graph, bool) or (isinstance(graph, str) and graph == "auto")
    require(known, "graph", graph, "'auto', True or False")
    check_int("loader_workers", loader_workers, at_least=0, optional=True, at_most=MOST_WORKERS)
