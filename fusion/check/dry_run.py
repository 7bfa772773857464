"""A check before training whether a model can be vmapped. If not, it names the line that vmap cannot follow."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusion.argument_checks import FusionMismatch, check_flag, check_function
from fusion.check.compare_with_alone import check_members, restored
from fusion.evaluate.avoided_kernels import avoiding_kernels
from fusion.evaluate.backoff import is_out_of_memory
from fusion.evaluate.evaluate import own_rows
from fusion.evaluate.rules.gradient import BackwardInside, FreezesInside
from fusion.members.attributes import put_back, snapshot
from fusion.members.fused_model import FusedModel, Objective, check_fused, overlap_written
from fusion.streams import global_states, preserved_generators, seed_generators
from fusion.structure.module_parts import copied, named_tensors
from fusion.warn import warn


class FusionWarning(UserWarning):
    """Warns that a fused model trains its members one after another. Results are the same, but training is slower."""


@dataclass(frozen=True)
class Obstacle:
    """The reason why a model cannot be vmapped, and its place in the code.

    Attributes:
        module: Path and type of the innermost module that was running, e.g. "encoder.2 (Router)"; empty if none ran.
        location: "file:line" of the obstacle; empty if the error arose in the backward pass, or if no line raised one.
        code: The source code of that line.
        reason: An explanation of torch's error message if the message is a known one; otherwise the message itself.
    """

    module: str
    location: str
    code: str
    reason: str

    def __str__(self) -> str:
        where = f"module {self.module} " if self.module else ""
        at = f"at {self.location} `{self.code}`: " if self.location else ""
        return f"{where}{at}{self.reason}"


class SharedDraws(RuntimeError):
    """Raised if members that are evaluated at once draw from one shared generator, such as Python's."""


class CountsPadding(RuntimeError):
    """Raised if results in evaluation depend on the padding of an `nn.TransformerEncoder`.

    The encoder of a member alone sets padded outputs to zero; the encoder of a fused model does not.
    """


def dry_run(
    fused: FusedModel,
    objective: Objective,
    batch: Any,
    *,
    compare: bool = True,
    written: Iterable[str] | None = None,
    own_data: bool = False,
) -> Obstacle | None:
    """Try the forward and backward pass of one batch, and a forward in evaluation; leave the model as it was.

    If vmap cannot follow the model, the dry run warns and sets `fused.one_by_one`. The members then train one after
    another, with the same results. Reasons are `.item()`, control flow that depends on data, an operator that vmap
    does not know, and random numbers of Python or NumPy. A single member is never vmapped, so it always passes. Call
    `dry_run` again after other members have joined the model.

    Args:
        objective: The function that `fused.map` will be called with.
        compare: If True, compare the results of a few fused members with the results of each member's own module. These
            are losses, other values that the objective returns, gradients, buffers and plain attributes. If False, skip
            this check.
        written: Names of the parameters that the objective writes to. An earlier dry run of the same objective stores
            them in `fused.written`. If None, one more forward of one member finds them.
        own_data: See `fused.map`. If True, members are compared on the first member's batch.

    Returns:
        The obstacle, or None if the members can be evaluated at once.

    Raises:
        FusionMismatch: if fused members compute other results than alone. Train them separately.
        Exception: the error of the objective, if it also fails when members run one after another.

    Warns:
        FusionWarning: if the members have to be evaluated one by one. It names the module and the line.
    """
    check_fused(fused)
    check_function("objective", objective, 2)
    check_flag("compare", compare)
    _check_modes(fused)
    first = batch
    if own_data:
        rows_K, batch_of = own_rows(batch, fused.K)
        first = batch_of([row[0] for row in rows_K])
    if fused.K > 1 or not fused.one_by_one:
        fused.written |= _written(fused, objective, first) if written is None else frozenset(written)
        fused.part_parameters(fused.written)
    obstacle = None if fused.one_by_one else _find_obstacle(fused, objective, batch, own_data, first)
    if compare and fused.K > 1:
        check_members(fused, objective, first)
    if obstacle is not None:
        warn(f"members train one after another, {obstacle}", FusionWarning)
    return obstacle


def _check_modes(fused: FusedModel) -> None:
    """Raise `FusionMismatch` if the model's `train()` writes to tensors.

    A fused model calls `train()` of its template only. The template's tensors have no data, so the write would be lost.
    """
    if all(type(part).train is nn.Module.train for part in fused.template.modules()):
        return
    own = fused.unfuse(0)
    with torch.no_grad(), preserved_generators():
        # Change all weights at random. Otherwise, merging an adapter of zeros would change nothing.
        for p in own.parameters():
            p.copy_(torch.randn_like(p)) if p.is_floating_point() else None
    for mode in (not own.training, own.training):
        before = {name: tensor.detach().clone() for name, tensor in named_tensors(own).items()}
        own.train(mode)
        for name, tensor in named_tensors(own).items():
            was = before.get(name)
            if was is None or was.shape != tensor.shape or bool(((tensor != was) & ~(was != was)).any()):
                raise FusionMismatch(
                    f"`train()` or `eval()` writes to `{name}`, which a fused model does not follow: do so in forward, "
                    "or leave it out, such as by `merge_weights=False` in loralib"
                )


def _written(fused: FusedModel, objective: Objective, batch: Any) -> frozenset[str]:
    """Return the names of the parameters that one member's forward writes to.

    Errors of forward are ignored here, because the fused pass raises them later.

    Raises:
        FusionMismatch: if forward writes to a tensor that shares memory with another one. Writes through `.data`
            count, although torch does not track them.
    """
    own = fused.unfuse(0)
    # Change all weights at random, zeros included, because a write is noticed only if it changes a value. The average
    # of two equal weights, for example, would change nothing.
    with torch.no_grad(), preserved_generators():
        for p in (p for p in own.parameters() if p.is_floating_point()):
            noise = 0.1 * torch.rand(p.shape, device=p.device)
            p.copy_(torch.where(p == 0, noise, p * (1 + noise)))
    watched = {*dict(own.named_parameters()), *fused.overlapping}
    places = _places(own)
    before = {name: t.detach().clone() for name, t in named_tensors(own).items() if name in watched}
    with preserved_generators(), avoiding_kernels(own, own.parameters()):
        seed_generators(0)
        try:
            objective(own, copied(batch))
        except Exception as error:
            if is_out_of_memory(error):
                raise
    after = named_tensors(own)
    _check_apart(places, _places(own))
    written = frozenset(name for name, value in before.items() if not torch.equal(after[name], value))
    if found := written & fused.overlapping:
        raise overlap_written(min(found))
    return written


def _places(module: nn.Module) -> dict[str, int]:
    """Return the memory address of each parameter that is not empty."""
    return {name: p.untyped_storage().data_ptr() for name, p in module.named_parameters() if p.numel()}


def _check_apart(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Raise `FusionMismatch` if forward made a parameter use the memory of another one.

    `before` and `after` are results of `_places`, from before and after forward.
    """
    for name, place in after.items():
        other = next((own for own in after if own != name and after[own] == place), None)
        if other is not None and before.get(name) != place:
            raise FusionMismatch(
                f"forward gives `{name}` the memory of `{other}` (`.data = ...`), so that from then on each changes "
                "with the other: copy the values instead, by `copy_()` under `torch.no_grad()`"
            )


def _find_obstacle(fused: FusedModel, objective: Objective, batch: Any, own_data: bool, first: Any) -> Obstacle | None:
    failure = _attempt(fused, objective, batch, own_data)
    if failure and fused.common.bufs():
        # All members share the buffers that were equal in them. Forward may write to one, so give each member its own.
        fused.part_buffers()
        failure = _attempt(fused, objective, batch, own_data)
    failure = failure or _fails_in_evaluation(fused, objective, batch, own_data, first)
    if failure is None:
        return None
    if isinstance(failure, BackwardInside | FreezesInside):
        raise failure
    fused.one_by_one = True
    error = _attempt(fused, objective, batch, own_data)
    if error:
        fused.one_by_one = False
        raise _explained(error)
    return _locate(failure, fused.template)


def _fails_in_evaluation(
    fused: FusedModel, objective: Objective, batch: Any, own_data: bool, first: Any
) -> Exception | None:
    """Return the error of a forward pass in evaluation mode that fails for all members at once, but not one by one.

    Return None if there is no such error.
    """
    if fused.K == 1:
        return None
    training, modes = fused.training, snapshot(fused.template)
    try:
        with torch.no_grad():
            fused.train(False)
            failure = _attempt(fused, objective, batch, own_data) or _counts_padding(fused, objective, first)
            if failure is None:
                return None
            fused.one_by_one = True
            return None if _attempt(fused, objective, batch, own_data) else failure
    finally:
        fused.one_by_one = False
        fused.train(training)
        put_back(fused.template, modes)


def _counts_padding(fused: FusedModel, objective: Objective, batch: Any) -> Exception | None:
    """Return an error if an encoder packs padded sequences and members then compute other results than alone.

    Return None if the results agree, or if no encoder packs padded sequences.
    """
    for path, part in fused.template.named_modules():
        if isinstance(part, nn.TransformerEncoder) and getattr(part, "use_nested_tensor", False):
            try:
                check_members(fused, objective, batch)
            except FusionMismatch:
                return CountsPadding(
                    f"its padded places count in evaluation, where `{path or type(part).__name__}` alone makes zeros "
                    "of them: leave them out, or set its `use_nested_tensor = False`"
                )
            break
    return None


def _attempt(fused: FusedModel, objective: Objective, batch: Any, own_data: bool) -> Exception | None:
    """Run a forward and backward pass; return its error, or None. The model stays as it was."""
    with restored(fused):
        try:
            before = global_states()
            result = fused.map(objective, copied(batch), own_data)
            if global_states() != before:
                return SharedDraws("it draws from a generator that all share, such as Python's or NumPy's")
            losses = [t.sum() for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            trainable = [p for p in fused.stacked.values() if p.requires_grad]
            # Skip the backward pass in evaluation, even if the objective enables gradients.
            if losses and torch.is_grad_enabled():
                torch.autograd.grad(losses, trainable, allow_unused=True)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return error
    return None


def _explained(error: Exception) -> Exception:
    """Return an error that explains `error`; return `error` itself if its cause is unknown.

    The known causes are that forward freezes a parameter, and that the backward pass recomputes forward.
    """
    if "requires_grad flags of leaf" in str(error):
        explained: RuntimeError = FreezesInside()
    elif any(word in str(error) for word in ("meta", "use_reentrant")):
        explained = RuntimeError(
            "the model recomputes its forward pass in the backward pass (activation checkpointing), which a fused "
            "model does not support: switch it off"
        )
    else:
        return error
    explained.__cause__ = error
    return explained


def _locate(error: Exception, template: nn.Module) -> Obstacle:
    paths = {id(module): path for path, module in template.named_modules()}
    module, location, code = "", "", ""
    for frame, line in _frames(error.__traceback__):
        running = frame.f_locals.get("self")
        if id(running) in paths:
            module = f"{paths[id(running)] or 'itself'} ({type(running).__name__})"
        location = f"{frame.f_code.co_filename}:{line}"
        code = linecache.getline(frame.f_code.co_filename, line).strip()
    message = str(error).partition("\n")[0]
    reason = next((words for part, words in _WORDS.items() if part in message), message)
    in_backward = not location and not isinstance(error, SharedDraws | CountsPadding)
    return Obstacle(module, location, code, f"in the backward pass: {reason}" if in_backward else reason)


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of `trace` in the model, the objective and torch's layers, each with its line.

    Internals of torch and fusion are left out.
    """
    for frame, line in traceback.walk_tb(trace):
        file = Path(frame.f_code.co_filename)
        machinery = file.name in ("module.py", "container.py") or _LAYERS not in file.parents
        if _OURS not in file.parents and not (_TORCH in file.parents and machinery):
            yield frame, line


_SHARED_WRITE = (
    "it writes members' values into a tensor that they share, or into a view of one: make that of a tensor of theirs, "
    "such as by `h.new_zeros(...)`"
)
_WORDS = {
    "dynamic shape": "how many rows it takes depends on data, so each member takes another number (a mask as index, "
    "`torch.where`, `nonzero`, `unique`, as in routed experts)",
    ".item()": "it makes a number of a tensor (`.item()`, `float(...)`), but each member has another",
    "data-dependent control flow": "it decides by a tensor (`if`, `while`), but each member may decide otherwise",
    "mutating directly with `.data`": "it assigns to `.data`: write in place instead, by `p.data.copy_(...)`",
    "is not possible because there exists a Tensor": _SHARED_WRITE,
    "doesn't match the broadcast shape": _SHARED_WRITE,
    "doesn't have storage": "it hands a tensor to NumPy, but each member has another",
    "doesn't work on out=": "it writes by `out=`, for which vmap has no rule",
    "setup_context": "it hands a function to a torch.autograd.Function that has no `setup_context` and no `vmap`",
    "randomness error mode": "it draws numbers without a rule for members, as from a `torch.Generator` of its own",
    "setting up backward hooks": "it has a hook on a module's backward pass (`register_full_backward_hook`)",
    "may have escaped": "its torch.autograd.Function computes with a tensor of the model: hand it to `apply`",
}
"""Maps a part of torch's error message to a description of what the model does."""

_OURS = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_LAYERS = _TORCH / "nn" / "modules"
