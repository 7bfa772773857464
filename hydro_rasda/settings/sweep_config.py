"""Settings of the sweep, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from hydro_rasda.common.argument_checks import check_flag, check_int, is_int, is_number, require
from hydro_rasda.schedulers.named_rules import RULES, RuleName
from hydro_rasda.schedulers.sweep_rule import SweepRule
from hydro_rasda.settings.objectives import Constraints, check_constraints

if TYPE_CHECKING:
    from ray.tune.search import Searcher

SearcherName = Literal["random", "tpe", "gp", "cma", "qmc"]
SEARCHERS: tuple[str, ...] = get_args(SearcherName)
MOST_REPEATS = 100


class Part:
    """A part of the settings. It shows only the fields that differ from their defaults: a signature stays short."""

    def __repr__(self) -> str:
        own: Any = fields(self)  # type: ignore[arg-type]
        given = [(field.name, getattr(self, field.name)) for field in own]
        shown = [f"{name}={value!r}" for (name, value), field in zip(given, own) if value != field.default]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepConfig(Part):
    """How the sweep tries many configurations on narrow surrogates.

    Attributes:
        surrogate: Width of the surrogates over that of the model, in (0, 1]. With 1, the sweep trains the model itself,
            and full-size training goes on from there.
        depth: Depth of the surrogates over that of the model, in (0, 1]. Below 1, `model_fn` gets it as its argument
            `depth_ratio=1.0`. It builds that fraction of its residual blocks, and divides their branches by the ratio
            (CompleteP: Dey et al. 2025, arXiv:2505.01618).
        grace_period: Epochs of the first rung. Rungs before the space's longest warm-up is over are left out.
        reduction_factor: One in this many goes on from each rung. Rungs lie at
            `grace_period * reduction_factor**k` epochs, the last one at `max_t / reduction_factor` at most, unless it
            is the first: from there on, full-size models tell more for their price than surrogates do.
        rule: Decides who goes on, and ends the sweep at its last rung. "halving": successive halving. "hyperband":
            brackets of it, the later of which give a trial more epochs before its first decision (Li et al. 2018).
            "median": after each epoch, a trial stops whose best score is worse than the median of the others' averages
            (Golovin et al. 2017). "pbt": population based training (Jaderberg et al. 2017). After each `grace_period`
            epochs, the worst quarter of the trials goes on as copies of the best quarter. Floats that the space draws
            change by a factor of 0.8 or 1.2 with each copy, or are drawn anew. "none": no trial stops. "epsilon-net":
            "halving" for several metrics, but of a front the trials that cover it go on first (Schmucker et al. 2021).
            Or an object of your own subclass of `hydro_rasda.schedulers.SweepRule`,
            which does not look at `grace_period` and `reduction_factor`.
        searcher: The source of configurations. "random" samples all of them at once. Optuna's samplers are asked for a
            batch at a time, seeded by `tune(seed=...)`: "tpe", "gp" (a Gaussian process), "cma" (CMA-ES), and "qmc"
            (scrambled Sobol points, which learn nothing). They need `hydro-rasda[searchers]`. Or one of Ray Tune's
            searchers, such as `OptunaSearch(seed=0)`.
        constraints: A dict of bounds, such as `{"macs": (None, 1e9)}`, or a function `fits(config)`, or functions among
            the values of the dict. Configurations that break a bound of the full-size model's cost (see `metric` of
            `tune`), or that do not fit, are drawn anew and never trained. A trial that breaks a bound of a metric loses
            against any that keeps it.
        first: Configurations that are known to be good. They are tried first, and count as samples; keys that one
            leaves out are sampled.
        fusion: Most trials in one fused model. "auto" measures what is fastest, once on a machine; the measurements
            are kept below HYDRO_RASDA_CACHE, or in the user's cache folder. In short sweeps on a CPU it is 20. Random
            numbers do not depend on it. The last digits do, since groups of another width add up in another order.
        check_transfer: True to train 6 configurations at full size to the first milestone, and compare their ranking
            with the surrogates' (`TuneResult.transfer`).
        repeats: Models that each configuration trains in the sweep, at the same time: each has its own seed, which
            determines its initial weights, the order of its examples and its dropout. The mean of their scores decides.
            At full size, a finalist trains one model for each 3 of `full_trainings`, such as 2 with
            `full_trainings=6`: at least one, and at most `repeats`.
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
