import sys
from collections.abc import Callable

import pytest
import torch

from fusion.width.memory import available_memory, keep_freed_memory, peak_memory

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc")


def peaks_at(work: Callable[[], object], expected: int, within: float) -> bool:
    """Whether the peak is what is expected, in one of fifty tries.

    For a while the system may take pages back from the process, and bring them in again, faster than it works.
    """
    for _ in range(50):
        with peak_memory(CPU) as peak:
            work()
        if peak.bytes == pytest.approx(expected, rel=within):
            return True
    return False


@linux
def test_a_peak_is_what_was_held_at_once() -> None:
    block = 64 * 2**20

    def one_after_another() -> None:
        for _ in range(3):
            torch.ones(block, dtype=torch.uint8)  # freed before the next

    assert peaks_at(one_after_another, block, within=0.1)


@linux
def test_a_peak_does_not_count_what_was_there_before() -> None:
    before = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert peaks_at(lambda: torch.ones(16 * 2**20, dtype=torch.uint8), 16 * 2**20, within=0.2)
    del before


@linux
def test_available_memory_is_a_sensible_number() -> None:
    available = available_memory(CPU)
    assert available is not None
    assert 2**20 < available < 2**50


def test_keep_freed_memory_says_whether_it_could() -> None:
    assert isinstance(keep_freed_memory(), bool)
