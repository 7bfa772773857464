"""Threads that fuse, and threads that checkpoint by themselves, do not disturb each other."""

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from fusion import fuse


def test_blocks_of_two_threads_that_overlap_leave_torch_as_it_was() -> None:
    before = dict(vars(checkpoint))
    entered, second_entered, first_left = Event(), Event(), Event()

    def one(model: Any, batch: Tensor) -> Tensor:
        entered.set()
        assert second_entered.wait(60)
        out: Tensor = model(batch).sum()
        return out

    def other(model: Any, batch: Tensor) -> Tensor:
        second_entered.set()
        assert first_left.wait(60)
        out: Tensor = model(batch).sum()
        return out

    first, second = (fuse([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
    threads = [Thread(target=model.map, args=(of, torch.ones(2, 4))) for model, of in ((first, one), (second, other))]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    threads[0].join(60)
    first_left.set()
    threads[1].join(60)
    assert dict(vars(checkpoint)) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_another_thread_trains_meanwhile_recomputes_as_ever(reentrant: bool) -> None:
    calls = list[int]()

    def layer(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return x.tanh()

    def alone() -> None:
        x = torch.ones(2, requires_grad=True)
        found: Any = checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        found.sum().backward()

    def objective(model: Any, batch: Tensor) -> Tensor:
        thread = Thread(target=alone)
        thread.start()
        thread.join(60)
        out: Tensor = model(batch).sum()
        return out

    fuse([nn.Linear(4, 4), nn.Linear(4, 4)]).map(objective, torch.ones(2, 4))
    assert calls == [0, 1]
