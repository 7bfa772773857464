import random

import numpy as np
import torch

from fusion.streams import preserved_generators, seed_generators
from hydro_rasda.common.seeds import derive_seed


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_are_seeded_and_put_back() -> None:
    seed_generators(1)
    first, second = draw(), draw()
    seed_generators(1)
    assert draw() == first
    with preserved_generators():
        seed_generators(2**63 - 1)
        assert draw() != second
    assert draw() == second


def test_seeds_differ_by_purpose_and_number_and_order() -> None:
    seeds = [derive_seed(run, what, n) for run in range(5) for what in ("weights", "shuffle") for n in range(50)]
    assert len(set(seeds)) == 500
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_on_every_machine() -> None:
    assert derive_seed(0, "weights", 1) == 297470158803840297
