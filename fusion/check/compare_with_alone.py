"""A check that fused members compute the same results as each member alone.

It compares values, gradients, buffers, and attributes that forward changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from fusion.argument_checks import FusionMismatch
from fusion.check.equal_within_rounding import JUMPS, MemberResults, differences, explained
from fusion.evaluate.checkpointing import activations_kept
from fusion.evaluate.microbatch import can_be_split, split
from fusion.evaluate.rules.drawing import ChannelsFirst
from fusion.members.assemble import fuse
from fusion.members.attributes import loose_tensors, plain_attributes, put_back, snapshot
from fusion.members.fused_model import FusedModel, Objective
from fusion.streams import Streams, preserved_generators, seed_generators
from fusion.structure.module_parts import copied, count_samples

# Number of members that are compared.
_MEMBERS = 3
# A fused model adds numbers in another order than a member alone, so results differ by rounding. To estimate this
# difference, a member runs alone `_TRIES` times. Each time, its weights are changed at random by about `_ROUNDINGS`
# times the rounding error.
_TRIES, _ROUNDINGS = 3, 30.0
# Least number of samples that are compared at once in float64, if the batch has as many. It is small, because float64
# takes twice the memory.
_SAMPLES = 16
_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_TF32 = 2.0**-10


def check_members(fused: FusedModel, objective: Objective, batch: Any) -> None:
    """Compare a forward and backward pass of a few fused members with the same pass of each member's own module.

    Both passes draw the same random numbers, and the model is left as it was. A difference is accepted if it is small
    for the precision. If a larger difference is found, members are compared again in float64. If the model does not run
    in float64, they are compared again in its own precision. In this second comparison, each member that still differs
    also runs alone with weights that differ by a few rounding errors. A difference is accepted if these weights change
    the member's results about as much.

    Raises:
        FusionMismatch: if a larger difference remains.
    """
    chosen = sorted({round(i * (fused.K - 1) / (_MEMBERS - 1)) for i in range(_MEMBERS)})
    found = _differing(fused, chosen, objective, batch)
    if found:
        suspects = list(found) if len(found) > 1 else chosen
        wide = _differing_in_float64(fused, suspects, objective, batch)
        found = _differing(fused, chosen, objective, batch, explain=True) if wide is None else wide
    if found:
        listed = "; ".join(
            f"member {k} in {', '.join([*what[:3], *['...'][: len(what) > 3]])}" for k, what in found.items()
        )
        raise FusionMismatch(
            f"of {fused.K} members, fused and alone differ {listed}. Their modules compute with something "
            "that only one of them can have here, such as a tensor or a float in an attribute that forward changes. "
            "Keep it in a buffer (`register_buffer`)"
        )


def check_copy(build: Callable[[], nn.Module], objective: Objective, batch: Any) -> None:
    """Compare the copy that `fuse` makes of a module with the module itself, because a copy may lose something.

    For example, a function may hold a part of the module in its closure (`self.f = lambda x: self.layer(x)`). In the
    copy, this function still calls the layer of the original. Differences are ignored if the module itself gives
    different results when it is built and run twice.

    Raises:
        FusionMismatch: if results differ; the message names them. Also if the loss depends on a parameter in a tuple,
            because this parameter has no data in the copy.
    """

    def outcomes() -> tuple[MemberResults, MemberResults] | None:
        own = build()
        fused = fuse([own])
        try:
            copy, alone = _fused(fused, [0], objective, batch)[0], _alone(own, 0, objective, batch, ())
        except FusionMismatch:
            raise
        except Exception as error:
            if "meta" in str(error):  # the copy used a tensor without data, which the module does not have
                _check_no_loose_parameters(own)
            return None  # leave errors of the module to the caller, which also runs the module without a copy
        if any(value.is_meta for value in copy.values.values()):
            _check_no_loose_parameters(own)
        return copy, alone

    # `differences` allows a relative difference of the square root of `eps`, here 1 %. Copy and module run the same
    # operators on the same numbers, so rounding does not explain a larger difference.
    eps = 1e-4
    first = outcomes()
    what = differences(*first, eps, 1.0) if first else []
    again = outcomes() if what else None
    if first and again and not differences(again[1], first[1], eps, 1.0):
        raise FusionMismatch(
            f"a copy and the model itself differ in {', '.join(what[:3])}. A function in it may see a part of the "
            "model, such as `self.f = lambda x: self.layer(x)`: use a method"
        )


def _check_no_loose_parameters(module: nn.Module) -> None:
    """Raise `FusionMismatch` if a tuple holds a parameter, because it has no data in a copy of the module."""
    known = {id(parameter) for parameter in module.parameters()}
    where = next((where for where, tensor in loose_tensors(module) if id(tensor) in known), None)
    if where is not None:
        raise FusionMismatch(
            f"the loss depends on `{where}`, a parameter in a tuple, which a copy does not follow. Make it a list or "
            "an `nn.ParameterList`, or use the parameter by its own name"
        )


def _differing(
    fused: FusedModel, chosen: Sequence[int], objective: Objective, batch: Any, *, explain: bool = False
) -> dict[int, list[str]]:
    """Map each chosen member whose fused results differ from its results alone to the names of these results.

    If `explain` is True, leave out each difference that slightly changed weights also cause in the member alone.
    """
    together = _fused(fused, chosen, objective, batch)
    found = {}
    for k in chosen:
        seen = _Precisions()
        alone = _alone(fused.unfuse(k), k, objective, batch, fused.written, seen if explain else None)
        eps = max(_coarseness(fused), seen.eps)
        what = differences(together[k], alone, eps, _jump(batch))
        other = _in_another_layout(fused, k, objective, batch) if what else None
        if other is not None:
            what = [name for name in differences(together[k], other, eps, _jump(batch)) if name in what]
        if what and explain:
            tries = [*_tries(fused, k, objective, batch, seen), *([other] if other else [])]
            what = [name for name in what if not explained(name, together[k], alone, tries)]
        if what:
            found[k] = what
    return found


def _differing_in_float64(
    fused: FusedModel, chosen: Sequence[int], objective: Objective, batch: Any
) -> dict[int, list[str]] | None:
    """Call `_differing` with copies of the members in float64, on one part of the batch after another.

    Rounding hardly changes results in float64. In float32, it may make a pooling layer pick another element.

    Returns:
        For each member that differs, the names from the first part in which it differs. None if the copies cannot be
            made or cannot run.
    """
    parts = max(1, count_samples(batch) // _SAMPLES) if can_be_split(batch) else 1
    found: dict[int, list[str]] = {}
    try:
        copies = fuse([fused.unfuse(k)._apply(_widened) for k in chosen], one_by_one=fused.one_by_one)
        copies.part_buffers()
        copies.written = fused.written
        for part in split(tree_map(_widened, batch), parts):
            for i, what in _differing(copies, range(len(chosen)), objective, part, explain=True).items():
                found.setdefault(chosen[i], what)
    except Exception:
        # The model may insist on a dtype, the device may lack float64, or memory may not suffice.
        return None
    return found


def _widened(value: Any) -> Any:
    """Convert a floating-point tensor to float64 and a complex one to complex128; return any other value as it is."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(_WIDE.get(value.dtype, torch.complex128 if value.is_complex() else torch.float64))


def _fused(fused: FusedModel, chosen: Sequence[int], objective: Objective, batch: Any) -> dict[int, MemberResults]:
    with restored(fused), _drawing_alike(fused.template):
        result = fused.map(objective, copied(batch))
        values_K, counted = _values(result)
        gradients_K = _gradients(result, fused.stacked)
        # Read buffers and attributes from unfused modules, because these also have the ones that forward creates.
        # Unfuse the members here, because the end of `restored` undoes the changes of forward.
        modules = {k: fused.unfuse(k) for k in chosen}
    return {
        k: MemberResults(
            {name: value[k] for name, value in values_K.items()},
            {name: value[k] for name, value in gradients_K.items()},
            _written(module, fused.written),
            _attributes(module),
            counted,
        )
        for k, module in modules.items()
    }


def _written(module: nn.Module, parameters: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors that forward may write to: all buffers and the named `parameters`.

    Their names in the result begin with "buffer " or "parameter ".
    """
    found = {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return found | {f"parameter {name}": module.get_parameter(name).detach() for name in parameters}


def _drawing_alike(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a module in training mode draws random numbers in the same order as fused members.

    In evaluation mode the context does nothing, because a module then draws no numbers. A context that intercepts the
    module's calls would only make torch take other code paths.
    """
    return ChannelsFirst() if module.training else nullcontext()


def _alone(
    own: nn.Module, k: int, objective: Objective, batch: Any, written: Iterable[str], seen: _Precisions | None = None
) -> MemberResults:
    with preserved_generators(), seen or nullcontext(), activations_kept(), _drawing_alike(own):
        seed_generators(k)
        result = objective(own, copied(batch))
        gradients = _gradients(result, dict(own.named_parameters()))
    values, counted = _values(result)
    return MemberResults(values, gradients, _written(own, written), _attributes(own), counted)


def _in_another_layout(fused: FusedModel, k: int, objective: Objective, batch: Any) -> MemberResults | None:
    """Run member `k` alone in channels-last layout, which fused convolutions use.

    Other kernels run in this layout, and they round differently. If two elements are nearly equal, a pooling layer may
    then pick the other one.

    Returns:
        None if the layout changes no tensor of the batch, or the member does not run in it.
    """
    laid = tree_map(_channels_last, batch)
    if all(new is old for new, old in zip(tree_leaves(laid), tree_leaves(batch))):
        return None
    try:
        return _alone(fused.unfuse(k)._apply(_channels_last), k, objective, laid, fused.written)
    except RuntimeError:
        return None


def _channels_last(value: Any) -> Any:
    """Return a 4-D tensor (images, or weights for them) in channels-last layout, and any other value as it is."""
    return (
        value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.ndim == 4 else value
    )


def _tries(fused: FusedModel, k: int, objective: Objective, batch: Any, seen: _Precisions) -> list[MemberResults]:
    """Run member `k` alone a few times, each time with weights changed by a few rounding errors.

    `seen` has the coarsest precision of an earlier run of the member, which sets the size of a rounding error.
    """
    with preserved_generators():
        seed_generators(k)
        return [_alone(_moved(fused.unfuse(k), seen.eps), k, objective, batch, fused.written) for _ in range(_TRIES)]


@contextmanager
def restored(fused: FusedModel) -> Iterator[None]:
    """At the end of this context, undo the changes that forward made to the model.

    Inside the context, member k draws random numbers with seed k.
    """
    fused._part_values()
    attributes, own_values = snapshot(fused.template), fused.own_values.copy()
    shared = fused.common.bufs().keys()
    before = {name: buffer.clone() for name, buffer in {**fused.stacked_buffers, **fused.common.bufs()}.items()}
    parameters = {name: tensor for name in fused.written if (tensor := fused.own.get(name)) is not None}
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    streams = fused.streams
    # Replace the streams. A call of `fused.seed` would instead restart the members' own streams.
    fused.streams = Streams(fused.K, range(fused.K))
    with preserved_generators():
        try:
            yield
        finally:
            fused.streams = streams
            fused._reached.clear()
            put_back(fused.template, attributes)
            fused.own_values = own_values
            for name, parameter in parameters.items():
                parameter.data.copy_(values[name])
            if before:
                fused.changes += 1
            for name, buffer in before.items():
                tree = fused.common if fused.common.get(name) is not None else fused.own
                parted = tree is fused.own and name in shared
                tree.put(name, buffer.expand(fused.K, *buffer.shape).clone() if parted else buffer)


def _values(result: Any) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return an objective's results by name, and the names of the results without a gradient.

    A name tells the position of a result in nested dicts, lists and tuples. Results without a gradient are metrics,
    such as an accuracy. If gradients are switched off, losses have no gradient either. The set of names is then empty,
    so all results must agree.
    """
    leaves = [(f"value{keystr(path)}", torch.as_tensor(leaf)) for path, leaf in tree_flatten_with_path(result)[0]]
    counted = frozenset(name for name, leaf in leaves if torch.is_grad_enabled() and not leaf.requires_grad)
    return {name: leaf.detach() for name, leaf in leaves}, counted


def _gradients(result: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    losses = [leaf.sum() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not losses or not trained:
        return {}
    found = torch.autograd.grad(losses, list(trained.values()), allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(trained.items(), found)
    }


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes (numbers, strings, None) of `module` and its submodules, except `training`."""
    return {
        f"attribute {path}.{name}".replace(" .", " "): value
        for (path, child), attributes in zip(module.named_modules(), plain_attributes(module))
        for name, value in attributes.items()
        if name != "training"
    }


def _coarseness(fused: FusedModel) -> float:
    """Return the relative rounding error of TF32 if CUDA may compute in TF32; 0 otherwise.

    `_Precisions` cannot see TF32, because results that are computed in TF32 have the dtype float32.
    """
    first = next(iter(fused.parameters()), torch.empty(0))
    if first.device.type != "cuda" or first.dtype == torch.float64:
        return 0.0
    try:
        fast = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # if TF32 was set by torch's newer names, torch refuses to read the old ones
        fast = True
    return _TF32 if fast else 0.0


def _jump(batch: Any) -> float:
    """Return how far a mean over the batch, such as an accuracy, moves if `JUMPS` examples are counted differently."""
    return JUMPS / max(count_samples(batch), 1)


class _Precisions(TorchDispatchMode):
    """Records in `eps` the coarsest precision of all computed tensors, including precisions that autocast chooses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return result


def _moved(own: nn.Module, eps: float) -> nn.Module:
    """Change each weight of `own` at random, in place, by about `_ROUNDINGS` rounding errors.

    The relative rounding error is `eps` or the machine epsilon of the weight's dtype, whichever is larger. The relative
    change is limited to the square root of this error, which matters in bfloat16.
    """
    with torch.no_grad():
        for p in own.parameters():
            if p.is_floating_point() or p.is_complex():
                rounding = max(eps, torch.finfo(p.dtype).eps)
                p.mul_(1 + min(_ROUNDINGS * rounding, rounding**0.5) * torch.randn_like(p))
    return own
