"""The results of `rasda_paper` as JSON, as Markdown tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.rasda_settings import APPLICATIONS, ORIGINS
from benchmarks.result_files import Row, environment, table, versions
from hydro_rasda.simulator import Outcome


def searched_with(option: str, seeds: int, few: int) -> Row:
    """Hardware, date, versions and configuration."""
    told = f"0 to {seeds - 1} (figure 4 and 1,024 GPUs: 0 to {few - 1})"
    packages = versions("numpy", "onnxruntime", "matplotlib")
    return environment(processes=1, runs=seeds, versions=packages, option=option, seeds=told)


def markdown(results: Row) -> str:
    """All tables, each with what it says and what it cannot say."""
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
        *_scaling(results),
        "## Speed of the simulator",
        "CPU seconds of one core. An epoch between milestones costs microseconds; a milestone costs a decision.",
        table([{**row, "events_per_s": row["events"] / row["cpu_s"]} for row in results["throughput"]]),
        "![Speed-ups, weak scaling and GPUs held](rasda_paper.png)",
    ]
    return "\n\n".join(parts) + "\n"


def _speed_ups(results: Row) -> list[str]:
    return [
        "## Speed-up over ASHA (tables 2-4 of the paper)",
        f"Mean run times over {results['environment']['runs']} seeds. ASHA's run time enters as the time of an epoch, "
        "so that only RASDA's is predicted. One number is fitted, the serial share of an epoch: "
        f"{results['assumptions']['serial']:.3f} for all three applications, such that their ratios are right in the "
        "geometric mean. The paper's ratios are of means over three runs each. The table has the spread of such ratios "
        "in the simulation beside them. They differ because another trial reports first in each run, and so another "
        "number survives a milestone. The standard error of a simulated ratio follows from that spread and the number "
        "of seeds; a verdict within one of it is open.",
        table(_with_error(results, "ratios")),
        _verdict(results["ratios"]),
        f"Fitted to CV alone ({results['serial_of_CV']:.3f}), so that AM and CFD are predictions:",
        table(_with_error(results, "ratios_fitted_to_CV")),
        _verdict(results["ratios_fitted_to_CV"]) + " One share for all three cannot say that one of them scales worse.",
        "With nothing fitted (serial share 0): the paper's settings, datasheets and the assumptions below:",
        table(_with_error(results, "ratios_nothing_fitted")),
        _verdict(results["ratios_nothing_fitted"]),
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
        table([{"what": what, "value": value, "origin": origin} for what, value, origin in ORIGINS]),
        table(applications),
        "## Sensitivities: the three ratios when one assumption changes",
        table(results["sensitivities"]),
    ]


def _scaling(results: Row) -> list[str]:
    return [
        "## 8 to 64 GPUs, 20 epochs (fig. 3; the paper: up to 1.45)",
        table(results["fig3"]),
        "## Weak scaling, six epochs (fig. 4; the paper: > 0.84 up to 1,024 GPUs)",
        "The paper names neither the milestones nor the GPUs of a new trial here: both lists of milestones, 2 GPUs. "
        "Parametric curves; efficiency is the time on 128 GPUs over the time. If trials are decided as they come, and "
        "are few, more than half survive, because ASHA lets the first ones through. A larger search then trains fewer "
        "epochs a trial, and looks more efficient than it is. If exactly half survive, settled beforehand, the model "
        "of a perfect machine loses nothing with size.",
        table(results["fig4"]),
        "A machine may lose time by three causes; here, exactly half of the trials survive. A head node starts the "
        "processes of all trials one after another, at first and at each resize. Nodes have persistent speeds "
        "(log-normal, this standard deviation), and a trial is as fast as its slowest node. Each node first copies the "
        "data from shared storage: 146 GB, as the paper keeps them in shared memory. All nodes copy at once, from 300 "
        "GB/s, which is fitted: see below. None of these numbers is the paper's; efficiency is that on 1,024 GPUs.",
        table(results["fig4_causes"]),
        _explained(results["fig4_causes"]),
        "## CFD on 1,024 GPUs (sec. 5.4: 64 trials from 16 GPUs, 20 epochs, three hours)",
        "The bandwidth of the shared storage comes from no datasheet. With 300 GB/s, one of the round numbers here, "
        "reading 4.8 TB a trial and epoch takes about as long as in the paper's run. It is fitted to these three "
        "hours, and so predicts nothing of them. Beside it is its effect on the ratio on 128 GPUs, to which it was not "
        "fitted.",
        table(results["thousand"]),
    ]


def plot(results: Row, timelines: list[Row], path: Path) -> None:
    """Ratios beside the paper's, weak scaling, and the GPUs that trials hold over time."""
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
    for row in results["fig4"]:
        lines.setdefault((", ".join(map(str, row["milestones"])), row["survivors"]), []).append(row)
    for i, ((stops, survivors), line) in enumerate(lines.items()):
        style = {"color": f"C{i // 2}", "linestyle": "-" if survivors == "exactly half" else ":"}
        label = f"{stops}; {survivors}"
        scaling.plot([r["GPUs"] for r in line], [r["efficiency"] for r in line], marker="o", label=label, **style)
    scaling.axhline(0.84, color="0.6", linestyle="--", label="paper, at 1,024")
    scaling.set(xscale="log", xlabel="GPUs", ylabel="weak-scaling efficiency", ylim=(0, 1.3))
    sizes = list(dict.fromkeys(r["GPUs"] for r in results["fig4"]))
    scaling.set_xticks(sizes, [f"{size:,}" for size in sizes])
    scaling.minorticks_off()
    scaling.legend(title="milestones; survivors")
    draw_held(held, timelines)
    held.set_title("CV, one seed")
    figure.savefig(path, dpi=110)


def held_by(rule: str, outcome: Outcome) -> Row:
    """What the trials of a search hold over time, for `draw_held`."""
    return {"rule": rule, "held": [{"start": s.start, "stop": s.stop, "workers": s.workers} for s in outcome.segments]}


def draw_held(axes: Any, timelines: Sequence[Row]) -> None:
    """GPUs that trials hold over time, a line for each rule: means over 1 / 200 of the longest search."""
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
    """When the last trial ended."""
    return max(float(s["stop"]) for s in timeline["held"])


def _with_error(results: Row, name: str) -> list[Row]:
    """The rows with the standard error of their ratios: of a normal spread, 90 % lie within 1.645 deviations."""
    rows = []
    for row in results[name]:
        low, high = row["ratios_of_3_runs_5_to_95_percent"]
        deviation_of_3 = (high - low) / (2 * 1.645)
        rows.append({**row, "standard_error": deviation_of_3 * math.sqrt(3 / results["environment"]["runs"])})
    return rows


def _explained(rows: list[Row]) -> str:
    """What the causes amount to, beside the paper's number."""
    names = [name for name in rows[0] if name.startswith("efficiency")]
    least = min(rows, key=lambda row: mean(row[name] for name in names))
    shown = " and ".join(f"{least[name]:.2f}" for name in names)
    return (
        f"Of these, the least is {shown}, with: {least['machine']}. That the paper's 0.84 comes from them is possible; "
        "it does not follow."
    )


def _verdict(rows: list[Row]) -> str:
    missed = [f"{row['application']} ({row['error']:+.0%})" for row in rows if not row["within_15_percent"]]
    return f"Not within 15 % of the paper's: {', '.join(missed)}." if missed else "All within 15 % of the paper's."
