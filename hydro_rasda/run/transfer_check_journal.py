"""The check of the transfer, as the journal keeps it.

- `check/to-{epoch}/chosen/...`: the trials that are tried at full size, from the best to the worst by their surrogates
  after this epoch.
- `check/trial-{n}/first`: the metric at full size after as many epochs, None if the trial diverged or failed. The best
  trial also has `check/trial-{n}/again`, from another seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hydro_rasda.run.journal import number_of
from hydro_rasda.run.state import Run

if TYPE_CHECKING:
    from surrogate.transfer_verdict import RankComparison

FEWEST = 4
"""Fewer trials cannot be compared."""

_CHOSEN = re.compile(r"check/to-(\d+)/chosen/.*")


def choose_checked(
    run: Run, epochs: int, scores: Mapping[int, float], choice: Callable[[], Sequence[int]]
) -> list[int]:
    """Choose, once in the life of the run, the trials with these scores that are tried at full size."""
    return run.decide(f"check/to-{epochs}/chosen", scores, choice)


def check_keys(chosen: Sequence[int]) -> list[tuple[str, int]]:
    """Return the units of the check with their trials: one for each trial, and one more for the first."""
    first = [(f"check/trial-{number}/first", number) for number in chosen]
    return [*first, (f"check/trial-{chosen[0]}/again", chosen[0])]


def compare_checked(run: Run, chosen: Sequence[int], narrow: Sequence[float]) -> RankComparison:
    """Compare the ranking by the full-size scores, which are all recorded, with that by the surrogates' scores."""
    from surrogate import compare_rankings  # imports torch, so that only a run that was checked waits for it

    *wide, twice = (number_of(run.store.units()[key].value) for key, _ in check_keys(chosen))
    return compare_rankings(
        narrow,
        wide,
        mode=run.settings.mode,
        top_k=min(3, run.settings.race.top_k),
        tolerance=abs(wide[0] - twice) if math.isfinite(wide[0] - twice) else 0.0,
    )


def recalled_transfer(run: Run) -> RankComparison | None:
    """Return the result of the last check; None if there is none, or it is not over."""
    found = None
    for key, unit in run.store.units().items():
        if (name := _CHOSEN.fullmatch(key)) is not None:
            found = int(name[1]), unit.value
    if found is None or len(found[1]) < FEWEST or not all(run.store.done(key) for key, _ in check_keys(found[1])):
        return None
    epochs, chosen = found
    return compare_checked(run, chosen, [run.score_at("surrogate", number, epochs) for number in chosen])
