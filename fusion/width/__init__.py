"""Chooses how many trials to fuse, by measured speed and memory; splits the batch if not even one trial fits."""

from typing import TYPE_CHECKING

from fusion.lazy_names import lazy_exports

if TYPE_CHECKING:
    from fusion.width.memory import keep_freed_memory as keep_freed_memory
    from fusion.width.plan import FusionPlan as FusionPlan
    from fusion.width.probe import plan_fusion as plan_fusion
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__)
