"""What a simulated run gave."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hydro_rasda.schedulers import Mode, rank


@dataclass(frozen=True)
class TrialOutcome:
    """What became of one trial.

    Attributes:
        epochs: Trained, those lost to failures not counted.
        score: After the last of them.
        ended: Virtual seconds from the start of the run.
        waited: Seconds in the queue, before its start and at each resize or failure.
        restarts: After node failures.
        lost_epochs: Trained in vain.
    """

    epochs: int
    score: float
    ended: float
    waited: float
    restarts: int
    lost_epochs: int


@dataclass(frozen=True)
class Segment:
    """A stretch of time in which a trial held workers.

    Attributes:
        trial: Its row in the workload.
        start: Virtual seconds.
        stop: Virtual seconds.
        workers: How many.
    """

    trial: int
    start: float
    stop: float
    workers: int


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        trials: One for each row of the workload.
        segments: In the order in which they ended.
        gpus: Of the cluster.
        max_t: Epochs of a full training.
        mode: Of the score.
        events: Ends of epochs, failures and repairs that were processed.
    """

    trials: tuple[TrialOutcome, ...]
    segments: tuple[Segment, ...]
    gpus: int
    max_t: int
    mode: Mode
    events: int

    @property
    def seconds(self) -> float:
        """Until the last trial ended."""
        return max(trial.ended for trial in self.trials)

    @property
    def gpu_seconds(self) -> float:
        """Held by trials: the time of a GPU that nobody holds is not in it."""
        return math.fsum((s.stop - s.start) * s.workers for s in self.segments)

    @property
    def utilization(self) -> float:
        """Share of the cluster's time that trials held."""
        return self.gpu_seconds / (self.gpus * self.seconds)

    @property
    def epochs(self) -> int:
        """Trained by all trials, those in vain included."""
        return sum(trial.epochs + trial.lost_epochs for trial in self.trials)

    @property
    def finished(self) -> tuple[int, ...]:
        """Trials that reached ``max_t``."""
        return tuple(i for i, trial in enumerate(self.trials) if trial.epochs == self.max_t)

    @property
    def best_trial(self) -> int:
        """Of those that reached ``max_t`` the one of the best score; of all, where none did."""
        among = self.finished or tuple(range(len(self.trials)))
        return among[rank([self.trials[i].score for i in among], self.mode)[0]]

    @property
    def best_score(self) -> float:
        """Its score."""
        return self.trials[self.best_trial].score
