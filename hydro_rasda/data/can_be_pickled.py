"""Check whether an object can be shared by several processes; an open file, for example, cannot."""

from __future__ import annotations

import io
import sys
from typing import Any

import cloudpickle
import torch


def can_be_pickled(thing: Any, *, tensors_of_gpus: bool = True) -> bool:
    """Return whether an object can be sent to another process; the check copies no tensors.

    Args:
        tensors_of_gpus: True if the other process can use GPU tensors. False if it is a fork, which cannot: then a
            thing that holds GPU tensors cannot be sent.
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
    except Exception:  # a user's `__reduce__` may raise anything
        return False
    return True


class _Nowhere:
    def write(self, content: Any) -> int:
        return len(content)
