"""A search space in the names of `TrainingArguments`, as the library's keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import TrainingArguments

from fusion.hyperparameters import KEYS as OF_THE_LIBRARY
from hydro_rasda.branches_and_variants import is_branching, reachable, with_defaults
from hydro_rasda.domains import choice, is_a, is_grid
from hydro_rasda.integrations.transformers.arguments import (
    KEYS,
    OPTIMIZERS,
    SCHEDULED,
    from_key,
    schedule_types,
    to_key,
)

_CHOICES: dict[str, Callable[[], list[str]]] = {"optim": lambda: list(OPTIMIZERS), "lr_scheduler_type": schedule_types}


def to_space(space: Mapping[str, Any], args: TrainingArguments) -> tuple[dict[str, Any], list[str]]:
    """The space that `tune` searches, where other arguments keep their values; and why names or values are refused."""
    made, refused = _translated(space, args)
    return with_defaults(made, {key: to_key(name, args, vars(args)[name]) for name, key in KEYS.items()}), refused


def _translated(space: Mapping[str, Any], args: TrainingArguments) -> tuple[dict[str, Any], list[str]]:
    known, made, refused = vars(args), dict[str, Any](), list[str]()
    for name, domain in space.items():
        if is_branching(domain):
            branches = [_translated(branch, args) for branch in domain.categories]
            made[name] = choice([branch for branch, _ in branches])
            refused += [why for _, wrong in branches for why in wrong]
            continue
        values = _values(domain)
        wrong = [value for value in values or () if name in _CHOICES and value not in _CHOICES[name]()]
        if wrong:
            refused.append(f"space[{name!r}] has {wrong[0]!r}: one of {', '.join(_CHOICES[name]())}")
        elif name in KEYS:
            accumulates = name == "per_device_train_batch_size" and args.gradient_accumulation_steps > 1
            if values is None and (accumulates or name == "optim"):
                refused.append(f"space[{name!r}] is {domain!r}: a choice() here")
            else:
                made[KEYS[name]] = _mapped(domain, partial(to_key, name, args))
        elif name in SCHEDULED:
            made[name] = domain
        elif name in known:
            refused.append(f"space[{name!r}]: this training argument is the same for all trials here")
        elif name in OF_THE_LIBRARY:
            named = next((own for own, key in KEYS.items() if key == name), None)
            refused.append(f"space[{name!r}]: " + (f"use {named!r}" if named else "it is no training argument"))
        else:
            made[name] = domain
    return made, refused


def own_names(space: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in a user's space that are no training arguments: the model's."""
    return tuple(name for name in reachable(space) if name not in KEYS and name not in SCHEDULED)


def with_values(args: TrainingArguments, config: Mapping[str, Any]) -> dict[str, Any]:
    """The training arguments that a configuration of `to_space`'s has values for."""
    values = {name: from_key(name, args, config[key]) for name, key in KEYS.items() if key in config}
    return values | {name: config[name] for name in SCHEDULED if name in config}


def _values(domain: Any) -> list[Any] | None:
    """All values that it can take; None where they are no list."""
    if is_a(domain, "Categorical"):
        return list(domain.categories)
    if is_grid(domain):
        return list(domain["grid_search"])
    return None if is_a(domain, "Domain") else [domain]


def _mapped(domain: Any, change: Callable[[Any], Any]) -> Any:
    if is_a(domain, "Categorical"):
        return choice([change(value) for value in domain.categories])
    if is_grid(domain):
        return {"grid_search": [change(value) for value in domain["grid_search"]]}
    return domain if is_a(domain, "Domain") else change(domain)
