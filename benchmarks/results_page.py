"""All benchmarks on one page: each claim with what was to be reached, what was measured, and the file that says so.

    python -m benchmarks.results_page

The page, `RESULTS.md`, is drawn from the result files alone: the full ones, and `results/quick.json`, which
`make bench` (`benchmarks.bench`) rewrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rasda_beyond
from benchmarks.claims import fusion, rasda, shared_devices, tune
from benchmarks.claims.claim import Claim, read_file
from benchmarks.rasda_report import RESULTS

PAGE = Path(__file__).parent / "RESULTS.md"
QUICK = "quick.json"

PARTS = (
    tune.against_asha,
    tune.replayed,
    fusion.throughput,
    fusion.between_versions,
    fusion.compiled,
    fusion.on_a_gpu,
    fusion.ranking,
    rasda.as_published,
    rasda.beyond_the_paper,
    rasda.growing_batches,
    rasda.really_run,
    rasda.on_ray,
    tune.own_cost,
    shared_devices.packed,
    shared_devices.in_bubbles,
)
"""What the page shows, from the top."""


def claims(folder: Path) -> list[Claim]:
    """What the result files of a folder say; a benchmark without a file says nothing."""
    return [claim for part in PARTS for claim in part(folder)]


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
    return page(claims(results), read_file(results / QUICK), [name for name in PICTURES if (results / name).exists()])


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(render(RESULTS))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
