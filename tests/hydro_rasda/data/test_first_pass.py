"""What is broken late in the data is told before anything trains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hydro_rasda import TuneResult
from hydro_rasda.data import first_pass, make_batches, unlike
from hydro_rasda.dry_run.dry_run import dry_run
from tests.hydro_rasda.problems import problem, trials

pytestmark = pytest.mark.usefixtures("one_process")

N = 200
X, Y = torch.rand(N, 64), torch.arange(N) % 10


def with_last(values: Tensor, value: float) -> Tensor:
    broken = values.clone()
    broken.view(N, -1)[-1, -1] = value
    return broken


class Short(Dataset[Any]):
    """Says that it has more examples than it has."""

    def __len__(self) -> int:
        return N + 1

    def __getitem__(self, i: int) -> Any:
        return X[i], Y[i]


class Vast(Short):
    def __len__(self) -> int:
        return 10**15


def breaking(batch_size: int) -> Iterator[Any]:
    yield X[:batch_size], Y[:batch_size]
    raise OSError("the disk is gone")


def endless(batch_size: int) -> Iterator[Any]:
    return itertools.repeat((X[:batch_size], Y[:batch_size]))


def without_targets(batch_size: int) -> Iterator[Any]:
    yield X[:batch_size], Y[:batch_size]
    yield X[:batch_size], Y[:batch_size] + 100


def then(second: Any) -> Any:
    """A loader whose first batch is sound."""
    return lambda batch_size: iter([(X[:batch_size], Y[:batch_size]), second])


BROKEN: dict[str, tuple[Any, str]] = {
    "a class that there is not": (
        (X, with_last(Y, 10)),
        r"the last batch of `\w+`: .* a target is 10, none of",
    ),
    "a number that is none": (
        (with_last(X, math.nan), Y),
        r"the last batch of `\w+` has nan at .*, for which the loss",
    ),
    "an infinite one": ((with_last(X, math.inf), Y), r"the last batch of `\w+` has inf at .*, for which"),
    "fewer than it says": (Short(), r"`\w+` raises at the last batch of \d+ examples: IndexError"),
    "too many to shuffle": (Vast(), r"`len\(\w+\)` is 10{15}, but must be at most 1000000000 examples"),
    "a loader that breaks": (breaking, r"`\w+` raises at batch 1 of \d+ examples: OSError: the disk is gone"),
    "a loader of other targets": (without_targets, r"batch 1 of `\w+`: .* a target is \d+, none of the output's 10"),
    "a loader without an end": (endless, r"`\w+` makes loaders without a length .* no end was seen within"),
    "a batch of another width": (
        then((X[:8, :9], Y[:8])),
        r"batch 1 of `\w+`: the model cannot take a batch \[\(8, 9\)",
    ),
    "a batch of a third tensor": (then((X[:8], Y[:8], Y[:8])), r"batch 1 of `\w+`: .* a batch is a tuple of 3,"),
    "inputs and targets that differ": (then((X[:8], Y[:7])), r"batch 1 of `\w+`: `loss_fn` .* cannot take"),
    "a batch of text": (then("text"), r"`\w+` raises at batch 1 of \d+ examples: ValueError: a batch is str without"),
    "None for a batch": (then(None), r"`\w+` raises at batch 1 of \d+ examples: ValueError: a batch is NoneType"),
    "a batch of nothing": (then((X[:0], Y[:0])), r"`\w+` raises at batch 1 of .* `examples` is 0, but must be 1 or"),
    "no batch": (lambda batch_size: iter(()), r"`\w+` is empty"),
}


@pytest.mark.parametrize("argument", ["train_data", "val_data"])
@pytest.mark.parametrize("broken", BROKEN)
def test_it_is_told_before_training(
    broken: str, argument: str, quick: Callable[..., TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_pass, "SECONDS", 0.5)
    data, told = BROKEN[broken]
    with pytest.raises(ValueError, match=told) as refusal:
        quick(**{argument: data})
    assert argument in str(refusal.value)


def test_a_last_batch_of_one_that_batch_norm_refuses() -> None:
    def normed(config: Any, width_ratio: float = 1.0) -> nn.Module:
        width = int(16 * width_ratio)
        return nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, 10))

    def loader(batch_size: int) -> Iterator[Any]:
        return zip(X[:9].split(batch_size), Y[:9].split(batch_size))

    with pytest.raises(ValueError, match=r"batch 2 of `train_data`: .*Expected more than 1 value per channel"):
        dry_run(problem(normed, loader), trials())
    dry_run(problem(normed, (X[:9], Y[:9])), trials())  # of tensors, it joins the batch before


def test_a_loader_that_goes_on_for_ever_is_read_for_its_length() -> None:
    class Loader:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            return endless(4)

    batches = make_batches(lambda batch_size: Loader(), "train_data", torch.device("cpu"), 0)
    assert len(list(batches.epoch(4, 0))) == 3
    assert [name for name, _ in unlike(batches, 4, "train_data")] == ["batch 0"]


def test_few_batches_of_sound_data_stand_out() -> None:
    batches = make_batches((X, Y), "train_data", torch.device("cpu"), 0)
    assert len(list(unlike(batches, 16, "train_data"))) <= 3


def test_sparse_tensors_are_read() -> None:
    """Such as the neighbours of a graph, of which torch says neither which are finite nor the least."""
    batch = torch.eye(4).to_sparse(), torch.eye(4, dtype=torch.long).to_sparse(), X[:4]
    batches = make_batches(lambda batch_size: [batch], "train_data", torch.device("cpu"), 0)
    assert [name for name, _ in unlike(batches, 4, "train_data")] == ["batch 0"]


def test_what_is_no_tensor_stands_out_by_its_type() -> None:
    loaded = [(X[:4], "a"), (X[:4], "b"), (X[:4], None), (X[:4], "c"), (X[:4], 2)]
    batches = make_batches(lambda batch_size: loaded, "train_data", torch.device("cpu"), 0)
    assert [name for name, _ in unlike(batches, 4, "train_data")] == ["batch 0", "batch 2", "batch 4"]
