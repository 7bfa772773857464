"""What a training function gets to work with on each rank of an elastic trial."""

from __future__ import annotations

import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset, DistributedSampler

from hydro_rasda.backends.ray.large_batch import RescaledLR, Rule
from hydro_rasda.backends.ray.measured import GLOBAL_BATCH, NOISE_SCALE, SCALING_EFFICIENCY
from hydro_rasda.backends.ray.step_times import StepTimes
from hydro_rasda.checks import check_flag, check_int, require
from hydro_rasda.data import MOST_EXAMPLES, Shard
from hydro_rasda.training.noise import GradientNoise

CHECKPOINT_FILE = "worker.pt"

# The iteration is reckoned in, and torch's seeds have 64 bits.
_LARGEST_SEED = 2**40

_ARRIVAL = timedelta(minutes=5)

State = Mapping[str, Any]


class Worker:
    """One rank of a trial.

    Attributes:
        config: The trial's configuration.
        data: What `elastic` was given as `data`; shared by the node's ranks.
        rank: From 0; rank 0 reports and saves.
        world_size: Ranks of the trial.
        growth: `world_size` over the workers of a new trial.
        device: Where to train: this rank's GPU, or the CPU.
        iteration: Reports so far, over all restarts; 0 at first.
        checkpoint: The state last saved; None at first.
        trial: The trial's id.
    """

    def __init__(self, job: Mapping[str, Any], data: Any, connection: Connection) -> None:
        self.config: dict[str, Any] = job["config"]
        self.data = data
        self.rank: int = job["rank"]
        self.world_size: int = job["world_size"]
        self.growth: float = job["world_size"] / job["workers"]
        self.trial: str = job["trial"]
        self.device = torch.device("cuda", 0) if job["gpus"] else torch.device("cpu")
        self._job = job
        self._connection = connection
        self._global_batch_size: int | None = None
        self._rescaled: list[RescaledLR] = []
        saved = _load(job["checkpoint"])
        self.iteration: int = saved["iteration"]
        self.checkpoint: State | None = saved["state"]
        self._rescaled_states: list[State] = list(saved["rescaled"])
        self._measured: dict[str, Any] = dict(saved["measured"])
        self._noise: GradientNoise | None = None
        self._times: StepTimes | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device, its gradients averaged over the ranks where there are several.

        Load `checkpoint` into the model before, and save the state of the model itself:
        `worker.plain(model)`.
        """
        require(isinstance(model, nn.Module), "model", model, "an nn.Module")
        model = model.to(self.device)
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device] if self.device.type == "cuda" else None)

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
            yield batch[part.rows], part.weight

    def sampler(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
        """For a `DataLoader` over a data set that indices do not suit; call its `set_epoch` each epoch."""
        return DistributedSampler(dataset, self.world_size, self.rank, shuffle=shuffle, seed=seed)

    def rescale(self, optimizer: Optimizer, rule: Rule = "auto", warmup_steps: int = 0) -> RescaledLR:
        """Has the learning rate follow the global batch, see `RescaledLR`; call it once per optimizer.

        Its state travels with the checkpoints by itself. `warmup_steps` is the paper's
        `rescale_warmup_epochs` times the steps of an epoch.
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

    def report(
        self, metrics: Mapping[str, Any], state: State | Callable[[], State] | None = None, *, final: bool = False
    ) -> None:
        """Ends an iteration; every rank calls it. It does not return where the trial is paused or stopped.

        The results gain `workers`, `global_batch_size` (with `batches`), `lr_multiplier` (with `rescale`), and what
        `measure` says.

        Args:
            metrics: Plain numbers; rank 0's count.
            state: What to go on from: state dicts and plain values (it is loaded with `weights_only=True`), or a
                function that returns them. Saved by rank 0, only where the trial may pause and at its end.
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
            return
        results = self._with_history(metrics)
        due = state is not None and (final or _due(self._job, self.iteration))
        folder = self._save(state() if callable(state) else state) if due else None
        self._connection.send(("report", (results, folder)))
        self._connection.recv()

    def _with_history(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value.item() if isinstance(value, Tensor) else value for key, value in metrics.items()}
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

    def _save(self, state: State | None) -> str:
        folder = tempfile.mkdtemp(prefix="hydro_rasda-")
        rescaled = [r.state_dict() for r in self._rescaled]
        saved = {"state": state, "iteration": self.iteration, "rescaled": rescaled, "measured": self._measured}
        torch.save(saved, os.path.join(folder, CHECKPOINT_FILE))
        return folder


def run_rank(payload: Any, job: Mapping[str, Any], connection: Connection) -> None:
    """Joins the trial's process group, runs the training function, and says that it is done."""
    train, data = payload
    torch.set_num_threads(job["threads"])
    connection.send(("hello", os.getpid()))
    if job["world_size"] > 1:
        _join(job, connection)
    train(Worker(job, data, connection))
    connection.send(("done", None))


def _join(job: Mapping[str, Any], connection: Connection) -> None:
    host, port = job["store"]
    rank, world_size = job["rank"], job["world_size"]
    # A rank that starts late is no dead one: the short limit holds once all are there.
    options: dict[str, Any] = {"timeout": _ARRIVAL, "wait_for_workers": False}
    if rank == 0 and (listener := _listener(host)) is not None:
        # It would listen on all interfaces: anyone who reaches the machine could write into it.
        port = listener.getsockname()[1]
        options["master_listen_fd"] = listener.detach()
    store = dist.TCPStore(host, port, is_master=rank == 0, **options)  # type: ignore[attr-defined]  # not exported
    if rank == 0:
        connection.send(("store", (host, store.port)))
    store.set(f"here{rank}", "")
    store.wait([f"here{other}" for other in range(world_size)], _ARRIVAL)
    backend = job["backend"] or ("nccl" if job["gpus"] else "gloo")
    timeout = timedelta(seconds=job["timeout_s"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _listener(host: str) -> socket.socket | None:
    """A socket that listens at this address alone; None where it is none of this machine's own, as behind a NAT."""
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError:
        return None


def _load(folder: str | None) -> dict[str, Any]:
    if folder is None:
        return {"state": None, "iteration": 0, "rescaled": [], "measured": {}}
    saved: dict[str, Any] = torch.load(os.path.join(folder, CHECKPOINT_FILE), weights_only=True, map_location="cpu")
    return saved


def _due(job: Mapping[str, Any], iteration: int) -> bool:
    """Whether a trial may pause at this iteration, ends with it, or is saved for safety."""
    every = job["checkpoint_every"]
    at = job["milestones"]
    decided = bool(at) and (iteration in at or iteration >= at[-1])
    return decided or (every is not None and iteration % every == 0)
