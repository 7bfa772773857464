"""The replay table: every configuration of a task at every width, trained to the end; and what it says.

    python -m benchmarks.replay record digits --widths 0.125 1 --seeds 0 1   # goes on where it was stopped
    python -m benchmarks.replay record digits --widths 0.125 1 --sample 3    # what the live search with seed 3 trains
    python -m benchmarks.replay show                                         # which cells are recorded
    python -m benchmarks.replay yardsticks   # what rules find, what they cost, and which each half of the tasks chooses
    python -m benchmarks.replay calibration  # whether stated probabilities hold
    python -m benchmarks.replay live         # policies on the searches that `vs_asha` ran live
    python -m benchmarks.replay write        # all of it, to results/replay.md and replay.png

    from benchmarks.replay.table import load
    table = load("digits")
    table.score(width=1 / 8, seed=0, config=3, epoch=9, split="validation", ema=True)

Configurations are those that `tune` samples with seed 0; seed s trains with the initial weights and the order of
examples of `tune(seed=s)`. `table.py` has the layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay import calibration, live, yardsticks
from benchmarks.replay.page import overview, write
from benchmarks.replay.table import FOLDER, recorded, sample_folder
from benchmarks.result_files import DEFAULT_DATA
from benchmarks.tasks.load import ON_GPU, TASKS, load_task

WIDTHS = (1 / 8, 1.0, 1 / 4, 1 / 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, or print what the tables say."""
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
    pages = {
        "yardsticks": ("what rules find, and what they cost", yardsticks.page),
        "calibration": ("whether stated probabilities hold", calibration.page),
    }
    asking = [commands.add_parser(name, help=told) for name, (told, _) in pages.items()]
    asking += [commands.add_parser("show", help="which cells are recorded")]
    asking += [commands.add_parser("live", help="policies on the searches that were run live")]
    asking += [commands.add_parser("write", help="all of it, to a page and a figure beside the tables")]
    for command in (recording, *asking):
        command.add_argument("--folder", type=Path, default=FOLDER, help="of the tables")
    given = parser.parse_args(arguments)
    if given.command == "record":
        from benchmarks.replay.record import record

        task = load_task(given.task, given.data)
        if given.sample is None:
            record(task, given.widths, given.seeds, given.folder)
        else:
            record(task, given.widths, [given.sample], sample_folder(given.sample, given.folder), given.sample)
    elif given.command == "live":
        searches = live.setups(given.folder)
        print(live.page(searches), live.agreements(searches), sep="\n\n")
    elif given.command == "write":
        print(write(given.folder))
    elif given.command == "show":
        print(overview(recorded(given.folder)))
    else:
        print(pages[given.command][1](recorded(given.folder)))


if __name__ == "__main__":
    main()
