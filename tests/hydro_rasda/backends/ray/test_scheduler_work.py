"""What a decision of the scheduler looks at: a search of thousands of trials takes time in proportion to them."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.ray_stand_in import StandInController, stand_in_trial
from hydro_rasda import RASDAScheduler
from hydro_rasda.backends.ray import experiment, report_journal
from hydro_rasda.schedulers import Held, Placement, Queue, place


@pytest.fixture(autouse=True)
def _workers_and_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", map(float, count()).__next__)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 32.0}}])


def search(trials: int, folder: Path) -> tuple[RASDAScheduler, StandInController]:
    rule = RASDAScheduler(max_t=8, metric="loss", mode="min")
    scores = np.random.default_rng(0).random((trials, 8)).tolist()
    return rule, StandInController(rule, scores, str(folder))


def test_a_decision_looks_at_one_paused_trial_of_each_rung_and_is_that_over_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, controller = search(120, tmp_path)
    looked_at, waited = [], []

    def both(queue: Queue, held: Held, free: int, patience: int, now: float) -> Placement:
        placement = place(queue, held, free, patience, now)
        places, given = rule._trials.queue._places, {trial.trial_id for trial in rule._trials.queue.given()}
        idle = [
            t for t in controller.get_live_trials() if t.status in ("PENDING", "PAUSED") and t.trial_id not in given
        ]
        everyone = Queue(map(rule._trials._waiting, sorted(idle, key=lambda t: places[t.trial_id])), queue.overtaken)
        assert placement == place(everyone, held, free, patience, now)
        looked_at.append(len(queue))
        waited.append(len(idle))
        return placement

    monkeypatch.setattr(experiment, "place", both)
    controller.run()
    assert max(waited) > 10
    assert max(looked_at) <= 1 + 3  # a new one, and of those that survived 1, 2 and 3 milestones one each


def test_a_journal_is_parsed_and_replayed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = search(40, tmp_path)
    first.run()
    lines = len((tmp_path / "rasda.jsonl").read_text().splitlines())
    parsed, replayed = [], []

    def loads(line: str) -> Any:
        parsed.append(line)
        return json.loads(line)

    original = report_journal.replay

    def replay(*arguments: Any) -> Any:
        replayed.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(report_journal, "json", type("Counted", (), {"loads": loads, "dumps": json.dumps}))
    monkeypatch.setattr(report_journal, "replay", replay)
    rule, again = search(80, tmp_path)
    for trial in first.trials:
        trial.status = "PENDING"
        rule.on_trial_add(again, trial)
    assert len(parsed) == lines
    assert sum(map(len, rule._trials.rung_history.rungs.rungs.values())) > 40
    assert len(replayed) == 1
    # Trials that no earlier process knew change nothing of that.
    for number in range(40, 80):
        rule.on_trial_add(again, stand_in_trial(number, str(tmp_path)))
        assert rule._trials.rung_history.rungs
    assert (len(parsed), len(replayed)) == (lines, 1)
