"""The worker: the argument of a training function, on each rank of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, DistributedSampler

from hydro_rasda.common.argument_checks import check_flag, check_int, require
from hydro_rasda.data import MOST_EXAMPLES, Shard
from hydro_rasda.settings.config import GLOBAL_BATCH, NOISE_SCALE, SCALING_EFFICIENCY
from hydro_rasda.training.distributed import average_statistics
from hydro_rasda.training.gradient_noise import GradientNoise
from hydro_rasda.training.lr_rescaling import RescaledLR, Rule
from hydro_rasda.training.width_scaled_rates import WidthScaledRates
from hydro_rasda.training.worker_reports import StepTimes

# `batches` multiplies the seed and adds the iteration; the result must fit the 64 bits of torch's seeds.
_LARGEST_SEED = 2**40

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

State = Mapping[str, Any]

Saving = State | Callable[[], State] | None
"""The state from which training continues, or a function that returns it."""


class Worker:
    """One rank of a trial.

    Attributes:
        data: The argument `data` of `elastic`, shared by the node's ranks. In `tune`, the arguments `(train_data,
            val_data)`, as they were given.
        rank: This rank's number, from 0. Rank 0 reports and saves.
        world_size: Number of ranks of the trial.
        growth: `world_size` divided by the number of workers with which trials start.
        device: The device to train on: this rank's GPU, or the CPU.
        iteration: Number of reports so far, over all restarts; 0 at first.
        width_ratio: Width of `model()` as a ratio of the full width: below 1 in the sweep of `tune`.
        checkpoint: The last saved state; None before the first save.
        trial: The trial's id.

    Args:
        job: A mapping with `config`, `trial`, `rank`, `world_size`, and `workers` (the number of workers with which
            trials start).
        saved: An earlier result of the method `saved`; None at first.
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
        """Function that turns a report into the metrics and the state that `tune` keeps; None outside `tune`."""
        self.gathers = False
        """True if all ranks together must call the function that returns the state; False if only rank 0 calls it."""
        self._times: StepTimes | None = None
        self.width_ratio = 1.0
        self.scaled = WidthScaledRates()
        """The surrogates that the worker has built, and their learning rates."""

    def __getitem__(self, key: object) -> NoReturn:
        # A user may take the worker for the configuration, which Ray Tune passes to its training functions.
        raise TypeError(f"the training function is given a Worker, no configuration: take worker.config[{key!r}]")

    @property
    def max_t(self) -> int:
        """The argument `max_t` of `tune`: the number of epochs of a full training."""
        raise RuntimeError("`worker.max_t` is that of `tune(max_t=...)`: `elastic` knows none")

    def model(self) -> nn.Module:
        """Build the trial's model by `model_fn` at the width `width_ratio`, and `prepare` it.

        A narrow model is a surrogate (muP: `surrogate.make_surrogate`). Its parameters have the same names as those of
        the full-size model, and its optimizer needs other learning rates; see `optimizer`. Initial weights are drawn
        from the trial's own seed.
        """
        raise RuntimeError("`worker.model()` builds the model of `tune(model_fn, ...)`: in `elastic`, build your own")

    def optimizer(self, parameters: Any, kind: type[OptimizerT], **settings: Any) -> OptimizerT:
        """Make an optimizer with muP's learning rates for the model's width; full-width models keep their rates.

        Args:
            parameters: A model that `model` returned, a part of it, or parameters or groups as torch's optimizers
                accept them. Parameters of other modules keep their learning rate.
            kind: The optimizer's class: a class of torch that has a name in `fusion.keys`, a class derived from it, or
                another class of the same name.
            settings: The other arguments of the class, such as `lr`.

        Raises:
            ValueError: If no rule is known that scales the learning rates of this class with the width.

        >>> optimizer = worker.optimizer(model, torch.optim.AdamW, lr=worker.config["lr"])  # doctest: +SKIP
        """
        return kind(self.param_groups(parameters, kind, **settings), **settings)

    def param_groups(self, parameters: Any, kind: type[Optimizer], **settings: Any) -> Any:
        """Return the parameter groups that `optimizer` uses, for an optimizer that you make yourself.

        The arguments are those of `optimizer`. Each group has "params" and, if muP changes them, "lr" and
        "weight_decay". Learning rate times weight decay is the same at every width.
        """
        return self.scaled.groups(parameters, kind, settings)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to this rank's device; if there are several ranks, wrap it in DDP to average gradients.

        Load `checkpoint` after this call: an optimizer keeps a loaded state on the device on which the parameters are.
        Save the state of `worker.plain(model)`. BatchNorm normalizes by each rank's own batch. After each step, its
        running statistics are averaged over the ranks. To normalize by the global batch, first convert the model to
        `nn.SyncBatchNorm` (GPUs only).
        """
        require(isinstance(model, nn.Module), "model", model, "an nn.Module")
        model = model.to(self.device)
        if self.world_size == 1:
            return model
        joint = DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)
        average_statistics(joint, lambda: self._weight)
        return joint

    def plain(self, model: nn.Module) -> nn.Module:
        """Return the user's own module, without the wrapper that `prepare` may have added."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def batches(
        self, samples: int, batch_size: int, *, seed: int = 0, fixed_global: bool = False
    ) -> Iterator[tuple[Tensor, float]]:
        """Yield this rank's share of one shuffled epoch; each sample is in one batch of one rank.

        All ranks see the same number of batches. Multiply a batch's mean loss by its weight. Then the averaged gradient
        is that of the whole global batch, even if the last batch does not divide evenly.

        Args:
            samples: Size of the data set.
            batch_size: Samples per rank and step; with `fixed_global`, samples per step over all ranks.
            seed: Seed of the run. The order of samples differs by iteration, but does not depend on the number of
                ranks.
            fixed_global: True to keep the global batch when the number of workers grows; False to keep the batch of
                each rank.

        Yields:
            Indices `[n]` and the weight `n * world_size / (samples in the global batch)`. A rank without samples left
            gets one or two samples with weight 0.

        Raises:
            ValueError: If `samples` or `batch_size` is below 1.
        """
        check_int("samples", samples, at_least=1, at_most=MOST_EXAMPLES)
        check_int("batch_size", batch_size, at_least=1, at_most=MOST_EXAMPLES)
        check_int("seed", seed, at_least=0, at_most=_LARGEST_SEED)
        check_flag("fixed_global", fixed_global)
        shard = Shard(self.rank, self.world_size)
        size = batch_size if fixed_global else batch_size * self.world_size
        self._global_batch_size = size
        generator = torch.Generator().manual_seed(seed * 1_000_003 + self.iteration)
        least = 2 if size >= 2 * self.world_size else 1  # BatchNorm refuses the single examples of a small last batch
        for batch in torch.randperm(samples, generator=generator).split(size):
            part = shard.part(len(batch), least)
            if self._noise is not None:
                self._noise.expect(len(batch[part.rows]), part.weight)
            self._weight = part.weight
            try:
                yield batch[part.rows], part.weight
            finally:
                self._weight = 1.0

    def sampler(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
        """Make a sampler for a `DataLoader`, if the indices of `batches` do not suit the data set.

        Call the sampler's `set_epoch` in each epoch. No example is drawn twice in an epoch. With `shuffle`, each rank
        draws the same number of examples, and up to `world_size - 1` examples are left out, other ones in each epoch.
        Without `shuffle` (for validation), every example is drawn by one rank, and the numbers of examples per rank may
        differ by one. `batches` leaves out no examples, and gives all ranks the same number of batches.

        Raises:
            ValueError: If the data set has fewer examples than there are ranks.
        """
        count = len(dataset)  # type: ignore[arg-type]
        require(count >= self.world_size, "dataset", count, f"at least {self.world_size} examples, one for each rank")
        drawn: DistributedSampler[Any] = DistributedSampler(
            dataset, self.world_size, self.rank, shuffle=shuffle, seed=seed, drop_last=shuffle
        )
        if not shuffle:  # torch's sampler would repeat examples to give each rank the same number
            drawn.total_size, drawn.num_samples = count, len(range(self.rank, count, self.world_size))
        return drawn

    def rescale(self, optimizer: Optimizer, rule: Rule = "auto", warmup_steps: int = 0) -> RescaledLR:
        """Scale the learning rate with the global batch, see `RescaledLR`; call it once per optimizer.

        Checkpoints carry the state automatically. By default, there is no warm-up. In the paper, `warmup_steps` is
        `rescale_warmup_epochs` (1 or 2) times the steps of an epoch, and the factor is that of `rule="paper"`.
        """
        states = self._rescaled_states
        state = states[len(self._rescaled)] if len(self._rescaled) < len(states) else None
        rescaled = RescaledLR(optimizer, self.growth, rule, warmup_steps, state)
        self._rescaled.append(rescaled)
        return rescaled

    def measure(self, model: nn.Module, optimizer: Optimizer, batch_size: int | None = None) -> GradientNoise:
        """Measure `gradient_noise_scale` (in examples) and `scaling_efficiency`, and add them to reports; call it once.

        With these, `RASDAScheduler(grow="efficient")` lets a trial grow as long as more workers pay. Checkpoints carry
        the measurements automatically.

        Args:
            model: The result of `prepare`. On several ranks, the noise scale costs almost nothing. On one rank, it is
                measured only if the rank sums up micro-batches: see `after_backward` of the returned `GradientNoise`.
            optimizer: The optimizer whose steps are timed.
            batch_size: Examples of each step on this rank; None if they come from `batches`.

        Raises:
            ValueError: If `batch_size` is below 1. `report` raises it if `batch_size` is None and `batches` is not
                used.
        """
        check_int("batch_size", batch_size, at_least=1, optional=True)
        self._noise = GradientNoise(model)
        self._noise.load(self._measured.get("noise", {}))
        if batch_size is not None:
            self._noise.expect(batch_size)
        self._times = StepTimes(optimizer, self.world_size, self.device, self._measured.get("times"))
        return self._noise

    def report(self, metrics: Mapping[str, Any], state: Saving = None, *, final: bool = False) -> None:
        """End an iteration; every rank calls it. If the trial is paused or stopped, the call does not return.

        The worker adds `workers`, `global_batch_size` (with `batches`), `lr_multiplier` (with `rescale`), and the
        measurements of `measure` to the results. In `tune(train=...)`, a report is an epoch of the run.

        Args:
            metrics: Plain numbers; those of rank 0 count. In `tune`, the run's metric must be among them. Metrics with
                names "train_..." or "val_..." are kept, too.
            state: The state from which training can continue: a mapping of state dicts and plain values (it is loaded
                with `weights_only=True`), or a function that returns it. Rank 0 saves it only when the trial may pause,
                and at its end. In `tune`, every report needs a state, with the model's state dict as "model".
            final: True if the training function itself ends the trial here, so that the state is saved. It is not
                needed at the `max_t` of a `RASDAScheduler`, which ends the trial in any case.
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
        """Take part in gathering the state that rank 0 saves; called on the other ranks if `gathers` is true."""
        raise NotImplementedError

    def _deliver(self, results: dict[str, Any], saving: Saving, final: bool) -> None:
        """Hand over a report of rank 0 to the backend."""
        raise NotImplementedError

    def _with_history(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = tree_map(_plain, dict(metrics))
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
        """Return the state to save: the training function's own state, and the worker's."""
        rescaled = [r.state_dict() for r in self._rescaled]
        return {"state": state, "iteration": self.iteration, "rescaled": rescaled, "measured": self._measured}


def _plain(value: Any) -> Any:
    """Convert a tensor or NumPy value to Python numbers, because another process could not open a tensor's memory."""
    if isinstance(value, Tensor | np.generic | np.ndarray):
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    return value
