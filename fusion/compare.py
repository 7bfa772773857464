"""Whether members compute fused what each computes alone: values, gradients, buffers, attributes that change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from fusion.attributes import plain_attributes, set_attributes
from fusion.model import FusedModel, Objective
from fusion.streams import preserved_generators, seed_generators
from fusion.tensors import copied

# How many members are compared, for all of them.
_MEMBERS = 3
# Fused, sums are added up in another order: rounding may do this many times what it does in a few tries alone.
_TRIES, _FACTOR = 3, 30.0
# Metrics that count, such as accuracy, jump where an example's two best classes are a rounding apart.
_JUMPS = 2
# A gradient that is zero but for rounding has no scale of its own: it is measured by 1 % of the largest gradient.
_LEAST_SHARE = 0.01
_TF32 = 2.0**-10


class FusionMismatch(ValueError):
    """Members of a fused model compute something else than they do alone."""


@dataclass
class _Outcome:
    """What one member's step gave: tensors by what they are, and the plain attributes after it."""

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
    for the precision, and otherwise those that a member shows alone when its weights move in their last digits.

    Raises:
        FusionMismatch: naming members and what differs.
    """
    chosen = sorted({round(i * (fused.K - 1) / (_MEMBERS - 1)) for i in range(_MEMBERS)})
    together = _fused(fused, chosen, objective, batch)
    found: list[str] = []
    for k in chosen:
        alone = _alone(fused.unfuse(k), k, objective, batch)
        if what := _differences(together[k], alone, _coarseness(fused), _jump(batch)):
            tries = _tries(fused, k, objective, batch)
            what = [name for name in what if not _explained(name, together[k], alone, tries)]
        if what:
            found.append(f"member {k} in {', '.join(what[:3])}" + (", ..." if len(what) > 3 else ""))
    if found:
        raise FusionMismatch(
            f"of {fused.K} members, fused and alone differ {'; '.join(found)}: their modules compute with something "
            "that only one of them can have here, such as state that forward changes and no buffer holds"
        )


def _fused(fused: FusedModel, chosen: Sequence[int], objective: Objective, batch: Any) -> dict[int, _Outcome]:
    with restored(fused):
        result = fused.map(objective, copied(batch))
        values_K, counted = _values(result)
        gradients_K = _gradients(result, fused.stacked)
        buffers_K = {name: fused._per_member(name) for name in (*fused.stacked_buffers, *fused.common.bufs())}
        attributes = {k: _attributes(fused.template, fused._settings.of(k)) for k in chosen}
    return {
        k: _Outcome(
            {name: value[k] for name, value in values_K.items()},
            {name: value[k] for name, value in gradients_K.items()},
            {f"buffer {name}": value[k] for name, value in buffers_K.items()},
            attributes[k],
            counted,
        )
        for k in chosen
    }


def _alone(own: nn.Module, k: int, objective: Objective, batch: Any, seen: _Precisions | None = None) -> _Outcome:
    with preserved_generators(), seen or nullcontext():
        seed_generators(k)
        result = objective(own, copied(batch))
        gradients = _gradients(result, dict(own.named_parameters()))
    values, counted = _values(result)
    buffers = {f"buffer {name}": buffer for name, buffer in own.named_buffers()}
    return _Outcome(values, gradients, buffers, _attributes(own, {}), counted)


def _tries(fused: FusedModel, k: int, objective: Objective, batch: Any) -> list[_Outcome]:
    """Member k alone, a few times, its weights changed by a rounding of the coarsest precision that it computes in."""
    seen = _Precisions()
    with preserved_generators():
        seed_generators(k)
        return [_alone(_moved(fused.unfuse(k), seen), k, objective, batch, seen) for _ in range(_TRIES)]


@contextmanager
def restored(fused: FusedModel) -> Iterator[None]:
    """Put buffers, plain attributes and random state back afterwards; member k draws each time what seed k gives."""
    attributes = plain_attributes(fused.template)
    before = {name: buffer.clone() for name, buffer in {**fused.stacked_buffers, **fused.common.bufs()}.items()}
    streams = fused.streams
    fused.seed(range(fused.K))
    with preserved_generators():
        try:
            yield
        finally:
            fused.streams = streams
            fused._reached.clear()
            set_attributes(fused.template, attributes)
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
    """Whether the member alone changes as much when its weights change in their last digits."""
    if name in alone.attributes:
        return False
    ours, value = together.tensors()[name], alone.tensors()[name]
    moved = max(_distance(one.tensors()[name], value) for one in tries)
    return _distance(ours, value) <= _FACTOR * moved


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 where neither is finite, infinite where one is not."""
    if a.shape != b.shape:
        return float("inf")
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(b.device, wide), b.to(wide)
    if not b.isfinite().all():
        return 0.0 if not a.isfinite().all() else float("inf")
    return float((a - b).abs().nan_to_num(float("inf")).max()) if a.numel() else 0.0


def _size(value: Tensor) -> float:
    """The largest finite absolute value."""
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


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
    samples = next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)
    return _JUMPS / max(samples, 1)


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


def _moved(own: nn.Module, seen: _Precisions) -> nn.Module:
    """Its weights moved in the last digits of the coarsest precision seen so far, or else of their own."""
    with torch.no_grad():
        for p in own.parameters():
            if p.is_floating_point():
                p.mul_(1 + max(seen.eps, torch.finfo(p.dtype).eps) * torch.randn_like(p))
    return own
