"""Finalists that go on at full size from where the sweep left them: its surrogates were as wide as the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from hydro_rasda.run.full_size_stage import record_swept, recorded_epochs
from hydro_rasda.run.state import FINALISTS, Run
from hydro_rasda.training.full_size import states_together
from hydro_rasda.training.fused import states_of
from hydro_rasda.training.fused_learner import State
from hydro_rasda.training.kept_epoch import bettered, kept_epoch


def hand_over(run: Run, finalists: Sequence[int]) -> None:
    """Have full-size training begin with what a sweep at full width has trained of the finalists.

    Args:
        run: Its sweep is over, or out of time; then its checkpoints stay, for a call with more time.
        finalists: Those that have trained on at full size already stay as they are.
    """
    # A training function of the user's has states of its own.
    if run.settings.sweep.surrogate == 1 and run.problem.full_size is None:
        for number in finalists:
            if _goes_on(run, number):
                record_swept(run, number, _state(run, number))
    if run.decided(FINALISTS, run.trials):
        run.store.discard(run.sources.values())
        run.sources.clear()


def _goes_on(run: Run, number: int) -> bool:
    curve = run.curve("surrogate", number)
    if number not in run.sources or not run.can_load(run.sources[number]) or recorded_epochs(run, number) >= max(curve):
        return False
    # The sweep kept the last weights alone: where earlier ones are to be kept, they are trained once more.
    kept = max(curve) if run.settings.race.keep == "last" else kept_epoch(curve, run.settings.mode)
    return math.isfinite(run.score("surrogate", number)) and kept == max(curve)


def _model(state: State) -> State:
    model: State = state["model"]
    return model


def _state(run: Run, number: int) -> State:
    load = partial(run.store.load, device=run.problem.device)
    states = states_of(run.problem, run.trials, number, run.sources[number], load)
    for state in states if run.settings.race.keep == "best" else ():
        for epoch, score in run.curve("surrogate", number).items():
            state["best"] = bettered(state.get("best"), epoch, score, run.settings.mode, partial(_model, state))
    return states_together(states)
