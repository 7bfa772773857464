"""Many models as one: K modules of one shape, one forward, one backward, one optimizer step."""

from fusion.assemble import fuse
from fusion.clip import clip_grad_norm_
from fusion.dry_run import FusionWarning, Obstacle, dry_run
from fusion.graph import GraphedStep, GraphWarning
from fusion.guard import OutOfMemoryGuard
from fusion.lora import pad_lora, trim_lora
from fusion.loss_scale import LossScale
from fusion.model import FusedModel
from fusion.optim import OPTIMIZERS, FusedAdam, FusedAdamW, FusedOptimizer, FusedSGD, fused_optimizer, optimizer
from fusion.outcome import FusionMismatch
from fusion.schedules import SCHEDULES, lr_factor
from fusion.structure import fusion_key
from fusion.width import FusionPlan, keep_freed_memory, plan_fusion

__distribution__ = "hydro-rasda"  # which tells it from other packages of this name

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "FusedAdam",
    "FusedAdamW",
    "FusedModel",
    "FusedOptimizer",
    "FusedSGD",
    "FusionMismatch",
    "FusionPlan",
    "FusionWarning",
    "GraphWarning",
    "GraphedStep",
    "LossScale",
    "Obstacle",
    "OutOfMemoryGuard",
    "clip_grad_norm_",
    "dry_run",
    "fuse",
    "fused_optimizer",
    "fusion_key",
    "keep_freed_memory",
    "lr_factor",
    "optimizer",
    "pad_lora",
    "plan_fusion",
    "trim_lora",
]
