"""A narrow stand-in for a wide model, in maximal update parametrization (muP) relative to the wide model.

Tune the stand-in. Its best hyperparameters are near the best of the wide model. The wide model stays an ordinary model
in standard parametrization under its ordinary optimizer. Source: Yang et al., "Tensor Programs V" (arXiv:2203.03466),
table 8.
"""

from surrogate.argument_checks import PlanMismatch
from surrogate.build import SurrogatePlan, make_surrogate, plan_surrogate
from surrogate.coordinates import coordinate_check
from surrogate.roles_and_multipliers import lr_multipliers, parameter_roles, weight_decay_multipliers
from surrogate.shrink import ShrinkPlan, plan_shrink, shrink
from surrogate.transfer import plain_score_fn, transfer_check
from surrogate.transfer_verdict import compare_rankings, doubtful_hyperparameters

__distribution__ = "hydro-rasda"  # name on PyPI, which tells this package from others named `surrogate`

__all__ = [
    "PlanMismatch",
    "ShrinkPlan",
    "SurrogatePlan",
    "compare_rankings",
    "coordinate_check",
    "doubtful_hyperparameters",
    "lr_multipliers",
    "make_surrogate",
    "parameter_roles",
    "plain_score_fn",
    "plan_shrink",
    "plan_surrogate",
    "shrink",
    "transfer_check",
    "weight_decay_multipliers",
]
