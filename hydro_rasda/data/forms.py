"""The three forms of data that `tune` takes, told apart."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydro_rasda.checks import binds
from hydro_rasda.data.batches import Batches, Data
from hydro_rasda.data.dataset_loading import DatasetBatches
from hydro_rasda.data.tensors import TensorBatches
from hydro_rasda.data.user_loaders import LoaderBatches


def make_batches(
    data: Data, argument: str, device: torch.device, seed: int, loader_workers: int | None = None
) -> Batches:
    """Wrap a user's data.

    Args:
        data: See `Data`. Tensors are moved to the device and stay there.
        loader_workers: Processes that load batches of a Dataset ahead, as a DataLoader's `num_workers`; None: as
            `datasets.default_workers` says. Batches do not depend on it.

    Raises:
        ValueError: if the data has none of the three forms, it is empty, or its tensors have different lengths.
    """
    if isinstance(data, (DataLoader, IterableDataset)):
        raise ValueError(
            f"`{argument}` is a {type(data).__name__}, whose batch size or order is fixed; give tensors, a map-style "
            "Dataset, or a function `make_loader(batch_size)`"
        )
    if isinstance(data, (tuple, list)) and data and all(isinstance(t, (Tensor, np.ndarray)) for t in data):
        return TensorBatches(tuple(torch.as_tensor(t) for t in data), argument, device, seed)
    if isinstance(data, Dataset) or _is_sequence(data):
        return DatasetBatches(data, argument, device, seed, loader_workers)  # type: ignore[arg-type]
    if callable(data) and not isinstance(data, type) and binds(inspect.signature(data), 1):
        return LoaderBatches(data, argument, device, seed)
    raise ValueError(
        f"`{argument}` is a {type(data).__name__}, but must be tensors (inputs, target), a map-style Dataset, or a "
        "function `make_loader(batch_size)`"
    )


def _is_sequence(data: object) -> bool:
    """Return whether data that is no Dataset reads like one: a list of examples, or another library's data set."""
    if isinstance(data, (str, bytes, Mapping, type)) or (isinstance(data, tuple) and data):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")
