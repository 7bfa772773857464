"""Learning rates by role: the keys `lr.embedding`, `lr.hidden` and `lr.head` of a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fusion.keys import is_rate
from hydro_rasda.common.argument_checks import require
from surrogate import parameter_roles
from surrogate.widths import PLAN_ATTRIBUTE

Roles = Mapping[str, str | None]
"""Map the name of each trained parameter to its role, such as "hidden"; None if it has no role, as a bias."""

_KEYS = {f"lr.{role}": role for role in ("embedding", "hidden", "head")}
_ATTRIBUTE = "lr_roles"
"""Attribute of a full-size model that holds its roles; a surrogate's roles follow from its width plan."""


def asked_roles(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the configuration's keys that set learning rates by role, with their roles.

    If a part of the model has the name of the role, the key belongs to that part and is left out.

    >>> asked_roles({"lr.head": 0.1, "lr.hidden": 0.3}, ["head.weight", "body.weight"])
    {'lr.hidden': 'hidden'}
    """
    asked = {key: role for key, role in _KEYS.items() if key in config}
    parts = {part for name in names for part in _parts(name)} if asked else set()
    return {key: role for key, role in asked.items() if role not in parts}


def note_roles(model: nn.Module, roles: Mapping[str, str]) -> None:
    """Store the roles of a full-size model's parameters on the model."""
    setattr(model, _ATTRIBUTE, dict(roles))


def roles_of(model: nn.Module) -> Roles:
    """Return the roles of a surrogate's parameters, or those that `note_roles` stored on a full-size model."""
    plan, noted = getattr(model, PLAN_ATTRIBUTE, None), vars(model).get(_ATTRIBUTE, {})
    roles = noted if plan is None else parameter_roles(model)
    return {name: roles.get(name) for name, p in model.named_parameters() if p.requires_grad}


def by_parameter(config: Mapping[str, Any], roles: Roles) -> Mapping[str, Any]:
    """Replace learning rates by role with learning rates of single parameters, `lr.PARAMETER`.

    A key that is also the name of a part of the model stays as it is. A parameter keeps the learning rate of its own
    key, or of its part's key, if there is one.

    >>> by_parameter({"lr": 0.1, "lr.head": 0.3}, {"0.weight": "embedding", "2.weight": "head", "2.bias": None})
    {'lr': 0.1, 'lr.2.weight': 0.3}
    """
    asked = asked_roles(config, roles)
    if not asked:
        return config
    own = {key for key in config if is_rate(key) and key not in asked}
    free = {name: role for name, role in roles.items() if own.isdisjoint(f"lr.{part}" for part in _parts(name))}
    rates: dict[str, Any] = {}
    for key, role in asked.items():
        found = {f"lr.{name}": config[key] for name, of in free.items() if of == role}
        told = f"no part of the model has the name {role!r}, and no weight without a rate of its own has that role"
        require(bool(found), key, config[key], f"left out: {told}")
        rates |= found
    return {**{key: value for key, value in config.items() if key not in asked}, **rates}


def _parts(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
