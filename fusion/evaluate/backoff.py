"""Recovery from out-of-memory errors: the work is split into smaller pieces and tried again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Work = TypeVar("Work")
Result = TypeVar("Result")

SIGNS = (
    *("can't allocate memory", "not enough memory", "std::bad_alloc", "Cannot allocate memory"),
    *("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED"),
    *("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    *("CUSOLVER_STATUS_ALLOC_FAILED", "CUSPARSE_STATUS_ALLOC_FAILED", "failed to allocate memory"),
    *("Unable to find a valid cuDNN algorithm", "was unable to find an engine to execute this computation"),
)
"""Parts of error messages that mean out of memory. cuDNN may report instead that it finds no algorithm or engine."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a device, or the CPU, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def free_memory() -> None:
    """Free tensors that are no longer in use, including those in reference cycles, and empty CUDA's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def back_off(
    do: Callable[[Work], Result],
    work: Work,
    can_be_smaller: Callable[[Work], bool],
    smaller: Callable[[Work], Sequence[Work]],
) -> list[Result]:
    """Call `do(work)`. If memory runs out, split the work and do the smaller pieces one after another.

    A smaller piece is split again if memory runs out for it, too. The memory of a failed attempt is freed before the
    next attempt begins, provided that `do` keeps no reference to it.

    Args:
        do: Does a piece of work, and returns its result.
        work: The whole work.
        can_be_smaller: Tells whether a piece can be split. It is called while the out-of-memory error is being handled.
        smaller: Splits a piece; the returned pieces together replace it.

    Returns:
        The results of the pieces that were done, in their order.

    Raises:
        Exception: any other error of `do`, and an out-of-memory error if the piece cannot be split.

    >>> def add_up_two_at_most(numbers):
    ...     if len(numbers) > 2:
    ...         raise MemoryError
    ...     return sum(numbers)
    >>> back_off(add_up_two_at_most, [1, 2, 3, 4, 5], lambda n: len(n) > 1, lambda n: [n[:2], n[2:]])
    [3, 7, 5]
    """
    try:
        return [do(work)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or not can_be_smaller(work):
            raise
    # Free memory only here, because inside the `except` block the error's traceback still holds the attempt's tensors.
    free_memory()
    return [result for part in smaller(work) for result in back_off(do, part, can_be_smaller, smaller)]
