"""Kernels of torch that are kept off for a while, for the whole process."""

from __future__ import annotations

import torch

from fusion.evaluate.avoided_kernels import without_fast_attention


def test_fast_attention_comes_back_however_threads_leave() -> None:
    """The first that came leaves first: what it found must not be what the last one restores."""
    assert torch.backends.mha.get_fastpath_enabled()
    first, second = without_fast_attention(), without_fast_attention()
    for one in (first, second):
        one.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()
