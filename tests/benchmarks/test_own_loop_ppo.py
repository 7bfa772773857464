"""PPO on CartPole, by `tune` and by random search."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import own_loop_ppo
from benchmarks.answers.tune import in_reinforcement_learning
from hydro_rasda.space.space import sample

WHERE = {"cpu": "A", "cores": 2, "torch": "2", "gymnasium": "1", "date": "2026-01-01"}
NARROW, WIDE, RANDOM = own_loop_ppo.SEARCHES


def row(search: str, seed: int, seconds: float, best: float = 500.0, first: float = 0.0) -> dict[str, Any]:
    cost = {"seconds": seconds, "cpu": seconds, "steps": 4096, "configurations": 8}
    return {"search": search, "size": "small", "seed": seed, "best": best, **cost, "first epochs": [first] * 8}


ROWS = [
    *(row(NARROW, 0, 10.0, first=1.0), row(WIDE, 0, 20.0, first=3.0), row(RANDOM, 0, 40.0, 60.0)),
    *(row(NARROW, 1, 12.0, first=1.0), row(WIDE, 1, 4.0, first=3.0), row(RANDOM, 1, 6.0)),
    row(NARROW, 2, 9.0),  # the others have not run with this seed yet
]


def test_seeds_that_all_searches_have_are_compared() -> None:
    narrow, wide, random = own_loop_ppo.compared(ROWS)
    assert (narrow.sooner, wide.sooner, random.sooner) == (1, 2, None)
    assert narrow.faster == [4.0, 0.5]
    assert (narrow.mean("seconds"), narrow.stopped, random.stopped) == (11.0, "", ">")
    assert own_loop_ppo.saved_by_width(ROWS, "small") == 3.0
    assert math.isnan(own_loop_ppo.saved_by_width(ROWS[:1], "small"))


def test_the_page_and_the_answer_say_the_same(tmp_path: Path) -> None:
    result = {"environment": WHERE, "rows": ROWS}
    page = own_loop_ppo.markdown(result)
    assert "| 2 hidden layers 256 wide | random search | >23.0 | 23.0 | >4,096 |  |" in page
    assert "| 2 hidden layers 256 wide | 0 | random search | >40.0 |" in page
    assert not [*in_reinforcement_learning(tmp_path)]
    (tmp_path / own_loop_ppo.FILE).write_text(json.dumps(result))
    (found,) = in_reinforcement_learning(tmp_path)
    assert found.meaning.startswith("Random search is sooner with 1 of 2 seeds (2 hidden layers 256 wide). On average")
    assert found.meaning in page


def test_a_loop_that_breaks_ends_with_nan() -> None:
    pytest.importorskip("gymnasium")
    torch.manual_seed(0)
    config = {**sample(own_loop_ppo.SPACE, 1, 0)[0], "n_epochs": 1, "batch_size": 512, "lr": 1e-3}
    for lr, broken in ((1e-3, False), (math.inf, True)):
        model = own_loop_ppo.agent(config, 1 / 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        scores = [*own_loop_ppo.returns(model, optimizer, config, range(2))]
        assert [math.isnan(score) for score in scores] == ([True] if broken else [False, False])
