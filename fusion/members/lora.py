"""LoRA adapters (Hu et al. 2022, arXiv:2106.09685) of different ranks and dropouts, made alike so that they fuse.

Shapes: A is [rank, in], B is [out, rank]. If a row of A and its column of B are zero, they stay zero. Each gets its
gradient through the other, so neither gets any. Padding with zeros is therefore exact under each optimizer that works
element by element, and the padded part adds nothing to gradient norms or weight decay. The steps of Adafactor and Muon
depend on shapes: an adapter then steps as one of the padded rank does.
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

    Every adapter is padded with zeros to the largest rank at its place in any of the modules. An adapter without
    dropout gets a dropout of probability 0. Frozen parameters are not copied: the copies share them with the
    originals, and `fuse` holds those that are equal once. Adapters train as with their own ranks, except with Adafactor
    and Muon, whose steps depend on shapes.

    Args:
        modules: Models of one architecture, adapted in the same places.
        rank: The least rank that any adapter is padded to. With it, modules that are padded one by one fuse, too.

    Returns:
        As many modules; `trim_lora` takes the padding off again.

    Raises:
        ValueError: if a module has no adapters, or has them in other places than the first, or if `rank` is below 1.
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
    """Copy a module from `pad_lora`, e.g. unfused after training, with its adapters at their own ranks again.

    Frozen parameters are not copied. `peft` notes the rank of each adapter in its layer; padding leaves that unchanged.
    """
    check_module(module)
    trimmed = _copy(module)
    for (path, name), _ in _adapters(module):
        rank = vars(trimmed.get_submodule(path))["r"][name]
        _resize(trimmed, (path, name), int(rank))
    return trimmed


def _adapters(module: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield ((path of the adapted layer, adapter's name), A)."""
    for path, layer in module.named_modules():
        lora_A = getattr(layer, "lora_A", None)
        if isinstance(lora_A, nn.ModuleDict):
            for name, down in lora_A.items():
                yield (path, name), down.get_parameter("weight")


def _resize(module: nn.Module, place: tuple[str, str], rank: int) -> None:
    """Cut an adapter, or pad it with zeros, to a rank."""
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
    """Make a deep copy that shares the frozen parameters."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})
