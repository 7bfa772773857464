"""Muon for hidden matrices, AdamW for the other parameters (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Shape suffixes: R members of a run (adjacent members with one rule). A matrix is [m, n]. All matrices of one shape, in
all layers and members, are orthogonalized together by batched products.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusion.argument_checks import require
from fusion.members.fused_model import FusedModel
from fusion.optim.members_by_rule import RuleMembers, wide
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.parts import SeveralAsOne

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_EPS = 1e-7
"""Coefficients of the polynomial, number of iterations and smallest norm, as in torch.optim.Muon."""

MARK = "use_muon"
"""Name of an attribute of parameters: True or False sets whether Muon updates the parameter."""


def hidden_matrices(
    module: nn.Module, marks: Mapping[str, Mapping[str, Any]] | None = None, among: Collection[str] | None = None
) -> frozenset[str]:
    """Return the names of the parameters that Muon updates.

    These are real 2-D parameters that have elements and are trained, except for embeddings and the readout. The last
    module that has such a parameter counts as the readout. A parameter's attribute `use_muon`, True or False, overrides
    this choice.

    Args:
        module: A model; its tensors need no data.
        marks: Parameter name -> attributes of the parameter; if None, they are read from the parameters.
        among: Names of the trained parameters to consider; None for all that need gradients.

    Raises:
        ValueError: if Muon would update no parameter, or `use_muon` is set on a parameter that is no real matrix.
    """
    named = {id(p): name for name, p in module.named_parameters()}
    marks = {name: vars(p) for name, p in module.named_parameters()} if marks is None else marks
    if among is None:
        among = {name for name, p in module.named_parameters() if p.requires_grad}
    else:
        marks = {name: of for name, of in marks.items() if name in among}
    trained = ((name, p) for name, p in module.named_parameters() if name in among)
    fits = {name for name, p in trained if p.dim() == 2 and p.is_floating_point() and p.numel()}
    found, readout = set[str](), set[str]()
    for part in module.modules():
        own = {named[id(p)] for p in part.parameters(recurse=False)} & fits
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            readout |= own
        elif own:
            found, last = found | own, own
    if found:
        readout |= last
    asked = {name: of[MARK] for name, of in marks.items() if MARK in of}
    for name, mark in asked.items():
        rule = "True or False, and True on real 2-D parameters with elements that learn alone"
        require(isinstance(mark, bool) and (not mark or name in fits), f"{name}.{MARK}", mark, rule)
    chosen = frozenset(name for name in found | set(asked) if asked.get(name, name not in readout))
    rule = f"another one for a model without hidden 2-D parameters; `{MARK} = True` on a parameter makes it one"
    require(bool(chosen), "optimizer", "muon", rule)
    return chosen


def matrices_of(fused: FusedModel, members: Sequence[Hyperparameters], among: Collection[str]) -> frozenset[str]:
    """Return the names of the parameters that Muon updates; none if no member uses Muon.

    Args:
        among: Names of the trained parameters to consider.

    Raises:
        ValueError: if `hidden_matrices` raises it.
    """
    if all(hp.kind != "muon" for hp in members):
        return frozenset()
    return hidden_matrices(fused.template, fused.marks, among)


def update(
    stored: Sequence[Sequence[Tensor]],
    run: RuleMembers,
    rates: Sequence[Tensor],
    decays: Sequence[Tensor],
    takes_R: Tensor | None = None,
) -> None:
    """Update the matrices of R members, in place, as `torch.optim.Muon` does one by one.

    Args:
        stored: For each parameter, its values, its gradients and its momenta, [R, m, n] each.
        run: The R members.
        rates: For each parameter, the learning rates [R], including multipliers and the schedule's factor.
        decays: For each parameter, the weight decays [R].
        takes_R: True for members that take the step; None for all. The other members do not change.
    """
    momentum_R, nesterov_R = (run.vectors[name][:, 0] for name in ("momentum", "nesterov"))
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for i, (values, _, _) in enumerate(stored):
        alike.setdefault((values.shape[1:], values.dtype), []).append(i)
    for (shape, _), places in alike.items():
        scale_R = momentum_R.new_tensor([_scale(hp, shape) for hp in run.members])
        directions = [_direction(stored[i][1], stored[i][2], momentum_R, nesterov_R, takes_R) for i in places]
        steps = orthogonalized(torch.stack(directions))
        for i, step in zip(places, steps):
            values = stored[i][0]
            shrunk = values * wide(1 - rates[i] * decays[i], values)
            moved = torch.addcmul(shrunk, step.to(values), wide(-rates[i] * scale_R, values))
            values.copy_(moved if takes_R is None else torch.where(takes_R[:, None, None], moved, values))


def orthogonalized(directions: Tensor) -> Tensor:
    """Bring the singular values of matrices close to 1 by the Newton-Schulz iteration, in bfloat16.

    Args:
        directions: [..., m, n].

    Returns:
        [..., m, n] in bfloat16. A matrix U D V^T becomes U S V^T with S between about 0.7 and 1.2, as in
            `torch.optim.Muon`.
    """
    tall = directions.shape[-2] > directions.shape[-1]
    x = directions.to(torch.bfloat16).flatten(0, -3)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, gram, x, beta=_A)
    return (x.mT if tall else x).reshape(directions.shape)


def _direction(
    gradient: Tensor, momentum: Tensor, momentum_R: Tensor, nesterov_R: Tensor, takes_R: Tensor | None
) -> Tensor:
    """Update momenta in place; return the directions [R, m, n], by Nesterov momentum for members that use it."""
    keep = wide(momentum_R, gradient)
    moved = momentum.lerp(gradient, wide(1 - momentum_R, gradient))
    momentum.copy_(moved if takes_R is None else torch.where(takes_R[:, None, None], moved, momentum))
    ahead = gradient.lerp(moved, keep)
    return torch.where(wide(nesterov_R, gradient) > 0, ahead, moved)


def _scale(hp: Hyperparameters, shape: Sequence[int]) -> float:
    """Return the factor of the learning rate for a matrix of this shape, as in `torch.optim.Muon`."""
    rows, columns = shape
    if hp.adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class MuonWithAdamW(SeveralAsOne):
    """Joins torch's Muon, for groups with `use_muon=True`, and torch's AdamW, for all other groups, into one optimizer.

    Args:
        groups: Parameter groups with `lr`, `weight_decay` and `use_muon`.
        hp: All other settings.
    """

    key = MARK

    def __init__(self, groups: list[dict[str, Any]], hp: Hyperparameters) -> None:
        by_muon, others = ([group for group in groups if group[MARK] is mark] for mark in (True, False))
        muon = torch.optim.Muon(
            by_muon, hp.lr, momentum=hp.momentum, nesterov=hp.nesterov, adjust_lr_fn=hp.adjust_lr_fn
        )
        parts: dict[bool, torch.optim.Optimizer] = {True: muon}
        if others:
            parts[False] = torch.optim.AdamW(others, hp.lr, (hp.beta1, hp.beta2), hp.eps)
        super().__init__(parts)
