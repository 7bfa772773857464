"""Making a `FusedModel` from K modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fusion.argument_checks import check_each, check_flag, require
from fusion.members.fused_model import FusedModel, Shell
from fusion.structure import HOOK, UNKNOWN, FusionKey, check_same, describe, fusion_key
from fusion.structure.module_parts import TensorTree, like, named_tensors, non_persistent, skeleton
from fusion.structure.reduced_values import memory


def fuse(modules: Sequence[nn.Module], *, one_by_one: bool = False) -> FusedModel:
    """Fuse K modules of equal structure into one model that trains all of them at once, each as if it were alone.

    Args:
        modules: K >= 1 modules with equal `fusion_key`, in the same mode and on one device. They are copied, and stay
            as they are.
        one_by_one: If True, evaluate the members in a loop; see `FusedModel`.

    Returns:
        A `FusedModel` with the parameters, gradients and buffers of the modules, stacked as [K, ...]. Frozen parameters
            and non-persistent buffers are held once, without K, if they are equal in all members.

    Raises:
        ValueError: if `modules` is empty or holds an object that is no module. Also if the modules differ in more than
            the values of tensors and floats. Also if a trained parameter shares memory with another tensor, or has a
            hook that captures a tensor of the module. Other tensors may share memory, such as a buffer and a view of
            it, if nothing is written to them.

    >>> fused = fuse([nn.Linear(2, 3) for _ in range(4)])
    >>> fused.stacked["weight"].shape, fused(torch.ones(5, 2)).shape
    (torch.Size([4, 3, 2]), torch.Size([4, 5, 3]))
    """
    check_each("modules", modules, nn.Module)
    check_flag("one_by_one", one_by_one)
    modules = list(modules)
    states = _states(modules)
    overlapping = frozenset().union(*(_overlapping(k, state) for k, state in enumerate(states)))
    key = _check_same(modules, states)
    own, common = TensorTree(), TensorTree()
    constants = non_persistent(modules[0])
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        may_share = name in constants or (isinstance(first, nn.Parameter) and not first.requires_grad)
        if may_share and _all_equal(tensors):
            common.put(name, like(first, first.detach().clone()), persistent=name not in constants)
        else:
            stacked = like(first, torch.stack([tensor.detach() for tensor in tensors]))
            stacked.grad = _gradients(name, tensors)
            own.put(name, stacked, persistent=name not in constants)
    members = [_take_apart(module, state) for module, state in zip(modules, states)]
    return FusedModel(members, own, common, key, one_by_one=one_by_one, overlapping=overlapping)


def _take_apart(module: nn.Module, state: Mapping[str, Tensor]) -> Shell:
    marks = {name: dict(vars(tensor)) for name, tensor in state.items() if vars(tensor)}
    hollow = skeleton(module)
    return Shell(hollow, marks, describe(hollow).floats)


def _gradients(name: str, tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the K modules' gradients of the parameter `name` as [K, ...]; None if no module has one."""
    found = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    if not found:
        return None
    if len(found) < len(tensors):
        has = f"{len(found)} of {len(tensors)} `modules` have a gradient of {name}"
        raise ValueError(f"{has}, but all or none must have one: call `zero_grad()` first")
    return torch.stack([gradient.detach().to_dense() for gradient in found])


def _overlapping(k: int, state: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors in `state`, those of module `k`, that share memory with another one.

    Raises:
        ValueError: if one of them is trained, because training it would change the other.
    """
    places = []
    for name, tensor in state.items():
        if memory(tensor) and tensor.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            start = tensor.data_ptr()
            places.append((start, start + extent * tensor.element_size(), name, tensor.requires_grad))
    found, before = set[str](), list[tuple[int, str, bool]]()
    for start, stop, name, trained in sorted(places):
        before = [place for place in before if place[0] > start]
        for _, other, other_trained in before:
            if trained or other_trained:
                raise ValueError(
                    f"`modules[{k}].{name}` shares memory with `{other}`, which a fused model does not follow: share "
                    "the parameter itself, or compute one from the other in forward"
                )
            found |= {name, other}
        before.append((stop, name, trained))
    return found


def _all_equal(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    comparable = first.layout is torch.strided  # torch does not compare sparse tensors
    return all(other is first or (comparable and torch.equal(first, other)) for other in tensors[1:])


def _states(modules: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """Return each module's tensors by name; raise a `ValueError` if a module is lazy and not yet initialized."""
    states = []
    for k, module in enumerate(modules):
        require(isinstance(module, nn.Module), f"modules[{k}]", module, "an nn.Module")
        states.append(named_tensors(module))
        lazy = [name for name, tensor in states[k].items() if is_lazy(tensor)]
        if lazy:
            raise ValueError(f"`modules[{k}].{lazy[0]}` is not initialized: run the module once first")
    return states


def _check_same(modules: Sequence[nn.Module], states: Iterable[Mapping[str, Tensor]]) -> FusionKey:
    """Return the key that all modules share; raise a `ValueError` if they differ in structure, device or mode."""
    key = check_same((fusion_key(module) for module in modules), "modules")
    for path, value in key:
        if HOOK in path and isinstance(value, tuple) and value[0] == UNKNOWN:
            raise ValueError(f"`modules` have a hook on a parameter that cannot be fused: {path} is {value[1]}")
    devices = {str(device) for device in {tensor.device for state in states for tensor in state.values()}}
    if len(devices) > 1:
        raise ValueError(f"`modules` are on several devices ({', '.join(sorted(devices))}), but must be on one")
    modes = [[child.training for child in module.modules()] for module in modules]
    for k, mode in enumerate(modes):
        if mode != modes[0]:
            raise ValueError(f"`modules[{k}]` is not in the mode (train or eval) of `modules[0]` in all parts")
    return key
