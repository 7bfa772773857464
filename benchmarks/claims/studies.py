"""Results of single benchmarks: fusion, surrogates, RASDA, Ray, packing, bubbles."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import bubbles, packing, packing_live
from benchmarks.claims.claim import Claim, machine_of, of_source, waiting
from benchmarks.fusion_cases import CASES
from benchmarks.packing import ENOUGH, PAPERS_DECISIONS
from benchmarks.packing_virtual import NEIGHBOUR
from benchmarks.result_files import Row, read


def as_published(folder: Path) -> list[Claim]:
    """RASDA against ASHA in virtual time, beside what its paper reports."""
    result = read(folder / "rasda_paper.json")
    if result is None:
        return []
    claim = of_source("rasda_paper.md", f"{machine_of(result['environment'])}; {result['environment']['runs']} seeds")
    found = []
    for row in result["ratios"]:
        what = f"RASDA's speed-up over ASHA in virtual time: {row['application']}, one number fitted"
        found.append(claim(what, f"{row['ratio']:.2f}", f"{row['paper']:.2f} within 15 %", row["within_15_percent"]))
    events = sorted(row["events"] / row["cpu_s"] * 60e-6 for row in result["throughput"])
    what = "Events of the simulator in a minute, from where half are decisions to where few are"
    return [*found, claim(what, f"{events[0]:.1f} to {events[-1]:.1f} million", "a million", events[0] >= 1)]


def really_run(folder: Path) -> list[Claim]:
    """RASDA's rules on Ray Tune, against Ray's ASHA, seed by seed."""
    result = read(folder / "rasda_live.json")
    if result is None:
        return []
    rows, of = result["rows"], {(row["rule"], row["seed"]): row for row in result["rows"]}
    seeds, found = {row["seed"] for row in rows}, []
    claim = of_source("rasda_live.md", f"{machine_of(result['environment'])}; {len(seeds)} seeds")
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = [of[rule, seed] for seed in seeds]
        faster = median(of["ASHA", seed]["seconds"] / of[rule, seed]["seconds"] for seed in seeds)
        idle, pause = (median(row[number] for row in own) for number in ("idle", "longest_pause"))
        told = f"{median(row['seconds'] for row in own):.0f} s, {idle:.0%} of slots idle, longest pause {pause:.1f} s"
        name = f"40 trials really run on 8 slots of Ray, 2 cores: {rule}"
        found.append(claim(name, f"{faster:.2f}x as fast as ASHA; {told}"))
    return found


def on_ray(folder: Path) -> list[Claim]:
    """The time that Ray takes to resize trials, and to run short ones."""
    result = read(folder / "ray_overhead.json")
    if result is None:
        return []
    cores, load = result["machine"]["cores"], result["load average"]["start"]
    claim = of_source("ray_overhead.md", f"{cores} cores; {result['date'][:10]}; load {load:.1f} at the start")
    warm, plain, found = *(result["median seconds"][how] for how in ("warm", "cold")), []
    for what, target in result["targets, seconds"].items():
        if what in warm:
            name = f"Ray, warm workers: {what.replace('->', ' to ') + ' workers' * ('->' in what)}"
            measured = f"{warm[what]:.1f} s; plain actors {plain[what]:.1f} s"
            found.append(claim(name, measured, f"{target:g} s", warm[what] <= target))
    return found


RHO = 0.95


def throughput(folder: Path) -> list[Claim]:
    """Fused trials against one after another, on a CPU."""
    result, claim = read(folder / "fusion_throughput.json", {"rows": []}), of_source("fusion_throughput.md")
    cases, found = {case.name: case for case in CASES}, []
    for row in (row for row in result["rows"] if row["trials"] == 32):
        what = f"32 fused trials against one after another: {cases[row['case']].title}"
        measured = f"{row['speedup']:.2f}x [{row['quartiles'][0]:.2f}, {row['quartiles'][1]:.2f}]"
        target, where = cases[row["case"]].target, f"{machine_of(result['environment'])}; load {row['load']:.1f}"
        found.append(claim(what, measured, f"{target:g}x", row["speedup"] >= target, where))
        if row["jax"].replace(".", "").isdigit():
            by_jax = "... as one `jit(vmap)` of JAX, against the same one after another"
            found.append(claim(by_jax, f"{row['jax']}x", "no faster", row["speedup"] >= float(row["jax"])))
    return found


def on_a_gpu(folder: Path) -> list[Claim]:
    """Fused trials on a GPU, against the full width alone."""
    result = read(folder / "fusion_cuda.json")
    if result is None:
        return []
    environment, found = result["environment"], []
    claim = of_source("fusion_cuda.md", f"{environment['device']}; {environment['date'][:10]}")
    for case, target in environment["targets"].items():
        name = f"Fused trials on a GPU: {case} against the full width alone"
        rows = [row for row in result["rows"] if row["case"] == case and not row["error"]]
        if not rows:
            found.append(waiting(name, f"{target:g}x", "fusion_cuda.md", environment["device"]))
            continue
        best = max(rows, key=lambda row: row["gain"])
        measured = f"{best['gain']:.1f}x ({best['K']} trials, {best['precision']}, {best['how']})"
        found.append(claim(name, measured, f"{target:g}x", best["gain"] >= target))
    return found


def ranking(folder: Path) -> list[Claim]:
    """How surrogates rank configurations, against the full width."""
    found = []
    for path in sorted(folder.glob("transfer_*.json")):
        result = read(path)
        narrow = [row for row in result["rows"] if row["scheme"] == "muP"]
        row = min(narrow, key=lambda row: row["width_ratio"])
        where = f"{machine_of(result['environment'])}; {len(result['configs'])} configurations"
        claim, ratio = of_source("transfer_quality.md", where), f"1/{1 / row['width_ratio']:.0f}"
        name = f"Surrogates at {ratio} of the width rank as the full width does: {result['task']}"
        rhos = {(other["scheme"], other["width_ratio"]): other["rho"] for other in result["rows"]}
        ceiling, plain = rhos["reseed", 1.0], rhos["plain", row["width_ratio"]]
        rho = f"rho {row['rho']:.3f}; plain narrow models {plain:.3f}; other seeds of the full width {ceiling:.3f}"
        regret, spread = row["regret"]["3"], result["seed_spread"]
        behind = "... the best of their three best is behind the best of all by"
        found += [
            claim(name, rho, f"{RHO:g}", row["rho"] >= RHO),
            claim(behind, f"{regret:.3g}", f"the seed spread, {spread:.3g}", regret <= spread),
        ]
    return found


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
        found.append(Claim(name, "; ".join(shown).strip(), target, met, _under_load(part), "packing.md"))
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
    where = f"{_under_load(part)}; {len(rows)} pairs"
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
    where = f"{_under_load(part)}; {len(rows)} pairs"
    what = f"{one['trials']} trials that cannot be fused, several at a time on the {one['device']} over one"
    shown = f"{median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
    return Claim(f"{name}: {what}", shown, target, median(ratios) >= ENOUGH, where, "packing.md")


def in_bubbles(folder: Path) -> list[Claim]:
    """Rows of what guests cost a host and what they use, by micro-batches, and of the sweep in bubbles alone."""
    result, found, claim = read(folder / bubbles.FILE) or {}, list[Claim](), of_source("bubbles.md")
    for part in (result[key] for key in ("4", "8") if key in result):
        where = _under_load(part)
        name = f"Bubbles of a pipeline, 2 stages on 2 cores, 1F1B with {part['micro_batches']} micro-batches"
        slower, pairs = median(part["pairs"]) - 1, [100 * (pair - 1) for pair in part["pairs"]]
        shown = f"{100 * slower:+.1f} % [{min(pairs):+.1f}, {max(pairs):+.1f}], losses the same: {part['identical']}"
        met = slower <= bubbles.SLOWDOWN and part["identical"]
        target = f"<= {bubbles.SLOWDOWN:.0%}, the same losses"
        found.append(claim(f"{name}: host slower by", shown, target, met, where))
        used = part["used"]
        found.append(
            claim(f"{name}: used by guests", f"{used:.0%}", f"{bubbles.USED:.0%}", used >= bubbles.USED, where)
        )
    name, target = "A sweep of 64 trials wholly in bubbles: the answer of the same sweep alone", "to the last digit"
    if sweep := result.get("sweep"):
        where = _under_load(sweep)
        shown = f"{'the same' if sweep['identical'] else 'another'}, in {sweep['bubbles_seconds']:.0f} s for "
        shown += f"{sweep['alone_seconds']:.0f} s"
        found.append(claim(name, shown, target, sweep["identical"], where))
    elif result:
        found.append(waiting(name, target, "bubbles.md"))
    return found


def _under_load(part: Row) -> str:
    return f"{machine_of(part['environment'])}; load {part['environment']['load']}"
