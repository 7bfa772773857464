"""LoRA adapters (Hu et al. 2022, arXiv:2106.09685) with different ranks and dropouts, padded so that they fuse.

Shapes: A is [rank, in], B is [out, rank]. If a row of A and the matching column of B are zero, they stay zero, because
each gets its gradient through the other. So padding with zeros is exact with every optimizer that works element by
element. The padding adds nothing to gradient norms or weight decay. Steps of Adafactor and Muon depend on shapes, so
they move a padded adapter like one of the larger rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fusion.argument_checks import check_each, check_int
from fusion.structure import check_module


def pad_lora(modules: Sequence[nn.Module], rank: int = 1) -> list[nn.Module]:
    """Copy models whose LoRA adapters (as `peft` makes them) differ in rank and dropout, so that the copies fuse.

    Each adapter is padded with zeros to the largest rank that any of the modules has at the same place. An adapter
    without dropout gets a dropout of probability 0. The copies share frozen parameters with the originals, and `fuse`
    holds equal ones only once. Padded adapters train as with their own ranks, except with Adafactor and Muon, whose
    steps depend on shapes.

    Args:
        modules: Models of one architecture, adapted in the same places.
        rank: Each adapter is padded to this rank at least. To pad modules in several calls and fuse them later, pass
            the largest rank of all.

    Returns:
        A copy of each module; `trim_lora` removes the padding again.

    Raises:
        ValueError: if a module has no adapters, or has them in other places than the first module. Also if `rank` is
            below 1.
    """
    check_each("modules", modules, nn.Module)
    check_int("rank", rank, at_least=1)
    places = [dict(_adapters(module)) for module in modules]
    for k, own in enumerate(places):
        if not own or own.keys() != places[0].keys():
            differing = sorted(own.keys() ^ places[0].keys())
            elsewhere = f"in other places than `modules[0]`, or none: {differing}"
            raise ValueError(f"`modules[{k}]` has LoRA adapters {elsewhere}")
    ranks = {place: max(rank, *(own[place].shape[0] for own in places)) for place in places[0]}
    padded = [_copy(module) for module in modules]
    for module in padded:
        for place, rank in ranks.items():
            _resize(module, place, rank)
        for layer in module.modules():
            dropouts = getattr(layer, "lora_dropout", None)
            if isinstance(dropouts, nn.ModuleDict):
                for name, dropout in dropouts.items():
                    dropouts[name] = nn.Dropout(0.0) if isinstance(dropout, nn.Identity) else dropout
                    dropouts[name].train(layer.training)
    return padded


def trim_lora(module: nn.Module) -> nn.Module:
    """Copy a module that `pad_lora` has padded, and cut the copy's adapters to their own ranks.

    Use it after training and `unfuse`. Frozen parameters are not copied. The ranks are known, because `peft` keeps them
    in its layers, and `pad_lora` does not change them.
    """
    check_module(module)
    trimmed = _copy(module)
    for (path, name), _ in _adapters(module):
        rank = vars(trimmed.get_submodule(path))["r"][name]
        _resize(trimmed, (path, name), int(rank))
    return trimmed


def _adapters(module: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield ((path of the adapted layer, name of the adapter), its matrix A)."""
    for path, layer in module.named_modules():
        lora_A = getattr(layer, "lora_A", None)
        if isinstance(lora_A, nn.ModuleDict):
            for name, down in lora_A.items():
                yield (path, name), down.get_parameter("weight")


def _resize(module: nn.Module, place: tuple[str, str], rank: int) -> None:
    """Cut the adapter at `place` (path of the layer, adapter's name) to `rank`, or pad it with zeros, in place."""
    path, name = place
    layer = module.get_submodule(path)
    for kind, dim, size in (("lora_A", 0, "out"), ("lora_B", 1, "in")):
        linear = layer.get_submodule(kind).get_submodule(name)
        weight = linear.get_parameter("weight")
        kept = weight.detach().narrow(dim, 0, min(rank, weight.shape[dim]))
        shape = list(weight.shape)
        shape[dim] = rank - kept.shape[dim]
        resized = torch.cat([kept, kept.new_zeros(shape)], dim)
        linear.weight = nn.Parameter(resized, requires_grad=weight.requires_grad)
        setattr(linear, f"{size}_channels" if isinstance(linear, _ConvNd) else f"{size}_features", rank)


def _copy(module: nn.Module) -> nn.Module:
    """Make a deep copy that shares the frozen parameters with the original."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})
