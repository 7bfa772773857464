"""The result of a run: the best configuration, its trained model, every trial's record, and the cost of each heat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map

from fusion.evaluate.microbatch import evaluate
from fusion.keys import read
from fusion.optim.schedules import as_lambda_lr
from fusion.streams import preserved_generators
from fusion.structure.objects_of_tensors import look_into
from hydro_rasda.common.argument_checks import check_folder, check_function, check_int, check_path
from hydro_rasda.common.secret_masking import HIDDEN, value_at
from hydro_rasda.common.short_values import all_of, counted
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import EVAL_BATCH_FACTOR, Data, batch_length, make_batches, move
from hydro_rasda.history.unkept_values import withholding
from hydro_rasda.history.winner import eligible
from hydro_rasda.problem.metrics import Collected, measured, summed
from hydro_rasda.problem.objective import give_config, reads_config, steering
from hydro_rasda.problem.precision import as_given, matrix_products
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.width_argument import Plans
from hydro_rasda.records.optuna_study import make_study
from hydro_rasda.records.record_from_journal import read_record, settings_of
from hydro_rasda.records.records import RunRecord, winner_of
from hydro_rasda.records.summary import AllTrialsFailed, sum_up
from hydro_rasda.results.export import checkpoint_of, save_model, unkept_of, weights_of
from hydro_rasda.run.pickling import Gone, check_has_functions, dumped, loaded
from hydro_rasda.run.run_json import read_asked
from hydro_rasda.run.state import Run

if TYPE_CHECKING:
    from optuna import Study
    from rich.console import Group


@dataclass(frozen=True, repr=False)
class TuneResult(RunRecord):
    """The outcome of `tune`. It can be pickled, without the data; the models stay in the run's folder.

    `load` opens it again from the run's folder. If the run is not over, the result has the findings so far.

    Attributes:
        best_config: The configuration of the winner, the best of the full-size models that trained to the end (see
            `RaceConfig.keep`). If no full-size model has a metric yet, it is the configuration of the best surrogate
            among those that trained longest in the last heat.
        best_metric: The winner's metric after epoch `TrialRecord.kept_epoch`, whose weights `best_model` gives. A trial
            whose training ended worse may have a better metric at its own kept epoch. NaN if no full-size model has a
            metric yet.
        trials: A record for each configuration, in the order of sampling.
        expected_gain: Upper bound of the expected improvement of `best_metric` by one more full-size training to the
            end. NaN if fewer than two trials trained at full size.
        transfer: How far the surrogates' ranking can be trusted; None without `sweep.check_transfer`.
        agreement: Compares the ranking of the finalists at full size with that of their surrogates, after the first
            epoch at which the race stopped any of them. None with `sweep.surrogate=1`, or if none trained at full size.
            The comparison costs nothing, but four finalists are seldom enough for a verdict. `transfer` compares more
            trials.
        path: The run directory, absolute.
        finished: True if the run came to its end, or if a score was as good as `stop_at` asks. False if the time budget
            ended it earlier, or if `load` opened a run that still trains or was interrupted.
        ended: True if nothing trains any more: the run is finished, or its time budget is spent.
        keep: The epoch of a full-size training that counts: its "best", or its "last".
        averaged: True if the weights that `best_metric` measures and `best_model` gives are averages over steps
            (`ema`). None if no full-size model was trained, if `tune(train=...)` trained it, or if its optimizer
            averages weights by itself, as Schedule-Free ones do.
        seconds_left: Estimated seconds from the last finished unit of work to the end of the run. None if the run has
            ended, or if there is no estimate.
        over: The models over which a finalist's metrics are averaged, such as "5 folds"; empty if a finalist is one
            model.
    """

    _problem: Problem

    def __repr__(self) -> str:
        from hydro_rasda.common.console import one_line
        from hydro_rasda.records.report import kept_weights

        statuses = Counter(record.status for record in self.trials)
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        name = type(self).__name__
        indent = " " * (len(name) + 1)
        kept = f"{indent}kept={by!r},\n" if (by := kept_weights(self)) else ""
        best = winner_of(self.shown())
        unread = f" (nothing reads {', '.join(best.unread)})" if best is not None and best.unread else ""
        config = best.used if best is not None and best.unread else self.shown().best_config
        return (
            f"{name}(best_config={config!r}{unread},\n"
            f"{indent}{one_line(self.metric)}={self.best_metric:.6g} ({self.mode}), "
            f"{counted(len(self.trials), 'trial')}: {counts},\n"
            f"{kept}"
            f"{indent}path={str(self.path)!r})"
        )

    def _packed(self) -> dict[str, Any]:
        problem = self._problem
        gone: dict[str, Any] = {
            "train_data": None,
            "val_data": None,
            "folds": None,
            "model_fn": Gone("model_fn"),
            "objective": Gone("objective"),
            "own_loop": None,
            "metrics": None,
            "plans": Plans(),
            "example_input": move(problem.example_input, torch.device("cpu"), wait=True),
            # `lr_rule` may be a function, too. No result calls it, so a name takes its place.
            "settings": replace(problem.settings, race=replace(problem.settings.race, lr_rule="auto")),
        }
        functions = {name: dumped(getattr(problem, name)) for name in ("model_fn", "objective", "metrics")}
        return {**self.__dict__, "_problem": replace(problem, **gone), "functions": functions}

    def _unpacked(self, state: dict[str, Any]) -> dict[str, Any]:
        functions = {name: loaded(name, packed) for name, packed in state.pop("functions").items()}
        device = state["_problem"].device
        there = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
        problem = replace(state["_problem"], device=device if there else torch.device("cpu"), **functions)
        return {**state, "_problem": problem}

    def best_model(self, trial: int | None = None, model_fn: Callable[..., nn.Module] | None = None) -> nn.Module:
        """Return the trained full-size model, in evaluation mode, on the device that it was trained on.

        With folds, the best model is trained on all examples; see `RaceConfig.refit`. Other finalists, and the best one
        without `refit`, have a model for each fold. These models come as one module. Its output is the mean of their
        outputs, and its attribute `models` lists them.

        Args:
            trial: Number of the finalist whose model is wanted; None: the best.
            model_fn: The model function of the run. It is needed if the result was loaded, or was unpickled without it.
                If JSON has no form for some values of the configuration, such as classes, pass these values again, for
                example by `lambda config: model_fn(config | {...})`.

        Raises:
            ValueError: if that trial was not trained at full size, the model function is missing or makes another
                model, or it reads a value that a loaded result does not have.
            FileNotFoundError: if the run has gone on since it was loaded, and has replaced the checkpoint.
            RuntimeError: if the checkpoint is not the one that was written.
        """
        if model_fn is not None:
            check_function("model_fn", model_fn, 1, 2, rule="the model function of the run", or_class=True)
        number, checkpoint = checkpoint_of(self, trial)
        problem = self._problem if model_fn is None else replace(self._problem, model_fn=model_fn)
        config = self.trials[number].config
        unkept = unkept_of(self, number)
        if unkept or any(value_at(config, place) == HIDDEN for place in self._hidden):
            problem = replace(problem, model_fn=withholding(problem.model_fn, unkept))
        models = []
        for weights in weights_of(self, checkpoint, self._problem.device)[: 1 if self._takes_first else None]:
            with preserved_generators():
                model = problem.target(Trial(number, config))
            try:
                model.load_state_dict(weights)
            except RuntimeError as error:
                told = f"`model_fn` makes a model that does not fit the checkpoint of trial {number}"
                raise ValueError(f"{told}: {error}") from error
            models.append(model)
        if len(models) == 1:
            return models[0].eval()
        mean = MeanOfModels(models)
        if reads_config(as_given(problem.objective)):
            give_config(mean, steering(config))
        return mean.eval()

    @property
    def _takes_first(self) -> bool:
        """Tell whether only the first seed's model is returned, which holds with `race.refit` and without folds."""
        settings = self._problem.settings
        return settings.race.refit and not settings.folds

    def save_model(self, path: str | Path, trial: int | None = None) -> Path:
        """Write the best model for others to load. This needs neither data nor the model function.

        Args:
            path: A folder, which is made. `model.safetensors` there is the state dict of the full-size model, with the
                trial, its metric and the epoch as metadata. `config.json` is its configuration, with names in place of
                values that JSON has no form for, such as functions. Files of these names are replaced.
            trial: Number of the finalist whose model is wanted; None: the best.

        Returns:
            The folder.

        Raises:
            ValueError: if that trial was not trained at full size, its state holds more than tensors, or it has several
                models whose mean counts. Also if `path` is a file.
            FileNotFoundError: if its checkpoint is gone.
            RuntimeError: if the checkpoint is not the one that was written.
        """
        check_folder("path", path)
        return save_model(self, path, trial, self._takes_first)

    def recipe(self, trial: int | None = None) -> str:
        """Write a plain torch loop, as text, that trains the best model again with torch and NumPy alone.

        It defines `train(model_fn, train_data, loss_fn)`, or `train(model_fn, train_data, objective)`, which returns
        the trained model. It contains the optimizer with all its values, the schedule with its warm-up, the clipping,
        the precision, the averages of the weights, and the seeds. It ends after the epoch whose weights the run kept,
        though the schedule is that of `max_t` epochs. On one thread of a CPU, with the same versions of torch and
        NumPy, it yields the weights of `best_model` up to rounding. Elsewhere, sums are added up in another order,
        which training can magnify. Values that cannot be written down, such as functions and secrets, are arguments of
        `train`.

            made = {}
            exec(result.recipe(), made)
            model = made["train"](model_fn, train_data, loss_fn)

        Use the code and data that the run was made with. Four things differ by more than rounding. Torch's cross-
        entropy is NaN for a batch whose targets are all ignored, where the run took 0. Several workers draw other
        dropout, and each takes the batch statistics of its own share. With `accumulate`, parts of a batch count by
        their examples, whereas the run counts targets that are not ignored, or weights. Data that draw random numbers
        on a GPU draw others.

        Args:
            trial: Number of the finalist whose training is wanted; None: the best.

        Raises:
            ValueError: if that trial was not trained at full size, or the run's folder is gone. Also if no plain loop
                can repeat the training. This excludes trials that `tune(train=...)` trained, trials that continued from
                another trial's weights (PBT), and trials of several models whose mean counts. It excludes trainings
                whose batch and learning rate grew as workers were added. It excludes objectives that update parameters
                themselves, as those of `tune_trainer` and `tune_module` do. In a loaded run, it excludes optimizers and
                schedules that are functions, because only their names are known.
            FileNotFoundError: if its checkpoint is gone.
        """
        from hydro_rasda.results.recipe import recipe_of

        return recipe_of(self, self._problem, trial)

    def as_lambda_lr(self, optimizer: Optimizer, steps_per_epoch: int, epochs: int | None = None) -> LambdaLR:
        """Make a torch scheduler of the winner's schedule and warm-up.

        Call its `step` after each step of the optimizer.

        Args:
            optimizer: An optimizer whose learning rates are the peaks of the schedule, such as `best_config["lr"]`.
            steps_per_epoch: Steps of the optimizer in an epoch, >= 1.
            epochs: Epochs of the training, over which the schedule is stretched; None: `max_t`.

        Raises:
            ValueError: if `tune_trainer` or `tune_module` set the schedule by their own arguments. Also if it is a
                function, of which a loaded run knows only the name.
        """
        if getattr(as_given(self._problem.objective), "optimizer_settings", None) is not None:
            raise ValueError("the objective sets the schedule by itself (`optimizer_settings`): ask what made it")
        check_int("epochs", epochs, at_least=1, optional=True)
        return as_lambda_lr(optimizer, self.best_config, epochs or self._problem.settings.max_t, steps_per_epoch)

    def to_optuna(self) -> Study:
        """Return the run as an Optuna study, in memory, for Optuna's importances, plots and dashboard.

        A trial's parameters are the keys that the space lets vary, nested ones as `a/b`; constants are left out. Its
        value and its intermediate values, one an epoch, are those at full size. A trial that trained only as a
        surrogate has the surrogate's values. It counts for importances, but is infeasible, so that Optuna's best trial
        is the winner of this result. A trial that diverged or failed has state FAIL, unless an earlier epoch counts
        (`keep="best"`). A trial that has not begun has state WAITING. `user_attrs` tell the heat, both metrics, the
        status and the probability of being the best. If PBT left the space, ranges are wider than those of the space.

        Raises:
            ImportError: if Optuna is not installed (the extra `hydro-rasda[optuna]`).
            ValueError: if the run's folder is gone.
        """
        return make_study(self)

    def evaluate(self, data: Data, batch_size: int | None = None) -> dict[str, float]:
        """Measure the best model on a data set such as the test set, including the metrics of `tune(metrics=...)`.

        Args:
            data: The data set, in any form that `tune` takes.
            batch_size: Examples at a time; None: as many as `tune` validated with, in the parts of `accumulate`. For
                the validation set, None gives `best_metric` again to the last digit. Rounding differs if the sweep
                trained that model to its end, fused with others. With folds, there is no single validation set.

        Raises:
            ValueError: if `data` is in no form that `tune` takes, or `batch_size` is below 1. Also if the result was
                loaded.
        """
        check_int("batch_size", batch_size, at_least=1, optional=True)
        check_has_functions(self._problem)
        model = self.best_model()
        batches = make_batches(data, "data", self._problem.device, self._problem.settings.seed)
        parts = 1 if batch_size else read(self.best_config, "accumulate")
        batch_size = batch_size or EVAL_BATCH_FACTOR * Trial(self.best_trial, self.best_config).batch_size
        whole, collected = self._problem.metrics, Collected()

        def evaluated(part: Any) -> Mapping[str, Tensor]:
            found = {name: value[None] for name, value in self._problem.objective(model, part).items()}
            return found if whole is None else collected.take(found, batch_length(part))

        with torch.no_grad(), preserved_generators(), matrix_products(self._problem.settings.precision):
            read_in_order = batches.in_order(batch_size)
            sums = summed((evaluate(evaluated, batch, parts), batch_length(batch)) for batch in read_in_order)
        found = {name: float(mean) for name, mean in sums.means().items()}
        return found if whole is None else found | measured(whole, *(one[0] for one in collected.whole()))

    def report(self, path: str | Path) -> Path:
        """Write the run as one HTML page that works offline: the answer, its cost, and the figures of `plots`.

        The page has the best configuration and its confidence, curves, importances, a timeline, tracebacks of failed
        trials, and the call that made the run. `hydro-rasda report` writes the same.

        Args:
            path: The file. Its folder is made; a file of this name is replaced.

        Returns:
            The file.

        Raises:
            ImportError: if the drawing library is not installed (the extra `hydro-rasda[report]`).
        """
        from hydro_rasda.plots.page import write_page

        check_path("path", path)
        return write_page([self], Path(path))

    def _repr_html_(self) -> str:
        from hydro_rasda.records.report import as_html

        return as_html(self)

    def __rich__(self) -> Group:
        from hydro_rasda.records.report import render

        return render(self)


def make_result(run: Run, finalists: list[int]) -> TuneResult:
    """Make the result of a run that is over; raise AllTrialsFailed if no finalist has a finite metric."""
    if not eligible(run.history, finalists):
        failures = run.history.failures
        errors = "\n\n".join(failures[n] for n in finalists if n in failures)
        raise AllTrialsFailed(
            f"{all_of(len(finalists), 'finalist')} diverged or failed at full size; their records are in "
            f"{run.store.path / 'journal.jsonl'}\n{errors}"
        )
    return TuneResult(**vars(sum_up(run.history, finalists, run.store.path, hidden=run.hidden)), _problem=run.problem)


def load(path: str | Path) -> TuneResult:
    """Open a run of `tune`: its result, or what it has found so far if it still runs or was interrupted.

    The folder is only read, and nothing in it can run code. JSON has no form for some values of a configuration, such
    as functions, classes and members of an Enum. The result has only their names. Secrets are "(hidden)". If a model
    function reads a name or "(hidden)" in place of such a value, it raises an error that says how to pass the value.

    Args:
        path: The run's folder, `storage_path/name`, of any backend.

    Returns:
        The result that `tune` returned, without data and functions: `best_model(model_fn=...)` gives the trained model,
        on the CPU. `TuneResult.finished` says whether the run came to its end. Before its end, `best_config` is the
        best so far, and trials that may train further are "undecided".

    Raises:
        ValueError: if the folder holds no run.
    """
    record = read_record(path)
    nothing: Any = None
    problem = Problem(
        model_fn=Gone("model_fn"),
        objective=Gone("objective"),
        train_data=nothing,
        val_data=nothing,
        settings=settings_of(read_asked(record.path)),
        device=torch.device("cpu"),
        copied=True,  # unknown here; False would be wrong for a model function that always returns the same module
    )
    return TuneResult(**vars(record), _problem=problem)


class MeanOfModels(nn.Module):
    """An ensemble: the models of folds, or of seeds."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean of the models' outputs. In nested outputs, each floating-point tensor becomes a mean."""
        return tree_map(_mean, *[look_into(model(*args, **kwargs)) for model in self.models])


def _mean(*outputs: Any) -> Any:
    first = outputs[0]
    return torch.stack(outputs).mean(0) if isinstance(first, Tensor) and first.is_floating_point() else first
