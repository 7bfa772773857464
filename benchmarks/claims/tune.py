"""`tune` against ASHA, and what it takes by itself."""

from __future__ import annotations

from pathlib import Path

from benchmarks import peers, scale
from benchmarks.claims.claim import Claim, machine_of, of_source, waiting
from benchmarks.replay import policies
from benchmarks.replay.live import agreement_with_live
from benchmarks.result_files import read
from benchmarks.vs_asha.report import TARGETS, TASK_NAMES, Cells, lost, not_run, of_today, rows_of
from benchmarks.vs_asha.report import read as read_cells
from benchmarks.vs_asha.statistics import BASELINE, Cell, baseline_of, overall, seed_spread, spread
from benchmarks.vs_asha.statistics import row as vs_asha_row
from benchmarks.vs_asha.words import how_often, machine, show
from benchmarks.vs_asha.yardsticks import by_chance


def against_asha(folder: Path) -> list[Claim]:
    """`tune` against ASHA: task by task, then over all of them; on a CPU, then on a GPU."""
    return [
        claim for name in ("vs_asha", "vs_asha_gpu") for claim in _of_cells(read_cells(folder / name), folder, name)
    ]


def _of_cells(cells: Cells, folder: Path, name_of_page: str) -> list[Claim]:
    found, source = list[Claim](), f"{name_of_page}.md"
    for task in cells:
        rows = rows_of(cells, task)
        row = rows.get("tune")
        if row is None or row.speedup is None or row.gain is None:
            continue
        base = baseline_of(cells[task])
        assert row.floors is not None  # There is no speedup without times.
        everything = [cell for of_method in cells[task].values() for cell in of_method]
        reduced, between_seeds = everything[0]["reduced"], seed_spread(everything)
        worse = lost(row, between_seeds)
        target = TARGETS[task]
        where = f"{machine(everything)}; {row.compared} seed{'s' * (row.compared > 1)}"
        where += f", {row.timed} of them timed on one kind of machine" * (row.timed < row.compared)
        name = (
            _vs_asha_name(task, base) + ", on a GPU" * ("gpu" in everything[0]["environment"]) + " (reduced)" * reduced
        )
        tests = f"{row.test.median:.3g} against {rows[base].test.median:.3g}"
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
        cheap, claim = row.floors.median <= target.floors, of_source(source, where)
        found += [
            claim(name, measured) if reduced else claim(name, measured, f"{target.speedup:g}x", met),
            *([claim("... the same without what Ray itself takes", beside)] if base == BASELINE else []),
            claim("... how often it reached the validation score of ASHA's winner", reached),
        ]
        what, cost = "... its whole cost, in trainings of the winner", show(row.floors)
        found.append(claim(what, cost) if reduced else claim(what, cost, f"at most {target.floors:g}", cheap))
    if (today := of_today(cells)) and len(today) > 1:
        found += _overall(today, source)
    if (folder / source).exists():
        found += [
            waiting(_vs_asha_name(task), f"{TARGETS[task].speedup:g}x", source, "no GPU") for task in not_run(cells)
        ]
    return found


def against_peers(folder: Path) -> list[Claim]:
    """The test score of what each search hands back in the wall time that `tune` takes, and in four times it."""
    result, found = read(folder / peers.FILE), []
    for task, name, rows, tests in peers.compared([] if result is None else result["rows"]):
        won, *later = [peers.wins(rows, of_budget) for of_budget in tests]
        what = f"`tune` against {name}, each given the time of `tune`: {TASK_NAMES[task]}"
        measured = f"as good or better in {won} of {len(rows)} runs"
        measured += "".join(f"; given four times it, in {then}" for then in later)
        where = machine_of(result["environment"])
        found.append(Claim(what, measured, "more than half", 2 * won > len(rows), where, "peers.md"))
    return found


def _overall(tasks: Cells, source: str) -> list[Claim]:
    """Over all tasks that were measured with today's defaults."""
    found, chance = overall(tasks, "tune"), by_chance(tasks, "tune")
    where = machine([cell for methods in tasks.values() for method in (BASELINE, "tune") for cell in methods[method]])
    lost = ", ".join(TASK_NAMES[task] for task in found.lost)
    of, claim = f"of {found.runs} runs on {len(tasks)} tasks", of_source(source, where)
    what = "`tune` with its present defaults against Ray Tune's ASHA: reaches the validation score of its winner"
    itself = "... the same of Ray Tune's ASHA against itself with another seed, which samples other configurations"
    by_itself = f"{chance.reached:.1f} and {chance.not_worse:.1f} of {chance.runs}"
    not_worse = found.not_worse >= 0.95 * found.runs
    rows = [
        claim(what, f"{found.reached} {of}", "90 %", found.reached >= 0.9 * found.runs),
        claim("... test score worse by no more than the seed spread", f"{found.not_worse} {of}", "95 %", not_worse),
        claim(itself, by_itself),
        claim("... tasks on which it is worse by more in the mean", lost or "none", "none", not lost),
    ]
    if found.sweeps:
        least, most = min(found.sweeps.values()), max(found.sweeps.values())
        sweeps = f"{least:.2g} to {most:.2g}, by task"
        rows.append(claim("... the sweep, in trainings of the winner", sweeps, "at most 0.5", most <= 0.5))
    if "digits" in tasks:
        digits = tasks["digits"]["tune"]
        seconds = spread([_beside_training(cell) for cell in digits])
        what = "... seconds on digits beside training"
        rows.append(claim(what, show(seconds), "below 0.9", seconds.median < 0.9, machine(digits)))
    return rows


def _beside_training(cell: Cell) -> float:
    """Seconds of a search that neither the sweep nor the full-size stage take, and those of measuring widths."""
    apart = cell["apart"]
    return float(cell["wall"] - apart["sweep"] - apart["full size"] + apart["of it measuring widths"])


def replayed(folder: Path) -> list[Claim]:
    """Whether the recorded trainings, on which rules are chosen, say what live runs say."""
    found = agreement_with_live(policies.today, folder / "replay")
    if not found.searches:
        return []
    measured = (
        f"{found.alike} of {found.searches} searches; it is reached in {found.live} live, {found.replayed} replayed"
    )
    what = "Replay and live agree whether `tune` reaches the validation score of ASHA's winner"
    return [Claim(what, measured, "", None, "recorded trainings of seven tasks, 5 seeds each", "replay_notes.md")]


def _vs_asha_name(task: str, base: str = BASELINE) -> str:
    rival = "Ray Tune's ASHA" if base == BASELINE else "ASHA in one process"
    return f"`tune` against {rival}: {TASK_NAMES[task]}"


def own_cost(folder: Path) -> list[Claim]:
    """What the library itself takes, with many trials, GPUs or ranks."""
    result = read(folder / scale.FILE)
    if result is None:
        return []
    found = []
    for name, row in scale.ROWS.items():
        now, before = result["now"].get(name), result["before"].get(name)
        if now is None:
            continue
        measured = scale.shown(now, row) + (f"; before {scale.shown(before, row)}" if before else "")
        target = "" if row.target is None else f"{row.target:g} {row.unit}"
        of = {**result["environment"], **now}
        where = f"{of['cpu']}, {of['cores']} cores; {now['date']}; load {now['load']}"
        found.append(Claim(row.what, measured, target, row.met(now["number"]), where, "scale.md"))
    return found
