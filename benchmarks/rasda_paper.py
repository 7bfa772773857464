"""RASDA's experiments in virtual time: its speed-ups over ASHA and its weak scaling.

`python -m benchmarks.rasda_paper` takes about two minutes on one core; `--full` has more seeds, `--quick` a few.
They rewrite `rasda_paper.{json,md,png}` in `benchmarks/results`, or in another folder (`--out`). LCBench's curves
are read from `$HYDRO_RASDA_DATA/lcbench` (default `../shared/data`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import mean, quantiles
from typing import Any

from benchmarks.rasda_report import held_by, markdown, plot, searched_with
from benchmarks.rasda_scaling import causes, small_weak_scaling, thousand, weak_scaling
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
from benchmarks.result_files import Row, options, save
from hydro_rasda.simulator import Outcome, power_law, simulate

PAPER = {"CV": 1.71, "AM": 1.52, "CFD": 1.90}
TOLERANCE = 0.15


def speed_up(app: Application, a: Assumptions, seeds: Sequence[int]) -> Row:
    """ASHA's mean run time over RASDA's, as the paper divides them."""
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
        "within_15_percent": abs(ratio / PAPER[app.name] - 1) <= TOLERANCE,
    }


def _three_runs(plain: Sequence[Outcome], elastic: Sequence[Outcome]) -> list[float]:
    """The 5 % and 95 % quantiles of the ratio when each side is the mean of three runs, as in the paper."""
    rng = random.Random(0)
    ratios = [seconds(rng.sample(plain, 3)) / seconds(rng.sample(elastic, 3)) for _ in range(2000)]
    cuts = quantiles(ratios, n=20)
    return [cuts[0], cuts[-1]]


def fitted(apps: Sequence[Application], seeds: Sequence[int]) -> Assumptions:
    """The serial share for which these applications' ratios are right in the geometric mean, by bisection."""
    low, high = 0.0, 0.5
    for _ in range(8):
        a = Assumptions(serial=(low + high) / 2)
        error = mean(math.log(row["ratio"] / row["paper"]) for row in (speed_up(app, a, seeds) for app in apps))
        low, high = (a.serial, high) if error > 0 else (low, a.serial)
    return Assumptions(serial=round((low + high) / 2, 4))


def sensitivities(a: Assumptions, seeds: Sequence[int]) -> list[Row]:
    """The three ratios when one assumption changes."""
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
    """Events per CPU second of the simulator: many epochs to a decision, and few."""
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
    """GPUs of the trials of one CV run, for the figure."""
    return [held_by(name, run(CV, plan, a, [seed])[0]) for name, plan in (("ASHA", asha(CV)), ("RASDA", rasda(CV)))]


def main() -> None:
    """Runs everything and writes the results."""
    parser = options(__doc__)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--full", action="store_true", help="twice the seeds: each task of LCBench once")
    amount.add_argument("--quick", action="store_true", help="a few seeds")
    given = parser.parse_args()
    began = time.perf_counter()
    option = "--full" if given.full else "--quick" if given.quick else ""
    seeds, few = ([*range(n)] for n in {"--full": (34, 12), "--quick": (4, 2), "": (17, 4)}[option])
    a, of_cv = fitted(APPLICATIONS, seeds), fitted((CV,), seeds)
    results: dict[str, Any] = {
        "environment": searched_with(option, len(seeds), len(few)),
        "assumptions": asdict(a),
        "ratios": [speed_up(app, a, seeds) for app in APPLICATIONS],
        "serial_of_CV": of_cv.serial,
        "ratios_fitted_to_CV": [speed_up(app, of_cv, seeds) for app in APPLICATIONS],
        "ratios_nothing_fitted": [speed_up(app, Assumptions(), seeds) for app in APPLICATIONS],
        "sensitivities": sensitivities(a, seeds),
        "fig3": small_weak_scaling(a, seeds),
        "fig4": weak_scaling(a, few),
        "fig4_causes": causes(a, few),
        "thousand": thousand(a, few),
        "throughput": throughput(),
    }
    results["environment"]["seconds"] = round(time.perf_counter() - began, 1)
    save(given.out / "rasda_paper.json", results, markdown(results))
    plot(results, timeline(a), given.out / "rasda_paper.png")
    print(f"wrote {given.out / 'rasda_paper.md'}")


if __name__ == "__main__":
    main()
