"""Many models as one: K modules of one shape, one forward, one backward, one optimizer step."""

from fusion.check.dry_run import FusionWarning, dry_run
from fusion.check.equal_within_rounding import FusionMismatch
from fusion.graph import GraphedStep
from fusion.members.assemble import fuse
from fusion.members.fused_model import FusedModel
from fusion.members.lora import pad_lora, trim_lora
from fusion.optim import FusedOptimizer, fused_optimizer
from fusion.optim.clip import clip_grad_norm_
from fusion.optim.loss_scale import LossScale
from fusion.optim.schedules import lr_factor
from fusion.structure import fusion_key
from fusion.width import plan_fusion

__distribution__ = "hydro-rasda"  # which tells it from other packages of this name

__all__ = [
    "FusedModel",
    "FusedOptimizer",
    "FusionMismatch",
    "FusionWarning",
    "GraphedStep",
    "LossScale",
    "clip_grad_norm_",
    "dry_run",
    "fuse",
    "fused_optimizer",
    "fusion_key",
    "lr_factor",
    "pad_lora",
    "plan_fusion",
    "trim_lora",
]
