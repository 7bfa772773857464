"""`tune()`: search with surrogates and fusion, transfer to the full-size model, and full-size training."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fusion.keys import read
from fusion.streams import preserved_generators
from hydro_rasda.backends.local import LocalBackend
from hydro_rasda.common.argument_checks import check_choice, check_flag, check_folder, check_name, require
from hydro_rasda.common.one_line_warnings import HeldBack, warnings_in_one_line
from hydro_rasda.common.readable_signature import readable
from hydro_rasda.common.secret_masking import hide, scrubbed, secrets_of
from hydro_rasda.contracts import Backend, Devices, SweepRule
from hydro_rasda.data import Data, Splitter
from hydro_rasda.dry_run.dry_run_and_hints import Ready, get_ready
from hydro_rasda.dry_run.request import Request
from hydro_rasda.dry_run.run_identity import Identity
from hydro_rasda.heats.cost_limits import Costs, all_fit
from hydro_rasda.heats.finalists import hand_over
from hydro_rasda.heats.middle_heat import MiddleHeat, plan_middle_heat
from hydro_rasda.heats.race import Race
from hydro_rasda.heats.search import RandomSearch, Search, SearcherSearch
from hydro_rasda.heats.sweep import Sweep
from hydro_rasda.problem.metrics import WholeMetrics
from hydro_rasda.problem.objective import GivenObjective, LossFn
from hydro_rasda.results.result import TuneResult, make_result
from hydro_rasda.results.winner_checks import overfitting_line, undecided_line
from hydro_rasda.run.claim import Claim
from hydro_rasda.run.events import Callbacks, Listener, RunBegan, RunEnded, check_callbacks
from hydro_rasda.run.record_full_size import try_dropped_again
from hydro_rasda.run.resume_rules import RunExists
from hydro_rasda.run.run_folder import Store
from hydro_rasda.run.run_json import determining
from hydro_rasda.run.state import Run
from hydro_rasda.settings.config import BACKENDS, RESUME, Mode, Precision, RaceConfig, SweepConfig, TuneConfig
from hydro_rasda.settings.objectives import few_fit, few_in_time, split_metrics

if TYPE_CHECKING:
    from hydro_rasda.results.progress import Progress


@readable
def tune(
    model_fn: Callable[..., nn.Module],
    space: Mapping[str, Any],
    *,
    train_data: Data | Any = None,
    val_data: Data | Splitter | Any = None,
    loss_fn: LossFn | None = None,
    objective: GivenObjective | None = None,
    metrics: WholeMetrics | None = None,
    train: Callable[..., None] | None = None,
    metric: str | Sequence[str] = "val_loss",
    mode: Mode | Sequence[Mode] = "min",
    num_samples: int = 64,
    max_t: int = 27,
    full_trainings: float = 3.0,
    time_budget_s: float | None = None,
    stop_at: float | None = None,
    sweep: SweepConfig = SweepConfig(),
    race: RaceConfig = RaceConfig(),
    backend: Literal["local", "ray"] | Backend = "local",
    precision: Precision = "fp32",
    storage_path: str | Path = "runs",
    name: str | None = None,
    resume: Literal["auto", "must", "never", "changed"] = "auto",
    seed: int = 0,
    progress: bool = True,
    callbacks: Sequence[Listener] = (),
) -> TuneResult:
    """Find good hyperparameters for a model, and train the full-size model with them.

    The sweep tries many configurations on narrow surrogates of the model (muP: Yang et al. 2022; Hydro: Hu et al.
    2023). It fuses the surrogates into few models. By default, the best third goes on from each rung. The race trains
    the best configurations at full size, and halves them at milestones (RASDA: Aach et al. 2024). The winner is the
    best of those that trained for `max_t` epochs.

    Args:
        model_fn: `model_fn(config, width_ratio)` builds the model at the fraction `width_ratio` of its full width.
            `model_fn(config)` builds it at full width, and `surrogate.shrink` makes it narrower. A second argument
            with the default 1.0 also counts as the ratio if its name says so (`width`, `width_mult`, `scale`, `ratio`,
            `r`). But no other argument may look like a ratio. The run's first lines then name the argument.
        space: Maps hyperparameters to domains of `hydro_rasda` or Ray Tune. It needs `lr`. `fusion.keys` lists all keys
            that the library reads, such as `optimizer`, `batch_size` and `schedule`. `model_fn` gets all keys.
        train_data: Tensors or NumPy arrays `(inputs, target)`, a map-style Dataset, or a function
            `make_loader(batch_size)`. A batch of N tensors is a tuple of N tensors, also for N = 1. Data that cannot be
            pickled are read only by this process. Before any training, data are read once, for at most 5 seconds. A
            loader without an end needs a length, after which an epoch is over.
        val_data: Validation data in one of the same forms; they compare trials. Or a scikit-learn splitter: with
            `KFold(5)`, each configuration trains on five folds of `train_data`, and the mean of their scores decides.
            Then `train_data` must be tensors or a Dataset, and epochs of all folds are as long as those of the shortest
            fold.
        loss_fn: Mean loss of `(output, target)`, or of `(output, target, config)`; batches are then `(inputs, target)`.
            None for cross-entropy. A loss must not have parameters to train; put them into the model. `config` is the
            configuration without the library's keys. In a fused group, a float in `config` may be a tensor without
            dimensions. Trials that differ in other values (an integer, a word) train in different groups.
        objective: Replaces `loss_fn`: `objective(model, batch) -> {"loss": ..., ...}` for one model and any batch, or
            `objective(model, batch, config)`. In means over batches, a batch is weighted by the scalar "weight" of the
            dict: the number of targets that count, or the sum of their weights. Without "weight", it is weighted by its
            examples, or by its targets if the loss is torch's cross-entropy. Or a dict with an objective for each part
            of the model, such as {"discriminator": ..., "generator": ...}. In each step they take turns, and each loss
            updates only the parameters of its part. Metrics are then "PART_NAME", and "loss" is the sum of the losses.
        metrics: `metrics(outputs, targets) -> {"auc": ..., ...}` on the whole validation set. It gets two tensors
            [N, ...] on the CPU, after each epoch, and for each trial separately. An `objective` must then also return
            "outputs" and "targets", with examples as the first dimension.
        train: Your own training loop. `train(worker)` trains a trial from `worker.config`, epoch by epoch, and ends
            each epoch by `worker.report(metrics, state)`; see `Worker`. If neither `loss_fn` nor `objective` is given,
            it trains in every heat: narrow models in the sweep, and full-size models. It gets the model of either width
            from `worker.model()`, and the optimizer from `worker.optimizer`. Then `train_data` and `val_data` may be
            left out or be anything: `worker.data` has both. The library then reads no key of the configuration, not
            even `lr`. With `loss_fn` or `objective`, `train` trains only the full-size models. `metric` must be among
            the reported metrics, and `state["model"]` must be the state dict of `model_fn`'s model. At milestones
            `report` does not return. The function is later called again, and must continue from `worker.checkpoint`
            (the state reported there) and `worker.iteration`. If the function returns early, the trial is over, and its
            best epoch counts. `ema` and `precision` do not apply. On several workers it runs on every rank, as for
            `elastic`.
        metric: The metric that compares trials: "val_" or "train_" and a key of the objective's dict, or "val_" and a
            name that `metrics` returns. Or a list of several: then rungs keep the Pareto front (NSGA-II, Deb et al.
            2002), which is `TuneResult.pareto`. A list may include costs of the full-size model, measured before it
            trains: "params"; "macs", multiply-accumulate operations per example; "seconds_per_example" of evaluation;
            and "peak_memory", bytes of training. The first metric that is not a cost chooses the best trial.
        mode: "min" or "max"; for several metrics, also a list with a mode for each.
        num_samples: Number of configurations to try (for each point of a `grid_search`). The same call with a larger
            number resumes the run: the first configurations are the same, and rungs are decided anew over all.
        max_t: Epochs of a full training.
        full_trainings: Budget of the race, in trainings of `max_t` epochs. With folds, each fold of a finalist counts
            as a training, and so does each seed with `sweep.repeats`. At each milestone, as many finalists go on as the
            budget can train to the end. At least half of them go on in any case, and so does the one with the best
            averaged weights. Midway from the last milestone to the end, a finalist goes on only if its expected gain is
            worth the rest of its training. This does not hold if the budget is enough for all. While no finalist is
            better than a constant prediction, none is stopped.

            With a budget of at least 1 and below 3, a middle heat comes before the race if it pays. The best 8
            configurations of the sweep train anew on surrogates of 1/4 of the width, to `max_t`. Below 2, the best of
            them trains at full size; otherwise the best two do. The heat needs a narrower sweep, a single metric
            without bounds on metrics, and no `train`. It pays if it costs at most a full training, by counted
            operations of the first configuration's models. It does not pay for small models, whose forward pass on a
            batch takes fewer than 300 million multiplications. Without a middle heat, or with a budget below 1, at
            least half of the finalists go on at each milestone, as with a budget of 3.
        time_budget_s: Seconds after which no new work starts; at most half of it goes to heats on surrogates. The
            budget may seem enough for a full training but not for the race. If some finalists would then have to wait
            for others, the sweep's best trial trains to its end first. The same call with more time resumes the run:
            first the sweep, then full-size training.
        stop_at: A score of `metric` that is good enough: once a full-size model reaches it, training ends. A model of a
            sweep at full width counts, too, if its checkpoint holds the weights of that epoch, as with `train`. If a
            surrogate reaches it, its trial trains at full size at once, up to the race's first milestone, and the other
            trials wait. With a middle heat, only its surrogates do so. In the race, finalists whose epochs are far
            cheaper than those of others train first. The same call with a better score, or None, resumes the run. It
            must be None for a list of metrics, or if a trained metric has a bound.
        sweep: How the sweep tries configurations; see `SweepConfig`.
        race: How the finalists train at full size; see `RaceConfig`.
        backend: "local" for all devices of this machine, as `LocalBackend()`; "ray" for all devices of a Ray cluster,
            as `RayBackend()`; or such an object. The same rules decide on all backends.
        precision: Number format of the models' computations, in the sweep and at full size. "bf16": matrix products and
            convolutions in bfloat16 (`torch.autocast`), also on a CPU. "fp16": the same in float16. Each trial has its
            own loss scale, and if its gradients overflow, only this trial skips the step. "tf32": the same in TF32, on
            CUDA. "fp32" leaves torch as you have set it. Weights, gradients, optimizer state and metrics stay in
            float32.
        storage_path: Folder of runs.
        name: Folder of this run in `storage_path`; None for a name made from the time.
        resume: How to treat an existing run of this name. "auto" resumes it if settings, code and data are the same;
            the backend and limits on the cost may differ, and `num_samples` may grow. "changed" resumes it also with
            other code or data, and finished training counts. If `loss_fn`, `objective`, `metrics` or `val_data`
            differ, scores are not comparable: then "changed" keeps the old run as `NAME/before-1` and starts anew.
            "never" refuses an existing run, and "must" refuses to start a new one.
        seed: Determines configurations, initial weights, shuffles and dropout.
        progress: True to print progress.
        callbacks: Functions of an event, or objects with a method `on_event`, that are called while the run goes on
            (`hydro_rasda.contracts.Event`). They are no part of a run's identity. If a callback raises, a warning names
            it, and it is not called again.

    Returns:
        The best configuration, its trained model, and every trial's record.

    Raises:
        ValueError: For bad input, before any training. The message names the argument, its value and the rule.
        RunExists: If another run has the name. The message says how it differs; the other run stays unchanged.
        AllTrialsFailed: If no trial has a finite metric.
        KeyboardInterrupt: On Ctrl-C. The same call resumes from the last finished unit of work.
    """
    metric, mode, objectives = split_metrics(metric, mode)
    settings = TuneConfig(
        metric=metric,
        mode=mode,
        objectives=objectives,
        num_samples=num_samples,
        max_t=max_t,
        full_trainings=full_trainings,
        time_budget_s=time_budget_s,
        stop_at=stop_at,
        sweep=sweep,
        race=race,
        precision=precision,
        seed=seed,
    )
    trains_on = _backend(backend)
    settings = replace(
        settings,
        graph=getattr(trains_on, "graph", settings.graph),
        loader_workers=getattr(trains_on, "loader_workers", settings.loader_workers),
    )
    folder = check_folder("storage_path", storage_path)
    request = Request(model_fn, space, train_data, val_data, loss_fn, objective, metrics, train, settings)
    request.check()
    _check_run(resume, name, progress, callbacks)
    plain = warnings_in_one_line() if progress else contextlib.nullcontext()
    trains = torch.inference_mode(False)  # also enables gradients if the caller has disabled them
    with plain, HeldBack() as held_back, _never_ending_well(), preserved_generators(), trains:
        return _run(request, trains_on, folder, name, resume, progress, callbacks, held_back)


def _backend(backend: str | Backend) -> Backend:
    """Return the backend of a name; an object is returned as it is."""
    named = isinstance(backend, str)
    known = backend in BACKENDS if named else isinstance(backend, Backend) and not isinstance(backend, type)
    rule = f"one of {BACKENDS}, or an object with what `hydro_rasda.contracts.Backend` has"
    require(known, "backend", backend, rule)
    if isinstance(backend, Backend):
        return backend
    if backend == "local":
        return LocalBackend()
    # Import it only here, because the import of Ray takes long, and a local run does not need it.
    from hydro_rasda.backends.ray.backend import RayBackend

    return RayBackend()


def _check_run(resume: str, name: str | None, progress: object, callbacks: Sequence[Listener]) -> None:
    check_choice("resume", resume, RESUME)
    require(name is not None or resume != "must", "name", name, "that of the run, with resume='must'")
    if name is not None:
        check_name("name", name)
    check_flag("progress", progress)
    check_callbacks(callbacks)


@contextlib.contextmanager
def _never_ending_well() -> Iterator[None]:
    """Within the context, turn a `sys.exit(0)` in user code into an error: else the script would seem to succeed."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        raise RuntimeError(f"code that `tune` called would have ended the script with success: {end!r}") from end


def _run(
    request: Request,
    backend: Backend,
    folder: Path,
    name: str | None,
    resume: str,
    progress: bool,
    callbacks: Sequence[Listener],
    held_back: HeldBack,
) -> TuneResult:
    """Begin or resume the run, and train its heats."""
    identity, searcher, settings = Identity(request), request.searcher(), request.settings
    problem, constraints = request.problem(backend), settings.sweep.constraints
    sampled = (request.space, settings.num_samples, settings.seed, settings.sweep.first, request.strategy)
    candidates = RandomSearch(*sampled, all_fit(constraints))
    with _claim(folder, name, resume) as claim, contextlib.ExitStack() as stack:
        if claim.found is not None:
            claim.refuse_other(identity.known(problem.settings, claim.found))
        named_rule, began = isinstance(settings.sweep.rule, str), time.monotonic()
        with held_back.catching():
            ready = get_ready(problem, request.space, candidates.trials, claim.doing, named_rule=named_rule)
        batch_size = read(problem.library_keys(candidates.trials[0].config), "batch_size")
        spec = identity.asked(ready, batch_size)
        stack.callback(identity.leave)
        store = stack.enter_context(Store.claimed(claim, spec, time.monotonic() - began))
        shown = stack.enter_context(_shown()) if progress else None
        listeners = Callbacks([*([] if shown is None else [shown]), *callbacks])
        run = Run(ready.problem, store, listeners, space=request.space, hidden=secrets_of(request.space))
        _announce(run, ready)
        if resume == "changed":
            try_dropped_again(run)
        held_back.give()
        search: Search = candidates
        fits = all_fit(constraints, Costs(run))
        if searcher is not None:
            search = SearcherSearch(searcher, request.space, run, fits, request.strategy)
        elif fits is not None:
            search = RandomSearch(*sampled, fits, _enough(run))
        _recall(search, run)
        plan_middle_heat(run, candidates.trials[0], max(search.planned, settings.num_samples))
        try:
            with _end_told(run, resume):
                with backend.open(run) as devices:
                    race = Race(run, devices)
                    sweep, middle = _heats_on_surrogates(run, search, devices, settings.sweep.rule, race)
                    with store.sweeping():
                        sweep.train()
                        finalists = sweep.finalists()
                        finalists = finalists if middle is None else middle.between(finalists)
                    hand_over(run, finalists)
                    tried = race.between(finalists)
                result = _result(run, tried)
        except KeyboardInterrupt as stopped:
            if shown is None:
                raise
            # Raise without the traceback, because it would hide the line that says how to resume.
            raise stopped.with_traceback(None) from None
        if shown is not None:
            shown.conclude(result.shown())
    return result


def _heats_on_surrogates(
    run: Run, search: Search, devices: Devices, asked: SweepRule | str, race: Race
) -> tuple[Sweep, MiddleHeat | None]:
    """Return the sweep and the middle heat (or None). The last of these heats gets `race`, which it may begin early."""
    rule = None if isinstance(asked, str) else asked
    if (plan := run.history.middle) is None:
        return Sweep(run, search, devices, rule, race), None
    return Sweep(run, search, devices, rule), MiddleHeat(run, devices, plan, race)


def _claim(folder: Path, name: str | None, resume: str) -> Claim:
    """Lock a run's folder. If `name` is None, the folder gets a name that no other run has."""
    if name is not None:
        return Claim(folder / name, resume)
    stamp, number = time.strftime("tune-%Y%m%d-%H%M%S"), 1
    while True:
        unnamed = folder / (stamp if number == 1 else f"{stamp}-{number}")
        if not unnamed.exists():
            with contextlib.suppress(RunExists, FileExistsError):  # another process took the name just now
                return Claim(unnamed, "never", exclusive=True)
        number += 1


def _shown() -> Progress:
    # Import them only here, because the import takes long, and `progress=False` does not need them.
    from hydro_rasda.results.progress import NotebookProgress, Progress

    shown = Progress()
    return NotebookProgress() if shown.console.is_jupyter else shown


def _announce(run: Run, ready: Ready) -> None:
    """Notify callbacks that a run begins, then of its recorded events. Print the messages of the dry run."""
    settings, store = ready.settings, run.store
    run.notify(RunBegan, path=store.path, metric=settings.metric, mode=settings.mode, settings=determining(settings))
    run.notify_recalled()
    for message in ready.messages:
        run.say(message)
    for change in store.changes:
        run.say(f"resuming all the same: {change}")
    if store.recorded:
        run.say(f"resuming the run: {store.recorded} finished units of work are not repeated")


def _recall(search: Search, run: Run) -> None:
    """Let a random search take over the configurations that a resumed run has recorded.

    Print a message if it has fewer configurations than the user asked for. Searchers are left as they are.
    """
    if isinstance(search, RandomSearch):
        search.recall(run)
        if search.planned < run.settings.num_samples:
            run.say((few_in_time if search.late else few_fit)(search.planned, run.settings.num_samples))


def _enough(run: Run) -> Callable[[int], bool]:
    """Return a function of the number of configurations found so far. It returns True if drawing must stop.

    Drawing stops if time is up and all recorded configurations have been drawn again.
    """
    lines = (line for unit in run.store.units().values() for line in unit.lines)
    recorded = 1 + max((line["trial"] for line in lines if line["event"] == "trial"), default=0)
    drawn = max(1, recorded - len(run.settings.sweep.first))
    return lambda found: found >= drawn and run.out_of_time("sweep")


@contextlib.contextmanager
def _end_told(run: Run, resume: str) -> Iterator[None]:
    """Within the context, notify callbacks of an error that ends the run. After Ctrl-C, add to it how to resume."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            path = run.store.path
            told = f"storage_path={str(path.parent)!r}, name={path.name!r}" + ", resume='auto'" * (resume == "never")
            error.args = (f"the same call with {told} goes on from the last finished unit of work",)
        run.notify(RunEnded, error=scrubbed(f"{type(error).__name__}: {error}", run.hidden, run.space))
        raise


def _result(run: Run, tried: list[int]) -> TuneResult:
    """Return the result of a run that is done or out of time, and notify callbacks of the run's end."""
    for line in overfitting_line(run, tried):
        run.say(line)
    result = make_result(run, tried)
    for line in undecided_line(result) if not run.out_of_time("race") else ():
        run.say(line)
    run.notify(
        RunEnded,
        best_trial=result.best_trial,
        best_config=hide(copy.deepcopy(result.best_config), run.hidden),
        best_metric=result.best_metric,
    )
    return result
