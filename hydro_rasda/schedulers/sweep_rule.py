"""The interface of a sweep's rule: the questions to it, the state that it sees, and the answers that it may give."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydro_rasda.checks import is_int, is_number, require
from hydro_rasda.schedulers.ranking import Mode


@dataclass(frozen=True)
class Continue:
    """A trial trains on.

    A dropped trial can continue, too. Its checkpoint is gone by then, so it trains again from its first epoch. If a
    trial may be needed later, leave it waiting: this costs less, because a waiting trial keeps its checkpoint.

    Attributes:
        to: The epoch at which the rule is asked again, after the one where the trial stands.
        copy_of: A trial that waits at the same epoch. This trial continues with that one's weights, optimizer state and
            configuration (population based training, Jaderberg et al. 2017). None: with its own.
        changes: With `copy_of`, other values for hyperparameters of that configuration: `lr`, `momentum`,
            `weight_decay`, `beta1`, `beta2`, `eps`, or any of its floats that leaves the model's structure as it is.
    """

    to: int
    copy_of: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stop:
    """A trial trains no further, and its checkpoint is removed."""


Move = Continue | Stop


@dataclass
class Standing:
    """The state of one trial of a sweep.

    Attributes:
        number: 0, 1, ... in the order of sampling.
        config: Its hyperparameters.
        epoch: The milestone that it came to last; 0 before the first.
        goal: The milestone that it is on its way to; None where it waits, or was dropped.
        dropped: True if the rule has stopped it.
        curve: The metric after each epoch up to `epoch`; NaN where the trial had diverged or failed.
    """

    number: int
    config: Mapping[str, Any]
    epoch: int = 0
    goal: int | None = None
    dropped: bool = False
    curve: dict[int, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """The metric at the milestone where the trial stands; NaN before the first, or where it diverged or failed."""
        return self.curve.get(self.epoch, math.nan)

    def mark(self) -> int:
        """A number that tells this standing from others."""
        return _mark(self.number, self.epoch, self.goal, self.dropped)


def _mark(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")


class SweepState:
    """The state of a sweep. Rules read it; only the sweep itself changes it.

    Attributes:
        mode: "min" if a lower score is better, "max" if a higher one is. With several metrics, a score is the place
            among all trials that came to a milestone, from 0; the mode is "min".
        max_t: Epochs of a full training.
        top_k: How many finalists are wanted.
        seed: The run's: a rule that needs random numbers derives them from it, and from what it is asked.
        waiting: Those that came to a milestone, or are new, and wait for a decision; in order of arrival.
        training: Those that are on their way to a milestone.
        scores: By milestone, the score there of each trial that came to it; NaN where it diverged or failed.
        left: Configurations that can be had now; 0 once there are no more.
        idle: True if a device has nothing to do until the rule lets a trial continue.
    """

    def __init__(self, mode: Mode, max_t: int, top_k: int, seed: int = 0) -> None:
        self.mode, self.max_t, self.top_k, self.seed = mode, max_t, top_k, seed
        self.trials: dict[int, Standing] = {}
        self.waiting: dict[int, Standing] = {}
        self.training: dict[int, Standing] = {}
        self.scores: dict[int, dict[int, float]] = {}
        self.left = 0
        self.idle = False
        self._at: dict[int, dict[int, Standing]] = {}
        self._to: dict[int, dict[int, Standing]] = {}
        self._ranked: dict[int, list[tuple[float, int]]] = {}
        self._diverged: set[int] = set()
        self._marks = 0

    def waiting_at(self, epoch: int) -> Mapping[int, Standing]:
        """Those that wait at a milestone; at 0, those that are new."""
        return self._at.get(epoch, {})

    def training_to(self, epoch: int) -> Mapping[int, Standing]:
        """Those that are on their way to a milestone."""
        return self._to.get(epoch, {})

    def best(self, count: int) -> list[int]:
        """Return the best so far: those with most epochs first, of them the best; none that diverged or failed."""
        found: dict[int, None] = {}
        for stop in sorted(self._ranked, reverse=True):
            for _, number in self._ranked[stop]:
                if len(found) == count:
                    return list(found)
                if number not in self._diverged:
                    found[number] = None
        return list(found)

    @property
    def digest(self) -> str:
        """Equal where all that a decision can depend on is equal, in one run or in two processes of it."""
        return f"{self._marks ^ _mark(self.left):016x}"

    def admit(self, number: int, config: Mapping[str, Any]) -> None:
        """A new trial, which waits for its first milestone."""
        self._put(Standing(number, config))

    def go_on(self, number: int, to: int, config: Mapping[str, Any] | None = None, is_copy: bool = False) -> None:
        """Have a trial train to a milestone, from now on perhaps with another configuration.

        A copy has not diverged, whatever it did before.
        """
        standing = self._taken(number)
        if is_copy:
            self._diverged.discard(number)
        standing.goal, standing.dropped, standing.config = to, False, config or standing.config
        self._put(standing)

    def drop(self, number: int) -> None:
        """Have a trial train no further."""
        standing = self._taken(number)
        standing.dropped = True
        self._put(standing)

    def come(self, number: int, scores: Mapping[int, float]) -> None:
        """A trial came to the milestone that it was on its way to, with these scores by epoch."""
        standing = self._taken(number)
        assert standing.goal is not None
        standing.epoch, standing.goal = standing.goal, None
        standing.curve |= scores
        score = self.scores.setdefault(stop := standing.epoch, {})[number] = standing.score
        if math.isfinite(score):
            insort(self._ranked.setdefault(stop, []), (score if self.mode == "min" else -score, number))
        else:
            self._diverged.add(number)
        self._put(standing)

    def place(self, stop: int, places: Mapping[int, float]) -> None:
        """Replace the scores of all trials that came to a milestone by their places."""
        self.scores[stop] |= places
        self._ranked[stop] = sorted((place, number) for number, place in places.items() if math.isfinite(place))
        for number, place in places.items():
            self.trials[number].curve[stop] = place

    def _taken(self, number: int) -> Standing:
        standing = self.trials[number]
        self._marks ^= standing.mark()
        for places in (self.waiting, self.training, self._at.get(standing.epoch), self._to.get(standing.goal or 0)):
            if places is not None:
                places.pop(number, None)
        return standing

    def _put(self, standing: Standing) -> None:
        number = standing.number
        self.trials[number] = standing
        self._marks ^= standing.mark()
        if standing.goal is not None:
            self.training[number] = standing
            self._to.setdefault(standing.goal, {})[number] = standing
        elif not standing.dropped:
            self.waiting[number] = standing
            self._at.setdefault(standing.epoch, {})[number] = standing


class SweepRule(ABC):
    """Decide which trials of a sweep continue; as `SweepConfig(rule=...)`, a subclass replaces successive halving.

    A rule keeps nothing between calls: its answer depends only on its constructor's arguments and on the state. So a
    run that was killed comes to the same decisions again. (The journal also keeps each decision, and the rule is not
    asked for it again.) This rule lets the better half of the trials continue for twice the epochs:

    >>> class BetterHalf(SweepRule):
    ...     def decide(self, sweep):
    ...         if new := sweep.waiting_at(0):
    ...             return {n: Continue(to=1) for n in new}
    ...         if sweep.training or len(sweep.waiting) <= sweep.top_k:
    ...             return {}  # wait for the others; where there are none, the sweep is over
    ...         kept = sweep.best(max(sweep.top_k, len(sweep.waiting) // 2))
    ...         later = {n: min(2 * trial.epoch, sweep.max_t) for n, trial in sweep.waiting.items()}
    ...         return {n: Continue(later[n]) if n in kept and later[n] > trial.epoch else Stop()
    ...                 for n, trial in sweep.waiting.items()}
    """

    def admit(self, sweep: SweepState) -> int:
        """Return how many more configurations to admit now; asked whenever there is nothing else to decide.

        A searcher learns from the trials that have reached a milestone before it is asked for the next ones.
        """
        return sweep.left

    @abstractmethod
    def decide(self, sweep: SweepState) -> Mapping[int, Move]:
        """Decide on trials; the sweep asks after each change, and once more if a device has nothing to do.

        New trials wait at epoch 0 for their first milestone.

        Returns:
            The next move of waiting or dropped trials, by number. All others stay as they are: an empty answer waits
            for more to be known. If nothing trains and nothing continues, the sweep is over.
        """

    def finalists(self, sweep: SweepState) -> Sequence[int]:
        """Return the trials for full size, best first; the first `top_k` train. The sweep asks when it is over.

        If the time budget ends the sweep early, this is not asked: the finalists are the best of the trials that
        trained longest.
        """
        return sweep.best(sweep.top_k)

    def epochs(self, sweep: SweepState) -> int:
        """Estimate the epochs that all trials together will train, for progress; an upper bound if nothing is known."""
        return (len(sweep.trials) + sweep.left) * sweep.max_t


CHANGEABLE = ("lr", "momentum", "weight_decay", "beta1", "beta2", "eps")
"""Hyperparameters whose values may change during a training, even if a configuration lacks them."""


def checked_moves(
    rule: SweepRule,
    moves: Mapping[int, Move],
    sweep: SweepState,
    check: Callable[[Mapping[str, Any]], object] = dict,
) -> dict[int, Move]:
    """Return a rule's decision, if it can be carried out.

    Args:
        check: Raises ValueError for a configuration that cannot be trained with.

    Raises:
        ValueError: If it cannot; the message names rule, trial and value.
    """
    told = f"`sweep.rule` {type(rule).__name__}"
    require(isinstance(moves, Mapping), f"{told}: decide(...)", moves, "a dict of moves by trial")
    for number, move in moves.items():
        standing = sweep.trials.get(number) if is_int(number) else None
        if standing is None:
            raise ValueError(f"{told} moves trial {number!r}, but must name one of trials 0 to {len(sweep.trials) - 1}")
        of = f"{told}: the move of trial {number}"
        require(isinstance(move, (Continue, Stop)), of, move, "a Continue or a Stop")
        require(standing.goal is None, of, move, f"left out while the trial is on its way to epoch {standing.goal}")
        if isinstance(move, Continue):
            _check_going_on(of, move, standing, sweep, check)
        else:
            require(not standing.dropped, of, move, "left out, for the trial was dropped before")
    return dict(moves)


def _check_going_on(
    of: str, move: Continue, standing: Standing, sweep: SweepState, check: Callable[[Mapping[str, Any]], object]
) -> None:
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
            raise ValueError(f"{of} has changes with which {error}") from None


def checked_admission(rule: SweepRule, count: int) -> int:
    """Return the number of configurations that a rule admits, if it is an integer >= 0.

    Raises:
        ValueError: If it is not; the message names rule and value.
    """
    require(type(count) is int and count >= 0, f"`sweep.rule` {type(rule).__name__}: admit(...)", count, "an int >= 0")
    return count


def checked_epochs(rule: SweepRule, count: float) -> int:
    """Return the number of epochs that a rule expects, if it is a finite number >= 0.

    Raises:
        ValueError: If it is not; the message names rule and value.
    """
    holds = is_number(count) and count >= 0
    require(holds, f"`sweep.rule` {type(rule).__name__}: epochs(...)", count, "a finite number >= 0")
    return math.ceil(count)


def plain_move(move: Move) -> list[Any]:
    """A move as JSON values, of which `move_of` makes it again.

    >>> plain_move(Stop()), plain_move(Continue(9)), plain_move(Continue(9, copy_of=2, changes={"lr": 0.1}))
    ([None], [9], [9, 2, {'lr': 0.1}])
    """
    if isinstance(move, Stop):
        return [None]
    return [move.to] if move.copy_of is None else [move.to, move.copy_of, dict(move.changes)]


def move_of(plain: Sequence[Any]) -> Move:
    """The move that `plain_move` made these values of."""
    return Stop() if plain[0] is None else Continue(*plain)


def checked_finalists(rule: SweepRule, finalists: Sequence[int], sweep: SweepState) -> list[int]:
    """Return a rule's finalists, at most `top_k`, if they are trials of the sweep and each is named once.

    Raises:
        ValueError: If they are not; the message names rule and value.
    """
    of = f"`sweep.rule` {type(rule).__name__}: finalists(...)"
    listed = isinstance(finalists, Sequence) and not isinstance(finalists, str)
    known = listed and all(is_int(number) and number in sweep.trials for number in finalists)
    rule_of_theirs = f"different trials of 0 to {len(sweep.trials) - 1}, in a list"
    require(known and len({*finalists}) == len(finalists), of, finalists, rule_of_theirs)
    return [*finalists[: sweep.top_k]]
