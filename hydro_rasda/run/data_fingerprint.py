"""A digest of the content of a run's data, by which a later call recognizes them; large data are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor

from fusion.streams import preserved_generators, seed_generators
from hydro_rasda.data import Data
from hydro_rasda.run.fingerprint import content, digest, spread_indices, unchanged

ITEMS = 32
"""Number of examples of a data set that are read, at even distances."""


def data_digest(data: Data, batch_size: int) -> str:
    """Digest a user's data: tensors by their bytes, a data set by some of its examples, a loader by its first batch.

    Values that differ between two reads from the same seed do not count.

    Args:
        data: In any form that `tune` takes.
        batch_size: The batch size that is passed to a function that makes loaders.
    """
    if isinstance(data, (tuple, list)) and all(isinstance(t, (Tensor, np.ndarray)) for t in data):
        return digest(content(tuple(data)))
    read: Callable[[], Any]
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        length = len(data)
        own, read = content((type(data), length)), lambda: [data[i] for i in spread_indices(length, ITEMS)]
    else:
        assert callable(data)
        make_loader: Callable[[int], Iterable[Any]] = data
        own, read = content(data), lambda: next(iter(make_loader(batch_size)), None)
    with preserved_generators():
        once, again = (content(_seeded(read)) for _ in range(2))
    if isinstance(data, FunctionType):
        own = unchanged(own, content(data))
    return digest({**{f"own{path}": words for path, words in own.items()}, **unchanged(once, again)})


def _seeded(read: Callable[[], Any]) -> Any:
    seed_generators(0)
    return read()
