"""Cross-entropy and CTC, folded: one mean for each member."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, assert_folds, member


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(smoothing: float, weighted: bool, reduction: str) -> None:
    weight = torch.rand(5) + 0.5 if weighted else None
    target = torch.randint(0, 5, (6,))
    target[2] = -100

    def op(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, weight, reduction=reduction, label_smoothing=smoothing)

    assert_folds(op, member(6, 5), target, dims=(0, None))
    assert_folds(op, member(6, 5, 2), torch.randint(0, 5, (K, 6, 2)), dims=(0, 0))
    assert_folds(op, torch.randn(6, 5), torch.randint(0, 5, (K, 6)), dims=(None, 0))
    classes_last = member(6, 2, 5).movedim(-1, 2)
    assert_folds(op, classes_last, torch.randint(0, 5, (K, 6, 2)), dims=(0, 0))


@pytest.mark.parametrize("weighted", [True, False])
def test_cross_entropy_with_a_label_smoothing_per_member(weighted: bool) -> None:
    weight = torch.rand(5) + 0.5 if weighted else None
    x, target, smoothing = member(6, 5), torch.randint(0, 5, (6,)), torch.tensor([0.0, 0.1, 1.0])
    target[3] = -100

    def op(x: Tensor, epsilon: Tensor) -> Tensor:
        return F.cross_entropy(x, target, weight, label_smoothing=epsilon)  # type: ignore[arg-type]

    with folded(Streams(K, range(K))):
        loss_K = torch.func.vmap(op)(x, smoothing)
    loop = [F.cross_entropy(x[k], target, weight, label_smoothing=float(smoothing[k])) for k in range(K)]
    torch.testing.assert_close(loss_K, torch.stack(loop))


def test_classes_that_lie_side_by_side_are_not_copied() -> None:
    logits = member(6, 2, 5).movedim(-1, 2)
    target = torch.randint(0, 5, (K, 6, 2))
    with torch.profiler.profile() as seen, folded(Streams(K, range(K))):
        torch.func.vmap(lambda x, t: F.cross_entropy(x, t, reduction="sum"))(logits, target)
    operators = {event.key for event in seen.key_averages()}
    assert "aten::_log_softmax" in operators
    assert "aten::copy_" not in operators


def test_cross_entropy_of_one_sample_and_with_probabilities() -> None:
    assert_folds(F.cross_entropy, member(5), torch.tensor(2), dims=(0, None))
    assert_folds(F.cross_entropy, member(6, 5), torch.rand(6, 5).softmax(1), dims=(0, None))


@pytest.mark.parametrize("weighted", [True, False])
def test_classes_that_are_bytes(weighted: bool) -> None:
    """As a byte, -100, which is left out, would be class 156."""
    weight = torch.rand(200) + 0.5 if weighted else None
    target = torch.tensor([0, 156, 156, 3], dtype=torch.uint8)
    assert_folds(lambda x, t: F.cross_entropy(x, t, weight), member(4, 200), target, dims=(0, None))


def test_the_mean_over_no_target_is_nan_and_has_a_gradient_of_0() -> None:
    """As torch's own."""
    target = torch.full((6,), -100)
    alone = torch.randn(6, 5, requires_grad=True)
    F.cross_entropy(alone, target).backward()
    x = torch.randn(K, 6, 5, requires_grad=True)
    with folded(Streams(K)):
        loss_K = torch.func.vmap(lambda own: F.cross_entropy(own, target))(x)
    assert loss_K.isnan().all()
    loss_K.sum().backward()
    assert x.grad is not None
    assert alone.grad is not None
    assert torch.equal(x.grad[0], alone.grad)
    assert not x.grad.any()


def test_an_unknown_reduction_is_torchs_error() -> None:
    logits, target = torch.randn(K, 5, 3), torch.arange(5) % 3
    with folded(Streams(K)), pytest.raises(ValueError, match="avg is not a valid value for reduction"):
        torch.func.vmap(lambda x: F.cross_entropy(x, target, reduction="avg"))(logits)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc(reduction: str) -> None:
    steps, targets = torch.full((4,), 6), torch.randint(1, 5, (4, 3))
    lengths = torch.tensor([3, 1, 0, 2])
    one_after_another = torch.cat([row[:length] for row, length in zip(targets, lengths)])

    def op(x: Tensor, t: Tensor, steps: Any, lengths: Any) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), t, steps, lengths, reduction=reduction)

    assert_folds(op, member(6, 4, 5), targets, steps, lengths, dims=(0, None, None, None))
    assert_folds(op, member(6, 4, 5), one_after_another, steps, lengths, dims=(0, None, None, None))
    assert_folds(lambda x, t: op(x, t, steps.tolist(), lengths.tolist()), member(6, 4, 5), targets, dims=(0, None))
    own = torch.randint(1, 5, (K, 4, 3)), torch.full((K, 4), 6), torch.randint(0, 4, (K, 4))
    assert_folds(op, member(6, 4, 5), *own, dims=(0, 0, 0, 0))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ctc_of_one_sequence_and_of_one_that_is_too_short(reduction: str) -> None:
    def op(x: Tensor, steps: Any, lengths: Any) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), target, steps, lengths, reduction=reduction, zero_infinity=True)

    target = torch.tensor([1, 1, 2])
    assert_folds(lambda x: op(x.unsqueeze(1), (3,), (3,)), member(3, 5), dims=(0,))
    assert_folds(lambda x: op(x, torch.tensor(6), torch.tensor(3)), member(6, 5), dims=(0,))


def test_members_without_smoothing_may_leave_out_a_class_by_an_infinite_logit() -> None:
    logits_K = torch.randn(3, 4, 5, requires_grad=True)
    target, left_out = torch.tensor([0, 1, 2, 0]), torch.tensor([False, False, False, False, True])
    smoothing_K = torch.tensor([0.0, 0.1, 0.0])

    def loss(logits: Tensor, smoothing: Any) -> Tensor:
        return F.cross_entropy(logits.masked_fill(left_out, -torch.inf), target, label_smoothing=smoothing)

    with folded(Streams(3)):
        loss_K = torch.func.vmap(loss)(logits_K, smoothing_K)
    alone = torch.stack([loss(logits, float(s)) for logits, s in zip(logits_K, smoothing_K)])
    torch.testing.assert_close(loss_K, alone)
    (grad,), (expected,) = (torch.autograd.grad(x[::2].sum(), [logits_K]) for x in (loss_K, alone))
    torch.testing.assert_close(grad[::2], expected[::2])
