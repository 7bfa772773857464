"""Check the surrogates' ranking: a few configurations are tried at full size, early in the sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusion.warn import warn
from hydro_rasda.config import Mode
from hydro_rasda.contracts import FullSizeOutcome, FullSizeTask, FullSizeTrainer, Span
from hydro_rasda.run.journal import Unit
from hydro_rasda.run.state import Run, shortened
from hydro_rasda.run.transfer_stage import FEWEST, check_keys, choose_checked, compare_checked
from hydro_rasda.schedulers import rank
from hydro_rasda.seeds import next_seed
from surrogate.transfer_verdict import RankComparison

CHECKED = 6
"""Configurations that are tried at full size, spread evenly over the surrogates' ranking."""


def check_transfer(
    run: Run, scores: Mapping[int, float], epochs: int, device: FullSizeTrainer
) -> RankComparison | None:
    """Compare the surrogates' first milestone with full-size trainings of the same length.

    The best of them trains twice, from two seeds: what lies between the two is the regret that counts as none.

    Returns:
        Rank correlation, regret and verdict; None where fewer than four trials have a finite metric.
    """
    chosen = choose_checked(run, epochs, scores, lambda: _spread(scores, run.settings.mode))
    if len(chosen) < FEWEST:
        return None
    run.begin_stage("transfer check", epochs * (len(chosen) + 1))
    seed, span = run.settings.seed, Span(0, epochs)
    keys, seeds = check_keys(chosen), [*[seed] * len(chosen), next_seed(seed)]
    beside, horizon = len(keys), run.problem.horizon if run.problem.horizon == epochs else None
    tasks = [FullSizeTask(*key, span, None, s, beside, horizon) for key, s in zip(keys, seeds, strict=True)]
    for outcome in device.train_each([task for task in tasks if not run.store.done(task.key)]):
        run.record(outcome.task.key, _unit(run, outcome))
    run.end_stage()
    comparison = compare_checked(run, chosen, [scores[number] for number in chosen])
    run.say(f"transfer is {comparison.verdict}: rank correlation {comparison.rho:.2f} with full size")
    if comparison.verdict != "trusted":
        warn(f"transfer to full size is {comparison.verdict}. {comparison.advice}")
    return comparison


def _spread(scores: Mapping[int, float], mode: Mode) -> Sequence[int]:
    """Trials from the best to the worst on their surrogates, at even distances."""
    numbers = [n for n in sorted(scores) if math.isfinite(scores[n])]
    best_first = [numbers[i] for i in rank([scores[n] for n in numbers], mode)]
    count = min(CHECKED, len(best_first))
    return [best_first[round(i * (len(best_first) - 1) / max(1, count - 1))] for i in range(count)]


def _unit(run: Run, outcome: FullSizeOutcome) -> Unit:
    task, history = outcome.task, outcome.history
    if outcome.error is not None:
        line = {"event": "check failed", "trial": task.number, "error": shortened(outcome.error)}
        return Unit(None, [line], outcome.seconds)
    reached, metrics = history[-1]
    return Unit(metrics[run.settings.metric] if reached == task.span.stop else None, [], outcome.seconds)
