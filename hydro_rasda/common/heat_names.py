"""The names of the heats, in journals, events, tables and `--json` alike."""

from __future__ import annotations

from typing import Final, Literal, get_args

HeatName = Literal["sweep", "middle", "race"]
"""The sweep trains many trials on narrow surrogates. The middle heat trains the best of them on wider surrogates. The
race trains a few at full size."""

HEAT_NAMES: Final[tuple[HeatName, ...]] = get_args(HeatName)
"""The names in the order in which a run has these heats."""

RunPart = HeatName | Literal["transfer check"]
"""A part of a run for which `Run.begin_heat` announces the epochs: a heat, or the transfer check (`check_transfer`)."""
