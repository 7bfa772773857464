"""K modules of one structure as one module.

Shape suffixes: K members, N samples of a batch. Every stacked tensor has K as its first axis; a tensor
without it is shared by all members.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion.members import member_indices
from fusion.structure import FusionKey, check_same_structure, differences, fusion_key
from fusion.tensors import (
    TensorTree,
    bound,
    materialize,
    named_tensors,
    non_persistent,
    skeleton,
    tensor_slots,
)


def fuse(modules: Sequence[nn.Module]) -> "FusedModel":
    """K modules of one structure as one, which trains all of them at once, each as if it were alone.

    Args:
        modules: K >= 1 modules with equal `fusion_key`, on one device. They are copied, and stay as they are.

    Returns:
        A `FusedModel` whose parameters and buffers are those of the modules, stacked as [K, ...]. Frozen
        parameters that are equal in all members, and constants that are (non-persistent buffers), are held
        once, without K.

    Raises:
        TypeError: if something else than modules is given.
        ValueError: if there are no modules, or if they differ in more than the values of tensors and floats.

    >>> fused = fuse([nn.Linear(2, 3) for _ in range(4)])
    >>> fused.stacked["weight"].shape, fused(torch.ones(5, 2)).shape
    (torch.Size([4, 3, 2]), torch.Size([4, 5, 3]))
    """
    modules = list(modules)
    _check_modules(modules)
    states = [named_tensors(module) for module in modules]
    members, common = TensorTree(), TensorTree()
    constants = non_persistent(modules[0])
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        may_share = name in constants or (isinstance(first, nn.Parameter) and not first.requires_grad)
        if may_share and _all_equal(tensors):
            common.put(name, _like(first, first.detach().clone()), persistent=name not in constants)
        else:
            stacked = torch.stack([tensor.detach() for tensor in tensors])
            members.put(name, _like(first, stacked), persistent=name not in constants)
    return FusedModel([skeleton(module) for module in modules], [_tags(s) for s in states], members, common)


class FusedModel(nn.Module):
    """K modules in one, made by `fuse`.

    What is written for one module runs for all of them: `fused(x)` is their forward, `fused.map(objective,
    batch)` any function of one module. The K results come from one vmapped computation; the sum of K losses
    gives each member its own gradient, since no member's loss depends on another's parameters.
    """

    def __init__(
        self,
        skeletons: list[nn.Module],
        tags: list[dict[str, dict[str, Any]]],
        members: TensorTree,
        common: TensorTree,
    ) -> None:
        super().__init__()
        self.members, self.common = members, common
        self._skeletons, self._tags = skeletons, tags
        self._bind(skeletons[0])

    @property
    def K(self) -> int:  # noqa: N802
        """The number of members."""
        return len(self._skeletons)

    def __len__(self) -> int:
        return len(self._skeletons)

    @property
    def template(self) -> nn.Module:
        """The module that computes, one member's, without data: its modes and attributes are every
        member's."""
        return self._skeletons[0]

    @property
    def stacked(self) -> dict[str, nn.Parameter]:
        """The parameters that each member has its own of, by their name in the original module: [K, ...]."""
        return self.members.params()

    @property
    def stacked_buffers(self) -> dict[str, Tensor]:
        """The buffers that each member has its own of, by their name in the original module: [K, ...]."""
        return self.members.bufs()

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors that all members have in common (frozen parameters, constants), by name, without K."""
        return {**self.common.params(), **self.common.bufs()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The members' forward on the same arguments: every tensor of the result gains a leading K."""
        return self.map(lambda model, _: model(*args, **kwargs), None)

    def map(self, objective: Callable[[Any, Any], Any], batch: Any) -> Any:
        """Evaluate a function of one module for every member, on one batch.

        Args:
            objective: called as `objective(model, batch)` with a real module, attributes and methods
                included, whose tensors are one member's. It returns a tensor, or a dict, list or tuple of
                tensors.
            batch: passed on as it is, and shared by all members.

        Returns:
            What `objective` returns, each tensor with a leading K: losses are [K]. Buffers that the modules
            update (running statistics, counters) are updated member by member. Random numbers (dropout)
            differ between members.
        """

        def one(tensors: dict[str, Tensor]) -> Any:
            with bound(self._slots, {**shared, **tensors}) as rebound:
                result = objective(self.template, batch)
            return result, rebound

        shared = self.shared
        tensors: dict[str, Tensor] = {**self.stacked, **self.stacked_buffers}
        if not tensors:
            tensors[""] = torch.empty(self.K, 0)
        result, rebound = torch.func.vmap(one, randomness="different")(tensors)
        for name, value in rebound.items():
            self._rebind(name, value.detach())
        return result

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all members but those at `indices`, in that order, in place.

        Stacked parameters are replaced by new ones without gradients; optimizers of this package find them by
        name (call their `keep` with the same indices). A repeated index makes a copy of that member.

        Raises:
            ValueError: if no index is given.
            IndexError: if an index is not in [-K, K).
        """
        chosen, template = member_indices(indices, self.K), self.template
        for name, tensor in {**self.stacked, **self.stacked_buffers}.items():
            at = torch.tensor(chosen, device=tensor.device)
            self.members.put(name, _like(tensor, tensor.detach().index_select(0, at)))
        self._skeletons = [self._skeletons[k] for k in chosen]
        self._tags = [self._tags[k] for k in chosen]
        self._bind(template)

    def concat(self, other: "FusedModel") -> None:
        """Append the members of `other`, which keeps its own, in place.

        Raises:
            ValueError: if the structures differ.
        """
        if self.key != other.key:
            listed = "; ".join(differences(self.key, other.key)[:5])
            raise ValueError(f"other cannot be fused with this model, they differ in {listed}")
        for name in list(self.shared):
            here, there = self.shared[name], other.shared.get(name)
            if there is None or not torch.equal(here, there):
                self._unshare(name)
        for name, tensor in {**self.stacked, **self.stacked_buffers}.items():
            both = [tensor.detach(), other._per_member(name).to(tensor.device)]
            self.members.put(name, _like(tensor, torch.cat(both)))
        self._skeletons = self._skeletons + other._skeletons
        self._tags = self._tags + other._tags

    def unfuse(self, k: int) -> nn.Module:
        """Member `k` as an ordinary module with tensors of its own: `unfuse` undoes `fuse`.

        Raises:
            IndexError: if `k` is not in [-K, K).
        """
        (k,) = member_indices([k], self.K)
        tensors: dict[str, Tensor] = {}
        for name, hollow in named_tensors(self.template).items():
            tensors[name] = _like(hollow, self._per_member(name)[k].clone())
            vars(tensors[name]).update(copy.deepcopy(self._tags[k].get(name, {})))
        module = materialize(self._skeletons[k], tensors)
        _copy_mode(self.template, module)
        return module

    def train(self, mode: bool = True) -> "FusedModel":
        """Set the mode of all members."""
        super().train(mode)
        self.template.train(mode)
        return self

    @property
    def key(self) -> FusionKey:
        """What a module must share with the members to join them."""
        return fusion_key(self.template)

    def _per_member(self, name: str) -> Tensor:
        """The tensor `name` as [K, ...]; without a copy where it is shared."""
        own = self.members.get(name)
        if own is not None:
            return own.detach()
        shared = self.shared[name].detach()
        return shared.expand(self.K, *shared.shape)

    def _unshare(self, name: str) -> None:
        persistent = self.common.is_persistent(name)
        own = self._per_member(name).clone()
        self.members.put(name, _like(self.common.pop(name), own), persistent=persistent)

    def _rebind(self, name: str, value: Tensor) -> None:
        """A module assigned to its buffer: from now on each member has its own."""
        if name in self.shared:
            self._unshare(name)
        self.members.put(name, value.contiguous())

    def _bind(self, like: nn.Module) -> None:
        """Run the first member's skeleton from now on, in the mode of the module `like`."""
        self._slots = tensor_slots(self.template)
        _copy_mode(like, self.template)
        self.training = self.template.training


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """`data` as a parameter if `tensor` is one, frozen if it is."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data


def _copy_mode(source: nn.Module, target: nn.Module) -> None:
    for theirs, ours in zip(source.modules(), target.modules(), strict=True):
        ours.training = theirs.training


def _all_equal(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(other is first or torch.equal(first, other) for other in tensors[1:])


def _tags(state: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Attributes that were set on tensors, by name: other libraries mark parameters so."""
    return {name: dict(vars(tensor)) for name, tensor in state.items() if vars(tensor)}


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("modules is empty, but a fused model has at least one member")
    for k, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"modules[{k}] is a {type(module).__name__}, but must be an nn.Module")
        lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.UninitializedParameter)]
        if lazy:
            raise ValueError(f"modules[{k}].{lazy[0]} is not initialized: run the module once first")
    check_same_structure([fusion_key(module) for module in modules])
    devices = {str(t.device) for module in modules for t in named_tensors(module).values()}
    if len(devices) > 1:
        raise ValueError(f"modules are on several devices ({', '.join(sorted(devices))}), but must be on one")
    modes = [[child.training for child in module.modules()] for module in modules]
    for k, mode in enumerate(modes):
        if mode != modes[0]:
            raise ValueError(f"modules[{k}] is not in the mode (train or eval) of modules[0] in all parts")
