"""Tune LoRA adapters of `peft` over one frozen base: rank, alpha, dropout, and other keys of `tune`.

All trials that train at the same time share one base in memory. Adapters of different ranks train as one model. To make
this possible, each adapter is padded with zeros to the largest rank. With most optimizers, the padding changes no
result (see `fusion.pad_lora`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peft import LoraConfig, get_peft_model
from torch import nn

from fusion import pad_lora, trim_lora
from hydro_rasda.common.argument_checks import check_int, check_is, is_int, require
from hydro_rasda.common.one_line_warnings import warns_in_one_line
from hydro_rasda.integrations.shared import LibraryResult, check_options
from hydro_rasda.settings.config import SweepConfig
from hydro_rasda.space.branches import reachable
from hydro_rasda.space.space import check_space, reached
from hydro_rasda.tuner import tune


@dataclass(frozen=True)
class Adapters:
    """The `model_fn(config)` that `adapters` returns; it is also a `model_init` for `tune_trainer`.

    All models share the parameters of the frozen `base`. Keys of the configuration replace the fields of `lora` that
    have the same names. Adapters of lower rank are padded to `rank`.
    """

    base: nn.Module
    lora: LoraConfig
    rank: int

    def __call__(self, config: Mapping[str, Any]) -> nn.Module:
        own = copy.deepcopy(self.lora)
        for name in (field.name for field in dataclasses.fields(self.lora)):
            if name in config:
                setattr(own, name, config[name])
        require(own.r <= self.rank, "r", own.r, f"at most `max_rank`, {self.rank}")
        _check_keeps_base(own)
        shared = copy.deepcopy(self.base, {id(p): p for p in self.base.parameters()})
        (padded,) = pad_lora([get_peft_model(shared, own)], self.rank)
        # With `bias="all"`, peft lets the biases of the shared base train. Freeze them again, because each model trains
        # the copies that `pad_lora` made.
        self.base.requires_grad_(False)
        return padded

    def trimmed(self, model: nn.Module) -> nn.Module:
        """Remove the padding of a trained model: return a `PeftModel` whose adapters have their own ranks."""
        return trim_lora(model)


_CHANGE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Prefixes of `init_lora_weights` for which peft subtracts the initial adapter from the weights of the base."""


def _check_keeps_base(lora: LoraConfig) -> None:
    changes = str(lora.init_lora_weights).lower().startswith(_CHANGE_BASE)
    rule = "one that leaves the base as it is, for all trials share it"
    require(not changes, "init_lora_weights", lora.init_lora_weights, rule)


def adapters(base: nn.Module, lora: LoraConfig, max_rank: int | None = None) -> Adapters:
    """Make a model function for `tune` or `tune_trainer` that adapts one base.

    Args:
        base: The model to adapt. From now on, it is frozen, and all built models share it.
        lora: Settings of the adapters; keys of a configuration (`r`, `lora_alpha`, `lora_dropout`, ...) replace them.
        max_rank: The largest rank of any trial; None for `lora.r`.

    Raises:
        ValueError: if an argument is invalid, or if `init_lora_weights` would change the base, as PiSSA does.
    """
    check_is("base", base, nn.Module)
    require(not hasattr(base, "peft_config"), "base", type(base).__name__, "a model without adapters")
    check_is("lora", lora, LoraConfig)
    _check_keeps_base(lora)
    check_int("max_rank", max_rank, at_least=1, optional=True)
    return Adapters(base.requires_grad_(False), lora, lora.r if max_rank is None else max_rank)


@dataclass(frozen=True, repr=False)
class AdapterResult(LibraryResult):
    """The outcome of `tune_adapters`: a `TuneResult` for users of `peft`.

    Attributes:
        lora: The configuration of the adapters, with the best values.
    """

    lora: LoraConfig

    def model(self) -> nn.Module:
        """Return the base with the trained adapters at their own rank: a `PeftModel` to save, merge or train more."""
        return trim_lora(self.best_model())


@warns_in_one_line
def tune_adapters(
    base: nn.Module, lora: LoraConfig, space: Mapping[str, Any], *, sweep: SweepConfig = SweepConfig(), **arguments: Any
) -> AdapterResult:
    """Find good adapters of one base, and good settings to train them with.

    Args:
        base: The model to adapt. It is frozen, and all trials share one copy in memory.
        lora: The adapters' configuration.
        space: As for `tune`. A key with the name of a field of `lora`, such as `r`, `lora_alpha` or `lora_dropout`,
            replaces this field.
        sweep: As for `tune`. Its `surrogate` is 1, because a narrow base would not be pretrained.
        arguments: Other arguments of `tune`: `train_data`, `val_data`, `objective`, `num_samples`, ...

    Raises:
        ValueError: for invalid arguments, before any work; and as for `tune`.
    """
    check_options("tune_adapters", arguments)
    check_space(space)
    check_is("sweep", sweep, SweepConfig)
    left_out = sweep.surrogate in (1, SweepConfig.surrogate)
    require(left_out, "sweep.surrogate", sweep.surrogate, "1, or left out: the base is trained")
    model_fn = adapters(base, lora, _largest_rank(space))
    tuned = tune(model_fn, space, sweep=replace(sweep, surrogate=1), **arguments)
    best = copy.deepcopy(lora)
    for name in {field.name for field in dataclasses.fields(lora)} & tuned.best_config.keys():
        setattr(best, name, tuned.best_config[name])
    return AdapterResult(**vars(tuned), lora=best)


def _largest_rank(space: Mapping[str, Any]) -> int | None:
    """Return the largest rank that a configuration of the space can have; None if the space has no ranks."""
    bounds = [reached("r", {"r": value}) for value in reachable(space).get("r", ())]
    ranks = [*dict.fromkeys(rank for of_value in bounds for rank in of_value)]
    sound = all(bounds) and all(is_int(rank) and rank >= 1 for rank in ranks)
    require(sound, "space['r']", ranks, "a choice() or randint() of ranks >= 1, or one rank")
    return max(ranks, default=None)
