"""Work that nobody can stop, in pieces: each begins only if the bubble is expected to last until its end."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hydro_rasda.bubbles.shared_memory import Page
from hydro_rasda.data import Batch
from hydro_rasda.objective import Objective
from hydro_rasda.schedulers.bubble_policy import Margin

_LOOK_S = 2e-4


class Quanta:
    """Parts a fused step in two: its forward pass, and what follows until the next one (backward, update).

    A step that trains in micro-batches has so many quanta of each.

    Args:
        page: Says until when the bubble that is open is expected to last.
        where: The computing device; a quantum is over once it is through with it.
    """

    def __init__(self, page: Page, where: torch.device) -> None:
        self._page, self._where, self._margin = page, where, Margin()
        self._under_way: tuple[str, float] | None = None

    def objective(self, of: Objective) -> Objective:
        """The same objective, each call of which is a quantum, and begins the next one."""

        def measured(model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
            self.begin("forward")
            metrics = of(model, batch)
            self.begin("backward and update")
            return metrics

        return measured

    def begin(self, kind: str) -> None:
        """End the quantum that is under way, and wait for a bubble that one of this kind fits."""
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)
        if self._under_way is not None:
            before, began = self._under_way
            self._margin.saw(before, time.monotonic() - began, in_time=self._page.until > 0)
        while not self._margin.fits(kind, self._page.until - time.monotonic()) and not self._page.leaving:
            time.sleep(_LOOK_S)
        self._under_way = kind, time.monotonic()
