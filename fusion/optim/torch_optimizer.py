"""One module's `torch.optim` optimizer, from the same configuration keys as the fused one."""

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
    """Make the `torch.optim` optimizer that `config` asks for; it updates as `fused_optimizer` does for one member.

    Args:
        module: Its parameters that need gradients are optimized.
        config: See `Hyperparameters.from_config`; parts of the model may have learning rates and optimizers of their
            own, see `fusion.keys.part_settings`.
        lr_multipliers: Optimizer name -> parameter name -> factor of the learning rate, 1 if absent.

    Returns:
        An optimizer with one group for each pair of factors, or a `ByPart` of several; multiply every group's `lr` to
        follow a schedule.

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
    """Make SGD, Adam or AdamW take its learning rates from tensors, in place, so that steps can be recorded.

    Write to `group["lr"]` with `fill_`: a replay of a recorded step reads the tensor.
    """
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group.update(lr=torch.tensor(group["lr"], dtype=torch.float32, device=device), fused=True)
        if "capturable" in group:
            group["capturable"] = True
    # Torch would warn of steps that are not recorded, such as the first.
    optimizer._warned_capturable_if_run_uncaptured = True


def as_written(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer from `made_recordable` as that of an ordinary one."""
    groups = []
    for group in state_dict["param_groups"]:
        if isinstance(group["lr"], torch.Tensor):
            own = {"capturable": False} if "capturable" in group else {"fused": None}
            group = {**group, "lr": float(group["lr"]), **own}
        groups.append(group)
    return {**state_dict, "param_groups": groups}


def let_skip(optimizer: torch.optim.Optimizer) -> None:
    """Make SGD, Adam or AdamW update by torch's one-pass kernels, with which `step_if` need not wait."""
    for group in optimizer.param_groups:
        group["fused"] = _in_one_pass(group["params"])
        if group.get("momentum") and not group["dampening"]:
            # A first step that is left out would leave momentum without a value; from 0 it comes to the same.
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def step_if(takes: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()` if `takes`, a boolean on its device, is True; else change nothing, not even step counts.

    The one-pass kernels read `takes` on the device, by the protocol of `torch.amp.GradScaler`. The host reads it if
    there are no such kernels, for several optimizers, and for the first step of SGD with dampening.
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
    """Make the same from parameters by name, hyperparameters, their multipliers, and the names of Muon's parameters."""
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
        # `lambd` is ASGD's own decay, beside the weight decay: the learning rate multiplies both.
        group.update({name: group[name] * factor for name in ("weight_decay", "lambd") if group.get(name)})
    return made


def check_real(kinds: Collection[str], parameters: Mapping[str, Tensor]) -> None:
    """Refuse complex parameters for Adafactor, as torch does.

    Raises:
        ValueError: if they are refused.
    """
    found = [name for name, p in parameters.items() if p.is_complex() and p.requires_grad]
    rule = f"another one for a model with complex parameters, such as {found[:1]}"
    require("adafactor" not in kinds or not found, "optimizer", "adafactor", rule)


def check_multipliers(name: str, multipliers: object, known: Collection[str]) -> None:
    """Refuse multipliers that are not by optimizer and parameter, or are no finite numbers >= 0.

    Raises:
        ValueError: if `multipliers` are refused.
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
        # torch takes lr * weight_decay off, lr with the schedule in it: divided here, only the schedule is left.
        weight_decay = weight_decay / rate if rate > 0 else 0.0
    group = {"params": params, "lr": rate, "weight_decay": weight_decay}
    return {**group, "lr_factor": lr} if hp.kind == "prodigy" else group


def _torch_optimizer(hp: Hyperparameters, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if hp.kind not in ("adam", "adamw"):
        return hp.as_torch(groups)
    # One pass over memory instead of one for each operation; by default torch takes the slower way on CPUs.
    return hp.as_torch(groups, fused=_in_one_pass(p for group in groups for p in group["params"]))


def _in_one_pass(params: Iterable[nn.Parameter]) -> bool:
    """Return whether torch has one-pass kernels for these parameters."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
