"""Folds are those of scikit-learn's splitters; what splits otherwise is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import KFold, StratifiedKFold
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from hydro_rasda.data import make_batches, make_folds
from hydro_rasda.data.folds import MOST_FOLDS, Folds

Pair = tuple[Tensor, Tensor]
CPU = torch.device("cpu")


def test_folds_are_scikit_learns(digits: tuple[Pair, Pair]) -> None:
    x, y = digits[0]
    splitter = StratifiedKFold(4, shuffle=True, random_state=1)
    of_tensors = make_folds(splitter, (x, y), make_batches((x, y), "train_data", CPU, 0), 0)
    expected = [*splitter.split(x.numpy(), y.numpy())]
    forms: list[Any] = [(x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), list(zip(x, y, strict=True))]
    for data in forms:
        folds = make_folds(splitter, data, make_batches(data, "train_data", CPU, 0), 0)
        for fold, (train, val) in zip(folds.rows, expected, strict=True):
            assert np.array_equal(fold.train.numpy(), train)
            assert np.array_equal(fold.val.numpy(), val)
    half = (x.bfloat16(), y)  # of which NumPy knows nothing
    folds = make_folds(splitter, half, make_batches(half, "train_data", CPU, 0), 0)
    assert all(map(torch.equal, folds.indices(), of_tensors.indices()))
    for at, (train, val) in enumerate(expected):
        own_train, own_val = of_tensors.data(at, 0)
        validated = torch.cat([batch[0] for batch in own_val.in_order(7)])
        assert torch.equal(validated.sort(0).values, x[torch.as_tensor(val)].sort(0).values)
        shuffled = torch.cat([batch[0] for batch in own_train.epoch(16, 0)])
        there = {tuple(row) for row in x[torch.as_tensor(train)].tolist()}
        assert {tuple(row) for row in shuffled.tolist()} <= there
        shortest = min(len(rows) for rows, _ in expected)
        assert len(shuffled) == shortest
        if len(train) == shortest:  # as data of their own
            plain = make_batches((x[torch.as_tensor(train)], y[torch.as_tensor(train)]), "train_data", CPU, 0)
            assert all(torch.equal(a[0], b[0]) for a, b in zip(own_train.epoch(16, 2), plain.epoch(16, 2), strict=True))


@pytest.mark.parametrize("targets", [["price"], [[1.0], [2.0, 3.0]] * 6, None], ids=["names", "lengths", "none"])
def test_an_attribute_that_is_no_target_of_each_example_is_left_alone(targets: Any) -> None:
    """Names of columns, or boxes of images: scikit-learn refuses them, though `KFold` needs no targets at all."""
    data = Subset(TensorDataset(torch.arange(12.0)[:, None]), range(12))
    data.targets = targets  # type: ignore[attr-defined]
    folds = make_folds(KFold(3), data, make_batches(data, "train_data", CPU, 0), 0)
    assert [len(fold.val) for fold in folds.rows] == [4, 4, 4]


class Unread(Dataset[Any]):
    """Examples that nobody may read, whose targets are an attribute."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it was read")


@pytest.mark.parametrize("of", [list, torch.tensor, np.array], ids=["list", "tensor", "array"])
def test_targets_that_are_an_attribute_are_taken_without_reading_an_example(of: Any) -> None:
    targets = [0, 0, 0, 0, 1, 1, 1, 1]
    batches = make_batches((torch.zeros(8, 1), torch.tensor(targets)), "train_data", CPU, 0)
    folds = make_folds(StratifiedKFold(2), Unread(of(targets)), batches, 0)
    assert [fold.val.tolist() for fold in folds.rows] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ValueError, match="which fails on the 8 examples of `train_data` with AssertionError: it was"):
        make_folds(StratifiedKFold(2), Unread(of(targets[1:])), batches, 0)


def test_a_splitter_gets_the_targets_as_they_are() -> None:
    """These two classes are one number in float32."""
    data = (torch.zeros(8, 1), 2**24 + torch.arange(8) // 4)
    folds = make_folds(StratifiedKFold(2), data, make_batches(data, "train_data", CPU, 0), 0)
    assert [fold.val.tolist() for fold in folds.rows] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_splitter_without_a_seed_draws_from_the_runs(digits: tuple[Pair, Pair]) -> None:
    batches = make_batches(digits[0], "train_data", CPU, 0)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    one, two, other = (make_folds(KFold(3, shuffle=True), digits[0], batches, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.indices(), two.indices(), strict=True))
    assert not torch.equal(one.indices()[0], other.indices()[0])
    assert np.array_equal(np.random.get_state()[1], before)  # type: ignore[index]


def test_a_splitter_with_a_generator_makes_the_same_folds_in_each_call(digits: tuple[Pair, Pair]) -> None:
    batches = make_batches(digits[0], "train_data", CPU, 0)
    splitter = KFold(3, shuffle=True, random_state=np.random.RandomState(0))
    one, two = (make_folds(splitter, digits[0], batches, 0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.indices(), two.indices(), strict=True))


class Given:
    """A splitter that makes these pairs."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def split(self, X: Any, y: Any = None) -> Any:
        return self.pairs

    def get_n_splits(self) -> int:
        return len(self.pairs)


def folds_of(*pairs: Any) -> Folds:
    """Folds of 12 examples, each of which is its number."""
    data = (torch.arange(12.0)[:, None], torch.zeros(12))
    return make_folds(Given(pairs), data, make_batches(data, "train_data", CPU, 0), 0)


SOUND = ([0, 1], [2])


@pytest.mark.parametrize(
    ("allowed", "refused", "told"),
    [
        ([SOUND] * 2, [SOUND], "two folds or more; it makes 1"),
        ([SOUND] * MOST_FOLDS, [SOUND] * (MOST_FOLDS + 1), "at most 100 folds; it makes 101"),
        ([SOUND, (range(4), [4])], [SOUND, (range(5), [5])], "about equally large; they have 2 to 5 examples"),
        ([SOUND, ([0, 11], [1])], [SOUND, ([0, 12], [1])], "pairs of indices below 12"),
        ([SOUND, ([0, 1], [11])], [SOUND, ([0, 1], [-1])], "pairs of indices below 12"),
        ([SOUND, SOUND], [SOUND, ([[0, 1]], [2])], "pairs of indices below 12"),
        ([SOUND, SOUND], [SOUND, ([0.0, 1.0], [2])], "pairs of indices below 12"),
        ([SOUND, SOUND], [SOUND, ([0], [2])], "to train on, and 1 or more to validate on; fold 1 has 1 and 1"),
        ([SOUND, SOUND], [SOUND, ([0, 1], [])], "to train on, and 1 or more to validate on; fold 1 has 2 and 0"),
        ([SOUND, SOUND], [SOUND, ([0, 1], [1])], "validates on other examples than it trains on; fold 1 has 1 in both"),
    ],
)
def test_folds_that_cannot_be_compared_are_refused(allowed: list[Any], refused: list[Any], told: str) -> None:
    assert len(folds_of(*allowed)) == len(allowed)
    with pytest.raises(ValueError, match=f"`val_data` is .*, but must be .*{told}"):
        folds_of(*refused)


def test_batches_of_all_folds_are_equally_large_as_far_as_the_smallest_goes() -> None:
    folds = folds_of((range(5), range(5, 8)), (range(4, 11), range(4)))
    for at, (sizes, rest) in enumerate([([2, 1], []), ([2, 1], [1])]):
        train, val = folds.data(at, 0)
        assert [len(batch[0]) for batch in val.in_order(2)] == sizes + rest
        trained = [len(batch[0]) for batch in train.epoch(2, 0)]
        assert (len(trained), sum(trained)) == (train.steps(2), 5)
        assert train.steps(2) == train.on(CPU).steps(2)
        assert train.describe() == "tensors (12, 1) float32, (12,) float32"
    first, second = (torch.cat([batch[0] for batch in train.epoch(2, epoch)]).flatten().tolist() for epoch in (0, 1))
    assert first != second
    assert {*first, *second} <= {*range(4, 11)}
    assert [*folds.nothing().in_order(2)] == []
