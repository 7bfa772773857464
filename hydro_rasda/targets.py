"""Stages 3 and 4 on one device: the finalists at full size, halved at RASDA's milestones.

What is trained at full size is recorded alike on every backend, so that each goes on with what another began:

- `target/trial-{n}/to-{epoch}`: a trial's metrics since its unit before, and `{"checkpoint": name}` of what training
  can go on from after this epoch, None where nothing was saved; beside it, which epoch's weights it keeps as "best",
  and whether it was "swept": trained by the sweep, whose metrics up to there are then the trial's own.
- `target/trial-{n}/failed-after-{epoch}`: its traceback.
- `target/trial-{n}/ended-after-{epoch}`: a scheduler of Ray's is done with it.
- `target/done`: the stage is over, for the finalists that it names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from .problem import Trial
from .run import Run, metric_lines
from .schedulers import SuccessiveHalving, milestones
from .single import TargetOutcome, TargetTask
from .space import Config
from .store import Line, Unit
from .train import Span

DONE = "target/done"

_UNIT = re.compile(r"target/trial-(?P<trial>\d+)/(?P<what>to|failed-after|ended-after)-(?P<epoch>\d+)")
_KEPT = re.compile(r"target/to-(\d+)/kept.*")


class TargetTrainer(Protocol):
    """Trains full-size models."""

    def train_each(self, tasks: Iterable[TargetTask]) -> Iterator[TargetOutcome]:
        """Train full-size models, each as far as the time budget goes.

        Args:
            tasks: Independent of each other. The next is taken when it can begin.

        Yields:
            What each gave, as they are done.
        """
        ...


def train_targets(run: Run, finalists: Sequence[int], device: TargetTrainer) -> list[int]:
    """Train the full-size models, halving them at RASDA's milestones by where each is expected to end.

    What earlier processes trained counts, on whichever backend; a stage that is over trains nothing.

    Returns:
        All that were trained at full size: the finalists, and those of an earlier call with fewer samples or less time.
    """
    recall_targets(run)
    settle_configs(run)
    if not targets_over(run, finalists):
        forget_unsaved(run)
        _race(run, finalists, device)
    return tried_targets(run, finalists)


def _race(run: Run, finalists: Sequence[int], device: TargetTrainer) -> None:
    settings = run.settings
    stops = milestones(settings.full_grace_period, settings.max_t, settings.rasda.scaling_factor)
    halving = SuccessiveHalving(stops, settings.rasda.reduction_factor, settings.mode)
    left = list(finalists)
    for stop in stops:
        run.progress.begin("full size", sum(max(0, stop - run.epochs("target", n)) for n in left))
        _train_to(stop, run, left, device)
        run.progress.end()
        if any(_goes_on(run, n, stop) for n in left):
            run.end_by_time("target")
            run.progress.say("`time_budget_s` is spent: the same call with more goes on from here")
            return
        scores = {number: run.score_at("target", number, stop) for number in left}
        curves = {number: run.curve("surrogate", number) for number in left}
        foreseen = expected(scores, curves, stop)
        left = run.decide(f"target/to-{stop}/kept", left, lambda: halving.promote(foreseen))  # noqa: B023 (called at once)
        if not left:
            break
        if len(scores) > 1 or stop == stops[-1]:
            kept = f"{len(left)} of {len(scores)} go on" if stop < stops[-1] else "done"
            best = f"best {run.problem.metric} {scores[left[0]]:.4g} (trial {left[0]})"
            run.progress.say(f"full size at epoch {stop}: {kept}, {best}")
    end_targets(run, finalists)


def expected(scores: Mapping[int, float], curves: Mapping[int, Mapping[int, float]], epoch: int) -> dict[int, float]:
    """What trials at an epoch are expected to score in the end: each changes from here on as its surrogate did.

    Curves cross late where learning rates decay, or where a configuration overfits: a trial that is behind now can be
    the best in the end. Its surrogate, which trained under the same schedule, has been there.

    Args:
        scores: Each trial's at this epoch.
        curves: Each trial's surrogate's, by epoch. They count up to the last epoch that all of them reached, and
            nothing where that lies behind.
        epoch: Where the trials are.

    >>> expected({0: 0.5, 1: 0.6}, {0: {1: 0.7, 2: 0.7}, 1: {1: 0.9, 2: 0.6}}, epoch=1)
    {0: 0.5, 1: 0.29999999999999993}
    """
    last = min((max(curve, default=0) for curve in curves.values()), default=0)
    if last <= epoch:
        return dict(scores)
    changes = {number: curve[last] - curve[epoch] for number, curve in curves.items()}
    return {n: score + changes[n] if math.isfinite(changes[n]) else score for n, score in scores.items()}


def recall_targets(run: Run) -> None:
    """Take in what was recorded of the full-size stage, by whichever backend; once or again."""
    run.checkpoints.clear()  # else the last of them would seem to come before the first
    for key in run.store.units():
        if (name := _UNIT.fullmatch(key)) is not None:
            unit = run.recall(key)
            if name["what"] == "to":
                _went_on(run, int(name["trial"]), unit)


def decided_targets(run: Run) -> dict[int, bool]:
    """Of full-size trials that stand where a decision was taken, here or by a scheduler on Ray, whether they go on."""
    decided: dict[int, bool] = {}
    reached: dict[int, int] = {}
    for key, unit in run.store.units().items():
        if (name := _UNIT.fullmatch(key)) is not None:
            number = int(name["trial"])
            if name["what"] == "to":
                reached[number] = int(name["epoch"])
                decided.pop(number, None)
            elif name["what"] == "ended-after":
                decided[number] = False
        elif (decision := _KEPT.fullmatch(key)) is not None:
            there = (number for number, epoch in reached.items() if epoch == int(decision[1]))
            decided |= {number: number in unit.value for number in there}
    return decided


def trained_config(run: Run, number: int) -> tuple[int, Config]:
    """What a trial's last checkpoint was trained with, and whose sampled configuration that began as.

    PBT has a trial go on with another one's model, and changes what the optimizer reads.
    """
    name = run.checkpoints.get(number)
    value = run.store.units()[name].value if name is not None else {}
    origin = value.get("origin", number)
    return origin, {**run.trials[origin].config, **value.get("mutable", {})}


def settle_configs(run: Run) -> None:
    """Have the run's configurations say what the checkpoints were trained with."""
    run.trials |= {n: Trial(n, trained_config(run, n)[1]) for n in run.checkpoints if n in run.trials}


def tried_targets(run: Run, finalists: Sequence[int]) -> list[int]:
    """The finalists, and all others that were trained at full size."""
    return [*finalists, *sorted({n for stage, n in run.metrics if stage == "target"} - set(finalists))]


def forget_unsaved(run: Run) -> None:
    """Have trials that can still go on count as far as their last checkpoints: the rest will be trained again."""
    for stage, number in list(run.metrics):
        if stage == "target" and not ended_early(run, number):
            saved = saved_epochs(run, number)
            kept = [line for line in run.metrics.pop((stage, number)) if line["epoch"] <= saved]
            run.metrics |= {(stage, number): kept} if kept else {}


def saved_epochs(run: Run, number: int) -> int:
    """Epochs after which a trial's last checkpoint was taken; 0 where it has none."""
    name = _UNIT.fullmatch(run.checkpoints.get(number, ""))
    return int(name["epoch"]) if name else 0


def record_epochs(
    run: Run,
    number: int,
    lines: Sequence[Line],
    state: Mapping[str, Any] | None,
    seconds: float = 0.0,
    **more: Any,
) -> None:
    """Keep epochs of a full-size trial: first the checkpoint, then the journal's lines.

    Args:
        run: It is taken in there, too.
        number: The trial.
        lines: Its metrics since the last that was recorded, or from an earlier epoch on where it went back; the last
            line's epoch is the one that was reached.
        state: To go on from there; None leaves the checkpoint before.
        seconds: Wall time that they took.
        more: What else the unit's value says: plain values.
    """
    _keep(run, number, lines[-1]["epoch"], lines, state, seconds, more)


def record_swept(run: Run, number: int, state: Mapping[str, Any]) -> None:
    """Keep what the sweep trained of a trial, at full width, as the beginning of its full-size training."""
    _keep(run, number, run.epochs("surrogate", number), [], state, 0.0, {"swept": True})


def recorded_epochs(run: Run, number: int) -> int:
    """Epochs that full-size training of a trial has come to by what is recorded, taken in or not."""
    names = [name for key in run.store.units() if (name := _UNIT.fullmatch(key)) and int(name["trial"]) == number]
    return max((int(name["epoch"]) for name in names), default=0)


def _keep(
    run: Run,
    number: int,
    epoch: int,
    lines: Sequence[Line],
    state: Mapping[str, Any] | None,
    seconds: float,
    more: dict[str, Any],
) -> None:
    key = f"target/trial-{number}/to-{epoch}"
    if state is not None:
        run.store.save(key, state)
        if "best" in state:
            more["best"] = {name: state["best"][name] for name in ("epoch", "score")}
    value = {"checkpoint": key if state is not None else None, **more}
    _went_on(run, number, run.record(key, Unit(value, list(lines), seconds), again=True))


def record_failure(run: Run, number: int, error: str, seconds: float = 0.0) -> None:
    """Keep that a full-size trial raised: its traceback."""
    line = {"event": "failed", "trial": number, "error": error}
    key = f"target/trial-{number}/failed-after-{run.epochs('target', number)}"
    run.record(key, Unit(None, [line], seconds), again=True)


def record_end(run: Run, number: int) -> None:
    """Keep that a scheduler ended a full-size trial where it is."""
    run.store.once(f"target/trial-{number}/ended-after-{run.epochs('target', number)}", lambda: None)


def targets_over(run: Run, finalists: Iterable[int]) -> bool:
    """Whether the stage has come to its end with these finalists."""
    return run.store.done(DONE) and run.store.units()[DONE].value == sorted(finalists)


def end_targets(run: Run, finalists: Iterable[int]) -> None:
    """Keep that the stage has come to its end with these finalists."""
    run.record(DONE, Unit(sorted(finalists)), again=True)


def ended_early(run: Run, number: int) -> bool:
    """Whether a full-size trial cannot go on, time or no time: it raised, or it diverged."""
    began = run.epochs("target", number) > 0
    return number in run.failures or (began and not math.isfinite(run.score("target", number)))


def _train_to(stop: int, run: Run, numbers: Sequence[int], device: TargetTrainer) -> None:
    """Train finalists to a milestone, in spans that end where a checkpoint is due, or as far as time goes."""
    while tasks := [_next_task(run, n, stop, len(numbers)) for n in numbers if _goes_on(run, n, stop)]:
        began = False
        # Those that were interrupted last time catch up first.
        tasks.sort(key=lambda task: task.span.start)
        for outcome in device.train_each(_in_time(run, tasks)):
            began = True
            _record(run, outcome)
        if not began:
            return


def _goes_on(run: Run, number: int, stop: int) -> bool:
    """Whether a full-size trial has epochs to train before a milestone, and can."""
    return run.epochs("target", number) < stop and not ended_early(run, number)


def _next_task(run: Run, number: int, stop: int, beside: int) -> TargetTask:
    """What is left to do for a finalist before the milestone."""
    start, every = run.epochs("target", number), run.settings.checkpoint_every or stop
    span = Span(start, min(stop, start - start % every + every))
    key = f"target/trial-{number}/to-{span.stop}"
    return TargetTask(key, number, span, run.checkpoints.get(number), run.settings.seed, beside)


def _in_time(run: Run, tasks: Sequence[TargetTask]) -> Iterator[TargetTask]:
    """The tasks that the time budget allows to begin; the first of all begins without."""
    began = any(stage == "target" for stage, _ in run.metrics)
    for task in tasks:
        if began and run.out_of_time("target"):
            return
        began = True
        yield task


def _record(run: Run, outcome: TargetOutcome) -> None:
    number = outcome.task.number
    if outcome.error is not None:
        record_failure(run, number, outcome.error, outcome.seconds)
    else:
        assert outcome.state is not None
        lines = metric_lines("target", number, outcome.history)
        record_epochs(run, number, lines, outcome.state, outcome.seconds)


def _went_on(run: Run, number: int, unit: Unit) -> None:
    """A trial has trained since it failed, if it did, and may have left a newer checkpoint."""
    run.failures.pop(number, None)
    before, name = run.checkpoints.get(number), unit.value["checkpoint"]
    if name is None:
        return
    run.checkpoints[number] = name
    if before not in (None, name):
        run.store.discard([before])
    if (best := unit.value.get("best")) is not None:
        run.best[number] = best["epoch"], best["score"]
    if unit.value.get("swept"):
        swept = run.metrics["surrogate", number]
        run.metrics["target", number] = [line for line in swept if line["epoch"] <= saved_epochs(run, number)]
