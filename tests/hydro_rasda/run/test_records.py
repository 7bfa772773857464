from __future__ import annotations

import math
from dataclasses import replace

from hydro_rasda import Cost


def test_spared_seconds() -> None:
    # 100 surrogate epochs at the 2 s of a full-size epoch would have taken 200 s; they took 50 s.
    cost = Cost(
        surrogate_epochs=100,
        surrogate_seconds=50.0,
        target_epochs=10,
        target_seconds=35.0,
        target_epoch_seconds=2.0,
        seconds=95.0,
    )
    assert cost.spared_seconds == 150.0
    assert math.isnan(replace(cost, target_epoch_seconds=math.nan).spared_seconds)
