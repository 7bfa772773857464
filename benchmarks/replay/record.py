"""Record the replay table: train configurations of one batch size at one width, fused, and score each epoch.

Initial weights, order of examples, muP multipliers and schedule are those of `tune`'s sweep for the same run seed. At
full width, they are those of its race. The models of these tasks draw no random numbers in training. Recording goes
group by group, so a run that is killed loses at most one group.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.replay.table import SPLITS, About, Table, branches_of, empty, load, save, widened
from benchmarks.result_files import environment
from benchmarks.tasks.task import Batch, Config, Task, objective
from benchmarks.vs_asha.search import configurations, seeds
from benchmarks.vs_asha.training import EVAL_BATCH_FACTOR
from fusion import FusedModel, FusedOptimizer, fuse, fused_optimizer, lr_factor, plan_fusion
from fusion.optim import OPTIMIZERS
from hydro_rasda.settings.config import RaceConfig
from hydro_rasda.training.best_weights import Average
from surrogate import lr_multipliers, make_surrogate, weight_decay_multipliers

JUDGED = 2 * len(SPLITS)
"""Number of judged values: a score and a loss for each split."""
SAMPLED_WITH = 0
"""The run seed that samples the recorded configurations by default. They are the same for every seed of training."""
MOST = 16
"""The most members of a group, so that little is lost if recording is stopped."""
WITHOUT_COOLDOWNS = (1 / 2,)
"""Widths at which no cooldowns are recorded: no rule of the sweep compares models that wide."""


@dataclass(frozen=True)
class Curves:
    """Results of training a group.

    Attributes:
        scores: [config, epoch, metric], with the metrics of `METRICS`. The last six are there for each share of steps
            over which weights are averaged. NaN from the first epoch on whose training loss was not finite.
        seconds: CPU seconds of one member's training with one evaluation after each epoch.
        cooled: [config, branch, metric], with the metrics of `COOLED`; NaN if the loss was not finite before.
    """

    scores: NDArray[np.float32]
    seconds: float
    cooled: NDArray[np.float32]


def build(task: Task, number: int, config: Config, width: float, seed: int) -> nn.Module:
    """Build a trial's model with its initial weights: at full width the model itself, below it a surrogate in muP."""
    torch.manual_seed(seeds(task, number, seed).weights)
    return task.model_fn(config, 1.0) if width == 1 else make_surrogate(task.model_fn, config, width)


def multipliers(module: nn.Module, width: float) -> dict[str, dict[str, dict[str, float]]]:
    """Return muP's factors for each optimizer as arguments of `fused_optimizer`; no arguments at full width."""
    if width == 1:
        return {}
    return {
        "lr_multipliers": {name: lr_multipliers(module, name) for name in OPTIMIZERS},
        "weight_decay_multipliers": {name: weight_decay_multipliers(module, name) for name in OPTIMIZERS},
    }


def fastest_group(task: Task, configs: Mapping[int, Config], width: float) -> int:
    """Measure briefly how many configurations of one batch size train fastest as one group on this machine."""
    modules = [build(task, number, config, width, 0) for number, config in configs.items()]
    batch = tuple(part[: next(iter(configs.values()))["batch_size"]] for part in task.train)
    measure = objective(task.kind)
    plan = plan_fusion(
        modules,
        list(configs.values()),
        lambda model, batch: measure(model, batch)["loss"],
        batch,
        seconds=0.5,
        multipliers=multipliers(modules[0], width),
    )
    return plan.width


def train(
    task: Task,
    configs: Mapping[int, Config],
    width: float,
    seed: int,
    shares: Sequence[float] = (RaceConfig.ema,),
    branches: Sequence[tuple[int, float]] = (),
) -> Curves:
    """Train configurations of one batch size to the end, as one model.

    Args:
        seed: Seed of the run, which decides initial weights and the order of examples.
        shares: Shares of all steps over which weights are also averaged.
        branches: Cooldowns to try on the way (see `About.branches`). They do not change the training itself.
    """
    modules = [build(task, number, config, width, seed) for number, config in configs.items()]
    fused = fuse(modules)
    update = fused_optimizer(fused, list(configs.values()), **multipliers(modules[0], width))
    examples = _judged_examples(task)
    size = next(iter(configs.values()))["batch_size"]
    steps = math.ceil(len(task.train[0]) / size)
    averages = [Average(lambda: _averaged_tensors(fused)) for _ in shares]
    scores = np.full((len(configs), task.max_t, 1 + JUDGED * (1 + len(shares))), np.nan, np.float32)
    cooled = np.full((len(configs), len(branches), JUDGED), np.nan, np.float32)
    seconds, shuffles = 0.0, seeds(task, min(configs), seed).shuffles
    for epoch, shuffle in enumerate(shuffles):
        began = time.process_time()
        fused.train()
        order = _order(task, shuffle)
        total = torch.zeros(len(configs), dtype=torch.float64)
        for place, chunk in enumerate(order.split(size)):
            factors = [lr_factor(c, epoch + place / steps, task.max_t, steps) for c in configs.values()]
            losses = _step(task, fused, update, chunk, factors)
            for share, average in zip(shares, averages):
                average.update(share * steps * task.max_t)
            total += losses.double() * len(chunk)
        judged = [judge(task, fused, examples, size)]
        seconds += time.process_time() - began
        for average in averages:
            with average.in_place():
                judged.append(judge(task, fused, examples, size))
        going = total.isfinite()
        if not going.any():
            break
        row = torch.cat([total[:, None] / len(order), *judged], 1)
        scores[:, epoch] = torch.where(going[:, None], row, math.nan).numpy()
        for branch, (after, share) in enumerate(branches):
            if after == epoch + 1:
                batches = _order(task, shuffles[after]).split(size)[: max(1, round(share * after * steps))]
                rates = [lr_factor(c, after, task.max_t, steps) for c in configs.values()]
                with _left_untouched(fused, update):
                    fused.train()
                    for place, chunk in enumerate(batches):
                        _step(task, fused, update, chunk, [rate * (1 - place / len(batches)) for rate in rates])
                    row = judge(task, fused, examples, size)
                cooled[:, branch] = torch.where(going[:, None], row, math.nan).numpy()
    return Curves(scores, seconds / len(configs), cooled)


def _order(task: Task, shuffle: int) -> Tensor:
    return torch.randperm(len(task.train[0]), generator=torch.Generator().manual_seed(shuffle))


def _step(task: Task, fused: FusedModel, update: FusedOptimizer, chunk: Tensor, factors: Sequence[float]) -> Tensor:
    """Do a step on the examples `chunk`, with each learning rate times its factor. Return the losses [K] before it."""
    update.set_lr_factor(factors)
    losses: Tensor = fused.map(objective(task.kind), tuple(part[chunk] for part in task.train))["loss"]
    update.zero_grad()
    losses.sum().backward()
    update.step()
    return losses.detach()


@contextmanager
def _left_untouched(fused: FusedModel, update: FusedOptimizer) -> Iterator[None]:
    """After the context, restore models and optimizers to their state before it."""
    tensors = {**fused.stacked, **fused.stacked_buffers}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    state = copy.deepcopy(update.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in {**fused.stacked, **fused.stacked_buffers}.items():
                tensor.copy_(before[name])
        update.load_state_dict(state)


def _averaged_tensors(fused: FusedModel) -> dict[str, Tensor]:
    tensors = {**fused.stacked, **fused.stacked_buffers}
    return {name: value for name, value in tensors.items() if value.is_floating_point()}


def judge(task: Task, fused: FusedModel, examples: Batch, batch_size: int) -> Tensor:
    """Return the scores, then the losses, of the three splits: [K, 6], in the order of `METRICS`."""

    def measure(model: nn.Module, batch: Batch) -> Tensor:
        inputs, target, weights = batch
        output = model(inputs)
        if task.kind == "field":
            errors = (output - target).square()
        else:
            errors = F.cross_entropy(output.movedim(-1, 1), target, reduction="none")
        losses = errors.reshape(len(target), -1).mean(1)
        scores = (output.argmax(-1) == target).to(losses.dtype) if task.kind == "class" else losses
        return torch.cat([part @ weights for part in (scores, losses)])

    total = torch.zeros(fused.K, JUDGED, dtype=torch.float64)
    fused.eval()
    with torch.no_grad():
        for batch in zip(*(part.split(EVAL_BATCH_FACTOR * batch_size) for part in examples)):
            total += fused.map(measure, batch).double()
    return total


def _judged_examples(task: Task) -> Batch:
    """Join training examples, as many as validate, and held ones, with weights [N, 3] that turn sums into means."""
    *held, weights = task.held
    count = min(int((weights[:, 0] > 0).sum()), len(task.train[0]))
    splits = torch.zeros(count + len(weights), 1 + weights.shape[1])
    splits[:count, 0] = 1 / count
    splits[count:, 1:] = weights / len(weights)
    return (*(torch.cat([mine[:count], other]) for mine, other in zip(task.train, held)), splits)


def groups(configs: Sequence[Config], numbers: Sequence[int], most: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield groups of numbers of configurations. A group has one batch size, and at most `most[batch size]` members."""
    for size in sorted({configs[n]["batch_size"] for n in numbers}):
        of_size = [n for n in numbers if configs[n]["batch_size"] == size]
        yield from (of_size[i : i + most[size]] for i in range(0, len(of_size), most[size]))


def record(task: Task, widths: Sequence[float], of: Sequence[int], folder: Path, sample: int = SAMPLED_WITH) -> None:
    """Train the cells that the table in `folder` lacks, by width and seed, and write the table after each group.

    Only one process at a time may record a task. CPU seconds are those of one thread.

    Args:
        sample: The run seed whose configurations are recorded.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _extend(task, opened(task, widths, of, folder, sample), widths, of, folder)
    finally:
        torch.set_num_threads(threads)


def opened(task: Task, widths: Sequence[float], of: Sequence[int], folder: Path, sample: int = SAMPLED_WITH) -> Table:
    """Return the task's table as it is recorded so far, with room for these widths and seeds.

    Raises:
        ValueError: if the table has other configurations than the task, or another number of epochs.
    """
    configs = configurations(task, sample)
    try:
        table = load(task.name, folder)
    except FileNotFoundError:
        branches = branches_of(task.max_t)
        table = empty(About(task.name, task.mode, task.max_t, configs, [], [], branches=branches))
    if table.about.max_t != task.max_t or not _alike(table.about.configs, configs):
        raise ValueError(f"the table of {task.name} in {folder} is of other configurations; record into another folder")
    return widened(table, widths, of, environment("torch", threads=1, load=None))


def _alike(recorded: Sequence[Config], sampled: Sequence[Config]) -> bool:
    """Tell whether configurations are the same up to the last digits of a float, which differ between machines."""
    return len(recorded) == len(sampled) and all(
        ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
        for ours, theirs in zip(recorded, sampled)
    )


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs


def _extend(task: Task, table: Table, widths: Sequence[float], of: Sequence[int], folder: Path) -> None:
    about, began = table.about, time.perf_counter()
    for width in widths:
        places = {seed: (about.widths.index(width), about.seeds.index(seed)) for seed in of}
        missing = {seed: np.flatnonzero(~table.recorded[at]).tolist() for seed, at in places.items()}
        most = _fastest_groups(task, about.configs, width) if any(missing.values()) else {}
        for seed, at in places.items():
            for numbers in groups(about.configs, missing[seed], most):
                members = {n: about.configs[n] for n in numbers}
                branches = () if width in WITHOUT_COOLDOWNS else about.branches
                curves = train(task, members, width, seed, branches=branches)
                table.scores[at][numbers], table.seconds[at][numbers] = curves.scores, curves.seconds
                table.cooled[at][numbers] = curves.cooled if branches else math.nan
                save(table, folder)
                left, spent = int((~table.recorded[at]).sum()), time.perf_counter() - began
                print(f"{spent:6.0f} s: {task.name}, width {width:g}, seed {seed}: {left} left", flush=True)


def _fastest_groups(task: Task, configs: Sequence[Config], width: float) -> dict[int, int]:
    """Return, for each batch size, how many configurations train fastest as one group."""
    of_size = {size: [n for n, c in enumerate(configs) if c["batch_size"] == size][:MOST] for size in task.batch_sizes}
    return {size: fastest_group(task, {n: configs[n] for n in few}, width) for size, few in of_size.items() if few}
