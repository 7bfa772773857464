"""What a training function gets to work with, on each rank of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset, DistributedSampler

from hydro_rasda.checks import check_flag, check_int, require
from hydro_rasda.config import GLOBAL_BATCH
from hydro_rasda.data import MOST_EXAMPLES, Shard
from hydro_rasda.training.batch_statistics import average_statistics
from hydro_rasda.training.gradient_noise import GradientNoise
from hydro_rasda.training.lr_rescaling import RescaledLR, Rule
from hydro_rasda.training.report_keys import NOISE_SCALE, SCALING_EFFICIENCY
from hydro_rasda.training.step_times import StepTimes

# The iteration is reckoned in, and torch's seeds have 64 bits.
_LARGEST_SEED = 2**40

State = Mapping[str, Any]

Saving = State | Callable[[], State] | None
"""What to go on from, or what gives it."""


class Worker:
    """One rank of a trial.

    Attributes:
        config: The trial's configuration.
        data: What `elastic` was given as `data`, shared by the node's ranks; of `tune`, `(train_data, val_data)` as it
            was given them.
        rank: From 0; rank 0 reports and saves.
        world_size: Ranks of the trial.
        growth: `world_size` over the workers of a new trial.
        device: Where to train: this rank's GPU, or the CPU.
        iteration: Reports so far, over all restarts; 0 at first.
        checkpoint: The state last saved; None at first.
        trial: The trial's id.

    Args:
        job: What of these there is: `config`, `trial`, `rank`, `world_size`, and `workers`, those of a new trial.
        saved: What `saved` gave before; None at first.
    """

    def __init__(self, job: Mapping[str, Any], data: Any, device: torch.device, saved: State | None = None) -> None:
        self.config: dict[str, Any] = job["config"]
        self.data = data
        self.rank: int = job["rank"]
        self.world_size: int = job["world_size"]
        self.growth: float = job["world_size"] / job["workers"]
        self.trial: str = job["trial"]
        self.device = device
        self._global_batch_size: int | None = None
        self._weight = 1.0
        self._rescaled: list[RescaledLR] = []
        saved = saved or {"state": None, "iteration": 0, "rescaled": [], "measured": {}}
        self.iteration: int = saved["iteration"]
        self.checkpoint: State | None = saved["state"]
        self._rescaled_states: list[State] = list(saved["rescaled"])
        self._measured: dict[str, Any] = dict(saved["measured"])
        self._noise: GradientNoise | None = None
        self.through: Callable[[int, Mapping[str, Any], Saving], tuple[dict[str, Any], Saving]] | None = None
        """Makes of a report what `tune` keeps."""
        self.gathers = False
        """Whether what gives the state has to be called by all ranks together."""
        self._times: StepTimes | None = None

    def __getitem__(self, key: object) -> NoReturn:
        # The training functions of Ray Tune take the configuration itself.
        raise TypeError(f"the training function is given a Worker, no configuration: take worker.config[{key!r}]")

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, its gradients averaged over the ranks where there are several.

        Load `checkpoint` into the model before, and save the state of the model itself:
        `worker.plain(model)`. BatchNorm normalizes by each rank's own batch, and its running statistics are the mean
        over the ranks after each step; convert the model to `nn.SyncBatchNorm` before for the global batch (GPUs only).
        """
        require(isinstance(model, nn.Module), "model", model, "an nn.Module")
        model = model.to(self.device)
        if self.world_size == 1:
            return model
        joint = DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)
        average_statistics(joint, lambda: self._weight)
        return joint

    def plain(self, model: nn.Module) -> nn.Module:
        """The user's own module inside what `prepare` gave."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def batches(
        self, samples: int, batch_size: int, *, seed: int = 0, fixed_global: bool = False
    ) -> Iterator[tuple[Tensor, float]]:
        """This rank's share of one shuffled epoch; each sample is in one batch of one rank.

        All ranks see the same number of batches. Multiply a batch's mean loss by its weight: then the
        averaged gradient is that of the whole global batch, also where the last one does not divide evenly.

        Args:
            samples: Size of the data set.
            batch_size: Samples per rank and step; with `fixed_global`, samples per step over all ranks.
            seed: Of the run; the order differs by iteration, and is the same on every rank and number of
                ranks.
            fixed_global: Whether the global batch stays as the workers grow.

        Yields:
            Indices `[n]` and the weight `n * world_size / (samples in the global batch)`. A rank for
            which nothing is left gets one sample with weight 0.

        Raises:
            ValueError: where `samples` or `batch_size` is below 1.
        """
        check_int("samples", samples, at_least=1, at_most=MOST_EXAMPLES)
        check_int("batch_size", batch_size, at_least=1, at_most=MOST_EXAMPLES)
        check_int("seed", seed, at_least=0, at_most=_LARGEST_SEED)
        check_flag("fixed_global", fixed_global)
        shard = Shard(self.rank, self.world_size)
        size = batch_size if fixed_global else batch_size * self.world_size
        self._global_batch_size = size
        generator = torch.Generator().manual_seed(seed * 1_000_003 + self.iteration)
        for batch in torch.randperm(samples, generator=generator).split(size):
            part = shard.part(len(batch))
            if self._noise is not None:
                self._noise.expect(len(batch[part.rows]), part.weight)
            self._weight = part.weight
            try:
                yield batch[part.rows], part.weight
            finally:
                self._weight = 1.0

    def sampler(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
        """For a `DataLoader` over a data set that indices do not suit; call its `set_epoch` each epoch.

        No example is drawn twice in an epoch. Shuffled, each rank draws the same number of examples: up to
        `world_size - 1` are left out, others in each epoch. In order (`shuffle=False`, for validation), each example is
        drawn by one rank, and the ranks' numbers may differ by one. `batches` has neither limit.

        Raises:
            ValueError: where the data set has fewer examples than there are ranks.
        """
        count = len(dataset)  # type: ignore[arg-type]
        require(count >= self.world_size, "dataset", count, f"at least {self.world_size} examples, one for each rank")
        drawn: DistributedSampler[Any] = DistributedSampler(
            dataset, self.world_size, self.rank, shuffle=shuffle, seed=seed, drop_last=shuffle
        )
        if not shuffle:  # torch's own repeats examples to give each rank as many
            drawn.total_size, drawn.num_samples = count, len(range(self.rank, count, self.world_size))
        return drawn

    def rescale(self, optimizer: Optimizer, rule: Rule = "auto", warmup_steps: int = 0) -> RescaledLR:
        """Has the learning rate follow the global batch, see `RescaledLR`; call it once per optimizer.

        Its state travels with the checkpoints by itself. `warmup_steps` is the paper's `rescale_warmup_epochs`, 1 or 2,
        times the steps of an epoch; without it there is no warm-up. `rule="paper"` is the paper's factor.
        """
        states = self._rescaled_states
        state = states[len(self._rescaled)] if len(self._rescaled) < len(states) else None
        rescaled = RescaledLR(optimizer, self.growth, rule, warmup_steps, state)
        self._rescaled.append(rescaled)
        return rescaled

    def measure(self, model: nn.Module, optimizer: Optimizer, batch_size: int | None = None) -> GradientNoise:
        """Has the results gain `gradient_noise_scale`, in examples, and `scaling_efficiency`; call it once.

        With these, `RASDAScheduler(grow="efficient")` has a trial grow while it pays. What was measured travels with
        the checkpoints by itself.

        Args:
            model: What `prepare` gave. The noise scale costs nothing to speak of on several ranks; on one, it is
                measured where that sums up micro-batches, see `GradientNoise.after_backward` of what is returned.
            optimizer: Whose steps are timed.
            batch_size: Examples of each step on this rank; None where they are those of `batches`.

        Raises:
            ValueError: where `batch_size` is below 1; from `report`, where it is None and `batches` is not used.
        """
        check_int("batch_size", batch_size, at_least=1, optional=True)
        self._noise = GradientNoise(model)
        self._noise.load(self._measured.get("noise", {}))
        if batch_size is not None:
            self._noise.expect(batch_size)
        self._times = StepTimes(optimizer, self.world_size, self.device, self._measured.get("times"))
        return self._noise

    def report(self, metrics: Mapping[str, Any], state: Saving = None, *, final: bool = False) -> None:
        """Ends an iteration; every rank calls it. It does not return where the trial is paused or stopped.

        The results gain `workers`, `global_batch_size` (with `batches`), `lr_multiplier` (with `rescale`), and what
        `measure` says. In `RaceConfig(train=...)`, a report is an epoch of the run.

        Args:
            metrics: Plain numbers; rank 0's count. In `tune`, the run's metric among them, and those are kept that
                are called "train_..." or "val_...".
            state: What to go on from: state dicts and plain values (it is loaded with `weights_only=True`), or a
                function that returns them. Saved by rank 0, only where the trial may pause and at its end. In `tune`,
                every report has one, with the full-size model's state dict as "model".
            final: Whether the training function ends the trial here by itself, so that the state is saved;
                `max_t` of a `RASDAScheduler` ends it in any case.
        """
        require(isinstance(metrics, Mapping), "metrics", metrics, "a mapping of names to numbers")
        check_flag("final", final)
        self.iteration += 1
        if self._noise is not None:
            if self._noise.unsized:
                raise ValueError("`batch_size` is None, but must be given to `measure` where `batches` is not used")
            self._noise.settle(self.device)
        if self.rank > 0:
            if self.gathers:
                self._attend(state, final)
            return
        results = self._with_history(metrics)
        if self.through is not None:
            results, state = self.through(self.iteration, results, state)
        self._deliver(results, state, final)

    def _attend(self, saving: Saving, final: bool) -> None:
        """On the other ranks, where what rank 0 saves is gathered from all."""
        raise NotImplementedError

    def _deliver(self, results: dict[str, Any], saving: Saving, final: bool) -> None:
        """Hand over what rank 0 reports."""
        raise NotImplementedError

    def _with_history(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        plain = {
            key: value.item() if isinstance(value, Tensor | np.generic) else value for key, value in metrics.items()
        }
        plain.setdefault("workers", self.world_size)
        if self._global_batch_size is not None:
            plain.setdefault(GLOBAL_BATCH, self._global_batch_size)
        if self._rescaled:
            plain.setdefault("lr_multiplier", self._rescaled[0].multiplier)
        if self._times is not None and self._noise is not None:
            self._times.settle(plain.get(GLOBAL_BATCH))
            self._measured = {"noise": self._noise.state(), "times": self._times.state()}
            if self._times.efficiency is not None:
                plain.setdefault(SCALING_EFFICIENCY, self._times.efficiency)
            if not math.isnan(self._noise.scale):
                plain.setdefault(NOISE_SCALE, self._noise.scale)
        return plain

    def saved(self, state: State | None) -> dict[str, Any]:
        """What to go on from: the training function's own state, and what the worker itself needs."""
        rescaled = [r.state_dict() for r in self._rescaled]
        return {"state": state, "iteration": self.iteration, "rescaled": rescaled, "measured": self._measured}
