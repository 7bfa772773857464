"""What a run is asked to do, as frozen values that are checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, asdict, dataclass
from typing import Any, Literal

from hydro_rasda.checks import (
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

Mode = Literal["min", "max"]
Keep = Literal["last", "best"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Grow = Literal["due", "efficient"]

KEEP: tuple[str, ...] = ("last", "best")
PRECISIONS: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")
RESUME: tuple[str, ...] = ("auto", "must", "never", "changed")
BACKENDS: tuple[str, ...] = ("local", "ray")
GROW: tuple[str, ...] = ("due", "efficient")
STRATEGIES: tuple[str, ...] = ("ddp", "fsdp")
MOST_TRIALS = 1_000_000
"""More configurations than that are a mistake: they would not fit memory."""
MOST_WORKERS = 1024
"""More processes than that are one, too."""
MOST_SEED = 2**63 - 1
GLOBAL_BATCH = "global_batch_size"
"""In a report and in a trial's history, the examples of a step over all workers."""
LR_RULES: tuple[str, ...] = ("auto", "paper", "linear", "sqrt", "none")
UNSPLIT_BATCHES = "1 with rasda.strategy 'fsdp', more workers in its place"
"""What `accumulate` must be there: ranks whose shares have unequally many parts would wait for each other for ever."""


@dataclass(frozen=True)
class RASDAConfig:
    """How the full-size trials of the last stage are halved (RASDA, Aach et al. 2024, Sec. 3).

    Attributes:
        grace_period: Epochs that every full-size trial gets before any is stopped; None: half of `max_t`, rounded up.
        reduction_factor: The paper's rf: one in this many goes on at each milestone.
        scaling_factor: The paper's sf: milestones lie at `grace_period * sf**k`; on several workers, each survivor
            gets sf times the workers.
        workers: Workers of a full-size trial before its first milestone; they share the configuration's batch. On this
            machine, its devices; where there are fewer, these share it.
        max_workers: No trial gets more, and with 1, each device trains whole trials, which are then the same on any
            number of devices. None for as many as the cluster, or this machine, holds; but on this machine, with
            `workers=1`, it is 1.
        lr_rule: What the learning rate is multiplied by where the workers, and with them the global batch, grow by f
            (Sec. 3.2): "linear" f, "sqrt" its root, "none" 1, a function of f; "auto" is linear, as was measured best
            (benchmarks/results/large_batch.md). "paper" is the paper's: linear for SGD, the root for Adam and its like.
            Each change is reached over the configuration's `rescale_warmup_epochs`, 1 by default.
        grow: With how many workers a survivor goes on: "due", all that it is due, as in the paper;
            "efficient", the smaller of that and an even share of what is free, while more workers pay by the next two.
        least_efficiency: With "efficient", a survivor keeps its workers unless its measured parallel efficiency is
            above this; 0 for any. It is its history's `scaling_efficiency`, of step times.
        batch_over_noise: With "efficient", a survivor's batch is at most so many times its gradient noise scale (its
            history's `gradient_noise_scale`, measured on two or more workers); inf for any.
        strategy: What several workers hold of a model: "ddp", all of it, each; "fsdp", each a part of every parameter,
            gradient and optimizer state, for models that fit no single one (FSDP2). Entries of an `nn.ModuleList` are
            put together one at a time, as they compute; they must compute by their `forward`. Checkpoints are the
            same. With float16, or `accumulate` in a configuration, "ddp" alone.

    Args:
        wait: Not taken any more: all trials of a milestone wait for each other, and are compared together.
    """

    grace_period: int | None = None
    reduction_factor: int = 2
    scaling_factor: int = 2
    workers: int = 1
    max_workers: int | None = None
    lr_rule: Literal["auto", "paper", "linear", "sqrt", "none"] | Callable[[float], float] = "auto"
    wait: InitVar[None] = None
    grow: Grow = "due"
    least_efficiency: float = 0.5
    batch_over_noise: float = 1.0
    strategy: Literal["ddp", "fsdp"] = "ddp"

    def __post_init__(self, wait: None) -> None:
        gone = "left out: all trials of a milestone are compared together (`RASDAScheduler`, for scripts, has `wait`)"
        require(wait is None, "rasda.wait", wait, gone)
        check_int("rasda.grace_period", self.grace_period, at_least=1, optional=True)
        check_int("rasda.reduction_factor", self.reduction_factor, at_least=2)
        check_int("rasda.scaling_factor", self.scaling_factor, at_least=2)
        check_int("rasda.workers", self.workers, at_least=1)
        check_int("rasda.max_workers", self.max_workers, at_least=self.workers, optional=True)
        rule = self.lr_rule
        if not isinstance(rule, str):
            told = f"one of {LR_RULES}, or a function of how many times as many workers there are"
            check_function("rasda.lr_rule", rule, 1, rule=told)
        else:
            check_choice("rasda.lr_rule", rule, LR_RULES)
        check_choice("rasda.grow", self.grow, GROW)
        check_choice("rasda.strategy", self.strategy, STRATEGIES)
        least, most = self.least_efficiency, self.batch_over_noise
        require(is_number(least) and 0 <= least < 1, "rasda.least_efficiency", least, "a number in [0, 1)")
        check_number("rasda.batch_over_noise", most, above=0)


@dataclass(frozen=True)
class TuneConfig:
    """The scalar arguments of `tune`, documented there."""

    metric: str = "val_loss"
    mode: Mode = "min"
    num_samples: int = 64
    max_t: int = 27
    grace_period: int = 1
    reduction_factor: int = 3
    top_k: int = 4
    full_trainings: float = 3.0
    surrogate: float = 1 / 8
    fusion: int | Literal["auto"] = "auto"
    check_transfer: bool = False
    rasda: RASDAConfig = RASDAConfig()
    keep: Keep = "best"
    patience: int | None = None
    stop_at: float | None = None
    ema: float = 0.03
    precision: Precision = "fp32"
    graph: bool | Literal["auto"] = "auto"
    checkpoint_every: int | None = None
    loader_workers: int | None = None
    time_budget_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.metric, str) and bool(self.metric), "metric", self.metric, "the name of a metric")
        check_mode(self.mode)
        check_int("num_samples", self.num_samples, at_least=1, at_most=MOST_TRIALS)
        for name in ("max_t", "grace_period", "top_k"):
            check_int(name, getattr(self, name), at_least=1)
        require(self.grace_period <= self.max_t, "grace_period", self.grace_period, f"<= max_t ({self.max_t})")
        check_int("reduction_factor", self.reduction_factor, at_least=2)
        spent = self.full_trainings
        require(is_number(spent) and 0 <= spent < math.inf, "full_trainings", spent, "a finite number >= 0")
        width, fusion = self.surrogate, self.fusion
        require(is_number(width) and 0 < width <= 1, "surrogate", width, "a width ratio in (0, 1]")
        if not (isinstance(fusion, str) and fusion == "auto"):
            require(is_int(fusion) and fusion >= 1, "fusion", fusion, "'auto' or an integer >= 1")
        require(isinstance(self.rasda, RASDAConfig), "rasda", self.rasda, "a RASDAConfig")
        grace = self.rasda.grace_period
        require(grace is None or grace <= self.max_t, "rasda.grace_period", grace, f"<= max_t ({self.max_t})")
        check_flag("check_transfer", self.check_transfer)
        check_choice("keep", self.keep, KEEP)
        check_int("patience", self.patience, at_least=1, optional=True)
        rule = "None where `keep` is 'last': the last epoch of one that stopped early is not its best"
        require(self.patience is None or self.keep == "best", "patience", self.patience, rule)
        good = self.stop_at is None or (is_number(self.stop_at) and math.isfinite(self.stop_at))
        require(good, "stop_at", self.stop_at, "None or a finite score of `metric`")
        rule = "None where `keep` is 'last': one that trained longer would win"
        require(self.stop_at is None or self.keep == "best", "stop_at", self.stop_at, rule)
        require(is_number(self.ema) and 0 <= self.ema < 1, "ema", self.ema, "a share of a training's steps, in [0, 1)")
        check_choice("precision", self.precision, PRECISIONS)
        scaled_apart = self.precision == "fp16" and self.rasda.strategy == "fsdp"
        require(not scaled_apart, "precision", self.precision, "another one with rasda.strategy 'fsdp'")
        graph = self.graph
        known = isinstance(graph, bool) or (isinstance(graph, str) and graph == "auto")
        require(known, "graph", graph, "'auto', True or False")
        check_int("checkpoint_every", self.checkpoint_every, at_least=1, optional=True)
        check_int("loader_workers", self.loader_workers, at_least=0, optional=True, at_most=MOST_WORKERS)
        budget = self.time_budget_s
        holds = budget is None or (is_number(budget) and 0 < budget < math.inf)
        require(holds, "time_budget_s", budget, "None or a finite number of seconds > 0")
        check_int("seed", self.seed, at_least=0, at_most=MOST_SEED)

    @property
    def unaveraged(self) -> str:
        """Name of the metric of the weights that training left, where averaged ones are validated."""
        return f"{self.metric}_unaveraged"

    @property
    def first_look(self) -> int:
        """Epochs before the race of the finalists stops any: `rasda.grace_period`, or half of `max_t`, rounded up."""
        return self.rasda.grace_period or math.ceil(self.max_t / 2)

    def good_enough(self, score: float) -> bool:
        """Whether a full-size model's score is as good as `stop_at`, so that nothing more has to be trained."""
        if self.stop_at is None or not math.isfinite(score):
            return False
        return score <= self.stop_at if self.mode == "min" else score >= self.stop_at

    def out_of_patience(self, epochs: int) -> bool:
        """Whether a full-size training ends that has not become better for so many epochs."""
        return self.patience is not None and epochs >= self.patience

    def determining(self) -> dict[str, Any]:
        """The settings on which a run's decisions depend, as plain values."""
        values = asdict(self)
        # What a run may cost, or must find, how often it is saved, who loads its data, and how its steps are launched.
        for name in ("time_budget_s", "stop_at", "checkpoint_every", "loader_workers", "graph"):
            del values[name]
        return values
