"""A whole training step as one launch."""

from fusion.graph.step import GraphedStep, GraphWarning, can_record

__all__ = ["GraphWarning", "GraphedStep", "can_record"]
