"""The `torch.optim` optimizer of a single module, made from the same configuration keys as the fused one."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fusion.argument_checks import check_mapping, is_number, require
from fusion.keys import RULES, checked_parts, lr_factors, names_of_parts, own_parts
from fusion.optim.muon import MARK, MuonWithAdamW, hidden_matrices
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.parts import ByPart, by_part
from fusion.structure import check_module

Multipliers = Mapping[str, Mapping[str, float]]


def optimizer(
    module: nn.Module,
    config: Mapping[str, Any],
    *,
    lr_multipliers: Multipliers | None = None,
    weight_decay_multipliers: Multipliers | None = None,
) -> torch.optim.Optimizer:
    """Make the `torch.optim` optimizer that `config` names. It updates as `fused_optimizer` does for one member.

    Args:
        module: The model. Its parameters that need gradients are optimized.
        config: See `Hyperparameters.from_config`. Parts of the model may have their own learning rates and optimizers,
            see `fusion.keys.part_settings`.
        lr_multipliers: `lr_multipliers[optimizer][parameter]` is a factor of the learning rate, 1 if absent.
        weight_decay_multipliers: The same for the weight decay.

    Returns:
        An optimizer with one parameter group for each pair of multipliers (of learning rate and weight decay), or a
        `ByPart` of several such optimizers. To follow a schedule, multiply the `lr` of every group by its factor.

    Raises:
        ValueError: for an unknown optimizer, part, parameter name, or a value out of range.
    """
    check_module(module)
    configs = checked_parts(config)
    both = {"lr_multipliers": lr_multipliers, "weight_decay_multipliers": weight_decay_multipliers}
    for name, multipliers in both.items():
        check_multipliers(name, multipliers, dict(module.named_parameters()))
    named = dict(module.named_parameters())
    learning, parts = [name for name, p in named.items() if p.requires_grad], own_parts(config)
    names = names_of_parts(config, learning) if parts else {"": learning}
    hps = {part: Hyperparameters.from_config(configs[part]) for part in names}
    among = {part: of if parts else None for part, of in names.items() if hps[part].kind == "muon"}
    matrices = frozenset[str]().union(*(hidden_matrices(module, None, of) for of in among.values()))
    own = lr_factors(config, learning, matrices)
    made = {}
    for part, of in names.items():
        rules = {name: hps[part].rule(name in matrices) for name in of}
        lr, decay = ({n: (m or {}).get(rules[n], {}).get(n, 1.0) for n in of} for m in both.values())
        lr = {name: lr[name] * own.get(name, 1.0) for name in of}
        made[part] = torch_optimizer({name: named[name] for name in of}, hps[part], lr, decay, matrices)
    return by_part(made) if parts else made[""]


def made_recordable(optimizer: torch.optim.Optimizer) -> None:
    """Make the steps of SGD, Adam or AdamW recordable in a CUDA graph, in place: learning rates become tensors.

    To change a learning rate, call `group["lr"].fill_`, because replays of a recorded step read this tensor.
    """
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group.update(lr=torch.tensor(group["lr"], dtype=torch.float32, device=device), fused=True)
        if "capturable" in group:
            group["capturable"] = True
    # Silence torch's warning about steps that are not recorded, such as the first ones.
    optimizer._warned_capturable_if_run_uncaptured = True


def as_written(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the state of an optimizer that `made_recordable` changed to the state of an ordinary optimizer."""
    groups = []
    for group in state_dict["param_groups"]:
        if isinstance(group["lr"], torch.Tensor):
            own = {"capturable": False} if "capturable" in group else {"fused": None}
            group = {**group, "lr": float(group["lr"]), **own}
        groups.append(group)
    return {**state_dict, "param_groups": groups}


def let_skip(optimizer: torch.optim.Optimizer) -> None:
    """Make SGD, Adam or AdamW use torch's fused kernels, so that `step_if` can skip a step without waiting."""
    for group in optimizer.param_groups:
        group["fused"] = _in_one_pass(group["params"])
        if group.get("momentum") and not group["dampening"]:
            # Torch makes the momentum in its first step, so a skipped first step would leave it unset. Make it here, as
            # zeros. Without dampening, this gives the same results.
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def step_if(takes: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()` if `takes`, a boolean tensor on the device, is True; else change nothing.

    Fused kernels read `takes` on the device, as they do for `torch.amp.GradScaler`. The host has to read it if there
    are no fused kernels, if parts have their own optimizers, and for the first step of SGD with dampening.
    """
    first = not optimizer.state and any(group.get("dampening") for group in optimizer.param_groups)
    if not (first or isinstance(optimizer, ByPart)) and all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~takes).float().reshape(())  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif bool(takes):
        optimizer.step()


def torch_optimizer(
    named: Mapping[str, nn.Parameter],
    hp: Hyperparameters,
    lr: Mapping[str, float],
    decay: Mapping[str, float],
    matrices: Container[str] = (),
) -> torch.optim.Optimizer:
    """Make a `torch.optim` optimizer from hyperparameters.

    Args:
        named: Parameters by name.
        lr: Parameter name -> multiplier of the learning rate, 1 if absent.
        decay: Parameter name -> multiplier of the weight decay, 1 if absent.
        matrices: Names of the parameters that Muon updates.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    by_muon: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        of = by_muon if hp.kind == "muon" and name in matrices else groups
        of.setdefault((lr.get(name, 1.0), decay.get(name, 1.0)), []).append(parameter)
    if not groups and not by_muon:
        raise ValueError("`module` has no parameter that needs gradients")
    check_real({hp.kind}, named)
    if hp.kind == "muon":
        both = ((True, by_muon), (False, groups))
        own = [{**_group(hp, *factors, ps), MARK: mark} for mark, of in both for factors, ps in of.items()]
        return MuonWithAdamW(own, hp)
    if hp.is_vectorized:
        return _torch_optimizer(hp, [_group(hp, *factors, params) for factors, params in groups.items()])
    made = hp.made([{"params": params, "lr": hp.lr * factor} for (factor, _), params in groups.items()])
    factors_of = {id(p): factors for factors, params in groups.items() for p in params}
    found = [id(p) for group in made.param_groups for p in group["params"]]
    rule = "one that takes all parameters, in the groups that it is given or in parts of these"
    require(sorted(found) == sorted(factors_of), "optimizer", hp.make, rule)
    for group in made.param_groups:
        (_, factor), *others = {factors_of[id(p)] for p in group["params"]}
        require(not others, "optimizer", hp.make, rule)
        # Multiply `lambd`, too, a second decay that ASGD has.
        group.update({name: group[name] * factor for name in ("weight_decay", "lambd") if group.get(name)})
    return made


def check_real(kinds: Collection[str], parameters: Mapping[str, Tensor]) -> None:
    """Refuse complex parameters for Adafactor, as torch does.

    Raises:
        ValueError: if `kinds` has Adafactor, and a trained parameter is complex.
    """
    found = [name for name, p in parameters.items() if p.is_complex() and p.requires_grad]
    rule = f"another one for a model with complex parameters, such as {found[:1]}"
    require("adafactor" not in kinds or not found, "optimizer", "adafactor", rule)


def check_multipliers(name: str, multipliers: object, known: Collection[str]) -> None:
    """Check `multipliers[optimizer][parameter]`, for all names of optimizers and parameters; None passes.

    Raises:
        ValueError: if a name is unknown, or a multiplier is no finite number >= 0.
    """
    if multipliers is None:
        return
    check_mapping(name, multipliers)
    assert isinstance(multipliers, Mapping)
    for kind, factors in multipliers.items():
        rule = f"of an optimizer, one of {', '.join(RULES)}"
        require(kind in RULES, f"{name}[{kind!r}]", factors, rule)
        check_mapping(f"{name}[{kind!r}]", factors)
        for parameter, factor in factors.items():
            where = f"{name}[{kind!r}][{parameter!r}]"
            require(parameter in known, where, factor, "left out: the model has no such parameter")
            require(is_number(factor) and factor >= 0, where, factor, "a finite number >= 0")


def _group(hp: Hyperparameters, lr: float, decay: float, params: list[nn.Parameter]) -> dict[str, Any]:
    rate, weight_decay = hp.lr * lr, hp.decay * decay
    if hp.independent_weight_decay:
        # Torch multiplies the weight decay by lr, schedule included. After a division by the base rate, only the
        # schedule's factor remains.
        weight_decay = weight_decay / rate if rate > 0 else 0.0
    group = {"params": params, "lr": rate, "weight_decay": weight_decay}
    return {**group, "lr_factor": lr} if hp.kind == "prodigy" else group


def _torch_optimizer(hp: Hyperparameters, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if hp.kind not in ("adam", "adamw"):
        return hp.as_torch(groups)
    # Ask for fused kernels, which pass over memory once instead of once for each operation. By default, torch does not
    # use them on CPUs.
    return hp.as_torch(groups, fused=_in_one_pass(p for group in groups for p in group["params"]))


def _in_one_pass(params: Iterable[nn.Parameter]) -> bool:
    """Return whether torch can update these parameters by fused kernels, which pass over memory only once."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
