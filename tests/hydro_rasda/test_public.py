from __future__ import annotations

import inspect

import hydro_rasda


def test_public_names() -> None:
    assert hydro_rasda.__all__ == [
        "AllTrialsFailed",
        "Cost",
        "RASDAConfig",
        "RASDAScheduler",
        "RunExists",
        "TrialRecord",
        "TuneResult",
        "choice",
        "grid_search",
        "loguniform",
        "qloguniform",
        "quniform",
        "randint",
        "sample_from",
        "tune",
        "uniform",
    ]


def test_every_public_name_is_there_and_documented() -> None:
    for name in hydro_rasda.__all__:
        assert inspect.getdoc(getattr(hydro_rasda, name)), name


def test_every_argument_of_tune_is_documented() -> None:
    documented = inspect.getdoc(hydro_rasda.tune)
    assert documented is not None
    for name in inspect.signature(hydro_rasda.tune).parameters:
        assert f"    {name}: " in documented
