"""The keys of a configuration that training reads: their allowed values, defaults and readers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusion.argument_checks import (
    is_count,
    is_flag,
    is_fraction,
    is_norm,
    is_not_negative,
    is_positive,
    is_share,
    number,
    plain,
    require,
    takes,
)

ONE_PASS = ("sgd", "adam", "adamw")
"""Optimizers for which torch has fused kernels, which pass over memory once."""

SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_sgd")
"""Optimizers that train one sequence of weights, and evaluate a weighted average of this sequence."""

VECTORIZED = (
    *(*ONE_PASS, "adafactor", "adamax", "lion", "muon", "nadam", "prodigy", "radam", "rmsprop"),
    *SCHEDULE_FREE,
)
"""Optimizers that update all their members together."""

OPTIMIZERS = (*VECTORIZED, "adadelta", "adagrad", "asgd")
"""All optimizers that have a name. If one is not in `VECTORIZED`, torch updates its members one after another."""

OWN = "own"
"""The name for an optimizer that a user's function makes."""

KINDS = (*OPTIMIZERS, OWN)
"""All names that `optimizer_name` returns."""

MUON_ORIGINAL = "muon.original"
"""The name for Muon with `adjust_lr_fn="original"`, whose learning rate scales differently with the width."""

RULES = (*KINDS, MUON_ORIGINAL)
"""Names of optimizers that may be keys of `lr_multipliers` and `weight_decay_multipliers`."""

ADJUSTMENTS = ("match_rms_adamw", "original")

_UNFIT = ("lbfgs", "rprop", "sparseadam", "torch.optim.Muon")
"""Optimizers of torch that are not supported."""

SCHEDULES = ("constant", "cosine", "step", "exponential", "linear", "wsd", "one_cycle")


@dataclass(frozen=True)
class Key:
    """One key of a configuration: a row of the table `KEYS`.

    Attributes:
        kind: Type of the key's values, or a function that converts a plain Python value.
        holds: Tells whether a plain Python value is allowed.
        rule: The allowed values, in words.
        reader: The part of the library that reads the key.
        default: Value if the key is left out; None for `lr`, which must be given.
        under: Name of another key that decides whether this key is read; None if it is always read.
        defaults: `defaults[value]` is the default of this key if the key `under` has this value. If the value is
            missing here, this key is not read.
    """

    kind: Callable[[Any], Any]
    holds: Callable[[Any], bool]
    rule: str
    reader: str
    default: Any = None
    under: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _schedule(value: Any) -> bool:
    if isinstance(value, str):
        return value in SCHEDULES
    # A callable object must be hashable, because `is_read` looks it up in the dict `Key.defaults`.
    return isinstance(value, Hashable) and takes(value, 0, 1)


def _optimizer(value: Any) -> bool:
    named = _name_of(value)
    if isinstance(named, str):
        return named in OPTIMIZERS
    try:
        hash(value)
    except TypeError:
        return False
    return takes(value, [], lr=0.1)


def _name_of(value: Any) -> Any:
    """Return this package's name for an optimizer class of torch; return any other value as it is.

    `torch.optim.Muon` does not get the name "muon", because it has another default learning rate, updates other
    matrices, and does not use AdamW for the other parameters.
    """
    if isinstance(value, type) and value.__module__.startswith("torch.optim"):
        name = "torch.optim.Muon" if value.__name__ == "Muon" else value.__name__.lower()
        return name if name in (*OPTIMIZERS, *_UNFIT) else value
    return value


def _of_optimizer(kind: type, holds: Callable[[Any], bool], rule: str, **defaults: Any) -> Key:
    """Make a key that only some optimizers read: `defaults[optimizer]` is its default for each of them."""
    return Key(kind, holds, rule, "optimizer", under="optimizer", defaults=defaults)


_ADAMS = ("adam", "adamw", "adamax", "nadam", "prodigy", "radam", "muon", "schedule_free_adamw")


_EPOCHS = "a finite number of epochs >= 0"

KEYS: Mapping[str, Key] = {
    "optimizer": Key(
        _name_of,
        _optimizer,
        f"one of {', '.join(OPTIMIZERS)}, or a function of (params, lr) that makes a torch optimizer; lbfgs needs a "
        "closure, sparseadam sparse gradients, and rprop follows no learning rate; torch.optim.Muon updates 2-D "
        "parameters alone, and 'muon' has AdamW beside it; the key `optimizer.PART` gives a part of the model its own",
        "optimizer",
        "adamw",
    ),
    "lr": Key(float, is_positive, "a finite number > 0", "optimizer"),
    "momentum": _of_optimizer(float, is_fraction, "in [0, 1)", sgd=0.0, rmsprop=0.0, muon=0.95, schedule_free_sgd=0.9),
    "nesterov": _of_optimizer(bool, is_flag, "True or False", sgd=False, muon=True),
    "dampening": _of_optimizer(float, is_share, "in [0, 1]", sgd=0.0),
    "weight_decay": _of_optimizer(
        float, is_not_negative, "a finite number >= 0", **{**dict.fromkeys(OPTIMIZERS, 0.0), "adamw": 0.01, "muon": 0.1}
    ),
    "adjust_lr_fn": _of_optimizer(
        str, lambda value: value in ADJUSTMENTS, f"one of {', '.join(ADJUSTMENTS)}", muon="match_rms_adamw"
    ),
    "independent_weight_decay": _of_optimizer(bool, is_flag, "True or False", adamw=False),
    "beta1": _of_optimizer(float, is_fraction, "in [0, 1)", **dict.fromkeys((*_ADAMS, "lion"), 0.9)),
    "beta2": _of_optimizer(float, is_fraction, "in [0, 1)", **dict.fromkeys(_ADAMS, 0.999), lion=0.99),
    "beta2_decay": _of_optimizer(
        float, number(lambda value: is_not_negative(-value)), "a finite number <= 0", adafactor=-0.8
    ),
    "d_coef": _of_optimizer(float, is_positive, "a finite number > 0", prodigy=1.0),
    "d0": _of_optimizer(float, is_positive, "a finite number > 0", prodigy=1e-6),
    "use_bias_correction": _of_optimizer(bool, is_flag, "True or False", prodigy=False),
    "safeguard_warmup": _of_optimizer(bool, is_flag, "True or False", prodigy=False),
    "alpha": _of_optimizer(float, is_fraction, "in [0, 1)", asgd=0.75, rmsprop=0.99),
    "rho": _of_optimizer(float, is_fraction, "in [0, 1)", adadelta=0.9),
    "eps": _of_optimizer(
        float,
        is_positive,
        "a finite number > 0",
        **{**dict.fromkeys((*_ADAMS, "rmsprop"), 1e-8), "adadelta": 1e-6, "adagrad": 1e-10},
    ),
    "batch_size": Key(int, is_count, "an integer >= 1", "training loop", 64),
    "accumulate": Key(int, is_count, "an integer >= 1", "training loop", 1),
    "grad_clip": Key(float, is_norm, "None or a norm > 0", "training loop"),
    "schedule": Key(
        lambda value: value,
        _schedule,
        f"one of {', '.join(SCHEDULES)}, or a hashable function of the step and the number of steps",
        "schedule",
        "constant",
    ),
    "gamma": Key(
        float,
        number(lambda value: 0 < value <= 1),
        "in (0, 1]",
        "schedule",
        under="schedule",
        defaults={"step": 0.1, "exponential": 0.9},
    ),
    "step_size": Key(int, is_count, "a number of epochs >= 1", "schedule", under="schedule", defaults={"step": 30}),
    "decay_start": Key(
        float,
        is_share,
        "a share of the training, in [0, 1]",
        "schedule",
        under="schedule",
        defaults={"cosine": 0.0, "linear": 0.0, "wsd": 0.8},
    ),
    "floor": Key(
        float,
        is_share,
        "a share of the highest learning rate, in [0, 1]",
        "schedule",
        under="schedule",
        defaults={"cosine": 0.0, "linear": 0.0, "wsd": 0.0},
    ),
    "warmup": Key(float, is_fraction, "a share of the training, in [0, 1)", "schedule", 0.0),
    "warmup_epochs": Key(float, is_not_negative, _EPOCHS, "schedule", 0.0),
    "rescale_warmup_epochs": Key(
        float, is_not_negative, _EPOCHS, "full-size stage on Ray, where workers are added", 1.0
    ),
}
"""All keys. Optimizers of torch and the step schedule have torch's defaults, except for `adjust_lr_fn`.

Lion has the defaults of its paper (Chen et al. 2023, arXiv:2302.06675, Algorithm 2). Prodigy has the defaults of
prodigyopt, and the Schedule-Free optimizers have the defaults of schedulefree.

With `match_rms_adamw`, Muon's updates are as large as AdamW's, so that one `lr` suits both (Liu et al. 2025,
arXiv:2502.16982).
"""


def is_read(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether training with `config` reads the key `name` of the table `KEYS`.

    If not, the key is the user's own, and may have any value.

    >>> is_read("gamma", {"schedule": "step"}), is_read("gamma", {"schedule": "cosine"})
    (True, False)
    """
    under = KEYS[name].under
    return under is None or read(config, under) in KEYS[name].defaults


def default(name: str, config: Mapping[str, Any]) -> Any:
    """Return the default of a key that `config` leaves out; the default may depend on the optimizer or the schedule.

    >>> default("weight_decay", {}), default("weight_decay", {"optimizer": "sgd"})
    (0.01, 0.0)
    """
    key = KEYS[name]
    return key.default if key.under is None else key.defaults[read(config, key.under)]


def read(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of the key `name`, or its default, as a plain Python value of the key's type.

    The key must be one that `config` reads, see `is_read`.

    Raises:
        ValueError: if the value breaks the key's rule.

    >>> read({}, "batch_size"), read({"batch_size": 16}, "batch_size")
    (64, 16)
    """
    if name not in config:
        return default(name, config)
    key, value = KEYS[name], plain(config[name])
    require(key.holds(value), name, value, key.rule)
    return value if value is None else key.kind(value)


def warmup_epochs(config: Mapping[str, Any], max_epochs: int) -> float:
    """Return the length of the warm-up in epochs, for a training of `max_epochs` epochs.

    >>> warmup_epochs({"warmup": 0.25}, 8), warmup_epochs({"warmup_epochs": 1.5}, 8)
    (2.0, 1.5)
    """
    epochs: float = read(config, "warmup_epochs") or read(config, "warmup") * max_epochs
    return epochs


def optimizer_name(config: Mapping[str, Any]) -> str:
    """Return the name of a configuration's optimizer; `OWN` if a user's function makes it.

    >>> optimizer_name({}), optimizer_name({"optimizer": lambda params, lr: None})
    ('adamw', 'own')
    """
    found = read(config, "optimizer")
    return found if isinstance(found, str) else OWN


def own_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments, besides `lr`, for a user's function that makes the optimizer.

    These are the keys of the configuration that the function has arguments for. Return {} for other optimizers.

    >>> own_arguments({"optimizer": lambda params, lr, wd=0.0: None, "lr": 0.1, "wd": 0.5, "width": 8})
    {'wd': 0.5}
    """
    if optimizer_name(config) != OWN:
        return {}
    try:
        _, *others = inspect.signature(read(config, "optimizer")).parameters.values()
    except ValueError:
        return {}
    named = (p.name for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return {name: plain(config[name]) for name in named if name in config and name != "lr"}


def check_class(config: Mapping[str, Any]) -> None:
    """Refuse a configuration with arguments of torch's optimizer class that training would ignore.

    The class is used only for its name, so its arguments have an effect only if they are also keys that training reads.

    Raises:
        ValueError: if the configuration has such an argument, for example `amsgrad`.

    >>> import torch
    >>> check_class({"optimizer": torch.optim.Adam, "lr": 0.1, "beta1": 0.8, "width": 64})
    """
    cls = config.get("optimizer")
    if not isinstance(cls, type) or not isinstance(_name_of(cls), str):
        return
    _, *arguments = inspect.signature(cls).parameters
    for name in arguments:
        rule = f"left out beside the class {cls.__name__}: functools.partial({cls.__name__}, {name}=...) sets it"
        fits = name not in config or (name in KEYS and is_read(name, config))
        require(fits, name, config.get(name), rule)


def check(config: Mapping[str, Any]) -> None:
    """Check every key that `config` reads. `part_settings.check_settings` also checks the settings of parts.

    Raises:
        ValueError: if a value breaks its rule. Also if sgd has `nesterov` without momentum or with dampening, or if a
            Schedule-Free optimizer has a schedule, or no momentum. Also if a warm-up is given both in epochs and as a
            share of the training.
    """
    for name in KEYS:
        if name in config and is_read(name, config):
            read(config, name)
    check_class(config)
    if is_read("dampening", config) and read(config, "nesterov"):
        momentum, dampening = read(config, "momentum"), read(config, "dampening")
        rule = f"False unless `momentum` is > 0 and `dampening` 0: they are {momentum} and {dampening}"
        require(momentum > 0 and dampening == 0, "nesterov", True, rule)
    if (kind := optimizer_name(config)) in SCHEDULE_FREE:
        schedule, key = read(config, "schedule"), "momentum" if is_read("momentum", config) else "beta1"
        require(read(config, key) > 0, key, read(config, key), f"in (0, 1) with the optimizer {kind}")
        rule = f"'constant' with the optimizer {kind}, which averages weights instead; a warm-up may be given"
        require(schedule == "constant", "schedule", schedule, rule)
    warmup, epochs = read(config, "warmup"), read(config, "warmup_epochs")
    require(not (warmup and epochs), "warmup", warmup, f"0 beside `warmup_epochs`, which is {epochs}: give one of them")
