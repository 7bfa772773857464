"""A ladder of heats on tables whose curves say who is best at each width."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.__main__ import main
from benchmarks.replay.ladder import SHOWN, Compared, chosen, no_worse, replayed
from benchmarks.replay.policies import Heat, Ladder, Search, price_by_width
from benchmarks.replay.table import Table, empty, save
from benchmarks.replay.yardsticks import AGAIN, TODAY, PolicyRow
from tests.benchmarks.replay.tables import parallel, search, table_of

WIDTHS = [1 / 8, 1 / 4, 1.0]


def three_widths(curves: np.ndarray, middle: np.ndarray | None = None) -> Table:
    """Curves at full width, and at 1/8 as well; those at 1/4 are `middle`, or the same."""
    narrow = table_of(curves)
    table = empty(replace(narrow.about, widths=WIDTHS))
    table.scores[[0, 2]], table.seconds[...] = narrow.scores, np.array([1.0, 2.0, 10.0])[:, None, None]
    table.scores[1] = (curves if middle is None else middle)[:, :, None]
    table.scores[:, 1] += 0.5  # seeds lie half a unit apart
    return table


def trained(run: Search, width: float) -> dict[int, int]:
    return {n: run.reached(n, width) for n in run.numbers if run.reached(n, width)}


def test_the_best_of_a_heat_by_its_ends_train_at_full_size() -> None:
    """At 1/4 the last configurations but two are ahead in the end, and behind before it."""
    middle = parallel(16)
    middle[12:14, -1] = -1.0
    run = search(three_widths(parallel(16), middle))
    assert Ladder(heats=(Heat(4),), look=None)(run) == 13
    assert trained(run, 1 / 4) == {12: 9, 13: 9, 14: 9, 15: 9}
    assert trained(run, 1.0) == {12: 9, 13: 9}
    early = search(three_widths(parallel(16), middle))
    assert Ladder(heats=(Heat(4, length=1 / 2),), look=None)(early) == 15


def test_what_a_ladder_costs_by_seconds_and_by_width() -> None:
    """16 for an epoch at 1/8, 8 at 1/4 to the end, two at full size to the seventh epoch of nine and one to the end."""
    run = search(three_widths(parallel(16)))
    assert Ladder()(run) == 15
    assert trained(run, 1 / 8) == dict.fromkeys(range(16), 1)
    assert trained(run, 1.0) == {14: 7, 15: 9}
    assert run.spent == pytest.approx(16 / 9 * 0.1 + 8 * 0.2 + 16 / 9)
    by_width = 16 / 9 * price_by_width(1 / 8) + 8 * price_by_width(1 / 4) + 16 / 9
    assert run.spent_by_width() == pytest.approx(by_width)


def test_a_heat_at_the_width_of_the_sweep_goes_on_from_there() -> None:
    run = search(three_widths(parallel(16)))
    Ladder(width=1 / 4)(run)
    assert not trained(run, 1 / 8)
    assert sorted(trained(run, 1 / 4).values()) == [1] * 8 + [9] * 8


def test_who_is_far_behind_in_the_heat_does_not_train_at_full_size() -> None:
    """Configurations lie a unit apart, and change by half a unit in the second half of a heat."""
    for margin, count in ((1.9, 1), (2.1, 2)):
        run = search(three_widths(parallel(16)))
        Ladder(margin=margin)(run)
        assert len(trained(run, 1.0)) == count


def test_a_forecast_adds_what_the_narrow_model_gains_from_the_look_on() -> None:
    """At the look, 15 is ahead at full size; at 1/4, 14 gains two units from there on."""
    middle = parallel(16)
    middle[14, -1] -= 2.0
    run = search(three_widths(parallel(16), middle))
    rule = Ladder(forecast=True)
    assert rule.compared(run, 14, 7) > rule.compared(run, 15, 7)
    assert rule.compared(run, 14, 9) < rule.compared(run, 15, 9)


def found(handed: float, cost: float, regret: float = 1.0, error: float = 0.01) -> dict[str, Compared]:
    """Today's rule is as good as ASHA in 90 %."""
    row = PolicyRow(cost, 1.0, handed, 0.9, regret, cost / 2)
    return {"a": Compared(row, np.array([handed - 0.9, 0.0]), np.full(2, error))}


def test_a_half_chooses_the_cheapest_that_is_no_worse_and_of_those_the_least_regret() -> None:
    half = {
        TODAY: found(0.9, 3.5),
        AGAIN: found(0.5, 1.0),
        "worse": found(0.87, 2.0),
        "within the error": found(0.89, 2.54),
        "as dear, with less regret": found(0.89, 2.57, 0.5),
        "dearer": found(0.95, 3.0, 0.1),
    }
    assert no_worse(half["within the error"].values())
    assert not no_worse(half["worse"].values())
    assert chosen(half, "cost") == "as dear, with less regret"


def test_a_rule_is_compared_with_todays_search_by_search() -> None:
    """Today's rule has no error of its own; a rule that a table has no width for has no row."""
    half = replayed(
        {"digits": three_widths(parallel(16))}, {"ladder": Ladder(), "1/2": Ladder(heats=(Heat(4, 1 / 2),))}, 3
    )
    assert half[TODAY]["digits"].error.tolist() == [0, 0]
    assert half["ladder"]["digits"].ahead.tolist() == [0, 0]
    assert not half["1/2"]


@pytest.mark.slow
def test_the_page_has_what_the_tables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.replay.ladder.SAMPLES", 3)
    for name in ("digits", "few_rows"):
        table = three_widths(parallel(16))
        save(replace(table, about=replace(table.about, task=name)), tmp_path / "tables")
    main(["ladder", "--folder", str(tmp_path / "tables")])
    page = (tmp_path / "replay_ladder.md").read_text()
    assert "| the first half, cost by width |" in page
    assert all(page.count(f"| {name} | 1 |") == 2 for name in SHOWN)
    assert "| second | ASHA |" in page
