"""The replay table: every configuration of a task at every width, trained to the end; and what it says.

    python -m benchmarks.replay record digits --widths 0.125 1 --seeds 0 1   # goes on where it was stopped
    python -m benchmarks.replay record digits --widths 0.125 1 --sample 3    # what the live search with seed 3 trains
    python -m benchmarks.replay show                                         # which cells are recorded
    python -m benchmarks.replay recall      # where the best configuration is lost
    python -m benchmarks.replay policies    # what policies find, and what they cost
    python -m benchmarks.replay frontier    # which of many policies are best for a budget
    python -m benchmarks.replay foresight   # how much surrogates and early epochs say of the end
    python -m benchmarks.replay live        # policies on the searches that `vs_asha` ran live
    python -m benchmarks.replay few         # whether surrogates pay where configurations are few
    python -m benchmarks.replay horizons    # over how many steps weights should be averaged, by training again
    python -m benchmarks.replay write       # all of it, to results/replay.md and replay.png

    from benchmarks.replay.table import load
    table = load("digits")
    table.score(width=1 / 8, seed=0, config=3, epoch=9, split="validation", ema=True)

Configurations are those that `tune` samples with seed 0; seed s trains with the initial weights and the order of
examples of `tune(seed=s)`. `table.py` has the layout, `tasks.py` the tasks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay import calibration, family, few, live, recall, study
from benchmarks.replay.page import overview, write
from benchmarks.replay.table import FOLDER, recorded, sample_folder
from benchmarks.tasks.load import ON_GPU, TASKS, load_task
from benchmarks.transfer_tasks import DEFAULT_DATA

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
        "recall": ("where the best configuration is lost", recall.page),
        "policies": ("what policies find, and what they cost", study.page),
        "foresight": ("how much surrogates and early epochs say of the end", calibration.page),
        "frontier": ("which of many policies are best for a budget", family.page),
    }
    showing = commands.add_parser("show", help="which cells are recorded")
    asking = [commands.add_parser(name, help=told) for name, (told, _) in pages.items()]
    for command in asking:
        command.add_argument("--keep", choices=["last", "best"], default="last", help="which epoch's weights count")
    asking_live = commands.add_parser("live", help="policies on the searches that were run live")
    asking_few = commands.add_parser("few", help="whether surrogates pay where configurations are few")
    writing = commands.add_parser("write", help="all of it, to a page and a figure beside the tables")
    averaging = commands.add_parser("horizons", help="over how many steps weights should be averaged: trains again")
    averaging.add_argument("--data", type=Path, default=Path(DEFAULT_DATA))
    for command in (recording, showing, asking_live, asking_few, writing, averaging, *asking):
        command.add_argument("--folder", type=Path, default=FOLDER, help="of the tables")
    given = parser.parse_args(arguments)
    if given.command == "record":
        from benchmarks.replay.record import record

        task = load_task(given.task, given.data)
        if given.sample is None:
            record(task, given.widths, given.seeds, given.folder)
        else:
            record(task, given.widths, [given.sample], sample_folder(given.sample, given.folder), given.sample)
    elif given.command == "horizons":
        from benchmarks.replay import horizons

        print(horizons.write(recorded(given.folder), given.data, given.folder))
    elif given.command == "live":
        searches = live.setups(given.folder)
        print(live.page(searches), live.agreements(searches), sep="\n\n")
    elif given.command == "few":
        print(few.page(recorded(given.folder)))
    elif given.command == "write":
        print(write(given.folder))
    elif given.command == "show":
        print(overview(recorded(given.folder)))
    else:
        print(pages[given.command][1](recorded(given.folder), given.keep))


if __name__ == "__main__":
    main()
