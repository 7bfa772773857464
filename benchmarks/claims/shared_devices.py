"""Jobs packed on devices, and guests in the bubbles of a pipeline."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import bubbles, packing, packing_live
from benchmarks.claims.claim import Claim, machine_of, of_source, waiting
from benchmarks.packing_page import ENOUGH, PAPERS_DECISIONS
from benchmarks.packing_virtual import NEIGHBOUR
from benchmarks.result_files import read


def packed(folder: Path) -> list[Claim]:
    """Packing: its decisions, makespans in virtual time, and trainings really run."""
    result = read(folder / packing.FILE)
    if result is None:
        return []
    return [
        *_packing_decisions(result.get("decisions")),
        *_packing_makespans(result.get("makespan")),
        *_packing_run(result.get("run")),
        *(_packing_tune(place, result.get(f"tune-{place}")) for place in packing_live.PLACES),
    ]


def _packing_decisions(part: Any) -> list[Claim]:
    found = []
    for row in part["rows"] if part else []:
        jobs, gpus, measured = row["jobs"], row["GPUs"], row["policies"]
        where = f"{machine_of(part['environment'])}; load {part['environment']['load']}"
        papers = PAPERS_DECISIONS.get((jobs, gpus), {}).get(packing.PAPERS)
        unknown, known = measured[packing.BLIND], measured[packing.OURS]
        seconds, share = (papers[0] / 2000, papers[1]) if papers else (1.0, 0.0)
        target = f"{share:.0%} in {seconds * 1000:.3g} ms" if papers else f"below {seconds:g} s"
        shown = [
            f"{name} {row['occupancy']:.1%} in {row['seconds'] * 1000:.3g} ms"
            for name, row in (("", unknown), ("with interference", known), *measured.items())
            if name in ("", "with interference", packing.PAPERS, "HiGHS")
        ]
        met = unknown["seconds"] < seconds and round(unknown["occupancy"], 2) >= share
        name = f"Packing, a decision of ours: {jobs:,} jobs on {gpus:,} GPUs, by shares alone"
        found.append(Claim(name, "; ".join(shown).strip(), target, met, where, "packing.md"))
    return found


def _packing_makespans(part: Any) -> list[Claim]:
    rows = [row for row in part["rows"] if row["system"] in packing.TARGETS] if part else []
    stated = [row for row in rows if row["neighbour"] == NEIGHBOUR]
    if not stated:
        return []
    where = f"{machine_of(part['environment'])}; {stated[0]['seeds']} seeds"
    systems = ", ".join(row["system"] for row in stated)
    shorter = [row["shorter"][packing.PAPERS] for row in stated]
    over = [row["ours_over_WFD"][1] for row in stated]
    claim, paper = of_source("packing.md", where), ", ".join(f"{row['paper']:g}x" for row in stated)
    alike = all(abs(ratio / row["paper"] - 1) <= 0.1 for ratio, row in zip(shorter, stated))
    what = f"Packing in virtual time, HyperSack's WFD over one job a GPU: {systems}"
    return [
        claim(what, ", ".join(f"{ratio:.2f}x" for ratio in shorter), f"{paper}, each within 10 %", alike),
        claim("... ours over WFD", ", ".join(f"{ratio:.3f}x" for ratio in over), "1.1x", min(over) >= 1.1),
    ]


def _packing_run(part: Any) -> list[Claim]:
    name, target = "Packing, really run", "1.3x, none killed"
    if not part:
        jobs = len(packing_live.ARCHITECTURES) * len(packing_live.SETTINGS)
        return [waiting(f"{name}: {jobs} small trainings over one at a time", target, "packing.md")]
    rows = part["rows"]
    ratios = [row["ratio"] for row in rows]
    killed = sum(row["packed"]["killed"] for row in rows)
    where = f"{machine_of(part['environment'])}; load {part['environment']['load']}; {len(rows)} pairs"
    shown = f"{median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}], {killed} killed for memory"
    name += f": {rows[0]['jobs']} small trainings on {rows[0]['cores']:g} cores over one at a time"
    met = median(ratios) >= 1.3 and not killed
    return [Claim(name, shown, target, met, where, "packing.md")]


def _packing_tune(place: str, part: Any) -> Claim:
    name, target = f"Packing inside `tune`, backend `{place}`", f"{ENOUGH}x"
    if not part:
        return waiting(f"{name}: several at a time over one", target, "packing.md")
    rows = part["rows"]
    ratios, one = [row["ratio"] for row in rows], rows[0][packing_live.ONE]
    where = f"{machine_of(part['environment'])}; load {part['environment']['load']}; {len(rows)} pairs"
    what = f"{one['trials']} trials that cannot be fused, several at a time on the {one['device']} over one"
    shown = f"{median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
    return Claim(f"{name}: {what}", shown, target, median(ratios) >= ENOUGH, where, "packing.md")


def in_bubbles(folder: Path) -> list[Claim]:
    """Rows of what guests cost a host and what they use, by micro-batches, and of the sweep in bubbles alone."""
    result, found = read(folder / bubbles.FILE) or {}, list[Claim]()
    for part in (result[key] for key in ("4", "8") if key in result):
        where = f"{machine_of(part['environment'])}; load {part['environment']['load']}"
        name = f"Bubbles of a pipeline, 2 stages on 2 cores, 1F1B with {part['micro_batches']} micro-batches"
        slower, pairs = median(part["pairs"]) - 1, [100 * (pair - 1) for pair in part["pairs"]]
        shown = f"{100 * slower:+.1f} % [{min(pairs):+.1f}, {max(pairs):+.1f}], losses the same: {part['identical']}"
        met = slower <= bubbles.SLOWDOWN and part["identical"]
        target = f"<= {bubbles.SLOWDOWN:.0%}, the same losses"
        found.append(Claim(f"{name}: host slower by", shown, target, met, where, "bubbles.md"))
        met = part["used"] >= bubbles.USED
        found.append(
            Claim(f"{name}: used by guests", f"{part['used']:.0%}", f"{bubbles.USED:.0%}", met, where, "bubbles.md")
        )
    name, target = "A sweep of 64 trials wholly in bubbles: the answer of the same sweep alone", "to the last digit"
    if sweep := result.get("sweep"):
        where = f"{machine_of(sweep['environment'])}; load {sweep['environment']['load']}"
        shown = f"{'the same' if sweep['identical'] else 'another'}, in {sweep['bubbles_seconds']:.0f} s for "
        shown += f"{sweep['alone_seconds']:.0f} s"
        found.append(Claim(name, shown, target, sweep["identical"], where, "bubbles.md"))
    elif result:
        found.append(waiting(name, target, "bubbles.md"))
    return found
