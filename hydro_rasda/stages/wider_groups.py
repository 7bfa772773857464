"""Find structures whose trials can join the groups of wider ones, their models padded with zeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fusion import fusion_key
from fusion.padding import fits_into, pads_exactly
from fusion.skeleton_and_tensors import count_samples
from fusion.width.microbatch import can_be_split, split
from hydro_rasda.contracts import evenly
from hydro_rasda.precision import as_given
from hydro_rasda.problem import Problem
from hydro_rasda.processes.forks import Died, map_forked
from hydro_rasda.processes.hang_detector import HangDetector
from hydro_rasda.run.journal import Unit
from hydro_rasda.trial import Trial

SAMPLES = 16
"""Examples on which a padded model is compared with the model itself."""


def find_wider(problem: Problem, examples: Mapping[str, Trial], children: int) -> Unit:
    """Find, for each kind of trials, the next wider kind to whose shapes its models can be padded exactly.

    Kinds that differ in more than widths are not compared, nor any if the objective has optimizer settings of its own.

    Args:
        children: Processes that are forked to compare them; 0 compares them in this one.

    Returns:
        A unit whose value has, by kind, the next wider kind and the share of its parameters.
    """
    forms: dict[str, dict[str, Trial]] = {}
    for kind, trial in examples.items():
        forms.setdefault(form(kind), {})[kind] = trial
    several = [of for of in forms.values() if len(of) > 1]
    if getattr(as_given(problem.objective), "optimizer_settings", None) is not None:
        several = []
    pace = HangDetector("no model was compared", foreseen=problem.epoch_seconds)
    found: dict[str, tuple[str, float]] = {}
    parts = evenly(several, max(1, children)) if several else []
    for of_part in map_forked([partial(_of_forms, problem, part) for part in parts], children, pace):
        found |= {} if isinstance(of_part, Died) else of_part
    return Unit(found, [])


def form(kind: str) -> str:
    """Return the part of a kind's digest in which kinds agree that differ in nothing but widths."""
    return kind.partition("-")[0]


def _of_forms(problem: Problem, forms: Sequence[Mapping[str, Trial]]) -> dict[str, tuple[str, float]]:
    return {kind: wider for examples in forms for kind, wider in _of_form(problem, examples).items()}


def _of_form(problem: Problem, examples: Mapping[str, Trial]) -> dict[str, tuple[str, float]]:
    """Compare each model with the next wider one; padding that is exact to each next one is exact to all wider ones."""
    try:
        models = ((kind, problem.surrogate(trial)) for kind, trial in examples.items())
        described = {kind: (sum(p.numel() for p in model.parameters()), fusion_key(model)) for kind, model in models}
        batch = next(problem.train_data.epoch(next(iter(examples.values())).batch_size, 0))
    except (Exception, SystemExit):  # its own training will tell why
        return {}
    if can_be_split(batch):
        batch = split(batch, max(1, count_samples(batch) // SAMPLES))[0]
    ordered, found = sorted(described, key=lambda kind: described[kind][0]), {}
    for at, kind in enumerate(ordered):
        own, key = described[kind]
        wider = next((other for other in ordered[at + 1 :] if fits_into(key, described[other][1])), None)
        if wider is not None:
            # Built anew, so that no more than two are there at a time.
            pair = problem.surrogate(examples[kind]), problem.surrogate(examples[wider])
            if pads_exactly(*pair, as_given(problem.objective), batch):
                found[kind] = (wider, own / described[wider][0])
    return found
