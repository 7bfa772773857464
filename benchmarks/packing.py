"""Packing jobs on devices: decisions against HiGHS, makespans in virtual time, and trainings that are really run.

    python -m benchmarks.packing [decisions] [makespan] [run] [tune-local] [tune-ray] [--quick] [--out FOLDER]

Parts that are named are measured again, by default the first two; the others stay as they were measured. It rewrites
`packing.{json,md}` in `benchmarks/results`, or in another folder. The others need the machine to themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, kron

from benchmarks import packing_live
from benchmarks import packing_virtual as profiles
from benchmarks.packing_live import ONE, PLACES, SEVERAL
from benchmarks.packing_virtual import Machine, simulate_packing
from benchmarks.result_files import Row, columns, environment, options, read, save, spread, table, texts, versions
from hydro_rasda.schedulers import (
    Job,
    Placed,
    Policy,
    Room,
    first_fit,
    first_fit_decreasing,
    one_a_device,
    worst_fit,
    worst_fit_decreasing,
    worst_fit_overcommitted,
)

FILE = "packing.json"
OURS, PAPERS = "ours", "WFD"

POLICIES: dict[str, Policy] = {
    "FF": first_fit,
    "FFD": first_fit_decreasing,
    "WF": worst_fit,
    PAPERS: worst_fit_decreasing,
    OURS: worst_fit_overcommitted,
}
"""HyperSack's policies, and the policy of this library."""


def occupancy(jobs: Sequence[Job], rooms: Sequence[Room], placed: Sequence[Placed]) -> float:
    """Return the share of the devices' compute that jobs ask for. A device counts at most as full."""
    compute = {job.name: job.compute for job in jobs}
    asked = dict.fromkeys((room.device for room in rooms), 0.0)
    for name, device in placed:
        asked[device] += compute[name]
    return sum(min(room.compute, asked[room.device]) for room in rooms) / sum(room.compute for room in rooms)


def highs(jobs: Sequence[Job], rooms: Sequence[Room], seconds: float) -> tuple[float, float]:
    """Find with HiGHS the highest occupancy at which no device is asked for more than it has, and the seconds taken."""
    began, n, d = time.perf_counter(), len(jobs), len(rooms)
    memory, compute = (np.array([getattr(job, name) for job in jobs]) for name in ("memory", "compute"))
    constraints = [
        LinearConstraint(csr_array(kron(np.ones((1, d)), eye_array(n))), ub=np.ones(n)),
        LinearConstraint(csr_array(kron(eye_array(d), memory[None])), ub=[room.memory for room in rooms]),
        LinearConstraint(csr_array(kron(eye_array(d), compute[None])), ub=[room.compute for room in rooms]),
    ]
    limit = {"time_limit": seconds, "mip_rel_gap": 1e-4}
    found = milp(
        -np.tile(compute, d), integrality=np.ones(n * d), bounds=Bounds(0, 1), constraints=constraints, options=limit
    )
    took = time.perf_counter() - began
    return (float(-found.fun) / sum(room.compute for room in rooms) if found.x is not None else 0.0), took


def fastest(decide: Callable[[], Sequence[Placed]], repeats: int) -> float:
    """Return the CPU seconds of a decision: the least of several, because other work on the machine only adds time."""
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        decide()
        times.append(time.thread_time() - began)
    return min(times)


def decisions(quick: bool) -> list[Row]:
    """Measure the seconds and the occupancy of a first decision, by policy."""
    rows = []
    for jobs, gpus, seeds, repeats in ((96, 4, 20, 200), (384, 16, 20, 100), (100_008, 10_000, 1, 5)):
        if quick:
            seeds, repeats = min(seeds, 2), 3
        row: Row = {"jobs": jobs, "GPUs": gpus, "seeds": seeds, "policies": {}}
        problems = [profiles.problem(jobs, seed) for seed in range(seeds)]
        rooms = [Room(f"gpu-{i}", profiles.MEMORY, 1.0) for i in range(gpus)]
        for name, policy in POLICIES.items():
            if gpus > 16 and policy in (first_fit, first_fit_decreasing):
                continue  # too slow, because they look at each GPU in turn
            row["policies"][name] = {
                "seconds": median(fastest(partial(policy, problem.jobs, rooms), repeats) for problem in problems),
                "occupancy": median(occupancy(each.jobs, rooms, policy(each.jobs, rooms)) for each in problems),
            }
        if gpus <= 16:
            solved = [highs(problem.jobs, rooms, 2 if quick else 60) for problem in problems[:3]]
            row["policies"]["HiGHS"] = {
                "seconds": median(took for _, took in solved),
                "occupancy": median(share for share, _ in solved),
            }
        rows.append(row)
    return rows


SYSTEMS: dict[str, tuple[list[Machine], float]] = {
    "4 A100": (profiles.a100s(4), 2.6),
    "8 A100": (profiles.a100s(8), 2.7),
    "16 A100": (profiles.a100s(16), 2.7),
    "4 H100": (profiles.h100s_and_a100s(4, 0), 3.95),
    "4 H100 + 6 A100": (profiles.h100s_and_a100s(4, 6), 3.96),
    "4 H100 + 12 A100": (profiles.h100s_and_a100s(4, 12), 4.0),
}
"""Name -> the devices, and HyperSack's gain: the makespan of one job on each GPU over HyperSack's makespan."""


FITTED = ("4 H100", "4 H100 + 6 A100")
"""The systems that the simulator was fitted to; the others are predicted."""


def makespan(quick: bool) -> list[Row]:
    """Return the gain in makespan over one job on each GPU, by system and policy: medians over random profiles."""
    seeds = 2 if quick else 20
    settings = [(system, profiles.NEIGHBOUR) for system in SYSTEMS]
    settings += [("16 A100", 0.0), ("16 A100", 0.3)]
    return [row_of(system, neighbour, seeds) for system, neighbour in settings]


def row_of(system: str, neighbour: float, seeds: int) -> Row:
    """Simulate each policy on one system with the same jobs, and return the medians."""
    machines, papers = SYSTEMS[system]
    shorter: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    unpacked, ratios, most = [], [], []
    for seed in range(seeds):
        drawn = profiles.problem(384, seed, neighbour)
        jobs = drawn.jobs
        alone = simulate_packing(one_a_device, jobs, machines, drawn.interference).seconds
        unpacked.append(alone)
        seconds = {}
        for name, policy in POLICIES.items():
            outcome = simulate_packing(policy, jobs, machines, drawn.interference)
            seconds[name] = outcome.seconds
            shorter.setdefault(name, []).append(alone / outcome.seconds)
            busy.setdefault(name, []).append(outcome.busy)
        work = sum(job.compute * job.seconds for job in jobs)
        most.append(alone / (work / sum(machine.rate * machine.speed for machine in machines)))
        ratios.append(seconds[PAPERS] / seconds[OURS])
    return {
        "system": system,
        "neighbour": neighbour,
        "seeds": seeds,
        "unpacked_minutes": median(unpacked) / 60,
        "paper": papers,
        "shorter": {name: median(values) for name, values in shorter.items()},
        "busy": {name: median(values) for name, values in busy.items()},
        "at_most": median(most),
        "ours_over_WFD": [float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75))],
    }


PARTS: dict[str, Callable[[bool], Any]] = {
    "decisions": decisions,
    "makespan": makespan,
    "run": packing_live.run,
    **{f"tune-{place}": partial(packing_live.tuned, place) for place in packing_live.PLACES},
}

BY_DEFAULT = ("decisions", "makespan")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the named parts, and write the results."""
    parser = options(__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="two profiles, a few repeats")
    given = parser.parse_args(arguments)
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: no part; there are {', '.join(PARTS)}")
    file = given.out / FILE
    results = read(file, {})
    for part in given.parts or BY_DEFAULT:
        packages = versions("numpy", "ray", "scipy", "torch")
        about = environment(versions=packages, option="--quick" if given.quick else "")
        results[part] = {"environment": about, "rows": PARTS[part](given.quick)}
    save(file, results, markdown(results))
    print(f"wrote {given.out / 'packing.md'}")


_FOUR, _SIXTEEN = (0.129, 0.163, 0.135, 0.171, 181.6e3), (0.264, 0.298, 0.319, 0.332, 212.8e3)
PAPERS_DECISIONS = {
    of: dict(zip(("FF", "FFD", "WF", "WFD", "HiGHS"), zip(ms, shares)))
    for of, ms, shares in (
        ((96, 4), _FOUR, (0.88, 0.97, 0.91, 0.98, 0.99)),
        ((384, 16), _SIXTEEN, (0.97, 0.98, 0.97, 1.0, 1.0)),
    )
}
"""`PAPERS_DECISIONS[jobs, GPUs][policy]`: HyperSack's milliseconds and occupancy. "HiGHS" has those of OR-Tools."""


def markdown(results: Row) -> str:
    """Return a page of the tables and their texts."""
    told = texts("packing")
    parts = [told["head"]]
    if "decisions" in results:
        part = results["decisions"]
        parts += ["## Decisions", told["decisions"], _where(part), _decisions(part)]
    if "makespan" in results:
        rows, where = results["makespan"]["rows"], _where(results["makespan"])
        parts += ["## Makespan over one job a GPU", told["makespan"], where, table(_makespans(rows))]
        parts += ["Share of the devices' compute that is asked for while jobs wait, at most all of it:"]
        parts += [table([{**_named(row), **row["busy"]} for row in rows])]
        parts += ["## Every assumption", told["assumptions"]]
    if "run" in results:
        rows = results["run"]["rows"]
        parts += ["## Really run", told["run"], _where(results["run"]), _runs(rows)]
    if there := [results[name] for name in (f"tune-{place}" for place in PLACES) if name in results]:
        parts += ["## Inside `tune`", told["tune"]]
        for part in there:
            parts += [_where(part), _tuned(part["rows"]), _median(part["rows"])]
        if not any(row[ONE]["device"] == "GPU" for part in there for row in part["rows"]):
            parts += ["On a GPU (two processes with half of it each, and one) it is ready, but has not been run."]
    return "\n\n".join(parts) + "\n"


def _where(part: Row) -> str:
    about = part["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    option = f" Option: `{about['option']}`." if about["option"] else ""
    load = f"load at the start {about['load']}"
    return f"{about['date']}, {about['cpu']}, {about['cores']} cores, {versions}; {load}.{option}"


def _decisions(part: Row) -> str:
    found = []
    for row in part["rows"]:
        papers = PAPERS_DECISIONS.get((row["jobs"], row["GPUs"]), {})
        for name, measured in row["policies"].items():
            ms, share = papers.get(name, ("", ""))
            ours = [name, measured["seconds"] * 1000, f"{measured['occupancy']:.1%}"]
            found.append([row["jobs"], row["GPUs"], *ours, ms, share if share == "" else f"{share:.0%}"])
    names = ["jobs", "GPUs", "policy", "ms", "occupancy", "HyperSack's ms", "HyperSack's occupancy"]
    return columns(names, found)


def _named(row: Row) -> Row:
    return {"system": row["system"], "neighbour at most": f"{row['neighbour']:.0%}"}


def _makespans(rows: list[Row]) -> list[Row]:
    found = []
    for row in rows:
        low, middle, high = row["ours_over_WFD"]
        first = {**_named(row), "unpacked, minutes": row["unpacked_minutes"], "HyperSack": row["paper"]}
        last = {"perfect": row["at_most"], "ours over WFD [quartiles]": f"{middle:.3f} [{low:.3f}, {high:.3f}]"}
        found.append({**first, **row["shorter"], **last})
    return found


def _runs(rows: list[Row]) -> str:
    found = []
    for row in rows:
        seconds = [row["one at a time"]["seconds"], row["packed"]["seconds"], row["ratio"]]
        ended = [row["packed"][how] for how in ("killed", "started_again", "failed")]
        found.append([row["pair"], row["jobs"], *seconds, *ended])
    names = ["pair", "jobs", "one at a time, s", "packed, s", "times as fast"]
    return columns([*names, "killed for memory", "started again", "failed"], found)


def _tuned(rows: list[Row]) -> str:
    found = []
    for row in rows:
        one, several = row[ONE], row[SEVERAL]
        where = [row["pair"], row["place"], one["device"], one["trials"], f"{one['epochs']} and {several['epochs']}"]
        seconds = [one["seconds"], several["seconds"], row["ratio"], one["failed"] + several["failed"]]
        found.append([*where, *seconds, f"{one['loss']:.4f} and {several['loss']:.4f}", one["best"] == several["best"]])
    names = ["pair", "backend", "device", "trials", "epochs", "one at a time, s", "several, s", "times as fast"]
    return columns([*names, "failed", "loss of the best", "the same trial"], found)


def _median(rows: list[Row]) -> str:
    """Say the median ratio."""
    ratios = [row["ratio"] for row in rows]
    return f"`{rows[0]['place']}`, median of {len(ratios)}: {spread(ratios)} times as fast."


if __name__ == "__main__":
    main()
