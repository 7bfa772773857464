"""K modules of one structure as one module.

Shape suffixes: K members, N samples of a batch. Stacked tensors have K as their first axis. All members share a tensor
that has no K axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion.argument_checks import FusionMismatch, check_each, check_function, check_mapping, is_int, require
from fusion.evaluate.avoided_kernels import avoiding_kernels
from fusion.evaluate.checkpointing import activations_kept
from fusion.evaluate.evaluate import One, at_once, in_turn, own_rows
from fusion.evaluate.per_member_floats import Settings
from fusion.members.attributes import OwnValues, Snapshot, changed, check_same_state, follow, put_back, snapshot
from fusion.members.hooks import run_hooks
from fusion.members.member_indices import copy_rows, member_indices, member_pairs, member_rows
from fusion.members.rows import FlatParameters, make_dense
from fusion.streams import Streams
from fusion.structure import FloatSlot, FusionKey, check_same, describe, of_present
from fusion.structure.module_parts import (
    TensorTree,
    bound,
    copied,
    like,
    materialize,
    named_tensors,
    tensor_slots,
    unwritten,
)

Objective = Callable[[Any, Any], Any]
"""A function `objective(model, batch)`, written for one module. It returns tensors, also in dicts, lists or tuples."""


@dataclass(frozen=True)
class Shell:
    """A member without the data of its tensors.

    Attributes:
        skeleton: The module, whose tensors have shapes but no data.
        marks: Tensor name -> attributes that were set on the tensor, such as marks of other libraries.
        floats: Path -> place of a float in the skeleton.
    """

    skeleton: nn.Module
    marks: Mapping[str, Mapping[str, Any]]
    floats: Mapping[str, FloatSlot]

    def twin(self) -> Shell:
        """Return a copy for another member, with a skeleton of its own."""
        memo: dict[int, Any] = {}
        hollow = copy.deepcopy(self.skeleton, memo)
        owners = ((path, slot, memo.get(id(slot.owner), slot.owner)) for path, slot in self.floats.items())
        return Shell(hollow, self.marks, {path: replace(slot, owner=owner) for path, slot, owner in owners})


class StackedTensors(nn.Module):
    """The tensors of K modules, stacked or held once, and a `Shell` with the rest of each member.

    Attributes:
        own: Tensors of which each member has its own, [K, ...] each.
        common: Tensors that all members share, without K.
        changes: Number of times that tensors were replaced by others.
        parts: Parameter name -> part of the model. `flat` puts different parts into different matrices.
    """

    _members: list[Shell]
    _settings: Settings
    _caught_up: Snapshot
    own_values: OwnValues
    written: frozenset[str]

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
        """Return the attributes that were set on the first member's tensors, by name of the tensor."""
        return self._members[0].marks

    def __len__(self) -> int:
        return len(self._members)

    @property
    def template(self) -> nn.Module:
        """Return the module without data that computes for all members. All members have its mode and attributes."""
        return self._members[0].skeleton

    @property
    def stacked(self) -> dict[str, nn.Parameter]:
        """Return the stacked parameters [K, ...], by their names in the original module."""
        return self.own.params()

    @property
    def stacked_buffers(self) -> dict[str, Tensor]:
        """Return the stacked buffers [K, ...], by their names in the original module."""
        return self.own.bufs()

    @property
    def shared(self) -> dict[str, Tensor]:
        """Return the tensors that all members share (frozen parameters, constants), without K, by name."""
        return {**self.common.params(), **self.common.bufs()}

    @torch.inference_mode(False)
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        members: Sequence[int] | None = None,
    ) -> Any:
        """Restore the result of `state_dict`; members need not share the same tensors as when it was saved.

        Args:
            state_dict: The state of as many members as this model has, or of more.
            members: Indices of the members in `state_dict` to load, in this order; None for all.

        Raises:
            IndexError: if one of `members` is not in [-K, K) of the K in `state_dict`.
            RuntimeError: if names, shapes or the number of members differ.
        """
        check_mapping("state_dict", state_dict)
        state = dict(state_dict)
        if members is not None:
            own = {name: tensor for name, tensor in state.items() if name.startswith("own.")}
            chosen = member_indices(members, len(next(iter(own.values()))), "members") if own else []
            state |= {name: member_rows(tensor, chosen) for name, tensor in own.items()}
        for name, parameter in self.stacked.items():
            if (parameter.requires_grad or name in self.written) and f"common.{name}" in state:
                held = state.pop(f"common.{name}")  # shared when saved, but now each member has its own
                state[f"own.{name}"] = held.expand(self.K, *held.shape).clone()
        for name in (name for name in self.shared if f"own.{name}" in state):
            self._unshare(name)
        for name, tensor in {**self.stacked, **self.stacked_buffers}.items():
            if f"common.{name}" in state:
                self.common.put(name, like(self.own.pop(name), tensor.detach()[0].clone()))
        self.changes += 1
        return super().load_state_dict(state, strict, assign)

    def flat(self, names: Iterable[str]) -> FlatParameters:
        """Move the named stacked parameters into rows: matrices [K, N] in which row k holds the values of member k.

        Values stay; addresses change, unless a call had the same names. The result has rows for gradients, too.
        """
        stacked = self.stacked
        wanted = {name: stacked[name] for name in names}
        if self._flat is None or not self._flat.holds(wanted):
            self._flat = FlatParameters(wanted, self.parts)
            self.changes += 1
        return self._flat

    def in_rows(self, name: str) -> bool:
        """Return whether `flat` has moved the parameter `name` into rows of a matrix [K, N], one for each member."""
        return self._flat is not None and name in self._flat.values.parts

    def set_parts(self, parts: Mapping[str, str]) -> None:
        """Set the part of the model to which each parameter belongs, if parts have their own optimizers."""
        if parts != self.parts:
            self.parts, self._flat = dict(parts), None

    def diverged(self) -> list[int]:
        """Return the indices of members with an infinite or NaN value in a parameter or floating-point buffer.

        A diverged member does not affect other members. It can stay, or `keep` can drop it.
        """
        tensors = [t.detach() for t in (*self.stacked.values(), *self.stacked_buffers.values())]
        numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        if not numbers:
            return []
        finite_K = torch.stack([torch.isfinite(t).reshape(self.K, t[0].numel()).all(1) for t in numbers]).all(0)
        return [k for k, finite in enumerate(finite_K.tolist()) if not finite]

    @property
    def attributes_changed(self) -> bool:
        """Return whether modules changed attributes other than parameters and buffers while they ran."""
        return bool(self.own_values.of_members) or bool(changed(self.template, self._caught_up))

    def set_floats(self, modules: Mapping[int, nn.Module]) -> None:
        """Give member k the floats (dropout probability, label smoothing) of `modules[k]`; its tensors are not read."""
        self._catch_up(range(self.K))
        for k, module in modules.items():
            theirs = describe(module).floats
            for path, slot in self._members[k].floats.items():
                slot.set(theirs[path].get())
        self._collect_floats()

    def _collect_floats(self) -> None:
        """Collect the floats in which members differ; if there are or were any, recorded steps are outdated."""
        self._caught_up = snapshot(self.template)
        before, self._settings = self._settings.values_K, Settings([member.floats for member in self._members])
        if before or self._settings.values_K:
            self.changes += 1

    def part_buffers(self) -> None:
        """Give each member its own copy of the shared buffers, so that a member can write into its copy."""
        for name in self.common.bufs():
            self._unshare(name)

    def part_parameters(self, names: Iterable[str]) -> None:
        """Give each member its own copy of the named parameters, if all members share them now."""
        chosen = set(names)
        for name in [name for name in self.common.params() if name in chosen]:
            self._unshare(name)

    def _copy_tensors(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Copy tensors and gradients of the members `sources` to the members `targets`, in place."""
        make_dense(self.stacked.values())
        tensors = [*self.stacked.values(), *self.stacked_buffers.values()]
        for tensor in (*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)):
            copy_rows(tensor, targets, sources)

    def _copy_shells(self, targets: Sequence[int], sources: Sequence[int], paths: Iterable[str]) -> None:
        """Copy floats at `paths`, and attributes of tensors, of the members `sources` to the members `targets`."""
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
        """Make the template's changes since `_caught_up` (mode, hooks and so on) in these members' modules, too."""
        self._part_values()
        own, changes = self._settings.places(), changed(self.template, self._caught_up)
        for k in indices if changes else ():
            follow(self.template, self._members[k].skeleton, own, self._caught_up, changes)

    def _part_values(self) -> None:
        """Remove from the template the tensors that forward assigned, and store each member's part in `own_values`."""
        if self.own_values.part(self.template):
            self.changes += 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StackedTensors:
        self.changes += 1
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _per_member(self, name: str) -> Tensor:
        """Return the tensor `name` as [K, ...]; a shared tensor is expanded, not copied."""
        own, shared = self.own.get(name), self.common.get(name)
        if own is not None:
            return own.detach()
        if shared is None:
            raise FusionMismatch(
                f"forward makes the tensor `{name}`, of which members would share one: make it in `__init__`, or run "
                "each module once before it is fused"
            )
        return shared.detach().expand(self.K, *shared.shape)

    def _unshare(self, name: str) -> None:
        persistent = self.common.is_persistent(name)
        own = self._per_member(name).clone()
        self.changes += 1
        self.own.put(name, like(self.common.pop(name), own), persistent=persistent)
        self.own.arrange(named_tensors(self.template))

    def _rebind(self, name: str, value: Tensor) -> None:
        """Store a tensor [K, ...] that a module assigned to its buffer, so that each member has its own from now on."""
        if name in self.shared:
            self._unshare(name)
        self.own.put(name, value.contiguous())


def check_fused(fused: object, name: str = "fused") -> None:
    """Raise a `ValueError` unless `fused` is a `FusedModel`."""
    require(isinstance(fused, FusedModel), name, fused, "a FusedModel, which `fuse` makes")


class FusedModel(StackedTensors):
    """K modules in one, made by `fuse`.

    Code for one module runs for all members: `fused(x)` is their forward, and `fused.map(objective, batch)` calls any
    function of one module. One vmapped computation gives all K results. The sum of K losses gives each member its own
    gradient, because no member's loss depends on another's parameters.

    Attributes:
        streams: Generators of each member's random numbers, see `seed`.
        changes: Number of replacements of tensors by others. Recorded steps keep addresses, so they check this number.
        written: Parameters that forward itself writes to, such as a momentum encoder's; `dry_run` finds them.
        one_by_one: If True, `map` evaluates the members one after another. This works with any code, but is as slow as
            separate models; results are the same. `dry_run` sets it for modules that cannot be vmapped.
        updated_in_turn: If True, torch's CPU kernels may update large members one after another, which is faster. Such
            steps cannot be compiled, because their operators get other numbers in each step.
        overlapping: Buffers and frozen parameters that share memory with another tensor in the original module, but not
            here. `map` refuses an objective that writes to one of them.
    """

    def __init__(
        self,
        members: Sequence[Shell],
        own: TensorTree,
        common: TensorTree,
        key: FusionKey,
        *,
        one_by_one: bool = False,
        overlapping: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(own, common)
        self._key, self.one_by_one, self.overlapping = key, one_by_one, overlapping
        self.updated_in_turn = True
        self.streams = Streams(len(members))
        self.own_values = OwnValues(len(members))
        self.written = frozenset()
        self._set_members(members)

    @property
    def key(self) -> FusionKey:
        """Return the `fusion_key` of every member."""
        return of_present(self._key, {**self.shared, **self.stacked_buffers, **self.stacked})

    @property
    def settings(self) -> dict[str, Tensor]:
        """Return the floats in which members differ, [K] each, by path in the module, e.g. `"encoder.dropout.p"`."""
        return dict(self._settings.values_K)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the members' forward on the same arguments. Every tensor of the result has a leading K."""
        return self.map(lambda model, given: model(*given[0], **given[1]), (args, kwargs))

    def map(self, objective: Objective, batch: Any, own_data: bool = False) -> Any:
        """Evaluate a function of one module for every member, on a shared batch or on each member's own batch.

        The call updates each member's own buffers (running statistics, counters), and its own tensors that forward
        assigns to attributes. Each member draws random numbers (dropout) from its own stream, see `seed`.

        Args:
            objective: Called as `objective(model, batch)` with a real module that holds one member's tensors; its
                attributes and methods can be used. It returns tensors or numbers, also in dicts, lists or tuples.
            batch: Passed to `objective` as it is; all members share it.
            own_data: If True, tensors in `batch` have a leading K, and member k gets row k of each.

        Returns:
            The result of `objective`, each tensor with a leading K: a loss becomes [K].

        Raises:
            ValueError: if `objective` returns other objects, or if `own_data` is True and a tensor has no leading K.
            FusionMismatch: if `objective` writes to one of `overlapping`.
        """
        check_function("objective", objective)
        rows_K, batch_of = own_rows(batch, self.K) if own_data else ((), lambda rows: batch)
        if self.own_values.of_members:
            self.changes += 1
        together = not (self.one_by_one and self.K > 1) and self.own_values.join(self.template)
        if not together:
            self.part_buffers()
        shared = self.shared
        run_hooks(self)

        def one(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], rows: Sequence[Tensor]) -> Any:
            # When members run one after another, each gets a copy of the batch, because its forward may write to it.
            own = batch_of(rows) if together else copied(batch_of(rows))
            bound_here = bound(self._slots, {**shared, **tensors})
            with bound_here as rebound, self._settings.bound(settings), activations_kept():
                return objective(self.template, own), rebound

        tensors_K = {**self.stacked, **self.stacked_buffers}
        with avoiding_kernels(self.template, tensors_K.values(), vmapped=together and self.K > 1):
            if not together:
                result, rebound = self._in_turn(one, rows_K)
            else:
                with unwritten(self._overlapping({**tensors_K, **shared}), overlap_written):
                    of_K = tensors_K, self._settings, self.streams, self.K, rows_K
                    result, rebound = at_once(one, *of_K, partial(self.own_values.hold, self.template))
        for name, value in rebound.items():
            self._rebind(name, value.detach())
        return result

    def _in_turn(self, one: One, rows_K: Sequence[Tensor]) -> tuple[Any, Mapping[str, Tensor]]:
        """Evaluate members one after another. Each member sees the attributes that its own last run has set."""
        self._part_values()
        before, after = snapshot(self.template), list[dict[Any, Any]]()
        shared = self.shared

        def one_of_many(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], rows: Sequence[Tensor]) -> Any:
            if after and after[-1]:
                put_back(self.template, before)
            self.own_values.put(self.template, len(after))
            with unwritten(shared, _held_once), unwritten(self._overlapping({**tensors, **shared}), overlap_written):
                found = one(tensors, settings, rows)
            after.append(changed(self.template, before))
            return found

        of_K = self.stacked, self.stacked_buffers, self._settings, self.streams, self.K
        try:
            found = in_turn(one_of_many, *of_K, lambda name, k: self._reached.setdefault(name, set()).add(k), rows_K)
        except BaseException:
            put_back(self.template, before)
            raise
        self.own_values.take(self.template, before, after)
        return found

    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the members, so that each draws the same random numbers as if it ran alone.

        Member `k` draws the numbers that its module alone draws after `torch.manual_seed(seeds[k])`, on the CPU and on
        CUDA devices. Members that are evaluated one after another also draw as after `random.seed(seeds[k])` and
        `numpy.random.seed(seeds[k] % 2**32)`. After `keep` and `concat`, members continue their sequences. The global
        generators stay as they are, and so do generators that the code itself holds.

        If members were never seeded, torch's default generator seeds them when they first draw while evaluated at once.

        Args:
            seeds: One for each member.

        Raises:
            ValueError: if the number of seeds is not K.
        """
        check_each("seeds", seeds, int, self.K)
        for k, seed in enumerate(seeds):
            require(is_int(seed) and -(2**63) <= seed < 2**64, f"seeds[{k}]", seed, "an integer of 64 bits")
        if self.streams.seeded:
            self.streams.seed(seeds)
        else:
            self.streams = Streams(self.K, seeds)

    @torch.inference_mode(False)
    def keep(self, indices: Sequence[int]) -> None:
        """Drop all members but those at `indices`, in that order, in place.

        Stacked parameters are replaced by new ones without gradients. Call the optimizer's `keep` with the same
        indices; it finds the new parameters by name. A repeated index makes a copy of the member, which also draws the
        same random numbers until it is seeded.

        Raises:
            ValueError: if no index is given.
            IndexError: if an index is not in [-K, K).
        """
        chosen = member_indices(indices, self.K)
        for name, tensor in {**self.stacked, **self.stacked_buffers}.items():
            self.own.put(name, like(tensor, member_rows(tensor, chosen)))
        self._catch_up(chosen)
        self.own_values = self.own_values.keep(chosen)
        self.streams = self.streams.joined(chosen)
        members = [self._members[k].twin() if k in chosen[:i] else self._members[k] for i, k in enumerate(chosen)]
        self._set_members(members)

    def copy(self, sources: Mapping[int, int]) -> None:
        """Make members copies of others, in place: `copy({2: 0})` makes member 2 a copy of member 0.

        Weights, buffers, gradients, floats and other attributes are copied; the stacked tensors are not replaced. Until
        the copy is seeded, it draws the same random numbers as its source, from its own generators.

        Args:
            sources: Maps each member that becomes a copy to its source. All sources are read before any is written.

        Raises:
            ValueError: if `sources` is no dict of integers.
            IndexError: if an index is not in [-K, K).
        """
        targets, copied = member_pairs(sources, self.K)
        if not targets:
            return
        self._part_values()
        self._copy_tensors(targets, copied)
        self.own_values.overwrite(targets, copied)
        self.streams.overwrite(targets, copied)
        for name, reached in self._reached.items():
            self._reached[name] = (reached - {*targets}) | {k for k, of in zip(targets, copied) if of in reached}
        self._copy_shells(targets, copied, self.settings)

    @torch.inference_mode(False)
    def concat(self, other: FusedModel) -> None:
        """Append copies of the members of `other`, in place.

        Raises:
            ValueError: if structures differ, or plain attributes that modules change while they run, such as counters.
        """
        check_fused(other, "other")
        check_same((self.key, other.key), "models")
        self._catch_up(range(self.K))
        other._catch_up(range(other.K))
        own_values = self.own_values.concat(self.template, other.own_values, other.template)
        check_same_state(self.template, other.template, own_values.of_members)
        theirs = other.shared
        for name, tensor in self.shared.items():
            if name not in theirs or not torch.equal(tensor, theirs[name].to(tensor.device)):
                self._unshare(name)
        for name, tensor in {**self.stacked, **self.stacked_buffers}.items():
            both = [tensor.detach(), other._per_member(name).to(tensor.device)]
            self.own.put(name, like(tensor, torch.cat(both)))
        self.one_by_one = self.one_by_one or other.one_by_one
        self.overlapping |= other.overlapping
        self.written |= other.written
        self.own_values = own_values
        self.streams = self.streams.joined(range(self.K), other.streams)
        self._set_members([*self._members, *(each.twin() for each in other._members)])

    @torch.inference_mode(False)
    def unfuse(self, k: int) -> nn.Module:
        """Return member `k` as an ordinary module with its own tensors: `unfuse` undoes `fuse`.

        The module also has the hooks and attributes, tensors included, that the member gained while it ran.

        Raises:
            IndexError: if `k` is not in [-K, K).
        """
        (k,) = member_indices([k], self.K, "k")
        self._part_values()
        tensors, held = dict[str, Tensor](), {**self.shared, **self.stacked_buffers, **self.stacked}
        for name, hollow in named_tensors(self.template).items():
            tensors[name] = like(hollow, self._per_member(name)[k].clone()).requires_grad_(held[name].requires_grad)
            vars(tensors[name]).update(copy.deepcopy(self._members[k].marks.get(name, {})))
        own = self._members[k].skeleton
        before = snapshot(own)
        try:
            self._catch_up([k])
            self.own_values.put(own, k)
            module = materialize(own, tensors)
        finally:
            put_back(own, before)
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                layer.flatten_parameters()  # otherwise, cuDNN would flatten them at each call on a GPU
        return module

    def unreached(self) -> dict[str, list[int]]:
        """For each parameter of which only some members have a gradient, return the members without one.

        There are such members only if `one_by_one` is True, because members may then take different branches. This
        matters because `torch.optim` skips a parameter without a gradient, but updates one with a gradient of zero.
        """
        return {
            name: missing
            for name, reached in self._reached.items()
            if (missing := [k for k in range(self.K) if k not in reached])
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to 0."""
        if set_to_none:
            self._reached.clear()
            super().zero_grad()
            return
        for parameter in self.parameters():
            if parameter.grad is not None:  # replace it: torch warns if backward adds to one of `flat`'s views
                parameter.grad = parameter.grad.new_zeros(parameter.shape)

    def train(self, mode: bool = True) -> FusedModel:
        """Set the mode of all members."""
        if mode != self.training:
            self.streams.look_again()
        super().train(mode)
        self.template.train(mode)
        return self

    def _overlapping(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name] for name in self.overlapping}

    def __getstate__(self) -> dict[str, Any]:
        """Allow copies and pickles: split tensors with a hidden axis by member, and copy parameters out of rows."""
        self._part_values()
        own = self.own if self._flat is None else copy.deepcopy(self.own)
        return {**vars(self), "_flat": None, "_modules": {**self._modules, "own": own}}

    def _set_members(self, members: Sequence[Shell]) -> None:
        """Replace the members. From now on the skeleton of the first new member computes for all members."""
        self._members = list(members)
        self._flat = None
        self.changes += 1
        self._reached: dict[str, set[int]] = {}
        self.training = self.template.training
        self._slots = tensor_slots(self.template)
        self._caught_up: Snapshot = snapshot(self.template)
        self._settings = Settings([member.floats for member in members])


def overlap_written(name: str) -> FusionMismatch:
    """Make the error for a forward that writes to `name`, whose memory another tensor of the module shares."""
    return FusionMismatch(
        f"forward writes to `{name}`, which shares memory with another tensor of its module, such as a view of it: in "
        "a copy, only one of them changes. Register one of them, and compute the other from it in forward"
    )


def _held_once(name: str) -> Exception:
    return RuntimeError(
        f"forward writes to {name}, which is frozen, equal in all members and held once for all: give it another value "
        "in each member, or train members by themselves"
    )
