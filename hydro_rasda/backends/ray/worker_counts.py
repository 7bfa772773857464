"""Sizes of trials in workers: how many a Ray cluster can hold, how many a trial has, and how many it may get."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.experiment import Trial
from ray.tune.result import SHOULD_CHECKPOINT
from ray.tune.trainable import FunctionTrainable

from hydro_rasda.backends.ray.nodes import Slots
from hydro_rasda.backends.ray.ray_private_names import training_function

_GET_CHECKPOINT = "get_checkpoint"
_MOST_FUNCTIONS = 1000
_LIBRARIES = ("ray.", "torch.")
"""Prefixes of libraries' modules. Only closures of their functions are followed: Ray wraps a training function."""


@cache
def reads_checkpoint(cls: type) -> bool:
    """Return whether a trainable class's function, or a function that it may call, names `get_checkpoint`.

    Functions are followed through closures, globals and attributes of modules. Also return True if no function of the
    user is found, or if too many functions are found.
    """
    found: set[FunctionType] = set()
    waiting = [*_functions(training_function(cls))]
    users = 0
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        found.add(function)
        users += not _of_a_library(function)
        if len(found) > _MOST_FUNCTIONS or (
            not _of_a_library(function) and _GET_CHECKPOINT in _names(function.__code__)
        ):
            return True
        waiting += [called for thing in _reached(function) for called in _functions(thing)]
    return not users


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _reached(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    if _of_a_library(function):
        return
    names = _names(function.__code__)
    for thing in [function.__globals__[name] for name in names & function.__globals__.keys()]:
        yield thing
        if isinstance(thing, ModuleType):
            yield from (vars(thing)[name] for name in names & vars(thing).keys())


def _functions(thing: Any) -> Iterator[FunctionType]:
    """Yield the functions of an object, which may be a function, a partial, a method, a class or a callable object."""
    thing = thing.func if isinstance(thing, partial) else thing
    thing = thing.__func__ if isinstance(thing, MethodType) else thing
    if isinstance(thing, FunctionType):
        yield thing
        return
    cls = thing if isinstance(thing, type) else type(thing)
    if not _of_a_library(cls):
        yield from (member for member in vars(cls).values() if isinstance(member, FunctionType))


def _of_a_library(thing: type | FunctionType) -> bool:
    return f"{thing.__module__}.".startswith(_LIBRARIES)


_NO_ROOM = 2**20

logger = logging.getLogger(__name__)


class Sizes:
    """The number of workers of each trial. A worker is a bundle of the trial's placement group.

    The methods warn, for example if the cluster cannot hold the workers that a trial should get.
    """

    def __init__(self, worker: Mapping[str, float]) -> None:
        self.slots = Slots(worker)
        self._worker = dict(worker)
        self._requests: dict[int, PlacementGroupFactory] = {}
        self._workers: dict[str, int] = {}
        self._told: set[str] = set()

    def of(self, trial: Trial) -> int:
        """Return the workers that a trial has, or will start with."""
        return self._workers[trial.trial_id]

    def fitting(self, workers: int) -> int:
        """Return `workers`, or fewer if the cluster holds fewer now."""
        fitting = min(workers, max(1, self.slots.count()))
        if fitting < workers:
            message = f"A trial is due {workers} workers and gets {fitting}: the cluster holds no more."
            self._tell(f"{workers}/{fitting}", message)
        return fitting

    def resize(self, trial: Trial, workers: int) -> None:
        """Let a trial that is not running start with `workers` workers."""
        # Reuse one request for each number of workers, because Ray takes long to check a new request and to copy its
        # bundles.
        if workers not in self._requests:
            self._requests[workers] = PlacementGroupFactory([self._worker] * workers)
        self._workers[trial.trial_id] = workers
        request = self._requests[workers]
        # Compare only identities: to compare the contents of two requests takes Ray longer than `update_resources`.
        if trial.placement_group_factory is not request:
            trial.update_resources(request)

    def can_pause(self, trial: Trial, result: Mapping[str, Any], t: int) -> bool:
        """Return whether a trial could resume from a checkpoint; warn of a trainable that saves none."""
        cls = trial.get_trainable_cls()
        if issubclass(cls, FunctionTrainable):
            able = bool(result.get(SHOULD_CHECKPOINT))
            remedy = (
                "Give reports at milestones a checkpoint: `checkpoint=` of tune.report, `state` of Worker.report. Give "
                "`elastic` this scheduler, too."
            )
        else:
            able = cls.save_checkpoint is not Trainable.save_checkpoint
            remedy = "Give it `save_checkpoint` and `load_checkpoint`."
        if not able:
            name = trial.trainable_name
            self._tell(
                name,
                f"Trainable {name!r} reported iteration {t} of trial {trial} without a checkpoint, so the trial cannot "
                f"be paused and keeps its number of workers ({self.of(trial)}). {remedy}",
            )
        return able

    def tell_overruled(self, trial: Trial, workers: int) -> None:
        """Warn, once, if a new trial gets another placement group than it asks for."""
        asked, given = trial.placement_group_factory, [self._worker] * workers
        if asked != PlacementGroupFactory(given):
            self._tell(
                "overruled",
                f"Trainable {trial.trainable_name!r} asks for {_told(asked)}, but a new trial gets {given}, by the "
                "arguments `workers` and `resources_per_worker` of RASDAScheduler.",
            )

    def tell_undecided(self, trial: Trial, missing: Sequence[str]) -> None:
        """Warn, once, that a report without its time or metric decides nothing."""
        self._tell(
            "undecided",
            f"A report of trial {trial} has no number {' and no '.join(map(repr, missing))}: it decides nothing.",
        )

    def tell_diverged(self, trial: Trial, t: float, metric: str) -> None:
        """Warn, once, of a trial that stops because its score is NaN: Ray's ASHA would let it continue."""
        self._tell(
            "diverged",
            f"Trial {trial} is stopped at iteration {t}, where its {metric!r} is NaN. ASHAScheduler would let it "
            "continue. For an iteration without a measurement, report the last value again, or None.",
        )

    def tell_repeats(self, trial: Trial, t: int) -> None:
        """Warn, once, if a trial goes on after iteration `t` with a function that never names `get_checkpoint`."""
        cls = trial.get_trainable_cls()
        if t and issubclass(cls, FunctionTrainable) and not reads_checkpoint(cls):
            self._tell(
                f"repeats {trial.trainable_name}",
                f"Trainable {trial.trainable_name!r} is called again, as trial {trial} goes on after iteration {t} "
                f"with {self.of(trial)} workers. It does not call `tune.get_checkpoint()`: unless it loads that "
                "checkpoint in another way, it trains the same iterations again.",
            )

    def tell_full_disk(self, trial: Trial) -> None:
        """Warn, once, if a trial fails while the experiment's disk is full, because Ray's own errors do not say so."""
        storage = trial.storage
        folder = storage.experiment_fs_path
        if storage.storage_filesystem.type_name == "local" and shutil.disk_usage(folder).free < _NO_ROOM:
            self._tell(
                "full disk",
                f"The disk of {folder} is full. Ray cannot write down there why trials fail, so that `Tuner.fit` may "
                "end in an EOFError or UnpicklingError. Make room: `Tuner.restore` goes on from the last checkpoints.",
            )

    def _tell(self, key: str, message: str) -> None:
        if key not in self._told:
            self._told.add(key)
            logger.warning(message)


def _told(group: PlacementGroupFactory) -> str:
    """Return a placement group's bundles as text, and its strategy if that is not Ray's default."""
    bundles = [{}] * group.head_bundle_is_empty + group.bundles
    return f"{bundles}" if group.strategy == "PACK" else f"{bundles} ({group.strategy})"
