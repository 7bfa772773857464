"""The operators that fast rules take, and the mode that sends them there, in company of other modes."""

import inspect
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import fuse
from fusion.evaluate.rules import folded
from fusion.evaluate.rules.member import fold
from fusion.evaluate.rules.table import COMPOSITES, DRAWING_RULES, RULES
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import K, assert_folds, member

TAKEN: list[tuple[Any, tuple[Any, ...]]] = [
    (F.linear, (torch.randn(4, 5), member(7, 5))),
    (F.conv2d, (torch.randn(2, 3, 6, 6), member(4, 3, 3, 3))),
    (F.group_norm, (member(2, 4, 6), 2)),
    (F.scaled_dot_product_attention, (torch.randn(2, 4, 5, 8), *[member(2, 4, 5, 8)] * 2)),
    (F.embedding, (torch.tensor([1, 2]), member(4, 3))),
    (F.cross_entropy, (member(2, 3), torch.tensor([1, 2]))),
    (torch.max_pool2d, (torch.randn(2, 5, 5, 3, 4).permute(3, 0, 4, 1, 2), 2)),
]


@pytest.mark.parametrize(("function", "args"), TAKEN)
def test_a_rule_takes_the_operator(function: Any, args: tuple[Any, ...]) -> None:
    def op(*tensors: Any) -> Any:
        rule = RULES.get(function) or partial(DRAWING_RULES[function], streams=Streams(K))
        result = fold(rule, tensors, {})
        assert result is not NotImplemented
        return result

    has_K = [isinstance(a, Tensor) and a.dim() > 1 and a.shape[0] == K for a in args]
    torch.func.vmap(op, in_dims=tuple(0 if h else None for h in has_K))(*args)


WITH_RULES = {**RULES, **DRAWING_RULES, **COMPOSITES}
IN_PYTHON = [function for function in WITH_RULES if inspect.isfunction(function)]
OVERLOADS = {
    F.linear: torch.ops.aten.linear.default,
    F.scaled_dot_product_attention: torch.ops.aten.scaled_dot_product_attention.default,
    torch.embedding: torch.ops.aten.embedding.default,
    torch._weight_norm: torch.ops.aten._weight_norm.default,
    F.one_hot: torch.ops.aten.one_hot.default,
    F.bilinear: torch.ops.aten.bilinear.default,
}


def defaults(function: Any) -> dict[str, Any]:
    """Map the name of each argument that a call may leave out to its default."""
    if schema := getattr(OVERLOADS.get(function), "_schema", None):
        return {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    arguments = inspect.signature(function).parameters.values()
    return {argument.name: argument.default for argument in arguments if argument.default is not argument.empty}


@pytest.mark.parametrize("function", [*IN_PYTHON, *OVERLOADS], ids=lambda function: function.__name__)
def test_an_argument_that_is_left_out_is_what_torch_takes_it_for(function: Any) -> None:
    arguments = inspect.signature(WITH_RULES[function]).parameters.values()
    if not any(argument.kind == argument.VAR_KEYWORD for argument in arguments):
        assert defaults(WITH_RULES[function]) == defaults(function)


def test_functions_of_several_tensors_for_which_vmap_has_no_rule() -> None:
    assert_folds(lambda x: torch.column_stack([x, x[:, 0], torch.ones(4)]), member(4, 3), dims=(0,))
    assert_folds(lambda x: nn.utils.rnn.pad_sequence([x[0], x[1, :2]], batch_first=True), member(4, 3), dims=(0,))


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w + torch.zeros(size=(4, 3)),
        lambda w: torch.mm(input=w, mat2=w.T),
        lambda w: F.linear(input=w, weight=w),
        lambda w: F.normalize(input=w),
        lambda w: torch.column_stack(tensors=[w, w]),
    ],
)
def test_all_arguments_may_be_given_by_name(call: Any) -> None:
    assert_folds(call, member(4, 3), dims=(0,))


def test_torch_does_not_warn_of_operators_in_which_it_loops_over_the_members() -> None:
    """The user could do nothing about it."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fuse([nn.Linear(4, 4) for _ in range(2)]).map(
                lambda model, x: model(x).take(torch.tensor(3)), torch.ones(4, 4)
            )
        with pytest.warns(UserWarning, match="performance drop"):
            torch.func.vmap(lambda x: x.take(torch.tensor(0)))(member(4))
    finally:
        torch.set_warn_always(False)


def test_autocast_reaches_the_folded_operators() -> None:
    x, weight, bias = torch.randn(4, 5), member(7, 5), member(7)
    with folded(Streams(K)), torch.autocast("cpu", torch.bfloat16):
        out = torch.func.vmap(F.linear, in_dims=(None, 0, 0))(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        loop = torch.stack([F.linear(x, w, b) for w, b in zip(weight, bias)])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, loop)


def test_no_grad_records_nothing() -> None:
    weight = member(7, 5).requires_grad_()
    with folded(Streams(K)), torch.no_grad():
        out = torch.func.vmap(F.linear, in_dims=(None, 0))(torch.randn(4, 5), weight)
    assert not out.requires_grad


def test_nested_transforms_run_as_torch_runs_them() -> None:
    weight, x = member(5), torch.randn(4, 5)

    def loss(w: Tensor) -> Tensor:
        return F.linear(x, w[None]).pow(2).sum()

    with folded(Streams(K, range(K))):
        grads = torch.func.vmap(torch.func.grad(loss))(weight)
    expected = torch.stack([torch.func.grad(loss)(w) for w in weight])
    torch.testing.assert_close(grads, expected)


def test_outside_of_vmap_nothing_changes() -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    with folded(Streams(K, range(K))):
        out, _ = attention(x, x, x)
    torch.testing.assert_close(out, attention(x, x, x)[0])
