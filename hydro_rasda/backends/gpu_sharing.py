"""GPUs that several processes share, by NVIDIA's Multi-Process Service (MPS) if it is installed."""

from __future__ import annotations

import torch

from hydro_rasda.packing.mps import Daemons


class SharedGpus:
    """The GPUs that several processes of the tuner share. Their MPS daemons end with the tuner, however it ends."""

    def __init__(self) -> None:
        self._daemons = Daemons("processes")

    def environment(self, where: torch.device) -> dict[str, str]:
        """Return the environment with which a process computes on a GPU at the same time as others, not in turns.

        The process sees only that GPU, as its first. Return an empty dict if processes must take turns, or without a
        GPU.
        """
        gpu = uuid_of(where) if self._daemons.possible else None
        if gpu is None or not (found := self._daemons.environment(gpu)):
            return {}
        return {**found, "CUDA_VISIBLE_DEVICES": gpu}

    def stop(self) -> None:
        """End all daemons. No process that they serve may be left."""
        self._daemons.stop()


def uuid_of(where: torch.device) -> str | None:
    """Return the name of a GPU for NVIDIA's programs; None for other devices, and for a part of a GPU (MIG)."""
    if where.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(where)
    return None if " MIG " in found.name else f"GPU-{found.uuid}"  # the UUID of a part has another prefix
