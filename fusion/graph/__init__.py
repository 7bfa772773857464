"""A training step that is recorded and replayed as one launch, or compiled."""

from fusion.graph.step import GraphedStep, GraphWarning, can_record

__all__ = ["GraphWarning", "GraphedStep", "can_record"]
