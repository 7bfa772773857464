"""All benchmarks on one page: a summary, then the claims of each subject with their targets and sources.

    python -m benchmarks.results_page

The page, `RESULTS.md`, is drawn from the result files alone: the full ones, and `results/quick.json`, which
`make bench` (`benchmarks.bench`) rewrites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import held_out, studies, tune
from benchmarks.claims.claim import Claim, settled
from benchmarks.result_files import RESULTS, read

PAGE = Path(__file__).parent / "RESULTS.md"
QUICK = "quick.json"

SUBJECTS: dict[str, tuple[Callable[[Path], list[Claim]], ...]] = {
    "Tasks that chose no rule": (held_out.held_out,),
    "`tune` against Ray Tune's ASHA": (tune.against_asha, tune.against_peers, settled("folds"), tune.replayed),
    "Rules and schedules of the sweep": (held_out.in_the_replay, settled("searchers", "population", "schedules_live")),
    "Spaces and several metrics": (settled("front", "structures"),),
    "Fusion": (studies.throughput, settled("compiled_steps"), studies.on_a_gpu),
    "Surrogates": (studies.ranking,),
    "RASDA in virtual time": (studies.as_published, settled("rasda_scaling", "rasda_beyond")),
    "Larger batches": (settled("large_batch"),),
    "RASDA and Ray, really run": (studies.really_run, studies.on_ray),
    "Cost of the library itself": (tune.own_cost,),
    "Packing": (studies.packed,),
    "Bubbles of a pipeline": (studies.in_bubbles,),
}
"""The subjects of the page, from the top, and the results of each."""

Subjects = Mapping[str, Sequence[Claim]]


def claims(folder: Path) -> list[Claim]:
    """Return all claims of a folder of results; a benchmark without a file has none."""
    return [claim for found in by_subject(folder).values() for claim in found]


def by_subject(folder: Path) -> dict[str, list[Claim]]:
    """Return the claims of a folder of results by subject."""
    return {subject: [claim for part in parts for claim in part(folder)] for subject, parts in SUBJECTS.items()}


PICTURES = {"rasda_beyond.png": "RASDA and its neighbours in virtual time: GPUs held, run times, GPU hours"}
"""Figures of the folder of results that the page shows."""


def page(full: Subjects, quick: dict[str, Any] | None, pictures: Sequence[str] = ()) -> str:
    """Return the page.

    Args:
        quick: The file that `benchmarks.bench` wrote; None if it never ran.
    """
    parts = [_HEAD, _summary(full, quick)]
    for subject, found in full.items():
        if found:
            parts += [f"## {subject}", _sources(found, "results"), _table(found, subject)]
    parts += [f"![{PICTURES[name]}](results/{name})" for name in pictures]
    if quick is not None:
        left_out = "".join(f" Left out: {reason}." for reason in quick["left_out"])
        found = [Claim(*claim) for claim in quick["claims"]]
        parts += [
            "## Quick run",
            f"`make bench`, {quick['date']}, {quick['minutes']:.1f} minutes, load at its start {quick['load']:.1f}. It "
            "has fewer seeds and shorter measurements. Tasks marked as reduced have fewer examples, trials and epochs. "
            f"It shows that everything runs; its numbers are rougher than those above.{left_out}",
            _sources(found, None),
            _table(found),
        ]
    return "\n\n".join(parts) + "\n"


_HEAD = """# Results

`python -m benchmarks.results_page` draws this page from the source files of each subject. They have the settings, seeds
and versions, and the command that measures each number again. Numbers are medians, with quartiles in brackets. An empty
cell for the machine says that it is the machine of the line above."""

_SIGNS = {True: "met", False: "**missed**", None: ""}


def _summary(full: Subjects, quick: dict[str, Any] | None) -> str:
    """Count met and missed targets by subject."""
    lines = ["| subject | met | missed | not run | |", "|---|---|---|---|---|"]
    sums = [0, 0, 0]
    for subject, found in full.items():
        counts = [
            sum(claim.met is True for claim in found),
            sum(claim.met is False for claim in found),
            sum(claim.measured == "not run" for claim in found),
        ]
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        bar = "■" * counts[0] + "□" * counts[1]
        lines.append(f"| [{subject}](#{_anchor(subject)}) | {' | '.join(map(str, counts))} | {bar} |" if found else "")
    lines.append(f"| **all** | {' | '.join(map(str, sums))} | |")
    told = f"Missed: {sums[1]} of {sums[0] + sums[1]} targets. ■ met, □ missed."
    rows = "\n".join(line for line in lines if line)
    return f"{rows}\n\n{told}" + (" The [quick run](#quick-run) is rougher." if quick is not None else "")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _sources(found: Sequence[Claim], folder: str | None) -> str:
    """Say each source once, with the machines and dates that its claims have in common."""
    machines: dict[str, dict[str, None]] = {}
    for claim in found:
        machines.setdefault(claim.source, {}).setdefault(claim.where)
    lines = []
    for source, where in machines.items():
        link = f"[{source}]({folder}/{source})" if folder else source
        lines.append(f"- {link}" + (f": {next(iter(where))}" if len(where) == 1 and next(iter(where)) else ""))
    return "\n".join(lines)


def _table(found: Sequence[Claim], subject: str = "") -> str:
    """Draw the claims, without the subject; the machine is a column only if a source has several."""
    several = len({(claim.source, claim.where) for claim in found}) > len({claim.source for claim in found})
    lines = ["| | measured | to reach | |" + " machine, date |" * several, "|---|---|---|---|" + "---|" * several]
    said = ""
    for claim in found:
        where = "" if claim.where == said else claim.where
        said = claim.where
        row = f"| {claim.what.removeprefix(f'{subject}: ')} | {claim.measured} | {claim.target} | {_SIGNS[claim.met]} |"
        lines.append(row + f" {where} |" * several)
    return "\n".join(lines)


def render(results: Path) -> str:
    """The page of a folder of results."""
    return page(by_subject(results), read(results / QUICK), [name for name in PICTURES if (results / name).exists()])


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(render(RESULTS))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
