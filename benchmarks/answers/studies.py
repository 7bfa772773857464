"""Results of single benchmarks: fusion, surrogates, RASDA, Ray, packing, bubbles."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import bubbles, packing, packing_live
from benchmarks.answers.answer import NOT_RUN, Answer, machine_of, machines_of
from benchmarks.fusion_cases import CASES
from benchmarks.fusion_cuda import NARROW
from benchmarks.packing import PAPERS_DECISIONS
from benchmarks.packing_virtual import NEIGHBOUR
from benchmarks.result_files import read, spread


def throughput(folder: Path) -> Iterator[Answer]:
    """Compare fused trials with trials one after another, on a CPU."""
    result = read(folder / "fusion_throughput.json")
    found = [row for row in result["rows"] if row["trials"] == 32] if result else []
    if not found:
        return
    found.sort(key=lambda row: -row["speedup"])
    titles = {case.name: case.title for case in CASES}
    faster_by_jax = [titles[row["case"]] for row in found if (_jax(row) or 0) > row["speedup"]]
    meaning = (
        f"Expect 32 fused trials to train {found[-1]['speedup']:.1f} to {found[0]['speedup']:.1f} times as fast as "
    )
    meaning += "one after another."
    if faster_by_jax:
        meaning += f" JAX's `jit(vmap)` is faster than fusion on {'; '.join(faster_by_jax)}."
    rows = [
        (
            titles[row["case"]],
            f"{row['speedup']:.2f}x [{row['quartiles'][0]:.2f}, {row['quartiles'][1]:.2f}]",
            "" if _jax(row) is None else f"{_jax(row):.2f}x",
        )
        for row in found
    ]
    columns = (
        "model (batch)",
        "32 trials fused, times as fast as one after another",
        "the same in JAX, as `jit(vmap)`",
    )
    where = f"{machine_of(result['environment'])}; load {_range([row['load'] for row in found])}"
    yield Answer("Is fusion faster?", meaning, columns, rows, ["fusion_throughput.md"], where)


def _jax(row: dict[str, Any]) -> float | None:
    return float(row["jax"]) if re.fullmatch(r"[\d.]+", row["jax"]) else None


def _range(values: Sequence[float], how: str = ".1f") -> str:
    return f"{min(values):{how}} to {max(values):{how}}"


def on_a_gpu(folder: Path) -> Iterator[Answer]:
    """Compare fused trials on a GPU with the full-width model alone."""
    result = read(folder / "fusion_cuda.json")
    if result is None or not result["rows"]:
        return
    measured = [row for row in result["rows"] if not row["error"]]
    best = {row["case"]: row for row in sorted(measured, key=lambda row: row["gain"]) if row["case"] in NARROW}
    lines = [
        (row["case"], f"{row['gain']:.0f}x", str(row["K"]), row["precision"], row["how"], _alone(measured, row))
        for row in sorted(best.values(), key=lambda row: -row["gain"])
    ]
    lines += [(name, NOT_RUN, "", "", "", "") for name in NARROW if name not in best]
    yield Answer(
        "Is fusion faster on a GPU?",
        "A GPU trains many narrow models in the time of a few: most of the gain is that small kernels no longer "
        "wait for the host.",
        (
            "model",
            "a narrow fused trial, times as fast as the full width alone",
            "trials fused",
            "precision",
            "step",
            "one narrow trial alone, as a graph",
        ),
        lines,
        ["fusion_cuda.md"],
        f"{result['environment']['device']}; {result['environment']['date'][:10]}",
    )


def _alone(rows: Sequence[dict[str, Any]], like: dict[str, Any]) -> str:
    """Say how many times as fast as the full width a narrow trial alone is, if its steps run in the same way."""
    same = [
        row for row in rows if row["K"] == 1 and all(row[name] == like[name] for name in ("case", "precision", "how"))
    ]
    return f"{same[0]['gain']:.1f}x" if same else ""


def ranking(folder: Path) -> Iterator[Answer]:
    """Compare how surrogates rank configurations with the ranking at full width."""
    lines, environments = [], []
    for path in folder.glob("transfer_*.json"):
        result = read(path)
        narrow = [row for row in result["rows"] if row["scheme"] == "muP"]
        row = min(narrow, key=lambda row: row["width_ratio"])
        rhos = {(other["scheme"], other["width_ratio"]): other["rho"] for other in result["rows"]}
        ceiling, plain = rhos["reseed", 1.0], rhos["plain", row["width_ratio"]]
        shown = [f"{rho:.3f}" for rho in (row["rho"], plain, ceiling)]
        behind = f"{row['regret']['3']:.3g}", f"{result['seed_spread']:.3g}"
        lines.append((row["rho"], (result["task"], f"1/{1 / row['width_ratio']:.0f}", *shown, *behind)))
        environments.append(machine_of(result["environment"]))
    if not lines:
        return
    lines.sort(reverse=True)
    within = sum(float(cells[5]) <= float(cells[6]) for _, cells in lines)
    yield Answer(
        "Does the best configuration of a narrow model suit the wide one?",
        f"On {within} of {len(lines)} tasks, the best of the three configurations that surrogates rank first is as "
        "good as the best of all, within a seed's spread.",
        (
            "task",
            "width",
            "rank correlation with the full width: surrogates",
            "plain narrow models",
            "the full width with another seed",
            "best of their three best, behind the best of all",
            "a seed's spread",
        ),
        [cells for _, cells in lines],
        ["transfer_quality.md"],
        " and ".join(dict.fromkeys(environments)),
    )


def as_published(folder: Path) -> Iterator[Answer]:
    """Compare RASDA with ASHA in virtual time, beside the numbers of its paper."""
    result = read(folder / "rasda_paper.json")
    if result is None:
        return
    rows = [
        (row["application"], f"{row['ratio']:.2f}x", f"{row['paper']:.2f}x", f"{row['error']:+.0%}")
        for row in sorted(result["ratios"], key=lambda row: -row["ratio"])
    ]
    events = [row["events"] / row["cpu_s"] * 60e-6 for row in result["throughput"]]
    yield Answer(
        "Is RASDA as fast as its paper says?",
        f"In virtual time, RASDA ends {_range([row['ratio'] for row in result['ratios']])} times as soon as ASHA; "
        f"one number is fitted. The simulator takes {_range(events)} million events a minute.",
        ("application of the paper", "times as fast as ASHA, simulated", "in the paper", "difference"),
        rows,
        ["rasda_paper.md"],
        f"{machine_of(result['environment'])}; {result['environment']['runs']} seeds",
    )


def really_run(folder: Path) -> Iterator[Answer]:
    """Compare RASDA's rules on Ray Tune with Ray's ASHA, seed by seed."""
    result = read(folder / "rasda_live.json")
    if result is None:
        return
    rows, of = result["rows"], {(row["rule"], row["seed"]): row for row in result["rows"]}
    seeds, lines = {row["seed"] for row in rows}, []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = [of[rule, seed] for seed in seeds]
        faster = median(of["ASHA", seed]["seconds"] / of[rule, seed]["seconds"] for seed in seeds)
        seconds, idle, pause = (median(row[name] for row in own) for name in ("seconds", "idle", "longest_pause"))
        lines.append((faster, (rule, f"{faster:.2f}x", f"{seconds:.0f} s", f"{idle:.0%}", f"{pause:.1f} s")))
    lines.sort(key=lambda line: -line[0])
    yield Answer(
        "Does RASDA pay if an epoch takes a second?",
        f"Keep {lines[0][1][0]} there: a trial that changes its workers pauses for longer than an epoch takes.",
        ("rule, 40 trials on 8 slots of Ray", "times as fast as ASHA", "whole run", "slots idle", "longest pause"),
        [cells for _, cells in lines],
        ["rasda_live.md"],
        f"{machine_of(result['environment'])}; {len(seeds)} seeds",
    )


def on_ray(folder: Path) -> Iterator[Answer]:
    """Tell the time that Ray takes to resize trials, and to run short ones."""
    result = read(folder / "ray_overhead.json")
    if result is None:
        return
    cores, load = result["machine"]["cores"], result["load average"]["start"]
    warm, plain = (result["median seconds"][how] for how in ("warm", "cold"))
    gains = result["median of cold / warm"]
    rows = []
    for what in sorted(warm, key=lambda what: -gains[what]):
        name = what.replace("->", " to ") + " workers" * ("->" in what)
        rows.append((name, f"{warm[what]:.1f} s", f"{plain[what]:.1f} s", f"{gains[what]:.1f}x"))
    yield Answer(
        "How long does a trial on Ray wait for other workers?",
        f"Warm workers go on {_range(list(gains.values()))} times as soon as plain actors of Ray.",
        ("a trial goes from ...", "with `elastic`'s warm workers", "plain actors", "times as soon"),
        rows,
        ["ray_overhead.md"],
        f"{result['machine']['processor']}, {cores} cores; {result['date'][:10]}; load {load:.1f} at the start",
    )


def packed(folder: Path) -> Iterator[Answer]:
    """Tell the gains of packing in real trainings and in virtual time, and the time of its decisions."""
    result = read(folder / packing.FILE)
    if result is not None:
        yield from _packing_run(result)
        yield from _packing_makespans(result.get("makespan"))
        yield from _packing_decisions(result.get("decisions"))


def _packing_run(result: dict[str, Any]) -> Iterator[Answer]:
    lines, environments, killed = [], [], None
    if part := result.get("run"):
        rows = part["rows"]
        killed = sum(row["packed"]["killed"] for row in rows)
        what = f"{rows[0]['jobs']} small trainings, each in its own process"
        lines.append((what, [row["ratio"] for row in rows]))
        environments.append(part["environment"])
    for place in packing_live.PLACES:
        if part := result.get(f"tune-{place}"):
            one = part["rows"][0][packing_live.ONE]
            what = f'`tune(backend="{place}")`, {one["trials"]} trials that cannot be fused'
            lines.append((what, [row["ratio"] for row in part["rows"]]))
            environments.append(part["environment"])
    if not lines:
        return
    lines.sort(key=lambda line: -median(line[1]))
    told = "" if killed is None else f" {killed or 'None'} was killed for memory."
    yield Answer(
        "What does packing gain?",
        f"Jobs that use a part of a machine are done {median(lines[0][1]):.1f} times as soon; trials of `tune` on "
        f"a CPU gain little.{told}",
        ("several at a time, against one at a time", "times as fast [least, most]", "pairs of runs"),
        [(what, f"{spread(ratios)}", str(len(ratios))) for what, ratios in lines],
        ["packing.md"],
        f"{machines_of(environments)}; load {_range([one['load'] for one in environments])}",
    )


def _packing_makespans(part: Any) -> Iterator[Answer]:
    rows = [row for row in part["rows"] if row["neighbour"] == NEIGHBOUR] if part else []
    if not rows:
        return
    rows.sort(key=lambda row: -row["shorter"][packing.OURS])
    ahead = [row["ours_over_WFD"][1] - 1 for row in rows]
    yield Answer(
        "What does packing gain on many GPUs?",
        f"In virtual time, the rule of this library takes {min(ahead):.0%} to {max(ahead):.0%} less time than "
        "that of HyperSack.",
        ("GPUs", "times as short as one job a GPU", "HyperSack's rule (WFD)", "in its slides", "perfect packing"),
        [
            (
                row["system"] + " (the simulator is fitted to it)" * (row["system"] in packing.FITTED),
                f"{row['shorter'][packing.OURS]:.2f}x",
                f"{row['shorter'][packing.PAPERS]:.2f}x",
                f"{row['paper']:g}x",
                f"{row['at_most']:.2f}x",
            )
            for row in rows
        ],
        ["packing.md"],
        f"{machine_of(part['environment'])}; {rows[0]['seeds']} seeds",
    )


def _packing_decisions(part: Any) -> Iterator[Answer]:
    rows = []
    for row in part["rows"] if part else []:
        measured = row["policies"]
        cells = [
            f"{measured[name]['occupancy']:.1%} in {_duration(measured[name]['seconds'])}" if name in measured else ""
            for name in (packing.OURS, packing.PAPERS, "HiGHS")
        ]
        papers = PAPERS_DECISIONS.get((row["jobs"], row["GPUs"]), {}).get(packing.PAPERS)
        said = f"{papers[1]:.0%} in {_duration(papers[0] / 1000)}" if papers else ""
        rows.append((f"{row['jobs']:,} jobs on {row['GPUs']:,} GPUs", *cells, said))
    if not rows:
        return
    slowest = max(row["policies"][packing.OURS]["seconds"] for row in part["rows"])
    yield Answer(
        "How long does a decision of packing take?",
        f"A decision never keeps you waiting: the longest took {slowest:.2g} s.",
        (
            "how much is filled, and in how long",
            "this library",
            "WFD",
            "HiGHS",
            "WFD in HyperSack's slides",
        ),
        rows,
        ["packing.md"],
        f"{machine_of(part['environment'])}; load {part['environment']['load']}",
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def in_bubbles(folder: Path) -> Iterator[Answer]:
    """Tell by how much guests slow a host and which share of bubbles they use, and how long a sweep takes there."""
    result = read(folder / bubbles.FILE) or {}
    parts, sweep = [result[key] for key in ("4", "8") if key in result], result.get("sweep")
    rows = []
    for part in sorted(parts, key=lambda part: median(part["pairs"])):
        slower = [100 * (pair - 1) for pair in part["pairs"]]
        shown = f"{median(slower):+.1f} % [{min(slower):+.1f}, {max(slower):+.1f}]"
        same = "the same" if part["identical"] else "others"
        rows.append((f"2 stages, 1F1B, {part['micro_batches']} micro-batches", shown, same, f"{part['used']:.0%}"))
    if not rows:
        return
    meaning = "Guests train in the bubbles of a pipeline and slow it down by about a percent."
    if sweep:
        answer = "the same" if sweep["identical"] else "another"
        meaning += f" A sweep of {sweep['trials']} trials takes {sweep['bubbles_seconds']:.0f} s there, and "
        meaning += f"{sweep['alone_seconds']:.0f} s on idle cores, with {answer} answer."
    yield Answer(
        "What do the bubbles of a pipeline give?",
        meaning,
        ("pipeline", "host slower by", "the host's losses", "idle time used by guests"),
        rows,
        ["bubbles.md"],
        machines_of(part["environment"] for part in [*parts, *([sweep] if sweep else [])]),
    )
