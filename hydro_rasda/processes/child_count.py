"""How many child processes a device trains in at the same time, and which problems keep to one process."""

from __future__ import annotations

import os
import sys

import torch

from hydro_rasda.data.can_be_pickled import can_be_pickled
from hydro_rasda.problem.problem import Problem

ONE_PROCESS = "HYDRO_RASDA_ONE_PROCESS"
"""Set to anything in the environment, it keeps a CPU's work in one process: for a debugger."""


def most_children(device: torch.device) -> int:
    """How many pieces can train at the same time in processes of their own; 0 where only this one can.

    As many as torch has threads, which `torch.set_num_threads` and OMP_NUM_THREADS say. Other systems than Linux cannot
    be relied on to fork a process that has computed, nor can autograd where it keeps a thread for each GPU.
    """
    can_fork = device.type == "cpu" and sys.platform == "linux" and not torch.accelerator.is_available()
    return torch.get_num_threads() if can_fork and not os.environ.get(ONE_PROCESS) else 0


def usable_children(problem: Problem) -> int:
    """How many processes are forked to train a problem's models at the same time; 0 where this one trains.

    As many as its device allows, if they can share its data.

    Processes cannot share a connection, such as that to a database. Data that hold one are recognised because they
    cannot be pickled. A connection that they drop when they are pickled goes unseen: `docs/guides/memory.md` says what
    such data have to do. Open files are opened again in each process, see `open_files_again`.
    """
    most = most_children(problem.device)
    return most if most and can_be_shared(problem) else 0


def can_be_shared(problem: Problem) -> bool:
    """Return whether several processes can train a problem's models: see `usable_children`."""
    return can_be_pickled(
        (problem.model_fn, problem.objective, problem.train_data, problem.val_data, problem.own_loop, problem.metrics)
    )
