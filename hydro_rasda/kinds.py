"""Which trials can train as one fused model."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from fusion import fusion_key

from .forks import Died, each, evenly
from .fused import multipliers
from .problem import Problem, Trial
from .store import Line, Unit
from .unread import Unread, build_noting


def find_kinds(problem: Problem, trials: Sequence[Trial], cores: int) -> Unit:
    """Build each trial's surrogate, to see with whom it can be fused; a trial whose model fails, fails alone.

    Returns:
        A unit whose value has, by trial, a digest of its fusion key, batch size and muP multipliers: trials of one
        digest can train as one model. Its lines say which keys of each configuration nothing reads.
    """
    parts = evenly(trials, cores)
    found: dict[int, _Kind] = {}
    for part, given in zip(parts, each([partial(_kinds_of, problem, part) for part in parts], cores)):
        found |= given if not isinstance(given, Died) else {t.number: _Kind(error=given.how) for t in part}
    lines: list[Line] = []
    for trial in trials:
        unread = found[trial.number].unread
        lines.append({"event": "trial", "trial": trial.number, "config": dict(trial.config), "unread": unread})
        if (error := found[trial.number].error) is not None:
            lines.append({"event": "failed", "trial": trial.number, "error": error})
    return Unit({number: kind.digest for number, kind in found.items() if kind.error is None}, lines)


@dataclass(frozen=True)
class _Kind:
    digest: str = ""
    error: str | None = None
    unread: Unread = field(default_factory=dict)


def _kinds_of(problem: Problem, trials: Sequence[Trial]) -> dict[int, _Kind]:
    return {trial.number: _kind(problem, trial) for trial in trials}


def _kind(problem: Problem, trial: Trial) -> _Kind:
    try:
        surrogate, unread = build_noting(problem, trial)
        # Targets of different widths can have surrogates of one width, for which learning rates scale differently.
        scales = repr(multipliers(surrogate, problem.width_ratio))
        key = fusion_key(surrogate, trial.batch_size, scales)
    except Exception:
        return _Kind(error=traceback.format_exc())
    return _Kind(hashlib.sha256(repr(key).encode()).hexdigest()[:12], unread=unread)
