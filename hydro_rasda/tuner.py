"""`tune()`: surrogates, fusion, transfer, full-size training."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.streams import preserved_generators
from hydro_rasda.backends.local import LocalBackend
from hydro_rasda.checks import (
    check_choice,
    check_flag,
    check_folder,
    check_function,
    check_name,
    refuse_gone,
    require,
)
from hydro_rasda.config import BACKENDS, RESUME, Mode, RASDAConfig, TuneConfig
from hydro_rasda.contracts import Backend, SweepRule
from hydro_rasda.data import Data, make_batches
from hydro_rasda.hidden import hide, secrets_of
from hydro_rasda.objective import LossFn, Objective, as_objective, takes_config
from hydro_rasda.precision import in_precision
from hydro_rasda.problem import OwnLoop, Problem, check_width_argument
from hydro_rasda.run.callbacks import Callbacks, Listener, check_callbacks
from hydro_rasda.run.events import RunBegan, RunEnded
from hydro_rasda.run.files import make_private
from hydro_rasda.run.identity import Identity
from hydro_rasda.run.overfitting import overfitting_line
from hydro_rasda.run.portable import pickle_config_modules
from hydro_rasda.run.result import TuneResult, make_result
from hydro_rasda.run.state import Run
from hydro_rasda.run.store import Store
from hydro_rasda.search import RandomSearch, Search, SearcherSearch, check_first, check_searcher, prepare
from hydro_rasda.space import check_space
from hydro_rasda.stages.handover import hand_over
from hydro_rasda.stages.race import train_targets
from hydro_rasda.stages.ready import Ready, get_ready
from hydro_rasda.stages.sweep import sweep
from hydro_rasda.training.worker import Worker
from hydro_rasda.whole_metrics import WholeMetrics

if TYPE_CHECKING:
    from ray.tune.search import Searcher

    from hydro_rasda.run.progress import Progress


def tune(
    model_fn: Callable[..., nn.Module],
    space: Mapping[str, Any],
    *,
    train_data: Data,
    val_data: Data,
    loss_fn: LossFn = F.cross_entropy,
    objective: Callable[..., Mapping[str, Tensor]] | None = None,
    metrics: WholeMetrics | None = None,
    metric: str = "val_loss",
    mode: Mode = "min",
    num_samples: int = 64,
    first: Sequence[Mapping[str, Any]] = (),
    max_t: int = 27,
    grace_period: int = 1,
    reduction_factor: int = 3,
    top_k: int = 4,
    full_trainings: float = 3.0,
    surrogate: float = 1 / 8,
    fusion: int | Literal["auto"] = "auto",
    check_transfer: bool = False,
    full_size: Callable[[Worker], None] | None = None,
    rasda: RASDAConfig | None = None,
    keep: Literal["last", "best"] = "best",
    patience: int | None = None,
    stop_at: float | None = None,
    ema: float = 0.03,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32",
    graph: bool | Literal["auto"] = "auto",
    searcher: Searcher | None = None,
    sweep_rule: SweepRule | None = None,
    backend: Literal["local", "ray"] | Backend = "local",
    address: str | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    storage_path: str | Path = "runs",
    name: str | None = None,
    resume: Literal["auto", "must", "never", "changed"] = "auto",
    checkpoint_every: int | None = None,
    loader_workers: int | None = None,
    time_budget_s: float | None = None,
    device: str | torch.device | None = None,
    seed: int = 0,
    progress: bool = True,
    callbacks: Sequence[Listener] = (),
    **gone: Never,
) -> TuneResult:
    """Find good hyperparameters for a model, and train the full-size model with them.

    Many configurations are tried on narrow surrogates of the model (muP: Yang et al. 2022; Hydro: Hu et al. 2023),
    fused into few models and halved at each rung. The `top_k` best train at full size. At RASDA's milestones (Aach et
    al. 2024, Sec. 3), the first of them at half of a training, the best go on: as many as `full_trainings` is enough
    for, or half of them. The winner is the best of those that trained for `max_t` epochs (see `schedulers.race`).

    Args:
        model_fn: `model_fn(config, width_ratio)` builds the model at that fraction of its full width;
            `model_fn(config)` builds it at full width, and `surrogate.shrink` makes it narrower.
        space: Maps hyperparameters to domains, of `hydro_rasda` or Ray Tune. The library reads `lr` (required),
            `optimizer` (sgd, adam, adamw; adadelta, adagrad, adamax, asgd, nadam, radam, rmsprop; or a function of
            parameter groups and lr that makes one), `momentum`, `nesterov`, `dampening`, `weight_decay`,
            `independent_weight_decay`, `beta1`, `beta2`, `alpha`, `rho`, `eps`, `batch_size`, `accumulate` (parts that
            a batch is learnt from one after another, for less memory), `grad_clip`, `schedule` (constant, cosine, step,
            exponential, linear, one_cycle, or a function of step and steps; see `fusion.lr_factor`) with `gamma`,
            `step_size` and `warmup_epochs`, and on Ray `rescale_warmup_epochs`; `fusion.keys` says what each may be.
            `lr.PREFIX` is the learning rate of a part of the model. All keys reach `model_fn`.
        train_data: Tensors `(inputs, target)`, a map-style Dataset, or a function `make_loader(batch_size)`. A batch of
            tensors is a tuple of as many, be it one. Data that cannot be pickled, as they hold an open file, are read
            by this process alone. Before anything trains, they are read once, for at most 5 seconds. A loader without
            an end needs a length, after which an epoch is over.
        val_data: Likewise; trials are compared on it.
        loss_fn: Mean loss of `(output, target)`; with it, batches are `(inputs, target)`. With a third argument
            `config`, it is told the configuration, but for what the library reads itself. In a fused group, a float
            there may be a tensor without dimensions, since each trial has its own; trials that differ in anything
            else (an integer, a word) train in different groups.
        objective: In its place, `objective(model, batch) -> {"loss": ..., ...}` for one model and any batch; or
            `objective(model, batch, config)`, likewise. A scalar "weight" in the dict is what its means count by, over
            batches, parts and workers, in place of examples: the number of targets that count, or their weights' sum.
            Of a mean of torch's cross-entropy, in `loss_fn` too, it is known without.
        metrics: `metrics(outputs, targets) -> {"auc": ..., ...}`, of the whole validation set at once: what the model
            returned and the targets, [N, ...] each, on the CPU, after each epoch and for each trial by itself; any
            numbers, by any library. An `objective` returns the two as "outputs" and "targets", examples first, besides.
        metric: What trials are compared by: "val_" or "train_" and a key of the objective's dict; or "val_" and one of
            what `metrics` returns.
        mode: "min" or "max".
        num_samples: Configurations to try (for each point of a `grid_search`). The same call with more goes on with a
            run: the first are the same, and rungs are decided anew over all.
        first: Configurations that are known to be good, tried before others are sampled; what one leaves out is sampled
            for it. They count as samples.
        max_t: Epochs of a full training.
        grace_period: Epochs of the sweep's first rung; rungs before the space's longest warm-up is over are left out.
        reduction_factor: One in this many goes on from each rung of the sweep; rungs lie at
            `grace_period * reduction_factor**k` epochs, the last one at `max_t / reduction_factor` at most, unless it
            is the first: from there on, full-size models tell more for their price than surrogates do.
        top_k: Configurations that move to the full-size model.
        full_trainings: What the full-size stage may take, in trainings of `max_t` epochs: at each milestone, as many
            finalists go on as can train to the end for it, and at least half of them. While no finalist is better than
            a constant prediction, none is stopped.
        surrogate: Width of the surrogates over that of the model, in (0, 1]; 1 sweeps the model itself, and full-size
            training goes on from there.
        fusion: Most trials in one fused model; "auto" measures what is fastest, once on a machine (the measurements are
            kept below HYDRO_RASDA_CACHE, or the user's cache folder). Random numbers do not depend on it; the last
            digits do, since groups of another width add up in another order.
        check_transfer: Whether to train 6 configurations at full size to the sweep's first milestone, and compare their
            ranking with the surrogates' (`TuneResult.transfer`).
        full_size: `full_size(worker)` trains the full-size models in the library's place, from `worker.config` and
            `worker.data`, which is `(train_data, val_data)`, to its last epoch: see `Worker`. Each `worker.report(
            metrics, state)` is an epoch, with `metric` among its metrics and the state dict of `model_fn`'s model as
            `state["model"]`. At milestones it does not return: the function is called again, and goes on from
            `worker.checkpoint`, the state that was reported there, and `worker.iteration`. Where it returns before
            `max_t`, the trial is over, and its best epoch counts. It begins anew also where `surrogate` is 1;
            `ema` and `precision` are its own matter. On Ray it runs on every rank, as for `elastic`.
        rasda: How the full-size trials are halved; None: as `RASDAConfig()` says.
        keep: Which weights a full-size training hands back: "best", those after the last epoch that is as good as the
            best one, but for 1 % of what training has gained; or "last". Under either, trials are compared by their
            last epochs, with the weights that training left there: the winner's configuration then holds when you
            train it again, longer, elsewhere or on more data. Two exceptions: with `patience` the best epochs are
            compared; and where no trial came to its end, as time ran out or all diverged, or `stop_at` was reached,
            the best that was kept wins.
        patience: Epochs after which a full-size training that has not become better ends; None trains on. The sweep,
            where rungs decide, has none; a `full_size` function returns where it will.
        stop_at: A score of `metric` that is good enough: once a full-size model has it, nothing more trains. The same
            call with a better one, or None, goes on.
        ema: Share of a full training's steps over which the full-size models' weights and running statistics are
            averaged, exponentially, beside training. With `keep="best"`, the averaged weights are validated and kept,
            at the cost of another copy of them. At milestones the others are validated, too, as
            `METRIC_unaveraged`, by which trials are compared. With `keep="last"`, or 0, nothing is averaged.
        precision: What models compute in, in the sweep and at full size. "bf16": matrix products and convolutions in
            bfloat16 (`torch.autocast`), on a CPU, too; "fp16": those in float16, each trial with a loss scale of its
            own, which grows and shrinks as in `torch.amp.GradScaler`: where gradients overflow, that trial alone leaves
            the step out; "tf32": those in TF32, on CUDA; "fp32" leaves torch as you have set it. Weights, gradients,
            optimizer state and metrics stay in float32.
        graph: Whether training steps are recorded as CUDA graphs and replayed, one launch for each batch (see
            `fusion.GraphedStep`): of fused groups, and of full-size models that train on one worker. "auto": on CUDA;
            True: likewise, and refused where there is no GPU; False: never. Where a step cannot be recorded, a
            `fusion.GraphWarning` names the line, and it runs as it is written. On a CPU, "auto" has the steps of a
            fused group compiled where the group trains for minutes to its next milestone, and where that was measured
            to win twice the time that it takes. Results are the same up to rounding, and a run may go on under another
            value.
        searcher: One of Ray Tune's searchers, such as `OptunaSearch(seed=0)`; None samples at random.
        sweep_rule: Decides who goes on in the sweep: an object of your own subclass of `SweepRule`. None is successive
            halving by `grace_period` and `reduction_factor`, which other rules do not look at.
        backend: "local": everything on this machine; on a CPU (Linux), in as many processes forked of this one as torch
            has threads, on several GPUs in a process each (`rasda.workers` of them train a full-size model under DDP);
            what `model_fn` and `objective` change there is not seen here. HYDRO_RASDA_ONE_PROCESS=1 in the environment
            keeps a CPU's work in this one; so does one `device` of several GPUs. "ray": the same on all devices of a
            Ray cluster, where full-size trials train under DDP, on `rasda.workers` devices and more at each milestone.
            Or an object, such as a `LocalBackend` or a `RayBackend`: then `device`, `address` and
            `resources_per_worker` are its own. The same rules decide on each. On several devices, of whichever backend,
            who goes on in the sweep can depend on the order in which trials come in.
        address: Of a running Ray cluster; None starts Ray on this machine and stops it again.
        resources_per_worker: What Ray gives a worker, which is also a device of the sweep: {"CPU": 4, "GPU": 1}; None:
            a GPU where the cluster has any, else all CPUs of a node. More: see `RayBackend`.
        storage_path: Folder of runs.
        name: Folder of this run below it; None makes one from the time.
        resume: What to do where there is a run of this name. "auto" goes on with it, if it is this one: of the same
            settings, code and data (backend, device and limits on the cost may differ, and `num_samples` may grow);
            "changed" goes on also where code or data are others now, and what was trained counts, unless `loss_fn`,
            `objective`, `metrics` or `val_data` is another: scores by these do not compare, so that what was found is
            kept as a run of its own, `NAME/before-1`, and all trains anew; "never" refuses; "must" refuses to start
            anew.
        checkpoint_every: Epochs between full-size checkpoints; None checkpoints at milestones only.
        loader_workers: Processes that load a Dataset's batches ahead for each model or group in training, as a
            DataLoader's `num_workers`; None: up to 4 for a GPU, none for a CPU, whose cores have models to train. The
            batches are the same, whoever loads them.
        time_budget_s: Seconds after which no new work starts; at most half of it goes to the sweep. The same call with
            more goes on where it ended: first with the sweep, then at full size.
        device: The one device to train on locally; None takes all GPUs, in a process each, or the CPU.
        seed: Determines configurations, initial weights, shuffles and dropout.
        progress: Whether to print.
        callbacks: Told what happens, while it happens (`hydro_rasda.Event`): functions of an event, or objects with a
            method `on_event`. They are no part of what a run is. One that raises is named in a warning and left out.
        gone: None are taken. What earlier versions took is refused with what to write in its place.

    Returns:
        The best configuration, its trained model, and every trial's record.

    Raises:
        ValueError: for bad input, before any training; it names the argument, its value and the rule.
        RunExists: where `name` is taken by another run, saying how it differs; nothing of it is changed.
        AllTrialsFailed: where no trial has a finite metric.
        KeyboardInterrupt: on Ctrl-C; the same call goes on from the last finished unit of work.
    """
    refuse_gone("tune", gone)
    settings = TuneConfig(
        metric=metric,
        mode=mode,
        num_samples=num_samples,
        max_t=max_t,
        grace_period=grace_period,
        reduction_factor=reduction_factor,
        top_k=top_k,
        full_trainings=full_trainings,
        surrogate=surrogate,
        fusion=fusion,
        check_transfer=check_transfer,
        rasda=RASDAConfig() if rasda is None else rasda,
        keep=keep,
        patience=patience,
        stop_at=stop_at,
        ema=ema,
        precision=precision,
        graph=graph,
        checkpoint_every=checkpoint_every,
        loader_workers=loader_workers,
        time_budget_s=time_budget_s,
        seed=seed,
    )
    trains_on = _backend(backend, device, address, resources_per_worker)
    if settings.graph is True and isinstance(trains_on, LocalBackend):
        rule = "'auto' or False where no device is a GPU of CUDA's"
        require(any(where.type == "cuda" for where in trains_on.devices), "graph", True, rule)
    folder = check_folder("storage_path", storage_path)
    _check(model_fn, loss_fn, objective, space, settings, searcher, sweep_rule, resume, name, progress, callbacks)
    own_loop = _own_loop(full_size, (train_data, val_data))
    check_first(first, space)
    own = not first or searcher is None
    require(own, "first", list(first), "left out with a `searcher`, which has a way of its own (`points_to_evaluate`)")
    if metrics is not None:
        check_function("metrics", metrics, 2, rule="None, or a function (no class) of (outputs, targets)")
    alone = full_size is None or patience is None
    require(alone, "patience", patience, "None with `full_size`, which returns where its own patience ends")
    functions: dict[str, Callable[..., Any]] = {
        "model_fn": model_fn,
        "loss_fn" if objective is None else "objective": objective or loss_fn,
    }
    more: dict[str, Callable[..., Any] | None] = {"metrics": metrics, "full_size": full_size}
    functions |= {name: function for name, function in more.items() if function is not None}
    identity = Identity(space, searcher, sweep_rule, functions, first)
    searcher = _prepared(searcher, space, settings)
    given = as_objective(objective, loss_fn, collected=metrics is not None)
    with _never_ending_well(), preserved_generators():
        problem = _problem(model_fn, settings, train_data, val_data, given, trains_on.device)
        problem = replace(problem, full_size=own_loop, metrics=metrics)
        candidates = RandomSearch(space, num_samples, seed, first, settings.rasda.strategy)
        ready = get_ready(problem, space, candidates.trials, None if name is None else folder / name)
        data, batch_size = {"train_data": train_data, "val_data": val_data}, candidates.trials[0].batch_size
        asked = identity.asked(ready.settings, ready.problem, ready.parameters, data, batch_size)
        with Store.open(_folder(folder, name), asked, resume) as store, contextlib.ExitStack() as stack:
            shown = stack.enter_context(_shown()) if progress else None
            listeners = Callbacks([*([] if shown is None else [shown]), *callbacks])
            run = Run(ready.problem, store, listeners, space=space, hidden=secrets_of(space))
            _announce(run, ready)
            search = SearcherSearch(searcher, space, run) if searcher else candidates
            result = _train(run, search, sweep_rule, trains_on)
            if shown is not None:
                shown.console.print(result)
    return result


@contextlib.contextmanager
def _never_ending_well() -> Iterator[None]:
    """Have no code that is called end the script with success before there is a result.

    Raises:
        RuntimeError: in place of such an end.
    """
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        raise RuntimeError(f"what `tune` called would have ended the script with success: {end!r}") from end


def _shown() -> Progress:
    # What prints takes longer to import than to print, so that only those who are shown something import it.
    from hydro_rasda.run.progress import Progress

    return Progress()


def _announce(run: Run, ready: Ready) -> None:
    """Tell that a run begins, and what of it is there already."""
    settings, store = ready.settings, run.store
    run.notify(RunBegan, path=store.path, metric=settings.metric, mode=settings.mode, settings=settings.determining())
    run.notify_recalled()
    for message in ready.messages:
        run.say(message)
    for change in store.changes:
        run.say(f"going on all the same: {change}")
    if store.recorded:
        run.say(f"going on with the run in {store.path}: {store.recorded} units of work are done")


def _train(run: Run, search: Search, rule: SweepRule | None, backend: Backend) -> TuneResult:
    """Both stages of a run that is ready."""
    try:
        with backend.open(run) as devices:
            finalists = sweep(run, search, devices, rule)
            hand_over(run, finalists)
            tried = train_targets(run, finalists, devices)
        for line in overfitting_line(run, tried):
            run.say(line)
        result = make_result(run, tried)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            path = run.store.path
            told = f"storage_path={str(path.parent)!r}, name={path.name!r}"
            error.args = (f"the same call with {told} goes on from the last finished unit of work",)
        run.notify(RunEnded, error=f"{type(error).__name__}: {error}")
        raise
    run.notify(
        RunEnded,
        best_trial=result.best_trial,
        best_config=hide(copy.deepcopy(result.best_config), run.hidden),
        best_metric=result.best_metric,
    )
    return result


def _backend(
    backend: str | Backend,
    device: str | torch.device | None,
    address: str | None,
    resources_per_worker: Mapping[str, float] | None,
) -> Backend:
    """The backend of this name, made of the arguments that are for it; or the object that was given."""
    named = isinstance(backend, str)
    known = backend in BACKENDS if named else isinstance(backend, Backend) and not isinstance(backend, type)
    require(known, "backend", backend, f"one of {BACKENDS}, or an object with what `hydro_rasda.Backend` has")
    if named and backend == "ray":
        require(device is None, "device", device, "None on Ray, where `resources_per_worker` says it")
        # What runs locally does not wait for it.
        from hydro_rasda.backends.ray.backend import RayBackend

        return RayBackend(address, resources_per_worker)
    needs_ray = "left out, unless `backend` is 'ray'"
    require(address is None, "address", address, needs_ray)
    require(resources_per_worker is None, "resources_per_worker", resources_per_worker, needs_ray)
    if isinstance(backend, Backend):
        require(device is None, "device", device, "left out, unless `backend` is 'local'")
        return backend
    return LocalBackend(None if device is None else [device])


def _folder(folder: Path, name: str | None) -> Path:
    """A run's folder; one without a name is made here, so that no other run that begins now gets it, too."""
    if name is not None:
        return folder / name
    stamp, number = time.strftime("tune-%Y%m%d-%H%M%S"), 1
    while True:
        unnamed = folder / (stamp if number == 1 else f"{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            make_private(unnamed, exist_ok=False)
            return unnamed
        number += 1


def _check(
    model_fn: object,
    loss_fn: LossFn,
    objective: Callable[..., Mapping[str, Tensor]] | None,
    space: Mapping[str, Any],
    settings: TuneConfig,
    searcher: object,
    sweep_rule: object,
    resume: str,
    name: str | None,
    progress: object,
    callbacks: Sequence[Listener],
) -> None:
    """Refuse what no later step would refuse before work starts."""
    rule = "a function of (config) or (config, width_ratio)"
    if isinstance(model_fn, nn.Module):  # it could be called, but with inputs
        raise ValueError(f"`model_fn` is a model, a {type(model_fn).__name__}, but must be {rule} that builds one")
    check_function("model_fn", model_fn, 1, 2, rule=rule, or_class=True)
    check_width_argument("model_fn", model_fn, settings.surrogate)
    rule = "a function (no class) of (output, target) or (output, target, config)"
    check_function("loss_fn", loss_fn, 3 if takes_config(loss_fn) else 2, rule=rule)
    if objective is not None:
        rule = "None, or a function (no class) of (model, batch) or (model, batch, config)"
        check_function("objective", objective, 3 if takes_config(objective) else 2, rule=rule)
    if objective is not None and loss_fn is not F.cross_entropy:
        raise ValueError("`loss_fn` and `objective` are both given, but one says all: leave one out")
    check_choice("resume", resume, RESUME)
    if name is not None:
        check_name("name", name)
    check_flag("progress", progress)
    check_space(space, settings.num_samples, settings.rasda.strategy)
    if searcher is not None:
        check_searcher(searcher)
    known = sweep_rule is None or isinstance(sweep_rule, SweepRule)
    require(known, "sweep_rule", sweep_rule, "None or an object of a subclass of `hydro_rasda.SweepRule`")
    check_callbacks(callbacks)


def _own_loop(full_size: Callable[[Worker], None] | None, data: Any) -> OwnLoop | None:
    """What trains the full-size models, unless the library's own loop does."""
    if full_size is None:
        return None
    check_function("full_size", full_size, 1, rule="None, or a function (no class) of a Worker")
    return OwnLoop(full_size, data)


def _prepared(searcher: Searcher | None, space: Mapping[str, Any], settings: TuneConfig) -> Searcher | None:
    """A copy that knows the space and will learn: the caller's own can begin the same run again, or another."""
    if searcher is not None:
        searcher = copy.deepcopy(searcher)
        prepare(searcher, space, settings.metric, settings.mode)
    return searcher


def _problem(
    model_fn: Callable[..., nn.Module],
    settings: TuneConfig,
    train_data: Data,
    val_data: Data,
    objective: Objective,
    where: torch.device,
) -> Problem:
    pickle_config_modules()
    return Problem(
        model_fn=model_fn,
        objective=in_precision(objective, settings.precision),
        train_data=make_batches(train_data, "train_data", where, settings.seed, settings.loader_workers),
        val_data=make_batches(val_data, "val_data", where, settings.seed, settings.loader_workers),
        settings=settings,
        device=where,
    )
