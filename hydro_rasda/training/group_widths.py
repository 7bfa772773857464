"""Measure how many trials of a kind should train as one fused group, and whether compiling its steps pays.

The models of trials of one kind can be fused. The width of a group is its number of members.

Measurements vary from run to run, and the width of a group changes the last digits of its results. Measurements are
therefore kept for later runs on this machine (`hydro_rasda.run.cache`), so that the same call gives the same result.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusion
from fusion import FusionWarning
from fusion.evaluate.backoff import is_out_of_memory
from fusion.graph import GraphWarning
from fusion.keys import OWN, configs_of_parts, optimizer_name, read
from fusion.optim import OPTIMIZERS
from fusion.warn import warn
from fusion.width.memory import usable_memory
from fusion.width.plan import FusionPlan, best_width
from fusion.width.probe import compiled_speedup, plan_fusion
from hydro_rasda.common.short_values import counted
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Widths
from hydro_rasda.data import Batch, outline
from hydro_rasda.problem.precision import matrix_products
from hydro_rasda.problem.problem import Problem
from hydro_rasda.processes.forks import Died, map_forked
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.processes.memory_estimates import Peaks, kind_of_group
from hydro_rasda.run import cache
from hydro_rasda.run.cache import Measured, is_count, is_positive, remember
from hydro_rasda.run.fingerprint import content, digest
from hydro_rasda.schedulers.packing_policy import MARGIN
from hydro_rasda.training.cuda_graphs import records
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers, optimizer_settings

COMPILED_FROM = 300.0
"""Compiled steps are tried if training from one milestone to the next takes at least this many seconds.

Compiling a small model's step takes 10 to 30 seconds. If compiled steps are no faster, only this time is lost.
"""

MEASURED_FROM = 2000
"""Widths are measured on a CPU if the sweep's longest trials have at least this many steps.

A measurement takes as long as about 30 steps of each trial. That is 5 % of such a sweep, because halving stops most
trials early.
"""
MEASURED_FROM_S = 10.0
"""Widths are also measured if the longest trials would take at least this many seconds with full-size models.

Some models train slower as a group than one after another. With long steps, a wrong guess would cost minutes.
"""
UNMEASURED = 20
"""Largest number of members of a group if widths are not measured.

In `benchmarks/results/fusion_throughput.md`, groups of 16 have at least 74 % of the best group's speed.
"""
FEW_STEPS, UNMEASURED_OF_FEW = 100, 160
"""If the longest trials have fewer than `FEW_STEPS` steps, unmeasured groups have up to `UNMEASURED_OF_FEW` members.

For such short trials, fusing and checking a group takes longer than training it.
"""
GAIN = 2.0
"""Groups that are not measured are assumed to train this many times as fast as single trials."""

SECONDS_PER_WIDTH = 0.03
"""Seconds to measure each width, a short time compared with a sweep. At least a few steps are always measured."""

ONE_BY_ONE, AS_WRITTEN = "trials train one after another", "steps are not compiled"
"""Texts of warnings: the consequence if groups cannot be measured, and if their compiled steps cannot."""

MEASURING = 1 / 4
"""Measuring, building of models included, takes at most this share of the sweep's remaining time."""


def planned_widths(
    problem: Problem,
    kinds: Mapping[str, Sequence[Trial]],
    cores: int = 1,
    forked: bool = False,
    memory: float | None = None,
    peaks: Peaks | None = None,
    singles: bool = False,
    seconds: float = math.inf,
) -> dict[str, Widths]:
    """Find for each kind the fastest group width that fits memory, and the smallest width that pays.

    Nothing is measured for a sweep that is hardly longer than the measurement; see `MEASURED_FROM`.

    Args:
        kinds: Map the digest of a kind to its trials, in the order in which groups take them.
        cores: Cores of the device. Each core trains a part of a group on one thread; all cores share the memory.
        forked: True if forked processes measure; False if this process does.
        memory: Bytes for all cores together; None for all free memory of the system.
        peaks: If given, it receives the estimated memory peaks of groups.
        singles: If true, kinds with a single trial for each core are measured, too.
        seconds: Time left for the sweep. Measuring takes at most the share `MEASURING` of it. Kinds that are not
            measured in time get the widths of single trials, marked as `assumed`.
    """
    began = time.monotonic()
    until, end = began + MEASURING * seconds, began + seconds
    found, work = dict[str, Measured | None](), dict[str, Callable[[], Measured | None]]()
    keys = dict[str, str]()
    room = (usable_memory(problem.device) or math.inf) if memory is None else memory
    assumed = {kind: of for kind, trials in kinds.items() if (of := _assumed(problem, trials[0], room / cores))}
    if len(assumed) == len(kinds):
        return assumed
    functions = digest(content((problem.model_fn, problem.objective)))
    models = problem.settings.models("sweep")
    for kind, trials in kinds.items():
        part = [trial for trial in trials[: -(-len(trials) // cores)] for _ in range(models)]
        batch = next(problem.train_data.epoch(part[0].batch_size, 0))
        where = f"{machine(problem.device)} of {cores}"
        own = [kind, functions, outline(batch), _updates(part), f"{len(part)} trials", problem.settings.precision]
        own += ["graph"] if records(problem) else []
        keys[kind] = "/".join([*own, where, _code()])
        asked = singles or len(part) > 1
        found[kind] = recall(keys[kind]) if asked else None
        if asked and found[kind] is None:
            work[kind] = partial(measure_widths, problem, part, batch, room, cores)
    children = cores if forked else 0
    found |= _measured(problem, work, keys, children, until, ONE_BY_ONE)
    for obstacle in dict.fromkeys(of["obstacle"] for of in found.values() if of and of["obstacle"]):
        warn(f"trials train one after another, {obstacle}", FusionWarning)
    if peaks is not None:
        for kind, measured in found.items():
            if measured is not None:
                most = of_trials(_widths(measured, math.inf), models).most
                of_width = {width: _peak(measured, models * width) for width in (1, most)}
                peaks.estimate(kind_of_group(kind, kinds[kind]), of_width)
    widths = {kind: of_trials(_widths(measured, room / cores), models) for kind, measured in found.items()}
    return _with_compiled(problem, kinds, widths, keys, children, until, end)


def _assumed(problem: Problem, trial: Trial, room: float) -> Widths | None:
    """Return assumed widths of groups for a short sweep on a CPU; None if the widths should be measured.

    Widths should be measured if trials have many steps, if the number of steps is unknown, or if a group may exceed
    `room` bytes.
    """
    models, stop = problem.settings.models("sweep"), problem.settings.sweep_milestones[-1]
    steps, seconds = problem.train_data.steps(trial.batch_size), problem.steady_epoch_seconds
    if steps is None or steps * stop >= MEASURED_FROM or seconds * stop >= MEASURED_FROM_S:
        return None
    widths = (max(1, of // models) for of in (UNMEASURED_OF_FEW, UNMEASURED)[steps * stop >= FEW_STEPS :])
    most = next((width for width in widths if width * models * problem.peak <= room), None)
    if problem.device.type != "cpu" or most is None:
        return None
    return Widths(most, throughput={most: GAIN * steps / seconds, 1: steps / seconds}, assumed=True)


def _measured(
    problem: Problem,
    work: Mapping[str, Callable[[], Measured | None]],
    keys: Mapping[str, str],
    children: int,
    until: float,
    otherwise: str,
) -> dict[str, Measured | None]:
    """Measure kinds in `children` forked processes at a time, and remember the measurement of each kind under its key.

    If `children` is 0, this process measures. `work[kind]` measures a kind. Measuring ends at the time `until` of the
    monotonic clock. A kind that could not be measured gets None, and a warning names the consequence, `otherwise`.
    """
    pace = HangDetector("nothing was measured", foreseen=problem.epoch_seconds)
    found = dict[str, Measured | None]()
    for kind, measured in zip(work, map_forked(list(work.values()), children, pace, until)):
        found[kind] = None if isinstance(measured, Died) else measured
        if isinstance(measured, Died):
            _warn_unmeasured(otherwise, measured.how)
        elif measured is not None:
            remember(keys[kind], measured)
    return found


def _with_compiled(
    problem: Problem,
    kinds: Mapping[str, Sequence[Trial]],
    widths: Mapping[str, Widths],
    keys: Mapping[str, str],
    children: int,
    until: float,
    end: float,
) -> dict[str, Widths]:
    """Add the speedup of compiled steps to the widths of kinds that train long enough for compiling to pay.

    Args:
        until: Time of the monotonic clock at which measuring ends.
        end: Time of the monotonic clock at which training ends.
    """
    found, work = dict[str, Measured | None](), dict[str, Callable[[], Measured | None]]()
    for kind, of in widths.items():
        trials = [trial for trial in kinds[kind][: of.most] for _ in range(problem.settings.models("sweep"))]
        longest = _longest_training(problem, trials[0].batch_size) * of.seconds(of.most)
        if of.most > 1 and min(longest, end - time.monotonic()) >= COMPILED_FROM:
            found[kind] = cache.recall(f"{keys[kind]}/compiled")
            if not _is_sound_speedup(found[kind]):
                work[kind] = partial(measure_compiled, problem, trials)
    compiled_keys = {kind: f"{key}/compiled" for kind, key in keys.items()}
    found |= _measured(problem, work, compiled_keys, children, until, AS_WRITTEN)
    compiled = {
        kind: replace(widths[kind], compiled=of["speedup"], compile_seconds=of["seconds"])
        for kind, of in found.items()
        if of is not None
    }
    return {**widths, **compiled}


def _longest_training(problem: Problem, batch_size: int) -> float:
    """Return the largest number of steps between two milestones of the sweep; 0 if steps are never compiled."""
    settings = problem.settings
    if settings.graph is False or problem.device.type != "cpu":
        return 0.0
    stops = (0, *settings.sweep_milestones)
    return (problem.train_data.steps(batch_size) or 0.0) * max(stop - start for start, stop in pairwise(stops))


def _peak(measured: Measured, width: int) -> float:
    """Return the bytes that a group of `width` members takes at its peak, by a measurement of its kind."""
    return float(measured["fixed"] + measured["each"] * width)


def _updates(trials: Sequence[Trial]) -> str:
    """Name, for a cache key, the work of a step after its backward pass: the optimizers, and any gradient clipping."""
    named = [(optimizer_name(own), own) for trial in trials for own in configs_of_parts(trial.config).values()]
    kinds = {name for name, _ in named}
    own = {digest(content(read(config, "optimizer"))) for name, config in named if name == OWN}
    clipped = any(read(trial.config, "grad_clip") for trial in trials)
    return "+".join([kind for kind in OPTIMIZERS if kind in kinds] + sorted(own) + ["clipped"] * clipped)


def _widths(measured: Measured | None, room: float) -> Widths:
    """Return the group widths of a kind by its measurement; the width of single trials if `measured` is None.

    If there was more memory during the measurement, the best width may not fit `room` (bytes for one core) now. Then
    the best width that fits is chosen.
    """
    if measured is None:
        return Widths(1, assumed=True)
    throughput = {int(k): rate for k, rate in measured["throughput"].items()}
    most = measured["width"]
    if _peak(measured, most) > room:
        fitting = [k for k in throughput if _peak(measured, k) * MARGIN <= room]
        most = best_width({k: rate / throughput[1] for k, rate in throughput.items()}, max(fitting, default=1))
    return widths_from(throughput, most)


def widths_from(throughput: Mapping[int, float], most: int) -> Widths:
    """Derive the `Widths` of a kind from its measured throughputs; `most` is the width of its largest groups.

    `throughput` maps a width to the steps per second, summed over trials. At width 1, trials train one after another.

    >>> widths_from({1: 100.0, 2: 70.0, 4: 120.0, 8: 240.0}, most=8).least
    4
    """
    pays = [width for width, rate in throughput.items() if width > 1 and rate > throughput[1]]
    return Widths(most, min(pays, default=2), throughput)


def of_trials(widths: Widths, models: int) -> Widths:
    """Convert widths that count models to widths that count trials of `models` models each.

    >>> of_trials(Widths(10, 2, {1: 100.0, 5: 250.0, 10: 400.0}), 5)
    Widths(most=2, least=1, throughput={1: 50.0, 2: 80.0}, share=0.0, compiled=1.0, compile_seconds=0.0)
    >>> of_trials(Widths(1), 5).most
    1
    """
    if models == 1:
        return widths
    if widths.most < models:
        return replace(widths, most=1, least=2, throughput={1: widths.throughput[1] / models})
    most = widths.most // models
    sizes = sorted({1, most, *(2**i for i in range(most.bit_length()))})
    throughput = {size: size / widths.seconds(size * models) for size in sizes}
    return Widths(most, max(1, -(-widths.least // models)), throughput)


def _is_sound_speedup(measured: Measured | None) -> bool:
    return measured is not None and all(is_positive(measured.get(name)) for name in ("speedup", "seconds"))


def recall(key: str) -> Measured | None:
    """Return the recent measurement that is kept under a key; None if it is missing or malformed."""
    measured = cache.recall(key)
    return measured if measured is not None and _is_sound(measured) else None


def _is_sound(measured: Measured) -> bool:
    throughput: Any = measured.get("throughput")
    if not isinstance(throughput, dict) or not isinstance(measured.get("obstacle"), str):
        return False
    widths = [int(width) for width in throughput if is_count(width)]
    sound = len(widths) == len(throughput) and min(widths, default=0) == 1 and type(measured.get("width")) is int
    sound = sound and all(measured.get(size) == 0 or is_positive(measured.get(size)) for size in ("fixed", "each"))
    return sound and measured["width"] in widths and all(map(is_positive, throughput.values()))


def machine(device: torch.device) -> str:
    """Name the type of a device. Devices of the same name have the same fastest widths."""
    name = f"{_processor()}, {counted(os.cpu_count() or 1, 'core')}, {counted(torch.get_num_threads(), 'thread')}"
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
    """Return, for a cache key, a digest of the library's code that is measured; "" if its files cannot be read."""
    files = [Path(__file__), *sorted(Path(fusion.__file__).parent.rglob("*.py"))]
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    except OSError:
        return ""


def measure_widths(problem: Problem, trials: Sequence[Trial], batch: Batch, room: float, cores: int) -> Measured | None:
    """Measure the trials' speed and memory at each width; if that fails, warn and return None.

    If a single trial does not fit a core's part of the memory, it is measured with all of the memory.

    Args:
        trials: Trials of one kind, for one core.
        room: Bytes of memory for all cores.
        cores: Number of cores that share the memory.
    """
    surrogates = _Surrogates(problem, trials)

    def plan(most: int, memory: float, further: Mapping[str, Any]) -> FusionPlan:
        return plan_fusion(
            surrogates,
            [trial.config for trial in trials],
            partial(_loss, problem),
            batch,
            memory=max(1, int(memory / MARGIN)) if memory < math.inf else None,
            max_width=most,
            seconds=SECONDS_PER_WIDTH,
            multipliers=further,
            graph=records(problem),
        )

    try:
        with _measuring(problem):
            further = _multipliers(problem, trials[0], surrogates[0])
            try:
                found = plan(len(trials), room / cores, further)
                fits = found.micro_batches == 1
            except (RuntimeError, MemoryError) as error:
                fits = not is_out_of_memory(error)
                if fits:
                    raise
            if not fits and cores > 1:
                found = plan(1, room, further)
    except (Exception, SystemExit) as error:  # the user's model, loss or data may raise anything
        _warn_unmeasured(ONE_BY_ONE, f"{type(error).__name__}: {error}")
        return None
    throughput = {str(width): rate for width, rate in found.throughput.items()}
    sizes = {"fixed": found.fixed_bytes, "each": found.bytes_per_trial}
    return {"width": found.width, "throughput": throughput, "obstacle": found.obstacle, **sizes}


def measure_compiled(problem: Problem, trials: Sequence[Trial]) -> Measured | None:
    """Measure the speedup of a group's compiled step and the time to compile; if that fails, warn and return None."""
    batch = next(problem.train_data.epoch(trials[0].batch_size, 0))
    try:
        with _measuring(problem):
            surrogates, configs = list(_Surrogates(problem, trials)), [trial.config for trial in trials]
            further = _multipliers(problem, trials[0], surrogates[0])
            loss = partial(_loss, problem)
            found = compiled_speedup(surrogates, configs, loss, batch, multipliers=further)
    except (Exception, SystemExit) as error:  # the user's model, loss or data may raise anything
        _warn_unmeasured(AS_WRITTEN, f"{type(error).__name__}: {error}")
        return None
    return {"speedup": found.speedup, "seconds": found.compile_seconds}


def _warn_unmeasured(what: str, why: str) -> None:
    """Warn that the speed of groups could not be measured; `what` is the consequence, and `why` the reason."""
    warn(f"{what}, because measuring how fast groups train failed: {why}")


def _loss(problem: Problem, model: nn.Module, part: Batch) -> Tensor:
    return problem.objective(model, part)["loss"]


@contextmanager
def _measuring(problem: Problem) -> Iterator[None]:
    """Within the context, compute with the precision of training, and ignore warnings of fused training.

    The caller warns of obstacles, because users should see the warnings even if an earlier measurement is used.
    """
    with warnings.catch_warnings(), matrix_products(problem.settings.precision):
        warnings.simplefilter("ignore", FusionWarning)
        warnings.simplefilter("ignore", GraphWarning)
        yield


def _multipliers(problem: Problem, trial: Trial, surrogate: nn.Module) -> Mapping[str, Any]:
    settings = optimizer_settings(problem.objective, surrogate, trial.config)
    return multipliers(settings, surrogate, problem.settings.sweep.surrogate)


class _Surrogates(Sequence[nn.Module]):
    """The trials' surrogates; each is built at its first use."""

    def __init__(self, problem: Problem, trials: Sequence[Trial]) -> None:
        self._problem, self._trials = problem, trials
        self._built: dict[int, nn.Module] = {}

    def __len__(self) -> int:
        return len(self._trials)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        if at not in self._built:
            self._built[at] = self._problem.surrogate(self._trials[at])
        return self._built[at]
