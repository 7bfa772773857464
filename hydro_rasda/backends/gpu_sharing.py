"""GPUs that several processes share: through NVIDIA's Multi-Process Service, where it is installed."""

from __future__ import annotations

import torch

from hydro_rasda.packing.mps import Daemons


class SharedGpus:
    """The GPUs that more than one process of the tuner's has; their daemons end with the tuner, however it ends."""

    def __init__(self) -> None:
        self._daemons = Daemons("processes")

    def environment(self, where: torch.device) -> dict[str, str]:
        """Return the environment to compute on a GPU at the same time as others, rather than in turns.

        The process sees that GPU alone, as its first. Empty where it has to take turns, or `where` is no GPU.
        """
        gpu = uuid_of(where) if self._daemons.possible else None
        if gpu is None or not (found := self._daemons.environment(gpu)):
            return {}
        return {**found, "CUDA_VISIBLE_DEVICES": gpu}

    def stop(self) -> None:
        """End all daemons; no process may be left that they serve."""
        self._daemons.stop()


def uuid_of(where: torch.device) -> str | None:
    """Return the name of a GPU for NVIDIA's programs; None for another device, and for a part of a GPU (MIG)."""
    if where.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(where)
    return None if " MIG " in found.name else f"GPU-{found.uuid}"  # a part's UUID begins otherwise
