"""How many trials of a kind to train as one: measured on a machine, then remembered for a while.

A measurement differs from run to run, and with the width of a group the last digits of its results. What was measured
is therefore kept for later runs of this machine, so that the same call gives the same result. What is kept is a cache:
it may be wrong, missing or unwritable, and then it is measured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

import fusion
from fusion import OPTIMIZERS, FusionWarning
from fusion.keys import read
from fusion.width.probe import plan_fusion, usable_memory
from hydro_rasda.contracts import Widths
from hydro_rasda.data import Batch
from hydro_rasda.precision import matrix_products
from hydro_rasda.problem import Problem, Trial, outline
from hydro_rasda.run.content import content, digest
from hydro_rasda.run.files import write_atomically
from hydro_rasda.training.forks import Died, map_forked
from hydro_rasda.training.parameters import multipliers, optimizer_settings

SECONDS_PER_WIDTH = 0.03
"""Time to measure each width, but no less than a few steps: to be small beside what a sweep takes."""

WEEKS = 4
"""After which it is measured again: it costs less than a second, and by then what else runs on a machine, its drivers
or its cooling may be others."""

Measured = dict[str, Any]


def cache_folder() -> Path:
    """Where measurements are kept, a file for each: below HYDRO_RASDA_CACHE, or the user's cache folder.

    Raises:
        RuntimeError: where the user has no home.
    """
    root = os.environ.get("HYDRO_RASDA_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "hydro_rasda" / "fusion"


def planned_widths(
    problem: Problem, kinds: Mapping[str, Sequence[Trial]], cores: int = 1, forked: bool = False
) -> dict[str, Widths]:
    """For each kind, the width at which a group trains fastest and fits memory, and from which it pays at all.

    Args:
        problem: What is tuned.
        kinds: By digest, the trials of the kind, in the order in which groups take them.
        cores: Of the device, each of which trains a part of a group on one thread; they share the memory.
        forked: Whether processes that are forked measure, and not this one.

    Warns:
        FusionWarning: naming module and line, where vmap cannot follow a kind's model.
    """
    found, work = dict[str, Measured | None](), dict[str, Callable[[], Measured | None]]()
    keys = dict[str, str]()
    functions = digest(content((problem.model_fn, problem.objective)))
    for kind, trials in kinds.items():
        part = trials[: -(-len(trials) // cores)]
        batch = next(problem.train_data.epoch(part[0].batch_size, 0))
        where = f"{machine(problem.device)} of {cores}"
        own = [kind, functions, outline(batch), _updates(part), f"{len(part)} trials", problem.settings.precision]
        keys[kind] = "/".join([*own, where, _code()])
        found[kind] = recall(keys[kind]) if len(part) > 1 else None
        if len(part) > 1 and found[kind] is None:
            work[kind] = partial(_measure, problem, part, batch, cores)
    for kind, measured in zip(work, map_forked(list(work.values()), cores if forked else 0)):
        if measured is not None and not isinstance(measured, Died):
            found[kind] = measured
            remember(keys[kind], measured)
    for obstacle in dict.fromkeys(of["obstacle"] for of in found.values() if of and of["obstacle"]):
        warnings.warn(f"trials train one after another, {obstacle}", FusionWarning, stacklevel=2)
    return {kind: _widths(measured) for kind, measured in found.items()}


def _updates(trials: Sequence[Trial]) -> str:
    """What a step of these trials does besides the model's own work."""
    kinds = {str(read(trial.config, "optimizer")) for trial in trials}
    clipped = any(read(trial.config, "grad_clip") for trial in trials)
    return "+".join([kind for kind in OPTIMIZERS if kind in kinds] + ["clipped"] * clipped)


def _widths(measured: Measured | None) -> Widths:
    """Of a kind; where there was nothing to measure, or that cannot be survived, of single trials."""
    if measured is None:
        return Widths(1)
    return widths_from({int(k): rate for k, rate in measured["throughput"].items()}, measured["width"])


def widths_from(throughput: Mapping[int, float], most: int) -> Widths:
    """Read widths off measured throughputs (steps of a trial per second by width; at 1: one after another).

    >>> widths_from({1: 100.0, 2: 70.0, 4: 120.0, 8: 240.0}, most=8).least
    4
    """
    pays = [width for width, rate in throughput.items() if width > 1 and rate > throughput[1]]
    return Widths(most, min(pays, default=2), throughput)


class _Surrogates(Sequence[nn.Module]):
    """The trials' surrogates, each built when it is first asked for."""

    def __init__(self, problem: Problem, trials: Sequence[Trial]) -> None:
        self._problem, self._trials = problem, trials
        self._built: dict[int, nn.Module] = {}

    def __len__(self) -> int:
        return len(self._trials)

    @overload
    def __getitem__(self, at: int) -> nn.Module: ...

    @overload
    def __getitem__(self, at: slice) -> list[nn.Module]: ...

    def __getitem__(self, at: int | slice) -> nn.Module | list[nn.Module]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        if at not in self._built:
            self._built[at] = self._problem.surrogate(self._trials[at])
        return self._built[at]


def _measure(problem: Problem, trials: Sequence[Trial], batch: Batch, cores: int) -> Measured | None:
    """The trials as they will train; None where one of them cannot, which its own training will say."""

    def loss(model: nn.Module, part: Batch) -> Tensor:
        return problem.objective(model, part)["loss"]

    surrogates = _Surrogates(problem, trials)
    try:
        with warnings.catch_warnings(), matrix_products(problem.settings.precision):
            # It is said by who asked, also where what was measured is only remembered.
            warnings.simplefilter("ignore", FusionWarning)
            settings = optimizer_settings(problem.objective, surrogates[0], trials[0].config)
            plan = plan_fusion(
                surrogates,
                [trial.config for trial in trials],
                loss,
                batch,
                memory=usable_memory(problem.device, cores),
                seconds=SECONDS_PER_WIDTH,
                multipliers=multipliers(settings, surrogates[0], problem.settings.surrogate),
            )
    except (Exception, SystemExit):
        return None
    throughput = {str(width): rate for width, rate in plan.throughput.items()}
    return {"width": plan.width, "throughput": throughput, "obstacle": plan.obstacle}


def recall(key: str) -> Measured | None:
    """What was measured under a key in the last weeks; None where it is not there, or is odd."""
    try:
        measured = json.loads(_file(key).read_text())
        return measured if _is_sound(measured, key) else None
    except (OSError, ValueError, OverflowError, RuntimeError):
        return None


def _is_sound(measured: Any, key: str) -> bool:
    if not isinstance(measured, dict) or measured.get("key") != key or not isinstance(measured.get("obstacle"), str):
        return False
    throughput: Any = measured.get("throughput")
    at: Any = measured.get("at")
    if not isinstance(throughput, dict) or not _is_positive(at):
        return False
    widths = [int(width) for width in throughput if width.isdecimal()]
    sound = len(widths) == len(throughput) and min(widths, default=0) == 1 and type(measured.get("width")) is int
    fresh = 0 <= time.time() - at < WEEKS * 7 * 24 * 3600
    return sound and fresh and measured["width"] in widths and all(map(_is_positive, throughput.values()))


def _is_positive(number: Any) -> bool:
    return type(number) in (int, float) and math.isfinite(number) and number > 0


def remember(key: str, measured: Measured) -> None:
    """Keep what was measured, if that can be written at all."""
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"key": key, "at": time.time(), **measured}, indent=1).encode())
    except (OSError, RuntimeError) as error:
        _say_it_is_not_kept(f"{type(error).__name__}: {error}")


@functools.cache
def _say_it_is_not_kept(why: str) -> None:
    """Once in a process."""
    warnings.warn(f"what is measured on this machine cannot be kept for later runs ({why})", stacklevel=3)


def _file(key: str) -> Path:
    return cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def machine(device: torch.device) -> str:
    """Equal for devices on which the same widths are fastest."""
    name = f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else name}, torch {torch.__version__}"


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu model")))
    return next(names, "") or platform.processor() or platform.machine()


@functools.cache
def _code() -> str:
    """A digest of the code that is measured."""
    files = [Path(__file__), *sorted(Path(fusion.__file__).parent.rglob("*.py"))]
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    except OSError:
        return ""
