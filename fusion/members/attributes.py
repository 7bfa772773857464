"""Attributes that modules change while they run, such as the mode, counters, hooks, and tensors that forward assigns.

One module, the template, computes for all members. A change that is the same in all members is made in the template
alone; the members' own modules catch up before they are used. If values differ between members, such as tensors that
forward assigned, `OwnValues` keeps one for each member.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    SUPPORTED_NODES,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from fusion.structure.module_parts import copied, is_batched, named_tensors

_PLAIN = (bool, int, float, str, type(None))
_BY_TORCH = frozenset(vars(nn.Module()))
_HOOKS = frozenset(name for name in _BY_TORCH if "_hooks" in name)
_TENSORS_AND_MODULES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
_IN_PLACE = (dict, OrderedDict, list)


class _ABSENT:
    """Stands for a missing value. It is a class, because copying or pickling a class gives the same class again."""


AttributePlace = tuple[int, str, str]
"""Index of the module in `modules()`, kind, and name. The kind is "_buffers" for a buffer, "" for other attributes."""


def plain_attributes(module: nn.Module) -> list[dict[str, Any]]:
    """Return for each module of `modules()` its attributes that are numbers, strings or None."""
    return [
        {name: value for name, value in vars(child).items() if isinstance(value, _PLAIN)} for child in module.modules()
    ]


def loose_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and value of each tensor that needs a gradient and is in a plain attribute.

    The attribute may also be a list or dict that holds the tensor.
    """
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name in _BY_TORCH or (isinstance(child, nn.RNNBase) and name == "_flat_weights"):
                continue
            for at, leaf in tree_flatten_with_path(value)[0]:
                if isinstance(leaf, Tensor) and (leaf.requires_grad or isinstance(leaf, nn.Parameter)):
                    yield f"{path}.{name}{keystr(at)}" if path else f"{name}{keystr(at)}", leaf


class Snapshot(dict[AttributePlace, Any]):
    """All attributes and hooks of a module by place.

    Attributes:
        contents: Place -> each tensor in the attribute, and a copy of its values, because forward may write to it.
        left_out: Places of weak references. Copies and pickles leave them out, because a copied recurrent layer makes
            new ones.
    """

    left_out: frozenset[AttributePlace] = frozenset()

    def __init__(self, values: Iterable[tuple[AttributePlace, Any]]) -> None:
        super().__init__()
        self.contents: dict[AttributePlace, list[tuple[Tensor, Tensor]]] = {}
        for place, value in values:
            self[place] = _copy_of(value)
            if isinstance(value, Tensor) or (type(value) in SUPPORTED_NODES and value):
                self.contents[place] = [(x, x.detach().clone()) for x in tree_leaves(value) if _is_readable(x)]

    def __reduce__(self) -> tuple[Callable[..., Snapshot], tuple[Any, ...]]:
        """Allow copies and pickles."""
        weak = {place for place, value in self.items() if any(isinstance(x, ref) for x in tree_leaves(value))}
        kept = {place: value for place, value in self.items() if place not in weak}
        return _snapshot_of, (kept, self.contents, self.left_out | weak)


def _snapshot_of(values: Any, contents: Any, left_out: frozenset[AttributePlace]) -> Snapshot:
    found = Snapshot(())
    found.update(values)
    found.contents, found.left_out = contents, left_out
    return found


def snapshot(module: nn.Module) -> Snapshot:
    """Return all attributes and hooks of `module`, lists and dicts as copies. Buffers without data are left out."""
    return Snapshot(_values(module))


def changed(module: nn.Module, before: Snapshot) -> dict[AttributePlace, Any]:
    """Return the attributes that have changed since a snapshot, with their present values; lists and dicts as copies.

    A removed attribute has the value `_ABSENT`. If a tensor was written to, the result has a copy of it.
    """
    found, missing = {}, before.keys() - ()
    for place, value in _values(module):
        then = before.get(place, _ABSENT)
        missing.discard(place)
        if place in before.left_out:
            continue
        if not all(_equal_or_nan(*pair) for pair in before.contents.get(place, ())):
            found[place] = copied(value)
        elif then is value or (type(then) is type(value) in _IN_PLACE and not then and not value):
            continue
        elif not _same(then, value, by_identity=True):
            found[place] = _copy_of(value)
    return found | dict.fromkeys(missing, _ABSENT)


def put_back(module: nn.Module, before: Snapshot) -> None:
    """Restore all attributes and hooks of `module` from the snapshot `before`.

    A tensor that was written to is replaced by another one, because a backward pass may need what was written.
    """
    modules = list(module.modules())
    for place in changed(module, before):
        written = [pair for pair in before.contents.get(place, ()) if not _equal_or_nan(*pair)]
        values = {id(tensor): values.clone() for tensor, values in written}
        _put(modules, place, tree_map(lambda leaf, own=values: own.get(id(leaf), leaf), before.get(place, _ABSENT)))


def check_same_state(module: nn.Module, other: nn.Module, but: Iterable[AttributePlace]) -> None:
    """Check that two modules have equal plain attributes, such as counters. Floats and the mode may differ.

    Args:
        but: Places of attributes that may differ.

    Raises:
        ValueError: if an attribute differs; the message names it and both values.
    """
    left_out = {*but}
    for i, ((path, child), (_, twin)) in enumerate(zip(module.named_modules(), other.named_modules())):
        for name, value in vars(child).items():
            if name == "training" or not isinstance(value, _PLAIN) or isinstance(value, float):
                continue
            theirs = vars(twin).get(name, _ABSENT)
            # Allow a flag that only one module has. The first run of a module may set it, for example when the module
            # registers hooks, and the other module may not have run yet.
            set_up = isinstance(value, bool) and theirs is _ABSENT
            if not set_up and (i, "", name) not in left_out and value != (None if theirs is _ABSENT else theirs):
                where = f"{path}.{name}" if path else name
                shown = None if theirs is _ABSENT else theirs
                raise ValueError(f"models have run apart: {where} is {value} here, {shown} in the other")


def follow(
    source: nn.Module,
    target: nn.Module,
    own: set[tuple[int, Any]],
    before: Snapshot,
    changes: Mapping[AttributePlace, Any],
) -> None:
    """Repeat in `target` the changes of attributes, hooks and modes that were made in `source`.

    Args:
        source: The template.
        target: A module of the same structure.
        own: (id of an owner in `source`, attribute or key) of each float in which members differ. In `target`, these
            floats stay as they are.
        before: A snapshot of `source` from the last time that `target` caught up.
        changes: The result of `changed(source, before)`.
    """
    if source is target:
        return
    theirs, ours = list(source.modules()), list(target.modules())
    # If a hook or an object refers to a part of `source`, its copy must refer to the same part of `target`.
    pairs = [*zip(theirs, ours), *zip(named_tensors(source).values(), named_tensors(target).values())]
    hooks = [(vars(one)[name], vars(other)[name]) for one, other in zip(theirs, ours) for name in _HOOKS]
    memo: dict[int, Any] = {id(one): other for one, other in (*pairs, *hooks)}
    for place, value in changes.items():
        i, kind, name = place
        if name in _HOOKS:
            _follow_hooks(vars(ours[i])[name], before[place], value, memo)
        elif type(value) is dict and type(vars(ours[i]).get(name)) is dict and not kind:
            _follow_dict(vars(ours[i])[name], vars(theirs[i])[name], own, memo)
        elif (id(theirs[i]), name) not in own:
            _put(ours, place, value if value is _ABSENT else copy.deepcopy(value, memo))


def _follow_dict(ours: dict[Any, Any], theirs: dict[Any, Any], own: set[tuple[int, Any]], memo: dict[int, Any]) -> None:
    for key in ours.keys() - theirs.keys():
        del ours[key]
    ours.update({k: copy.deepcopy(v, memo) for k, v in theirs.items() if (id(theirs), k) not in own})


def _follow_hooks(
    ours: dict[Any, Any], before: Mapping[Any, Any], now: Mapping[Any, Any], memo: dict[int, Any]
) -> None:
    """Change the hooks `ours` of a module in the same way as another module's hooks changed from `before` to `now`.

    Before the changes, `ours` are copies of the hooks in `before`, in the same order.
    """
    if list(before) != list(now):
        own = dict(zip(before, ours.values()))
        ours.clear()
        ours.update({key: own[key] if key in own else copy.deepcopy(hook, memo) for key, hook in now.items()})


class OwnValues:
    """Values of attributes in which members differ, one for each of K members.

    Tensors that forward assigns inside vmap have a hidden member axis. They stay in the module, and are valid as long
    as all members are evaluated at once. `part` splits them by member only when this is needed, for example if members
    are dropped.

    Attributes:
        of_members: Place of an attribute -> one value for each member.
    """

    def __init__(self, K: int, of_members: Mapping[AttributePlace, Sequence[Any]] | None = None) -> None:
        self.K = K
        self.of_members = {place: list(values) for place, values in (of_members or {}).items()}

    def part(self, module: nn.Module) -> bool:
        """Remove from `module` the tensors that forward assigned, and store each member's part of them here.

        Return whether there were any such tensors.
        """
        modules, found = list(module.modules()), False
        for place, value in list(_values(module)):
            leaves, spec = tree_flatten(value)
            if any(isinstance(x, Tensor) and _belongs_to_members(place, x) for x in leaves):
                rows = [[_row(leaf, k) for leaf in leaves] for k in range(self.K)]
                self.of_members[place] = [tree_unflatten(row, spec) for row in rows]
                _put(modules, place, None)
                found = True
        return found

    def hold(self, module: nn.Module, own: Callable[[Any], Any]) -> None:
        """Replace tensors in attributes of `module` by `own(tensor)`: the members' own copies, or the tensor itself.

        Forward may have made a tensor that all members share, kept it, and then written members' values into it.
        """
        modules = list(module.modules())
        for place, value in list(_values(module)):
            leaves, spec = tree_flatten(value)
            found = [own(leaf) for leaf in leaves]
            if any(new is not leaf for new, leaf in zip(found, leaves)):
                _put(modules, place, tree_unflatten(found, spec))

    def join(self, module: nn.Module) -> bool:
        """Put all members' values into `module` for vmap. Return False, and do nothing, if this is not possible.

        It is possible if the values differ only in tensors, and these have equal shapes, dtypes and devices.
        """
        joined = {place: _joined(values) for place, values in self.of_members.items()}
        if any(value is _ABSENT for value in joined.values()):
            return False
        modules = list(module.modules())
        for place, value in joined.items():
            _put(modules, place, value)
        self.of_members.clear()
        return True

    def put(self, module: nn.Module, k: int) -> None:
        """Put member `k`'s values into `module`."""
        modules = list(module.modules())
        for place, values in self.of_members.items():
            _put(modules, place, values[k])

    def take(self, module: nn.Module, before: Snapshot, after: Sequence[Mapping[AttributePlace, Any]]) -> None:
        """Store the changes that each member's run made to `module`.

        If a value is equal in all members, it is stored in `module`; otherwise each member keeps its own value.

        Args:
            before: A snapshot of `module` before the runs.
            after: `after[k]` has the attributes that differ from `before` after member k's run.
        """
        put_back(module, before)
        modules = list(module.modules())
        self.of_members.clear()
        for place in {place: None for changes in after for place in changes}:
            values = [changes.get(place, before.get(place, _ABSENT)) for changes in after]
            if place[2] in _HOOKS or all(_same(values[0], value) for value in values[1:]):
                _put(modules, place, values[0])
            else:
                self.of_members[place] = [_detached(value) for value in values]

    def keep(self, chosen: Sequence[int]) -> OwnValues:
        """Return the values of the chosen members, in this order."""
        kept = {
            place: [copied(values[k]) if k in chosen[:i] else values[k] for i, k in enumerate(chosen)]
            for place, values in self.of_members.items()
        }
        return OwnValues(len(chosen), kept)

    def concat(self, module: nn.Module, other: OwnValues, its_module: nn.Module) -> OwnValues:
        """Return the values of these members, followed by those of the members of `other`.

        `module` and `its_module` are the templates of the two models. Call `part` for both models first.
        """
        ours, theirs = snapshot(module), snapshot(its_module)
        joined = {}
        for place in {**ours, **theirs, **self.of_members, **other.of_members}:
            here = self.of_members.get(place, [ours.get(place, _ABSENT)] * self.K)
            there = other.of_members.get(place, [theirs.get(place, _ABSENT)] * other.K)
            owned = place in self.of_members or place in other.of_members
            if owned or (_has_data((here[0], there[0])) and not _same(here[0], there[0])):
                joined[place] = [*map(copied, here), *map(copied, there)]
        return OwnValues(self.K + other.K, joined)

    def overwrite(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Give the members `targets` copies of the values of the members `sources`. Call `part` first."""
        for values in self.of_members.values():
            for k, value in zip(targets, [copied(values[k]) for k in sources]):
                values[k] = value

    def copy(self) -> OwnValues:
        """Return an independent copy."""
        return OwnValues(self.K, copied(self.of_members))


def _values(module: nn.Module) -> Iterator[tuple[AttributePlace, Any]]:
    for i, child in enumerate(module.modules()):
        for name, value in vars(child).items():
            if name not in _TENSORS_AND_MODULES:
                yield (i, "", name), value
        for name, value in child._buffers.items():
            if value is None or not value.is_meta:
                yield (i, "_buffers", name), value


def _copy_of(value: Any) -> Any:
    """Copy lists, dicts and tuples at all levels, but not the objects in them; return any other value as it is."""
    if not value if (cls := type(value)) in _IN_PLACE else cls not in SUPPORTED_NODES:
        return cls() if cls in _IN_PLACE else value
    return tree_map(lambda leaf: leaf, value)


def _put(modules: Sequence[nn.Module], place: AttributePlace, value: Any) -> None:
    i, kind, name = place
    holder: dict[str, Any] = modules[i]._buffers if kind else vars(modules[i])
    present: Any = holder.get(name, _ABSENT)
    if value is _ABSENT:
        holder.pop(name, None) if name not in _HOOKS else None
    elif type(present) in _IN_PLACE and type(present) is type(value):
        # Write in place, because other objects refer to this container, such as a hook's handle or a float's slot.
        if not _same(present, value, by_identity=True):
            value = _copy_of(value)  # forward may write into a list inside, which `value` keeps as it is
            present.clear()
            present.extend(value) if isinstance(present, list) else present.update(value)
    else:
        holder[name] = _copy_of(value)


def _has_data(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(value))


def _is_readable(leaf: Any) -> bool:
    """Return whether a value is a tensor whose values can be read and written back."""
    if not isinstance(leaf, Tensor) or leaf.is_meta or leaf.is_inference() or leaf.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(leaf)


def _equal_or_nan(tensor: Tensor, values: Tensor) -> bool:
    return torch.equal(tensor, values) or bool(((tensor == values) | ((tensor != tensor) & (values != values))).all())


def _belongs_to_members(place: AttributePlace, tensor: Tensor) -> bool:
    """Return whether a tensor that forward left in an attribute has to be kept separately for each member.

    This holds for tensors with a hidden member axis, tensors that cannot be copied because they have a `grad_fn`, and
    buffers that were None before.
    """
    return is_batched(tensor) or tensor.grad_fn is not None or (place[1] == "_buffers" and not tensor.is_meta)


def _row(leaf: Any, k: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not is_batched(leaf):
        return leaf if leaf.is_meta else leaf.detach().clone()
    values_K = torch._C._functorch.get_unwrapped(leaf).detach()
    return values_K.select(torch._C._functorch.maybe_get_bdim(leaf), k).clone()


def _joined(values: Sequence[Any]) -> Any:
    """Join the members' values into one, in which tensors that differ have a hidden member axis.

    Tensors may differ if they have the same shape, dtype and device. If anything else differs, return `_ABSENT`.
    """
    flat = [tree_flatten(value) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return _ABSENT
    leaves = [_joined_leaf(each) for each in zip(*(leaves for leaves, _ in flat))]
    return _ABSENT if any(leaf is _ABSENT for leaf in leaves) else tree_unflatten(leaves, flat[0][1])


def _joined_leaf(leaves: Sequence[Any]) -> Any:
    if all(_same(leaves[0], leaf) for leaf in leaves[1:]):
        return leaves[0]
    forms = {(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None for leaf in leaves}
    if None in forms or len(forms) > 1:
        return _ABSENT
    level = (torch._C._functorch.maybe_current_level() or 0) + 1
    return torch._C._functorch._add_batch_dim(torch.stack(list(leaves)), 0, level)


def _detached(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _same(value: Any, other: Any, *, by_identity: bool = False) -> bool:
    if value is other:
        return True
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return not by_identity and _equal(value, other)
    if isinstance(value, _PLAIN) or isinstance(other, _PLAIN):
        return type(value) is type(other) and (value == other or (value != value and other != other))
    (leaves, spec), (others, its_spec) = tree_flatten(value), tree_flatten(other)
    if spec.is_leaf() or spec != its_spec:
        return False
    return all(_same(leaf, its, by_identity=by_identity) for leaf, its in zip(leaves, others))


def _equal(value: Any, other: Any) -> bool:
    """Return whether two tensors are equal.

    Two tensors without data count as equal. A tensor with a hidden axis cannot be read, so it counts as different.
    """
    if not (isinstance(value, Tensor) and isinstance(other, Tensor)) or is_batched(value) or is_batched(other):
        return False
    if value.is_meta or other.is_meta:
        return value.is_meta and other.is_meta
    forms = ((x.shape, x.dtype, x.device) for x in (value, other))
    return next(forms) == next(forms) and torch.equal(value, other)
