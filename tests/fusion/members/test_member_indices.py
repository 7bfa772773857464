"""Indices and vectors along the member axis."""

from typing import Any

import numpy as np
import pytest
import torch

from fusion.members.member_indices import member_indices, member_vector


def test_indices_count_from_the_end_like_a_list() -> None:
    assert member_indices([3, -1, 0, -4], 4) == [3, 3, 0, 0]


@pytest.mark.parametrize("index", [4, -5])
def test_indices_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match=rf"`indices` has {index}, but must be in \[-4, 4\)"):
        member_indices([0, index], 4)
    with pytest.raises(IndexError, match=r"there is 1 member$"):
        member_indices([index], 1)


def test_a_single_index_is_no_list_of_indices() -> None:
    single: Any = torch.tensor([3.0, 1.0]).argmin()
    with pytest.raises(ValueError, match=r"`indices` is tensor\(1\), but must be a list of indices of members"):
        member_indices(single, 2)


@pytest.mark.parametrize("mask", [[True, False], torch.tensor([True, False]), list(np.array([True, False]))])
def test_a_mask_is_no_list_of_indices(mask: Any) -> None:
    with pytest.raises(ValueError, match="`indices` is True, but must be an integer, or a list of them"):
        member_indices(mask, 2)
    order: Any = torch.tensor([1, 0])
    assert member_indices(order, 2) == member_indices(list(order.numpy()), 2) == [1, 0]


@pytest.mark.parametrize("value", [0.5, [0.5, 0.5], torch.tensor([0.5, 0.5]), torch.tensor(0.5)])
def test_a_vector_is_a_copy_in_double_precision(value: object) -> None:
    vector = member_vector("lr", value, 2)
    assert vector.dtype == torch.float64
    assert vector.tolist() == [0.5, 0.5]
    vector[0] = 1.0
    assert member_vector("lr", value, 2).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("value", [[0.1], [0.1, 0.2, 0.3], [[0.1, 0.2]]])
def test_a_vector_of_another_length(value: object) -> None:
    with pytest.raises(ValueError, match=r"`lr` has shape .*, but must be a number or one for each of 2 members"):
        member_vector("lr", value, 2)


@pytest.mark.parametrize("value", ["fast", None, [0.1, "fast"]])
def test_a_vector_of_something_else_than_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`lr` is .*, but must be a number or one for each of 2 members"):
        member_vector("lr", value, 2)
