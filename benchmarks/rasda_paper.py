"""RASDA's experiments in virtual time: its speed-ups over ASHA.

`python -m benchmarks.rasda_paper` takes about two minutes on one core; `--full` has more seeds, `--quick` a few.
They rewrite `rasda_paper.{json,md,png}` in `benchmarks/results`, or in another folder (`--out`). LCBench's curves
are read from `$HYDRO_RASDA_DATA/lcbench` (default `../shared/data`). Weak scaling is in `rasda_scaling.md`; the study
is over.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import numpy as np

from benchmarks.rasda_settings import (
    APPLICATIONS,
    CV,
    GB,
    Application,
    Assumptions,
    asha,
    cluster,
    cost_model,
    rasda,
    run,
    seconds,
)
from benchmarks.result_files import RESULTS, Row, environment, options, read, save, table, texts, versions
from hydro_rasda.simulator import Outcome, power_law, simulate

PAPER = {"CV": 1.71, "AM": 1.52, "CFD": 1.90}
SCALING = RESULTS / "rasda_scaling.json"


def speed_up(app: Application, a: Assumptions, seeds: Sequence[int]) -> Row:
    """Return ASHA's mean run time over RASDA's, as in the paper."""
    plain, elastic = run(app, asha(app), a, seeds), run(app, rasda(app), a, seeds)
    ratio = seconds(plain) / seconds(elastic)
    return {
        "application": app.name,
        "ASHA_s": seconds(plain),
        "RASDA_s": seconds(elastic),
        "ratio": ratio,
        "ratios_of_3_runs_5_to_95_percent": _three_runs(plain, elastic),
        "paper": PAPER[app.name],
        "error": ratio / PAPER[app.name] - 1,
    }


def _three_runs(plain: Sequence[Outcome], elastic: Sequence[Outcome]) -> list[float]:
    """Return the 5 % and 95 % quantiles of the ratio if each side is the mean of three runs, as in the paper."""
    rng = random.Random(0)
    ratios = [seconds(rng.sample(plain, 3)) / seconds(rng.sample(elastic, 3)) for _ in range(2000)]
    cuts = quantiles(ratios, n=20)
    return [cuts[0], cuts[-1]]


def fitted(apps: Sequence[Application], seeds: Sequence[int]) -> Assumptions:
    """Find by bisection the serial share for which the geometric mean of these applications' ratios is the paper's."""
    low, high = 0.0, 0.5
    for _ in range(8):
        a = Assumptions(serial=(low + high) / 2)
        error = mean(math.log(row["ratio"] / row["paper"]) for row in (speed_up(app, a, seeds) for app in apps))
        low, high = (a.serial, high) if error > 0 else (low, a.serial)
    return Assumptions(serial=round((low + high) / 2, 4))


def sensitivities(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """Return the three ratios for each change of one assumption."""
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("as stated", {}),
        ("serial share 0 (nothing fitted)", {"serial": 0.0}),
        ("serial share halved", {"serial": a.serial / 2}),
        ("serial share x 1.5", {"serial": a.serial * 1.5}),
        ("restart 15 s", {"restart_seconds": 15.0}),
        ("restart 240 s", {"restart_seconds": 240.0}),
        ("no noise, no jitter", {"epoch_noise": 0.0, "jitter": 0.0}),
        ("noise and jitter 5 %", {"epoch_noise": 0.05, "jitter": 0.05}),
        ("no overlap", {"overlap": 0.0}),
        ("a tenth of the bandwidth", {"link_bandwidth": 2.5 * GB, "nvlink": 30 * GB}),
        ("latency 50 us", {"link_latency": 50e-6}),
        ("cost of trials log-normal, 0.2", {"work_spread": 0.2}),
        ("parametric curves", {"curves": "power law"}),
    )
    rows = []
    for label, change in changes:
        ratios = {app.name: speed_up(app, replace(a, **change), seeds)["ratio"] for app in APPLICATIONS}
        rows.append({"change": label, **ratios})
    return rows


def throughput() -> list[Row]:
    """Measure the simulator's events and CPU seconds, with many epochs for each decision and with few."""
    rows = []
    for trials, gpus, epochs, grace, rounds in ((1000, 64, 1000, 250, 2), (32, 64, 40, 5, 100), (2000, 256, 81, 1, 2)):
        app = replace(CV, trials=trials, gpus=gpus, max_t=epochs, asha_seconds=CV.asha_seconds / CV.max_t * epochs)
        workload, cost = power_law(trials, epochs, 0), cost_model(app, Assumptions(0.1))
        began = time.process_time()
        events = sum(simulate(rasda(app, grace), workload, cluster(app), cost, seed).events for seed in range(rounds))
        spent = time.process_time() - began
        rows.append({"trials": trials, "GPUs": gpus, "max_t": epochs, "runs": rounds, "events": events, "cpu_s": spent})
    return rows


def timeline(a: Assumptions, seed: int = 0) -> list[Row]:
    """Return the GPUs that the trials of one CV run hold over time, for the figure."""
    return [held_by(name, run(CV, plan, a, [seed])[0]) for name, plan in (("ASHA", asha(CV)), ("RASDA", rasda(CV)))]


def markdown(results: Row) -> str:
    """Return a page of all tables, each with its meaning and its limits."""
    where = results["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    rerun = f"python -m benchmarks.rasda_paper {where['option']}".rstrip()
    parts = [
        "# RASDA's experiments in virtual time",
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, one process, Python {where['python']}, {versions}; "
        f"seeds {where['seeds']}; {where['seconds']:.0f} s. Rerun: `{rerun}`.",
        "The schedulers are the library's own; learning curves, costs and machines are models. Nothing here was "
        "trained.",
        *_speed_ups(results),
        *_assumptions(results),
        "[Weak scaling](rasda_scaling.md) has a page of its own.",
        "## Speed of the simulator",
        "CPU seconds of one core. An epoch between milestones costs microseconds; a milestone costs a decision.",
        table([{**row, "events_per_s": row["events"] / row["cpu_s"]} for row in results["throughput"]]),
        "![Speed-ups, weak scaling and GPUs held](rasda_paper.png)",
    ]
    return "\n\n".join(parts) + "\n"


def _speed_ups(results: Row) -> list[str]:
    return [
        "## Speed-up over ASHA (tables 2-4 of the paper)",
        texts("rasda_paper")["speed-up"].format(
            runs=results["environment"]["runs"], serial=results["assumptions"]["serial"]
        ),
        table(_with_error(results, "ratios")),
        f"Fitted to CV alone ({results['serial_of_CV']:.3f}), so that AM and CFD are predictions:",
        table(_with_error(results, "ratios_fitted_to_CV")),
        "One share for all three cannot say that one of them scales worse.",
        "With nothing fitted (serial share 0): the paper's settings, datasheets and the assumptions below:",
        table(_with_error(results, "ratios_nothing_fitted")),
    ]


def _assumptions(results: Row) -> list[str]:
    applications = [
        {
            "application": app.name,
            "trials": app.trials,
            "GPUs": app.gpus,
            "from": app.workers,
            "max_t": app.max_t,
            "paper_ASHA_s": app.asha_seconds,
            "paper_RASDA_s": app.rasda_seconds,
        }
        for app in APPLICATIONS
    ]
    return [
        "## Every assumption",
        texts("rasda_paper")["assumptions"],
        table(applications),
        "## Sensitivities: the three ratios when one assumption changes",
        table(results["sensitivities"]),
    ]


def plot(results: Row, weak: Sequence[Row], timelines: list[Row], path: Path) -> None:
    """Draw the ratios beside the paper's, weak scaling from the rows `weak`, and the GPUs held over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    ratios, scaling, held = figure.subplots(1, 3)
    for offset, rows, label in (
        (-0.3, results["ratios_nothing_fitted"], "nothing fitted"),
        (-0.1, results["ratios_fitted_to_CV"], "serial share fitted to CV"),
        (0.1, results["ratios"], "serial share fitted to all"),
    ):
        ratios.bar([i + offset for i in range(len(rows))], [r["ratio"] for r in rows], 0.18, label=label)
    rows = results["ratios"]
    ratios.bar([i + 0.3 for i in range(len(rows))], [r["paper"] for r in rows], 0.18, label="paper", color="0.6")
    ratios.set_xticks(range(len(rows)), [r["application"] for r in rows])
    ratios.set_ylabel("ASHA's run time / RASDA's")
    ratios.set_ylim(0, 3)
    ratios.legend(loc="upper right", ncols=2)
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in weak:
        lines.setdefault((", ".join(map(str, row["milestones"])), row["survivors"]), []).append(row)
    for i, ((stops, survivors), line) in enumerate(lines.items()):
        style = {"color": f"C{i // 2}", "linestyle": "-" if survivors == "exactly half" else ":"}
        label = f"{stops}; {survivors}"
        scaling.plot([r["GPUs"] for r in line], [r["efficiency"] for r in line], marker="o", label=label, **style)
    scaling.axhline(0.84, color="0.6", linestyle="--", label="paper, at 1,024")
    scaling.set(xscale="log", xlabel="GPUs", ylabel="weak-scaling efficiency", ylim=(0, 1.3))
    sizes = list(dict.fromkeys(r["GPUs"] for r in weak))
    scaling.set_xticks(sizes, [f"{size:,}" for size in sizes])
    scaling.minorticks_off()
    scaling.legend(title="milestones; survivors")
    draw_held(held, timelines)
    held.set_title("CV, one seed")
    figure.savefig(path, dpi=110)


def held_by(rule: str, outcome: Outcome) -> Row:
    """Return the workers that the trials of a search hold over time, for `draw_held`."""
    return {"rule": rule, "held": [{"start": s.start, "stop": s.stop, "workers": s.workers} for s in outcome.segments]}


def draw_held(axes: Any, timelines: Sequence[Row]) -> None:
    """Draw the GPUs that trials hold over time, one line for each rule: means over 1 / 200 of the longest search."""
    edges = np.linspace(0.0, max(map(_end, timelines)), 201)
    for timeline in timelines:
        spent = np.zeros(len(edges))
        for s in timeline["held"]:
            spent += s["workers"] * np.clip(edges - s["start"], 0.0, s["stop"] - s["start"])
        held = np.where(edges[1:] <= _end(timeline) + edges[1], np.diff(spent) / edges[1], np.nan)
        axes.step(edges[:-1] / 3600, held, where="post", label=timeline["rule"])
    axes.set(xlabel="hours", ylabel="GPUs held", ylim=(0, None))
    axes.legend()


def _end(timeline: Row) -> float:
    """Return the time at which the last trial ended."""
    return max(float(s["stop"]) for s in timeline["held"])


def _with_error(results: Row, name: str) -> list[Row]:
    """Add to each row the standard error of its ratio.

    The error follows from the 5 % and 95 % quantiles, which lie 1.645 deviations from a normal distribution's mean.
    """
    rows = []
    for row in results[name]:
        low, high = row["ratios_of_3_runs_5_to_95_percent"]
        deviation_of_3 = (high - low) / (2 * 1.645)
        rows.append({**row, "standard_error": deviation_of_3 * math.sqrt(3 / results["environment"]["runs"])})
    return rows


def main() -> None:
    """Run everything, and write the results."""
    parser = options(__doc__)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--full", action="store_true", help="twice the seeds: each task of LCBench once")
    amount.add_argument("--quick", action="store_true", help="a few seeds")
    given = parser.parse_args()
    began = time.perf_counter()
    option = "--full" if given.full else "--quick" if given.quick else ""
    seeds = range({"--full": 34, "--quick": 4, "": 17}[option])
    a, of_cv = fitted(APPLICATIONS, seeds), fitted((CV,), seeds)
    packages = versions("numpy", "onnxruntime", "matplotlib")
    results: Row = {
        "environment": environment(
            processes=1, runs=len(seeds), versions=packages, option=option, seeds=f"0 to {len(seeds) - 1}"
        ),
        "assumptions": asdict(a),
        "ratios": [speed_up(app, a, seeds) for app in APPLICATIONS],
        "serial_of_CV": of_cv.serial,
        "ratios_fitted_to_CV": [speed_up(app, of_cv, seeds) for app in APPLICATIONS],
        "ratios_nothing_fitted": [speed_up(app, Assumptions(), seeds) for app in APPLICATIONS],
        "sensitivities": sensitivities(a, seeds),
        "throughput": throughput(),
    }
    results["environment"]["seconds"] = round(time.perf_counter() - began, 1)
    save(given.out / "rasda_paper.json", results, markdown(results))
    plot(results, read(SCALING)["fig4"], timeline(a), given.out / "rasda_paper.png")
    print(f"wrote {given.out / 'rasda_paper.md'}")


if __name__ == "__main__":
    main()
