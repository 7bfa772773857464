"""Rules and schedules of the sweep, spaces with structures in them, and several metrics at once."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from benchmarks import front, population, schedules_live, structures
from benchmarks.claims.claim import Claim, machine_of, waiting
from benchmarks.result_files import read

REPLAY = "replay.md"
ASKED = {
    "Hyperband sweeps": "Hyperband",
    "median stopping sweeps": "median stopping",
    "no stopping in the sweep": "no stopping",
}
"""The rules that the page of the replay compares with halving, by their names there."""
OF_HALF = {"half of the configurations, by Sobol points": "Sobol points", "half of the configurations, by TPE": "TPE"}
"""Searchers of half of the configurations, by their names there; they are compared with uniform points."""
UNIFORM = "half of the configurations, by uniform points"
FASTER, SHARE = 10.0, 0.02
BY_STRUCTURE = 1.5
_SPREADS = 1.0


def in_the_replay(folder: Path) -> list[Claim]:
    """Rules against halving, and searchers against uniform points: on the tasks that chose no rule."""
    page = (folder / REPLAY).read_text() if (folder / REPLAY).exists() else ""
    _, _, second = page.partition("**The second half**")
    rows = {cells[0]: cells[2:] for line in second.splitlines() if len(cells := re.split(r" *\| *", line)[1:-1]) == 6}
    found = []
    asked = [(name, "today's rule", f"{title} in the sweep, replayed", "halving") for name, title in ASKED.items()]
    asked += [
        (name, UNIFORM, f"{title} for half of the sample, replayed", "uniform points")
        for name, title in OF_HALF.items()
    ]
    for name, base, what, beside in asked:
        if name in rows and base in rows:
            (cost, _, handed, again), (own, _, own_handed, own_again) = rows[name], rows[base]
            measured = f"{cost} full trainings, no worse than ASHA in {handed} (trained again {again})"
            found.append(Claim(what, f"{measured}; {beside} {own}, {own_handed} ({own_again})", "", None, "", REPLAY))
    return found


def of_a_population(folder: Path) -> list[Claim]:
    """Population based training of narrow members in one group, against Ray Tune's at full size."""
    source, result = "population.md", read(folder / population.FILE)
    what = "Population based training, 32 narrow members in one fused group, against Ray Tune's at full size"
    share = "... the share of an interval that copies take"
    if result is None:
        asked = [(what, f"{FASTER:g}x"), (share, f"below {SHARE:.0%}")]
        return [waiting(*each, source) for each in asked if (folder / REPLAY).exists()]
    where, found = machine_of(result["environment"]), population.ratios(result, "one group")
    several = f" ({min(found):.1f} to {max(found):.1f}), {len(found)} pairs"
    spread = f"{median(found):.1f}x" + (several if len(found) > 1 else ", one pair")
    default = median(population.ratios(result, "default"))
    took = population.copy_share(result)
    return [
        Claim(what, spread, f"{FASTER:g}x", median(found) >= FASTER, where, source),
        Claim("... with a group on each core, the default", f"{default:.1f}x", "", None, where, source),
        Claim(share, f"{took:.2%}", f"below {SHARE:.0%}", took < SHARE, where, source),
    ]


def of_schedules(folder: Path) -> list[Claim]:
    """A searched decay against the best constant, cosine and linear schedules, by task."""
    source, result = "schedules_live.md", read(folder / schedules_live.FILE)
    found = []
    for task in schedules_live.SIZES:
        what = f"Searched `decay_start` and `floor`, live on {task}, against the best constant and cosine"
        target = f"better than constant by {_SPREADS:g} sd of seeds, and not worse than cosine by as much"
        arms = {} if result is None else schedules_live.of_task(result["rows"], task)
        if not arms.keys() >= {schedules_live.SEARCHED, "constant", "cosine"}:
            found += [waiting(what, target, source)] if (folder / REPLAY).exists() else []
            continue
        assert result is not None
        gains = {arm: schedules_live.gain(arms, arm) for arm in schedules_live.ARMS if arm in arms}
        del gains[schedules_live.SEARCHED]
        measured = ", ".join(f"{gain:+.1f} sd over {arm}" for arm, gain in gains.items())
        met = gains["constant"] > _SPREADS and gains["cosine"] >= -_SPREADS
        found.append(Claim(what, measured, target, met, machine_of(result["environment"]), source))
    return found


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
    """The sweep over twelve structures, in groups of one width each and with widths padded."""
    result = read(folder / structures.FILE)
    if result is None:
        return []
    found = structures.ratios(result["rows"], structures.APART)
    alone = median(structures.ratios(result["rows"], structures.ALONE))
    measured = f"{median(found):.2f}x ({min(found):.2f} to {max(found):.2f}), {len(found)} pairs; {alone:.2f}x against "
    measured += structures.ALONE
    what = "64 configurations over 12 structures: widths padded, against a group for each width"
    met, where = median(found) >= BY_STRUCTURE, machine_of(result["environment"])
    return [Claim(what, measured, f"{BY_STRUCTURE:g}x", met, where, "structures.md")]
