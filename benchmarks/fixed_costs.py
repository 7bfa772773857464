"""Measure the CPU seconds that a program spends on this library: on its import, and in a script outside training."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

Numbers = dict[str, float]

_BEYOND_TORCH = ("import torch", "import torch; import hydro_rasda; hydro_rasda.tune")
_PROGRAM = Path(__file__).parents[1] / "examples" / "digits.py"


def imports(repeats: int = 7) -> Numbers:
    """Measure the CPU seconds of `from hydro_rasda import tune` in a process that has imported torch."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [[_cpu_of(code, folder) for code in _BEYOND_TORCH] for _ in range(repeats + 1)]
    return {"s of CPU": median(with_tune - torch_alone for torch_alone, with_tune in pairs[1:])}


_TIMED = """
import time
import hydro_rasda
hydro_rasda.tune
from hydro_rasda.training import full_size, group_training, loop

def timed(*arguments, **named):
    epochs = loop.train_epochs(*arguments, **named)
    while True:
        began = time.process_time()
        epoch = next(epochs, None)
        with open("seconds", "a") as file:
            file.write(f"{time.process_time() - began}\\n")
        if epoch is None:
            return
        yield epoch

full_size.train_epochs = group_training.train_epochs = timed
"""
"""Code that notes the CPU seconds of each epoch, in whichever process the epoch trains."""


@cache
def script(repeats: int = 5) -> Numbers:
    """Measure the CPU seconds of the program on the first page of the guides, from its start to its end, and by part.

    Imports are measured in processes that do nothing else. The time of training is that of epochs, validation included.
    The rest is the cost of this library.
    """
    return _medians([_parts_of(first_program()) for _ in range(repeats + 1)][1:])


def of_script(part: str) -> Numbers:
    """Return the CPU seconds of one part of that program, from the runs of `script`."""
    return {"s of CPU": script()[part]}


def _medians(runs: Sequence[Numbers]) -> Numbers:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def first_program() -> str:
    """Return the first program of the guides."""
    return _PROGRAM.read_text()


def _parts_of(program: str) -> Numbers:
    """Measure the CPU seconds of a program that calls `tune`, by part, without measurements of earlier runs."""
    lines = program.splitlines()
    imports = "\n".join(line for line in lines if line.startswith(("import ", "from ")) and "hydro_rasda" not in line)
    with tempfile.TemporaryDirectory() as folder:
        codes = ("import torch", f"import torch\n{imports}", f"import torch\n{imports}{_TIMED}{program}")
        of_torch, imported, whole = (_cpu_of(code, folder) for code in codes)
        training = sum(map(float, Path(folder, "seconds").read_text().split()))
    parts = {"torch": of_torch, "own imports": imported - of_torch, "training": training}
    return {"s of CPU": whole, **parts, "rest": whole - imported - training}


def _cpu_of(code: str, folder: str) -> float:
    """Measure the CPU seconds of a process and its children. The first such process may also compile modules."""
    keeps = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**keeps, "OMP_NUM_THREADS": "1", "HYDRO_RASDA_CACHE": folder}
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
