"""Chooses how many trials to fuse, by measured speed and memory; splits the batch if not even one trial fits."""

from fusion.width.memory import keep_freed_memory
from fusion.width.plan import FusionPlan
from fusion.width.probe import plan_fusion

__all__ = ["FusionPlan", "keep_freed_memory", "plan_fusion"]
