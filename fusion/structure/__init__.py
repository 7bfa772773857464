"""The structure that modules must share to be fused. It is described by plain values, which are compared as keys."""

from fusion.structure.float_slots import FloatSlot
from fusion.structure.signature import HOOK, UNKNOWN, describe
from fusion.structure.structure_key import (
    FusionKey,
    check_module,
    check_same,
    fusion_key,
    hidden_by_wrapper,
    of_present,
)

__all__ = [
    "HOOK",
    "UNKNOWN",
    "FloatSlot",
    "FusionKey",
    "check_module",
    "check_same",
    "describe",
    "fusion_key",
    "hidden_by_wrapper",
    "of_present",
]
