"""All benchmarks on one page: each claim with what was to be reached, what was measured, and the file that says so.

    python -m benchmarks.results_page

The page, `RESULTS.md`, is drawn from the result files alone: the full ones, and `results/quick.json`, which
`make bench` (`benchmarks.bench`) rewrites.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import bubbles, large_batch, packing, rasda_beyond, scale
from benchmarks.fusion_cases import CASES
from benchmarks.packing_page import PAPERS_DECISIONS
from benchmarks.packing_profiles import NEIGHBOUR
from benchmarks.rasda_paper import TOLERANCE
from benchmarks.rasda_report import RESULTS
from benchmarks.rasda_settings import APPLICATIONS
from benchmarks.vs_asha.report import (
    TARGETS,
    TASK_NAMES,
    Cells,
    how_often,
    lost,
    machine,
    not_run,
    of_today,
    read,
    rows_of,
    show,
)
from benchmarks.vs_asha.statistics import BASELINE, overall, seed_spread
from benchmarks.vs_asha.statistics import row as vs_asha_row

PAGE = Path(__file__).parent / "RESULTS.md"
QUICK = "quick.json"
RHO = 0.95
WEAK_SCALING = 0.84


class Claim(NamedTuple):
    """A line of the page.

    Attributes:
        what: Was measured.
        measured: What came out, with its unit.
        target: What was to be reached; "" where nothing was.
        met: Whether it was; None where there is no target.
        where: Hardware, date and load.
        source: The result file, below the results folder.
    """

    what: str
    measured: str
    target: str
    met: bool | None
    where: str
    source: str


def claims(folder: Path) -> list[Claim]:
    """What the result files of a folder say; a benchmark without a file says nothing."""
    parts = (_vs_asha, _fusion, _cuda, _transfer, _paper, _beyond, _large_batch, _ray, _scale, _packing, _bubbles)
    return [claim for part in parts for claim in part(folder)]


def _vs_asha(folder: Path) -> list[Claim]:
    cells, source = read(folder / "vs_asha"), "vs_asha.md"
    found = []
    for task in cells:
        rows = rows_of(cells, task)
        row = rows.get("tune")
        if row is None or row.speedup is None or row.gain is None or row.speedup_without_start is None:
            continue
        everything = [cell for of_method in cells[task].values() for cell in of_method]
        reduced, between_seeds = everything[0]["reduced"], seed_spread(everything)
        worse = lost(row, between_seeds)
        target = TARGETS[task]
        where = f"{machine(everything)}; {row.compared} seed{'s' * (row.compared > 1)}"
        name = _vs_asha_name(task) + " (reduced)" * reduced
        tests = f"{row.test.median:.3g} against {rows[BASELINE].test.median:.3g}"
        quality = f"test {everything[0]['score']} {tests}, seed spread {between_seeds:.2g}"
        measured = f"{show(row.speedup, 'x')}; {quality}" + ", **a loss**" * worse
        met = row.speedup.median >= target.speedup and not worse
        beside = f"{show(row.speedup_without_start, 'x')} without Ray's start-up"
        one_process = vs_asha_row(cells[task]["tune"], cells[task].get("asha", ())).speedup
        if one_process is not None:
            beside += f"; {show(one_process, 'x')} as fast as ASHA in one process"
        reached = f"{how_often(row)} runs"
        unhalved = rows.get("both")
        if unhalved is not None and unhalved.speedup is not None:
            to_the_end = f"{how_often(unhalved)} at {show(unhalved.speedup, 'x')}"
            reached += f"; with all finalists trained to the end, {to_the_end}"
        floors = row.floors.median <= target.floors
        found += [
            Claim(name, measured, "" if reduced else f"{target.speedup:g}x", None if reduced else met, where, source),
            Claim("... the same without what Ray itself takes", beside, "", None, where, source),
            Claim("... how often it reached the validation score of Ray's winner", reached, "", None, where, source),
            Claim(
                "... its whole cost, in trainings of the winner",
                show(row.floors),
                "" if reduced else f"at most {target.floors:g}",
                None if reduced else floors,
                where,
                source,
            ),
        ]
    if (today := of_today(cells)) and len(today) > 1:
        found += _overall(today, source)
    if (folder / source).exists():
        found += [
            Claim(_vs_asha_name(task), "not run", f"{TARGETS[task].speedup:g}x", None, "no GPU", source)
            for task in not_run(cells)
        ]
    return found


def _overall(tasks: Cells, source: str) -> list[Claim]:
    """Over all tasks that were measured with today's defaults."""
    found = overall(tasks, "tune")
    where = machine([cell for methods in tasks.values() for method in (BASELINE, "tune") for cell in methods[method]])
    lost = ", ".join(TASK_NAMES[task] for task in found.lost)
    sweeps = f"{min(found.sweeps.values()):.2g} to {max(found.sweeps.values()):.2g}, by task"
    of = f"of {found.runs} runs on {len(tasks)} tasks"
    return [
        Claim(
            "`tune` with its present defaults against Ray Tune's ASHA: reaches the validation score of its winner",
            f"{found.reached} {of}",
            "90 %",
            found.reached >= 0.9 * found.runs,
            where,
            source,
        ),
        Claim(
            "... test score worse by no more than the seed spread",
            f"{found.not_worse} {of}",
            "95 %",
            found.not_worse >= 0.95 * found.runs,
            where,
            source,
        ),
        Claim("... tasks on which it is worse by more in the mean", lost or "none", "none", not lost, where, source),
        Claim(
            "... the sweep, in trainings of the winner",
            sweeps,
            "at most 0.5",
            max(found.sweeps.values()) <= 0.5,
            where,
            source,
        ),
    ]


def _vs_asha_name(task: str) -> str:
    return f"`tune` against Ray Tune's ASHA: {TASK_NAMES[task]}"


def _fusion(folder: Path) -> list[Claim]:
    result = _read(folder / "fusion_throughput.json")
    if result is None:
        return []
    cases = {case.name: case for case in CASES}
    return [
        Claim(
            f"32 fused trials against one after another: {cases[row['case']].title}",
            f"{row['speedup']:.2f}x [{row['quartiles'][0]:.2f}, {row['quartiles'][1]:.2f}]",
            f"{cases[row['case']].target:g}x",
            row["speedup"] >= cases[row["case"]].target,
            f"{_machine(result['environment'])}; load {row['load']:.1f}",
            "fusion_throughput.md",
        )
        for row in result["rows"]
        if row["trials"] == 32
    ]


def _cuda(folder: Path) -> list[Claim]:
    result = _read(folder / "fusion_cuda.json")
    if result is None:
        return []
    environment, source = result["environment"], "fusion_cuda.md"
    found = []
    for case, target in environment["targets"].items():
        name = f"Fused trials on a GPU: {case} against the full width alone"
        rows = [row for row in result["rows"] if row["case"] == case and not row["error"]]
        if not rows:
            found.append(Claim(name, "not run", f"{target:g}x", None, environment["device"], source))
            continue
        best = max(rows, key=lambda row: row["gain"])
        measured = f"{best['gain']:.1f}x ({best['K']} trials, {best['precision']}, {best['how']})"
        where = f"{environment['device']}; {environment['date'][:10]}"
        found.append(Claim(name, measured, f"{target:g}x", best["gain"] >= target, where, source))
    return found


def _transfer(folder: Path) -> list[Claim]:
    found = []
    for path in sorted(folder.glob("transfer_*.json")):
        result = json.loads(path.read_text())
        narrow = [row for row in result["rows"] if row["scheme"] == "muP"]
        row = min(narrow, key=lambda row: row["width_ratio"])
        where = f"{_machine(result['environment'])}; {len(result['configs'])} configurations"
        ratio, regret = f"1/{1 / row['width_ratio']:.0f}", row["regret"]["3"]
        name = f"Surrogates at {ratio} of the width rank as the full width does: {result['task']}"
        rhos = {(other["scheme"], other["width_ratio"]): other["rho"] for other in result["rows"]}
        ceiling, plain = rhos["reseed", 1.0], rhos["plain", row["width_ratio"]]
        rho = f"rho {row['rho']:.3f}; plain narrow models {plain:.3f}; other seeds of the full width {ceiling:.3f}"
        spread = result["seed_spread"]
        source = "transfer_quality.md"
        found += [
            Claim(name, rho, f"{RHO:g}", row["rho"] >= RHO, where, source),
            Claim(
                "... the best of their three best is behind the best of all by",
                f"{regret:.3g}",
                f"the seed spread, {spread:.3g}",
                regret <= spread,
                where,
                source,
            ),
        ]
    return found


def _paper(folder: Path) -> list[Claim]:
    result = _read(folder / "rasda_paper.json")
    if result is None:
        return []
    where = f"{_machine(result['environment'])}; {result['environment']['runs']} seeds"
    source = "rasda_paper.md"
    found = [
        Claim(
            f"RASDA's speed-up over ASHA in virtual time: {row['application']}, one number fitted",
            f"{row['ratio']:.2f}",
            f"{row['paper']:.2f} within 15 %",
            row["within_15_percent"],
            where,
            source,
        )
        for row in result["ratios"]
    ]
    largest = [
        row["efficiency"] for row in result["fig4"] if row["GPUs"] == 1024 and row["survivors"] == "exactly half"
    ]
    head_node = next(row for row in result["fig4_causes"] if row["machine"].startswith("0.3 s"))
    slower = [value for name, value in head_node.items() if name.startswith("efficiency")]
    hours = {
        row["model"]: row["hours"] for row in result["thousand"] if row["model"].endswith(("never wait", "fitted"))
    }
    events = sorted(row["events"] / row["cpu_s"] * 60e-6 for row in result["throughput"])
    return [
        *found,
        Claim(
            "Weak-scaling efficiency on 1,024 GPUs in virtual time, where exactly half survive, by milestones; and "
            "with a head node that takes 0.3 s for each process (assumed)",
            "; ".join(" and ".join(f"{efficiency:.2f}" for efficiency in each) for each in (largest, slower)),
            f"{WEAK_SCALING:g} within 15 %, with that head node",
            all(abs(efficiency / WEAK_SCALING - 1) <= TOLERANCE for efficiency in slower),
            where,
            source,
        ),
        Claim(
            "CFD on 1,024 GPUs in virtual time: " + "; ".join(hours),
            " and ".join(f"{hour:.1f} h" for hour in hours.values()),
            "3 h within 15 %",
            all(abs(hour / 3 - 1) <= TOLERANCE for hour in hours.values()),
            where,
            source,
        ),
        Claim(
            "Events of the simulator in a minute, from where half are decisions to where few are",
            " to ".join(f"{million:.1f}" for million in (events[0], events[-1])) + " million",
            "a million",
            events[0] >= 1,
            where,
            source,
        ),
    ]


def _beyond(folder: Path) -> list[Claim]:
    result = _read(folder / rasda_beyond.FILE)
    if result is None:
        return []
    rows, source = result["rows"], "rasda_beyond.md"
    ours, papers = rasda_beyond.CHOSEN, rasda_beyond.PAPER
    where = f"{_machine(result['environment'])}; {rows[0]['seeds']} seeds"
    paper = rows[: len(APPLICATIONS)]
    speedups = [rasda_beyond.faster(row, ours, papers) for row in paper]
    spent = [rasda_beyond.hours(row, ours, papers) for row in paper]
    against_asha = {row["setting"]: rasda_beyond.faster(row, ours) for row in rows}
    slowest = min(against_asha, key=against_asha.__getitem__)
    found = [
        Claim(
            "Waiting 10 % for fellows and efficient growth, over the paper's RASDA in virtual time: "
            + ", ".join(app.name for app in APPLICATIONS),
            ", ".join(f"{ratio:.2f}x" for ratio in speedups),
            "1.2x",
            min(speedups) >= 1.2,
            where,
            source,
        ),
        Claim(
            "... GPU hours over the paper's rule",
            ", ".join(f"{ratio:.2f}" for ratio in spent),
            "at most 0.85",
            max(spent) <= 0.85,
            where,
            source,
        ),
        Claim(
            f"... times as fast as ASHA, where it is least: {slowest}",
            f"{against_asha[slowest]:.2f}x",
            "0.97x",
            against_asha[slowest] >= 0.97,
            where,
            source,
        ),
    ]
    few = [row for row in rows if row["trials"] <= 8]
    trained = [row for row in rows if row["setting"].startswith("recorded")]
    tables = ", ".join(rasda_beyond.RECORDED)
    elsewhere = [rasda_beyond.faster(row, ours, papers) for row in trained]
    shown = ", ".join(f"{ratio:.2f}x" for ratio in elsewhere)
    name = f"... times as fast as the paper's rule on trainings recorded here: {tables}"
    found.append(Claim(name, shown, "1.2x", min(elsewhere, default=0.0) >= 1.2, where, source))
    for name, of in (("the three applications", paper), ("4 and 8 trials on 8 GPUs", few), (tables, trained)):
        more = [row["more_regret"] for row in of]
        shown = ", ".join(f"{mean:+.4f} ({error:.4f})" for mean, error in more)
        no_more = all(mean <= 2 * error for mean, error in more)
        target = "none that is above two standard errors"
        found.append(Claim(f"... more regret than the paper's rule: {name}", shown, target, no_more, where, source))
    return found


def _large_batch(folder: Path) -> list[Claim]:
    result = _read(folder / large_batch.FILE)
    if result is None:
        return []
    where, source = _machine(result["environment"]), "large_batch.md"
    validation, training = (large_batch.verdicts(result["rows"], part) for part in ("val_loss", "train_loss"))
    found = []
    for optimizer, default in large_batch.defaults().items():
        rules = {rule: (optimizer, rule, int(rule != "none")) for rule in large_batch.RULES}
        losses = [f"{rule} {validation[kind]:.3f}, {training[kind]:.2f}" for rule, kind in rules.items()]
        least = min(rules, key=lambda rule: validation[rules[rule]])
        found.append(
            Claim(
                f"Loss of validation and of training after the batch grew to 2, 4 and 8 times, over that without: "
                f"{optimizer}, by the learning rate's rule, warm-up of one epoch; the default is {default}",
                "; ".join(losses),
                "the default's validation loss is the least",
                least == default,
                where,
                source,
            )
        )
    if result["overhead"] is not None:
        taken = result["overhead"].values()
        shown = ", ".join(f"{1000 * of['more']:.2f} ms of {1000 * of['step']:.1f} ms" for of in taken)
        name = "Measuring the gradient noise scale, on two ranks that share two cores, adds to a step: "
        name += ", ".join(large_batch.NAMES[task] for task in result["overhead"])
        found.append(Claim(name, shown, "1 %", all(of["more"] < 0.01 * of["step"] for of in taken), where, source))
    return found


def _ray(folder: Path) -> list[Claim]:
    result = _read(folder / "ray_overhead.json")
    if result is None:
        return []
    cores, load = result["machine"]["cores"], result["load average"]["start"]
    where = f"{cores} cores; {result['date'][:10]}; load {load:.1f} at the start"
    medians, plain = result["median seconds"]["warm"], result["median seconds"]["cold"]
    return [
        Claim(
            f"Ray, warm workers: {what.replace('->', ' to ') + ' workers' * ('->' in what)}",
            f"{medians[what]:.1f} s; plain actors {plain[what]:.1f} s",
            f"{target:g} s",
            medians[what] <= target,
            where,
            "ray_overhead.md",
        )
        for what, target in result["targets, seconds"].items()
        if what in medians
    ]


def _scale(folder: Path) -> list[Claim]:
    result = _read(folder / scale.FILE)
    if result is None:
        return []
    found = []
    for name, row in scale.ROWS.items():
        now, before = result["now"].get(name), result["before"].get(name)
        if now is None:
            continue
        measured = scale.shown(now, row) + (f"; before {scale.shown(before, row)}" if before else "")
        target = "" if row.target is None else f"{row.target:g} {row.unit}"
        where = f"{result['environment']['cores']} cores; {now['date']}; load {now['load']}"
        found.append(Claim(row.what, measured, target, row.met(now["number"]), where, "scale.md"))
    return found


def _packing(folder: Path) -> list[Claim]:
    result = _read(folder / packing.FILE)
    if result is None:
        return []
    return [
        *_packing_decisions(result.get("decisions")),
        *_packing_makespans(result.get("makespan")),
        *_packing_run(result.get("run")),
    ]


def _packing_decisions(part: Any) -> list[Claim]:
    found = []
    for row in part["rows"] if part else []:
        jobs, gpus, measured = row["jobs"], row["GPUs"], row["policies"]
        where = f"{_machine(part['environment'])}; load {part['environment']['load']}"
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
    where = f"{_machine(part['environment'])}; {stated[0]['seeds']} seeds"
    systems = ", ".join(row["system"] for row in stated)
    shorter = [row["shorter"][packing.PAPERS] for row in stated]
    over = [row["ours_over_WFD"][1] for row in stated]
    return [
        Claim(
            f"Packing in virtual time, HyperSack's WFD over one job a GPU: {systems}",
            ", ".join(f"{ratio:.2f}x" for ratio in shorter),
            ", ".join(f"{row['paper']:g}x" for row in stated) + ", each within 10 %",
            all(abs(ratio / row["paper"] - 1) <= 0.1 for ratio, row in zip(shorter, stated)),
            where,
            "packing.md",
        ),
        Claim(
            "... ours over WFD",
            ", ".join(f"{ratio:.3f}x" for ratio in over),
            "1.1x",
            min(over) >= 1.1,
            where,
            "packing.md",
        ),
    ]


def _packing_run(part: Any) -> list[Claim]:
    if not part:
        return []
    rows = part["rows"]
    ratios = [row["ratio"] for row in rows]
    killed = sum(row["packed"]["killed"] for row in rows)
    where = f"{_machine(part['environment'])}; load {part['environment']['load']}; {len(rows)} pairs"
    shown = f"{median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}], {killed} killed for memory"
    name = f"Packing, really run: {rows[0]['jobs']} small trainings on {rows[0]['cores']:g} cores over one at a time"
    met = median(ratios) >= 1.3 and not killed
    return [Claim(name, shown, "1.3x, none killed", met, where, "packing.md")]


def _bubbles(folder: Path) -> list[Claim]:
    """Rows of what guests cost a host and what they use, by micro-batches, and of the sweep in bubbles alone."""
    result, found = _read(folder / bubbles.FILE) or {}, list[Claim]()
    for part in (result[key] for key in ("4", "8") if key in result):
        where = f"{_machine(part['environment'])}; load {part['environment']['load']}"
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
    if sweep := result.get("sweep"):
        where = f"{_machine(sweep['environment'])}; load {sweep['environment']['load']}"
        name = f"A sweep of {sweep['trials']} trials wholly in bubbles: the answer of the same sweep alone"
        shown = f"{'the same' if sweep['identical'] else 'another'}, in {sweep['bubbles_seconds']:.0f} s for "
        shown += f"{sweep['alone_seconds']:.0f} s"
        found.append(Claim(name, shown, "to the last digit", sweep["identical"], where, "bubbles.md"))
    return found


def _machine(environment: dict[str, Any]) -> str:
    hardware = environment.get("machine") or f"{environment['cpu']}, {environment['cores']} cores"
    return f"{hardware}; {environment['date'][:10]}"


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


PICTURES = {rasda_beyond.PICTURE: "RASDA and its neighbours in virtual time: GPUs held, run times, GPU hours"}
"""Figures of the folder of results that the page shows."""


def page(full: Sequence[Claim], quick: dict[str, Any] | None, pictures: Sequence[str] = ()) -> str:
    """The page.

    Args:
        full: What the full benchmarks measured.
        quick: What `benchmarks.bench` wrote; None where it never ran.
        pictures: Those of `PICTURES` that there are.
    """
    misses = [claim for claim in full if claim.met is False]
    parts = [
        _HEAD,
        _table(full, "results"),
        f"Missed: {len(misses)} of {sum(c.met is not None for c in full)} targets.",
        *(f"![{PICTURES[name]}](results/{name})" for name in pictures),
    ]
    if quick is not None:
        left_out = "".join(f" Left out: {reason}." for reason in quick["left_out"])
        parts += [
            "## Quick run",
            f"`make bench`, {quick['date']}, {quick['minutes']:.1f} minutes, load at its start {quick['load']:.1f}: "
            "fewer seeds and shorter measurements; tasks marked as reduced have fewer examples, trials and epochs. It "
            f"shows that everything runs; its numbers are rougher than those above.{left_out}",
            _table([Claim(*claim) for claim in quick["claims"]], None),
        ]
    return "\n\n".join(parts) + "\n"


_HEAD = """# Results

Drawn by `python -m benchmarks.results_page` from the files in the last column, which say more: settings, seeds,
versions, and the command that measures each again. Medians, quartiles in brackets."""


def _table(found: Sequence[Claim], folder: str | None) -> str:
    lines = ["| what | measured | to reach | | machine, date | source |", "|---|---|---|---|---|---|"]
    for claim in found:
        met = {True: "met", False: "**missed**", None: ""}[claim.met]
        source = f"[{claim.source}]({folder}/{claim.source})" if folder else claim.source
        lines.append(f"| {claim.what} | {claim.measured} | {claim.target} | {met} | {claim.where} | {source} |")
    return "\n".join(lines)


def render(results: Path) -> str:
    """The page of a folder of results."""
    return page(claims(results), _read(results / QUICK), [name for name in PICTURES if (results / name).exists()])


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(render(RESULTS))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
