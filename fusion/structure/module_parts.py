"""A module taken apart into a skeleton without data and its tensors by name, and put together again.

`materialize` undoes `skeleton`. Both are `copy.deepcopy` with the tensors exchanged through its memo. So tied weights
stay tied, and attributes, hooks and subclasses survive as they are.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fusion.structure.objects_of_tensors import look_into

HOOKS = "_hooks_on_parameters"
"""The attribute in which a module without data keeps the hooks on its parameters, by the parameters' names."""


class Hooks(NamedTuple):
    """Hooks on one tensor: those of `register_hook`, and of `register_post_accumulate_grad_hook`."""

    on_gradient: tuple[Callable[..., Any], ...]
    accumulated: tuple[Callable[..., Any], ...]


class TensorTree(nn.Module):
    """Parameters and buffers by dotted name, in nested modules, since torch allows no dot in one name.

    Being a module, it takes part in `.to()`, `state_dict()` and `parameters()`: `"encoder.0.weight"` is found
    there under just that name.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, tuple[nn.Module, str]] = {}

    def put(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        """Add or replace a tensor: an `nn.Parameter` becomes a parameter, any other tensor a buffer."""
        node, leaf = self._place(name)
        if isinstance(tensor, nn.Parameter):
            node._parameters[leaf] = tensor
            return
        node._buffers[leaf] = tensor
        if not persistent:
            node._non_persistent_buffers_set.add(leaf)

    def arrange(self, names: Iterable[str]) -> None:
        """Put the tensors in the order of these names; others come last."""
        order = dict.fromkeys([*names, *self._places])
        self._places = {name: self._places[name] for name in order if name in self._places}

    def pop(self, name: str) -> Tensor:
        node, leaf = self._places.pop(name)
        node._non_persistent_buffers_set.discard(leaf)
        tensor = (node._parameters if leaf in node._parameters else node._buffers).pop(leaf)
        assert tensor is not None
        return tensor

    def get(self, name: str) -> Tensor | None:
        if name not in self._places:
            return None
        node, leaf = self._places[name]
        return node._parameters[leaf] if leaf in node._parameters else node._buffers[leaf]

    def params(self) -> dict[str, nn.Parameter]:
        return {n: p for n, (node, leaf) in self._places.items() if (p := node._parameters.get(leaf)) is not None}

    def bufs(self) -> dict[str, Tensor]:
        return {n: b for n, (node, leaf) in self._places.items() if (b := node._buffers.get(leaf)) is not None}

    def is_persistent(self, name: str) -> bool:
        """Return whether the tensor is part of `state_dict()`."""
        node, leaf = self._places[name]
        return leaf not in node._non_persistent_buffers_set

    def _place(self, name: str) -> tuple[nn.Module, str]:
        if name not in self._places:
            *path, leaf = name.split(".")
            node: nn.Module = self
            for part in path:
                child = node._modules.get(part) or nn.Module()
                node._modules[part] = child
                node = child
            self._places[name] = (node, leaf)
        return self._places[name]


class Slot:
    """One place of a module that holds the tensor called `name`; tied tensors have several."""

    __slots__ = ("holder", "leaf", "name")

    def __init__(self, holder: dict[str, Any], leaf: str, name: str) -> None:
        self.holder, self.leaf, self.name = holder, leaf, name


def tensor_slots(module: nn.Module) -> list[Slot]:
    """Every place that holds a parameter or buffer, each with the name under which torch lists it first."""
    canonical = {id(t): name for name, t in named_tensors(module).items()}
    return [
        Slot(holder, leaf, canonical[id(tensor)])
        for child in module.modules()
        for holder in (child._parameters, child._buffers)
        for leaf, tensor in holder.items()
        if tensor is not None
    ]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def non_persistent(module: nn.Module) -> set[str]:
    """Names of the buffers that `state_dict()` leaves out: constants that the constructor makes."""
    return {
        f"{path}.{leaf}" if path else leaf
        for path, child in module.named_modules()
        for leaf in child._non_persistent_buffers_set
    }


def skeleton(module: nn.Module) -> nn.Module:
    """Make a deep copy of `module` whose tensors have shapes but no data."""
    memo: dict[int, Any] = {id(t): _hollow(t) for t in named_tensors(module).values()}
    hooks = {name: of for name, p in module.named_parameters() if p.requires_grad and any(of := hooks_on(p))}
    if not hooks:
        return copy.deepcopy(module, memo | _empty_containers(module))
    parts = {id(part) for part in module.modules()}
    following = {
        name: Hooks(*(tuple(_following(hook, parts) for hook in kind) for kind in of)) for name, of in hooks.items()
    }
    hollow, kept = copy.deepcopy((module, following), memo | _empty_containers(module))
    vars(hollow)[HOOKS] = kept
    copied: nn.Module = hollow
    return copied


def materialize(hollow: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Make a deep copy of the skeleton `hollow` with `tensors`, by name, in their places; copy all other tensors."""
    memo: dict[int, Any] = {id(t): tensors[name] for name, t in named_tensors(hollow).items() if name in tensors}
    return _with_hooks(copy.deepcopy(hollow, memo | _empty_containers(hollow)))


def duplicate(module: nn.Module) -> nn.Module:
    """Make a deep copy of a module with the hooks on its parameters, which `copy.deepcopy` loses."""
    if not any(any(hooks_on(parameter)) for parameter in module.parameters()):
        return copy.deepcopy(module)
    tensors = {name: like(tensor, tensor.detach().clone()) for name, tensor in named_tensors(module).items()}
    return materialize(skeleton(module), tensors)


def hooks_on(tensor: Tensor) -> Hooks:
    """Return the hooks that a tensor has."""
    kinds = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return Hooks(*(tuple((kind or {}).values()) for kind in kinds))


def _with_hooks(module: nn.Module) -> nn.Module:
    """Put the hooks that a module keeps on its parameters."""
    for name, hooks in vars(module).pop(HOOKS, {}).items():
        parameter = module.get_parameter(name)
        for hook in hooks.on_gradient if parameter.requires_grad else ():
            parameter.register_hook(hook)
        for hook in hooks.accumulated if parameter.requires_grad else ():
            parameter.register_post_accumulate_grad_hook(hook)
    return module


def _following(hook: Any, parts: set[int]) -> Any:
    """Return a hook; wrap a function that sees a part of its module (`self`, say), so that copies see their own."""
    cells = (getattr(hook, "__closure__", None) or ()) if isinstance(hook, types.FunctionType) else ()
    seen = {i: cell.cell_contents for i, cell in enumerate(cells) if cell != types.CellType()}
    own = {i: part for i, part in seen.items() if id(getattr(part, "__self__", part)) in parts}
    return _Following(hook, own) if own else hook


class _Following:
    """A function that sees parts of a module; in a copy it sees the copied parts, unlike after `copy.deepcopy`."""

    def __init__(self, function: types.FunctionType, parts: dict[int, Any]) -> None:
        self.function, self.parts = function, parts

    def __call__(self, *args: Any) -> Any:
        f = self.function
        cells = [types.CellType(self.parts[i]) if i in self.parts else c for i, c in enumerate(f.__closure__ or ())]
        return types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(cells))(*args)


def _empty_containers(module: nn.Module) -> dict[int, Any]:
    """Copy the empty containers of a module, as a memo for `copy.deepcopy`.

    Each module has a dozen for its hooks, and `deepcopy` takes longer over these than over all the rest.
    """
    return {
        id(value): type(value)()
        for child in module.modules()
        for value in vars(child).values()
        if type(value) in (OrderedDict, dict, set, list) and not value
    }


@contextmanager
def bound(slots: list[Slot], tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Put `tensors` in the slots for a while, then the previous ones again.

    Yields:
        A dict that is empty inside the block. If code in the block assigns to a buffer instead of writing into it, the
        dict afterwards holds the new tensor by name.

    Raises:
        RuntimeError: if the code sets a tensor to None.
    """
    before = [slot.holder[slot.leaf] for slot in slots]
    rebound: dict[str, Tensor] = {}
    for slot in slots:
        slot.holder[slot.leaf] = tensors[slot.name]
    try:
        yield rebound
    finally:
        for slot, tensor in zip(slots, before, strict=True):
            after = slot.holder[slot.leaf]
            if after is not tensors[slot.name]:
                rebound[slot.name] = after
            slot.holder[slot.leaf] = tensor
    if emptied := [name for name, tensor in rebound.items() if tensor is None]:
        raise RuntimeError(
            f"forward sets `{emptied[0]}` to None, which a fused model does not follow: keep it in an attribute that "
            "is no buffer"
        )


@contextmanager
def unwritten(tensors: Mapping[str, Tensor], refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `refusal(name)` at the end of the block if code in it has written to one of these tensors."""
    before = _places(tensors)
    yield
    for name, place in _places(tensors).items():
        if place != before[name]:
            raise refusal(name)


def _places(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return the place of each tensor in memory, and the number of writes to it."""
    return {name: (tensor.untyped_storage()._cdata, tensor._version) for name, tensor in tensors.items()}


def _hollow(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def is_batched(value: Any) -> bool:
    """Return whether a value is a tensor of all members from inside vmap, whose member axis is hidden."""
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """Return `data` as a parameter if `tensor` is one, frozen if that is frozen."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def copied(batch: Any) -> Any:
    """Copy any nesting of tensors, so that writes into the copies do not reach the originals."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, look_into(batch))


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor of a batch that has an axis; 1 if none has."""
    return next((leaf.shape[0] for leaf in tree_leaves(look_into(batch)) if has_samples(leaf)), 1)


def has_samples(leaf: Any) -> bool:
    """Return whether a part of a batch is a tensor with an axis."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0
