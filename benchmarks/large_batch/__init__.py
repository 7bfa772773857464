"""Learning rate and warm-up for a batch that grows with the workers."""

from benchmarks.large_batch.cells import RULES
from benchmarks.large_batch.page import FILE, NAMES, defaults, verdicts

__all__ = ["FILE", "NAMES", "RULES", "defaults", "verdicts"]
