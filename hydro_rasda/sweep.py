"""Stages 1 and 2: many configurations on fused surrogates, halved at each rung.

A rung trains every trial that is left to the same milestone, then compares them all at once: who trained first, or
beside whom, does not matter. Within a rung, trials of one fusion key train as one fused model.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Protocol

from fusion import fusion_key

from .fused import Group, GroupTask, multipliers
from .planning import Widths, planned_widths
from .problem import Problem, Trial
from .run import Run
from .schedulers import SuccessiveHalving, milestones, rank
from .search import Search
from .space import DEFAULT_OPTIMIZER, OPTIMIZERS
from .store import Unit
from .train import Span
from .transfer import check_transfer


class GroupTrainer(Protocol):
    """The part of a backend that the sweep needs."""

    def train_groups(self, run: Run, tasks: Sequence[GroupTask]) -> None:
        """Train groups and record each as a unit under its key; leave out what the time budget does not allow."""
        ...


class AllTrialsFailed(RuntimeError):
    """No trial of a stage ended with a finite metric."""


def sweep(run: Run, search: Search, trainer: GroupTrainer) -> list[int]:
    """Try every configuration on its surrogate, halving at each milestone, until the `top_k` best are left.

    Args:
        run: Gets each trial and its metrics.
        search: Gives the configurations; all pass the first rung before any is stopped.
        trainer: Trains groups.

    Returns:
        The finalists' numbers, best first; at most `top_k`.

    Raises:
        AllTrialsFailed: where no trial has a finite metric.
    """
    settings = run.settings
    stops = milestones(settings.grace_period, settings.max_t, settings.reduction_factor)
    halving = SuccessiveHalving(stops, settings.reduction_factor, settings.mode, keep_at_least=settings.top_k)
    rungs = _Rungs(run, search, trainer)
    while trials := search.next_trials():
        run.trials |= {trial.number: trial for trial in trials}
        rungs.train(rungs.admit(trials), Span(0, stops[0]))
    if settings.check_transfer:
        run.transfer = check_transfer(run, stops[0])
    left = sorted(run.trials)
    for start, stop in zip((0, *stops), stops):
        if start:
            rungs.train(left, Span(start, stop))
        left = _halve(run, search, halving, left, stop)
        if len(left) <= settings.top_k:
            break
    rungs.discard()
    return left[: settings.top_k]


class _Rungs:
    """Which trials can be fused, and which checkpoint each would go on from."""

    def __init__(self, run: Run, search: Search, trainer: GroupTrainer) -> None:
        self._run, self._search, self._trainer = run, search, trainer
        self._kinds: dict[int, str] = {}
        self._sources: dict[int, str] = {}
        self._planned: dict[str, Widths] = {}

    def admit(self, trials: Sequence[Trial]) -> list[int]:
        """Build each trial's surrogate, to see with whom it can be fused; a trial whose model fails, fails alone."""
        unit = self._run.unit(f"surrogate/kinds-from-{trials[0].number}", lambda: _kinds(self._run.problem, trials))
        kinds = {int(number): kind for number, kind in unit.value.items()}
        self._kinds |= kinds
        return list(kinds)

    def train(self, numbers: Sequence[int], span: Span) -> None:
        """Train trials for a span of epochs, in groups."""
        trials = self._run.trials
        # Members of one optimizer side by side: their update is then one slice of each fused parameter.
        order = sorted(numbers, key=lambda n: (OPTIMIZERS.index(_optimizer(trials[n])), n))
        tasks = [
            GroupTask(
                key=f"surrogate/to-{span.stop}/group-{min(group.members)}",
                group=group,
                sources=tuple(sorted({self._sources[n] for n in group.members if n in self._sources})),
                span=span,
                batch_size=trials[group.members[0]].batch_size,
            )
            for group in make_groups(self._kinds, order, self._widths(order))
        ]
        store = self._run.store
        if store.done(_decision_key(span.stop)):  # made under a time budget that left some groups out
            tasks = [task for task in tasks if store.done(task.key)]
        before = set(self._sources.values())
        self._trainer.train_groups(self._run, tasks)
        self._sources |= {n: task.key for task in tasks if store.done(task.key) for n in task.group.members}
        store.discard(before - set(self._sources.values()))
        for n in numbers:
            self._search.tell(n, self._run.epochs("surrogate", n), self._run.score("surrogate", n))

    def discard(self) -> None:
        """Remove the surrogates' checkpoints: the finalists start anew at full size."""
        self._run.store.discard(self._sources.values())

    def _widths(self, numbers: Sequence[int]) -> dict[str, Widths]:
        """How to group the trials of each kind."""
        run, of_kind = self._run, Counter(self._kinds[n] for n in numbers)
        width = run.settings.fusion
        if width != "auto":
            return dict.fromkeys(of_kind, Widths(width))
        for kind, count in of_kind.items():
            if kind not in self._planned:
                trial = run.trials[next(n for n in numbers if self._kinds[n] == kind)]
                plan = partial(planned_widths, run.problem, trial, kind, count)
                found = run.store.once(f"surrogate/widths-of-{kind}", lambda: asdict(plan())).value  # noqa: B023
                self._planned[kind] = Widths(**found)
        return self._planned


def _halve(run: Run, search: Search, halving: SuccessiveHalving, left: list[int], stop: int) -> list[int]:
    """Decide a rung over all of its trials, and tell the user and the searcher."""
    scores = {n: run.score("surrogate", n) for n in left}
    cut_short = any(math.isfinite(scores[n]) and run.epochs("surrogate", n) < stop for n in left)
    kept = run.decide(_decision_key(stop), lambda: _deepest(run, left) if cut_short else halving.promote(scores))
    if not kept:
        raise AllTrialsFailed(
            f"all {len(left)} trials diverged or failed by epoch {stop} of the sweep: no finite {run.problem.metric}; "
            f"lower `lr` or look into {run.store.path / 'journal.jsonl'}" + _first_failure(run)
        )
    ended = set(left) - set(kept) if not (cut_short or len(kept) <= run.settings.top_k) else set(left)
    for n in sorted(ended):
        search.close(n, run.epochs("surrogate", n), scores[n])
    best = f"best {run.problem.metric} {scores[kept[0]]:.4g} (trial {kept[0]})"
    run.progress.say(f"surrogates at epoch {stop}: {len(kept)} of {len(left)} go on, {best}")
    return kept


def _deepest(run: Run, left: Sequence[int]) -> list[int]:
    """The finalists where the time budget ended a rung early: who trained longest, then who is best."""
    scores = [run.score("surrogate", n) for n in left]
    best_first = [left[i] for i in rank(scores, run.settings.mode) if math.isfinite(scores[i])]
    return sorted(best_first, key=lambda n: -run.epochs("surrogate", n))[: run.settings.top_k]


def _first_failure(run: Run) -> str:
    if not run.failures:
        return ""
    number, error = next(iter(run.failures.items()))
    return f"\n\nTrial {number} failed with\n{error}"


def _decision_key(stop: int) -> str:
    return f"surrogate/to-{stop}/kept"


def _optimizer(trial: Trial) -> str:
    return str(trial.config.get("optimizer", DEFAULT_OPTIMIZER))


def _kinds(problem: Problem, trials: Sequence[Trial]) -> Unit:
    """Digest of each trial's fusion key and batch size: what it must share with those that it is fused with."""
    kinds: dict[int, str] = {}
    lines = []
    for trial in trials:
        lines.append({"event": "trial", "trial": trial.number, "config": dict(trial.config)})
        try:
            surrogate = problem.surrogate(trial)
            # Targets of different widths can have surrogates of one width, for which learning rates scale differently.
            scales = repr(multipliers(surrogate, problem.width_ratio))
            key = fusion_key(surrogate, trial.batch_size, scales)
        except Exception:
            lines.append({"event": "failed", "trial": trial.number, "error": traceback.format_exc()})
        else:
            kinds[trial.number] = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    return Unit(kinds, lines)


def make_groups(kinds: Mapping[int, str], order: Sequence[int], widths: Mapping[str, Widths]) -> tuple[Group, ...]:
    """Split trials into groups of one kind and of no more than its width, as even as possible.

    Args:
        kinds: Each trial's kind; trials of one kind can be fused.
        order: The trials; members keep this order.
        widths: For each kind, how many members to train as one.

    >>> kinds = {0: "a", 1: "b", 2: "a", 3: "a"}
    >>> [(g.members, g.fused) for g in make_groups(kinds, [0, 1, 2, 3], {"a": Widths(2), "b": Widths(8, least=4)})]
    [((0, 2), True), ((3,), False), ((1,), False)]
    """
    by_kind: dict[str, list[int]] = {}
    for number in order:
        by_kind.setdefault(kinds[number], []).append(number)
    groups = []
    for kind, numbers in by_kind.items():
        parts = -(-len(numbers) // widths[kind].most)
        size = -(-len(numbers) // parts)
        for i in range(0, len(numbers), size):
            members = tuple(numbers[i : i + size])
            groups.append(Group(kind, members, fused=len(members) >= widths[kind].least))
    return tuple(groups)
