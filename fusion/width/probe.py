"""Measures training speed and memory of fused groups of trials, at growing widths."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fusion.argument_checks import check_each, check_flag, check_function, check_int, check_mapping, is_number, require
from fusion.check.dry_run import Obstacle, dry_run
from fusion.evaluate.backoff import is_out_of_memory
from fusion.evaluate.microbatch import backward, can_be_split, split
from fusion.graph import GraphedStep
from fusion.keys import read
from fusion.members.assemble import fuse
from fusion.members.fused_model import FusedModel, Objective
from fusion.optim import FusedOptimizer, fused_optimizer
from fusion.optim.clip import clip_grad_norm_
from fusion.optim.make_fused_optimizer import member
from fusion.streams import preserved_generators
from fusion.structure.module_parts import copied
from fusion.width.memory import objects_so_far_set_aside, peak_memory, usable_memory
from fusion.width.plan import FusionPlan, best_width, is_clear, memory_limit, memory_line, next_width

TimedStep = Callable[[], None]

# Number of steps before the timing begins. A step with graphs needs more of them, because its fourth call is recorded.
_WARM_UP_STEPS = 2
_WARM_UP_STEPS_OF_GRAPHS = 4
_MIN_ROUNDS, _MAX_ROUNDS = 3, 50


def plan_fusion(
    modules: Sequence[nn.Module],
    configs: Sequence[Mapping[str, Any]],
    objective: Objective,
    batch: Any,
    *,
    memory: int | None = None,
    max_width: int | None = None,
    seconds: float = 2.0,
    multipliers: Mapping[str, Any] | None = None,
    graph: bool = False,
) -> FusionPlan:
    """Time training steps of one trial alone and of fused groups of growing width; pick the fastest width that fits.

    A step includes each member's own optimizer, multipliers and clipping. If the dry run of the narrowest group finds
    that vmap cannot follow the model, the width is 1, and `obstacle` says why. Everything runs on copies: the modules
    and all global generators stay as they are. Steps alone and fused are timed in turns, so that a busy machine slows
    both. With one CPU thread, CPU time is measured, because other processes interrupt long steps more often, which
    would make fusing seem slower.

    Args:
        modules: The modules of at least one trial, of one shape and on one device. If the sequence builds modules on
            demand, only those of the widest group are built.
        configs: The trials' optimizer settings, as for `fused_optimizer`, and `grad_clip`.
        objective: `objective(model, batch)` for one model: the mean loss over the batch.
        batch: One batch of the size that training uses. It is split into micro-batches only if the first axes of all
            its tensors, in any nesting, have the same length: the number of samples.
        memory: Bytes that a group may take; 90 % of the device's free memory if None.
        max_width: The widest group to consider; all trials if None.
        seconds: Time to measure each width. Measuring ends earlier if a width is clearly faster or slower than narrower
            ones.
        multipliers: Further arguments of `fused_optimizer`: `lr_multipliers`, `weight_decay_multipliers`.
        graph: If True, record steps if possible (see `GraphedStep`), and count the memory of recordings.

    Returns:
        The plan. If a single trial does not fit, `micro_batches` is the least power of 2 with which it does.

    Raises:
        ValueError: if there is no module, if modules and configs differ in number, or if a bound is not positive.
        RuntimeError, MemoryError: if one trial does not fit with one sample at a time; often a
            `torch.OutOfMemoryError`.
    """
    check_each("modules", modules, nn.Module)
    check_each("configs", configs, Mapping, len(modules))
    check_function("objective", objective, 2)
    check_flag("graph", graph)
    _check_bounds(memory, max_width, seconds)
    _check_members(configs, multipliers)
    batch = copied(batch)
    device = next(modules[0].parameters(), torch.empty(0)).device
    if memory is None:
        memory = usable_memory(device)
    trials = _Trials(modules, configs, objective, batch, multipliers or {}, graph)
    with preserved_generators(), objects_so_far_set_aside(device):
        parts, alone, peak_1 = _fit_one(trials, device, memory)
        if parts > 1:
            rate = 1 / _seconds(alone, device)
            return FusionPlan(1, 1, peak_1, 0, {1: rate}, parts)
        return _grow(trials, min(len(modules), max_width or len(modules)), memory, seconds, alone, peak_1)


def _check_bounds(memory: int | None, max_width: int | None, seconds: float) -> None:
    for name, bound in (("memory", memory), ("max_width", max_width)):
        if bound is not None:
            check_int(name, bound, at_least=1)
    require(is_number(seconds) and seconds > 0, "seconds", seconds, "a finite number > 0")


def _check_members(configs: Sequence[Mapping[str, Any]], multipliers: Mapping[str, Any] | None) -> None:
    if multipliers is not None:
        check_mapping("multipliers", multipliers)
    for k, config in enumerate(configs):
        member(k, config)
    known = ("lr_multipliers", "weight_decay_multipliers")
    require(not {*(multipliers or {})} - {*known}, "multipliers", multipliers, f"a mapping with keys among {known}")


class Compiled(NamedTuple):
    """Speedup and cost of compiling a group's step.

    Attributes:
        speedup: Speed of a compiled step, divided by the speed of the step as written; 1 if it cannot be compiled.
        compile_seconds: Time until the step was compiled, or compiling was refused.
        seconds: Time of a step as written.
    """

    speedup: float
    compile_seconds: float
    seconds: float


def compiled_speedup(
    modules: Sequence[nn.Module],
    configs: Sequence[Mapping[str, Any]],
    objective: Objective,
    batch: Any,
    *,
    multipliers: Mapping[str, Any] | None = None,
) -> Compiled:
    """Measure how much faster the fused modules train on a CPU if their step is compiled (see `GraphedStep`).

    Steps are timed in turns, as in `plan_fusion`, which also describes the arguments.
    """
    trials = _Trials(modules, configs, objective, copied(batch), multipliers or {}, graph=False)
    device = next(modules[0].parameters()).device
    with preserved_generators():
        fused, as_written = trials.step(len(modules))
        _obstacle(fused, trials)
        _warm_up(as_written, device, graph=False)
        began = time.perf_counter()
        fused, update, learn = trials.training(len(modules))
        _obstacle(fused, trials)
        step = GraphedStep(learn, fused, update, compiled=True)
        if update.can_be_recorded:
            _warm_up(partial(step, trials.batch), device, graph=True)
        took = time.perf_counter() - began
        if not step.recorded:
            return Compiled(1.0, took, _seconds(as_written, device))
        speedup, times = _race(as_written, partial(step, trials.batch), 1, 1.0, seconds=2.0, device=device)
    return Compiled(speedup, took, statistics.median(times))


@dataclass(frozen=True)
class _Trials:
    """The trials that are measured; see `plan_fusion`."""

    modules: Sequence[nn.Module]
    configs: Sequence[Mapping[str, Any]]
    objective: Objective
    batch: Any
    multipliers: Mapping[str, Any]
    graph: bool

    def step(self, width: int, parts: int = 1) -> tuple[FusedModel, TimedStep]:
        """Return the first `width` trials as one fused model, and its training step on `parts` micro-batches."""
        fused, update, learn = self.training(width, parts)
        graph = self.graph and update.can_be_recorded
        return fused, partial(GraphedStep(learn, fused, update) if graph else learn, self.batch)

    def training(self, width: int, parts: int = 1) -> tuple[FusedModel, FusedOptimizer, Callable[[Any], None]]:
        """Return the first `width` trials as one fused model, its optimizer, and its step as a function of a batch."""
        fused, configs = fuse(self.modules[:width]), self.configs[:width]
        update = fused_optimizer(fused, configs, **self.multipliers)
        norms = [read(config, "grad_clip") or math.inf for config in configs]

        def learn(batch: Any) -> None:
            update.zero_grad()
            backward(lambda part: {"loss": fused.map(self.objective, part)}, batch, parts)
            if min(norms) < math.inf:
                clip_grad_norm_(fused, norms)
            update.step()

        return fused, update, learn


def _grow(trials: _Trials, count: int, memory: int | None, seconds: float, alone: TimedStep, peak_1: int) -> FusionPlan:
    device = next(trials.modules[0].parameters()).device
    speedup: dict[int, float] = {}
    peaks = {1: peak_1}
    seconds_alone: list[float] = []
    obstacle: Obstacle | None = None
    limit = None if memory is None else max(1, memory_limit(0, peak_1, memory))
    while (width := next_width(speedup, count, limit)) is not None:
        try:
            with peak_memory(device) as peak:
                fused, step = trials.step(width)
                obstacle = _obstacle(fused, trials)
                if obstacle is not None:
                    break
                _warm_up(step, device, trials.graph)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            limit = width - 1
            break
        peaks[width] = peak.bytes
        speedup[width], times = _race(alone, step, width, max([1.0, *speedup.values()]), seconds, device)
        seconds_alone += times
        del fused, step
        if memory is not None:
            limit = max(1, memory_limit(*memory_line(_of_groups(peaks)), memory))
    rate = 1 / (statistics.median(seconds_alone) if seconds_alone else _seconds(alone, device))
    fixed, per_trial = memory_line(_of_groups(peaks))
    throughput = {1: rate, **{K: rate * s for K, s in speedup.items()}}
    return FusionPlan(best_width(speedup, limit), limit, per_trial, fixed, throughput, obstacle=str(obstacle or ""))


def _obstacle(fused: FusedModel, trials: _Trials) -> Obstacle | None:
    """Return the reason why vmap cannot follow the model, or None. The results of members are not compared here."""
    return dry_run(fused, trials.objective, trials.batch, compare=False)


def _of_groups(peaks: Mapping[int, int]) -> Mapping[int, int]:
    """Return only the peaks of fused groups, if there are at least 2; else return all peaks.

    The peak of a single trial does not lie on the line through the peaks of groups.
    """
    groups = {K: peak for K, peak in peaks.items() if K > 1}
    return groups if len(groups) > 1 else peaks


def _fit_one(trials: _Trials, device: torch.device, memory: int | None) -> tuple[int, TimedStep, int]:
    """Find the least number of parts of a batch with which one trial fits memory, as a power of 2.

    Returns:
        The number of parts, the trial's step, and its peak memory in bytes.
    """
    parts = 1
    step: TimedStep | None
    while True:
        step = None  # free the memory of the step that did not fit, because the next step needs it
        last = not can_be_split(trials.batch) or len(split(trials.batch, 2 * parts)) <= parts
        try:
            with peak_memory(device) as peak:
                step = trials.step(1, parts)[1]
                _warm_up(step, device, trials.graph)
            if memory is None or peak.bytes <= memory:
                return parts, step, peak.bytes
        except (RuntimeError, MemoryError) as error:
            if last or not is_out_of_memory(error):
                raise
        if last:
            least = "with one sample at a time" if can_be_split(trials.batch) else "with a batch that cannot be split"
            raise torch.OutOfMemoryError(f"memory is {memory} bytes, but one trial takes {peak.bytes} {least}")
        parts *= 2


def _race(
    alone: TimedStep, fused: TimedStep, width: int, best: float, seconds: float, device: torch.device
) -> tuple[float, list[float]]:
    """Time both steps in turn; return the median speedup of `fused`, and the seconds of each step of a trial alone.

    Args:
        best: The best speedup of narrower groups.
    """
    start, ratios, times = time.perf_counter(), list[float](), list[float]()

    def enough() -> bool:
        spent = time.perf_counter() - start >= seconds or len(ratios) == _MAX_ROUNDS
        return len(ratios) >= _MIN_ROUNDS and (spent or is_clear(ratios, best))

    while not enough():
        # Run once without timing, because the fused step has filled the CPU's cache. A trial that always trains alone
        # would find its own tensors in the cache.
        _seconds(alone, device)
        times.append(_seconds(alone, device))
        ratios.append(times[-1] * width / _seconds(fused, device))
    return statistics.median(ratios), times


def _seconds(step: TimedStep, device: torch.device) -> float:
    """Return the seconds of a step; with one CPU thread, without the time in which other processes had the core."""
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def _warm_up(step: TimedStep, device: torch.device, graph: bool) -> None:
    for _ in range(_WARM_UP_STEPS_OF_GRAPHS if graph else _WARM_UP_STEPS):
        _seconds(step, device)
