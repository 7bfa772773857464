"""Whether the surrogates' ranking can be trusted: a few configurations tried at full size, early in the sweep."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Mapping, Sequence

from surrogate import RankComparison, compare_rankings

from .config import Mode
from .run import Run
from .schedulers import rank
from .store import Unit
from .targets import TargetTrainer
from .train import Span

CHECKED = 6
"""Configurations that are tried at full size, spread evenly over the surrogates' ranking."""


def check_transfer(run: Run, scores: Mapping[int, float], epochs: int, device: TargetTrainer) -> RankComparison | None:
    """Compare the surrogates' first milestone with full-size trainings of the same length.

    The best of them trains twice, from two seeds: what lies between the two is the regret that counts as none.

    Args:
        run: Its surrogates are at the first milestone.
        scores: Each trial's metric there.
        epochs: That milestone.
        device: Trains the full-size models.

    Returns:
        Rank correlation, regret and verdict; None where fewer than four trials have a finite metric.

    Warns:
        UserWarning: where the verdict is not "trusted", with what to do.
    """
    chosen = _spread(scores, run.settings.mode)
    if len(chosen) < 4:
        return None
    run.progress.begin("transfer check", epochs * (len(chosen) + 1))
    seed = run.settings.seed
    wide = [_score(run, device, number, epochs, "first", seed) for number in chosen]
    twice = _score(run, device, chosen[0], epochs, "again", seed + 1)
    run.progress.end()
    comparison = compare_rankings(
        [scores[number] for number in chosen],
        wide,
        mode=run.settings.mode,
        top_k=min(3, run.settings.top_k),
        tolerance=abs(wide[0] - twice) if math.isfinite(wide[0] - twice) else 0.0,
    )
    run.progress.say(f"transfer is {comparison.verdict}: rank correlation {comparison.rho:.2f} with full size")
    if comparison.verdict != "trusted":
        warnings.warn(f"transfer to full size is {comparison.verdict}. {comparison.advice}", stacklevel=4)
    return comparison


def _spread(scores: Mapping[int, float], mode: Mode) -> Sequence[int]:
    """Trials from the best to the worst on their surrogates, at even distances."""
    numbers = [n for n in sorted(scores) if math.isfinite(scores[n])]
    best_first = [numbers[i] for i in rank([scores[n] for n in numbers], mode)]
    count = min(CHECKED, len(best_first))
    return [best_first[round(i * (len(best_first) - 1) / max(1, count - 1))] for i in range(count)]


def _score(run: Run, device: TargetTrainer, number: int, epochs: int, which: str, seed: int) -> float:
    def train() -> Unit:
        try:
            _, history = device.train_target(number, Span(0, epochs), None, seed)
        except Exception:
            return Unit(None, [{"event": "check failed", "trial": number, "error": traceback.format_exc()}])
        reached, metrics = history[-1]
        return Unit(metrics[run.problem.metric] if reached == epochs else None)

    value = run.store.once(f"check/trial-{number}/{which}", train).value
    return math.nan if value is None else float(value)
