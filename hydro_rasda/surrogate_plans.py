"""How a problem's models are made narrower: found once for all that are alike, and told to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydro_rasda.config_access import Reads, all_of
from surrogate import ShrinkPlan, SurrogatePlan

MOST = 256
"""So many of either kind are kept: where more are found, few models are alike."""


@dataclass
class Plans:
    """Plans for the models of one model function, as plain values.

    Attributes:
        by_structure: Of models that take no width, by a digest of the full-size model's structure.
        by_reads: Of models that take one, by width ratio and what was read of the configuration; None where there can
            be no plan.
        roles: Of the parameters of full-size models, by the parameters' names and shapes; see `lr_roles`.
    """

    by_structure: dict[str, ShrinkPlan] = field(default_factory=dict)
    by_reads: dict[tuple[float, Reads], SurrogatePlan | None] = field(default_factory=dict)
    roles: dict[tuple[tuple[str, tuple[int, ...]], ...], Mapping[str, str]] = field(default_factory=dict)

    def update(self, other: Plans) -> None:
        """Take over what another process found."""
        for structure, shrink_plan in other.by_structure.items():
            self.keep_for_structure(structure, shrink_plan)
        for (width_ratio, reads), plan in other.by_reads.items():
            self.keep_for_reads(width_ratio, reads, plan)
        self.roles.update(other.roles)

    def keep_for_structure(self, structure: str, plan: ShrinkPlan) -> None:
        """Keep a plan, unless there are too many."""
        if len(self.by_structure) < MOST:
            self.by_structure[structure] = plan

    def keep_for_reads(self, width_ratio: float, reads: Reads, plan: SurrogatePlan | None) -> None:
        if len(self.by_reads) < MOST:
            self.by_reads[width_ratio, reads] = plan

    def known_for(self, width_ratio: float, config: Mapping[str, Any]) -> tuple[float, Reads] | None:
        """The key of the plan that holds for a configuration, if one was found."""
        own = all_of(config)
        return next((key for key in self.by_reads if key[0] == width_ratio and key[1] <= own), None)
