"""A check that finds what two processes cannot share, such as an open file."""

from __future__ import annotations

import io
import sys
from typing import Any

import cloudpickle
import torch


def can_be_pickled(thing: Any, *, tensors_of_gpus: bool = True) -> bool:
    """Return whether a thing can be sent to another process; nothing of it is copied to find out.

    Args:
        tensors_of_gpus: False if tensors on a GPU cannot be sent: a forked process cannot use them.
    """

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                if part.is_cuda and not tensors_of_gpus:
                    raise TypeError("a forked process cannot use a GPU's tensors")
                return int, ()
            if isinstance(part, io.TextIOWrapper) and part not in (sys.stdout, sys.stderr):
                raise TypeError("a copy of a text file is sent as what is in it, but is one file for forked processes")
            return super().reducer_override(part)

    try:
        Pickler(_Nowhere(), protocol=5, buffer_callback=lambda buffer: None).dump(thing)
    except Exception:  # whatever a `__reduce__` raises
        return False
    return True


class _Nowhere:
    def write(self, content: Any) -> int:
        return len(content)
