from __future__ import annotations

from hydro_rasda.surrogate_plans import MOST, Plans
from surrogate import ShrinkPlan, SurrogatePlan

PLAN = SurrogatePlan(0.5, {}, {}, {})
READS = frozenset({("", "['a', 'lr']"), ("a", "1")})


def test_a_plan_holds_for_configurations_that_agree_in_what_was_read() -> None:
    plans = Plans()
    plans.keep_for_reads(0.5, READS, PLAN)
    assert plans.known_for(0.5, {"a": 1, "lr": 0.1}) == (0.5, READS)
    assert plans.known_for(0.5, {"a": 2, "lr": 0.1}) is None
    assert plans.known_for(0.25, {"a": 1, "lr": 0.1}) is None


def test_what_another_process_found_is_taken_over() -> None:
    plans, other = Plans(), Plans()
    other.keep_for_reads(0.5, READS, None)
    other.keep_for_structure("one", ShrinkPlan(0.5, {}, None, ""))
    plans.update(other)
    assert plans == other


def test_no_more_are_kept_than_serve_anybody() -> None:
    plans = Plans()
    for number in range(MOST + 5):
        plans.keep_for_reads(0.5, frozenset({("lr", str(number))}), PLAN)
        plans.keep_for_structure(str(number), ShrinkPlan(0.5, {}, None, ""))
    assert len(plans.by_reads) == len(plans.by_structure) == MOST
