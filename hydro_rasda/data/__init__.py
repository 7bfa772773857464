"""Data in three forms, read in one way: the same shuffle for every trial, no example left out.

The order of an epoch, and the random numbers that data sets and loaders draw for it, depend only on the run's seed and
the epoch. All trials of a group therefore share each batch, trials are compared on the same batches, and a resumed run
sees the same batches as an uninterrupted one. Batches are copies, so that writing to them does not change the data.
"""

from hydro_rasda.data.batch_splits import MOST_EXAMPLES
from hydro_rasda.data.batches import (
    ALONE,
    EVAL_BATCH_FACTOR,
    Batch,
    Batches,
    Data,
    OwnData,
    Part,
    Shard,
    Share,
    batch_length,
    fresh,
    move,
    outline,
)
from hydro_rasda.data.first_pass import naming_batch, non_finite, unlike
from hydro_rasda.data.folds import Folds, Splitter, is_splitter, make_folds, reseeded
from hydro_rasda.data.tensors_datasets_loaders import make_batches

__all__ = [
    "ALONE",
    "EVAL_BATCH_FACTOR",
    "MOST_EXAMPLES",
    "Batch",
    "Batches",
    "Data",
    "Folds",
    "OwnData",
    "Part",
    "Shard",
    "Share",
    "Splitter",
    "batch_length",
    "fresh",
    "is_splitter",
    "make_batches",
    "make_folds",
    "move",
    "naming_batch",
    "non_finite",
    "outline",
    "reseeded",
    "unlike",
]
