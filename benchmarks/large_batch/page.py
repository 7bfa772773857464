"""The trainings of `large_batch` as tables, and what they say of the default rule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from torch import Tensor
from torch.optim import SGD, AdamW

from benchmarks.large_batch.cells import (
    BATCH,
    EPOCHS,
    EXAMPLES,
    KINDS,
    MILESTONES,
    MOMENTUM,
    RATE_SEEDS,
    RATES,
    RULES,
    SEEDS,
    WORKERS,
    best_rate,
    key,
)
from benchmarks.result_files import Row, spread, table
from hydro_rasda.backends.ray import lr_factor

FILE = "large_batch.json"
NAMES = {
    "digits": "MLP on digits",
    "warm_up": "CNN on digits",
    "recurrent": "LSTM on characters",
    "shakespeare": "transformer on characters",
}


def ratios(rows: Sequence[Row], part: str) -> dict[tuple[str, str, str, int, int], list[float]]:
    """Losses over those of the first batch throughout, a number for each seed.

    Args:
        part: "train_loss" or "val_loss".

    Returns:
        By task, optimizer, rule, warm-up and workers.
    """
    best = {kind: best_rate(rows, *kind) for kind in {(row["task"], row["optimizer"]) for row in rows}}
    used = [r for r in rows if r["seed"] in SEEDS and r["lr"] == best[r["task"], r["optimizer"]]]
    first = {(r["task"], r["optimizer"], r["seed"]): r[part] for r in used if r["workers"] == 1}
    found = defaultdict(list)
    for r in sorted(used, key=lambda r: r["seed"]):
        if r["workers"] > 1:
            ratio = r[part] / first[r["task"], r["optimizer"], r["seed"]]
            found[r["task"], r["optimizer"], r["rule"], r["warmup"], r["workers"]].append(ratio)
    return dict(found)


def verdicts(rows: Sequence[Row], part: str) -> dict[tuple[str, str, int], float]:
    """By optimizer, rule and warm-up: the geometric mean over tasks and workers of the median ratio."""
    logs = defaultdict(list)
    for (_, optimizer, rule, warmup, _), found in ratios(rows, part).items():
        logs[optimizer, rule, warmup].append(math.log(median(found)))
    return {kind: math.exp(sum(of) / len(of)) for kind, of in logs.items()}


def defaults() -> dict[str, str]:
    """By optimizer, the rule that "auto" stands for."""
    found = {}
    for name, kind in (("sgd", SGD), ("adamw", AdamW)):
        optimizer = kind([Tensor(1)], lr=1.0)
        found[name] = next(rule for rule in RULES if lr_factor(2, rule, optimizer) == lr_factor(2, "auto", optimizer))
    return found


def markdown(results: Row) -> str:
    """The tables, with what they say."""
    where, rows, checked = results["environment"], results["rows"], results["check"]
    parts = [
        _HEAD,
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, one thread, Python {where['python']}, torch "
        f"{where['torch']}; {len(rows)} trainings, {sum(row['seconds'] for row in rows) / 60:.0f} minutes. Rerun: "
        "`python -m benchmarks.large_batch`, then `--check`.",
    ]
    if checked is not None:
        parts.append(
            f"A step on k ranks is that of one process with the k-fold batch. As a check, the MLP is trained on 1, 2, "
            f"then 4 gloo processes in double precision: its losses differ by {checked['difference']:.0e} of "
            f"themselves at most. The check covers all {EPOCHS} epochs, both changes of the batch and their warm-ups. "
            "Everything else here is trained in one process."
        )
    if results["overhead"] is not None:
        shown = ". ".join(
            f"{NAMES[task]}: {1000 * taken['more']:.2f} ms to a step of {1000 * taken['step']:.1f} ms"
            for task, taken in results["overhead"].items()
        )
        parts.append(f"Measuring the gradient noise scale on two ranks adds time (medians of pairs). {shown}.")
    parts += ["## All tasks and sizes together", _TOGETHER, table(_together(rows))]
    for part, title in (("val_loss", "Validation loss"), ("train_loss", "Training loss")):
        parts += [f"## {title} over that of the first batch throughout", _EACH, table(_each(rows, part))]
    parts += ["## The first batch throughout", table(_first(rows))]
    return "\n\n".join(parts) + "\n"


def _together(rows: Sequence[Row]) -> list[Row]:
    validation, training = verdicts(rows, "val_loss"), verdicts(rows, "train_loss")
    return [
        {
            "optimizer": optimizer,
            "rule": rule,
            "warm-up": warmup,
            "validation loss": f"{validation[optimizer, rule, warmup]:.3f}",
            "training loss": f"{training[optimizer, rule, warmup]:.3f}",
        }
        for optimizer, rule, warmup in sorted(validation, key=lambda kind: (kind[0], validation[kind]))
    ]


def _each(rows: Sequence[Row], part: str) -> list[Row]:
    found = ratios(rows, part)
    kinds = sorted({kind[:4] for kind in found}, key=lambda kind: (kind[1], kind[0], RULES.index(kind[2]), kind[3]))
    return [
        {"task": NAMES[task], "optimizer": optimizer, "rule": rule, "warm-up": warmup}
        | {f"x{k}": spread(found[task, optimizer, rule, warmup, k]) for k in WORKERS}
        for task, optimizer, rule, warmup in kinds
    ]


def _first(rows: Sequence[Row]) -> list[Row]:
    found = []
    for task, optimizer in KINDS:
        lr = best_rate(rows, task, optimizer)
        of = [r for r in rows if key(r)[:4] == (task, optimizer, lr, 1) and r["seed"] in SEEDS]
        losses = {part: f"{median(r[part] for r in of):.4f}" for part in ("val_loss", "train_loss")}
        found.append({"task": NAMES[task], "optimizer": optimizer, "batch": BATCH[task], "lr": lr, **losses})
    return found


_AT = ", ".join(str(epoch) for epoch in MILESTONES)

_HEAD = f"""# Learning rate and warm-up for a batch that grows with the workers

Each of {EPOCHS} epochs trains on all examples, {EXAMPLES} at most. After {_AT} epochs the batch doubles, up to
2, 4 or 8 times the first one, as in RASDA. The learning rate is multiplied by the growth (linear), by its root (sqrt),
or by 1 (none), at once or over an epoch after each change. It also follows a cosine. It starts at the best rate for the
first batch: the least validation loss over {len(RATES["sgd"])} rates, on {len(RATE_SEEDS)} other seeds. SGD has
momentum {MOMENTUM}. There are {len(SEEDS)} seeds, {KINDS["shakespeare", "adamw"]} for the transformer. Losses are those
of the last epoch, in nats, means over examples. Training losses are taken during the epoch."""

_TOGETHER = """Geometric means over tasks and sizes of what the next two tables have; 1 would be no loss by larger \
batches. Best first."""

_EACH = "Median, least and most of the seeds' ratios; inf where a training diverged."
