"""Profiles of jobs that one call of `pack` learnt, kept for the next one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydro_rasda.packing.devices import Device
from hydro_rasda.packing.job_estimates import Estimates, Slowdowns
from hydro_rasda.run.cache import is_positive, recall, remember


@dataclass(frozen=True)
class Learnt:
    """Estimates and slowdowns of the jobs that are started from one folder, on GPUs or on CPUs, kept under `key`."""

    key: str
    estimates: Estimates
    slowdowns: Slowdowns

    @staticmethod
    def recall(devices: Sequence[Device]) -> Learnt:
        """Return the sound profiles of the last weeks."""
        where = "GPUs" if any(device.gpu for device in devices) else "CPUs"
        key = f"packed on {where} from {Path.cwd()}"
        kept = recall(key) or {}
        taken = {name: float(value) for name, value in _items(kept.get("estimates")) if is_positive(value)}
        slower = {
            kind: {other: (float(found[0]), float(found[1])) for other, found in _items(of) if _is_factor(found)}
            for kind, of in _items(kept.get("slowdowns"))
        }
        return Learnt(key, Estimates(taken), Slowdowns(slower))

    def keep(self) -> None:
        remember(self.key, {"estimates": self.estimates.learnt(), "slowdowns": self.slowdowns.learnt()})


def _items(kept: Any) -> list[tuple[str, Any]]:
    return list(kept.items()) if isinstance(kept, Mapping) else []


def _is_factor(found: Any) -> bool:
    pair = isinstance(found, list) and len(found) == 2 and all(type(part) in (int, float) for part in found)
    return pair and all(math.isfinite(part) for part in found)
