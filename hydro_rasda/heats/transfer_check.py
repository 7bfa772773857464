"""Check whether surrogates rank configurations as full-size models do: a few train at full size early in the sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fusion.warn import warn
from hydro_rasda.common.seeds import next_seed
from hydro_rasda.contracts import Devices, Finished, Span, full_size_task
from hydro_rasda.heats.train_tasks import train_tasks
from hydro_rasda.history.lines import Unit, shortened
from hydro_rasda.history.transfer import FEWEST, check_keys, compare_checked
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers.ranking import ranked
from hydro_rasda.settings.config import Mode
from surrogate.transfer_verdict import RankComparison

CHECKED = 6
"""Number of configurations to train at full size, evenly spread over the surrogates' ranking."""


def check_transfer(
    run: Run, scores: Mapping[int, float], epochs: int, devices: Devices, others: Callable[[Finished], None]
) -> RankComparison | None:
    """Compare the surrogates' scores at the first milestone with full-size trainings of the same length.

    The best configuration trains twice, from two seeds. A regret that is not larger than the difference between these
    two scores counts as none.

    Args:
        scores: Scores of the surrogates at the first milestone, by trial.
        epochs: The first milestone.
        others: Called with each task of the sweep that ends during the check.

    Returns:
        Rank correlation, regret and verdict; None if fewer than four trials have a finite metric, or if time runs out.
    """
    chosen = run.decide(f"check/to-{epochs}/chosen", scores, lambda: _spread(scores, run.settings.mode))
    if len(chosen) < FEWEST:
        return None
    run.begin_heat("transfer check", epochs * (len(chosen) + 1))
    seed, span = run.settings.seed, Span(0, epochs)
    keys, seeds = check_keys(chosen), [*[seed] * len(chosen), next_seed(seed)]
    beside, horizon = len(keys), run.problem.horizon if run.problem.horizon == epochs else None
    tasks = [full_size_task(*key, span, None, s, beside, horizon=horizon) for key, s in zip(keys, seeds, strict=True)]
    # Tasks at which processes died come last.
    last = sorted(tasks, key=lambda task: run.store.doing.suspected(task.key))
    left = [task for task in last if not run.store.done(task.key)]
    for finished in train_tasks(devices, left, lambda: not run.out_of_time("sweep")):
        if finished.task not in left:
            others(finished)
        elif not _was_cut_short(run, finished):
            run.record(finished.task.key, _unit(run, finished))
    run.end_heat()
    if not all(run.store.done(task.key) for task in tasks):
        run.say("the sweep's share of `time_budget_s` is spent: the check of the transfer is left out")
        return None
    comparison = compare_checked(run.history, chosen, [scores[number] for number in chosen])
    run.say(f"transfer is {comparison.verdict}: rank correlation {comparison.rho:.2f} with full size")
    if comparison.verdict != "trusted":
        warn(f"transfer to full size is {comparison.verdict}. {comparison.advice}")
    return comparison


def _spread(scores: Mapping[int, float], mode: Mode) -> Sequence[int]:
    """Return up to `CHECKED` trials at even distances in the surrogates' ranking, best first."""
    best_first = ranked({n: scores[n] for n in sorted(scores) if math.isfinite(scores[n])}, mode)
    count = min(CHECKED, len(best_first))
    return [best_first[round(i * (len(best_first) - 1) / max(1, count - 1))] for i in range(count)]


def _was_cut_short(run: Run, finished: Finished) -> bool:
    """Tell whether the time budget ended a training before the check's last epoch."""
    task, outcome = finished.task, finished.outcome
    if outcome.error is not None or outcome.ended:
        return False
    reached, metrics = outcome.epochs[-1]
    over = _diverged(metrics) or run.settings.good_enough(metrics[run.settings.metric])
    return reached < task.span.stop and not over


def _diverged(metrics: Mapping[str, float]) -> bool:
    return not math.isfinite(metrics.get("train_loss", 0.0))


def _unit(run: Run, finished: Finished) -> Unit:
    task, outcome = finished.task, finished.outcome
    if outcome.error is not None:
        line = {"event": "check failed", "trial": task.number, "error": shortened(outcome.error)}
        return Unit(None, [line], outcome.seconds)
    # This may be an epoch before the check's last one: a training may end by itself, diverge, or reach `stop_at`.
    _, metrics = outcome.epochs[-1]
    return Unit(None if _diverged(metrics) else metrics[run.settings.metric], [], outcome.seconds)
