"""What the page says of tasks that chose no rule, on tables that were made for it."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.claims.held_out import ASKED, held_out, in_the_replay
from benchmarks.replay.anytime import AHEAD, IN_TIME
from benchmarks.replay.table import save
from benchmarks.result_files import RESULTS
from tests.benchmarks.replay.tables import parallel, table_of


def test_tasks_that_chose_no_rule_are_judged_against_asha_and_against_chance(tmp_path: Path) -> None:
    """On the first task all configurations are equal; on the second, the surrogates rank the other way round."""
    easy, hard = table_of(np.ones((16, 9))), table_of(parallel(16))
    hard.scores[0] = hard.scores[0][:, ::-1]
    for name, table in (("easy", easy), ("hard", hard), ("digits", easy)):
        save(replace(table, about=replace(table.about, task=name)), tmp_path / "replay")
    found = {claim.what: claim for claim in held_out(tmp_path, resamples=4)}
    handed = next(claim for what, claim in found.items() if what.startswith("The model handed back"))
    assert handed.measured.startswith("50% of searches")
    assert not handed.met
    assert [claim.measured for what, claim in found.items() if "less often" in what] == ["hard"]
    assert not any("digits" in claim.measured for claim in found.values())  # which chose a rule


def test_nothing_is_said_without_tables(tmp_path: Path) -> None:
    assert held_out(tmp_path) == in_the_replay(tmp_path) == []


def test_regret_under_cost_is_read_off_the_page_of_the_replay(tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    told = [f"- Mean over tasks: {AHEAD}{cost} trainings on." for cost in ("0.40", "0.66")]
    (tmp_path / "replay.md").write_text("\n".join(told))
    (claim,) = held_out(tmp_path)
    assert claim.measured == "from 0.40 on (tasks that chose earlier rules), from 0.66 on (tasks that chose none)"
    assert claim.met is False
    (tmp_path / "replay.md").write_text(told[0])
    assert [claim.met for claim in held_out(tmp_path)] == [True]
    rows = [f"| second | {name} | 5 | {middle} | 2 | 1 |" for name, middle in zip(IN_TIME, (3, 4, 6), strict=True)]
    (tmp_path / "replay.md").write_text("\n".join([told[0], "| first | ASHA | 9 | 9 | 9 | 9 |", *rows]))
    _, given = held_out(tmp_path)
    assert (given.measured, given.met) == ("5, 3, 2, 1 standard deviations; ASHA 5, 6, 2, 1", False)


def test_rules_of_the_replay_are_read_off_its_page() -> None:
    found = in_the_replay(RESULTS)
    titles = [f"{title} in the sweep, replayed" for title in ASKED.values()]
    assert [claim.what for claim in found] == titles
    assert all("; halving" in claim.measured for claim in found)
