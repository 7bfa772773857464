"""The replay table: every configuration of a task at every width, trained to the end; and what it says.

    python -m benchmarks.replay record digits --widths 0.125 1 --seeds 0 1   # goes on where it was stopped
    python -m benchmarks.replay record digits --widths 0.125 1 --sample 3    # what the live search with seed 3 trains
    python -m benchmarks.replay write                                        # results/replay.md and replay.png
    python -m benchmarks.replay ladder                                       # results/replay_ladder.md

    from benchmarks.replay.table import load
    table = load("digits")
    table.score(width=1 / 8, seed=0, config=3, epoch=9, split="validation", ema=True)

Configurations are those that `tune` samples with seed 0; seed s trains with the initial weights and the order of
examples of `tune(seed=s)`. `table.py` has the layout.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.replay import anytime, ladder, live, yardsticks
from benchmarks.replay.table import FOLDER, Table, pooled, sample_folder
from benchmarks.result_files import DEFAULT_DATA, texts
from benchmarks.tasks.load import ON_GPU, TASKS, load_task

WIDTHS = (1 / 8, 1.0, 1 / 4, 1 / 2)
NOTES = "replay_notes.md"


def overview(tables: Mapping[str, Table]) -> str:
    """Return a table: for each task, width and seed, the number of recorded configurations, and their CPU minutes."""
    lines = ["| task | width | seed | configurations | CPU minutes |", "|---|---|---|---|---|"]
    for name, table in tables.items():
        for i, width in enumerate(table.about.widths):
            for j, seed in enumerate(table.about.seeds):
                there = table.recorded[i, j]
                minutes = table.seconds[i, j][there].sum() / 60
                lines.append(f"| {name} | {width:g} | {seed} | {there.sum()} of {len(there)} | {minutes:.1f} |")
    return "\n".join(lines)


def write(folder: Path = FOLDER) -> Path:
    """Draw the page and its figure beside the folder of the tables."""
    tables, path = pooled(folder), folder.parent / "replay.md"
    environments = {json.dumps(e, sort_keys=True) for table in tables.values() for e in table.about.environments}
    parts = ["# Replay", "", f"Drawn by `python -m benchmarks.replay write`; [what was tried on it]({NOTES}).", ""]
    parts += ["Recorded with:", "", *(f"- `{told}`" for told in sorted(environments)), "", overview(tables), ""]
    searches = live.setups(folder)
    found = (
        yardsticks.page(tables),
        yardsticks.probabilities(tables),
        anytime.page(tables, path.with_suffix(".png")),
        "\n\n".join([live.page(searches), live.agreements(searches)]),
    )
    for (title, told), drawn in zip(texts("replay").items(), found, strict=True):
        parts += [f"## {title}", "", told, "", drawn.strip(), ""]
    path.write_text("\n".join(parts).rstrip() + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, or write what the tables say."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train what a task's table lacks")
    recording.add_argument("task", choices=[task for task in TASKS if task not in ON_GPU])
    recording.add_argument("--widths", type=float, nargs="+", default=list(WIDTHS))
    recording.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    recording.add_argument("--sample", type=int, help="the live searches' configurations and weights of this seed")
    recording.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    writing = commands.add_parser("write", help="what they say, to a page and a figure beside them")
    climbing = commands.add_parser("ladder", help="what a middle heat would find and cost, to a page beside them")
    for command in (recording, writing, climbing):
        command.add_argument("--folder", type=Path, default=FOLDER, help="of the tables")
    given = parser.parse_args(arguments)
    if given.command == "write":
        print(write(given.folder))
        return
    if given.command == "ladder":
        print(ladder.write(given.folder))
        return
    from benchmarks.replay.record import record

    task = load_task(given.task, given.data)
    if given.sample is None:
        record(task, given.widths, given.seeds, given.folder)
    else:
        record(task, given.widths, [given.sample], sample_folder(given.sample, given.folder), given.sample)


if __name__ == "__main__":
    main()
