"""Whether a result of another library's training answers as one of `tune` does."""

from __future__ import annotations

import math
import pickle

from hydro_rasda import TuneResult, load


def answers_as_tunes(result: TuneResult) -> bool:
    """By each name that all results have, after a pickle, too."""
    same, again = load(result.path), pickle.loads(pickle.dumps(result))
    assert isinstance(result, TuneResult)
    assert type(again) is type(result)
    for name in ("best_metric", "best_trial", "metric", "mode"):
        assert getattr(result, name) == getattr(again, name) == getattr(same, name), name
    assert math.isfinite(result.best_metric)
    assert result.best_config == again.best_config == result.trials[result.best_trial].config
    assert result.dataframe().equals(again.dataframe())
    assert len(result.curves()) == len(same.curves())
    assert repr(result).startswith(f"{type(result).__name__}(best_config=")
    assert not result.best_model().training
    assert result.best_metric == result.tuned.best_metric  # type: ignore[attr-defined]
    return result.report(result.path / "report.html").stat().st_size > 0
