"""RASDA beyond its paper, in virtual time: waiting for fellows, and growing by what it brings.

`python -m benchmarks.rasda_beyond` takes about twenty minutes on one core; `--quick` half a minute. It rewrites
`rasda_beyond.{json,md,png}` in `benchmarks/results`, or in another folder (`--out`). LCBench's curves are read from
`$HYDRO_RASDA_DATA/lcbench` (default `../shared/data`), the recorded trainings from `results/replay`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from benchmarks.rasda_report import draw_held, held_by, searched_with
from benchmarks.rasda_settings import APPLICATIONS, CFD, CV, Application, Assumptions, cluster, cost_model, curves
from benchmarks.rasda_settings import scaled as resized
from benchmarks.replay.table import load
from benchmarks.result_files import Row, options, save, table
from hydro_rasda.schedulers import RASDA, AsyncSuccessiveHalving, Mode
from hydro_rasda.schedulers.rasda import Grow
from hydro_rasda.simulator import (
    AnyPlan,
    CostModel,
    FixedWorkers,
    Plan,
    Workload,
    random_search,
    simulate,
    synchronous_halving,
)

FILE = "rasda_beyond.json"
SERIAL = 0.067
"""The share of an epoch that more workers do not shorten, as `rasda_paper` fits it."""

WAITS = (0.0, 0.02, 0.1, 0.2)
GROW: tuple[Grow, ...] = ("due", "efficient")
PAPER, CHOSEN = "due, 0", "efficient, 0.1"
PICTURE = "rasda_beyond.png"
DRAWN = {
    "ASHA": "ASHA",
    "random": "random search",
    "synchronous": "synchronous halving",
    PAPER: "RASDA as published",
    "due, 0.1": "RASDA, waiting",
    "efficient, 0": "RASDA, efficient growth",
    CHOSEN: "RASDA, both",
}
"""Rules of the figure, and what they are called there."""

SHOWN = (
    "CV: 32 trials, 64 GPUs",
    "AM: 16 trials, 128 GPUs",
    "CFD: 16 trials, 128 GPUs",
    "CV: 64 trials, 64 GPUs",
    "CV: 64 trials, 64 GPUs, noise scale 4 batches",
)
"""Settings of the figure."""

RECORDED = ("breast_cancer", "diabetes", "digits")


@dataclass(frozen=True)
class Setting:
    """A search on a machine.

    Attributes:
        noise: Gradient noise scale in batches of a new trial; inf where larger batches teach as much per example.
        work_spread: Standard deviation of the logarithm of a trial's cost.
        recorded: Task of `benchmarks.replay` whose trainings are the trials; "" for LCBench, a data set a seed.
    """

    name: str
    app: Application
    seeds: int
    noise: float = math.inf
    work_spread: float = 0.0
    recorded: str = ""

    def workload(self, seed: int) -> Workload:
        """The trials of one run."""
        if not self.recorded:
            return curves("lcbench", self.app.trials, self.app.max_t, seed, self.work_spread)
        whole = recorded(self.recorded)
        return whole[seed % len(whole)].resampled(self.app.trials, seed)

    @property
    def mode(self) -> Mode:
        """Which way a score is better."""
        return recorded(self.recorded)[0].mode if self.recorded else "min"

    def cost(self) -> CostModel:
        """Costs under `rasda_paper`'s assumptions; an epoch on a new trial's GPUs takes what the paper's ASHA took."""
        plain = cost_model(self.app, Assumptions(serial=SERIAL))
        noisy = replace(plain, noise_scale=self.noise * self.app.workers)
        passes = noisy.passes(self.app.workers)
        return replace(noisy, step_seconds=noisy.step_seconds / passes, serial_seconds=noisy.serial_seconds / passes)


@cache
def recorded(task: str) -> tuple[Workload, ...]:
    """The trainings of a task at full width, a workload for each seed of theirs, with the costs that were measured."""
    found = load(task)
    seconds = np.nanmean(found.seconds[found.about.widths.index(1.0)], axis=0)
    work = (seconds / np.median(seconds)).astype(np.float64)
    scores = found.curves(1.0)
    complete = [i for i, seed in enumerate(found.about.seeds) if found.complete(1.0, seed)]
    return tuple(Workload(scores[i].astype(np.float64), work, found.about.mode) for i in complete)


def settings(quick: bool) -> list[Setting]:
    """All rows: the paper's applications, one of them on other machines, and trainings that were recorded."""
    many, few = (8, 2) if quick else (204, 17)
    found = [Setting(f"{app.name}: {app.trials} trials, {app.gpus} GPUs", app, many) for app in APPLICATIONS]
    for gpus in (8, 64) if quick else (8, 64, 1024):
        for times in (1, 2):
            app = resized(CV, gpus, trials=times * gpus // CV.workers)
            seeds = many if gpus <= 64 else few
            where = f"{app.trials:,} trials, {gpus:,} GPUs"
            found += [
                Setting(f"CV: {where}", app, seeds),
                Setting(f"CV: {where}, costs differ by 20 %", app, seeds, work_spread=0.2),
                Setting(f"CV: {where}, noise scale 4 batches", app, seeds, noise=4.0),
            ]
    for gpus in () if quick else (4096, 16384):
        app = replace(CFD, gpus=gpus, trials=gpus // 16, workers=16, asha_seconds=CFD.asha_seconds / 2)
        found.append(Setting(f"CFD: {app.trials:,} trials, {gpus:,} GPUs", app, few))
    for task in RECORDED:
        app = resized(CV, 64, trials=32, max_t=recorded(task)[0].epochs)
        found.append(Setting(f"recorded: {task}, 32 trials, 64 GPUs", app, many, recorded=task))
    return list({setting.name: setting for setting in found}.values())


def plans(setting: Setting) -> dict[str, AnyPlan]:
    """The rules: ASHA, random and synchronous search, and RASDA by growth and wait: "due, 0" is the paper's."""
    app, mode = setting.app, setting.mode
    rasda = {
        f"{grow}, {wait:g}": Plan(RASDA(app.max_t, 5, 2, 2, app.workers, app.gpus, mode, wait, grow))
        for grow in GROW
        for wait in WAITS
    }
    return {
        "ASHA": Plan(FixedWorkers(AsyncSuccessiveHalving(app.max_t, 5, 2, mode), app.workers)),
        "random": Plan(random_search(app.max_t, app.workers, mode)),
        "synchronous": Plan(synchronous_halving(app.max_t, 5, 2, app.workers, mode)),
        **rasda,
    }


def measure(setting: Setting) -> Row:
    """By rule: mean run time and GPU hours, mean regret, and how often the best of all trials won.

    "more_regret" is the mean of what the chosen rule's regret has over the paper's in pairs, and its standard error.
    """
    cost, machine = setting.cost(), cluster(setting.app)
    workloads = [setting.workload(seed) for seed in range(setting.seeds)]
    best = [workload.best(setting.app.max_t) for workload in workloads]
    rules: Row = {}
    regrets: dict[str, list[float]] = {}
    for name, plan in plans(setting).items():
        outcomes = [simulate(plan, workload, machine, cost, seed) for seed, workload in enumerate(workloads)]
        regrets[name] = [abs(o.best_score - b) for o, b in zip(outcomes, best)]
        rules[name] = {
            "seconds": mean(o.seconds for o in outcomes),
            "GPU_hours": mean(o.gpu_seconds for o in outcomes) / 3600,
            "regret": mean(regrets[name]),
            "best_won": mean(regret == 0 for regret in regrets[name]),
            "to_the_end": mean(len(o.finished) for o in outcomes) / setting.app.trials,
        }
    more = [ours - papers for ours, papers in zip(regrets[CHOSEN], regrets[PAPER])]
    error = stdev(more) / math.sqrt(len(more))
    return {
        "setting": setting.name,
        "trials": setting.app.trials,
        "seeds": setting.seeds,
        "rules": rules,
        "more_regret": [mean(more), error],
    }


def faster(row: Row, rule: str, than: str = "ASHA") -> float:
    """How many times as fast one rule is as another."""
    ratio: float = row["rules"][than]["seconds"] / row["rules"][rule]["seconds"]
    return ratio


def hours(row: Row, rule: str, than: str = "ASHA") -> float:
    """GPU hours of one rule over those of another."""
    ratio: float = row["rules"][rule]["GPU_hours"] / row["rules"][than]["GPU_hours"]
    return ratio


def markdown(results: Row) -> str:
    """The tables, with what they say."""
    where, rows = results["environment"], results["rows"]
    rules = list(rows[0]["rules"])
    rerun = f"python -m benchmarks.rasda_beyond {where['option']}".rstrip()
    columns = {
        "Times as fast as ASHA": lambda row, rule: faster(row, rule),
        "GPU hours over ASHA's": lambda row, rule: hours(row, rule),
        "Share of trials that train to the end": lambda row, rule: row["rules"][rule]["to_the_end"],
        "Mean regret": lambda row, rule: row["rules"][rule]["regret"],
        "Share of runs in which the best of all trials wins": lambda row, rule: row["rules"][rule]["best_won"],
    }
    parts = [_HEAD, f"{where['date']}, {where['cpu']}, one process, {where['seconds']:.0f} s. Rerun: `{rerun}`."]
    for title, number in columns.items():
        shown = [{"setting": row["setting"], **{rule: number(row, rule) for rule in rules}} for row in rows]
        parts += [f"## {title}", *_SAID.get(title, ()), table(shown)]
    runs = [
        {
            "setting": row["setting"],
            "seeds": row["seeds"],
            "ASHA_s": row["rules"]["ASHA"]["seconds"],
            "more regret": row["more_regret"][0],
            "standard error": row["more_regret"][1],
        }
        for row in rows
    ]
    picture = f"![GPUs over time, run times and GPU hours of the rules]({PICTURE})"
    return "\n\n".join([*parts, "## Runs", _RUNS, table(runs), picture]) + "\n"


def plot(results: Row, path: Path) -> None:
    """What trials hold over time on CV's machine, and, on five machines, how fast the rules are and what they cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    held, fast, spent = figure.subplot_mosaic([["held", "held"], ["fast", "spent"]]).values()
    first = settings(quick=True)[0]
    cost, machine, workload = first.cost(), cluster(first.app), first.workload(0)
    drawn = {name: plan for name, plan in plans(first).items() if name in DRAWN}
    draw_held(held, [held_by(DRAWN[name], simulate(plan, workload, machine, cost)) for name, plan in drawn.items()])
    held.set_title(f"{first.name}, one seed")
    held.lines[-1].set_linestyle("--")  # where nobody grows beyond what pays, it is the line of waiting
    held.legend(loc="center right")
    rows = [row for row in results["rows"] if row["setting"] in SHOWN]
    for i, name in enumerate(drawn):
        at = [x + (i - 3) * 0.12 for x in range(len(rows))]
        for axes, number in ((fast, faster), (spent, hours)):
            axes.bar(at, [number(row, name) for row in rows], 0.12, label=DRAWN[name])
    for axes, words in ((fast, "times as fast as ASHA"), (spent, "GPU hours over ASHA's")):
        axes.set_xticks(range(len(rows)), [row["setting"].replace(": ", ":\n").replace(", ", ",\n") for row in rows])
        axes.set_ylabel(words)
        axes.axhline(1.0, color="0.6", linestyle="--")
    figure.savefig(path, dpi=100)


_HEAD = """# RASDA beyond its paper, in virtual time

Columns name how a survivor grows, and how long a trial waits at most for its cohort at a milestone, over the time that
it took to come. "due, 0" is the paper's algorithm. "efficient" grants the smaller of the workers due and an even share
of the free ones. It does so while the trial's parallel efficiency is above a half and its batch is within the gradient
noise scale. Synchronous halving waits for all, on the workers of a new trial. Random search trains every trial to the
end on them.

Settings are those of [rasda_paper.md](rasda_paper.md): the paper's applications, and CV on other machines, with as many
trials as fit at once, or twice as many. Milestones are 5, 10, 20, ...; rf = sf = 2. A restart takes 60 s, also for a
trial that waited and keeps its size. Curves are LCBench's (YAHPO Gym's surrogate), with one data set for each seed.
"recorded" curves are trainings by this library, with their measured costs. "Noise scale 4 batches": a batch of four
times the first needs 1.6 times the examples for the same progress (McCandlish et al. 2018). The rule gets that number
as if it had been measured. Elsewhere, batches of any size teach alike. Ratios are of means over seeds."""

_SAID = {
    "Mean regret": (
        "How much worse the winner is at the end than the best of all trials is there, in the unit of the curves. The "
        "unit is cross-entropy for LCBench and breast_cancer, squared error for diabetes, accuracy for digits.",
    )
}

_RUNS = f"""Seeds of each rule, ASHA's mean time, and the mean regret of "{CHOSEN}" minus that of the paper's rule. The
difference is taken on the same trials, and has its standard error."""


def run(quick: bool) -> Row:
    """All settings, measured."""
    began = time.perf_counter()
    asked = settings(quick)
    rows = [measure(setting) for setting in asked]
    about = searched_with("--quick" if quick else "", max(s.seeds for s in asked), min(s.seeds for s in asked))
    return {"environment": {**about, "seconds": round(time.perf_counter() - began, 1)}, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs everything and writes the results."""
    parser = options(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seeds, and no machine above 64 GPUs")
    given = parser.parse_args(arguments)
    results = run(given.quick)
    save(given.out / FILE, results, markdown(results))
    plot(results, given.out / PICTURE)
    print(f"wrote {given.out / 'rasda_beyond.md'}")


if __name__ == "__main__":
    main()
