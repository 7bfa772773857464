"""Costs of the full-size model that are known before it trains: parameters, operations, time and memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor, nn
from torch.backends import cudnn, mkldnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusion.evaluate.avoided_kernels import without_fast_attention
from fusion.width.memory import objects_so_far_set_aside, peak_memory
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import Batch, batch_length
from hydro_rasda.problem.dry_run_of_batches import parts_of, run_batch
from hydro_rasda.problem.problem import Problem

BESIDE_A_STEP = 4
"""Memory of a training besides that of a step, in multiples of the model's size: weights, average, Adam's moments."""

REPEATS = 5
"""A batch is evaluated this many times, and the median time counts."""


def model_costs(problem: Problem, trial: Trial, names: Collection[str], width: float = 1.0) -> dict[str, float]:
    """Measure the costs `names` of a trial's untrained model on one batch; if `width` is below 1, those of a surrogate.

    `params` is the number of parameters, frozen ones included. `macs` is the number of multiply-accumulate operations
    to evaluate an example: those of matrix products, convolutions, recurrent layers and attention (half of the count of
    torch's `FlopCounterMode`). `seconds_per_example` is the wall time per example of evaluating a batch of
    `batch_size`. `peak_memory` is the number of bytes that training takes, by the dry run's estimate.
    """
    model = problem.target(trial) if width == 1 else problem.at_width(width).surrogate(trial)
    found: dict[str, float] = {"params": float(sum(parameter.numel() for parameter in model.parameters()))}
    if "peak_memory" in names:
        batch = parts_of(trial, next(problem.train_data.epoch(trial.batch_size, 0)), "train_data")[0]
        _, found["peak_memory"] = training_step(problem, model, batch)
    if {"macs", "seconds_per_example"} & {*names}:
        from torch.utils.flop_counter import FlopCounterMode  # not at the top: it imports triton, which few runs need

        batch = parts_of(trial, next(problem.val_data.in_order(trial.batch_size)), "val_data")[0]
        model.eval()
        with torch.no_grad():
            with _counted_kernels(), FlopCounterMode(display=False) as flops:
                run_batch(problem, model, batch, "val_data")
            found["macs"] = flops.get_total_flops() / 2 / batch_length(batch)
            if "seconds_per_example" in names:
                seconds = [batch_seconds(problem, model, batch, "val_data") for _ in range(REPEATS)]
                found["seconds_per_example"] = median(seconds) / batch_length(batch)
    return {name: found[name] for name in names}


@contextmanager
def _counted_kernels() -> Iterator[None]:
    """Within the context, compute by operations that torch can count, unlike oneDNN's and cuDNN's recurrent layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # oneDNN's switch warns in some builds of torch
        recurrent = cudnn.flags(enabled=False)
        with mkldnn.flags(enabled=False), recurrent, without_fast_attention(), sdpa_kernel(SDPBackend.MATH):
            yield


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def training_step(problem: Problem, model: nn.Module, batch: Batch) -> tuple[Mapping[str, Tensor], float]:
    """Do a forward and backward pass of training; return its metrics, and the bytes that training takes."""
    with objects_so_far_set_aside(problem.device), peak_memory(problem.device) as step:
        metrics = run_batch(problem, model.train(), batch, "train_data")
    return metrics, step.bytes + BESIDE_A_STEP * weight_bytes(model)


def batch_seconds(problem: Problem, model: nn.Module, batch: Batch, argument: str) -> float:
    """Return the wall seconds of running a batch once, see `run_batch`."""
    began = time.perf_counter()
    run_batch(problem, model, batch, argument)["loss"].item()  # `item` waits until a GPU has finished
    return time.perf_counter() - began
