"""A whole training step as one launch."""

from fusion.graph.step import GraphedStep, GraphWarning

__all__ = ["GraphWarning", "GraphedStep"]
