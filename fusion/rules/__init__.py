"""Rules that run one operator for K members at once, faster than torch's batching rules or instead of missing ones."""

from fusion.rules.reading import readable
from fusion.rules.table import folded

__all__ = ["folded", "readable"]
