"""Seeds that depend on what they are for, and on nothing else."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A seed for one purpose of a run.

    Args:
        parts: What tells the purpose apart, such as the run's seed, "weights" and a trial's number.

    Returns:
        An integer in [0, 2**63), the same on every machine.

    >>> derive_seed(0, "weights", 1) == derive_seed(0, "weights", 1) != derive_seed(0, "weights", 2)
    True
    """
    entropy = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch: models and data sets draw from any of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # `torch.manual_seed` does this and, for each kind of device that is not there, writes down the whole stack.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the global generators back to where they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
