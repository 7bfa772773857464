"""Backing off to smaller pieces of work where memory runs out."""

import pytest
import torch

from fusion.evaluate.backoff import back_off, is_out_of_memory

pytestmark = pytest.mark.usefixtures("set_aside")

Numbers = list[int]
ABSURD = 2**60  # bytes: more than any address space


def halves(numbers: Numbers) -> list[Numbers]:
    return [numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]]


def are_several(numbers: Numbers) -> bool:
    return len(numbers) > 1


def test_pieces_are_halved_until_each_fits_and_keep_their_order() -> None:
    tried: list[Numbers] = []

    def total(numbers: Numbers) -> int:
        tried.append(numbers)
        if len(numbers) > 2:
            torch.empty(ABSURD, dtype=torch.uint8)
        return sum(numbers)

    assert back_off(total, [0, 1, 2, 3, 4], are_several, halves) == [1, 2, 7]
    assert list(map(len, tried)) == [5, 2, 3, 1, 2]


def test_what_a_failed_attempt_allocated_is_gone_before_the_next() -> None:
    class Held:
        alive = 0

        def __init__(self) -> None:
            Held.alive += 1

        def __del__(self) -> None:
            Held.alive -= 1

    def hold(numbers: Numbers) -> int:
        before, held = Held.alive, Held()
        if len(numbers) > 1:
            raise MemoryError(held)
        return before

    assert back_off(hold, [0, 1, 2], are_several, halves) == [0, 0, 0]


def test_a_piece_that_cannot_be_smaller_raises_its_error() -> None:
    def never(numbers: Numbers) -> None:
        raise MemoryError(f"no room for {numbers}")

    with pytest.raises(MemoryError, match=r"no room for \[3\]"):
        back_off(never, [3, 4], are_several, halves)


def test_other_errors_pass() -> None:
    def broken(numbers: Numbers) -> None:
        raise RuntimeError(f"{len(numbers)} numbers do not match")

    with pytest.raises(RuntimeError, match="2 numbers do not match"):
        back_off(broken, [3, 4], are_several, halves)


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(ABSURD, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    for said in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
        "GET was unable to find an engine to execute this computation",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "Unable to find a valid cuDNN algorithm to run convolution",
    ):
        assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))
