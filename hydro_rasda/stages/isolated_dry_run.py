"""The dry run, where what it tries may end the process that tries it."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from hydro_rasda.dry_run import MISFITS, DryRun, dry_run
from hydro_rasda.problem import Problem
from hydro_rasda.processes.child_count import usable_children
from hydro_rasda.processes.forks import Died, Notify, imap_forked
from hydro_rasda.processes.retry_policy import DEATHS
from hydro_rasda.run.crash_log import CrashLog
from hydro_rasda.run.files import make_private
from hydro_rasda.secret_masking import shown
from hydro_rasda.surrogate_plans import Plans
from hydro_rasda.trial import Trial

DRY_RUN = ".dry-run"
"""File in a run's folder that says which trial is tried, and which ones processes died of."""


def survived_dry_run(problem: Problem, trials: Sequence[Trial], folder: Path | None) -> DryRun:
    """Do a dry run that passes over trials which end their process.

    If the process can be forked, a forked one tries the trials first. Otherwise a file in the run's folder names the
    trial that is being tried, so that a later call of the same name passes over it.

    Args:
        trials: At least one.
        folder: The run's folder; None if no later call could have the same.

    Raises:
        ValueError: If no trial can be trained; see `dry_run`.
    """
    if usable_children(problem):
        return dry_run(problem, _scouted(problem, trials))
    with _noted_in(folder) as doing:
        left = [trial for trial in trials if not doing.blamed(_name(trial))]
        if not left:
            raise _deadly(trials[0], doing.blamed(_name(trials[0])))
        tried = _noting(left, doing)
        try:
            return dry_run(problem, tried)
        finally:
            tried.close()


def _name(trial: Trial) -> str:
    config = hashlib.sha256(repr(dict(trial.config)).encode()).hexdigest()  # which may have secrets
    return f"trying trial {trial.number}: {config}"


def _noting(trials: Iterable[Trial], doing: CrashLog) -> Generator[Trial, None, None]:
    for trial in trials:
        with doing.of(_name(trial)):
            yield trial


@contextlib.contextmanager
def _noted_in(folder: Path | None) -> Iterator[CrashLog]:
    """Notes in a run's folder, which is there only while it has any."""
    if folder is None:
        yield CrashLog()
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    make_private(folder)
    doing = CrashLog(folder / DRY_RUN)
    try:
        yield doing
    finally:
        doing.close()
        with contextlib.suppress(OSError):  # it is not empty
            for path in made:
                path.rmdir()


def _scouted(problem: Problem, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials for which a forked process survived all checks of a dry run.

    Raises:
        ValueError: If there is none, or if too many in a row ended their process.
    """
    safe, left, first = list[Trial](), list(trials), None
    for _ in range(MISFITS):
        tried, how = _scout(problem, left)
        if not how:
            return safe + left
        how = _scout(problem, [tried])[1]  # it may have run out of memory by what ran beside it
        if not how:
            return [*safe, tried]
        first = first or _deadly(tried, how)
        at = left.index(tried)
        safe, left = safe + left[:at], left[at + 1 :]
        if not left:
            break
    assert first is not None
    raise first


def _scout(problem: Problem, trials: Sequence[Trial]) -> tuple[Trial, str]:
    """Have a process do a dry run: which trial it tried last, and what ended it, in words; or nothing."""
    tried = [trials[0]]

    def piece(notify: Notify) -> Plans:
        def each() -> Iterator[Trial]:
            for at, trial in enumerate(trials):
                notify(at)
                yield trial

        # What it says is said once more, where it can be told.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dry_run(problem, each(), survey=False)
        return problem.plans

    ((_, found),) = imap_forked([piece], torch.get_num_threads(), lambda at: tried.append(trials[at]))
    if isinstance(found, Died):
        return tried[-1], found.how
    problem.plans.update(found)
    return tried[-1], ""


def _deadly(trial: Trial, how: str) -> ValueError:
    return ValueError(
        "`model_fn`, the model, its objective or its data end the process that tries them, for "
        f"{shown(trial.config)!r}, {DEATHS} times: {how}"
    )
