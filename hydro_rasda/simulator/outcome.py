"""The outcome of a simulated search."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hydro_rasda.schedulers import Mode, rank


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of one trial.

    Attributes:
        epochs: Epochs trained, without those that failures undid.
        score: After the last of these epochs.
        ended: Virtual seconds from the start of the search to the end of the trial.
        waited: Seconds spent in the queue: before its start, at each resize and after each failure.
        restarts: How many node failures hit it.
        lost_epochs: Epochs that failures undid.
    """

    epochs: int
    score: float
    ended: float
    waited: float
    restarts: int
    lost_epochs: int


@dataclass(frozen=True)
class Segment:
    """A stretch of time for which a trial had workers.

    Attributes:
        trial: Its row in the workload.
        start: Virtual seconds from the start of the search.
        stop: Likewise.
        workers: How many it had.
        restart: Seconds of that time until its first step.
    """

    trial: int
    start: float
    stop: float
    workers: int
    restart: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Cost and result of a simulated search.

    Attributes:
        trials: One for each row of the workload.
        segments: All trials' segments, in the order in which they ended.
        gpus: GPUs of the cluster.
        max_t: Epochs of a full training.
        mode: "min" where a lower score is better, "max" where a higher is.
        events: How many ends of epochs, failures and repairs were simulated.
    """

    trials: tuple[TrialOutcome, ...]
    segments: tuple[Segment, ...]
    gpus: int
    max_t: int
    mode: Mode
    events: int

    @property
    def seconds(self) -> float:
        """Virtual seconds until the last trial ended."""
        return max(trial.ended for trial in self.trials)

    @property
    def gpu_seconds(self) -> float:
        """GPU time of all trials, without that of idle GPUs."""
        return math.fsum((s.stop - s.start) * s.workers for s in self.segments)

    @property
    def utilization(self) -> float:
        """Share of the GPU time of the whole cluster that trials had."""
        return self.gpu_seconds / (self.gpus * self.seconds)

    @property
    def epochs(self) -> int:
        """Epochs trained by all trials, with those that failures undid."""
        return sum(trial.epochs + trial.lost_epochs for trial in self.trials)

    @property
    def finished(self) -> tuple[int, ...]:
        """Trials that reached `max_t`."""
        return tuple(i for i, trial in enumerate(self.trials) if trial.epochs == self.max_t)

    @property
    def best_trial(self) -> int:
        """The trial of the best score, of those that reached `max_t` with a finite one; of all where none did."""
        sound = [i for i in self.finished if math.isfinite(self.trials[i].score)]
        among = sound or range(len(self.trials))
        return among[rank([self.trials[i].score for i in among], self.mode)[0]]

    @property
    def best_score(self) -> float:
        """The score of `best_trial`."""
        return self.trials[self.best_trial].score
