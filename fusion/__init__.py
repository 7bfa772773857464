"""Trains K modules of one shape as one model: one forward pass, one backward pass and one optimizer step for all."""

from typing import TYPE_CHECKING

from fusion.lazy_names import lazy_exports

__distribution__ = "hydro-rasda"  # name on PyPI, which tells this package from others named `fusion`

if TYPE_CHECKING:
    from fusion.argument_checks import FusionMismatch as FusionMismatch
    from fusion.check.dry_run import FusionWarning as FusionWarning
    from fusion.check.dry_run import dry_run as dry_run
    from fusion.graph import GraphedStep as GraphedStep
    from fusion.members.assemble import fuse as fuse
    from fusion.members.fused_model import FusedModel as FusedModel
    from fusion.members.lora import pad_lora as pad_lora
    from fusion.members.lora import trim_lora as trim_lora
    from fusion.optim import FusedOptimizer as FusedOptimizer
    from fusion.optim import fused_optimizer as fused_optimizer
    from fusion.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from fusion.optim.loss_scale import LossScale as LossScale
    from fusion.optim.schedules import lr_factor as lr_factor
    from fusion.structure import fusion_key as fusion_key
    from fusion.width import plan_fusion as plan_fusion
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__)
