"""A model and its objective as one module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hydro_rasda.data import Batch
from hydro_rasda.objective import Objective, scalars
from hydro_rasda.precision import turns


class Joint(nn.Module):
    """Model and objective as one module: DDP follows what happens in a forward pass, objectives included."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self._objective, self._turns = objective, turns(objective)
        some = next(p for p in model.parameters() if p.requires_grad)
        # DDP looks for unused parameters, and prints that it looked in vain where it finds none.
        self.unused = nn.Parameter(torch.zeros(1, dtype=some.dtype, device=some.device))

    def forward(self, batch: Batch, whole: bool = False, part: str | None = None) -> dict[str, Tensor]:
        """Return the metrics of the objective, or of one part, by default without outputs and targets."""
        metrics = (self._objective if part is None else self._turns[part])(self.model, batch)
        return dict(metrics) if whole else scalars(metrics)  # in other mappings, DDP sees no tensors
