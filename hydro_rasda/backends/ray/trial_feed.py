"""The trials that Ray Tune gets from the main thread, while others train."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import tune
from ray.tune import PlacementGroupFactory
from ray.tune.experiment import Experiment, Trial
from ray.tune.search.search_algorithm import SearchAlgorithm
from ray.tune.trainable.trainable import _TrainingResult


def folder_name(trial: Trial) -> str:
    """A trial's folder within the experiment's."""
    return f"trial-{trial.trial_id}"


@dataclass(frozen=True)
class Offer:
    """What is to be trained.

    Attributes:
        origin: The trial whose sampled configuration this one began as: itself, but where PBT changed that.
        config: Its configuration.
        start: Folder of the checkpoint to go on from, as a worker saves it; None to begin at the beginning.
        metrics: Tune's record of that checkpoint, its "training_iteration" among them.
    """

    origin: int
    config: Mapping[str, Any]
    start: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


class TrialFeed(SearchAlgorithm):  # type: ignore[misc]
    """The trials that Tune gets, one by one, for as long as more may come.

    A trial's id is its number: a configuration that PBT overwrites does not say any more which trial it is.

    Args:
        experiment: What the trials belong to.
        resources: Of a new trial; None where the scheduler says.
    """

    def __init__(self, experiment: Experiment, resources: PlacementGroupFactory | None = None) -> None:
        self._spec = experiment.spec
        self._resources = resources
        self._waiting: dict[int, Offer] = {}
        self._given: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, offers: Mapping[int, Offer]) -> None:
        """Have trials trained, best first; they go before those offered earlier that have not begun."""
        with self._changed:
            merged = {**offers, **{n: offer for n, offer in self._waiting.items() if n not in offers}}
            self._waiting = {n: offer for n, offer in merged.items() if n not in self._given}
            self._changed.notify_all()

    def close(self) -> None:
        """No more will be offered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Return when something is offered, or after so long."""
        with self._changed:
            if not self._waiting and not self._closed:
                self._changed.wait(seconds)
                return
        time.sleep(seconds)

    def add_configurations(self, experiments: Any) -> None:
        """Nothing to do: trials are offered."""

    def next_trial(self) -> Trial | None:
        """The next of those offered; None while there is none."""
        with self._changed:
            if not self._waiting:
                return None
            number = next(iter(self._waiting))
            offer = self._waiting.pop(number)
            self._given.add(number)
        trial = Trial(
            self._spec["run"],
            config={"trial": offer.origin, "config": dict(offer.config)},
            trial_id=str(number),
            storage=self._spec["storage"],
            experiment_tag=str(number),
            placement_group_factory=self._resources,
            checkpoint_config=self._spec["checkpoint_config"],
            max_failures=self._spec["max_failures"],
            trial_dirname_creator=folder_name,
        )
        if offer.start is not None:
            checkpoint = tune.Checkpoint.from_directory(offer.start)
            trial.on_checkpoint(_TrainingResult(checkpoint, dict(offer.metrics)))
        return trial

    def is_finished(self) -> bool:
        """Whether no trial is left to be given, nor will be."""
        with self._changed:
            return self._closed and not self._waiting

    def set_finished(self) -> None:
        """Drop what was offered and has not begun."""
        with self._changed:
            self._waiting = {}
        self.close()


def number_of(trial: Trial) -> int:
    """Our number of one of Tune's trials."""
    return int(trial.trial_id)
