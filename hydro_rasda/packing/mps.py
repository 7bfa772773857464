"""NVIDIA's Multi-Process Service (MPS), by which processes compute on one GPU at the same time instead of in turns.

`Daemons` starts a daemon for each shared GPU, and ends it. A daemon runs under `run_job.py`, as jobs do. So if this
process dies in any way, the daemon and its servers end, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from hydro_rasda.packing.job_process import start_child

CONTROL = "nvidia-cuda-mps-control"
STARTS_S = 10.0
"""Seconds to wait for the answer of a daemon."""

_PREFIX = "hydro-rasda-mps-"


def available() -> bool:
    """Return whether MPS can be started here: it is installed, and the user has not set up MPS already."""
    return shutil.which(CONTROL) is not None and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def percentage(share: float) -> str:
    """Return the CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of a job: its share of the GPU in percent, rounded up.

    >>> percentage(0.301), percentage(1.5)
    ('31', '100')
    """
    return str(min(100, max(1, math.ceil(100 * share - 1e-9))))


class Daemon:
    """A control daemon for one GPU, with a folder for its sockets.

    Raises OSError with the daemon's output if it does not start.
    """

    def __init__(self, gpu: str) -> None:
        _remove_leftovers()
        # Use a temporary folder, because paths of sockets must be short and the run's folder may be deep.
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "log"),
        }
        for path in self.environment.values():
            Path(path).mkdir()
        self._own = {**os.environ, **self.environment, "CUDA_VISIBLE_DEVICES": gpu}
        folder = self._folder
        self._child = start_child([CONTROL, "-f"], folder / "lock", folder / "end", folder / "output", self._own)
        until = time.monotonic() + STARTS_S
        while not self._tell("get_server_list"):
            if self.over or time.monotonic() > until:
                told = (self._folder / "output").read_text(errors="replace").strip()[-500:]
                self.stop()
                raise OSError(f"{CONTROL} did not start for GPU {gpu}: {told or 'it does not answer'}")
            time.sleep(0.05)

    @property
    def over(self) -> bool:
        """Return whether the daemon has ended, for whatever reason."""
        return self._child.poll() is not None

    @property
    def serves(self) -> bool:
        """Return whether the daemon answers. Its `run_job.py` process may outlive the daemon for a moment."""
        return not self.over and self._tell("get_server_list")

    def stop(self) -> None:
        if not self.over and self._tell("quit"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(STARTS_S)
        self._child.terminate()
        self._child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, command: str) -> bool:
        try:
            told = subprocess.run(
                [CONTROL], input=command.encode(), env=self._own, capture_output=True, timeout=STARTS_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return told.returncode == 0


class Daemons:
    """A daemon for each shared GPU. It is started at the first call of `environment` for the GPU.

    If a daemon does not start, a warning says that `who` (for example "jobs") take turns on GPUs. With `wanted=False`,
    no daemon is started, and `who` take turns without a warning.
    """

    def __init__(self, who: str, wanted: bool = True) -> None:
        self._who, self.possible = who, wanted and available()
        self._of: dict[str, Daemon] = {}

    def environment(self, gpu: str) -> Mapping[str, str]:
        """Return the environment variables for sharing the GPU of this UUID; empty if processes take turns on it.

        A daemon that has ended or does not answer is replaced.
        """
        if not self.possible:
            return {}
        daemon = self._of.get(gpu)
        if daemon is not None and not daemon.serves:
            self._of.pop(gpu).stop()
            daemon = None
        if daemon is None:
            try:
                daemon = self._of[gpu] = Daemon(gpu)
            except OSError as error:
                self.possible = False
                warnings.warn(f"{self._who} take turns on GPUs: {error}", stacklevel=2)
                return {}
        return daemon.environment

    def stop(self) -> None:
        """End all daemons. Processes that use them must have ended before."""
        for daemon in self._of.values():
            daemon.stop()


def _remove_leftovers() -> None:
    """Remove the folders of daemons whose process died before it could remove them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # Skip folders of other users, and links that somebody else may have put there.
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with open(folder / "lock", "rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
