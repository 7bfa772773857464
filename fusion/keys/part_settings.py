"""Settings of parts of a model: keys of a configuration such as `optimizer.PART`, `lr.PART` and `beta1.PART`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from fusion.argument_checks import check_mapping, plain, require
from fusion.keys.hyperparameters import KEYS, check, is_read, optimizer_name, own_arguments, read

_BESIDE_MUON = "lr.adamw"


def split_key(name: str) -> tuple[str, str]:
    """Split a key such as `beta1.critic` into the optimizer's key and the part; for other keys the part is "".

    >>> split_key("beta1.critic"), split_key("lr.net.head"), split_key("beta1"), split_key("my.own")
    (('beta1', 'critic'), ('lr', 'net.head'), ('beta1', ''), ('my.own', ''))
    """
    key, _, part = name.partition(".")
    return (key, part) if part and key in KEYS and KEYS[key].reader == "optimizer" else (name, "")


def is_of_part(name: str) -> bool:
    """Return whether a key is a setting of a part of the model, such as `lr.PART` or `beta1.PART`."""
    return bool(split_key(name)[1])


def is_rate(name: str) -> bool:
    """Return whether a key is the learning rate of a part, `lr.PART`; see `lr_factors`."""
    return name.startswith("lr.")


def keys_of(setting: str, part: str) -> list[str]:
    """Return the keys that can hold a setting of a part, most specific first. The first one that is given counts.

    >>> keys_of("beta1", "net.head")
    ['beta1.net.head', 'beta1.net', 'beta1']
    """
    parts = part.split(".") if part else []
    return [".".join([setting, *parts[:length]]) for length in range(len(parts), -1, -1)]


def configs_of_parts(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of each part that has its own optimizer, and under "" the settings of the rest of the model.

    A part has its own optimizer if `config` has a key for it other than `lr.PART`, which only multiplies the learning
    rate. If a part has no key for a setting, the setting is taken from the enclosing part, or from the model.

    >>> configs_of_parts({"lr": 0.1, "beta1": 0.5, "optimizer.head": "adam", "lr.head": 1.0})
    {'': {'lr': 0.1, 'beta1': 0.5}, 'head': {'lr': 1.0, 'beta1': 0.5, 'optimizer': 'adam'}}
    """
    given: dict[str, dict[str, Any]] = {"": {}}
    for name, value in config.items():
        key, part = split_key(name)
        given.setdefault(part, {})[key] = value
    found = {"": given[""]}
    for part in (part for part, own in given.items() if part and own.keys() != {"lr"}):
        around = sorted((p for p in given if p and _is_in(part, p)), key=len)
        found[part] = dict(given[""])
        for each in around:
            found[part] |= given[each]
    return found


def own_parts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parts that have their own optimizer, sorted. Fused members must have the same ones."""
    return tuple(sorted(configs_of_parts(config).keys() - {""}))


def part_of(name: str, parts: Iterable[str]) -> str:
    """Return the part that contains the parameter `name`: the longest one if several do; "" if none does."""
    return max((part for part in parts if part and _is_in(name, part)), key=len, default="")


def names_of_parts(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the parameters that each part's optimizer updates; the rest is under "".

    Args:
        names: Names of the model's parameters.

    Raises:
        ValueError: if a part has no parameter.

    >>> names_of_parts({"lr": 0.1, "optimizer.head": "sgd"}, ["body.weight", "head.weight", "header.weight"])
    {'': ['body.weight', 'header.weight'], 'head': ['head.weight']}
    """
    names, parts = list(names), own_parts(config)
    found: dict[str, list[str]] = {part: [] for part in ("", *parts)}
    for name in names:
        found[part_of(name, parts)].append(name)
    for part in (part for part in parts if not found[part]):
        key = next(key for key in config if split_key(key)[1] == part)
        known = sorted({name.partition(".")[0] for name in names})
        rule = f"left out: no parameter is of that part alone; the parts of the model are {known}, and parts of these"
        require(False, key, config[key], rule)
    return {part: of for part, of in found.items() if of}


def optimizer_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a configuration's optimizers: first the model's, then one for each part that has its own."""
    configs = configs_of_parts(config)
    return tuple(optimizer_name(configs[part]) for part in sorted(configs))  # "", for the model, sorts first


def lr_factors(config: Mapping[str, Any], names: Iterable[str], matrices: Container[str] = ()) -> dict[str, float]:
    """Map the name of each parameter that has its own learning rate to this rate, divided by its optimizer's `lr`.

    The key `lr.PART` is the learning rate of all parameters in that part of the model. If a parameter is in several
    such parts, the longest name counts. With the optimizer muon, `lr.adamw` is the learning rate of the remaining
    parameters, which AdamW updates.

    Args:
        names: Names of the model's parameters.
        matrices: Names of the parameters that Muon updates.

    Raises:
        ValueError: if `lr.PART` applies to no parameter, or a learning rate breaks its rule.

    >>> lr_factors({"lr": 0.5, "lr.head": 1.0}, ["body.weight", "head.weight", "header.weight"])
    {'head.weight': 2.0}
    """
    rates = _rates(config)
    if not rates:
        return {}
    configs = configs_of_parts(config)
    lrs = {part: read(own, "lr") for part, own in configs.items()}
    with_muon = {part for part, own in configs.items() if optimizer_name(own) == "muon"}
    found: dict[str, str] = {}
    factors: dict[str, float] = {}
    for name in names:
        of = part_of(name, configs)
        own = part_of(name, (split_key(key)[1] for key in rates))
        key = f"lr.{own}" if own else _BESIDE_MUON
        if own or (key in rates and of in with_muon and name not in matrices):
            found[name], factors[name] = key, rates[key] / lrs[of]
    for key, rate in rates.items():
        rule = "left out: no parameter's name begins with that part, or all of those have one of their own"
        require(key in found.values(), key, rate, rule)
    return factors


def check_settings(config: Mapping[str, Any]) -> None:
    """Check every key that `config` reads, including the settings of parts.

    Raises:
        ValueError: if `hyperparameters.check` raises it for the model or a part. Also if a part's optimizer does not
            read a key of the part.
    """
    check(config)
    _rates(config)
    for part, own in checked_parts(config).items():
        try:
            check(own)
        except ValueError as error:
            raise ValueError(f"in the settings of {part!r}, {error}") from None


def checked_parts(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Check the keys of all parts, and return the result of `configs_of_parts`.

    Raises:
        ValueError: if a key's value breaks its rule, or the part's optimizer does not read the key.
    """
    check_mapping("config", config)
    configs = configs_of_parts(config)
    # The optimizers decide which keys are read, so they are checked first.
    for name in sorted(filter(is_of_part, config), key=lambda name: split_key(name)[0] != "optimizer"):
        key, part = split_key(name)
        own = configs.get(part, {})
        if is_read(key, own):
            require(KEYS[key].holds(plain(config[name])), name, config[name], KEYS[key].rule)
        else:
            rule = f"left out: the optimizer of {part!r}, {optimizer_name(own)}, does not read it"
            require(key in own_arguments(own), name, config[name], rule)
    return configs


def _rates(config: Mapping[str, Any]) -> dict[str, float]:
    rates = {name: plain(value) for name, value in config.items() if is_rate(name)}
    for name, rate in rates.items():
        require(KEYS["lr"].holds(rate), name, rate, KEYS["lr"].rule)
    return rates


def _is_in(name: str, part: str) -> bool:
    return f"{name}.".startswith(f"{part}.")
