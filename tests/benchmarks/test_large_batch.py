"""The table of learning-rate rules is what its trainings say."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.large_batch import FILE, defaults
from benchmarks.large_batch.cells import BATCH, EPOCHS, KINDS, RATE_SEEDS, SEEDS, Cell, best_rate, wanted
from benchmarks.large_batch.page import markdown, ratios, verdicts
from benchmarks.result_files import RESULTS
from hydro_rasda.contracts import Span
from hydro_rasda.schedulers import RASDA


def test_the_published_page_is_drawn_from_the_published_trainings() -> None:
    published = json.loads((RESULTS / FILE).read_text())
    assert (RESULTS / "large_batch.md").read_text() == markdown(published)
    assert not list(wanted(published["rows"]))


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_batch_grows_where_rasda_adds_workers(workers: int) -> None:
    rule = RASDA(EPOCHS, 2, max_workers=workers)
    grown = [
        growth for span, growth in Cell("digits", "sgd", 0.1, workers).segments() for _ in range(span.start, span.stop)
    ]
    assert grown == [rule.workers_at(t) for t in range(EPOCHS)]
    assert Cell("digits", "sgd", 0.1).segments() == [(Span(0, EPOCHS), 1)]


def row(cell: Cell, loss: float) -> dict[str, Any]:
    return {**asdict(cell), "val_loss": loss, "train_loss": loss}


def test_losses_are_compared_seed_by_seed_at_the_rate_that_is_best_for_the_first_batch() -> None:
    searched = [row(Cell("digits", "sgd", lr, seed=s), abs(lr - 0.25)) for lr in (0.5, 0.25) for s in RATE_SEEDS]
    rows = searched + [row(Cell("digits", "sgd", 0.25, seed=s), 1.0 + s) for s in SEEDS]
    rows += [row(Cell("digits", "sgd", 0.25, k, "linear", 1, s), (1.0 + s) * k) for k in (2, 8) for s in SEEDS]
    rows.append(row(Cell("digits", "sgd", 0.5, 2, "linear", 1, 0), math.inf))  # of another rate
    assert best_rate(rows, "digits", "sgd") == 0.25
    assert ratios(rows, "val_loss") == {
        ("digits", "sgd", "linear", 1, 2): [2.0] * len(SEEDS),
        ("digits", "sgd", "linear", 1, 8): [8.0] * len(SEEDS),
    }
    assert verdicts(rows, "val_loss") == {("sgd", "linear", 1): pytest.approx(4.0)}


def test_every_optimizer_of_the_table_has_a_default() -> None:
    assert set(defaults()) == {optimizer for _, optimizer in KINDS}
    assert {task for task, _ in KINDS} == set(BATCH)
