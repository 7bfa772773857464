"""A narrow stand-in for a wide model, in maximal update parametrization (muP) relative to it.

Tune the stand-in; what is best for it is best for the wide model, which stays an ordinary model in standard
parametrization under its ordinary optimizer. Source: Yang et al., "Tensor Programs V" (arXiv:2203.03466),
table 8.
"""

from surrogate.build import SurrogatePlan, make_surrogate, plan_surrogate
from surrogate.checks import PlanMismatch
from surrogate.coordinates import CoordinateCheck, coordinate_check
from surrogate.hyperparameters import doubtful_hyperparameters
from surrogate.multipliers import lr_multipliers, weight_decay_multipliers
from surrogate.ranking import RankComparison, compare_rankings
from surrogate.shrink import shrink
from surrogate.shrink_plan import ShrinkPlan, plan_shrink
from surrogate.transfer import TransferCheck, plain_score_fn, transfer_check

__distribution__ = "hydro-rasda"  # which tells it from other packages of this name

__all__ = [
    "CoordinateCheck",
    "PlanMismatch",
    "RankComparison",
    "ShrinkPlan",
    "SurrogatePlan",
    "TransferCheck",
    "compare_rankings",
    "coordinate_check",
    "doubtful_hyperparameters",
    "lr_multipliers",
    "make_surrogate",
    "plain_score_fn",
    "plan_shrink",
    "plan_surrogate",
    "shrink",
    "transfer_check",
    "weight_decay_multipliers",
]
