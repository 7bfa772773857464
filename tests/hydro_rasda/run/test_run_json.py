from __future__ import annotations

import json

from hydro_rasda import RaceConfig, SweepConfig
from hydro_rasda.run.run_json import FORMAT, determining, recorded
from hydro_rasda.settings.config import TuneConfig


def test_limits_on_cost_do_not_make_another_run() -> None:
    asked = determining(TuneConfig())
    race = RaceConfig(checkpoint_every=2)
    bounded = TuneConfig(time_budget_s=5.0, race=race, loader_workers=1, stop_at=0.5, graph=False)
    assert determining(bounded) == asked
    assert determining(TuneConfig(race=RaceConfig(scaling_factor=3))) != asked
    assert json.loads(json.dumps(asked)) == asked


def test_settings_have_the_names_of_format_2() -> None:
    """Runs go on only if their settings have the same names; others need another format."""
    assert FORMAT == 2
    assert determining(TuneConfig()) == {
        **{"metric": "val_loss", "mode": "min", "num_samples": 64, "max_t": 27, "grace_period": 1},
        **{"reduction_factor": 3, "top_k": 4, "full_trainings": 3.0, "surrogate": 0.125, "fusion": "auto"},
        **{"constraints": None, "depth": 1.0, "folds": 0, "refit": True, "repeats": 1},
        **{"check_transfer": False, "keep": "best", "patience": None, "ema": 0.03, "precision": "fp32", "seed": 0},
        "rasda": {
            **{"grace_period": None, "reduction_factor": 2, "scaling_factor": 2, "workers": 1, "max_workers": None},
            **{"lr_rule": "auto", "grow": "due", "least_efficiency": 0.5, "batch_over_noise": 1.0, "strategy": "ddp"},
        },
    }


def test_settings_are_read_from_what_was_kept() -> None:
    race = RaceConfig(top_k=2, keep="last", grace_period=3, workers=2)
    asked = TuneConfig(num_samples=5, sweep=SweepConfig(surrogate=0.5, depth=0.5, fusion=2), race=race)
    own, sweep, race_kept = recorded({**determining(asked), "space": {}, "wait": 0.5})
    assert TuneConfig(**own, sweep=SweepConfig(**sweep), race=RaceConfig(**race_kept)) == asked
