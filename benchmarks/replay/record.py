"""Recording the replay table: cell by cell, so that a run that is killed loses one group of configurations at most."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.replay.table import About, Config, Table, branches_of, empty, load, save, widened
from benchmarks.replay.training import fastest_group, groups, train
from benchmarks.result_files import environment
from benchmarks.tasks.task import Task
from benchmarks.vs_asha.search import configurations

SAMPLED_WITH = 0
"""The run seed whose configurations are recorded, with every seed of training, unless another one is asked for."""
MOST = 16
"""A group's most members, so that little is lost where recording stops."""


def record(task: Task, widths: Sequence[float], seeds: Sequence[int], folder: Path, sample: int = SAMPLED_WITH) -> None:
    """Train what the table in `folder` lacks, width by width and seed by seed, and write it after each group.

    One process at a time may record a task. CPU seconds are those of one thread.

    Args:
        sample: The run seed whose configurations are recorded.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _extend(task, opened(task, widths, seeds, folder, sample), widths, seeds, folder)
    finally:
        torch.set_num_threads(threads)


def opened(
    task: Task, widths: Sequence[float], seeds: Sequence[int], folder: Path, sample: int = SAMPLED_WITH
) -> Table:
    """The task's table as it is recorded so far, with room for these widths and seeds.

    Raises:
        ValueError: The table is of other configurations than the task's, or of another length.
    """
    configs = configurations(task, sample)
    try:
        table = load(task.name, folder)
    except FileNotFoundError:
        branches = branches_of(task.max_t)
        table = empty(About(task.name, task.mode, task.max_t, configs, [], [], branches=branches))
    if (table.about.configs, table.about.max_t) != (configs, task.max_t):
        raise ValueError(f"the table of {task.name} in {folder} is of other configurations; record into another folder")
    return widened(table, widths, seeds, environment("torch", threads=1, load=None))


def _extend(task: Task, table: Table, widths: Sequence[float], seeds: Sequence[int], folder: Path) -> None:
    about, began = table.about, time.perf_counter()
    for width in widths:
        places = {seed: (about.widths.index(width), about.seeds.index(seed)) for seed in seeds}
        missing = {seed: np.flatnonzero(~table.recorded[at]).tolist() for seed, at in places.items()}
        most = _fastest_groups(task, about.configs, width) if any(missing.values()) else {}
        for seed, at in places.items():
            for numbers in groups(about.configs, missing[seed], most):
                members = {n: about.configs[n] for n in numbers}
                curves = train(task, members, width, seed, branches=about.branches)
                table.scores[at][numbers], table.seconds[at][numbers] = curves.scores, curves.seconds
                table.cooled[at][numbers] = curves.cooled
                save(table, folder)
                left, spent = int((~table.recorded[at]).sum()), time.perf_counter() - began
                print(f"{spent:6.0f} s: {task.name}, width {width:g}, seed {seed}: {left} left", flush=True)


def _fastest_groups(task: Task, configs: Sequence[Config], width: float) -> dict[int, int]:
    """For each batch size, how many configurations train fastest as one."""
    of_size = {size: [n for n, c in enumerate(configs) if c["batch_size"] == size][:MOST] for size in task.batch_sizes}
    return {size: fastest_group(task, {n: configs[n] for n in few}, width) for size, few in of_size.items() if few}
