"""The searches that a user would pick instead, each given the wall time that `tune` takes, and four times it.

    python -m benchmarks.peers [--tasks digits cifar10] [--seeds 0 1 2 3 4] [--full-trainings 3 2 1] [--data FOLDER]
        [--out FOLDER]

Of a seed, `tune` runs first, as `benchmarks.vs_asha` runs it; then with `time_budget_s` at a half and a quarter of the
time that it took. Then the others run one after another: Ray Tune's ASHA, Syne Tune's (`pip install syne-tune`, else
it is left out), Optuna's TPE with its Hyperband pruner, and Optuna's random search, all in two processes. A search
that is out of time hands back the best epoch so far by the validation score. For the others this is generous, as it
takes a checkpoint of each epoch. The test score of what is handed back counts. Searches that are there are not run
again. On the wide tasks this would take days. There, and where `tune` has another budget of `full_trainings` than its
default, Optuna's searches get the time of `tune` alone, which runs just before them. The cells of `benchmarks.vs_asha`
say what ASHA in one process had in the time that `tune` took on wide tasks, and in four times it. It rewrites
`peers.{json,md}`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cloudpickle
import torch

from benchmarks.result_files import Row, columns, environment, options, read, save
from benchmarks.tasks.load import TASKS, load_task
from benchmarks.tasks.task import Task
from benchmarks.vs_asha.methods import hydro_rasda
from benchmarks.vs_asha.ray import ray_asha
from benchmarks.vs_asha.report import TASK_NAMES
from benchmarks.vs_asha.search import REDUCTION_FACTOR, Event, seeds
from benchmarks.vs_asha.training import build, scores, train
from hydro_rasda.records.optuna_study import distribution
from hydro_rasda.settings.config import FULL_TRAININGS
from hydro_rasda.space.space import describe, tuned

FILE = "peers.json"
BUDGETS = (1, 4)
"""Time budgets of other searches, as multiples of the wall time that `tune` takes."""
SHARES = (0.5, 0.25)
"""Shares of the wall time of `tune` that `tune` gets as `time_budget_s` in further runs."""
PARTS = (0.25, 0.5, 0.75, 1)
"""Shares of the wall time of `tune` after which, on wide tasks, the models in hand are compared."""
OURS = "`tune`"
PROCESSES = min(2, len(os.sched_getaffinity(0)))
IN_ONE_PROCESS = "ASHA, one after another"


class Scored(NamedTuple):
    """An epoch of a full-size model: seconds since the search began, and its scores."""

    seconds: float
    score: float
    test: float


def handed_back(epochs: Sequence[Scored], seconds: float, mode: str) -> float | None:
    """Return the test score of the epoch with the best validation score within `seconds`; None if there is none."""
    sign = 1 if mode == "max" else -1
    there = [epoch for epoch in epochs if epoch.seconds <= seconds and math.isfinite(epoch.score)]
    return max(there, key=lambda epoch: sign * epoch.score).test if there else None


def in_hand(epochs: Sequence[Scored], seconds: float, mode: str) -> list[float | None]:
    """Return the test scores of the models that a search would hand back after each of `PARTS` of this time."""
    return [handed_back(epochs, part * seconds, mode) for part in PARTS]


def ours_in_hand(epochs: Sequence[Scored], row: Row) -> list[float | None]:
    """Return `in_hand` for `tune`, but with the model that `tune` itself chooses in the end as the last one."""
    return [*in_hand(epochs, row["seconds"], row["mode"])[:-1], row[OURS]]


def full_size(events: Iterable[Event]) -> list[Scored]:
    """Return the epochs of full-size models."""
    return [Scored(event.seconds, event.score, event.test) for event in events if event.full_size]


def of_ray(task: Task, seed: int, seconds: float) -> list[Scored]:
    """Run Ray Tune's ASHA on `tune`'s configurations, to its end."""
    return full_size(ray_asha(task, seed).events)


def by_optuna(pruned: bool, task: Task, seed: int, seconds: float) -> list[Scored]:
    """Run a study in two processes that share a journal file, each with one thread; on one core, in one process."""
    context, began = multiprocessing.get_context("fork"), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        given = [(task, seed, pruned, rank, Path(folder), began, seconds) for rank in range(PROCESSES)]
        children = [context.Process(target=_study, args=each) for each in given]
        for child in children:
            child.start()
        for child in children:
            child.join()
            if child.exitcode:
                raise RuntimeError(f"a process of the study ended with exit status {child.exitcode}")
        lines = [line for path in Path(folder).glob("*.jsonl") for line in path.read_text().splitlines()]
        return [Scored(*json.loads(line)) for line in lines]


def _study(task: Task, seed: int, pruned: bool, rank: int, folder: Path, began: float, seconds: float) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    of_rank = 1000 * seed + rank
    random, tpe = optuna.samplers.RandomSampler, optuna.samplers.TPESampler
    hyperband = optuna.pruners.HyperbandPruner(max_resource=task.max_t, reduction_factor=REDUCTION_FACTOR)
    study = optuna.create_study(
        study_name="peers",
        direction="maximize" if task.mode == "max" else "minimize",
        storage=JournalStorage(JournalFileBackend(str(folder / "journal"))),
        sampler=tpe(seed=of_rank, constant_liar=True) if pruned else random(seed=of_rank),
        pruner=hyperband if pruned else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    space, words = task.space(), describe(task.space())
    drawn = {name: distribution(words[name], ()) for name in tuned(space)}
    with open(folder / f"{rank}.jsonl", "w", buffering=1) as out:
        while time.perf_counter() - began < seconds:
            trial = study.ask(drawn)
            config, own = {**space, **trial.params}, seeds(task, trial.number, seed)
            state, score = optuna.trial.TrialState.COMPLETE, math.nan
            for epoch, measured in enumerate(train(task, config, own, build(task, config, own)), start=1):
                score = measured["score"]
                out.write(json.dumps([time.perf_counter() - began, score, measured["test"]]) + "\n")
                trial.report(score, epoch)
                if trial.should_prune() or time.perf_counter() - began > seconds:
                    state = optuna.trial.TrialState.PRUNED
                    break
            if state is optuna.trial.TrialState.COMPLETE and not math.isfinite(score):
                state = optuna.trial.TrialState.FAIL
            study.tell(trial, score if state is optuna.trial.TrialState.COMPLETE else None, state)


def by_syne_tune(task: Task, seed: int, seconds: float) -> list[Scored]:
    """Run Syne Tune's ASHA, which trains each trial in a separate process, for two workers; on one core, for one."""
    from syne_tune import StoppingCriterion, Tuner
    from syne_tune.backend import PythonBackend
    from syne_tune.config_space import choice, loguniform, uniform
    from syne_tune.optimizer.baselines import ASHA
    from syne_tune.tuner_callback import TunerCallback

    found: list[Scored] = []

    class Noted(TunerCallback):  # type: ignore[misc]
        def on_trial_result(self, trial: Any, status: str, result: dict[str, Any], decision: str) -> None:
            found.append(Scored(time.perf_counter() - began, result["score"], result["test"]))

    def train_one(**config: Any) -> None:  # Syne Tune passes only the code of this function to its processes
        from benchmarks.peers import syne_tune_trial

        syne_tune_trial(config)

    logging.getLogger("syne_tune").setLevel(logging.ERROR)
    words, began = describe(task.space()), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        os.environ["SYNETUNE_FOLDER"] = folder
        Path(folder, "task").write_bytes(cloudpickle.dumps((task, seed)))
        space: dict[str, Any] = {"folder": folder}
        for name in tuned(task.space()):
            drawn: Any = distribution(words[name], ())
            if hasattr(drawn, "choices"):
                space[name] = choice(list(drawn.choices))
            else:
                space[name] = (loguniform if drawn.log else uniform)(drawn.low, drawn.high)
        rule = ASHA(
            space,
            metric="score",
            time_attr="epoch",
            max_t=task.max_t,
            do_minimize=task.mode == "min",
            random_seed=seed,
            reduction_factor=REDUCTION_FACTOR,
        )
        Tuner(
            PythonBackend(train_one, space),
            rule,
            StoppingCriterion(max_wallclock_time=seconds, max_num_trials_started=task.num_samples),
            n_workers=PROCESSES,
            sleep_time=0.1,
            print_update_interval=1e9,
            save_tuner=False,
            callbacks=[Noted()],
        ).run()
    return found


def syne_tune_trial(config: dict[str, Any]) -> None:
    """Train a trial of Syne Tune's to its end, in its process."""
    from syne_tune import Reporter

    torch.set_num_threads(1)
    task, seed = cloudpickle.loads(Path(config.pop("folder"), "task").read_bytes())
    config, tell = {**task.space(), **config}, Reporter()
    own = seeds(task, zlib.crc32(repr(config).encode()), seed)
    for epoch, measured in enumerate(train(task, config, own, build(task, config, own)), start=1):
        tell(epoch=epoch, score=float(measured["score"]), test=float(measured["test"]))


PEERS: dict[str, Callable[[Task, int, float], list[Scored]]] = {
    "Ray Tune, ASHA": of_ray,
    "Syne Tune, ASHA": by_syne_tune,
    "Optuna, TPE with Hyperband": lambda task, seed, seconds: by_optuna(True, task, seed, seconds),
    "Optuna, random search": lambda task, seed, seconds: by_optuna(False, task, seed, seconds),
}
OPTUNA = [name for name in PEERS if name.startswith("Optuna")]


def measure(task: Task, seed: int, full_trainings: float = FULL_TRAININGS) -> Row:
    """Run `tune` with one seed. If all peers run on its task, also run it with less time."""
    own = hydro_rasda(task, seed, full_trainings=full_trainings)
    test = scores(task, own.model, 64)["test"]
    row: Row = {"task": task.name, "seed": seed, "mode": task.mode, "seconds": own.wall, OURS: test}
    if full_trainings != FULL_TRAININGS:
        row["full_trainings"] = full_trainings
    print(f"{named(row)} {seed}: `tune` {own.wall:.1f} s, {test:.4g}, by trial {own.winner}", flush=True)
    if _is_wide(row):
        row["in hand"] = {OURS: ours_in_hand(full_size(own.events), row)}
    elif not _is_brief(row):
        row["in less"] = []
        for share in SHARES:
            less = hydro_rasda(task, seed, time_budget_s=share * own.wall)
            row["in less"].append({"seconds": less.wall, "test": scores(task, less.model, 64)["test"]})
    return row


def give_its_time(row: Row, task: Task, name: str) -> None:
    """Run another search for the time that `tune` took with this seed; if all peers run, for four times as long."""
    budgets = BUDGETS[:1] if _is_brief(row) else BUDGETS
    epochs = PEERS[name](task, row["seed"], budgets[-1] * row["seconds"])
    row[name] = [handed_back(epochs, budget * row["seconds"], task.mode) for budget in budgets]
    if "in hand" in row:
        row["in hand"][name] = in_hand(epochs, row["seconds"], task.mode)
    print(f"{named(row)} {row['seed']}: {name} {row[name]}", flush=True)


def missing(row: Row) -> list[str]:
    """Return the searches that a row lacks, if they are installed and run on its task."""
    asked = OPTUNA if _is_brief(row) else PEERS
    there = importlib.util.find_spec("syne_tune") is not None
    return [name for name in asked if name not in row and (there or PEERS[name] is not by_syne_tune)]


def of_cells(folder: Path) -> list[Row]:
    """Read rows of wide tasks from cells of `benchmarks.vs_asha`: test scores of `tune` and of ASHA in one process.

    Only seeds that both have searched count.
    """
    rows: list[Row] = []
    for path in sorted(folder.glob("wide_*-asha-*.json")):
        ours = path.with_name(path.name.replace("asha", "tune"))
        if not ours.exists():
            continue
        cell, own = read(path), read(ours)
        row = {name: cell[name] for name in ("task", "seed", "mode")}
        row |= {"seconds": own["wall"], OURS: own["winner"]["test"]}
        asha = _epochs(cell)
        row[IN_ONE_PROCESS] = [handed_back(asha, budget * own["wall"], cell["mode"]) for budget in BUDGETS]
        theirs = in_hand(asha, own["wall"], cell["mode"])
        row["in hand"] = {OURS: ours_in_hand(_epochs(own), row), IN_ONE_PROCESS: theirs}
        rows.append(row)
    return rows


def _epochs(cell: Row) -> list[Scored]:
    """Return the epochs of full-size models that a cell of `benchmarks.vs_asha` holds, without those that diverged."""
    return full_size(Event(*event) for event in cell["events"] if event[4] is not None)


def _is_wide(row: Row) -> bool:
    return str(row["task"]).startswith("wide_")


def _is_brief(row: Row) -> bool:
    """Tell whether only Optuna's searches are run beside `tune`, and only for the time that `tune` took."""
    return _is_wide(row) or "full_trainings" in row


def named(row: Row) -> str:
    """Return the name of a row's task, with the budget of `tune` if that is not its default."""
    budget = row.get("full_trainings")
    return TASK_NAMES[row["task"]] + ("" if budget is None else f", `full_trainings={budget:g}`")


def compared(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row], list[list[float | None]]]]:
    """Yield a peer, the rows of one task and budget that have it, and its test scores for each of its time budgets."""
    for task in dict.fromkeys(map(named, rows)):
        for name in (*PEERS, IN_ONE_PROCESS):
            if with_peer := [row for row in rows if named(row) == task and name in row]:
                yield name, with_peer, [list(tests) for tests in zip(*(row[name] for row in with_peer))]


def wins(rows: Sequence[Row], tests: Sequence[float | None], margin: float = 0.0) -> int:
    """Count the seeds with which the test score of `tune` is better, as good, or worse by at most the margin."""
    return sum(_is_as_good(row["mode"], row[OURS], test, margin) for row, test in zip(rows, tests))


def _is_as_good(mode: str, ours: float | None, theirs: float | None, margin: float = 0.0) -> bool:
    """Tell whether a score is behind another one by no more than a margin. A search without a model is behind."""
    if ours is None or theirs is None:
        return theirs is None
    return (theirs - ours if mode == "max" else ours - theirs) <= margin


def over_time(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield, for each wide task and search, the median test scores after each of `PARTS`, and the wins of `tune`.

    Each search is compared with the run of `tune` in its own row.
    """
    with_parts = [row for row in rows if "in hand" in row]
    for task in dict.fromkeys(map(named, with_parts)):
        for name in (OURS, *PEERS, IN_ONE_PROCESS):
            if there := [row for row in with_parts if named(row) == task and name in row["in hand"]]:
                cells = [_cell(there, name, part) for part in range(len(PARTS))]
                yield [task, f"{len(there)}", name, *cells]


def _cell(rows: Sequence[Row], name: str, part: int) -> str:
    """Return the median score of a search after one of `PARTS`, and in how many rows `tune` is as good or better."""
    ours, theirs = ([row["in hand"][of][part] for row in rows] for of in (OURS, name))
    ahead = sum(_is_as_good(row["mode"], *pair) for row, *pair in zip(rows, ours, theirs))
    return _middle(theirs) if name == OURS else f"{_middle(theirs)} ({ahead} of {len(rows)})"


def _middle(tests: Sequence[float | None]) -> str:
    known = [test for test in tests if test is not None]
    return f"{median(known):.4g}" if known else "no model"


def markdown(result: Row) -> str:
    """Return a page with a line for each task and peer, and then a line for each task and share of the time."""
    where, found, less = result["environment"], [], []
    for name, rows, tests in compared(result["rows"]):
        shown = [f"{_middle(of_budget)} ({wins(rows, of_budget)} of {len(rows)})" for of_budget in tests]
        shown += ["not run"] * (len(BUDGETS) - len(tests))
        seconds, own = median(row["seconds"] for row in rows), median(row[OURS] for row in rows)
        found.append(
            (
                named(rows[0]),
                len(rows),
                f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}",
                f"{own:.4g}",
                name,
                *shown,
            )
        )
    measured = [row for row in result["rows"] if "in less" in row]
    for task in dict.fromkeys(row["task"] for row in measured):
        of_task = [row for row in measured if row["task"] == task]
        whole = f"{median(row[OURS] for row in of_task):.4g}"
        for i, share in enumerate(SHARES):
            over = median(row["in less"][i]["seconds"] - share * row["seconds"] for row in of_task)
            test = median(row["in less"][i]["test"] for row in of_task)
            less.append((TASK_NAMES[task], f"{share:.0%}", f"{over:+.2g}", f"{test:.4g}", whole))
    names = ["task", "seeds", "`tune`: seconds", "`tune`: test", "search", "same time", "four times it"]
    return f"""# Searches that a user would pick instead

{where["cpu"]}, {where["cores"]} cores, torch {where["torch"]}, {where["date"]}. Rerun: \
`python -m benchmarks.peers`. Medians over seeds of the test score of the model handed back after the wall \
time that `tune` takes, and after four times it. In brackets: the seeds with which `tune` is as good or \
better. On tasks of 48 trials, each search has one core.

{columns(names, found)}

If a search on a wide task is stopped after a share of the time that `tune` takes, it hands back these scores. In \
brackets: the runs in which `tune`, stopped then, is as good or better.

{columns(["task", "runs", "search", *(f"{part:.0%} of the time" for part in PARTS)], over_time(result["rows"]))}

`time_budget_s` at a share of the time that the whole call takes, medians over seeds:

{columns(["task", "share", "seconds over the budget", "test", "test of the whole call"], less)}
"""


def main() -> None:
    """Run the rows that are missing, and write all."""
    parser = options(__doc__, data=True)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["digits", "cifar10"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--full-trainings", nargs="+", type=float, default=[FULL_TRAININGS])
    given = parser.parse_args()
    path = given.out / FILE
    before = read(path, {"environment": environment("torch"), "rows": []})
    rows, where = [row for row in before["rows"] if IN_ONE_PROCESS not in row], before["environment"]
    known = {(row["task"], row.get("full_trainings", FULL_TRAININGS), row["seed"]): row for row in rows}
    for name, price, seed in itertools.product(given.tasks, given.full_trainings, given.seeds):
        row = known.get((name, price, seed))
        if row is None or missing(row):
            task, where = load_task(name, given.data).of_seed(seed), environment("torch")
            if row is None:
                rows.append(row := measure(task, seed, price))
            for search in missing(row):
                give_its_time(row, task, search)
                _save(path, where, rows)
    _save(path, where, rows)


def _save(path: Path, where: Row, rows: Sequence[Row]) -> None:
    result = {"environment": where, "rows": [*rows, *of_cells(path.parent / "vs_asha")]}
    save(path, result, markdown(result))


if __name__ == "__main__":
    main()
