"""Before the first heat: do a dry run, adapt settings to its findings, and warn of settings that may be wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from fusion import lr_factor
from fusion.evaluate.microbatch import can_be_split
from fusion.keys import SCHEDULE_FREE, optimizer_names, read
from fusion.warn import warn
from hydro_rasda.common.short_values import all_of
from hydro_rasda.common.trial import Trial
from hydro_rasda.data import EVAL_BATCH_FACTOR, batch_length, naming_batch
from hydro_rasda.dry_run.dry_run import DryRun
from hydro_rasda.dry_run.isolated_dry_run import survived_dry_run
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.width_argument import about_width_argument
from hydro_rasda.run.crash_log import CrashLog
from hydro_rasda.run.fingerprint import spread_indices
from hydro_rasda.schedulers import first_milestone
from hydro_rasda.settings.config import TuneConfig
from hydro_rasda.space.space import has_shares, longest_warmup, schedules, tuned
from hydro_rasda.training.lr_and_decay_by_parameter import check_rule
from surrogate import doubtful_hyperparameters

ASKED_STEPS = 64
"""A user's schedule function is called for this many steps, spread evenly from the first step to the last one."""

_PRETRAINED = (
    "the model's initial weights are the same from every seed, as pretrained ones are: a surrogate of {:g} of its "
    "width would lose them, so the model itself is swept (`sweep=SweepConfig(surrogate=1)`). If it should start at "
    "random, have `model_fn` neither load weights nor seed itself"
)

_HIGHER = re.compile(
    r"\w*accuracy|b?acc|[a-z]*(auc|roc|iou|bleu)|auprc|m?ap|f1|fbeta|recall|precision|sensitivity|specificity|top|hits|"
    r"rouge\w*|meteor|jaccard|dice|r2|psnr|ssim|ndcg|mrr|kappa|mcc|pearson|spearman|correlation|rewards?|returns?|elbo|"
    r"likelihood|correct"
)
_LOWER = re.compile(
    r"\w*(loss|error|perplexity)|err|r?mse|r?mae|s?mape|nll|ppl|bp[bcd]|[wce]er|fid|brier|ece|distance|divergence|"
    r"deviance|regret"
)
_TURNED = re.compile(r"neg|negative|minus|inverse|inv")
"""Words in a metric's name that say that higher (`_HIGHER`) or lower (`_LOWER`) is better, or that reverse this."""

_NO_DECAY = (
    'hint: the learning rate never decays. A decay usually gains more than any other key. Add `"schedule": "cosine"` '
    'to the space. To search where the decay begins, add `"schedule": "linear", "decay_start": uniform(0, 0.9)`'
)


@dataclass(frozen=True)
class Ready:
    """A problem that a dry run has shown to work.

    Attributes:
        problem: The problem, with the dry run's findings about the model and with rungs that lie after the warm-ups.
        settings: The user's settings. Only `sweep.surrogate` differs: it is 1 if the model is pretrained.
        parameters: Name, shape and type of each parameter of the full-size model.
        messages: Messages to the user about the dry run.
    """

    problem: Problem
    settings: TuneConfig
    parameters: dict[str, str]
    messages: list[str]


def get_ready(
    problem: Problem,
    space: Mapping[str, Any],
    trials: Sequence[Trial],
    doing: CrashLog | None = None,
    *,
    named_rule: bool = True,
) -> Ready:
    """Try a problem out, and warn of settings that would fail silently.

    Args:
        doing: The run's crash log; None without a run.
        named_rule: True if a rule of the library decides the sweep, so that the sweep's last epoch is known. False for
            the user's own rule.

    Raises:
        ValueError: If no trial can be trained; see `dry_run`. Also if a `schedule` fails or returns no factors, or if
            the largest batches exceed the data. Also if it is not known how an optimizer's learning rates transfer.
    """
    settings = problem.settings
    messages: list[str] = []
    keys, configs = problem.library_keys(space), [problem.library_keys(trial.config) for trial in trials]
    _check_schedules(problem, keys, configs)
    found = survived_dry_run(problem, trials, doing or CrashLog())
    if not problem.is_own("sweep"):  # only the user's own loop can read its data
        _check_largest_batches(problem, configs)
        messages += _of_batch_sizes(problem, configs)
    warmup = longest_warmup(keys, configs, settings.max_t)
    if found.pretrained:
        warn(_PRETRAINED.format(settings.sweep.surrogate))
        settings = replace(settings, sweep=replace(settings.sweep, surrogate=1))
    for config in configs if settings.sweep.surrogate < 1 else ():
        check_rule(config)
    messages += _of_surrogates(problem, found, settings.sweep.surrogate)
    _warn_of_doubtful(space, settings.sweep.surrogate)
    _warn_of_modes(settings)
    _warn_of_endless(warmup, settings.max_t)
    later = _without_rungs_before(warmup, settings)
    if later != settings:
        rungs = f"at epoch {later.sweep.grace_period} of the sweep and {later.first_look} at full size"
        messages.insert(0, f"warm-ups last up to {warmup:g} epochs: the first rungs are {rungs}")
    count = max(settings.num_samples, len(trials))  # a grid may have more trials than `num_samples`
    if settings.sweep.surrogate < 1 and count <= settings.race.top_k:
        few = f"whatever surrogates say, {all_of(count, 'configuration')} can enter the race"
        messages.append(f"{few}: `sweep=SweepConfig(surrogate=1)` trains at full size from the start")
    if named_rule and settings.sweep.surrogate < 1 and has_shares(keys, configs):
        *_, before, last = (0, *later.sweep_milestones)
        problem = replace(problem, horizon=last, unhurried=before)
        if last < settings.max_t:
            faster = f"From epoch {before} on, its schedules run faster, so that they end with it."
            messages.append(f"The sweep trains {last} of {settings.max_t} epochs. {faster}")
    elif not _has_decay(problem, keys, configs):
        messages.append(_NO_DECAY)
    return Ready(replace(problem.tried(found), settings=later), settings, found.parameters, messages)


def _check_schedules(problem: Problem, space: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> None:
    """Call each schedule function of the user at some steps of the first trial's training, to find errors."""
    found = dict.fromkeys(schedule for schedule in schedules(space, configs) if callable(schedule))
    if not found:
        return
    epochs, batch_size = problem.settings.max_t, read(configs[0], "batch_size")
    with naming_batch("train_data", "a loader for batches", batch_size):
        steps = problem.train_data.steps(batch_size) or 1
    for schedule in found:
        for step in spread_indices(epochs * steps, ASKED_STEPS):
            try:
                lr_factor({"schedule": schedule}, step / steps, epochs, steps)
            except Exception as error:
                told = f"`schedule` is {schedule!r}, which fails at step {step} of {epochs * steps}"
                raise ValueError(f"{told} with {type(error).__name__}: {error}") from error


def _check_largest_batches(problem: Problem, configs: Sequence[Mapping[str, Any]]) -> None:
    """Check that loaders have a batch at the largest batch size. With `drop_last`, a loader may have none."""
    largest: int = max(read(config, "batch_size") for config in configs)
    evaluated = f"its first batch in evaluation ({EVAL_BATCH_FACTOR} times `batch_size`)"
    for argument, data, name, size in (
        ("train_data", problem.train_data, "its first batch", largest),
        ("val_data", problem.val_data, evaluated, EVAL_BATCH_FACTOR * largest),
    ):
        with naming_batch(argument, name, size):
            if data.steps(size) is None:
                next(data.in_order(size))


def _of_batch_sizes(problem: Problem, configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a hint if the largest batch size of the space exceeds the number of training examples."""
    largest: int = max((config["batch_size"] for config in configs if "batch_size" in config), default=0)
    if not largest or problem.train_data.steps(largest) != 1:
        return []
    whole = next(problem.train_data.in_order(largest))
    if not can_be_split(whole) or (length := batch_length(whole)) >= largest:
        return []
    few = f"`batch_size` is up to {largest}, but `train_data` has only {length} examples"
    return [f"hint: {few}. Sizes above {length} train as {length} does, in one step an epoch"]


def _of_surrogates(problem: Problem, found: DryRun, ratio: float) -> list[str]:
    """Return a message if surrogates may be wider than the user expects. Warn if they are hardly narrower."""
    if found.narrowed is None:
        return []
    told, summary = about_width_argument(problem.model_fn), found.narrowed.summary
    if found.narrowed.mostly_wide:
        warn(f"only {summary}: surrogates save little. Give `model_fn` an argument `width_ratio`")
    elif "(" in summary:  # in parentheses are the sizes that did not become narrower
        told = "; ".join(filter(None, [f"surrogates have {ratio:g} of the width: {summary}", told]))
    return [told] if told else []


def _warn_of_doubtful(space: Mapping[str, Any], ratio: float) -> None:
    doubtful = doubtful_hyperparameters(tuned(space), ratio)
    if doubtful:
        width = Fraction(ratio).limit_denominator(64)
        warn(
            f"the best {', '.join(doubtful)} at {width} of the width may not suit the full model, because narrow "
            "models overfit less. To find out, set `sweep=SweepConfig(check_transfer=True)`. Wider surrogates, such as "
            "`sweep=SweepConfig(surrogate=1/4)`, overfit more like the full model"
        )


def _warn_of_modes(settings: TuneConfig) -> None:
    for name, mode in settings.comparison.objectives:
        higher, lower, turned = (_has_word(name, words) for words in (_HIGHER, _LOWER, _TURNED))
        if higher == lower or turned:
            continue
        if higher and mode == "min":
            warn(f"`mode` is 'min', so that the trial with the lowest {name} wins: set `mode='max'` if more is better")
        elif lower and mode == "max":
            warn(f"`mode` is 'max', so that the trial with the highest {name} wins: set `mode='min'` if less is better")


def _has_word(name: str, words: re.Pattern[str]) -> bool:
    """Return whether a metric's name, such as "val_f1_macro", "val_top5" or "val_macroF1", has one of `words`."""
    parts = re.split(r"[^0-9A-Za-z]+", name)
    parts += [piece for part in parts for piece in re.findall(r"[A-Z]+[a-z0-9]*|[a-z0-9]+", part)]
    return any(words.fullmatch(text) for part in parts for text in (part.lower(), part.lower().rstrip("0123456789")))


def _warn_of_endless(warmup: float, max_t: int) -> None:
    if warmup >= max_t:
        warn(
            f"`warmup_epochs` is up to {warmup:g}, and `max_t` is {max_t}: no trial is halved before the end, as no "
            "rung lies before a warm-up is over; shorten the warm-ups"
        )


def _has_decay(problem: Problem, space: Mapping[str, Any], configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if learning rates decay in any training, need no decay, or may decay by the user's own code."""
    of_objective = getattr(as_given(problem.objective), "optimizer_settings", None)
    if problem.own_loop is not None or of_objective is not None:
        return True
    free = any(name in SCHEDULE_FREE for config in configs for name in optimizer_names(config))
    return free or any(schedule != "constant" for schedule in schedules(space, configs))


def _without_rungs_before(warmup: float, settings: TuneConfig) -> TuneConfig:
    """Return settings without the rungs of sweep and race that lie before the end of `warmup` epochs."""
    sweep, race, most = settings.sweep, settings.race, settings.max_t
    grace = first_milestone(sweep.grace_period, most, sweep.reduction_factor, warmup)
    full = first_milestone(settings.first_look, most, race.scaling_factor, warmup)
    asked = race.grace_period if full == settings.first_look else full
    return replace(settings, sweep=replace(sweep, grace_period=grace), race=replace(race, grace_period=asked))
