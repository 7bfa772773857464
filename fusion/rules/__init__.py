"""Rules that run one operator for K members at once, faster than torch's batching rules or instead of missing ones."""

from fusion.rules.autograd_functions import functions_member_by_member
from fusion.rules.member import no_warnings_of_loops
from fusion.rules.reading import readable
from fusion.rules.table import folded

__all__ = ["folded", "functions_member_by_member", "no_warnings_of_loops", "readable"]
