"""A heat is a stage of a search: devices train its trials, and a rule lets fewer and fewer trials continue.

The sweep and the middle heat train surrogates; the race trains full-size models. Each heat asks its rule for moves,
records them, admits more trials, and gives work to idle devices. It repeats these steps whenever a device is done,
until nothing is left to do. The state that the rule sees is computed from the run's journal. So a resumed heat reads
the journal, and then asks its rule for the next moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.contracts import Devices, Finished, Task
from hydro_rasda.history.lines import Unit
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import Move, SweepRule, SweepState
from hydro_rasda.schedulers.sweep_rule import checked_moves, plain_move


class Heat(ABC):
    """A heat under way: devices train its trials, and a rule decides which of them continue.

    Attributes:
        name: The name of the heat in its tasks and journal lines.
        under_way: The trials that devices train now.
    """

    name: HeatName

    def __init__(self, run: Run, devices: Devices, rule: SweepRule) -> None:
        self._run, self._devices, self._rule = run, devices, rule
        self.under_way = set[int]()

    @property
    @abstractmethod
    def state(self) -> SweepState:
        """The state of the heat, as its rule sees it."""

    def train(self) -> None:
        """Train until the rule lets no trial continue, or until no more work may begin."""
        while not self._has_found_enough():
            if self._decide() or self._admit() or self._begin():
                continue
            if not self._is_under_way() or not self._devices.busy():
                return
            for finished in self._devices.finished():
                self.take(finished)

    def _decide(self) -> bool:
        """Ask the rule which trials continue or stop, and record these moves. Return True if there are any."""
        if not self._prepare():
            return False
        state = self.state
        check = self._run.problem.check_config
        moves = self._possible(checked_moves(self._rule, self._rule.decide(state), state, check))
        if moves:
            key = self._decision_key(moves)
            plain = [[number, *plain_move(move)] for number, move in moves.items()]
            self._decided(key, self._run.record(key, Unit(plain), again=True))
        return bool(moves)

    @abstractmethod
    def _prepare(self) -> bool:
        """Before a decision, add to the state the facts that the journal lacks. Return False if none is due."""

    def _possible(self, moves: Mapping[int, Move]) -> Mapping[int, Move]:
        """Return the rule's moves, changed if needed so that all are possible; raise ValueError if they cannot be."""
        return moves

    @abstractmethod
    def _decision_key(self, moves: Mapping[int, Move]) -> str:
        """Return the name under which the journal keeps the decision with these moves."""

    @abstractmethod
    def _decided(self, key: str, unit: Unit) -> None:
        """Let trials continue by the moves in `unit`, which the run has just recorded under `key`."""

    def _has_found_enough(self) -> bool:
        """Tell whether a model has reached `stop_at`, so that the heat can end."""
        return False

    def _admit(self) -> bool:
        """Admit more trials. Return True if the state changed, so that the rule must be asked again."""
        return False

    @abstractmethod
    def _begin(self) -> bool:
        """Give work to idle devices. Return True if the rule took a decision because a device had no work."""

    def _start(self, device: int, task: Task) -> None:
        self.under_way.update(task.members)
        self._devices.start(device, task)

    @abstractmethod
    def _is_under_way(self) -> bool:
        """Tell whether a trial of the heat trains, or waits for a device."""

    def take(self, finished: Finished) -> None:
        """Record the outcome of a task of this heat."""
        self.under_way.difference_update(finished.task.members)
        self._record(finished)

    @abstractmethod
    def _record(self, finished: Finished) -> None: ...
