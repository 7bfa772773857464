"""Whether members compute fused what each computes alone: values, gradients, buffers, attributes that change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from fusion.assemble import fuse
from fusion.attributes import plain_attributes, put_back, snapshot
from fusion.model import FusedModel, Objective
from fusion.streams import preserved_generators, seed_generators
from fusion.tensors import copied

# How many members are compared, for all of them.
_MEMBERS = 3
# Fused, sums are added up in another order. In a few tries alone, weights move by this many roundings; fused and alone
# may then differ a few times as much as these tries do.
_TRIES, _ROUNDINGS, _SLACK = 3, 30.0, 4.0
# Samples that are compared at once in float64, which takes twice the memory.
_SAMPLES = 16
_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
# Metrics that count, such as accuracy, jump where an example's two best classes are a rounding apart.
_JUMPS = 2
# A gradient that is zero but for rounding has no scale of its own: it is measured by 1 % of the largest gradient.
_LEAST_SHARE = 0.01
_TF32 = 2.0**-10


class FusionMismatch(ValueError):
    """Members of a fused model compute something else than they do alone."""


@dataclass
class _Outcome:
    """What one member's step gave: tensors by what they are (parameters are those written to), and plain attributes."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    attributes: dict[str, Any]
    counted: frozenset[str] = frozenset()

    def tensors(self) -> dict[str, Tensor]:
        return {**self.values, **self.gradients, **self.buffers}


def check_members(fused: FusedModel, objective: Objective, batch: Any) -> None:
    """Compare one forward and backward pass of a few members with that of each by itself, on its own module.

    Random numbers are the same; the model is left as it was. Differences within rounding pass: those that are small
    for the precision, and those that vanish in float64. A model that does not run in float64 is compared with itself:
    what a member shows alone when its weights move by a few roundings passes, too.

    Raises:
        FusionMismatch: naming members and what differs.
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
            f"of {fused.K} members, fused and alone differ {listed}: their modules compute with something "
            "that only one of them can have here, such as state that forward changes and no buffer holds"
        )


def _differing(
    fused: FusedModel, chosen: Sequence[int], objective: Objective, batch: Any, *, explain: bool = False
) -> dict[int, list[str]]:
    """For each chosen member that differs, in what; `explain`: by more than its weights' rounding changes it alone."""
    together = _fused(fused, chosen, objective, batch)
    found = {}
    for k in chosen:
        seen = _Precisions()
        alone = _alone(fused.unfuse(k), k, objective, batch, fused.written, seen if explain else None)
        eps = max(_coarseness(fused), seen.eps)
        what = _differences(together[k], alone, eps, _jump(batch))
        other = _in_another_layout(fused, k, objective, batch) if what else None
        if other is not None:
            what = [name for name in _differences(together[k], other, eps, _jump(batch)) if name in what]
        if what and explain:
            tries = [*_tries(fused, k, objective, batch, seen), *([other] if other else [])]
            what = [name for name in what if not _explained(name, together[k], alone, tries)]
        if what:
            found[k] = what
    return found


def _differing_in_float64(
    fused: FusedModel, chosen: Sequence[int], objective: Objective, batch: Any
) -> dict[int, list[str]] | None:
    """The same for copies in float64, over parts of the batch; None where they cannot be had, or cannot run.

    There a rounding changes next to nothing, where in float32 it may have a pooling layer take another element.
    """
    # The package imports this module first.
    from fusion.width.microbatch import can_be_split, split

    parts = max(1, _samples(batch) // _SAMPLES) if can_be_split(batch) else 1
    found: dict[int, list[str]] = {}
    try:
        copies = fuse([fused.unfuse(k)._apply(_widened) for k in chosen], one_by_one=fused.one_by_one)
        copies.part_buffers()
        copies.written = fused.written
        for part in split(tree_map(_widened, batch), parts):
            for i, what in _differing(copies, range(len(chosen)), objective, part, explain=True).items():
                found.setdefault(chosen[i], what)
    except Exception:
        # A dtype that code insists on, a device without float64, too little memory: the reasons are many.
        return None
    return found


def _widened(value: Any) -> Any:
    """A tensor in float64, or complex128, where it is in less; all else as it is."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(_WIDE.get(value.dtype, torch.complex128 if value.is_complex() else torch.float64))


def _fused(fused: FusedModel, chosen: Sequence[int], objective: Objective, batch: Any) -> dict[int, _Outcome]:
    with restored(fused):
        result = fused.map(objective, copied(batch))
        values_K, counted = _values(result)
        gradients_K = _gradients(result, fused.stacked)
        buffers_K = {
            f"buffer {name}": fused._per_member(name) for name in (*fused.stacked_buffers, *fused.common.bufs())
        }
        buffers_K |= {f"parameter {name}": fused._per_member(name).clone() for name in fused.written}
        attributes = {k: _attributes(fused.template, fused._settings.of(k)) for k in chosen}
    return {
        k: _Outcome(
            {name: value[k] for name, value in values_K.items()},
            {name: value[k] for name, value in gradients_K.items()},
            {name: value[k] for name, value in buffers_K.items()},
            attributes[k],
            counted,
        )
        for k in chosen
    }


def _alone(
    own: nn.Module, k: int, objective: Objective, batch: Any, written: Iterable[str], seen: _Precisions | None = None
) -> _Outcome:
    with preserved_generators(), seen or nullcontext():
        seed_generators(k)
        result = objective(own, copied(batch))
        gradients = _gradients(result, dict(own.named_parameters()))
    values, counted = _values(result)
    buffers = {f"buffer {name}": buffer for name, buffer in own.named_buffers()}
    buffers |= {f"parameter {name}": own.get_parameter(name).detach() for name in written}
    return _Outcome(values, gradients, buffers, _attributes(own, {}), counted)


def _in_another_layout(fused: FusedModel, k: int, objective: Objective, batch: Any) -> _Outcome | None:
    """Member k alone on images whose channels come last, as fused convolutions have them; None where it cannot run so.

    Other kernels compute it, and a pooling layer may take another of two elements that are a rounding apart.
    """
    laid = tree_map(_channels_last, batch)
    if all(new is old for new, old in zip(tree_leaves(laid), tree_leaves(batch))):
        return None
    try:
        return _alone(fused.unfuse(k)._apply(_channels_last), k, objective, laid, fused.written)
    except RuntimeError:
        return None


def _channels_last(value: Any) -> Any:
    """A tensor of images, or of weights for them, in this layout; all else as it is."""
    return (
        value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.ndim == 4 else value
    )


def _tries(fused: FusedModel, k: int, objective: Objective, batch: Any, seen: _Precisions) -> list[_Outcome]:
    """Member k alone, a few times, its weights moved by some roundings of the coarsest precision that was seen."""
    with preserved_generators():
        seed_generators(k)
        return [_alone(_moved(fused.unfuse(k), seen.eps), k, objective, batch, fused.written) for _ in range(_TRIES)]


@contextmanager
def restored(fused: FusedModel) -> Iterator[None]:
    """Put all that forward changes back afterwards; member k draws each time what seed k gives."""
    attributes, own_values = snapshot(fused.template), fused.own_values.copy()
    before = {name: buffer.clone() for name, buffer in {**fused.stacked_buffers, **fused.common.bufs()}.items()}
    parameters = {name: tensor for name in fused.written if (tensor := fused.own.get(name)) is not None}
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    streams = fused.streams
    fused.seed(range(fused.K))
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
            for name, buffer in before.items():
                tree = fused.common if fused.common.get(name) is not None else fused.own
                now = tree.get(name)
                tree.put(name, buffer if now is None or now.shape == buffer.shape else buffer.expand_as(now).clone())


def _values(result: Any) -> tuple[dict[str, Tensor], frozenset[str]]:
    """What an objective returned, by place; and the places of what it only counts or measures."""
    leaves = [(f"value{keystr(path)}", torch.as_tensor(leaf)) for path, leaf in tree_flatten_with_path(result)[0]]
    counted = frozenset(name for name, leaf in leaves if not leaf.requires_grad)
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


def _attributes(module: nn.Module, own: Mapping[tuple[int, Any], float]) -> dict[str, Any]:
    """Plain attributes by path, but for the mode; `own` says what a member has in the place of the module's."""
    return {
        f"attribute {path}.{name}".replace(" .", " "): own.get((id(child), name), value)
        for (path, child), attributes in zip(module.named_modules(), plain_attributes(module))
        for name, value in attributes.items()
        if name != "training"
    }


def _differences(together: _Outcome, alone: _Outcome, eps: float, jump: float) -> list[str]:
    """What differs by more than a rounding of relative size `eps` is likely to do."""
    found = [name for name, value in alone.attributes.items() if not _same(value, together.attributes.get(name))]
    largest = max((_size(gradient) for gradient in alone.gradients.values()), default=0.0)
    ours = together.tensors()
    for name, value in alone.tensors().items():
        scale = max(_size(value), _LEAST_SHARE * largest if name in alone.gradients else 0.0)
        allowed = _tolerance(value, eps) * scale
        if name in alone.counted:
            allowed = max(allowed, jump * scale if value.is_floating_point() else _JUMPS)
        if not _distance(ours[name], value) <= allowed:
            found.append(name)
    return found


def _explained(name: str, together: _Outcome, alone: _Outcome, tries: Sequence[_Outcome]) -> bool:
    """Whether the member alone changes about as much when its weights change in their last digits."""
    if name in alone.attributes:
        return False
    ours, value = together.tensors()[name], alone.tensors()[name]
    moved = max(_distance(one.tensors()[name], value) for one in tries)
    return _distance(ours, value) <= _SLACK * moved


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 where neither is finite, infinite where one is not."""
    if a.shape != b.shape:
        return float("inf")
    a, b = _dense(a), _dense(b)
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(b.device, wide), b.to(wide)
    if not b.isfinite().all():
        return 0.0 if not a.isfinite().all() else float("inf")
    return float((a - b).abs().nan_to_num(float("inf")).max()) if a.numel() else 0.0


def _size(value: Tensor) -> float:
    """The largest finite absolute value."""
    value = _dense(value)
    finite = value[value.isfinite()]
    # Booleans have no absolute value.
    return float((finite if finite.dtype == torch.bool else finite.abs()).max()) if finite.numel() else 0.0


def _dense(value: Tensor) -> Tensor:
    return value if value.layout == torch.strided else value.to_dense()


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return value == other or abs(value - other) <= 1e-3 * abs(value) or (value != value and other != other)
    return type(value) is type(other) and bool(value == other)


def _tolerance(value: Tensor, eps: float) -> float:
    """Half the digits: errors of rounding add up over layers, but faults are seldom small."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(max(torch.finfo(value.dtype).eps, eps) ** 0.5)


def _coarseness(fused: FusedModel) -> float:
    """Relative rounding of arithmetic that is coarser than the tensors' types say (TF32 on CUDA); 0 elsewhere."""
    device = next(iter(fused.parameters()), torch.empty(0)).device
    fast = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return _TF32 if device.type == "cuda" and fast else 0.0


def _jump(batch: Any) -> float:
    """How much a mean over the batch changes where a few of its examples count differently."""
    return _JUMPS / max(_samples(batch), 1)


def _samples(batch: Any) -> int:
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)


class _Precisions(TorchDispatchMode):
    """Notes the coarsest precision that is computed in, autocast's included."""

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
    """Its weights moved by some roundings of size `eps`, or else of their own; in half precision by fewer."""
    with torch.no_grad():
        for p in own.parameters():
            if p.is_floating_point() or p.is_complex():
                rounding = max(eps, torch.finfo(p.dtype).eps)
                p.mul_(1 + min(_ROUNDINGS * rounding, rounding**0.5) * torch.randn_like(p))
    return own
