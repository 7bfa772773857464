"""Full-size models split over ranks (FSDP2) against one process with the same global batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hydro_rasda import RaceConfig
from hydro_rasda.config import TuneConfig
from hydro_rasda.contracts import Span
from hydro_rasda.data import Shard
from hydro_rasda.problem import Problem
from hydro_rasda.training.full_size import full_size_learner
from hydro_rasda.trial import Trial
from tests.hydro_rasda.backends.ray.test_ddp import (
    CONFIGS,
    MAX_T,
    assert_same,
    ending_at,
    one_process,
    problem,
    rank_reports,
)
from tests.hydro_rasda.ranks import on_ranks

NAMES = ("sgd", "adamw", "clipped", "lion", "prodigy", "schedule-free", "by part")
MUON = {"optimizer": "muon", "lr": 0.02, "batch_size": 8}
CASES = {**CONFIGS, "accumulated": {**CONFIGS["adamw"], "accumulate": 2}, "muon": MUON}
CASES["by part"] = {**CONFIGS["adamw"], "optimizer.out": "sgd", "momentum.out": 0.9, "optimizer.layers.1": "prodigy"}


class Layers(nn.Module):
    """Doubles; two layers in a list, a buffer, and a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.out, self.unused = nn.Linear(5, 3), nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, True, False]))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.out(x) * self.mask
        return y


def layers(config: dict[str, Any]) -> nn.Module:
    return Layers()


def split_problem() -> Problem:
    return replace(problem(), model_fn=layers).with_settings(race=RaceConfig(strategy="fsdp"))


def trained(rank: int, world: int, max_t: int, name: str, checkpoint: str | None, workers: int) -> Any:
    job = {"workers": workers, "checkpoint": checkpoint}
    return rank_reports(rank, world, ending_at(max_t, split_problem()), CASES[name], job)


def parts(rank: int, world: int) -> Any:
    """Of one learner, how large its own and the whole parameters are, and whether its state is whole."""
    learner = full_size_learner(split_problem(), Trial(0, CASES["adamw"]), Shard(rank, world))
    parameters = [p for p in learner.model.parameters() if isinstance(p, DTensor)]
    sizes = sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)
    state = learner.state()["model"]
    return sizes, {name: None if value is None else value.shape for name, value in state.items()}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_split_a_model_train_as_one_process(world: int, name: str) -> None:
    (reports, (saved,)), *others = on_ranks(world, trained, MAX_T, name, None, world)
    history, weights = one_process(split_problem(), CASES[name], [(Span(0, MAX_T), 1)])
    assert_same(reports, history)
    assert saved["state"]["model"].keys() == weights.keys()
    for parameter, value in weights.items():
        torch.testing.assert_close(saved["state"]["model"][parameter], value, rtol=1e-11, atol=1e-13)
    assert others == [([], [])] * (world - 1)


@pytest.mark.slow
def test_muon_on_ranks_that_split_a_model_is_that_of_one_process() -> None:
    """To the rounding of its bfloat16: sharded products add up in another order."""
    (reports, (saved,)), _ = on_ranks(2, trained, MAX_T, "muon", None, 2)
    history, weights = one_process(split_problem(), MUON, [(Span(0, MAX_T), 1)])
    assert reports[-1]["val_loss"] == pytest.approx(history[-1]["val_loss"], rel=1e-2)
    before = dict(split_problem().target(Trial(5, MUON)).named_parameters())
    for parameter, first in before.items():
        moved = (weights[parameter] - first).abs().max().item()
        torch.testing.assert_close(saved["state"]["model"][parameter], weights[parameter], rtol=0, atol=0.05 * moved)


@pytest.mark.slow
def test_a_split_model_is_resized_at_a_checkpoint_and_by_either_strategy(tmp_path: Path) -> None:
    """From two ranks to four with twice the batch; its checkpoint is that of a model that is not split."""
    first, saved = on_ranks(2, trained, 1, "adamw", None, 2)[0]
    torch.save(saved[-1], tmp_path / "worker.pt")
    second, (last,) = on_ranks(4, trained, MAX_T, "adamw", str(tmp_path), 2)[0]
    history, weights = one_process(split_problem(), CASES["adamw"], [(Span(0, 1), 1), (Span(1, MAX_T), 2)])
    assert_same(first + second, history)
    alone = full_size_learner(split_problem(), Trial(5, CASES["adamw"]))
    alone.load(last["state"])
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-11, atol=1e-13)


def test_each_rank_holds_its_part_alone_and_rank_0_saves_the_whole() -> None:
    (sizes, whole), (others, none) = on_ranks(2, parts)
    assert sizes[1] == others[1] == sum(p.numel() for p in Layers().parameters())
    assert sizes[0] + others[0] == sizes[1]
    assert 0.3 < sizes[0] / sizes[1] < 0.8
    assert whole == {name: value.shape for name, value in Layers().state_dict().items()}
    assert set(none.values()) == {None}


def test_float16_and_accumulation_are_refused_with_it() -> None:
    with pytest.raises(ValueError, match=r"`accumulate` is 2, but must be 1 with race.strategy 'fsdp'"):
        full_size_learner(split_problem(), Trial(0, CASES["accumulated"]), Shard(0, 2))
    with pytest.raises(ValueError, match=r"`precision` is 'fp16', but must be another one with race.strategy 'fsdp'"):
        TuneConfig(precision="fp16", race=RaceConfig(strategy="fsdp"))
    with pytest.raises(ValueError, match=r"`race.strategy` is 'zero', but must be .*ddp.*fsdp"):
        RaceConfig(strategy="zero")  # type: ignore[arg-type]
