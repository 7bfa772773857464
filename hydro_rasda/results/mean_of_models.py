"""Several trained models as one, whose output is the mean of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class MeanOfModels(nn.Module):
    """An ensemble: the models of folds, or of seeds."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean of the models' outputs: of each floating-point tensor in them, if they are nested."""
        return tree_map(_mean, *[model(*args, **kwargs) for model in self.models])


def _mean(*outputs: Any) -> Any:
    first = outputs[0]
    return torch.stack(outputs).mean(0) if isinstance(first, Tensor) and first.is_floating_point() else first
