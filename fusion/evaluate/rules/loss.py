"""Cross-entropy and CTC: one call computes the losses of all members' rows, then each member takes its own mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules.member import Member


def cross_entropy(
    K: int,
    input: Member,
    target: Member,
    weight: Member | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float | Member = 0.0,
) -> Any:
    """Compute `F.cross_entropy` for K members: class indices as target [N, ...] or [], input [N, C, ...] or [C]."""
    weighted_by_member = weight is not None and weight.dim is not None
    unusual = size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum")
    if target.value.is_floating_point() or weighted_by_member or unusual:
        return NotImplemented
    logits_K, target_K = input.lead(K), target.lead(K)
    if target_K.dtype == torch.uint8:
        target_K = target_K.long()  # the default `ignore_index`, -100, would be class 156 as a byte
    if logits_K.dim() == 2:
        logits_K, target_K = logits_K.unsqueeze(1), target_K.unsqueeze(1)
        if reduction == "none":
            return NotImplemented
    class_weight = None if weight is None else weight.value
    flat = logits_K.flatten(0, 1), target_K.flatten(0, 1), class_weight, ignore_index
    loss_KN = _smoothed(K, label_smoothing, *flat).view(target_K.shape)
    if reduction == "none":
        return Member(loss_KN, 0)
    loss_K = loss_KN.flatten(1).sum(1)
    if reduction == "sum":
        return Member(loss_K, 0)
    counted = target_K != ignore_index
    share = counted if class_weight is None else class_weight[target_K.where(counted, 0)] * counted
    total_K = share.flatten(1).sum(1)
    # If all targets are ignored, the mean is NaN and its gradient 0, as in torch.
    mean_K = loss_K / total_K.where(total_K != 0, 1)
    return Member(mean_K.where(total_K != 0, float("nan")), 0)


def _smoothed(
    K: int, label_smoothing: float | Member, logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """Return the loss of each target, with the label smoothing of the target's member.

    The first axis of `logits` and `target` has the rows of the first member, then those of the second, and so on.
    The loss is affine in the label smoothing. So each member interpolates between the losses for smoothing 0 and 1.
    """
    if logits.dim() > 2 and logits.stride(1) == 1:
        # Classes lie side by side in memory, as after `logits.movedim(-1, 1)` of tokens. Make them the last axis,
        # because torch would copy the logits otherwise.
        rows = logits.movedim(1, -1).flatten(0, -2), target.flatten()
        return _smoothed(K, label_smoothing, *rows, weight, ignore_index).view(target.shape)

    def at(smoothing: float) -> Tensor:
        return F.cross_entropy(
            logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=smoothing
        )

    if not isinstance(label_smoothing, Member):
        return at(label_smoothing)
    rows_K = label_smoothing.lead(K).reshape(K, *[1] * target.dim())
    smoothing = rows_K.expand(K, target.shape[0] // K, *target.shape[1:]).flatten(0, 1)
    plain = at(0.0)
    # With a logit of -inf, only members without smoothing have a finite loss. In `lerp`, 0 times infinity would be NaN.
    return torch.where(smoothing == 0, plain, torch.lerp(plain, at(1.0), smoothing))


def ctc(
    K: int,
    log_probs: Member,
    targets: Member,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """Compute `F.ctc_loss` for K members, each with log_probs [T, N, C] or [T, C].

    Targets are [N, S], or all samples' targets concatenated.
    """
    probs_K = log_probs.at(K, 1)
    one = probs_K.dim() == 3
    lengths, lengths_K = (_of_rows(K, given, probs_K.device) for given in (input_lengths, target_lengths))
    of_rows = targets.lead(K).flatten(0, 1), lengths.flatten(), lengths_K.flatten()
    probs = probs_K if one else probs_K.flatten(1, 2)
    loss_KN = F.ctc_loss(probs, *of_rows, blank, "none", zero_infinity).view(lengths_K.shape)
    if reduction == "none":
        return Member(loss_KN.squeeze(1) if one else loss_KN, 0)
    if reduction == "sum":
        return Member(loss_KN.sum(1), 0)
    return Member((loss_KN / lengths_K.clamp(min=1)).mean(1), 0) if reduction == "mean" else NotImplemented


def _of_rows(K: int, lengths: Any, device: torch.device) -> Tensor:
    """Return the lengths of each member's N sequences as a tensor [K, N]."""
    if isinstance(lengths, Member):
        return lengths.lead(K).reshape(K, -1)
    return torch.tensor(lengths, device=device).expand(K, -1)
