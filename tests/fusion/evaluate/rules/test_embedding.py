"""Look-ups by indices of which members have their own: each finds its own rows, or the error that it has alone."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.evaluate.rules import folded
from fusion.streams import Streams
from tests.fusion.evaluate.rules.folding import SHARED, K, assert_folds, member


@pytest.mark.parametrize("index", SHARED)
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding(padding_idx: int | None, index: int | None) -> None:
    indices = torch.randint(0, 9, (4, 5) if index is None else (K, 4, 5))
    indices[..., 0] = 2
    indices[..., 1] = 8
    assert_folds(lambda i, w: F.embedding(i, w, padding_idx), indices, member(9, 6), dims=(index, 0))


@pytest.mark.parametrize("index", SHARED)
def test_embedding_by_frequency(index: int | None) -> None:
    indices = torch.tensor([2, 2, 8, 0, 2]).expand(*(() if index is None else (K,)), 5)
    assert_folds(lambda i, w: F.embedding(i, w, 0, scale_grad_by_freq=True), indices, member(9, 6), dims=(index, 0))


@pytest.mark.parametrize("index", SHARED)
def test_embedding_with_a_largest_norm(index: int | None) -> None:
    def look_up(i: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        table = w.clone()
        return F.embedding(i, table, max_norm=1.0), table

    indices = torch.randint(0, 9, (4, 5) if index is None else (K, 4, 5))
    assert_folds(look_up, indices, member(9, 6), dims=(index, 0))


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("index", SHARED)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str, index: int | None) -> None:
    flat = torch.randint(0, 9, (7,) if index is None else (K, 7))
    begin = torch.tensor([0, 3, 3, 5])
    assert_folds(lambda i, w: F.embedding_bag(i, w, begin, mode=mode), flat, member(9, 6), dims=(index, 0))
    bags = torch.randint(0, 9, (4, 5) if index is None else (K, 4, 5))
    assert_folds(lambda i, w: F.embedding_bag(i, w, mode=mode), bags, member(9, 6), dims=(index, 0))


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("share", SHARED)
def test_embedding_bag_with_weights(share: int | None) -> None:
    bags, shares = torch.randint(0, 9, (4, 5)), torch.rand(4, 5) if share is None else member(4, 5)
    assert_folds(
        lambda s, w: F.embedding_bag(bags, w, mode="sum", per_sample_weights=s), shares, member(9, 6), dims=(share, 0)
    )


def test_embedding_bag_with_gradients_by_frequency() -> None:
    """Torch's gradient of a row depends on the rows before it, so that members' tables cannot lie below one another."""
    bags = torch.tensor([[1, 1], [1, 0]])
    assert_folds(lambda w: F.embedding_bag(bags, w, scale_grad_by_freq=True, mode="sum"), member(5, 3), dims=(0,))


@pytest.mark.parametrize("x", SHARED)
def test_index_fill_counts_from_the_end_of_its_own_member(x: int | None) -> None:
    indices = torch.tensor([[-1, 0], [1, -2], [3, 2]])
    table = torch.randn(4, 2) if x is None else member(4, 2)
    assert_folds(lambda i, w: w.index_fill(0, i, 7.0), indices, table, dims=(0, x))
    assert_folds(lambda i, w: (w * 1).index_fill_(0, i, 7.0), indices, member(4, 2), dims=(0, 0))


def test_index_fill_with_a_value_of_each_member() -> None:
    """Also into a tensor that members share, such as a batch of which each masks a part by its own number."""
    index, batch = torch.tensor([0, 2]), torch.randn(4, 5)
    assert_folds(lambda v: batch.index_fill(1, index, v), member(), dims=(0,))
    assert_folds(lambda v: batch.clone().index_fill_(0, index, v), member(), dims=(0,))
    assert_folds(lambda v, w: torch.index_fill(w, 0, index, v), member(), member(4, 5), dims=(0, 0))


def test_one_hot() -> None:
    assert_folds(lambda i, w: F.one_hot(i, 5).float() @ w, torch.randint(0, 5, (K, 4)), member(5, 2), dims=(0, 0))


@pytest.mark.parametrize("bad", [5, -1, 100])
@pytest.mark.parametrize(
    "look_up",
    [
        lambda i, w: F.embedding(i, w),
        lambda i, w: F.embedding(i, w, padding_idx=0),
        lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
        lambda i, w: F.embedding(i, w, sparse=True),
        lambda i, w: F.embedding(i, w.clone(), max_norm=1.0),
        lambda i, w: torch.embedding(w, i),
        lambda i, w: F.embedding_bag(i[None], w),
        lambda i, w: F.one_hot(i, 5).float() @ w,
        lambda i, w: w.gather(0, i[:, None]),
        lambda i, w: w.index_select(0, i),
        lambda i, w: w.scatter(0, i[:, None], 1.0),
        lambda i, w: F.nll_loss(w.mT[:2].log_softmax(1), i),
        lambda i, w: F.cross_entropy(w.mT[:2], i),
    ],
)
def test_an_index_out_of_range_in_one_member_is_an_error(look_up: Callable[..., Tensor], bad: int) -> None:
    """A look-up in the tables of all members at once would find a row of another one."""
    indices, tables = torch.tensor([[0, 1], [bad, 3], [1, 4]]), member(5, 4)
    with pytest.raises((IndexError, RuntimeError)):
        look_up(indices[1], tables[1])
    with folded(Streams(K, range(K))), pytest.raises((IndexError, RuntimeError)):
        torch.func.vmap(look_up, randomness="error")(indices, tables)
