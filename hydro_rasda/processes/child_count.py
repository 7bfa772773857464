"""The number of child processes in which a device trains at the same time, and problems that need a single process."""

from __future__ import annotations

import os
import sys

import torch

from hydro_rasda.data.can_be_pickled import can_be_pickled
from hydro_rasda.problem.problem import Problem

ONE_PROCESS = "HYDRO_RASDA_ONE_PROCESS"
"""Environment variable that keeps all work of a CPU in one process, for a debugger; any value but "" counts."""


def most_children(device: torch.device) -> int:
    """Return the largest number of child processes that can train at the same time; 0 if only this process can train.

    It is the number of torch's threads, which `torch.set_num_threads` and OMP_NUM_THREADS set. Forking a process after
    computations is only reliable on Linux, and not if autograd has a thread for each GPU.
    """
    can_fork = device.type == "cpu" and sys.platform == "linux" and not torch.accelerator.is_available()
    return torch.get_num_threads() if can_fork and not os.environ.get(ONE_PROCESS) else 0


def usable_children(problem: Problem) -> int:
    """Return the number of processes that are forked to train a problem's models; 0 if this process trains.

    It is `most_children` of the device, if processes can share the data.

    Processes cannot share a connection, such as that to a database. Data with a connection are recognized because they
    cannot be pickled. If data drop their connection when they are pickled, the connection goes unnoticed;
    `docs/guides/memory.md` says what such data must do. Each process reopens open files; see `open_files_again`.
    """
    most = most_children(problem.device)
    return most if most and can_be_shared(problem) else 0


def can_be_shared(problem: Problem) -> bool:
    """Return whether several processes can share a problem's functions and data; see `usable_children`."""
    return can_be_pickled(
        (problem.model_fn, problem.objective, problem.train_data, problem.val_data, problem.own_loop, problem.metrics)
    )
