"""A sweep played in memory: a rule decides over given curves, and nothing trains."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hydro_rasda.schedulers import Mode, SweepRule, SweepState
from hydro_rasda.schedulers.sweep_rule import carry_out, checked_moves

Curves = Sequence[Sequence[float]]


def play(rule: SweepRule, curves: Curves, mode: Mode = "min", at_once: int | None = None, seed: int = 0) -> SweepState:
    """Play a sweep to its end.

    Args:
        rule: Decides.
        curves: By trial, the score after each epoch; a trial fails where its curve ends.
        mode: Of the scores.
        at_once: Trials that come to their milestones between two decisions, drawn by `seed`; None for all that train.
        seed: Of the order in which trials come.
    """
    sweep = SweepState(mode, max(map(len, curves)), 2)
    sweep.left = len(curves)
    drawn = random.Random(seed)
    while True:
        if moves := checked_moves(rule, rule.decide(sweep), sweep):
            carry_out(moves, sweep)
            sweep.idle = False
        elif sweep.left and (wanted := rule.admit(sweep)):
            for number in range(len(sweep.trials), len(sweep.trials) + min(wanted, sweep.left)):
                sweep.admit(number, {})
                sweep.left -= 1
        elif sweep.training:
            training = sorted(sweep.training)
            for number in drawn.sample(training, min(at_once or len(training), len(training))):
                trial = sweep.trials[number]
                assert trial.goal is not None
                if (last := min(trial.goal, len(curves[number]))) < trial.goal:
                    sweep.ended[number] = "failed"
                sweep.spent += max(0, last - trial.epoch)
                sweep.come(number, {at: curves[number][at - 1] for at in range(trial.epoch + 1, last + 1)})
        elif not sweep.idle:
            sweep.idle = True
        else:
            return sweep
