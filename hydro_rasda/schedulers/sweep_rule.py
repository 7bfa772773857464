"""The interface of a sweep's rule: its methods, and the moves that it may return."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydro_rasda.common.argument_checks import is_int, is_number, require
from hydro_rasda.schedulers.sweep_state import Standing, SweepState


@dataclass(frozen=True)
class Continue:
    """Let a trial continue its training.

    A dropped trial can continue, too. Because its checkpoint has been removed, it trains again from its first epoch. If
    a trial may be needed later, leave it waiting: a waiting trial keeps its checkpoint.

    Attributes:
        to: The epoch at which the rule is asked again; it must be later than the trial's epoch.
        copy_of: A trial that waits at the same epoch. This trial continues with the weights, the optimizer state and
            the configuration of that trial (population based training, Jaderberg et al. 2017). With None, it continues
            with its own.
        changes: With `copy_of`, new values for hyperparameters of the copied configuration: `lr`, `momentum`,
            `weight_decay`, `beta1`, `beta2`, `eps`, or any other float of that configuration that does not change the
            model's structure. If the changed configuration breaks a function of `sweep.constraints`, nothing is
            changed.
    """

    to: int
    copy_of: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """Stop a trial; its checkpoint is removed."""


Move = Continue | Stop


class SweepRule(ABC):
    """Decide which trials of a sweep continue. A subclass in `SweepConfig(rule=...)` replaces successive halving.

    A rule keeps nothing between calls: its answer depends only on its constructor's arguments and on the state. So a
    run that was killed comes to the same decisions again. In addition, the journal records each decision, so that a
    resumed run need not ask the rule for it. The following rule lets the better half of the trials continue for twice
    the epochs:

    >>> class BetterHalf(SweepRule):
    ...     def decide(self, sweep):
    ...         if new := sweep.waiting_at(0):
    ...             return {n: Continue(to=1) for n in new}
    ...         if sweep.training or len(sweep.waiting) <= sweep.top_k:
    ...             return {}  # wait for trials that train; if none trains, the sweep is over
    ...         kept = sweep.best(max(sweep.top_k, len(sweep.waiting) // 2))
    ...         later = {n: min(2 * trial.epoch, sweep.max_t) for n, trial in sweep.waiting.items()}
    ...         return {n: Continue(later[n]) if n in kept and later[n] > trial.epoch else Stop()
    ...                 for n, trial in sweep.waiting.items()}
    """

    def admit(self, sweep: SweepState) -> int:
        """Return the number of configurations to admit now. The sweep asks whenever there is nothing else to decide.

        A searcher learns from scores at the first milestone. So it proposes no configuration while a trial trains to
        that milestone.
        """
        return sweep.left

    @abstractmethod
    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        """Decide which trials continue or stop. The sweep asks after each change, and again if a device is idle.

        New trials wait at epoch 0 for their first milestone.

        Returns:
            The moves of waiting or dropped trials, by trial number. Trials without a move stay as they are. So an empty
            answer waits for more results. If nothing trains and nothing continues, the sweep is over.
        """

    def finalists(self, sweep: SweepState) -> Sequence[int]:
        """Return the trials for full size, best first; only the first `top_k` train. Called when the sweep is over.

        If the time budget ends the sweep early, this method is not called. Then the finalists are the best of the
        trials that trained longest.
        """
        return sweep.best(sweep.top_k)

    def epochs(self, sweep: SweepState) -> int:
        """Estimate the epochs of all trials together, for the progress display; by default, an upper bound."""
        return (len(sweep.trials) + sweep.left) * sweep.max_t


class RuleToLast(SweepRule):
    """A rule under which the sweep ends at the epoch `last`."""

    last: int

    def epochs(self, sweep: SweepState) -> int:
        """Return the epochs of all trials if none stops."""
        return (len(sweep.trials) + sweep.left) * self.last


CHANGEABLE = ("lr", "momentum", "weight_decay", "beta1", "beta2", "eps")
"""Hyperparameters that may change during a training, even if a configuration lacks them."""


def checked_moves(
    rule: SweepRule, moves: Mapping[int, Move], sweep: SweepState, check: Callable[[Mapping[str, Any]], object] = dict
) -> dict[int, Move]:
    """Return the moves that a rule decided; raise ValueError if they cannot be carried out.

    Args:
        check: A function that raises ValueError for a configuration that cannot be trained.
    """
    name = type(rule).__name__
    require(isinstance(moves, Mapping), f"sweep.rule {name}: decide(...)", moves, "a dict of moves by trial")
    for number, move in moves.items():
        standing = sweep.trials.get(number) if is_int(number) else None
        if standing is None:
            named = f"one of trials 0 to {len(sweep.trials) - 1}"
            raise ValueError(f"`sweep.rule` {name} moves trial {number!r}, but must name {named}")
        whose = f"{name}: the move of trial {number}"
        of = f"sweep.rule {whose}"
        require(isinstance(move, (Continue, Stop)), of, move, "a Continue or a Stop")
        require(standing.goal is None, of, move, f"left out while the trial is on its way to epoch {standing.goal}")
        if isinstance(move, Continue):
            _check_going_on(whose, move, standing, sweep, check)
        else:
            require(not standing.dropped, of, move, "left out, for the trial was dropped before")
    return dict(moves)


def _check_going_on(
    whose: str, move: Continue, standing: Standing, sweep: SweepState, check: Callable[[Mapping[str, Any]], object]
) -> None:
    of = f"sweep.rule {whose}"
    later = type(move.to) is int and standing.epoch < move.to <= sweep.max_t
    rule = f"an epoch after {standing.epoch}, where the trial stands, and at most {sweep.max_t} (`max_t`)"
    require(later, f"{of} goes on to epoch, which", move.to, rule)
    if move.copy_of is not None:
        other = sweep.waiting_at(standing.epoch).get(move.copy_of) if is_int(move.copy_of) else None
        sound = other is not None and other is not standing and math.isfinite(other.score)
        rule = f"another trial that waits at epoch {standing.epoch}, and has not diverged"
        require(sound, f"{of} has copy_of, which", move.copy_of, rule)
    require(isinstance(move.changes, Mapping), f"{of} has changes, which", move.changes, "a dict of hyperparameters")
    config = {} if move.copy_of is None else sweep.trials[move.copy_of].config
    floats = {name for name, value in config.items() if isinstance(value, float)}
    odd = sorted(set(move.changes) - (floats if move.copy_of is None else floats.union(CHANGEABLE)), key=str)
    rule = f"of {CHANGEABLE} or floats of the configuration, together with copy_of"
    require(not odd, f"{of} has changes, of which", odd, rule)
    if move.copy_of is not None:
        try:
            check({**config, **move.changes})
        except ValueError as error:
            raise ValueError(f"`sweep.rule` {whose} has changes with which {error}") from None
        strange = {name: value for name, value in move.changes.items() if not is_number(value)}
        require(not strange, f"{of} has changes, of which", strange, "finite numbers, which the journal can keep")


def carry_out(moves: Mapping[int, Move], sweep: SweepState) -> None:
    """Apply moves to the state: trials continue or stop. The fields `copy_of` and `changes` are ignored."""
    for number, move in moves.items():
        if isinstance(move, Continue):
            sweep.go_on(number, move.to)
        else:
            sweep.drop(number)


def checked_admission(rule: SweepRule, count: int) -> int:
    """Return the number of configurations that a rule admits; raise ValueError unless it is an integer >= 0."""
    require(type(count) is int and count >= 0, f"sweep.rule {type(rule).__name__}: admit(...)", count, "an int >= 0")
    return count


def checked_epochs(rule: SweepRule, count: float) -> int:
    """Return the number of epochs that a rule expects; raise ValueError unless it is a finite number >= 0."""
    holds = is_number(count) and count >= 0
    require(holds, f"sweep.rule {type(rule).__name__}: epochs(...)", count, "a finite number >= 0")
    return math.ceil(count)


def plain_move(move: Move) -> list[Any]:
    """Return a move as JSON values, from which `move_of` restores it.

    >>> plain_move(Stop()), plain_move(Continue(9)), plain_move(Continue(9, copy_of=2, changes={"lr": 0.1}))
    ([None], [9], [9, 2, {'lr': 0.1}])
    """
    if isinstance(move, Stop):
        return [None]
    return [move.to] if move.copy_of is None else [move.to, move.copy_of, dict(move.changes)]


def move_of(plain: Sequence[Any]) -> Move:
    """Restore a move from the values that `plain_move` returned for it."""
    return Stop() if plain[0] is None else Continue(*plain)


def checked_finalists(rule: SweepRule, finalists: Sequence[int], sweep: SweepState) -> list[int]:
    """Return a rule's finalists, at most `top_k`; raise ValueError unless they are different trials of the sweep."""
    of = f"sweep.rule {type(rule).__name__}: finalists(...)"
    listed = isinstance(finalists, Sequence) and not isinstance(finalists, str)
    known = listed and all(is_int(number) and number in sweep.trials for number in finalists)
    rule_of_theirs = f"different trials of 0 to {len(sweep.trials) - 1}, in a list"
    require(known and len({*finalists}) == len(finalists), of, finalists, rule_of_theirs)
    return [*finalists[: sweep.top_k]]
