"""`tune()`: surrogates, fusion, transfer, full-size training."""

from __future__ import annotations

import copy
import itertools
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher
from torch import nn
from torch.nn import functional as F

from fusion.streams import preserved_generators
from surrogate import doubtful_hyperparameters

from .backends.local import LocalBackend, default_device
from .backends.ray_backend import RayBackend
from .config import BACKENDS, RESUME, Mode, RASDAConfig, TuneConfig, require
from .data import Data, make_batches
from .handover import hand_over
from .identity import content, data_digest, digest, parameters, unchanged
from .objective import LossFn, Objective, supervised
from .problem import Problem, dry_run
from .progress import Progress
from .result import TuneResult, make_result
from .run import Run
from .schedulers import first_milestone
from .search import RandomSearch, Search, SearcherSearch, prepare
from .space import check_space, derived, describe, longest_warmup, tuned
from .store import Store
from .sweep import sweep

_PRETRAINED = (
    "the model's initial weights are the same from every seed, as pretrained ones are: a surrogate of {:g} of its "
    "width would lose them, so the model itself is swept (`surrogate=1`). If it should start at random, have "
    "`model_fn` neither load weights nor seed itself"
)


def tune(
    model_fn: Callable[..., nn.Module],
    space: Mapping[str, Any],
    *,
    train_data: Data,
    val_data: Data,
    loss_fn: LossFn = F.cross_entropy,
    objective: Objective | None = None,
    metric: str = "val_loss",
    mode: Mode = "min",
    num_samples: int = 64,
    max_t: int = 27,
    grace_period: int = 1,
    reduction_factor: int = 3,
    top_k: int = 4,
    surrogate: float = 1 / 8,
    fusion: int | Literal["auto"] = "auto",
    check_transfer: bool = False,
    rasda: RASDAConfig | None = None,
    keep: Literal["last", "best"] = "last",
    searcher: Searcher | None = None,
    backend: Literal["local", "ray"] = "local",
    address: str | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    scheduler: str | TrialScheduler = "rasda",
    storage_path: str | Path = "runs",
    name: str | None = None,
    resume: Literal["auto", "must", "never", "changed"] = "auto",
    checkpoint_every: int | None = None,
    time_budget_s: float | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TuneResult:
    """Find good hyperparameters for a model, and train the full-size model with them.

    Many configurations are tried on narrow surrogates of the model (muP: Yang et al. 2022; Hydro: Hu et al. 2023),
    fused into few models and halved at each rung. The `top_k` best train at full size, halved at RASDA's milestones
    (Aach et al. 2024, Sec. 3) by where their surrogates' curves let expect them to end, the winner for `max_t` epochs.

    Args:
        model_fn: `model_fn(config, width_ratio)` builds the model at that fraction of its full width;
            `model_fn(config)` builds it at full width, and `surrogate.shrink` makes it narrower.
        space: Maps hyperparameters to Ray Tune domains (see `hydro_rasda.space`). The library reads `lr` (required),
            `optimizer` (sgd, adam, adamw), `momentum`, `nesterov`, `dampening`, `weight_decay`,
            `independent_weight_decay`, `beta1`, `beta2`, `eps`, `batch_size`, `grad_clip`, `schedule` (constant,
            cosine, step, exponential) with `gamma`, `step_size` and `warmup_epochs`, and on Ray
            `rescale_warmup_epochs`; `fusion.keys` says what each may be. All keys reach `model_fn`.
        train_data: Tensors `(inputs, target)`, a map-style Dataset, or a function `make_loader(batch_size)`. Data that
            cannot be pickled, as they hold an open file, are read by this process alone.
        val_data: Likewise; trials are compared on it.
        loss_fn: Mean loss of `(output, target)`; with it, batches are `(inputs, target)`.
        objective: In its place, `objective(model, batch) -> {"loss": ..., ...}` for one model and any batch.
        metric: What trials are compared by: "val_" or "train_" and a key of the objective's dict.
        mode: "min" or "max".
        num_samples: Configurations to try (for each point of a `grid_search`). The same call with more goes on with a
            run: the first are the same, and rungs are decided anew over all.
        max_t: Epochs of a full training.
        grace_period: Epochs of the sweep's first rung; rungs before the space's longest warm-up is over are left out.
        reduction_factor: One in this many goes on from each rung of the sweep; rungs lie at
            `grace_period * reduction_factor**k` epochs.
        top_k: Configurations that move to the full-size model.
        surrogate: Width of the surrogates over that of the model, in (0, 1]; 1 sweeps the model itself, and full-size
            training goes on from there.
        fusion: Most trials in one fused model; "auto" measures what is fastest, once on a machine (the measurements are
            kept below HYDRO_RASDA_CACHE, or the user's cache folder). Random numbers do not depend on it; the last
            digits do, since groups of another width add up in another order.
        check_transfer: Whether to train 6 configurations at full size to the sweep's first milestone, and compare their
            ranking with the surrogates' (`TuneResult.transfer`).
        rasda: How the full-size trials are halved; None: as `RASDAConfig()` says.
        keep: Of each full-size training, the weights that count: "last", after its last epoch, or "best", after the one
            with the best metric, where overfitting is stopped in time. The winner has trained to the end in both cases.
        searcher: One of Ray Tune's searchers, such as `OptunaSearch(seed=0)`; None samples at random.
        backend: "local": everything on this machine; on a CPU (Linux), in as many processes forked of this one as torch
            has threads; what `model_fn` and `objective` change there is not seen here. `torch.set_num_threads(1)` keeps
            all in this one. "ray": groups of surrogates on all devices of a Ray cluster, then full-size trials under
            DDP, on `rasda.workers` of them and more at each milestone.
        address: Of a running Ray cluster; None starts Ray on this machine and stops it again.
        resources_per_worker: What Ray gives a worker, which is also a device of the sweep: {"CPU": 4, "GPU": 1}; None:
            a GPU where the cluster has any, else all CPUs of a node.
        scheduler: Of the full-size trials on Ray: "rasda"; "asha", "hyperband", "median" or "pbt"; or one of Ray Tune's
            schedulers. All but RASDA train on `rasda.workers` throughout.
        storage_path: Folder of runs.
        name: Folder of this run below it; None makes one from the time.
        resume: What to do where there is a run of this name. "auto" goes on with it, if it is this one: of the same
            settings, code and data (backend, device and limits on the cost may differ, and `num_samples` may grow);
            "changed" goes on also where code or data are others now, and what was trained counts; "never" refuses;
            "must" refuses to start anew.
        checkpoint_every: Epochs between full-size checkpoints; None checkpoints at milestones only.
        time_budget_s: Seconds after which no new work starts; at most half of it goes to the sweep. The same call with
            more goes on where it ended: first with the sweep, then at full size.
        device: Where to train locally; None takes the GPU where there is one.
        seed: Determines configurations, initial weights, shuffles and dropout.
        progress: Whether to print.

    Returns:
        The best configuration, its trained model, and every trial's record.

    Raises:
        ValueError, TypeError: for bad input, before any training; each names the argument, its value and the rule.
        RunExists: where `name` is taken by another run, saying how it differs; nothing of it is changed.
        AllTrialsFailed: where no trial has a finite metric.
        KeyboardInterrupt: on Ctrl-C; the same call goes on from the last finished unit of work.
    """
    settings = TuneConfig(
        metric=metric,
        mode=mode,
        num_samples=num_samples,
        max_t=max_t,
        grace_period=grace_period,
        reduction_factor=reduction_factor,
        top_k=top_k,
        surrogate=surrogate,
        fusion=fusion,
        check_transfer=check_transfer,
        rasda=rasda or RASDAConfig(),
        keep=keep,
        checkpoint_every=checkpoint_every,
        time_budget_s=time_budget_s,
        seed=seed,
    )
    _check_backend(backend, address, resources_per_worker, scheduler, device)
    require(resume in RESUME, "resume", resume, f"one of {RESUME}")
    require(name is None or (name not in ("", ".", "..") and Path(name).name == name), "name", name, "a folder's name")
    check_space(space)
    code = {"model_fn": model_fn, "loss_fn" if objective is None else "objective": objective or loss_fn}
    made = {"space": content(space), "searcher": parameters(searcher), "scheduler": parameters(scheduler)}
    if searcher is not None:
        # It is told the space, and learns: the caller's own stays as it is, to begin the same run or another with.
        searcher = copy.deepcopy(searcher)
        prepare(searcher, space, metric, mode)
    with preserved_generators():
        where = default_device() if device is None and backend == "local" else torch.device(device or "cpu")
        problem = _problem(model_fn, settings, train_data, val_data, loss_fn, objective, where)
        candidates = RandomSearch(space, num_samples, seed)
        before = {name: content(function) for name, function in code.items()}
        checked = dry_run(problem, candidates.trials)
        if checked.pretrained:
            warnings.warn(_PRETRAINED.format(surrogate), stacklevel=2)
            settings = replace(settings, surrogate=1)
        _warn_of_doubtful(space, settings.surrogate)
        problem = replace(
            problem, example_input=checked.example_input, width_ratio=settings.surrogate, copied=checked.shared
        )
        warmup = longest_warmup(space, (trial.config for trial in candidates.trials))
        _warn_of_endless(warmup, max_t)
        # What a call of the functions changes, such as a counter, is not what they are.
        made |= {name: unchanged(before[name], content(function)) for name, function in code.items()}
        batch_size = candidates.trials[0].batch_size
        asked = settings.determining() | {
            "space": describe(space),
            "searcher": type(searcher).__name__ if searcher else None,
            "scheduler": scheduler if isinstance(scheduler, str) else type(scheduler).__name__,
            "train_data": problem.train_data.describe(),
            "val_data": problem.val_data.describe(),
            "model": checked.parameters,
            "python": platform.python_version(),
            "digests": {name: digest(of) for name, of in made.items()}
            | {"train_data": data_digest(train_data, batch_size), "val_data": data_digest(val_data, batch_size)},
        }
        folder = Path(storage_path).expanduser().absolute()
        path = folder / (name or _free_name(folder))
        with Store.open(path, asked, resume) as store, Progress(silent=not progress) as shown:
            run = Run(problem, _without_rungs_before(warmup, settings), store, shown, derived=derived(space))
            if (now := run.settings).grace_period > grace_period or now.full_grace_period > settings.full_grace_period:
                rungs = f"at epoch {now.grace_period} of the sweep and {now.full_grace_period} at full size"
                shown.say(f"warm-ups last up to {warmup:g} epochs: the first rungs are {rungs}")
            if checked.pretrained:
                shown.say(_PRETRAINED.format(surrogate))
            search: Search = SearcherSearch(searcher, space, run) if searcher else candidates
            for change in store.changes:
                shown.say(f"going on all the same: {change}")
            if store.recorded:
                shown.say(f"going on with the run in {path}: {store.recorded} units of work are done")
            devices = (
                LocalBackend(run)
                if backend == "local"
                else RayBackend(run, address, resources_per_worker, scheduler, space)
            )
            try:
                with devices:
                    finalists = sweep(run, search, devices)
                    hand_over(run, finalists)
                    tried = devices.train_targets(finalists)
            except KeyboardInterrupt as interrupt:
                told = f"storage_path={str(folder)!r}, name={path.name!r}"
                interrupt.args = (f"the same call with {told} goes on from the last finished unit of work",)
                raise
            result = make_result(run, tried)
            shown.console.print(result)
    return result


def _check_backend(
    backend: str,
    address: str | None,
    resources_per_worker: Mapping[str, float] | None,
    scheduler: str | TrialScheduler,
    device: str | torch.device | None,
) -> None:
    require(backend in BACKENDS, "backend", backend, f"one of {BACKENDS}")
    if backend == "ray":
        require(device is None, "device", device, "None on Ray, where `resources_per_worker` says it")
        return
    needs_ray = "left out, unless `backend` is 'ray'"
    require(address is None, "address", address, needs_ray)
    require(resources_per_worker is None, "resources_per_worker", resources_per_worker, needs_ray)
    require(scheduler == "rasda", "scheduler", scheduler, needs_ray)


def _warn_of_doubtful(space: Mapping[str, Any], ratio: float) -> None:
    doubtful = doubtful_hyperparameters(tuned(space), ratio)
    if doubtful:
        warnings.warn(
            f"what is best for {', '.join(doubtful)} may not transfer: it regularizes, and a model of {ratio:g} of the "
            "width overfits less; a wider surrogate (`surrogate=1/4`) or `check_transfer=True` makes sure",
            stacklevel=3,
        )


def _warn_of_endless(warmup: float, max_t: int) -> None:
    if warmup >= max_t:
        warnings.warn(
            f"`warmup_epochs` is up to {warmup:g}, and `max_t` is {max_t}: no trial is halved before the end, as no "
            "rung lies before a warm-up is over; shorten the warm-ups",
            stacklevel=3,
        )


def _without_rungs_before(warmup: float, settings: TuneConfig) -> TuneConfig:
    """The settings with the rungs of both stages left out that come before a warm-up of so many epochs is over."""
    rasda, most = settings.rasda, settings.max_t
    grace = first_milestone(settings.grace_period, most, settings.reduction_factor, warmup)
    full = first_milestone(settings.full_grace_period, most, rasda.scaling_factor, warmup)
    return replace(settings, grace_period=grace, rasda=replace(rasda, grace_period=full))


def _free_name(storage_path: Path) -> str:
    """The time, and a number where another run began in the same second."""
    stamp = time.strftime("tune-%Y%m%d-%H%M%S")
    names = (stamp if n == 1 else f"{stamp}-{n}" for n in itertools.count(1))
    return next(name for name in names if not (storage_path / name).exists())


def _problem(
    model_fn: Callable[..., nn.Module],
    settings: TuneConfig,
    train_data: Data,
    val_data: Data,
    loss_fn: LossFn,
    objective: Objective | None,
    where: torch.device,
) -> Problem:
    if not callable(model_fn):
        raise TypeError(f"`model_fn` is {model_fn!r}, but must be a function of (config) or (config, width_ratio)")
    if objective is not None and loss_fn is not F.cross_entropy:
        raise ValueError("`loss_fn` and `objective` are both given, but one says all: leave one out")
    return Problem(
        model_fn=model_fn,
        objective=objective or supervised(loss_fn),
        train_data=make_batches(train_data, "train_data", where, settings.seed),
        val_data=make_batches(val_data, "val_data", where, settings.seed),
        width_ratio=settings.surrogate,
        metric=settings.metric,
        mode=settings.mode,
        max_t=settings.max_t,
        seed=settings.seed,
        device=where,
        keep=settings.keep,
    )
