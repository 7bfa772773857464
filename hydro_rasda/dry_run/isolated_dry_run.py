"""The dry run, protected against trials that end their process, for example by a crash or a lack of memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hydro_rasda.common.trial import Trial
from hydro_rasda.dry_run.dry_run import MISFITS, DryRun, dry_run, survey_data
from hydro_rasda.problem.dry_run_of_batches import Misfit
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.width_argument import Plans
from hydro_rasda.processes.child_count import usable_children
from hydro_rasda.processes.forks import Died, Notify, imap_forked, plain_warning
from hydro_rasda.run.crash_log import CrashLog
from hydro_rasda.training.retry_policy import DEATHS


def survived_dry_run(problem: Problem, trials: Sequence[Trial], doing: CrashLog) -> DryRun:
    """Do a dry run that skips trials which end their process.

    If this process can be forked, a fork tries the trials, and this process only reads the data. If the fork refuses
    all trials, or cannot send its findings, this process repeats the dry run.

    If this process cannot be forked, the run's crash log names the trial that is being tried. After a crash, a later
    call tries that trial last. If another process dies of it, later calls drop the trial.

    Raises:
        ValueError: For the reasons of `dry_run`; also if no trial is left to try.
    """
    if usable_children(problem):
        safe, scouted = _scouted(problem, trials)
        if scouted.found is not None:
            for _, warning in scouted.warned:
                warnings.warn_explicit(**warning)
            # Read the data in this process: if a Dataset caches its examples, later forks then share the cache.
            with contextlib.suppress(Misfit), warnings.catch_warnings():
                for text, warning in scouted.warned:  # do not give them twice
                    warnings.filterwarnings("ignore", re.escape(text), lineno=warning["lineno"])
                survey_data(problem, scouted.trial, scouted.found)
                return scouted.found
        return dry_run(problem, safe)
    left = [trial for trial in trials if not doing.dropped(_name(trial))]
    if not left:
        raise _deadly(trials[0], doing.dropped(_name(trials[0])))
    with contextlib.closing(_noting(sorted(left, key=lambda trial: doing.suspected(_name(trial))), doing)) as tried:
        return dry_run(problem, tried)


def _name(trial: Trial) -> str:
    config = hashlib.sha256(repr(dict(trial.config)).encode()).hexdigest()
    return f"trying trial {trial.number}: {config}"


def _noting(trials: Iterable[Trial], doing: CrashLog) -> Generator[Trial, None, None]:
    for trial in trials:
        with doing.of(_name(trial)):
            yield trial


@dataclass(frozen=True)
class _Scouted:
    """The result of a dry run in a forked process.

    Attributes:
        trial: The trial that was tried last.
        how: Why the process ended, in words; "" if it survived.
        found: Findings of the dry run; None if it refused all trials, or if the findings cannot be sent.
        warned: Each warning of the process: its text, and the warning as plain values.
    """

    trial: Trial
    how: str = ""
    found: DryRun | None = None
    warned: Sequence[tuple[str, Mapping[str, Any]]] = ()


def _scouted(problem: Problem, trials: Sequence[Trial]) -> tuple[list[Trial], _Scouted]:
    """Do a dry run in forked processes, without the trials that end their process.

    Returns:
        The trials that may be tried in this process, and the result of the last dry run.

    Raises:
        ValueError: If no trial is left, or if `MISFITS` trials ended their process.
    """
    safe, left, first = list[Trial](), list(trials), None
    for _ in range(MISFITS):
        scouted = _scout(problem, left)
        if not scouted.how:
            return safe + left, scouted
        scouted = _scout(problem, [scouted.trial])  # try it once more: other processes may have used up the memory
        if not scouted.how:
            return [*safe, scouted.trial], scouted
        first = first or _deadly(scouted.trial, f"{DEATHS} times, {scouted.how}")
        at = left.index(scouted.trial)
        safe, left = safe + left[:at], left[at + 1 :]
        if not left:
            break
    assert first is not None
    raise first


def _scout(problem: Problem, trials: Sequence[Trial]) -> _Scouted:
    """Let a forked process do a dry run without the survey of the data."""
    tried = [trials[0]]

    def piece(notify: Notify) -> tuple[Plans, DryRun | None, list[tuple[str, dict[str, Any]]]]:
        def each() -> Iterator[Trial]:
            for at, trial in enumerate(trials):
                notify(at)
                yield trial

        found = None
        # Ignore errors: the tuner's process repeats a dry run that fails here, and then raises the error itself.
        with contextlib.suppress(Exception), warnings.catch_warnings(record=True) as caught:
            found = _as_sent(dry_run(problem, each(), survey=False))
        warned = {(str(one.message), one.filename, one.lineno): plain_warning(one) for one in caught}
        return problem.plans, found, [(text, warning) for (text, *_), warning in warned.items()]

    ((_, answer),) = imap_forked([piece], torch.get_num_threads(), lambda at: tried.append(trials[at]))
    if isinstance(answer, Died):
        return _Scouted(tried[-1], answer.how)
    plans, *findings = answer
    problem.plans.update(plans)
    return _Scouted(tried[-1], "", *findings)


def _as_sent(found: DryRun) -> DryRun:
    """Return findings in the form that another process gets. Raise if a part, such as model inputs, cannot be sent."""
    sent = io.BytesIO()
    torch.save(found, sent)
    sent.seek(0)
    received: DryRun = torch.load(sent, weights_only=False)
    return received


def _deadly(trial: Trial, how: str) -> ValueError:
    return ValueError(
        "`model_fn`, the model, its objective or its data end the process that tries them, for "
        f"{dict(trial.config)!r}: {how}"
    )
