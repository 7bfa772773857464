"""What the page says of tasks that chose no rule, on tables that were made for it."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.answers.held_out import ASKED, anytime, held_out, rules_of_page
from benchmarks.replay.anytime import AHEAD, IN_TIME, RIVALS
from benchmarks.replay.table import save
from benchmarks.result_files import RESULTS
from tests.benchmarks.replay.tables import parallel, table_of


def test_tasks_that_chose_no_rule_are_judged_against_asha_and_against_chance(tmp_path: Path) -> None:
    """On the first task all configurations are equal; on the second, the surrogates rank the other way round."""
    easy, hard = table_of(np.ones((16, 9))), table_of(parallel(16))
    hard.scores[0] = hard.scores[0][:, ::-1]
    for name, table in (("easy", easy), ("hard", hard), ("digits", easy)):
        save(replace(table, about=replace(table.about, task=name)), tmp_path / "replay")
    good, sure, rules = held_out(tmp_path, resamples=4)
    found = {what: (own, theirs) for what, own, theirs in good.rows}
    assert found["the model handed back, replayed"][0] == "50%"
    assert "in 50% of searches" in good.meaning
    assert [own for what, (own, _) in found.items() if what.startswith("tasks on which")] == ["hard", "hard"]
    assert "digits" not in str(good.rows)  # which chose a rule
    assert sure.rows[0][0] == "at least 80%"
    assert [row[0] for row in rules.rows].count("**today's rule**") == 1
    shares = [int(row[1].rstrip("%")) for row in rules.rows]
    assert shares == sorted(shares, reverse=True)


def test_nothing_is_said_without_tables(tmp_path: Path) -> None:
    assert [*held_out(tmp_path), *anytime(tmp_path)] == []


def test_regret_under_cost_is_read_off_the_page_of_the_replay(tmp_path: Path) -> None:
    told = [f"- Mean over tasks: {AHEAD.format(rival=r)}{cost} on." for r in RIVALS for cost in ("0.40", "0.66")]
    rows = [f"| second | {name} | 5 | {middle} | 2 | 1 |" for name, middle in zip(IN_TIME, (3, 4, 6, 7), strict=True)]
    (tmp_path / "replay.md").write_text("\n".join([*told, "| first | ASHA | 9 | 9 | 9 | 9 |", *rows]))
    (found,) = anytime(tmp_path)
    assert found.meaning.endswith("and than random search from 0.66 full trainings on.")
    assert found.rows == [
        ("100%", "1", "1", "1"),
        ("75%", "2", "2", "2"),
        ("50%", "3", "6", "7"),
        ("25%", "5", "5", "5"),
    ]


def test_rules_of_the_replay_are_read_off_its_page() -> None:
    rules = rules_of_page(RESULTS)
    assert [row[0] for row in rules] == [f"{title} in the sweep" for title in ASKED.values()]
    assert all(row[1].endswith("%") for row in rules)
