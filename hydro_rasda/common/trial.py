"""A trial: the number and the configuration, as plain values that can be read from a journal without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion.keys import read


@dataclass(frozen=True)
class Trial:
    """One configuration.

    Attributes:
        number: The trial's number: 0, 1, ... in the order in which configurations were sampled.
        config: The hyperparameters. The model function gets all of them.
    """

    number: int
    config: Mapping[str, Any]

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        size: int = read(self.config, "batch_size")
        return size
