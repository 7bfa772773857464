"""Searches by a loop of the user's own, compared seed by seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import own_loop
from benchmarks.answers.tune import in_own_loops

WHERE = {"cpu": "A", "cores": 2, "torch": "2", "ray": "2", "optuna": "4", "date": "2026-01-01"}


def row(search: str, seed: int, seconds: float, again: float) -> dict[str, Any]:
    losses = {"handed back": 0.1, "again": again, "again, last epoch": 0.3}
    return {"search": search, "seed": seed, "seconds": seconds, "config": {}, **losses}


ROWS = [
    row("Ray Tune, ASHA", 0, 30.0, 0.2),
    row("Ray Tune, ASHA", 1, 80.0, 0.2),
    row("Ray Tune, ASHA", 2, 90.0, 0.2),  # `tune` has not run with this seed yet
    row(own_loop.OWN, 0, 10.0, 0.2),
    row(own_loop.OWN, 1, 20.0, 0.25),
]


def test_seeds_that_both_have_are_compared() -> None:
    asha, own = own_loop.compared(ROWS)
    assert asha == ("Ray Tune, ASHA", 80.0, 3.5, ["0.100, 0.100, 0.100", "0.200, 0.200, 0.200", asha.losses[2]], 1, 2)
    assert (own.search, own.seconds, own.faster) == (own_loop.OWN, 15.0, None)


def test_the_page_and_the_answer_say_the_same(tmp_path: Path) -> None:
    result = {"environment": WHERE, "rows": ROWS}
    assert "| Ray Tune, ASHA | 80.0 | 3.5x |" in own_loop.markdown(result)
    assert not [*in_own_loops(tmp_path)]
    (tmp_path / own_loop.FILE).write_text(json.dumps(result))
    (found,) = in_own_loops(tmp_path)
    assert "3.5 times as fast as Ray Tune, ASHA." in found.meaning
    assert "with 1 of 2 seeds against Ray Tune, ASHA." in found.meaning


def test_the_loop_learns_and_its_best_epoch_counts() -> None:
    torch.manual_seed(0)
    curve = [*own_loop.epochs(*own_loop.full_size({"lr": 3e-3, "decay": 0.01}), 3)]
    assert curve[-1]["val_loss"] < curve[0]["val_loss"] < 2.5
    turned = [*curve, {"val_loss": 9.0, "test_loss": 0.0}]
    assert own_loop.best(turned) == curve[-1]
