"""What a long night brings: many searches in one process, many trials in one search, kills at random moments.

    python -m benchmarks.endurance [searches] [trials] [kills] ["kills on Ray"] [--count N] [--seconds S]

`searches` runs one small search after another in one process, `trials` one search of many trials, and both say what the
process holds as they go: memory, open files, threads, processes, files in the temporary folder. `kills` has a search
with dropout killed at random moments, its driver or one of the processes forked of it, until it ends, and compares
what it found, journal and weights, with what an unbroken one found; `kills on Ray` likewise, there also an actor, a
rank or the fork server. Kills are added to those of an earlier call, up to N, so that they can be spread over several.
Result files: `results/endurance.json` and `.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks.result_files import Row, columns, environment, options, read, save, texts, versions
from hydro_rasda import RaceConfig, RayBackend, SweepConfig, TuneResult, choice, load, loguniform, tune, uniform

_OF_RAY = (
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "ray/_private/workers/default_worker.py",
    "ray/_private/runtime_env/agent/main.py",
    "ray/dashboard/agent.py",
)
"""Ends of words in the commands of Ray's own processes: agents, and workers that still start and have no name yet."""


class ProcessGroup:
    """The processes of a run: its driver, the children of the driver, and on Ray actors, fork servers and ranks."""

    def __init__(self, driver: psutil.Process) -> None:
        self._driver = driver
        self._seen: set[psutil.Process] = set()
        self.agents: set[psutil.Process] = set()
        """Ray's own processes. They check from time to time whether the processes that they serve still run, and end
        half a minute after these. Workers that still start are included. They check once they are ready."""

    def note(self) -> dict[str, list[psutil.Process]]:
        """Return the processes that run now, by kind."""
        found: dict[str, list[psutil.Process]] = {"driver": [self._driver], "child": [], "actor": [], "rank": []}
        others = self._driver.children(recursive=True) if self._driver.is_running() else []
        pids = {str(other.pid) for other in others}
        for other in psutil.process_iter(["cmdline"]):
            words = other.info["cmdline"] or [""]
            if "hydro_rasda.backends.ray.fork_server" in words and words[-1] in pids:
                found["rank"].append(other)  # forked by the fork server, or the fork server itself
        for other in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                words = other.cmdline() or [""]
                if any(word.strip().endswith(_OF_RAY) for word in words):  # raylet has them inside a word
                    self.agents.add(other)
                elif words[0].startswith("ray::") and "IDLE" not in words[0]:
                    found["actor"].append(other)
                elif words == self._driver.cmdline():
                    found["child"].append(other)
        self._seen |= {self._driver, *others, *found["rank"]}
        return found

    def kill_one(self, rng: random.Random) -> str:
        """Kill a random process, and return its kind."""
        found = {kind: those for kind, those in self.note().items() if those}
        kind = rng.choice(sorted(found))
        try:
            rng.choice(found[kind]).send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return "none, as it had ended"
        return kind

    def left(self) -> int:
        """Count the processes seen so far that do not end within 15 seconds after the driver."""
        return count_alive(self._seen - self.agents, 15)


def count_alive(processes: Iterable[psutil.Process], seconds: float) -> int:
    """Count the processes that are still alive after `seconds`, and print their commands."""
    _, late = psutil.wait_procs(processes, timeout=seconds)
    alive = 0
    for other in late:
        with contextlib.suppress(psutil.NoSuchProcess):
            if other.status() != psutil.STATUS_ZOMBIE:
                alive += other.is_running()
                print(f"left after {seconds:g} s: {' '.join(other.cmdline())[:200]}", file=sys.stderr)
    return alive


FILE = "endurance.json"
GROWTH = 0.05
"""Memory may grow by this share from the second quarter of the readings to the last, while the allocator settles."""

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(256, 16, generator=_GENERATOR)
Y = X[:, :4].argmax(1)


def model_fn(config: dict[str, Any], width_ratio: float = 1.0) -> nn.Module:
    """Build a small MLP with dropout."""
    width = int(64 * width_ratio)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Dropout(config["dropout"]), nn.Linear(width, 4))


def search(folder: Path, name: str, **changes: Any) -> TuneResult:
    """Run a search of a second or two."""
    space = {"lr": loguniform(1e-3, 1), "dropout": uniform(0.0, 0.3), "optimizer": choice(["sgd", "adamw"])}
    settings = {
        "num_samples": 12,
        "max_t": 9,
        "race": RaceConfig(top_k=3, checkpoint_every=1),
        "sweep": SweepConfig(surrogate=1 / 4, fusion=4),
    }
    data: dict[str, Any] = {"train_data": (X[:192], Y[:192]), "val_data": (X[192:], Y[192:])}
    return tune(model_fn, space, **data, storage_path=folder, name=name, progress=False, **{**settings, **changes})


def held(folder: Path) -> dict[str, float]:
    """Return the resources that this process holds now."""
    process = psutil.Process()
    return {
        "MB": process.memory_info().rss / 1e6,
        "open files": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(process.children(recursive=True)),
        "temporary files": len(os.listdir(folder)),
    }


def flat(readings: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return each quantity's median in the second and the last quarter of the readings, and which quantities grew."""
    quarter = max(1, len(readings) // 4)
    parts = readings[quarter : 2 * quarter], readings[-quarter:]
    found = {name: [round(median(r[name] for r in part), 1) for part in parts] for name in readings[0]}
    # Counts may differ by one, because something may be under way when a reading is taken.
    most = {name: before * (1 + GROWTH) if name == "MB" else before + 1 for name, (before, _) in found.items()}
    grown = [name for name, (_, after) in found.items() if after > most[name]]
    return {"second and last quarter": found, "grown": grown}


def searches(count: int, seconds: float, earlier: Row) -> Row:
    """Run searches one after another in this process, up to `count` or until the time is over."""
    until, readings = time.monotonic() + seconds, list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder, temporary(Path(folder, "tmp")) as files:
        while len(readings) < count and time.monotonic() < until:
            search(Path(folder), f"run-{len(readings)}", max_t=3, num_samples=8, seed=len(readings))
            readings.append(held(files))
    return {"searches": len(readings), **flat(readings)}


def trials(count: int, seconds: float, earlier: Row) -> Row:
    """Run one search of many trials, and take a reading after each group. A time budget ends the search."""
    readings = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder, temporary(Path(folder, "tmp")) as files:
        checkpoints = Path(folder, "run", "checkpoints")

        def look(event: object) -> None:
            if type(event).__name__ == "CheckpointSaved":
                readings.append({**held(files), "checkpoints": len(list(checkpoints.glob("*.pt")))})

        settings = {
            "num_samples": count,
            "max_t": 3,
            "sweep": SweepConfig(surrogate=1 / 4, fusion=32),
            "race": RaceConfig(top_k=3),
        }
        result = search(Path(folder), "run", **settings, callbacks=[look], time_budget_s=seconds)
        left = len(list(checkpoints.glob("*.pt")))
    begun = sum(trial.status != "not begun" for trial in result.trials)
    told = flat(readings)
    # Each group that will continue keeps a checkpoint, so the number of checkpoints may grow.
    told["grown"] = [name for name in told["grown"] if name != "checkpoints"]
    most = max(reading["checkpoints"] for reading in readings)
    return {"trials": begun, "checkpoints at most": most, "checkpoints left": left, **told}


def kills(count: int, seconds: float, earlier: Row, on_ray: bool = False) -> Row:
    """Kill runs at random moments, and start them again until they end. Compare them with an unbroken run."""
    count -= (before := sum(earlier.get("kills", {}).values()))
    rng, until = random.Random(before), time.monotonic() + seconds
    killed, orphans, agents = Counter[str](), 0, set[psutil.Process]()
    with tempfile.TemporaryDirectory(prefix="e-") as name:  # paths of Ray's sockets in it must be short
        folder = Path(name)
        (folder / "tmp").mkdir()
        for run in ("warm", "whole"):  # "warm" measures group widths, and loads torch from the disk
            started = time.monotonic()
            _started(folder, run, on_ray).wait()
        usual, whole = time.monotonic() - started, _found(folder / "whole")
        runs = equal = 0
        while killed.total() < count and time.monotonic() < until:
            run, over = f"broken-{runs}", False
            while not over:
                process = _started(folder, run, on_ray)
                group = ProcessGroup(psutil.Process(process.pid))
                goes_on = killed.total() >= count or time.monotonic() > until
                try:
                    over = process.wait(None if goes_on else rng.uniform(0.3, 1.0) * usual) == 0
                except subprocess.TimeoutExpired:
                    killed[group.kill_one(rng)] += 1
                    group.note()
                    over = process.wait() == 0
                orphans += group.left()
                agents |= group.agents
            runs += 1
            equal += _found(folder / run) == whole
        orphans += count_alive(agents, 120)
        files = len(list((folder / "tmp").glob("hydro_rasda-of-*")))
    told = {"runs": runs, "equal": equal, "processes left behind": orphans, "temporary checkpoints left behind": files}
    added = {name: value + earlier.get(name, 0) for name, value in told.items()}
    return {"kills": dict(killed + Counter(earlier.get("kills", {}))), **added}


def kills_on_ray(count: int, seconds: float, earlier: Row) -> Row:
    """Do the same on a Ray cluster of two workers. Its actors are killed, too, and the ranks of the last finalist."""
    return kills(count, seconds, earlier, on_ray=True)


ON_RAY: dict[str, Any] = {
    "backend": RayBackend(resources_per_worker={"CPU": 1}),
    # With one finalist, and trials that train by themselves, the result does not depend on which process is first.
    "sweep": SweepConfig(surrogate=1, fusion=1),
    "race": RaceConfig(top_k=1, checkpoint_every=1, grace_period=3, max_workers=2),
}


def _started(folder: Path, name: str, on_ray: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.endurance", "one", "--folder", str(folder), "--name", name]
    environ = {**os.environ, "TMPDIR": str(folder / "tmp"), "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "said").open("ab") as said:
        return subprocess.Popen([*command, *["--ray"] * on_ray], stdout=said, stderr=said, env=environ)


def _found(folder: Path) -> tuple[Any, ...]:
    """Return all results of a run, weights included, as values to compare."""
    result = load(folder)
    weights = {name: value.tolist() for name, value in result.best_model(model_fn=model_fn).state_dict().items()}
    return result.best_config, result.best_metric, [(t.status, t.history) for t in result.trials], weights


@contextlib.contextmanager
def temporary(folder: Path) -> Any:
    """Use a separate folder for temporary files, so that files that are left behind can be seen."""
    folder.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield folder
    finally:
        tempfile.tempdir = before


MEASURES = {
    "searches": (searches, 100),
    "trials": (trials, 10_000),
    "kills": (kills, 50),
    "kills on Ray": (kills_on_ray, 50),
}


def markdown(result: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    about, rows = result["environment"], []
    where = f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, torch {about['versions']['torch']}."
    for name, row in result["rows"].items():
        words = _kills_in_words if "kills" in row["found"] else _growth_in_words
        rows.append([name, row["asked"], *words(row["found"]), f"{row['date']}, `{row['command']}`"])
    drawn = columns(["what", "asked for", "done", "found", "when, and by"], rows)
    return f"# Endurance\n\n{where} {texts('endurance')['head']}\n\n{drawn}\n"


def _kills_in_words(found: Row) -> tuple[str, str]:
    who = ", ".join(f"{kind} {times}" for kind, times in found["kills"].items())
    done = f"{sum(found['kills'].values())} kills ({who}) of {found['runs']} runs"
    left = "; ".join(f"{name}: {number}" for name, number in found.items() if name.endswith("left behind"))
    return done, f"{found['equal']} of {found['runs']} equal to an unbroken run; {left}"


def _growth_in_words(found: Row) -> tuple[str, str]:
    kept = "second and last quarter"
    told = [f"{name} {first:g} and {last:g}" for name, (first, last) in found[kept].items()]
    plain = [f"{name} {n:,}" for name, n in found.items() if isinstance(n, int) and name not in ("searches", "trials")]
    done = f"{found.get('searches', found.get('trials')):,}"
    rest = "; ".join([*plain, f"grown: {', '.join(found['grown']) or 'none'}"])
    return done, f"{kept.capitalize()}: {', '.join(told)}. {rest[0].upper()}{rest[1:]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result files."""
    parser = options(__doc__)
    parser.add_argument("rows", nargs="*", choices=[*MEASURES, "one"], metavar="row")
    parser.add_argument("--count", type=int, help="how many; else as the row says")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no further one begins")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--ray", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rows == ["one"]:
        search(Path(given.folder), given.name, **(ON_RAY if given.ray else {}))
        return
    path = given.out / FILE
    result: dict[str, Any] = read(path, {"rows": {}})
    result["environment"] = environment(versions=versions("torch", "ray", "numpy"))
    for name in given.rows or MEASURES:
        measure, asked = MEASURES[name]
        earlier = result["rows"].get(name, {}).get("found", {})
        result["rows"][name] = {
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["python -m benchmarks.endurance", *(arguments or sys.argv[1:])]),
            "asked": given.count or asked,
            "found": measure(given.count or asked, given.seconds, earlier),
        }
        print(name, result["rows"][name], flush=True)
        save(path, result, markdown(result))


if __name__ == "__main__":
    main()
