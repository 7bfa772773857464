"""Taking a module apart and putting it together again."""

from typing import Any

import pytest
import torch
from torch import nn

from fusion.structure.module_parts import (
    TensorTree,
    bound,
    count_samples,
    materialize,
    named_tensors,
    non_persistent,
    skeleton,
    tensor_slots,
)
from tests.zoo import Peculiar, Tied


def test_a_skeleton_has_shapes_but_no_data() -> None:
    module = Tied()
    hollow = skeleton(module)
    assert isinstance(hollow, Tied)
    assert {name: t.shape for name, t in named_tensors(hollow).items()} == {
        name: t.shape for name, t in named_tensors(module).items()
    }
    assert all(t.is_meta for t in named_tensors(hollow).values())
    assert hollow.head.weight is hollow.embed.weight


def test_materialize_undoes_skeleton() -> None:
    module = Tied()
    tensors = named_tensors(module)
    again = materialize(skeleton(module), tensors)
    assert isinstance(again, Tied)
    assert again.head.weight is again.embed.weight is module.embed.weight
    x = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(x), module(x))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: list[int] = []
        self.second = self.first


def test_copies_have_empty_containers_of_their_own_held_where_they_were() -> None:
    """They take a way of their own through `deepcopy`; two attributes that are one list stay one list."""
    module = Empty()
    hollow = skeleton(module)
    again = materialize(hollow, {})
    assert isinstance(hollow, Empty)
    assert isinstance(again, Empty)
    for source, copied in ((module, hollow), (hollow, again)):
        assert copied.first is copied.second is not source.first
        assert copied._forward_hooks is not source._forward_hooks
        assert type(copied._forward_hooks) is type(source._forward_hooks)


def test_bound_puts_tensors_in_every_place_of_a_tied_one_and_back() -> None:
    module = Tied()
    original, other = module.embed.weight, torch.zeros(11, 6)
    with bound(tensor_slots(module), {**named_tensors(module), "embed.weight": other}) as rebound:
        assert module.embed.weight is other
        assert module.head.weight is other
    assert module.embed.weight is module.head.weight is original
    assert rebound == {}


def test_bound_reports_what_was_assigned() -> None:
    module = Peculiar()
    with bound(tensor_slots(module), named_tensors(module)) as rebound:
        module(torch.randn(3, 8))
        assigned = module.average
    assert list(rebound) == ["average"]
    assert rebound["average"] is assigned
    assert not module.average.any()


def test_non_persistent_buffers_are_named_in_full() -> None:
    assert non_persistent(nn.Sequential(nn.Identity(), Peculiar())) == {"1.scale"}


def test_a_tree_keeps_dotted_names() -> None:
    tree = TensorTree()
    tree.put("a.b.weight", nn.Parameter(torch.ones(2)))
    tree.put("a.count", torch.tensor(3))
    tree.put("a.mask", torch.tensor(True), persistent=False)
    assert list(tree.state_dict()) == ["a.count", "a.b.weight"]
    assert list(dict(tree.named_parameters())) == ["a.b.weight"]
    assert set(tree.bufs()) == {"a.count", "a.mask"}
    assert [tree.is_persistent(name) for name in ("a.count", "a.mask")] == [True, False]
    assert tree.pop("a.count") == 3
    assert tree.get("a.count") is None
    assert tree.double().params()["a.b.weight"].dtype == torch.float64


def test_names_that_modules_have_as_attributes() -> None:
    """A child may be called like a method of `nn.Module`: `self.type = nn.Linear(...)` is allowed."""
    tree = TensorTree()
    tree.put("type.weight", nn.Parameter(torch.ones(2)))
    assert list(tree.state_dict()) == ["type.weight"]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.tensor(1.0), torch.ones(4, 2), torch.ones(3)), 4),
        ({"name": "x", "inputs": [torch.ones(0, 2)]}, 0),
        ((torch.tensor(1.0), "name", 5), 1),
        (torch.ones(1, 7), 1),
    ],
)
def test_the_first_tensor_with_an_axis_counts_the_samples(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples
