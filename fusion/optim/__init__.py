"""Optimizers of stacked parameters, and equivalent ones for a single module, made from the same configuration keys."""

from fusion.keys import OPTIMIZERS
from fusion.optim.fused import FusedOptimizer
from fusion.optim.make_fused_optimizer import FusedAdam, FusedAdamW, FusedSGD, fused_optimizer
from fusion.optim.optimizer_config import Hyperparameters
from fusion.optim.torch_optimizer import optimizer

__all__ = [
    "OPTIMIZERS",
    "FusedAdam",
    "FusedAdamW",
    "FusedOptimizer",
    "FusedSGD",
    "Hyperparameters",
    "fused_optimizer",
    "optimizer",
]
