"""Going on after an out-of-memory error with smaller pieces of work."""

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
"""Messages of the allocators of the system, of CUDA and of its libraries; cuDNN finds no algorithm that fits."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that a device, or the CPU, has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def free_memory() -> None:
    """Give the memory of tensors that nothing refers to any more back to the system, also in circles of references."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def back_off(
    do: Callable[[Work], Result],
    work: Work,
    can_be_smaller: Callable[[Work], bool],
    smaller: Callable[[Work], Sequence[Work]],
) -> list[Result]:
    """Do a piece of work; if memory runs out, do smaller pieces in its place, one after the other.

    If memory runs out again for a smaller piece, still smaller ones replace it. The memory of the failed attempt is
    free before the next attempt begins, provided that `do` keeps nothing of it.

    Args:
        do: Does a piece of work, and returns its result.
        work: The piece to begin with.
        can_be_smaller: Tells whether a piece has smaller ones. It is called before the out-of-memory error is dropped.
        smaller: Returns the pieces that together take the place of one.

    Returns:
        The results of the pieces that were done, in their order.

    Raises:
        Exception: any error of `do` that is no out-of-memory error. An out-of-memory error if the piece cannot be made
            smaller.

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
    # Only here are the failed attempt's tensors gone: until then the error's traceback holds them.
    free_memory()
    return [result for part in smaller(work) for result in back_off(do, part, can_be_smaller, smaller)]
