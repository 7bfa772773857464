"""RASDA: in virtual time, on Ray, with growing batches."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks import large_batch, rasda_beyond
from benchmarks.claims.claim import Claim, machine_of, of_source
from benchmarks.rasda_paper import TOLERANCE
from benchmarks.rasda_settings import APPLICATIONS
from benchmarks.result_files import read

WEAK_SCALING = 0.84


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
    fourth = [row for row in result["fig4"] if row["GPUs"] == 1024 and row["survivors"] == "exactly half"]
    head_node = next(row for row in result["fig4_causes"] if row["machine"].startswith("0.3 s"))
    largest = [row["efficiency"] for row in fourth]
    slower = [value for name, value in head_node.items() if name.startswith("efficiency")]
    models = [row for row in result["thousand"] if row["model"].endswith(("never wait", "fitted"))]
    hours = {row["model"]: row["hours"] for row in models}
    events = sorted(row["events"] / row["cpu_s"] * 60e-6 for row in result["throughput"])
    return [
        *found,
        claim(
            "Weak-scaling efficiency on 1,024 GPUs in virtual time, where exactly half survive, by milestones; and "
            "with a head node that takes 0.3 s for each process (assumed)",
            "; ".join(" and ".join(f"{efficiency:.2f}" for efficiency in each) for each in (largest, slower)),
            f"{WEAK_SCALING:g} within 15 %, with that head node",
            all(abs(efficiency / WEAK_SCALING - 1) <= TOLERANCE for efficiency in slower),
        ),
        claim(
            "CFD on 1,024 GPUs in virtual time: " + "; ".join(hours),
            " and ".join(f"{hour:.1f} h" for hour in hours.values()),
            "3 h within 15 %",
            all(abs(hour / 3 - 1) <= TOLERANCE for hour in hours.values()),
        ),
        claim(
            "Events of the simulator in a minute, from where half are decisions to where few are",
            f"{events[0]:.1f} to {events[-1]:.1f} million",
            "a million",
            events[0] >= 1,
        ),
    ]


def beyond_the_paper(folder: Path) -> list[Claim]:
    """Waiting and efficient growth, in virtual time."""
    result = read(folder / rasda_beyond.FILE)
    if result is None:
        return []
    rows, ours, papers = result["rows"], rasda_beyond.CHOSEN, rasda_beyond.PAPER
    claim = of_source("rasda_beyond.md", f"{machine_of(result['environment'])}; {rows[0]['seeds']} seeds")
    paper = rows[: len(APPLICATIONS)]
    few = [row for row in rows if row["trials"] <= 8]
    trained = [row for row in rows if row["setting"].startswith("recorded")]
    speedups, elsewhere = ([rasda_beyond.faster(row, ours, papers) for row in of] for of in (paper, trained))
    spent = [rasda_beyond.hours(row, ours, papers) for row in paper]
    against_asha = {row["setting"]: rasda_beyond.faster(row, ours) for row in rows}
    slowest = min(against_asha, key=against_asha.__getitem__)
    tables, applications = ", ".join(rasda_beyond.RECORDED), ", ".join(app.name for app in APPLICATIONS)
    found = [
        claim(
            f"Waiting 10 % for fellows and efficient growth, over the paper's RASDA in virtual time: {applications}",
            ", ".join(f"{ratio:.2f}x" for ratio in speedups),
            "1.2x",
            min(speedups) >= 1.2,
        ),
        claim(
            "... GPU hours over the paper's rule",
            ", ".join(f"{ratio:.2f}" for ratio in spent),
            "at most 0.85",
            max(spent) <= 0.85,
        ),
        claim(
            f"... times as fast as ASHA, where it is least: {slowest}",
            f"{against_asha[slowest]:.2f}x",
            "0.97x",
            against_asha[slowest] >= 0.97,
        ),
        claim(
            f"... times as fast as the paper's rule on trainings recorded here: {tables}",
            ", ".join(f"{ratio:.2f}x" for ratio in elsewhere),
            "1.2x",
            min(elsewhere, default=0.0) >= 1.2,
        ),
    ]
    for name, of in (("the three applications", paper), ("4 and 8 trials on 8 GPUs", few), (tables, trained)):
        more = [row["more_regret"] for row in of]
        shown = ", ".join(f"{mean:+.4f} ({error:.4f})" for mean, error in more)
        no_more = all(mean <= 2 * error for mean, error in more)
        what, target = f"... more regret than the paper's rule: {name}", "none that is above two standard errors"
        found.append(claim(what, shown, target, no_more))
    return found


def growing_batches(folder: Path) -> list[Claim]:
    """What rules for the learning rate keep of the loss where batches grow."""
    result = read(folder / large_batch.FILE)
    if result is None:
        return []
    claim, found = of_source("large_batch.md", machine_of(result["environment"])), []
    validation, training = (large_batch.verdicts(result["rows"], part) for part in ("val_loss", "train_loss"))
    for optimizer, default in large_batch.defaults().items():
        rules = {rule: (optimizer, rule, int(rule != "none")) for rule in large_batch.RULES}
        losses = [f"{rule} {validation[kind]:.3f}, {training[kind]:.2f}" for rule, kind in rules.items()]
        least = min(rules, key=lambda rule: validation[rules[rule]])
        what = (
            f"Validation and training loss after the batch grew to 2, 4 and 8 times its size, over the loss without "
            f"growth: {optimizer}. By rule of the learning rate, with a warm-up of one epoch; the default is {default}"
        )
        found.append(claim(what, "; ".join(losses), "the default's validation loss is the least", least == default))
    if result["overhead"] is not None:
        taken = result["overhead"].values()
        shown = ", ".join(f"{1000 * of['more']:.2f} ms of {1000 * of['step']:.1f} ms" for of in taken)
        name = "Measuring the gradient noise scale, on two ranks that share two cores, adds to a step: "
        name += ", ".join(large_batch.NAMES[task] for task in result["overhead"])
        found.append(claim(name, shown, "1 %", all(of["more"] < 0.01 * of["step"] for of in taken)))
    return found


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
    """What Ray takes to resize trials, and to run short ones."""
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
