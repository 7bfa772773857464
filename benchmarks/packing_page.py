"""The results of `benchmarks.packing` as a page."""

from __future__ import annotations

from statistics import median

from benchmarks.packing_live import ARCHITECTURES, MEMORY, ONE, PLACES, SETTINGS, SEVERAL, WIDTHS
from benchmarks.packing_virtual import ORIGINS
from benchmarks.result_files import Row, spread, table

PAPERS_DECISIONS = {
    (96, 4): {
        "FF": (0.129, 0.88),
        "FFD": (0.163, 0.97),
        "WF": (0.135, 0.91),
        "WFD": (0.171, 0.98),
        "HiGHS": (181.6e3, 0.99),
    },
    (384, 16): {
        "FF": (0.264, 0.97),
        "FFD": (0.298, 0.98),
        "WF": (0.319, 0.97),
        "WFD": (0.332, 1.0),
        "HiGHS": (212.8e3, 1.0),
    },
}
"""By jobs and GPUs and policy, HyperSack's milliseconds and occupancy; its solver was OR-Tools' in place of HiGHS."""


def markdown(results: Row) -> str:
    """The tables, with what they say."""
    parts = [_HEAD]
    if "decisions" in results:
        parts += ["## Decisions", _DECISIONS, _where(results["decisions"]), table(_decisions(results["decisions"]))]
    if "makespan" in results:
        rows = results["makespan"]["rows"]
        parts += ["## Makespan over one job a GPU", _MAKESPAN, _where(results["makespan"]), table(_makespans(rows))]
        parts += ["Share of the devices' compute that is asked for while jobs wait, at most all of it:"]
        parts += [table([{**_named(row), **row["busy"]} for row in rows])]
        origins = [{"what": what, "value": value, "origin": origin} for what, value, origin in ORIGINS]
        parts += ["## Every assumption", table(origins)]
    if "run" in results:
        rows = results["run"]["rows"]
        parts += ["## Really run", _RUN, _where(results["run"]), table(_runs(rows))]
    if there := [results[name] for name in (f"tune-{place}" for place in PLACES) if name in results]:
        parts += ["## Inside `tune`", _TUNE]
        for part in there:
            parts += [_where(part), table(_tuned(part["rows"])), _median(part["rows"])]
        if not any(row[ONE]["device"] == "GPU" for part in there for row in part["rows"]):
            parts += ["On a GPU (two processes with half of it each, and one) it is ready, but has not been run."]
    return "\n\n".join(parts) + "\n"


def _where(part: Row) -> str:
    about = part["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    option = f" Option: `{about['option']}`." if about["option"] else ""
    load = f"load at the start {about['load']}"
    return f"{about['date']}, {about['cpu']}, {about['cores']} cores, {versions}; {load}.{option}"


def _decisions(part: Row) -> list[Row]:
    found = []
    for row in part["rows"]:
        papers = PAPERS_DECISIONS.get((row["jobs"], row["GPUs"]), {})
        for name, measured in row["policies"].items():
            ms, share = papers.get(name, ("", ""))
            found.append(
                {
                    "jobs": row["jobs"],
                    "GPUs": row["GPUs"],
                    "policy": name,
                    "ms": measured["seconds"] * 1000,
                    "occupancy": f"{measured['occupancy']:.1%}",
                    "HyperSack's ms": ms,
                    "HyperSack's occupancy": share if share == "" else f"{share:.0%}",
                }
            )
    return found


def _named(row: Row) -> Row:
    return {"system": row["system"], "neighbour at most": f"{row['neighbour']:.0%}"}


def _makespans(rows: list[Row]) -> list[Row]:
    return [
        {
            **_named(row),
            "unpacked, minutes": row["unpacked_minutes"],
            "HyperSack": row["paper"],
            **row["shorter"],
            "perfect": row["at_most"],
            "ours over WFD [quartiles]": f"{row['ours_over_WFD'][1]:.3f} "
            f"[{row['ours_over_WFD'][0]:.3f}, {row['ours_over_WFD'][2]:.3f}]",
        }
        for row in rows
    ]


def _runs(rows: list[Row]) -> list[Row]:
    return [
        {
            "pair": row["pair"],
            "jobs": row["jobs"],
            "one at a time, s": row["one at a time"]["seconds"],
            "packed, s": row["packed"]["seconds"],
            "times as fast": row["ratio"],
            "killed for memory": row["packed"]["killed"],
            "started again": row["packed"]["started_again"],
            "failed": row["packed"]["failed"],
        }
        for row in rows
    ]


def _tuned(rows: list[Row]) -> list[Row]:
    return [
        {
            "pair": row["pair"],
            "backend": row["place"],
            "device": row[ONE]["device"],
            "trials": row[ONE]["trials"],
            "epochs": f"{row[ONE]['epochs']} and {row[SEVERAL]['epochs']}",
            "one at a time, s": row[ONE]["seconds"],
            "several, s": row[SEVERAL]["seconds"],
            "times as fast": row["ratio"],
            "failed": row[ONE]["failed"] + row[SEVERAL]["failed"],
            "loss of the best": f"{row[ONE]['loss']:.4f} and {row[SEVERAL]['loss']:.4f}",
            "the same trial": "yes" if row[ONE]["best"] == row[SEVERAL]["best"] else "no",
        }
        for row in rows
    ]


def _median(rows: list[Row]) -> str:
    """The median ratio, and whether it is enough."""
    ratios = [row["ratio"] for row in rows]
    verdict = "met" if median(ratios) >= ENOUGH else "**missed**"
    shown = f"{spread(ratios)} times as fast; {ENOUGH} or more: {verdict}."
    return f"`{rows[0]['place']}`, median of {len(ratios)}: {shown}"


ENOUGH = 1.3
"""So many times as fast several at a time are to be as one, as HyperSack's packing is to be on two cores."""

_HEAD = """# Packing jobs on devices

HyperSack's policies (FF, FFD, WF, WFD) and ours (`FastestTogether`), as the library has them. Rerun:
`python -m benchmarks.packing`."""

_DECISIONS = """One decision: all jobs wait, all devices are empty. Medians over profiles drawn, of the least CPU time
of 5 to 200 repeats; HiGHS: of three profiles, for 60 s each at most. Occupancy: the share of all compute that is asked
for. Ours may ask a device for more than it has, where its jobs then get more done: that counts as all of it.
HyperSack's numbers are for its own jobs, which it does not state. Each of our jobs has 22 to 50 % of a device: two or
three fill it without asking for more than there is."""

_MAKESPAN = """How many times as short, in virtual time, as with one job a GPU, as its first device is free: medians
over profiles drawn; 384 jobs. If the shares of jobs sum up to more than a device has, all of them slow down in
proportion. In addition, each neighbour slows a job by a factor that was drawn for the two kinds; "at most" gives its
limit. "Perfect": devices fully busy from the first to the last second, and no interference."""

_RUN = f"""Small classifiers of scikit-learn's digits, of {len(ARCHITECTURES)} architectures and {len(SETTINGS)}
settings, each in its own process. In each pair, `pack` trains them with {MEMORY / 1e9:g} GB for all, and knows nothing
of them. The other run trains them one after another, with a thread for each core. The order in a pair alternates."""

_TUNE = f"""`tune` over the same {len(ARCHITECTURES)} architectures in {len(WIDTHS)} widths each, at full width. No two
of them can be fused (`fusion=1`: nothing is measured to find that out). Trials are halved at each rung, then the
finalists train to the end. Several at a time: all cores are one device, with a trial on each. One at a time: one core.
(With a thread for each core instead, one at a time took 78 to 106 s for the same search on a busy machine. Threads that
wait for each other at every step lose more than a second core brings.) "Load" says what else ran: if the cores are busy
already, there is nothing to gain. Each search has its own process and an empty cache. The order in a pair alternates.
Ray had been started before."""
