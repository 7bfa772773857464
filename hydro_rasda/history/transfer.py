"""The check of the transfer, as the journal keeps it.

- `check/to-{epoch}/chosen/...`: the trials that are tried at full size, from the best to the worst by their surrogates
  after this epoch.
- `check/trial-{n}/first`: the metric at full size after as many epochs, None if the trial diverged or failed. The best
  trial also has `check/trial-{n}/again`, from another seed.
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
"""Fewer trials cannot be compared."""

_CHOSEN = re.compile(r"check/to-(\d+)/chosen/.*")


def check_keys(chosen: Sequence[int]) -> list[tuple[str, int]]:
    """Return the units of the check with their trials: one for each trial, and one more for the first."""
    first = [(f"check/trial-{number}/first", number) for number in chosen]
    return [*first, (f"check/trial-{chosen[0]}/again", chosen[0])]


def compare_checked(history: History, chosen: Sequence[int], narrow: Sequence[float]) -> RankComparison:
    """Compare the ranking by the full-size scores, which are all recorded, with that by the surrogates' scores."""
    from surrogate import compare_rankings  # imports torch, so that only a run that was checked waits for it

    *wide, twice = (number_of(history.checked[key]) for key, _ in check_keys(chosen))
    return compare_rankings(
        narrow,
        wide,
        mode=history.settings.mode,
        top_k=min(3, history.settings.race.top_k),
        tolerance=abs(wide[0] - twice) if math.isfinite(wide[0] - twice) else 0.0,
    )


def transfer_of(history: History) -> RankComparison | None:
    """Return the result of the last check; None if there is none, or it is not over."""
    found = None
    for key, value in history.checked.items():
        if (name := _CHOSEN.fullmatch(key)) is not None:
            found = int(name[1]), value
    if found is None or len(found[1]) < FEWEST or any(key not in history.checked for key, _ in check_keys(found[1])):
        return None
    epochs, chosen = found
    narrow = [history.score_at("sweep", number, epochs) for number in chosen]
    return compare_checked(history, chosen, narrow)
