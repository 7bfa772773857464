"""A narrow stand-in for a wide model, in maximal update parametrization (muP) relative to it.

Tune the stand-in; what is best for it is best for the wide model, which stays an ordinary model in standard
parametrization under its ordinary optimizer. Source: Yang et al., "Tensor Programs V" (arXiv:2203.03466),
table 8.
"""

from surrogate.build import make_surrogate
from surrogate.multipliers import lr_multipliers, weight_decay_multipliers
from surrogate.shrink import shrink

__all__ = ["lr_multipliers", "make_surrogate", "shrink", "weight_decay_multipliers"]
