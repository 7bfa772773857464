"""Rules for running one operator for K members at once, where torch's batching rule is slow or missing.

Many rules fold K into another axis. For example, K members with N samples each become one axis of K*N samples, so
torch's kernel runs once.
"""

from fusion.evaluate.rules.autograd_functions import functions_member_by_member
from fusion.evaluate.rules.member import no_warnings_of_loops
from fusion.evaluate.rules.reading import readable
from fusion.evaluate.rules.table import folded

__all__ = ["folded", "functions_member_by_member", "no_warnings_of_loops", "readable"]
