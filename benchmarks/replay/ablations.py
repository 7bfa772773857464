"""What each part of today's rule is worth: the rule with one thing changed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.replay.bring_back import BringBack
from benchmarks.replay.policies import Policy, Tune, halved, swept, today
from benchmarks.replay.study import RESAMPLES, comparable, compared
from benchmarks.replay.table import Table
from benchmarks.replay.truth import Keep

ABLATIONS: dict[str, Policy] = {
    "nothing: today's rule": today,
    "no prior: finalists race by their own scores alone": Tune(prior=False),
    "finalists that are unlikely to be the best go on": Tune(stop_unlikely=False),
    "first look after a quarter of a training instead of a ninth": Tune(first_look=1 / 4),
    "the sweep goes on to the end of a training": Tune(swept_to_end=True),
    "six finalists (`top_k=6`)": Tune(finalists=6),
    "`full_trainings=2.5`": Tune(full_trainings=2.5),
    "first rung at epoch 3 (`grace_period=3`)": Tune(grace_period=3),
    "first rung at epoch 9 (`grace_period=9`)": Tune(grace_period=9),
    "each schedule keeps its share at the sweep's rungs": Tune(by_schedule=True),
    "the sweep at full width (`surrogate=1`)": Tune(width=1.0),
    "two more join after the first look, by a regression over learning rates": BringBack(2, "rate"),
    "... over all that is sampled and the train-validation gap": BringBack(2, "all"),
    "... over learning rates, where widths rank finalists the other way": BringBack(2, "rate", below=0.0),
    "averaged weights (EMA) rank the sweep, too": Tune(ema=True),
    "halved to one (`full_trainings=0`)": halved,
    "four to the end (`full_trainings=4`)": Tune(full_trainings=4),
    "no race: the sweep's best two to the end": swept(2),
}
ENDS: tuple[Keep, ...] = ("best", "last")
WEIGHTS: dict[str, Keep] = {
    "full size: of each epoch its own weights or the averaged ones, whichever validate better": "better",
    "full size: no averaged weights (`ema=0`)": "own",
}
"""Today's rule, where other weights count."""


def page(tables: Mapping[str, Table], resamples: int = RESAMPLES) -> str:
    """Means over tasks for each change, under either way to keep weights."""
    ready = comparable(tables)
    if not ready:
        return ""
    best, last = ([compared(table, ABLATIONS, keep, resamples) for table in ready.values()] for keep in ENDS)
    for row, table in zip(best, ready.values()):
        for name, keep in WEIGHTS.items():
            row |= compared(table, {name: today}, keep, resamples)
    head = ["changed"]
    for keep in ENDS:
        head += [f'`keep="{keep}"`: cost', "regret", "test not worse by 1", "reaches ASHA's"]
    lines = [f"Means over {len(ready)} tasks: {', '.join(ready)}.", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name in (*ABLATIONS, *WEIGHTS):
        cells = []
        for rows in (best, last):
            if name not in rows[0]:  # where the last epoch's weights count, nothing is averaged
                cells += [""] * 4
                continue
            cost, regret, _, not_worse, reaches = np.mean([row[name] for row in rows], 0)
            cells += [f"{cost:.2f}", f"{regret:.2f}", f"{not_worse:.0%}", f"{reaches:.0%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
