"""GPUs that several processes share: through NVIDIA's Multi-Process Service, where it is installed.

Not yet run on a GPU.
"""

from __future__ import annotations

import warnings

import torch

from hydro_rasda.packing.mps import Daemon, available


class SharedGpus:
    """A daemon for each GPU that more than one process of the tuner's has; they end with the tuner, however it ends."""

    def __init__(self) -> None:
        self._daemons: dict[str, Daemon] = {}
        self._possible = available()

    def environment(self, where: torch.device) -> dict[str, str]:
        """What has a process compute on a GPU at the same time as others, rather than in turns with them.

        The process sees that GPU alone, as its first. Empty where it has to take turns, or `where` is no GPU.
        """
        gpu = uuid_of(where) if self._possible else None
        if gpu is None:
            return {}
        daemon = self._daemons.get(gpu)
        if daemon is None or not daemon.serves:
            if daemon is not None:
                daemon.stop()
            try:
                daemon = self._daemons[gpu] = Daemon(gpu)
            except OSError as error:
                self._possible = False
                warnings.warn(f"processes take turns on GPUs: {error}", stacklevel=2)
                return {}
        return {**daemon.environment, "CUDA_VISIBLE_DEVICES": gpu}

    def stop(self) -> None:
        """End all daemons; no process may be left that they serve."""
        for daemon in self._daemons.values():
            daemon.stop()


def uuid_of(where: torch.device) -> str | None:
    """What NVIDIA's programs call a GPU; None for another device."""
    return f"GPU-{torch.cuda.get_device_properties(where).uuid}" if where.type == "cuda" else None
