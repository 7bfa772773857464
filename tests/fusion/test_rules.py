"""Every rule against a loop over the members; which inputs have K and which are shared, in all useful mixtures."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion.rules import folded
from fusion.rules.member import fold
from fusion.rules.table import DRAWING_RULES, RULES
from fusion.streams import Streams
from tests.fusion.folding import K, assert_folds, member

SHARED = (None, 0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tensor(dim: int | None, *shape: int) -> Tensor:
    """With the K axis at `dim`, or without."""
    return torch.randn(shape) if dim is None else torch.randn(K, *shape).movedim(0, dim)


@pytest.mark.parametrize(("x", "w"), [(None, 0), (0, 0), (1, 0), (0, None), (1, None)])
def test_linear(x: int | None, w: int | None) -> None:
    assert_folds(F.linear, tensor(x, 4, 6, 5), tensor(w, 7, 5), tensor(w, 7), dims=(x, w, w))
    assert_folds(F.linear, tensor(x, 4, 5), tensor(w, 7, 5), dims=(x, w))
    assert_folds(F.linear, tensor(x, 4, 5), tensor(w, 7, 5), tensor(0, 7), dims=(x, w, 0))


def test_linear_of_one_sample() -> None:
    assert_folds(F.linear, torch.randn(5), member(7, 5), member(7), dims=(None, 0, 0))
    assert_folds(F.linear, member(5), member(7, 5), torch.randn(7), dims=(0, 0, None))


@pytest.mark.parametrize("w", SHARED)
def test_addmm(w: int | None) -> None:
    assert_folds(torch.addmm, tensor(w, 7), tensor(0, 4, 5), tensor(w, 5, 7), dims=(w, 0, w))
    assert_folds(torch.addmm, tensor(0, 4, 7), tensor(0, 4, 5), tensor(w, 5, 7), dims=(0, 0, w))


CONVOLUTIONS: list[tuple[Any, dict[str, Any]]] = [
    (F.conv1d, {}),
    (F.conv2d, {}),
    (F.conv2d, {"stride": 2, "padding": 1}),
    (F.conv2d, {"dilation": 2, "padding": "same"}),
    (F.conv2d, {"groups": 4, "padding": (1, 0)}),
    (F.conv3d, {"padding": 1}),
]


@pytest.mark.parametrize("x", SHARED)
@pytest.mark.parametrize(("conv", "options"), CONVOLUTIONS)
def test_convolution(conv: Any, options: dict[str, Any], x: int | None) -> None:
    dims = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}[conv]
    weight = member(8, 4 // options.get("groups", 1), *[3] * dims)
    assert_folds(lambda *t: conv(*t, **options), tensor(x, 2, 4, *[7] * dims), weight, member(8), dims=(x, 0, 0))


@pytest.mark.parametrize(("x", "w", "channels"), [(None, 0, 1), (0, 0, 1), (1, 0, 4), (0, None, 4)])
def test_conv2d_in_other_layouts(x: int | None, w: int | None, channels: int) -> None:
    inputs = tensor(x, 2, channels, 6, 6), tensor(w, 5, channels, 3, 3)
    assert_folds(F.conv2d, *inputs, dims=(x, w))


@pytest.mark.parametrize("x", SHARED)
@pytest.mark.parametrize("options", [{}, {"stride": 2, "output_padding": 1}, {"groups": 2, "dilation": 2}])
def test_conv_transpose2d(options: dict[str, Any], x: int | None) -> None:
    weight = member(4, 3, 3, 3)
    bias = member(3 * options.get("groups", 1))
    assert_folds(lambda *t: F.conv_transpose2d(*t, **options), tensor(x, 2, 4, 5, 5), weight, bias, dims=(x, 0, 0))


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d])
def test_pooling_of_neighbouring_channels(pool: Any) -> None:
    def op(x: Tensor, weight: Tensor) -> Any:
        return pool(F.conv2d(x, weight), 2)

    inputs = torch.randn(2, 3, 8, 8), member(4, 3, 3, 3)
    assert_folds(op, *inputs, dims=(None, 0))
    assert_folds(lambda x: pool(x, 2), member(2, 4, 6, 6), dims=(0,))


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(4, affine=False)]
)
def test_channels_of_all_members_stay_side_by_side(pool: nn.Module) -> None:
    def op(x: Tensor, weight: Tensor) -> Any:
        return pool(F.relu(F.conv2d(x, weight)))

    pool.eval()
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(op, in_dims=(None, 0), out_dims=1)(torch.randn(2, 1, 8, 8), member(4, 1, 3, 3))
    assert out.flatten(1, 2).is_contiguous(memory_format=torch.channels_last)


def test_max_pool2d_with_indices_is_torchs_own() -> None:
    def op(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2, return_indices=True)[1].float()

    x = member(2, 4, 6, 6)
    with folded(Streams(K, range(K))):
        assert torch.equal(torch.func.vmap(op)(x), torch.stack([op(row) for row in x]))


@pytest.mark.parametrize("x", [None, 0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool, x: int | None) -> None:
    def op(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Any:
        mean, var = mean.detach().clone(), var.detach().abs()
        return F.batch_norm(x, mean, var, weight, bias, training, 0.3), mean, var

    inputs = tensor(x, 6, 4, 5, 5), member(4), member(4), member(4), member(4)
    assert_folds(op, *inputs, dims=(x, 0, 0, 0, 0))


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5)])
def test_batch_norm_without_affine_and_statistics(shape: tuple[int, ...]) -> None:
    assert_folds(lambda x: F.batch_norm(x, None, None, training=True), member(*shape), dims=(0,))


def test_batch_norm_of_a_module_updates_its_buffers() -> None:
    modules = [nn.BatchNorm2d(4) for _ in range(K)]
    params, buffers = torch.func.stack_module_state(modules)
    x = torch.randn(6, 4, 5, 5)

    def op(params: Any, buffers: Any) -> Any:
        return torch.func.functional_call(modules[0], (params, buffers), (x,))

    with folded(Streams(K, range(K))):
        torch.func.vmap(op)(params, buffers)
    modules[1](x)
    assert buffers["num_batches_tracked"].tolist() == [1] * K
    torch.testing.assert_close(buffers["running_mean"][2], modules[1].running_mean)
    torch.testing.assert_close(buffers["running_var"][0], modules[1].running_var)


@pytest.mark.parametrize("x", [None, 0, 1])
def test_group_norm(x: int | None) -> None:
    inputs = tensor(x, 6, 4, 5, 5), member(4), member(4)
    assert_folds(lambda x, w, b: F.group_norm(x, 2, w, b), *inputs, dims=(x, 0, 0))
    assert_folds(lambda x: F.group_norm(x, 2), member(6, 4, 5), dims=(0,))


@pytest.mark.parametrize("mask_shape", [None, (5, 7), (2, 1, 5, 7), (2, 4, 5, 7)])
@pytest.mark.parametrize("mask", SHARED)
def test_attention(mask: int | None, mask_shape: tuple[int, ...] | None) -> None:
    q, k, v = member(2, 4, 5, 8), member(2, 4, 7, 8), member(2, 4, 7, 8)
    if mask_shape is None:
        assert_folds(F.scaled_dot_product_attention, q, k, v, dims=(0, 0, 0))
    else:
        inputs = q, k, v, tensor(mask, *mask_shape)
        assert_folds(F.scaled_dot_product_attention, *inputs, dims=(0, 0, 0, mask))


def test_attention_causal_scaled_and_grouped_query() -> None:
    q, k, v = member(2, 4, 5, 8), torch.randn(2, 2, 5, 8), member(2, 2, 5, 8)

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)

    assert_folds(op, q, k, v, dims=(0, None, 0))


ATTENTION_CALLS: list[dict[str, Any]] = [
    {"need_weights": False},
    {"need_weights": True},
    {"need_weights": True, "average_attn_weights": False},
    {"need_weights": False, "attn_mask": torch.randn(5, 5)},
    {"need_weights": False, "attn_mask": torch.randn(2 * 4, 5, 5)},
    {"need_weights": False, "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
    {"need_weights": True, "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
    {"need_weights": False, "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    {
        "need_weights": True,
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
        "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
    },
]


@pytest.mark.parametrize("call", ATTENTION_CALLS, ids=lambda call: "+".join(call))
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(batch_first: bool, call: dict[str, Any]) -> None:
    shape = (2, 5, 16) if batch_first else (5, 2, 16)
    _assert_modules_fold(lambda: nn.MultiheadAttention(16, 4, batch_first=batch_first), [torch.randn(shape)] * 3, call)


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 7}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_multihead_attention_across_sources(options: dict[str, Any]) -> None:
    key, value = options.get("kdim", 16), options.get("vdim", 16)
    inputs = [torch.randn(5, 2, 16), torch.randn(7, 2, key), torch.randn(7, 2, value)]
    _assert_modules_fold(lambda: nn.MultiheadAttention(16, 4, **options), inputs, {})


@pytest.mark.parametrize("index", SHARED)
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding(padding_idx: int | None, index: int | None) -> None:
    indices = torch.randint(0, 9, (4, 5) if index is None else (K, 4, 5))
    indices[..., 0] = 2
    indices[..., 1] = 8
    assert_folds(lambda i, w: F.embedding(i, w, padding_idx), indices, member(9, 6), dims=(index, 0))


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


def test_cross_entropy_of_one_sample_and_with_probabilities() -> None:
    assert_folds(F.cross_entropy, member(5), torch.tensor(2), dims=(0, None))
    assert_folds(F.cross_entropy, member(6, 5), torch.rand(6, 5).softmax(1), dims=(0, None))


def dropout(x: Tensor, p: Tensor) -> Tensor:
    return F.dropout(x, p)  # type: ignore[arg-type]


def test_dropout_with_a_probability_per_member() -> None:
    x, p = torch.ones(K, 40_000), torch.tensor([0.0, 0.25, 1.0])
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(dropout, randomness="error")(x, p)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[2], torch.zeros_like(x[2]))
    torch.testing.assert_close(out[1].unique(), torch.tensor([0.0, 1 / 0.75]))
    assert (out[1] == 0).float().mean() == pytest.approx(0.25, abs=0.01)


def test_dropout_gradient_is_its_mask() -> None:
    x = torch.randn(K, 50, requires_grad=True)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(dropout, randomness="error")(x, torch.tensor([0.3, 0.5, 1.0]))
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(out, x * grad)


def test_dropout_of_a_shared_input_differs_between_members() -> None:
    x = torch.ones(1000)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(lambda w: F.dropout(x * w, 0.5), randomness="error")(torch.ones(K))
    assert not torch.equal(out[0], out[1])
    assert not torch.equal(out[1], out[2])


def test_dropout_does_nothing_in_evaluation() -> None:
    x = member(9)
    with folded(Streams(K, range(K))):
        out = torch.func.vmap(lambda x, p: F.dropout(x, p, training=False))(x, torch.rand(K))
    assert torch.equal(out, x)


RECURRENT: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"proj_size": 3, "bias": False}),
    (nn.LSTM, {"proj_size": 3}),
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}),
    (nn.RNN, {"nonlinearity": "tanh"}),
    (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_recurrent(kind: Any, options: dict[str, Any]) -> None:
    _assert_modules_fold(lambda: kind(5, 4, **options), [torch.randn(3, 6, 5)], {})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_with_frozen_weights_folds_into_the_batch(kind: Any) -> None:
    module = kind(5, 4, num_layers=2)
    assert_folds(lambda x: module(x), member(3, 2, 5), dims=(0,))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_from_a_given_state(kind: Any) -> None:
    module = kind(5, 4)

    def op(x: Tensor, h: Tensor) -> Any:
        return module(x, (h, 2 * h) if kind is nn.LSTM else h)

    assert_folds(op, torch.randn(3, 2, 5), member(1, 2, 4), dims=(None, 0))


def test_recurrent_dropout_between_layers() -> None:
    lstm = nn.LSTM(5, 64, num_layers=2, dropout=0.999999)
    params = {name: p.detach().expand(K, *p.shape) for name, p in lstm.named_parameters()}
    x = torch.randn(3, 2, 5)
    with folded(Streams(K, range(K))):
        out, _ = torch.func.vmap(lambda p: torch.func.functional_call(lstm, p, (x,)), randomness="error")(params)
    nn.init.zeros_(lstm.get_parameter("weight_ih_l1"))
    torch.testing.assert_close(out[0], lstm(x)[0])


def _assert_modules_fold(make: Any, inputs: list[Tensor], options: dict[str, Any]) -> None:
    """K modules with their own parameters, on inputs that they share and on inputs of their own."""
    modules = [make() for _ in range(K)]
    names = [name for name, _ in modules[0].named_parameters()]
    params = [torch.stack([m.get_parameter(name).detach() for m in modules]) for name in names]

    def op(*tensors: Tensor) -> Any:
        params = dict(zip(names, tensors[len(inputs) :]))
        x = [tensors[0]] * len(inputs) if all(i is inputs[0] for i in inputs) else list(tensors[: len(inputs)])
        result = torch.func.functional_call(modules[0], params, tuple(x), options)
        return tuple(t for t in result if t is not None)

    for x in SHARED:
        values = inputs if x is None else [torch.stack([i, i + 1, i * 2]) for i in inputs]
        assert_folds(op, *values, *params, dims=(x,) * len(inputs) + (0,) * len(params))


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
