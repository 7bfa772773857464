"""Trials of a sweep that continue as copies of others, in population based training."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.hyperparameters import KEYS
from fusion.part_settings import is_of_part
from hydro_rasda.run.events import TrialConfigured
from hydro_rasda.run.state import Run
from hydro_rasda.schedulers import Continue, SweepState
from hydro_rasda.search import Search
from hydro_rasda.secret_masking import hide
from hydro_rasda.stages.dispatch import Dispatcher
from hydro_rasda.trial import Trial


def make_copies(
    run: Run, state: SweepState, search: Search, dispatcher: Dispatcher, moves: Mapping[int, Continue], recalled: bool
) -> None:
    """Let trials continue with other trials' weights and configurations, as these were before any copy.

    If `recalled`, an earlier process made this decision. Raise ValueError if a copy has trained further already, or if
    a change would make another model.
    """
    of = {number: move.copy_of for number, move in moves.items() if move.copy_of is not None}
    trials = dict(run.trials)
    for number in {*of, *of.values()}:
        if run.epochs("surrogate", number) > state.trials[number].epoch:
            raise cannot_grow(number)
    for number in of:
        _check_structure(run, dispatcher, number, moves[number])
    sources = {number: run.sources[copied] for number, copied in of.items()}
    kinds = {number: dispatcher.kinds[copied] for number, copied in of.items()}
    for number, copied in of.items():
        search.close(number, run.epochs("surrogate", number), state.trials[number].score)
        run.failures.pop(number, None)
        run.trials[number] = Trial(number, {**trials[copied].config, **moves[number].changes})
        run.unread[number] = run.unread.get(copied, frozenset())
        run.costs[number] = run.costs.get(copied, {})
        config = hide(run.trials[number].config, run.hidden)
        run.notify(TrialConfigured, trial=number, config=config, recalled=recalled)
    before = {number: run.sources[number] for number in of if number in run.sources}
    run.sources |= sources
    run.store.discard(set(before.values()) - set(run.sources.values()))
    dispatcher.kinds |= kinds
    dispatcher.copies |= of


def _check_structure(run: Run, dispatcher: Dispatcher, number: int, move: Continue) -> None:
    """Refuse to change a key of the user's in which no two trials of one structure differ."""
    for key in move.changes:
        values: dict[str, set[str]] = {}
        for trial, kind in dispatcher.kinds.items():
            values.setdefault(kind, set()).add(repr(run.trials[trial].config.get(key)))
        if key not in KEYS and not is_of_part(key) and all(len(of_kind) == 1 for of_kind in values.values()):
            raise ValueError(
                f"`sweep.rule` changes `{key}` of trial {number} to {move.changes[key]!r}, but trials that differ in "
                "it have models of different structures: leave it out of what the rule explores"
            )


def cannot_grow(number: int) -> ValueError:
    """Return the error of a run that is given more samples although its rule has copied a trial."""
    return ValueError(
        f"`num_samples` is more than the run had, but what its trial {number} has trained since then does not count "
        "among more: its sweep rule copies weights; begin another run, under a new `name`"
    )
