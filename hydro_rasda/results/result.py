"""What a run found: the best configuration, its trained model, every trial's record, and what each stage cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fusion.schedules import as_lambda_lr
from fusion.streams import preserved_generators
from hydro_rasda.checks import check_function, check_int, check_path
from hydro_rasda.data import Data, batch_length, make_batches
from hydro_rasda.metrics import EVAL_BATCH_FACTOR, mean_metrics
from hydro_rasda.precision import as_given
from hydro_rasda.problem import Problem
from hydro_rasda.results.export import checkpoint_of, save_model, weights_of
from hydro_rasda.results.records import RunRecord
from hydro_rasda.results.study import make_study
from hydro_rasda.results.summary import eligible, sum_up
from hydro_rasda.run.portable import Gone, dumped, loaded
from hydro_rasda.run.state import Run
from hydro_rasda.secret_masking import HIDDEN, value_at, withholding
from hydro_rasda.surrogate_plans import Plans
from hydro_rasda.trial import Trial
from hydro_rasda.whole_metrics import Collected, measured

if TYPE_CHECKING:
    from optuna import Study
    from rich.console import Group


@dataclass(frozen=True, repr=False)
class TuneResult(RunRecord):
    """The outcome of `tune`. It can be pickled; the data stay behind, and the models where the run is.

    `load` opens it again from the run's folder, also before the run is over; then it tells what there is so far.

    Attributes:
        best_config: The winner's configuration: of the full-size models that trained to the end, the best there (see
            `RaceConfig.keep`). Where no full-size model has a metric yet, that of the surrogate that trained longest,
            and is best there.
        best_metric: The metric of the weights that the winner hands back, those of `TrialRecord.kept_epoch`; another
            trial, which is worse in the end, may have a better one. NaN where no full-size model has a metric yet.
        best_trial: Number of the trial with that configuration.
        trials: A record for each configuration, in the order of sampling.
        mode: "min" or "max".
        expected_gain: What training one more configuration to the end at full size would be expected to improve
            `best_metric` by, were it as good as the finalists; NaN where fewer than two trained there.
        transfer: How far the surrogates' ranking can be trusted; None unless `sweep.check_transfer` was asked for.
        agreement: How full size ranks the finalists, compared with their surrogates, after the first epoch at which the
            race let any of them go; None with `sweep.surrogate=1`, and where none trained at full size. It costs
            nothing, and four finalists seldom tell; `transfer` compares more.
        path: The run directory, absolute.
        finished: Whether the run came to its end, also where a score was as good as `stop_at` asks. False where the
            time budget ended it before, and where `load` opened a run that still goes on, or that was interrupted.
        ended: Whether nothing trains any more: it is finished, or its time budget is spent.
        keep: Which epoch of a full-size training counts: its "best", or its "last". None where an earlier version made
            the run, and did not write it down.
        averaged: Whether the weights that `best_metric` is of, and that `best_model` gives, are averages over steps
            (`ema`). None where no full-size model was trained, where `race.train` trained it, or as for `keep`.
    """

    _problem: Problem

    def __repr__(self) -> str:
        from hydro_rasda.console import one_line
        from hydro_rasda.results.report import kept_weights

        statuses = Counter(record.status for record in self.trials)
        counts = ", ".join(f"{count} {status}" for status, count in statuses.items())
        name = type(self).__name__
        indent = " " * (len(name) + 1)
        kept = f"{indent}kept={by!r},\n" if (by := kept_weights(self)) else ""
        return (
            f"{name}(best_config={self.shown().best_config!r},\n"
            f"{indent}{one_line(self.metric)}={self.best_metric:.6g} ({self.mode}), "
            f"{len(self.trials)} trials: {counts},\n"
            f"{kept}"
            f"{indent}path={str(self.path)!r})"
        )

    def _packed(self) -> dict[str, Any]:
        problem = self._problem
        gone: dict[str, Any] = {
            "train_data": None,
            "val_data": None,
            "model_fn": Gone("model_fn"),
            "objective": Gone("objective"),
            "full_size": None,
            "metrics": None,
            "plans": Plans(),
            # Its `lr_rule` may be a function, too, and no result calls it.
            "settings": replace(problem.settings, race=replace(problem.settings.race, lr_rule="auto")),
        }
        functions = {name: dumped(getattr(problem, name)) for name in ("model_fn", "objective", "metrics")}
        return {**self.__dict__, "_problem": replace(problem, **gone), "functions": functions}

    def _unpacked(self, state: dict[str, Any]) -> dict[str, Any]:
        functions = {name: loaded(name, packed) for name, packed in state.pop("functions").items()}
        device = state["_problem"].device
        there = device.type != "cuda" or torch.cuda.is_available()
        problem = replace(state["_problem"], device=device if there else torch.device("cpu"), **functions)
        return {**state, "_problem": problem}

    def best_model(self, trial: int | None = None, model_fn: Callable[..., nn.Module] | None = None) -> nn.Module:
        """The trained full-size model, in evaluation mode, on the device that it was trained on.

        Args:
            trial: Number of another finalist whose model is wanted.
            model_fn: The model function of the run, where the result was loaded, or unpickled without it.

        Raises:
            ValueError: where that trial was not trained at full size, or the model function is not there.
            FileNotFoundError: where the run has gone on since it was loaded, and its checkpoint is another one now.
            RuntimeError: where the checkpoint is not what was written.
        """
        if model_fn is not None:
            check_function("model_fn", model_fn, 1, 2, rule="the model function of the run", or_class=True)
        number, checkpoint = checkpoint_of(self, trial)
        problem = self._problem if model_fn is None else replace(self._problem, model_fn=model_fn)
        config = self.trials[number].config
        if any(value_at(config, place) == HIDDEN for place in self._hidden):
            problem = replace(problem, model_fn=withholding(problem.model_fn))
        with preserved_generators():
            model = problem.target(Trial(number, config))
        model.load_state_dict(weights_of(self, checkpoint, self._problem.device))
        return model.eval()

    def save_model(self, path: str | Path, trial: int | None = None) -> Path:
        """Write the best model for others to load; neither data nor model function are needed.

        Args:
            path: A folder, which is made. `model.safetensors` there is the state dict of the full-size model (with the
                trial, its metric and the epoch as metadata), `config.json` its configuration; values that JSON has no
                form for, such as functions, are there as their names. Files of these names are replaced.
            trial: Number of another finalist whose model is wanted.

        Returns:
            The folder.

        Raises:
            ValueError: where that trial was not trained at full size, or its state holds more than tensors.
            FileNotFoundError: where its checkpoint is gone.
            RuntimeError: where it is not what was written.
        """
        check_path("path", path)
        return save_model(self, path, trial)

    def recipe(self, trial: int | None = None) -> str:
        """A plain torch loop, as text, that trains the best model again; it needs torch and NumPy, not this library.

        It defines `train(model_fn, train_data, loss_fn)`, or `train(model_fn, train_data, objective)`, which returns
        the trained model. In it are the optimizer with all its values, the schedule with its warm-up, the clipping, the
        precision, the averages of the weights, the seeds, and after which epoch the run kept the weights; there it
        ends, though the schedule is that of `max_t` epochs. On one thread of a CPU, it comes to the weights of
        `best_model`, to rounding, by the same versions of torch and NumPy. Elsewhere, sums are added up in
        another order, which training can magnify. Values that cannot be written down, such as functions and secrets,
        are arguments of `train`.

            made = {}
            exec(result.recipe(), made)
            model = made["train"](model_fn, train_data, loss_fn)

        Code and data are to be those that the run was made with. Three things differ by more than rounding: several
        workers draw other dropout, and take batch statistics each of their own share; with `accumulate`, parts of a
        batch count by their examples, where the run counts targets that are not ignored, or weights; and data that draw
        random numbers on a GPU draw others.

        Args:
            trial: Number of another finalist whose training is wanted.

        Raises:
            ValueError: where that trial was not trained at full size, or the run's folder is gone. And where no plain
                loop repeats the training: `race.train` trained it; workers were added in training, and batch and
                learning rate with them; it went on from another trial's weights (PBT); its objective says how
                parameters are updated, as those of `tune_trainer` and `tune_module` do; or the optimizer or the
                schedule is a function, of which a loaded run knows the name alone.
            FileNotFoundError: where its checkpoint is gone.
        """
        from hydro_rasda.results.recipe import recipe_of

        return recipe_of(self, self._problem, trial)

    def as_lambda_lr(self, optimizer: Optimizer, steps_per_epoch: int, epochs: int | None = None) -> LambdaLR:
        """Make torch's scheduler of the winner's schedule and warm-up, to be stepped after each step of the optimizer.

        Args:
            optimizer: Its learning rates are the highest ones, `best_config["lr"]` for instance.
            steps_per_epoch: Steps of the optimizer in an epoch, >= 1.
            epochs: Of the training, over which the schedule is stretched; None: `max_t`.

        Raises:
            ValueError: where `tune_trainer` or `tune_module` set the schedule by arguments of their own, or it is a
                function of which a loaded run knows the name alone.
        """
        if getattr(as_given(self._problem.objective), "optimizer_settings", None) is not None:
            raise ValueError("the objective sets the schedule by itself (`optimizer_settings`): ask what made it")
        check_int("epochs", epochs, at_least=1, optional=True)
        return as_lambda_lr(optimizer, self.best_config, epochs or self._problem.settings.max_t, steps_per_epoch)

    def to_optuna(self) -> Study:
        """The run as a study of Optuna's, in memory, for its importances, plots and dashboard.

        A trial's parameters are what the space lets vary, `a/b` where it is nested; constants are left out. Its value
        and intermediate values, one an epoch, are those at full size, or on the surrogate where it was trained there
        alone: such a trial counts for importances, but is infeasible, so that Optuna's best trial is this result's. One
        that diverged or failed has failed, unless an epoch of it counts (`keep="best"`); one that has not begun waits.
        `user_attrs` tell the stage, both metrics, the status and the probability of being the best. Ranges are wider
        than the space's where PBT left it.

        Raises:
            ImportError: where Optuna is not there (the extra `hydro-rasda[optuna]`).
            ValueError: where the run's folder is gone.
        """
        return make_study(self)

    def evaluate(self, data: Data, batch_size: int | None = None) -> dict[str, float]:
        """The metrics of the best model over a data set such as the test set, those of `tune(metrics=...)` among them.

        Args:
            data: In any form that `tune` takes.
            batch_size: Examples at a time; None: as many as `tune` validated with, which gives `best_metric` again
                for the validation set, to the last digit (but for rounding where the sweep trained that model to its
                end, fused with others).

        Raises:
            ValueError: where one of them is none of these.
        """
        check_int("batch_size", batch_size, at_least=1, optional=True)
        model = self.best_model()
        batches = make_batches(data, "data", self._problem.device, self._problem.settings.seed)
        batch_size = batch_size or EVAL_BATCH_FACTOR * Trial(self.best_trial, self.best_config).batch_size
        whole, collected = self._problem.metrics, Collected()

        def evaluated(batch: Any) -> Mapping[str, Tensor]:
            found = {name: value[None] for name, value in self._problem.objective(model, batch).items()}
            return found if whole is None else collected.take(found, batch_length(batch))

        with torch.no_grad(), preserved_generators():
            means = mean_metrics((evaluated(batch), batch_length(batch)) for batch in batches.in_order(batch_size))
        found = {name: float(mean) for name, mean in means.items()}
        return found if whole is None else found | measured(whole, *(one[0] for one in collected.whole()))

    def report(self, path: str | Path) -> Path:
        """Write the run as one HTML page, which works offline: the answer, its cost, and the figures of `plots`.

        The page has the best configuration and how sure it is, curves, importances, a timeline, tracebacks of what
        failed, and the call that made the run. `hydro-rasda report` writes the same.

        Args:
            path: The file. Its folder is made; a file of this name is replaced.

        Returns:
            The file.

        Raises:
            ImportError: where what draws it is not there (the extra `hydro-rasda[report]`).
        """
        from hydro_rasda.page import write_page

        check_path("path", path)
        return write_page(self, Path(path))

    def _repr_html_(self) -> str:
        """What a notebook shows: the best configuration, the best trials, and the cost."""
        from hydro_rasda.results.report import as_html

        return as_html(self)

    def __rich__(self) -> Group:
        """The table of the best trials and the cost, for a rich console."""
        from hydro_rasda.results.report import render

        return render(self)


def make_result(run: Run, finalists: list[int]) -> TuneResult:
    """Sum up a run that is over.

    Raises:
        AllTrialsFailed: where no finalist has a finite metric.
    """
    if not eligible(run, finalists):
        errors = "\n\n".join(run.failures[n] for n in finalists if n in run.failures)
        raise AllTrialsFailed(
            f"all {len(finalists)} finalists diverged or failed at full size; their records are in "
            f"{run.store.path / 'journal.jsonl'}\n{errors}"
        )
    return TuneResult(**vars(sum_up(run, finalists)), _problem=run.problem)


class AllTrialsFailed(RuntimeError):
    """No trial of a stage ended with a finite metric."""
