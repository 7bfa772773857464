"""The tensors of K modules of one structure, by name.

Shape suffix: K members. Every stacked tensor has K as its first axis; a tensor without it is shared by all members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion.argument_checks import check_mapping
from fusion.check.equal_within_rounding import FusionMismatch
from fusion.evaluate.per_member_floats import Settings
from fusion.members.attributes import OwnValues, Snapshot, changed, follow, snapshot
from fusion.members.member_indices import copy_rows, member_indices, member_rows
from fusion.members.rows import FlatParameters, make_dense
from fusion.structure import FloatSlot, describe
from fusion.structure.module_parts import TensorTree, like, named_tensors


@dataclass(frozen=True)
class Shell:
    """A member, apart from the data of its tensors.

    Attributes:
        skeleton: The module without data.
        marks: Attributes that were set on its tensors, by name: other libraries mark parameters so.
        floats: The places of floats in the skeleton, by path.
    """

    skeleton: nn.Module
    marks: Mapping[str, Mapping[str, Any]]
    floats: Mapping[str, FloatSlot]

    def twin(self) -> Shell:
        """Return a member like this one, with a skeleton of its own."""
        memo: dict[int, Any] = {}
        hollow = copy.deepcopy(self.skeleton, memo)
        owners = ((path, slot, memo.get(id(slot.owner), slot.owner)) for path, slot in self.floats.items())
        return Shell(hollow, self.marks, {path: replace(slot, owner=owner) for path, slot, owner in owners})


class StackedTensors(nn.Module):
    """K modules taken apart: their tensors stacked, or held once, and beside them the rest of each member.

    Attributes:
        own: The tensors that differ between members, [K, ...] each.
        changes: Number of times that tensors replaced others.
        parts: Parameter name -> part of the model, of those that `flat` puts in rows of their part.
    """

    _members: list[Shell]
    _settings: Settings
    _caught_up: Snapshot
    own_values: OwnValues

    def __init__(self, own: TensorTree, common: TensorTree) -> None:
        super().__init__()
        self.own, self.common = own, common
        self.changes = 0
        self._flat: FlatParameters | None = None
        self.parts: Mapping[str, str] = {}

    @property
    def K(self) -> int:  # noqa: N802
        return len(self._members)

    @property
    def marks(self) -> Mapping[str, Mapping[str, Any]]:
        """Return attributes that were set on the tensors of the first member, by name."""
        return self._members[0].marks

    def __len__(self) -> int:
        return len(self._members)

    @property
    def template(self) -> nn.Module:
        """Return the module, without data, that computes for all members; its modes and attributes hold for all."""
        return self._members[0].skeleton

    @property
    def stacked(self) -> dict[str, nn.Parameter]:
        """Return the parameters that each member has its own of, by their name in the original module: [K, ...]."""
        return self.own.params()

    @property
    def stacked_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that each member has its own of, by their name in the original module: [K, ...]."""
        return self.own.bufs()

    @property
    def shared(self) -> dict[str, Tensor]:
        """Return the tensors that all members have in common (frozen parameters, constants), by name, without K."""
        return {**self.common.params(), **self.common.bufs()}

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        members: Sequence[int] | None = None,
    ) -> Any:
        """Restore the result of `state_dict`; the members may share other tensors now than they did then.

        Args:
            state_dict: Of as many members as this model has, or of more.
            members: The members of `state_dict` to load, in this order, as after `keep(members)`; all if None.

        Raises:
            IndexError: if one of `members` is not in [-K, K) of the K in `state_dict`.
            RuntimeError: if names or shapes differ, or the number of members.
        """
        check_mapping("state_dict", state_dict)
        state = dict(state_dict)
        if members is not None:
            own = {name: tensor for name, tensor in state.items() if name.startswith("own.")}
            chosen = member_indices(members, len(next(iter(own.values()))), "members")
            state |= {name: member_rows(tensor, chosen) for name, tensor in own.items()}
        for name, parameter in self.stacked.items():
            if parameter.requires_grad and f"common.{name}" in state:  # frozen then, and trained now
                held = state.pop(f"common.{name}")
                state[f"own.{name}"] = held.expand(self.K, *held.shape).clone()
        for name in self.shared:
            if f"own.{name}" in state:
                self._unshare(name)
        for name, tensor in {**self.stacked, **self.stacked_buffers}.items():
            if f"common.{name}" in state:
                self.common.put(name, like(self.own.pop(name), tensor.detach()[0].clone()))
        self.changes += 1
        return super().load_state_dict(state, strict, assign)

    def flat(self, names: Iterable[str]) -> FlatParameters:
        """Put these stacked parameters and their gradients side by side in memory.

        Their values stay the same, but their addresses change. A later call for the same names finds them in place.
        """
        stacked = self.stacked
        wanted = {name: stacked[name] for name in names}
        if self._flat is None or not self._flat.holds(wanted):
            self._flat = FlatParameters(wanted, self.parts)
            self.changes += 1
        return self._flat

    def in_rows(self, name: str) -> bool:
        """Return whether `flat` has put a parameter in rows."""
        return self._flat is not None and name in self._flat.values.parts

    def set_parts(self, parts: Mapping[str, str]) -> None:
        """Say which part of the model each parameter is of, where parts have optimizers of their own."""
        if parts != self.parts:
            self.parts, self._flat = dict(parts), None

    def diverged(self) -> list[int]:
        """Return the members that have an infinite or NaN value in a parameter or floating-point buffer.

        A member that diverges harms no other: it can train on as it is, or be left out by `keep`.
        """
        tensors = [t.detach() for t in (*self.stacked.values(), *self.stacked_buffers.values())]
        numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        if not numbers:
            return []
        finite_K = torch.stack([torch.isfinite(t).reshape(self.K, -1).all(1) for t in numbers]).all(0)
        return [k for k, finite in enumerate(finite_K.tolist()) if not finite]

    @property
    def attributes_changed(self) -> bool:
        """Return whether modules have changed attributes while they ran, other than parameters and buffers."""
        return bool(self.own_values.of_members) or bool(changed(self.template, self._caught_up))

    def set_floats(self, modules: Mapping[int, nn.Module]) -> None:
        """Give members the floats (dropout probability, label smoothing) of modules, whose tensors are not read."""
        self._catch_up(range(self.K))
        for k, module in modules.items():
            theirs = describe(module).floats
            for path, slot in self._members[k].floats.items():
                slot.set(theirs[path].get())
        self._collect_floats()

    def _collect_floats(self) -> None:
        """Take the floats of all members as vectors; a recorded step has read the earlier ones."""
        self._caught_up = snapshot(self.template)
        before, self._settings = self._settings.values_K, Settings([member.floats for member in self._members])
        if before or self._settings.values_K:
            self.changes += 1

    def part_buffers(self) -> None:
        """Give each member its own copy of the buffers that all share, so that one may write into its own."""
        for name in self.common.bufs():
            self._unshare(name)

    def part_parameters(self, names: Iterable[str]) -> None:
        """Give each member its own copy of those of these parameters that all share."""
        chosen = set(names)
        for name in [name for name in self.common.params() if name in chosen]:
            self._unshare(name)

    def _copy_tensors(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Write members' tensors, and their gradients, over those of others, in place."""
        make_dense(self.stacked.values())
        tensors = [*self.stacked.values(), *self.stacked_buffers.values()]
        for tensor in (*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)):
            copy_rows(tensor, targets, sources)

    def _copy_shells(self, targets: Sequence[int], sources: Sequence[int], paths: Iterable[str]) -> None:
        """Give members the floats at these paths, and the attributes of tensors, that others have."""
        self._catch_up(range(self.K))
        found = [
            ({path: self._members[k].floats[path].get() for path in paths}, self._members[k].marks) for k in sources
        ]
        for k, (floats, marks) in zip(targets, found):
            self._members[k] = replace(self._members[k], marks=marks)
            for path, value in floats.items():
                self._members[k].floats[path].set(value)
        self._collect_floats()

    def _catch_up(self, indices: Iterable[int]) -> None:
        """Give members the changes of the template in the meantime, such as its mode or its hooks."""
        self._part_values()
        own = self._settings.places()
        for k in indices:
            follow(self.template, self._members[k].skeleton, own, self._caught_up)

    def _part_values(self) -> None:
        """Take from the template the tensors that forward left there, and give each member its own."""
        if self.own_values.part(self.template):
            self.changes += 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StackedTensors:
        self.changes += 1
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _per_member(self, name: str) -> Tensor:
        """Return the tensor `name` as [K, ...]; a shared one is not copied."""
        own = self.own.get(name)
        if own is not None:
            return own.detach()
        if name not in self.shared:
            raise FusionMismatch(
                f"forward makes the tensor `{name}`, of which members would share one: make it in `__init__`, or run "
                "each module once before it is fused"
            )
        shared = self.shared[name].detach()
        return shared.expand(self.K, *shared.shape)

    def _unshare(self, name: str) -> None:
        persistent = self.common.is_persistent(name)
        own = self._per_member(name).clone()
        self.changes += 1
        self.own.put(name, like(self.common.pop(name), own), persistent=persistent)
        self.own.arrange(named_tensors(self.template))

    def _rebind(self, name: str, value: Tensor) -> None:
        """Take a tensor that a module assigned to its buffer: from now on each member has its own."""
        if name in self.shared:
            self._unshare(name)
        self.own.put(name, value.contiguous())
