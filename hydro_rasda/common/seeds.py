"""Seeds that depend only on their purpose."""

from __future__ import annotations

import zlib

MOST_SEED = 2**63 - 1


def next_seed(seed: int) -> int:
    """Return another seed: the next integer, or 0 after the largest seed.

    >>> next_seed(0), next_seed(MOST_SEED)
    (1, 0)
    """
    return 0 if seed == MOST_SEED else seed + 1


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) for one purpose of a run, the same on every machine.

    The parts identify the purpose, such as the run's seed, "weights" and a trial's number.

    >>> derive_seed(0, "weights", 1) == derive_seed(0, "weights", 1) != derive_seed(0, "weights", 2)
    True
    """
    import numpy as np  # imported only here, because code that only reads settings does not need it

    entropy = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in parts]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
