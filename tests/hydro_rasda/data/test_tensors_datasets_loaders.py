from __future__ import annotations

import math
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydro_rasda.data import Shard, make_batches
from hydro_rasda.data.tensors_datasets_loaders import MOST_WORKERS, default_workers

N = 24
CPU = torch.device("cpu")


class Noisy(Dataset[dict[str, Tensor]]):
    """Draws from every generator for each example, and says who loaded it."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"row": torch.tensor(i), "noise": noise, "process": torch.tensor(os.getpid())}


class Several(Noisy):
    """One that loads several examples at once, as those of `datasets` do."""

    asked: list[list[int]]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Tensor]]:
        self.asked.append(rows)
        return [self[row] for row in rows]


class OfLength(Noisy):
    """Says that it has any number of examples, or what is none."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [10.0, "10", None, -3, 10**30, math.nan])
def test_a_length_that_is_no_number_of_examples_is_refused(length: Any) -> None:
    with pytest.raises(ValueError, match=r"`len\(val_data\)` raises .*; a OfLength must have an integer >= 1"):
        make_batches(OfLength(length), "val_data", CPU, 0)


def test_an_array_of_objects_is_refused_by_its_name() -> None:
    given: Any = (np.zeros((2, 3)), np.array(["cat", None]))
    with pytest.raises(ValueError, match=r"`train_data\[1\]` is an array of object, but must be one of numbers"):
        make_batches(given, "train_data", CPU, 0)


def read(workers: int | None, epoch: int | None, shard: Shard = Shard()) -> list[dict[str, list[float]]]:  # noqa: B008
    batches = make_batches(Noisy(), "train_data", CPU, 0, workers)
    return [{name: values.tolist() for name, values in s.batch.items()} for s in batches.shares(4, epoch, shard)]


# Torch's, where this process may use one core alone.
may_outnumber_cores = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")


@may_outnumber_cores
@pytest.mark.parametrize("epoch", [2, None])
def test_batches_do_not_depend_on_who_loads_them(epoch: int | None) -> None:
    here, *elsewhere = (read(workers, epoch) for workers in (0, 1, 2))
    for batches in elsewhere:
        assert [(batch["row"], batch["noise"]) for batch in batches] == [(b["row"], b["noise"]) for b in here]
    assert {process for batch in here for process in batch["process"]} == {os.getpid()}
    loaders = {process for batch in elsewhere[1] for process in batch["process"]}
    assert len(loaders) == 2
    assert os.getpid() not in loaders


def test_a_rank_loads_its_share_alone_with_workers_too() -> None:
    whole, shares = read(0, 1), [read(1, 1, Shard(rank, 2)) for rank in range(2)]
    for batch, first, second in zip(whole, *shares, strict=True):
        assert (first["row"], second["row"]) == (batch["row"][::2], batch["row"][1::2])


@may_outnumber_cores
def test_batches_draw_apart() -> None:
    noise = [value for batch in read(2, 0) for value in batch["noise"]]
    assert len(set(noise)) == N


def test_a_dataset_that_loads_several_at_once_is_asked_for_a_batch() -> None:
    data = Several()
    data.asked = []
    batches = [batch["row"].tolist() for batch in make_batches(data, "train_data", CPU, 0).in_order(10)]
    assert batches == data.asked == [list(range(10)), list(range(10, 20)), list(range(20, 24))]


@pytest.mark.parametrize(("cores", "workers"), [(None, 1), (1, 1), (MOST_WORKERS, MOST_WORKERS), (99, MOST_WORKERS)])
@pytest.mark.parametrize("tells_affinity", [True, False])
def test_workers_where_nobody_says_how_many(
    tells_affinity: bool, cores: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, the cores have models to train; a GPU has as many as there are cores that this process may use."""
    if tells_affinity:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(cores or 1)}, raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 999)
    else:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_workers(CPU) == 0
    assert default_workers(torch.device("cuda")) == workers
