"""Takes a module apart into a skeleton without data and its named tensors, and puts it together again.

`materialize` undoes `skeleton`. Both call `copy.deepcopy`, and exchange the tensors through its memo. So tied weights
stay tied, and attributes, hooks and subclasses are kept.
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
"""Name of the attribute in which a skeleton keeps the hooks on its parameters: a dict, parameter name -> hooks."""


class Hooks(NamedTuple):
    """The hooks on one tensor, which `register_hook` and `register_post_accumulate_grad_hook` have registered."""

    on_gradient: tuple[Callable[..., Any], ...]
    accumulated: tuple[Callable[..., Any], ...]


class TensorTree(nn.Module):
    """Parameters and buffers by dotted name, such as "encoder.0.weight".

    They are in nested modules, because torch allows no dots in names. A tree is a module itself, so `.to()`,
    `state_dict()` and `parameters()` include its tensors, under the same names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, tuple[nn.Module, str]] = {}

    def put(self, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
        """Add or replace a tensor: an `nn.Parameter` as a parameter, any other tensor as a buffer."""
        node, leaf = self._place(name)
        if isinstance(tensor, nn.Parameter):
            node._parameters[leaf] = tensor
            return
        node._buffers[leaf] = tensor
        if not persistent:
            node._non_persistent_buffers_set.add(leaf)

    def arrange(self, names: Iterable[str]) -> None:
        """Sort the tensors by the order of `names`; all others come last."""
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
        """Return whether `state_dict()` includes the tensor `name`."""
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
    """A place in a module that holds the tensor called `name`. A tied tensor has several slots."""

    __slots__ = ("holder", "leaf", "name")

    def __init__(self, holder: Any, leaf: Any, name: str) -> None:
        self.holder, self.leaf, self.name = holder, leaf, name


def tensor_slots(module: nn.Module) -> list[Slot]:
    """Return all slots of parameters and buffers, also those in plain attributes, lists and dicts of a module.

    The name of a tied tensor is the first under which torch lists it.
    """
    canonical = {id(t): name for name, t in named_tensors(module).items()}
    found = []
    for child in module.modules():
        # Recurrent layers keep a list of their weights up to date by themselves.
        plain = {} if isinstance(child, nn.RNNBase) else vars(child)
        for holder in (child._parameters, child._buffers, *_holders(plain)):
            places = enumerate(holder) if isinstance(holder, list) else holder.items()
            found += [Slot(holder, leaf, canonical[id(value)]) for leaf, value in places if id(value) in canonical]
    return found


def _holders(attributes: dict[str, Any]) -> Iterator[dict[Any, Any] | list[Any]]:
    """Yield a module's attributes, and all lists and dicts in them, without the containers that torch registers."""
    rest: list[Any] = [attributes]
    seen = {id(attributes.get(name)) for name in ("_parameters", "_buffers", "_modules")}
    while rest:
        holder = rest.pop()
        seen.add(id(holder))
        yield holder
        inner = holder if isinstance(holder, list) else holder.values()
        rest += [value for value in inner if type(value) in (list, dict) and id(value) not in seen]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, then all buffers, by name; each tensor only once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def non_persistent(module: nn.Module) -> set[str]:
    """Return the names of the buffers that `state_dict()` leaves out, such as constants that the constructor makes."""
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
    """Make a deep copy of the skeleton `hollow` that holds the given `tensors`; its other tensors are copied."""
    memo: dict[int, Any] = {id(t): tensors[name] for name, t in named_tensors(hollow).items() if name in tensors}
    return _with_hooks(copy.deepcopy(hollow, memo | _empty_containers(hollow)))


def duplicate(module: nn.Module) -> nn.Module:
    """Make a deep copy of a module, including hooks on its parameters, which `copy.deepcopy` would lose."""
    if not any(any(hooks_on(parameter)) for parameter in module.parameters()):
        return copy.deepcopy(module)
    tensors = {name: like(tensor, tensor.detach().clone()) for name, tensor in named_tensors(module).items()}
    return materialize(skeleton(module), tensors)


def hooks_on(tensor: Tensor) -> Hooks:
    """Return the hooks on a tensor."""
    kinds = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return Hooks(*(tuple((kind or {}).values()) for kind in kinds))


def _with_hooks(module: nn.Module) -> nn.Module:
    """Move the hooks that a copied skeleton keeps in `HOOKS` to its parameters, and return the skeleton."""
    for name, hooks in vars(module).pop(HOOKS, {}).items():
        parameter = module.get_parameter(name)
        for hook in hooks.on_gradient if parameter.requires_grad else ():
            parameter.register_hook(hook)
        for hook in hooks.accumulated if parameter.requires_grad else ():
            parameter.register_post_accumulate_grad_hook(hook)
    return module


def _following(hook: Any, parts: set[int]) -> Any:
    """Return `hook`, wrapped if its closure holds a part of the module, such as `self`.

    In a copy of the module, the wrapped hook sees the copied part.
    """
    cells = (getattr(hook, "__closure__", None) or ()) if isinstance(hook, types.FunctionType) else ()
    seen = {i: cell.cell_contents for i, cell in enumerate(cells) if cell != types.CellType()}
    own = {i: part for i, part in seen.items() if id(getattr(part, "__self__", part)) in parts}
    return _Following(hook, own) if own else hook


class _Following:
    """A function whose closure holds parts of a module. Unlike a plain function's, its deep copy holds copied parts."""

    def __init__(self, function: types.FunctionType, parts: dict[int, Any]) -> None:
        self.function, self.parts = function, parts

    def __call__(self, *args: Any) -> Any:
        f = self.function
        cells = [types.CellType(self.parts[i]) if i in self.parts else c for i, c in enumerate(f.__closure__ or ())]
        return types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(cells))(*args)


def _empty_containers(module: nn.Module) -> dict[int, Any]:
    """Copy all empty containers of a module; return the copies as a memo for `copy.deepcopy`.

    Each module has a dozen empty containers for hooks. Without this memo, `deepcopy` would spend most of its time on
    them.
    """
    return {
        id(value): type(value)()
        for child in module.modules()
        for value in vars(child).values()
        if type(value) in (OrderedDict, dict, set, list) and not value
    }


@contextmanager
def bound(slots: list[Slot], tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Put `tensors` into the slots, inside this context; then restore the previous tensors.

    Yields:
        A dict that is empty inside the context. If code assigns a new tensor to a buffer, rather than writing into it,
        the dict holds the new tensor afterwards, by name.

    Raises:
        RuntimeError: if the code sets a buffer or parameter to None.
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
    """Raise `refusal(name)` at the end of this context if code inside has written to one of the tensors."""
    before = _places(tensors)
    yield
    for name, place in _places(tensors).items():
        if place != before[name]:
            raise refusal(name)


def _places(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return for each tensor its storage and autograd's count of in-place writes."""
    return {name: (tensor.untyped_storage()._cdata, tensor._version) for name, tensor in tensors.items()}


def _hollow(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def is_batched(value: Any) -> bool:
    """Return whether a value is a tensor inside vmap that holds all members, with a hidden member axis."""
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """Return `data` as a parameter if `tensor` is one, with the same `requires_grad`; else return `data` itself."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def copied(batch: Any) -> Any:
    """Copy the tensors of a batch, in any nesting, so that writes do not reach the originals."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, look_into(batch))


def count_samples(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor that has an axis; 1 if there is none."""
    return next((leaf.shape[0] for leaf in tree_leaves(look_into(batch)) if has_samples(leaf)), 1)


def has_samples(leaf: Any) -> bool:
    """Return whether a part of a batch is a tensor with at least one axis, of which the first is the samples."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0
