"""Peak memory of trainings, which decides which of them a device runs at the same time.

Forked processes share libraries, data and the interpreter. So only memory that a training takes for itself counts:
weights, gradients, optimizer state, activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fusion.keys import KEYS, configs_of_parts, is_of_part, optimizer_names, read
from hydro_rasda.common.heat_names import HeatName
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import outline
from hydro_rasda.problem.problem import Problem
from hydro_rasda.run.cache import is_count, is_positive, recall, remember
from hydro_rasda.run.fingerprint import content, digest
from hydro_rasda.schedulers.packing_policy import GUESS

Bytes = dict[int, float]
"""Maps the number of models that train as one to the peak bytes of such a training, for one kind of trainings."""

_CHANGED = 0.05
"""A new peak is kept only if it differs from the known peak by more than this share."""


class Peaks:
    """Peak memory of one heat's trainings, by kind and number of models that train as one.

    Trainings of one kind take equal memory; see `kind_of_group`. Measured and estimated peaks are kept for later runs.
    They are not kept if memory is ample for all trainings at the same time, because then no decision depends on them.
    """

    def __init__(self, problem: Problem, heat: HeatName) -> None:
        self._problem, self._heat = problem, heat
        self._known: dict[str, defaultdict[str, Bytes]] | None = None
        self._new = False

    def expected(self, kind: str, members: int = 1) -> float:
        """Return the expected peak bytes of a training with `members` models as one.

        For an unknown kind, each member is expected to take `GUESS` times the largest peak per member of other kinds.
        If no kind is known, a full-size model is expected to take the dry run's estimate. Without any estimate, 0 is
        returned, so that the training does not wait.
        """
        known = self._read()
        for found in (known["measured"].get(kind), known["estimated"].get(kind)):
            if found:
                return at_most(found, members)
        found_so_far = [found for kinds in known.values() for found in kinds.values()]
        of_each = (size / count for found in found_so_far for count, size in found.items())
        largest = max(of_each, default=0.0)
        return GUESS * members * largest if largest or self._heat != "race" else self._problem.peak

    def learn(self, kind: str, members: int, peak: float) -> None:
        """Note the measured peak bytes of a training; the largest peak ever measured counts."""
        found = self._read()["measured"][kind]
        if peak > found.get(members, 0.0) * (1 + _CHANGED):
            found[members], self._new = peak, True

    def estimate(self, kind: str, peaks: Mapping[int, float]) -> None:
        """Note the estimated peaks of a kind by the number of members; measured peaks take precedence."""
        found = self._read()["estimated"][kind]
        self._new |= any(abs(found.get(members, 0.0) - peak) > _CHANGED * peak for members, peak in peaks.items())
        found.update(peaks)

    def keep(self, room: float) -> None:
        """Keep new peaks for later runs if a training may take more than `room` bytes, the memory share of one core."""
        known = self._read()
        largest = max((max(of.values()) for kinds in known.values() for of in kinds.values() if of), default=0.0)
        if self._new and GUESS * largest > room:
            remember(self._key, dict(known))
            self._new = False

    def _read(self) -> dict[str, defaultdict[str, Bytes]]:
        if self._known is None:
            problem, settings = self._problem, self._problem.settings
            functions = digest(content((problem.model_fn, problem.objective)))
            ratio = 1 if self._heat == "race" else settings.sweep.surrogate
            like = f"{self._heat} {ratio:g}/{functions}/{outline(problem.example_input)}/{settings.precision}"
            like += f"/{models} models" if (models := settings.models(self._heat)) > 1 else ""
            self._key = f"peaks/{like}"
            kept = recall(self._key) or {}
            self._known = {name: _sound(kept.get(name)) for name in ("measured", "estimated")}
        return self._known


def at_most(known: Mapping[int, float], members: int) -> float:
    """Return an upper bound of the bytes for `members` models, from the peaks `known` for other numbers of models.

    `known` must not be empty.

    >>> at_most({2: 50.0, 8: 110.0}, 2), at_most({2: 50.0, 8: 110.0}, 3), at_most({2: 50.0, 8: 110.0}, 16)
    (50.0, 75.0, 220.0)
    """
    return min(size * max(1.0, members / count) for count, size in known.items())


def kind_of_group(kind: str, trials: Sequence[Trial]) -> str:
    """Return a fused group's key in `Peaks`. Groups of equal key and size take equal memory for models and optimizers.

    `kind` is the digest that the group's trials share.
    """
    kinds = {name for trial in trials for name in optimizer_names(trial.config)}
    return "+".join([kind, *sorted(kinds)])


def kind_of_target(trial: Trial) -> str:
    """Return a full-size model's key in `Peaks`.

    Models of equal key take equal memory, as far as configurations tell.
    """
    config = trial.config
    shapes = {name: value for name, value in config.items() if name not in KEYS and not is_of_part(name)}
    optimizers = [(part, read(own, "optimizer")) for part, own in configs_of_parts(config).items()]
    return digest(content((shapes, optimizers, trial.batch_size)))[:12]


def kind_of_own(trial: Trial) -> str:
    """Return the key in `Peaks` of a trial of the user's own loop. Trials that differ only in floats share a key."""
    return digest(content({name: value for name, value in trial.config.items() if not isinstance(value, float)}))[:12]


def _sound(kept: Any) -> defaultdict[str, Bytes]:
    found: defaultdict[str, Bytes] = defaultdict(dict)
    for kind, peaks in kept.items() if isinstance(kept, dict) else ():
        for members, peak in peaks.items() if isinstance(peaks, dict) else ():
            if is_count(members) and is_positive(peak):
                found[kind][int(members)] = float(peak)
    return found
