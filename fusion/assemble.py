"""From K modules to a `FusedModel`."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusion.model import FusedModel, Shell
from fusion.structure import FusionKey, check_same, fusion_key
from fusion.tensors import TensorTree, like, named_tensors, non_persistent, skeleton
from fusion.walk import describe


def fuse(modules: Sequence[nn.Module], *, one_by_one: bool = False) -> FusedModel:
    """K modules of one structure as one, which trains all of them at once, each as if it were alone.

    Args:
        modules: K >= 1 modules with equal `fusion_key`, in one mode and on one device. They are copied, and stay as
            they are.
        one_by_one: evaluate the members in a loop; see `FusedModel`.

    Returns:
        A `FusedModel` whose parameters and buffers are those of the modules, stacked as [K, ...]. Frozen parameters
        that are equal in all members, and constants that are (non-persistent buffers), are held once, without K.

    Raises:
        TypeError: if something else than modules is given.
        ValueError: if there are no modules, or if they differ in more than the values of tensors and floats.

    >>> fused = fuse([nn.Linear(2, 3) for _ in range(4)])
    >>> fused.stacked["weight"].shape, fused(torch.ones(5, 2)).shape
    (torch.Size([4, 3, 2]), torch.Size([4, 5, 3]))
    """
    modules = list(modules)
    key = _check_modules(modules)
    states = [named_tensors(module) for module in modules]
    own, common = TensorTree(), TensorTree()
    constants = non_persistent(modules[0])
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        may_share = name in constants or (isinstance(first, nn.Parameter) and not first.requires_grad)
        if may_share and _all_equal(tensors):
            common.put(name, like(first, first.detach().clone()), persistent=name not in constants)
        else:
            stacked = torch.stack([tensor.detach() for tensor in tensors])
            own.put(name, like(first, stacked), persistent=name not in constants)
    return FusedModel([_take_apart(module) for module in modules], own, common, key, one_by_one=one_by_one)


def _take_apart(module: nn.Module) -> Shell:
    marks = {name: dict(vars(tensor)) for name, tensor in named_tensors(module).items() if vars(tensor)}
    hollow = skeleton(module)
    return Shell(hollow, marks, describe(hollow).floats)


def _all_equal(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(other is first or torch.equal(first, other) for other in tensors[1:])


def _check_modules(modules: Sequence[nn.Module]) -> FusionKey:
    """The key that all modules share; raises for what `fuse` refuses."""
    if not modules:
        raise ValueError("modules is empty, but a fused model has at least one member")
    for k, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"modules[{k}] is a {type(module).__name__}, but must be an nn.Module")
        lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.UninitializedParameter)]
        if lazy:
            raise ValueError(f"modules[{k}].{lazy[0]} is not initialized: run the module once first")
    key = check_same((fusion_key(module) for module in modules), "modules")
    devices = {str(t.device) for module in modules for t in named_tensors(module).values()}
    if len(devices) > 1:
        raise ValueError(f"modules are on several devices ({', '.join(sorted(devices))}), but must be on one")
    modes = [[child.training for child in module.modules()] for module in modules]
    for k, mode in enumerate(modes):
        if mode != modes[0]:
            raise ValueError(f"modules[{k}] is not in the mode (train or eval) of modules[0] in all parts")
    return key
