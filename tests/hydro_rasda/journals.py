"""Runs of any size as their folders would be, written without training: what they score is a closed form."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydro_rasda import RaceConfig, choice, loguniform, uniform
from hydro_rasda.history.history import FINALISTS
from hydro_rasda.history.lines import JournalLine, failure_line, metric_lines
from hydro_rasda.records.record_from_journal import read_record
from hydro_rasda.records.records import RunRecord
from hydro_rasda.run.journal import JOURNAL, RUN, encoded
from hydro_rasda.run.run_json import FORMAT, determining
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.space.space import describe

SCRIPT = "<script>document.title='taken over'</script>"

SPACE: dict[str, Any] = {
    "lr": loguniform(1e-4, 1),
    "optimizer": choice(["sgd", "adamw"]),
    "activation": choice(["relu", SCRIPT]),
    "dropout": uniform(0, 0.5),
}


def score(config: dict[str, Any], epoch: int, narrow: bool) -> float:
    """Best near lr 0.01, better with adamw, better with time; infinite for large rates of SGD."""
    if config["optimizer"] == "sgd" and config["lr"] > 0.5:
        return math.inf
    off: float = (
        (math.log10(config["lr"]) + 2) ** 2 / 4 + 0.1 * (config["optimizer"] == "sgd") + 0.05 * config["dropout"]
    )
    return (0.2 if narrow else 0.1) + off + 1 / epoch


def signed(lines: Iterable[JournalLine]) -> bytes:
    """A journal of lines that a test has made or changed, with the checksums that a run would write."""
    written, total, unit = b"", 0, list[JournalLine]()
    for line in lines:
        own = {name: value for name, value in line.items() if name != "sum"}
        if line["event"] == "unit":
            added, total = encoded(unit, own, total)
            written, unit = written + added, []
        else:
            unit.append(own)
    return written


def with_live(lines: Iterable[JournalLine]) -> list[JournalLine]:
    """Return the lines of a journal whose epochs at full size were written one by one, while they trained."""
    found, unit = list[JournalLine](), list[JournalLine]()
    for line in lines:
        if line["event"] != "unit":
            unit.append(line)
            continue
        if line["key"].startswith("race/trial-"):
            of, _, _ = line["key"].rpartition("/")
            live = [each for each in unit if each["event"] == "metrics"]
            unit = [each for each in unit if each["event"] != "metrics"]
            for each in live:
                own = {"key": f"{of}/at-{each['epoch']}", "value": None, "seconds": 0.0}
                found += [each, {**line, **own}]
        found += [*unit, line]
        unit = []
    return found


_ID = "of-a-test"


def asked(settings: TuneConfig) -> dict[str, Any]:
    """The content of the `run.json` of a run with these settings."""
    return {
        **determining(settings),
        "space": describe(SPACE),
        "searcher": None,
        "sweep_rule": "halving",
        "train_data": "tensors (100, 8) float32",
        "val_data": "tensors (100, 8) float32",
        "model": {"0.weight": "(8, 8) torch.float32"},
        "python": "3.11.7",
        "digests": {},
    }


class Writer:
    """Writes a run's folder, unit by unit; time passes as it is told."""

    def __init__(self, folder: Path, settings: TuneConfig) -> None:
        self.folder, self.settings, self.at, self._sum = folder, settings, 0.0, 0
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"format": FORMAT, "id": _ID, **asked(settings)}))
        (folder / JOURNAL).touch()

    def unit(
        self,
        key: str,
        value: Any,
        lines: Iterable[JournalLine] = (),
        seconds: float = 0.0,
        left: float | None = None,
    ) -> None:
        self.at += seconds
        own = {"event": "unit", "key": key, "seconds": seconds, "at": self.at, "swept": self.at, "value": value}
        own |= {} if left is None else {"left": left}
        named = [] if self._sum else [{"event": RUN, "id": _ID}]
        written, self._sum = encoded([*named, *lines], own, self._sum)
        with (self.folder / JOURNAL).open("ab") as file:
            file.write(written)

    @property
    def record(self) -> RunRecord:
        return read_record(self.folder)


def epochs(heat: Any, number: int, config: dict[str, Any], start: int, stop: int) -> list[JournalLine]:
    """A trial's lines; its scores are null where it diverged."""
    narrow = heat == "sweep"
    values = [(t, score(config, t, narrow)) for t in range(start + 1, stop + 1)]
    told = [(t, v if math.isfinite(v) else None) for t, v in values]
    return metric_lines(heat, number, [(t, {"train_loss": v, "val_loss": v}) for t, v in told])


def write_run(
    folder: Path,
    num_samples: int = 27,
    width: int = 4,
    rungs: int = 3,
    full: bool = True,
    fails: Callable[[int], bool] = lambda number: number == 5,
) -> RunRecord:
    """A run of successive halving over `num_samples`, in groups of `width`, to `rungs` rungs, then at full size.

    Args:
        folder: Where.
        num_samples: Trials.
        width: Of a group.
        rungs: Of the sweep, at epochs 1, 3 and 9; fewer leave the run interrupted.
        full: Whether the finalists train, too.
        fails: Which trials raise in their first epoch.
    """
    writer = Writer(folder, TuneConfig(num_samples=num_samples, max_t=27, race=RaceConfig(top_k=3)))
    draw = random.Random(0)
    configs = [
        {
            "lr": 10 ** draw.uniform(-4, 0),
            "optimizer": draw.choice(["sgd", "adamw"]),
            "activation": draw.choice(["relu", SCRIPT]),
            "dropout": draw.uniform(0, 0.5),
        }
        for _ in range(num_samples)
    ]
    told = [{"event": "trial", "trial": n, "config": config} for n, config in enumerate(configs)]
    writer.unit("sweep/kinds-from-0", {str(n): "a" for n in range(num_samples)}, told, 0.5)
    left, start = list(range(num_samples)), 0
    writer.unit("sweep/admitted-from-0", {"trials": left, "samples": num_samples})
    writer.unit(f"sweep/begin/of-{num_samples}-0", [[n, 1] for n in left])
    for stop in (1, 3, 9)[:rungs]:
        for i in range(0, len(left), width):
            group = left[i : i + width]
            lines = [line for n in group if not fails(n) for line in epochs("sweep", n, configs[n], start, stop)]
            lines += [failure_line(n, f"Traceback:\nValueError: {SCRIPT} in trial {n}") for n in group if fails(n)]
            value = {"members": group, "stop": stop, "groups": [group[::2], group[1::2]] if len(group) > 1 else [group]}
            writer.unit(f"sweep/to-{stop}/from-{start}/group-{group[0]}", value, lines, (stop - start) * 0.5)
        alive = [n for n in left if not fails(n) and math.isfinite(score(configs[n], stop, True))]
        ranked = sorted(alive, key=lambda n: score(configs[n], stop, True))
        kept = ranked[: max(3, len(ranked) // 3)] if stop < 9 else ranked[:3]
        moves = [[n, 3 * stop if n in kept and stop < 9 else None] for n in left]
        writer.unit(f"sweep/to-{stop}/kept/of-{len(left)}-{stop}", moves)
        left, start = kept, stop
    if rungs == 3 and left:
        finalists = left
        writer.unit(FINALISTS, finalists)
        for start, stop in ((0, 3), (3, 27)) if full else ():
            for n in left:
                lines = epochs("race", n, configs[n], start, stop)
                writer.unit(f"race/trial-{n}/to-{stop}", {"checkpoint": f"race/trial-{n}/to-{stop}"}, lines, 3.0)
            left = left[:1]
        if full:
            writer.unit("race/done", sorted(finalists))
    return writer.record


def runs_of_all_sorts(folder: Path) -> dict[str, RunRecord]:
    """A run for each way in which one can be."""
    nothing = Writer(folder / "empty", TuneConfig(num_samples=4))
    return {
        "over": write_run(folder / "over"),
        "interrupted": write_run(folder / "interrupted", rungs=2),
        "swept": write_run(folder / "swept", full=False),
        "single": write_run(folder / "single", num_samples=1, fails=lambda number: False),
        "failed": write_run(folder / "failed", num_samples=12, rungs=1, fails=lambda number: True),
        "empty": nothing.record,
        "large": write_run(folder / "large", num_samples=2_000, width=8),
    }
