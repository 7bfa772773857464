"""Former place of `fusion.rules.member`."""

from fusion.rules.member import Member
from fusion.rules.member import fold as _fold

__all__ = ["Member", "_fold"]
