"""Modules that differ in widths, made alike: the narrower one is padded with zeros, where that changes nothing.

A padded unit reads and feeds weights that are zero. If such a weight gets no gradient, it stays zero under each
optimizer that works element by element. Padding changes the results of a module that normalizes or mixes over the
padded dimension, or draws a random number for each unit. There is no list of such layers: `pads_exactly` runs both.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fusion.compare_with_alone import widened
from fusion.fused_model import Objective
from fusion.hyperparameters import ONE_PASS, SCHEDULE_FREE
from fusion.optim.adafactor import STATE
from fusion.optim.optimizer_config import Hyperparameters
from fusion.part_settings import configs_of_parts
from fusion.skeleton_and_tensors import copied, duplicate, like, materialize, named_tensors, skeleton
from fusion.streams import preserved_generators, seed_generators
from fusion.structure import FusionKey, describe, fusion_key

PADDABLE = (*ONE_PASS, "adamax", "lion", "nadam", "prodigy", "radam", "rmsprop", *SCHEDULE_FREE)
"""Optimizers that work element by element, or by sums over all. In others, the number of elements counts."""

_SPREAD = 0.1
"""Deviation of the noise on weights that are compared: a layer that begins at zero would hide what it reads."""

_GENERIC = 0.25
"""Takes the place of floats that are zero while modules are compared: a member may have another dropout later."""

_RTOL, _ATOL = 1e-9, 1e-11


def form_of(key: FusionKey) -> FusionKey:
    """Return a fusion key without its integers: modules that differ only in widths have one form.

    >>> form_of(fusion_key(nn.Linear(2, 3))) == form_of(fusion_key(nn.Linear(4, 5)))
    True
    """
    return tuple((path, _without_integers(value)) for path, value in key)


def _without_integers(value: Hashable) -> Hashable:
    if isinstance(value, tuple):
        return tuple(_without_integers(item) for item in value)
    return int if type(value) is int else value


def fits_into(key: FusionKey, wider: FusionKey) -> bool:
    """Return whether a module of one key can be padded to the shapes of another's, by shapes and integers alone.

    No size may be smaller there. Each other integer that differs must grow as some size does.

    >>> fits_into(fusion_key(nn.Linear(2, 3)), fusion_key(nn.Linear(4, 3)))
    True
    >>> fits_into(fusion_key(nn.Linear(2, 3)), fusion_key(nn.Linear(4, 2)))
    False
    """
    if form_of(key) != form_of(wider):
        return False
    pairs = [(shaped, a, b) for (shaped, a), (_, b) in zip(_integers(key), _integers(wider), strict=True) if a != b]
    sizes = {(a, b) for shaped, a, b in pairs if shaped}
    grow = all(0 < a < b for a, b in sizes)
    return bool(sizes) and grow and all(any(a * d == b * c for c, d in sizes) for _, a, b in pairs)


def _integers(key: FusionKey) -> Iterator[tuple[bool, int]]:
    """Yield the integers of a key in order; True for the sizes of a parameter or buffer."""
    for _, value in key:
        shaped = isinstance(value, tuple) and value[:1] in (("parameter",), ("buffer",))
        yield from ((shaped, leaf) for leaf in tree_leaves(value) if type(leaf) is int)


def padded(module: nn.Module, wider: nn.Module) -> nn.Module:
    """Copy `module` in the shapes of `wider`, a module of its form: what it lacks there is zero.

    Its tensors, its floats and its mode are copied, all else from `wider`.
    """
    own, tensors = named_tensors(module), dict[str, Tensor]()
    for name, tensor in named_tensors(wider).items():
        tensors[name] = like(tensor, resized(own[name].detach(), tensor.shape))
        vars(tensors[name]).update(copy.deepcopy(vars(tensor)))
    found = materialize(skeleton(wider), tensors)
    floats = describe(module).floats
    for path, slot in describe(found).floats.items():
        slot.set(floats[path].get())
    for part, like_it in zip(found.modules(), module.modules(), strict=True):
        part.training = like_it.training
    return found


def resized(tensor: Tensor, shape: Sequence[int], first: int = 0) -> Tensor:
    """Copy a tensor, each dimension from `first` on cut or padded with zeros to that of `shape`.

    >>> resized(torch.ones(2, 2), (1, 3))
    tensor([[1., 1., 0.]])
    """
    new = tensor.new_zeros((*tensor.shape[:first], *shape))
    kept = tuple(slice(min(a, b)) for a, b in zip(tensor.shape, new.shape, strict=True))
    new[kept] = tensor[kept]
    return new


def padded_to(widest: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules in the shapes of `widest`; those that have them already are returned as they are."""
    shapes = _shapes(widest)
    return [module if _shapes(module) == shapes else padded(module, widest) for module in modules]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named_tensors(module).items()}


def resized_state(state: Mapping[str, Any], template: nn.Module) -> dict[str, Any]:
    """Return the states of a fused model and of its optimizer with all tensors of parameters cut or padded.

    `state` has both by "model" and "optimizer". The shapes are those of `template`.
    """
    shapes = _shapes(template)
    model = {}
    for key, tensor in state["model"].items():
        kind, _, name = key.partition(".")
        model[key] = resized(tensor, shapes[name], first=kind == "own")
    return {**state, "model": model, "optimizer": _resized_optimizer(state["optimizer"], shapes)}


def _resized_optimizer(state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    if "parts" in state:
        return {"parts": {part: _resized_optimizer(of, shapes) for part, of in state["parts"].items()}}
    moments = {
        name: {key: resized(moment, _moment_shape(key, shapes[name]), first=1) for key, moment in of.items()}
        for name, of in state["state"].items()
    }
    return {**state, "state": moments}


def _moment_shape(key: str, shape: torch.Size) -> torch.Size:
    """Return the shape of a member's moment of this name, for a parameter of a shape."""
    stacked = torch.empty(1, *shape, device="meta")
    own = STATE[key](stacked) if key in STATE else stacked
    assert own is not None
    return own.shape[1:]


def keeps_zeros(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration's optimizers leave zeros without gradients as they are, and all else as alone."""
    hps = [Hyperparameters.from_config(own) for own in configs_of_parts(config).values()]
    return all(hp.make is None and hp.kind in PADDABLE for hp in hps)


def pads_exactly(module: nn.Module, wider: nn.Module, objective: Objective, batch: Any) -> bool:
    """Return whether `module`, padded to the shapes of `wider`, computes and learns what it does as it is.

    Copies of both run forward and backward in float64, with random weights, in training and in evaluation. All that
    the objective returns, each gradient and each buffer must agree within rounding. Padded weights must get gradients
    of exactly zero. A module that raises, or that does not run in float64, is not padded.
    """
    if not fits_into(fusion_key(module), fusion_key(wider)):
        return False
    try:
        with preserved_generators():
            narrow, wide = (duplicate(each)._apply(widened) for each in (module, wider))
            _make_generic(narrow)
            zeros = padded(narrow, wide)
            few = tree_map(widened, batch)
            return all(_agree(narrow.train(mode), zeros.train(mode), objective, few) for mode in (True, False))
    except (Exception, SystemExit):  # of a module that runs, but not so: it trains unpadded, with the same results
        return False


def _make_generic(module: nn.Module) -> None:
    seed_generators(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(_SPREAD * torch.randn_like(parameter))
    for slot in describe(module).floats.values():
        if slot.get() == 0:
            slot.set(_GENERIC)


def _agree(narrow: nn.Module, zeros: nn.Module, objective: Objective, batch: Any) -> bool:
    (values, structure), (others, its) = (_evaluated(each, objective, batch) for each in (narrow, zeros))
    if structure != its or not all(map(_same, values, others)):
        return False
    gradients = [{name: p.grad for name, p in each.named_parameters()} for each in (narrow, zeros)]
    for name, own in gradients[0].items():
        padded_to = gradients[1][name]
        if (own is None) != (padded_to is None):
            return False
        if own is not None and padded_to is not None and not _is_padded(own.to_dense(), padded_to.to_dense()):
            return False
    buffers = dict(zeros.named_buffers())
    return all(_same(own, resized(buffers[name], own.shape)) for name, own in narrow.named_buffers())


def _evaluated(module: nn.Module, objective: Objective, batch: Any) -> tuple[list[Any], Any]:
    """Return what the objective returns, flat, and in which nesting; leave the gradients in the module."""
    module.zero_grad()
    seed_generators(1)
    values, structure = tree_flatten(objective(module, copied(batch)))
    learnt = [value.sum() for value in values if isinstance(value, Tensor) and value.requires_grad]
    if learnt:
        torch.stack([value.double() for value in learnt]).sum().backward()
    return values, structure


def _same(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return bool(value == other)
    return value.shape == other.shape and value.dtype == other.dtype and torch.allclose(value, other, _RTOL, _ATOL)


def _is_padded(own: Tensor, other: Tensor) -> bool:
    """Return whether one gradient is the other with zeros around it."""
    inside = tuple(map(slice, own.shape))
    beyond = other.clone()
    beyond[inside] = 0
    return _same(own, other[inside]) and not bool(beyond.any())
