"""Spaces with structures in them, and several metrics at once."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks import front, structures
from benchmarks.claims.claim import Claim, machine_of
from benchmarks.result_files import read

FASTER = 1.5


def several_metrics(folder: Path) -> list[Claim]:
    """The hypervolume of accuracy and MACs at equal cost, against Optuna's samplers."""
    result, found = read(folder / front.FILE), []
    if result is None:
        return []
    rows, where = result["rows"], machine_of(result["environment"])
    seeds = len({row["seed"] for row in rows})
    others = sorted({row["method"] for row in rows} - {"tune"})
    for budget in sorted({row["budget"] for row in rows}):
        own, spent = front.means(rows, "tune", budget)
        beside = {name: front.means(rows, name, budget)[0] for name in others}
        told = ", ".join(f"{name} {volume:.3f}" for name, volume in beside.items())
        what = f"Accuracy against MACs on CIFAR-10, conditional space, at {budget} full trainings: hypervolume"
        measured = f"{own:.3f} for {spent:.1f} trainings; {told}; {seeds} seeds"
        found.append(Claim(what, measured, "ahead of all", own > max(beside.values()), where, "front.md"))
    return found


def by_structure(folder: Path) -> list[Claim]:
    """The sweep over twelve structures, sampled by structure and at random."""
    result = read(folder / structures.FILE)
    if result is None:
        return []
    found = structures.ratios(result["rows"])
    measured = f"{median(found):.2f}x ({min(found):.2f} to {max(found):.2f}), {len(found)} pairs"
    what = '64 configurations over 12 structures: `SweepConfig(searcher="structures")` against random sampling'
    met, where = median(found) >= FASTER, machine_of(result["environment"])
    return [Claim(what, measured, f"{FASTER:g}x", met, where, "structures.md")]
