"""The transfer check, as the journal records it. It tests whether surrogates rank trials as full-size models do.

- `check/to-{epoch}/chosen/...`: the trials that train at full size, ordered by their surrogates' scores after this
  epoch, best first.
- `check/trial-{n}/first`: the full-size metric after the same number of epochs; None if the trial diverged or failed.
  The best trial also has `check/trial-{n}/again`, from another seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydro_rasda.history.history import History
from hydro_rasda.history.lines import number_of

if TYPE_CHECKING:
    from surrogate.transfer_verdict import RankComparison

FEWEST = 4
"""Fewest trials that can be compared."""

_CHOSEN = re.compile(r"check/to-(\d+)/chosen/.*")


def check_keys(chosen: Sequence[int]) -> list[tuple[str, int]]:
    """Return the unit's name and the trial of each training of the transfer check. The first trial trains twice."""
    first = [(f"check/trial-{number}/first", number) for number in chosen]
    return [*first, (f"check/trial-{chosen[0]}/again", chosen[0])]


def compare_checked(history: History, chosen: Sequence[int], narrow: Sequence[float]) -> RankComparison:
    """Compare the ranking by full-size scores, which must all be recorded, with that by surrogates' scores `narrow`."""
    from surrogate import compare_rankings  # imported here, because it imports torch, which most callers do not need

    *wide, twice = (number_of(history.checked[key]) for key, _ in check_keys(chosen))
    return compare_rankings(
        narrow,
        wide,
        mode=history.settings.mode,
        top_k=min(3, history.settings.race.top_k),
        tolerance=abs(wide[0] - twice) if math.isfinite(wide[0] - twice) else 0.0,
    )


def transfer_of(history: History) -> RankComparison | None:
    """Return the result of the last transfer check; None if there was no check, or it is not over."""
    found = None
    for key, value in history.checked.items():
        if (name := _CHOSEN.fullmatch(key)) is not None:
            found = int(name[1]), value
    if found is None or len(found[1]) < FEWEST or any(key not in history.checked for key, _ in check_keys(found[1])):
        return None
    epochs, chosen = found
    narrow = [history.score_at("sweep", number, epochs) for number in chosen]
    return compare_checked(history, chosen, narrow)
