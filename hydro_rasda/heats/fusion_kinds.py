"""Find the trials that can train as one fused model, and note which keys of a configuration are read to build a model.

Such trials are of one kind. A kind is a digest of all that the members of a fused model must share.
"""

from __future__ import annotations

import hashlib
import math
import time
import traceback
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from torch import nn

from fusion import fusion_key
from fusion.keys import own_parts, read
from hydro_rasda.common.trial import Trial
from hydro_rasda.heats.unused_keys import Unread, unread_of
from hydro_rasda.history.lines import JournalLine, Unit, failure_line
from hydro_rasda.history.scores import OWN_LOOP
from hydro_rasda.problem.objective import reads_config, steering
from hydro_rasda.problem.precision import as_given
from hydro_rasda.problem.problem import Problem
from hydro_rasda.problem.read_keys import Notes, Reads, all_of, leaves
from hydro_rasda.problem.width_argument import Plans
from hydro_rasda.processes.forks import Died, Notify, imap_forked
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.run.crash_log import CrashLog
from hydro_rasda.training.lr_and_decay_by_parameter import multipliers, optimizer_settings
from hydro_rasda.training.retry_policy import Deaths, failure


def find_kinds(
    problem: Problem,
    trials: Sequence[Trial],
    children: int,
    doing: CrashLog | None = None,
    costs: Mapping[int, Mapping[str, float]] = {},
    until: float = math.inf,
) -> Unit:
    """Find out which trials' surrogates can be fused. If a model cannot be built, only its trial fails.

    Args:
        children: Processes to fork for building the models; 0 builds them in this process.
        doing: The crash log. With `children=0`, it notes which model is being built, in case this process dies of it.
            None for no log.
        costs: `costs[trial]` has the costs of the trial's full-size model. They are added to the unit's lines.
        until: Time of the monotonic clock after which no more models are built. The first model of each process is
            always built. The unit leaves out the first trial whose model was not built, and all after it.

    Returns:
        A unit of the journal. Its value maps each trial to a digest of its fusion key, batch size and muP multipliers.
        Trials with the same digest can train as one model. Trials that the user's own function trains share one kind,
        and their models are not built here. The unit's lines name the keys of each configuration that nothing reads.
    """
    if problem.is_own("sweep"):
        found = dict.fromkeys((trial.number for trial in trials), _Kind(OWN_LOOP))
    elif children:
        found = _found(
            problem,
            [trials[at::children] for at in range(min(children, len(trials)))],
            HangDetector("no model was built", foreseen=problem.epoch_seconds),
            Deaths(),
            until,
        )
    else:
        found, _ = _kinds_of(problem, trials, doing or CrashLog(), until)
    # Everywhere else, a trial's number is its place among the run's trials. So none may be missing in between.
    trials = [*takewhile(lambda trial: trial.number in found, trials)]
    lines: list[JournalLine] = []
    for trial in trials:
        unread = found[trial.number].unread
        line = {"event": "trial", "trial": trial.number, "config": dict(trial.config), "unread": unread}
        lines.append({**line, "costs": dict(costs[trial.number])} if trial.number in costs else line)
        if (error := found[trial.number].error) is not None:
            lines.append(failure_line(trial.number, error))
    # Keep the order of the trials rather than that of the children, so that one seed always gives the same journal.
    ordered = {trial.number: found[trial.number] for trial in trials}
    return Unit({number: kind.digest for number, kind in ordered.items() if kind.error is None}, lines)


def _found(
    problem: Problem, parts: Sequence[Sequence[Trial]], pace: HangDetector, deaths: Deaths, until: float
) -> dict[int, _Kind]:
    """Find the kind of each trial. One process builds the models of each part; all processes run at the same time.

    If a process dies or hangs, its part is built again. If another process then dies or hangs at the same trial, that
    trial fails, and the rest of the part is built.
    """
    found: dict[int, _Kind] = {}
    reached = {at: part[0].number for at, part in enumerate(parts)}
    died: dict[int, str] = {}
    pieces = [partial(_built, problem, part, at, until) for at, part in enumerate(parts)]
    for at, given in imap_forked(pieces, 1, reached.__setitem__, pace):
        if isinstance(given, Died):
            died[at] = given.how
        else:
            kinds, plans = given
            found |= kinds
            problem.plans.update(plans)
    for at, how in died.items():
        again = parts[at]
        if not deaths.again(reached[at]):
            found[reached[at]] = _Kind(error=failure(how, "built"))
            again = [trial for trial in again if trial.number != reached[at]]
        if again:
            found |= _found(problem, [again], pace, deaths, until)
    return found


def _built(
    problem: Problem, trials: Sequence[Trial], part: int, until: float, notify: Notify
) -> tuple[dict[int, _Kind], Plans]:
    return _kinds_of(problem, trials, CrashLog(), until, partial(notify, part))


ALIKE = 4
"""If this many models that were built from the same values had the same kind, further such models are not built."""
MOST = 256
"""Largest number of distinct configurations to remember. If there are more, hardly any two of them are alike."""


@dataclass(frozen=True)
class _Kind:
    digest: str = ""
    error: str | None = None
    unread: Unread = field(default_factory=dict)


@dataclass
class _Seen:
    """Configurations that have the same values for all keys that decide about the model.

    `digest` is the kind of their models; it is empty if these were of several kinds. `times` counts the models built.
    """

    settings: tuple[Hashable, ...]
    reads: Reads
    notes: Notes
    digest: str
    times: int = 1


def _kinds_of(
    problem: Problem,
    trials: Sequence[Trial],
    doing: CrashLog,
    until: float,
    notify: Notify = lambda number: None,
) -> tuple[dict[int, _Kind], Plans]:
    """Return the kind of each trial, and the plans by which models were made narrower, for use in other processes."""
    seen: list[_Seen] = []
    found: dict[int, _Kind] = {}
    # Build those models last at which earlier processes died.
    for trial in sorted(trials, key=lambda trial: doing.suspected(_building(trial))):
        if trials[0].number in found and time.monotonic() >= until:
            break
        notify(trial.number)
        if how := doing.dropped(_building(trial)):
            found[trial.number] = _Kind(error=how)
            continue
        with doing.of(_building(trial)):
            found[trial.number] = _kind(problem, trial, seen)
    return found, problem.plans


def _building(trial: Trial) -> str:
    return f"building trial {trial.number}"


def _kind(problem: Problem, trial: Trial, seen: list[_Seen]) -> _Kind:
    """Return the kind of a trial. Its model is not built if `ALIKE` models of the same values had the same kind.

    If `model_fn` builds at random, equal kinds may be a coincidence. `fuse` compares all members, and then refuses the
    group, so that each of its trials trains alone.
    """
    try:
        own, settings = all_of(trial.config), (trial.batch_size, own_parts(trial.config))
        alike = next((one for one in seen if one.settings == settings and one.reads <= own), None)
        if alike is not None and alike.digest and alike.times >= ALIKE:
            return _Kind(alike.digest, unread=unread_of(alike.notes, trial.config))
        surrogate, notes = build_noting(problem, trial)
        digest = _digest(problem, trial, surrogate)
        reads = _reads(problem, trial, notes)
        if notes is not None:
            notes.read |= problem.objective_reads
    except (Exception, SystemExit):  # a SystemExit of `model_fn` would end the script, perhaps with success
        return _Kind(error=traceback.format_exc())
    if alike is not None:
        alike.digest = digest if alike.digest == digest else ""
        alike.times += 1
    elif notes is not None and reads is not None and len(seen) < MOST:
        seen.append(_Seen(settings, reads, notes, digest))
    return _Kind(digest, unread=unread_of(notes, trial.config))


def _digest(problem: Problem, trial: Trial, surrogate: nn.Module) -> str:
    """Return a digest of all that the trials of a group must share. Trials with equal digests are of one kind."""
    # The optimizers are left out: members may have different ones, if these update the same parts of the model. The
    # multipliers are not left out: full-size models of different widths may have equal surrogates, whose learning rates
    # scale differently.
    settings = optimizer_settings(problem.objective, surrogate, trial.config)
    scales = multipliers(settings, surrogate, problem.settings.sweep.surrogate)
    accumulate, parts = read(settings.config, "accumulate"), own_parts(settings.config)
    shared = (fusion_key(surrogate), trial.batch_size, accumulate, *parts, repr(scales))
    return hashlib.sha256(repr(shared).encode()).hexdigest()[:12]


def _reads(problem: Problem, trial: Trial, notes: Notes | None) -> Reads | None:
    """Return the configuration values that decide about a trial's model; None if they are not known.

    A value may have been read when the model was built, or earlier, when the plan of its narrower model was made.
    """
    reads = None if notes is None else notes.of(trial.config)
    if reads is not None and reads_config(as_given(problem.objective)):
        # The keys of the objective decide about the kind, too, except floats: in a fused group, each member has its own
        # value.
        given = Notes()
        given.read |= {key for key, value in leaves(steering(trial.config)) if not isinstance(value, float)}
        also = given.of(trial.config)
        reads = None if also is None else reads | also
    plan = problem.plans.known_for(problem.settings.sweep.surrogate, trial.config)
    return reads if reads is None or plan is None else reads | plan[1]


def build_noting(problem: Problem, trial: Trial) -> tuple[nn.Module, Notes | None]:
    """Build a trial's surrogate. Return it with notes of the keys that `model_fn` read; None if these are unknown.

    The keys are unknown if the model keeps the configuration, because then it may read any key later. They are also
    unknown if `model_fn` fails on the configuration's stand-in, which notes the keys.
    """
    notes = Notes(may_be_kept=False)
    try:
        surrogate = replace(problem, model_fn=notes.taken_by(problem.model_fn)).surrogate(trial)
    except (Exception, SystemExit):  # the model keeps its configuration, or `model_fn` fails or refuses the stand-in
        return problem.surrogate(trial), None
    return surrogate, notes
