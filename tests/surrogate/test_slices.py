from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from surrogate.slices import fill_from_target, take_part
from surrogate.widths import compare_shapes, shapes_of


def filled(weight: Tensor, size: int) -> Tensor:
    """The hidden weight of a narrow copy of a model that has this one."""
    target, narrow = nn.Linear(len(weight), len(weight), bias=False), nn.Linear(size, size, bias=False)
    target.weight = nn.Parameter(weight)
    fill_from_target(narrow, target, compare_shapes(shapes_of(target), shapes_of(narrow)))
    return narrow.weight.detach()


def test_rows_and_columns_in_their_order() -> None:
    part = take_part(torch.arange(12).view(3, 4), (2, 2))
    rows, columns = (part // 4)[:, 0], (part % 4)[0]
    assert torch.equal(part, rows[:, None] * 4 + columns)
    assert rows[0] < rows[1]
    assert columns[0] < columns[1]


def test_what_keeps_its_shape_is_a_copy() -> None:
    wide = torch.randn(3, 4)
    part = take_part(wide, (3, 4))
    assert torch.equal(part, wide)
    assert part is not wide


def test_hidden_weights_spread_by_the_root_of_the_width() -> None:
    wide = torch.randn(8, 8)
    assert {round(x.item(), 4) for x in filled(wide, 2).flatten()} <= {round(2 * x.item(), 4) for x in wide.flatten()}


@pytest.mark.parametrize("wide", [torch.eye(32), torch.ones(32, 32), torch.full((32, 32), float("inf"))])
def test_a_constant_or_an_identity_stays(wide: Tensor) -> None:
    assert torch.equal(filled(wide, 4), wide[:4, :4])


def test_what_begins_like_a_constant_is_none() -> None:
    wide = torch.ones(8, 8)
    wide[4:] = torch.randn(4, 8)
    torch.manual_seed(0)
    assert not torch.equal(filled(wide, 4), wide[:4, :4])
