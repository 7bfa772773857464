from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from surrogate import shrink
from surrogate.resize import NarrowSizes, fill_from_target, resize, size_of, take_part
from surrogate.widths import compare_shapes, shapes_of


class Listed(nn.Module):
    """Holds a weight in two tables and in a list beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.readout = nn.Linear(8, 5, bias=False)
        self.readout.weight = self.embedding.weight
        self.decayed = [self.embedding.weight]
        self.register_buffer("mean", torch.arange(8.0))
        self.width, self.grid = 8, (8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.readout(self.embedding(tokens))
        return logits


SIZES = NarrowSizes(
    {"embedding.weight": (5, 2), "mean": (2,)}, {("", "width"): ((8,), (2,)), ("", "grid"): ((8, 3), (2, 3))}
)


def narrowed(model: Listed) -> Listed:
    narrow = resize(model, SIZES)
    assert isinstance(narrow, Listed)
    return narrow


def test_tensors_and_attributes_have_the_sizes_that_were_asked_for() -> None:
    narrow = narrowed(Listed())
    assert (narrow.width, narrow.grid) == (2, (2, 3))
    assert (narrow.readout.in_features, narrow.embedding.embedding_dim) == (2, 2)
    assert narrow(torch.zeros(3, dtype=torch.long)).shape == (3, 5)


def test_a_tensor_is_one_wherever_it_is_held() -> None:
    narrow = narrowed(Listed())
    assert narrow.readout.weight is narrow.embedding.weight
    assert narrow.decayed[0] is narrow.embedding.weight


def test_attributes_of_parameters_are_kept() -> None:
    model = Listed()
    vars(model.embedding.weight)["use_muon"] = True
    assert vars(narrowed(model).embedding.weight) == {"use_muon": True}


def test_the_module_stays_as_it_is_and_buffers_are_parts_of_its_own() -> None:
    model = Listed()
    model.embedding.weight.requires_grad_(False)
    narrow = narrowed(model)
    assert model.embedding.weight.shape == (5, 8)
    assert not narrow.embedding.weight.requires_grad
    kept = narrow.get_buffer("mean").tolist()
    assert kept == sorted(kept)
    assert set(kept) < set(range(8))


def test_numbers_of_an_attribute() -> None:
    model = Listed()
    assert (size_of(model, "width"), size_of(model, "grid")) == ((8,), (8, 3))


def test_groups_of_a_norm_keep_their_channels_or_become_fewer() -> None:
    sizes = NarrowSizes({"weight": (10,), "bias": (10,)}, {})
    narrow = resize(nn.GroupNorm(8, 32), sizes)
    assert isinstance(narrow, nn.GroupNorm)
    assert (narrow.num_groups, narrow.num_channels) == (2, 10)  # 2.5 groups of four channels


def filled(weight: Tensor, size: int) -> Tensor:
    """The hidden weight of a narrow copy of a model that has this one."""
    target, narrow = nn.Linear(len(weight), len(weight), bias=False), nn.Linear(size, size, bias=False)
    target.weight = nn.Parameter(weight)
    fill_from_target(narrow, target, compare_shapes(shapes_of(target), shapes_of(narrow)))
    return narrow.weight.detach()


def test_rows_and_columns_in_their_order() -> None:
    part = take_part(torch.arange(12).view(3, 4), (2, 2), {})
    rows, columns = (part // 4)[:, 0], (part % 4)[0]
    assert torch.equal(part, rows[:, None] * 4 + columns)
    assert rows[0] < rows[1]
    assert columns[0] < columns[1]


def test_what_keeps_its_shape_is_a_copy() -> None:
    wide = torch.randn(3, 4)
    part = take_part(wide, (3, 4), {})
    assert torch.equal(part, wide)
    assert part is not wide


def test_hidden_weights_spread_by_the_root_of_the_width() -> None:
    wide = torch.randn(8, 8)
    assert {round(x.item(), 4) for x in filled(wide, 2).flatten()} <= {round(2 * x.item(), 4) for x in wide.flatten()}


@pytest.mark.parametrize("wide", [torch.eye(32), torch.ones(32, 32), torch.full((32, 32), float("inf"))])
def test_a_constant_or_an_identity_stays(wide: Tensor) -> None:
    assert torch.equal(filled(wide, 4), wide[:4, :4])


def test_random_signs_are_scaled_like_other_weights() -> None:
    assert filled(torch.randn(32, 32).sign() / 8, 8).abs().unique().tolist() == [0.25]


def test_a_vector_of_two_values_keeps_the_share_and_the_place_of_each() -> None:
    """The bias of a convolution that computes four gates, of which the second begins open."""
    target, narrow = nn.Conv2d(2, 128, 1), nn.Conv2d(2, 32, 1)
    target.bias = nn.Parameter((torch.arange(4.0) == 1).float().repeat_interleave(32))
    fill_from_target(narrow, target, compare_shapes(shapes_of(target), shapes_of(narrow)))
    assert isinstance(narrow.bias, Tensor)
    assert narrow.bias.tolist() == (torch.arange(4) == 1).float().repeat_interleave(8).tolist()


def test_parts_of_equal_parameters_are_equal() -> None:
    """A momentum encoder begins as a copy."""
    target = nn.ModuleList([nn.Linear(6, 32), nn.Linear(6, 32)])
    target[1].load_state_dict(target[0].state_dict())
    narrow = nn.ModuleList([nn.Linear(6, 8), nn.Linear(6, 8)])
    fill_from_target(narrow, target, compare_shapes(shapes_of(target), shapes_of(narrow)))
    assert torch.equal(narrow.get_parameter("0.weight"), narrow.get_parameter("1.weight"))


def test_masks_of_neighbouring_layers_keep_the_same_units() -> None:
    """Masks of an autoregressive network (Germain et al. 2015, MADE): no output depends on its own input."""
    degrees, order = torch.arange(64) % 5, torch.arange(6)
    masks = nn.Module()
    masks.register_buffer("first", degrees[:, None] >= order)
    masks.register_buffer("second", degrees[:, None] >= degrees)
    masks.register_buffer("last", order[:, None] > degrees)
    narrow = resize(masks, NarrowSizes({"first": (16, 6), "second": (16, 16), "last": (6, 16)}, {}))
    first, second, last = (buffer.float() for buffer in narrow.buffers())
    assert not (last @ second @ first).triu().any()


def test_what_begins_like_a_constant_is_none() -> None:
    wide = torch.ones(8, 8)
    wide[4:] = torch.randn(4, 8)
    torch.manual_seed(0)
    assert not torch.equal(filled(wide, 4), wide[:4, :4])


def test_a_parameter_without_elements_has_none() -> None:
    target, narrow = nn.Embedding(0, 8), nn.Embedding(0, 2)
    fill_from_target(narrow, target, compare_shapes(shapes_of(target), shapes_of(narrow)))
    assert narrow.weight.shape == (0, 2)


def test_a_spectral_norm_keeps_its_vectors_although_shapes_are_read_before_the_weights_are_filled() -> None:
    norm = nn.utils.parametrizations.spectral_norm
    layers = [norm(nn.Conv2d(3, 64, 3)), nn.ReLU(), norm(nn.Conv2d(64, 64, 3)), nn.Flatten(), nn.LazyLinear(2)]
    model, images = nn.Sequential(*layers), torch.randn(2, 3, 8, 8)
    model(images)
    narrow = shrink(model, 1 / 4, images)
    for name, buffer in narrow.named_buffers():
        assert buffer.abs().sum() > 0, name
    assert narrow(images).isfinite().all()
    assert narrow.eval()(images).isfinite().all()
