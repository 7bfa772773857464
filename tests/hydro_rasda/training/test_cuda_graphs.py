"""Recorded steps of learners give what the same steps give as they are written; a recorder stands in for CUDA."""

from __future__ import annotations

import gc
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.graph import GraphWarning
from fusion.optim import native
from hydro_rasda import LocalBackend, RaceConfig, TuneResult
from hydro_rasda.common.trial import Trial
from hydro_rasda.contracts import Group, Outcome, Span, Task, full_size_task
from hydro_rasda.data import ALONE, make_batches
from hydro_rasda.problem.problem import Problem
from hydro_rasda.training import fused_learner, single_learner
from hydro_rasda.training.full_size import RankPlace, full_size_learner, train_full_size_trial, train_target_on_ranks
from hydro_rasda.training.fused_learner import FusedLearner
from hydro_rasda.training.group_training import train_group
from tests.hydro_rasda.models import mlp
from tests.recorder import DEVICE, Counted, Recorder, recording

pytestmark = pytest.mark.gpu

OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "schedule": "cosine", "grad_clip": 1.0},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "warmup_epochs": 1.5},
    {"optimizer": "adam", "lr": 0.003, "schedule": "exponential", "gamma": 0.7},
]
TRIALS = {n: Trial(n, {**config, "batch_size": 48, "dropout": 0.2}) for n, config in enumerate(OPTIMIZERS)}
EPOCHS, STEPS, WHOLE = 3, 7, 6  # of 48 in 320 examples, of which the last has 32


@pytest.fixture
def problem(problem: Problem) -> Problem:
    return problem.on(DEVICE)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder | Counted]:
    monkeypatch.setattr(native, "takes", lambda tensors: False)  # as on a GPU
    with recording() as made:
        yield made


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, Mapping):
        return ours.keys() == theirs.keys() and all(equal(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


def group(problem: Problem, members: tuple[int, ...], start: int, stop: int, source: Any = None) -> Outcome:
    parts = (Group("kind", members, fused=True),)
    task = Task("key", parts, () if source is None else ("before",), Span(start, stop))
    return train_group(problem, TRIALS, task, lambda key: {"parts": source})


def test_a_group_trains_the_same_also_as_members_leave(problem: Problem, recorder: Recorder | Counted) -> None:
    outcomes = []
    for graph in ("auto", False):
        asked = problem.with_settings(graph=graph)
        first = group(asked, (0, 1, 2), 0, EPOCHS)
        outcomes.append((first, group(asked, (2, 0), EPOCHS, 2 * EPOCHS, first.checkpoint)))
        if graph:
            assert recorder.recordings == 2
            assert recorder.replays == 2 * (EPOCHS * WHOLE - 4)
    assert recorder.recordings == 2
    for ours, theirs in zip(*outcomes):
        assert ours.failures == theirs.failures == {}
        assert equal(ours.history, theirs.history)
        assert equal(ours.checkpoint, theirs.checkpoint)


def target(problem: Problem, number: int, span: Span, state: Any = None) -> Outcome:
    trial = Trial(number, {**TRIALS[number].config, "accumulate": number or 1})
    outcome = train_full_size_trial(problem, trial, full_size_task("key", number, span, None, 0), state)
    assert outcome.error is None, outcome.error
    return outcome


@pytest.mark.parametrize("number", TRIALS)
def test_a_full_size_model_trains_the_same(
    problem: Problem, recorder: Recorder | Counted, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """To the last bit like the same optimizer in steps that are not recorded; like torch's own but for rounding."""
    recorded = target(problem, number, Span(0, EPOCHS))
    assert recorder.replays == EPOCHS * WHOLE - 4
    plain = target(problem.with_settings(graph=False), number, Span(0, EPOCHS))

    def fail(*args: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(type(recorder), "record", fail)
    with pytest.warns(GraphWarning, match="not recorded, RuntimeError: operation not permitted"):
        fallen_back = target(problem, number, Span(0, EPOCHS))
    assert equal(recorded.epochs, fallen_back.epochs)
    assert equal(recorded.state, fallen_back.state)
    (ours,), (theirs,) = (state["optimizer"]["param_groups"] for state in (recorded.state, plain.state))
    assert ours == {**theirs, "lr": pytest.approx(theirs["lr"], rel=1e-6)}
    for name, weight in plain.state["model"].items():
        torch.testing.assert_close(recorded.state["model"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_a_recorded_run_goes_on_as_another_and_the_other_way_round(
    problem: Problem, recorder: Recorder | Counted, number: int
) -> None:
    whole = target(problem.with_settings(graph=False), number, Span(0, 4))
    for first, second in (("auto", False), (False, "auto")):
        half = target(problem.with_settings(graph=first), number, Span(0, 2))
        rest = target(problem.with_settings(graph=second), number, Span(2, 4), half.state)
        losses = [metrics["train_loss"] for _, metrics in half.epochs + rest.epochs]
        assert losses == pytest.approx([metrics["train_loss"] for _, metrics in whole.epochs], rel=1e-4)
    assert recorder.recordings == 2


def test_a_learner_that_is_let_go_is_gone_with_its_memory(problem: Problem, recorder: Recorder | Counted) -> None:
    """Without waiting for the collection of garbage, as the next one needs the memory."""
    share = next(problem.train_data.shares(48, 0, ALONE))
    fused = FusedLearner([problem.surrogate(t) for t in TRIALS.values()], [t.config for t in TRIALS.values()], problem)
    single = full_size_learner(problem, TRIALS[0])
    gc.disable()
    try:
        for step in range(6):
            fused.step(share, step / 6, 6)
            single.step(share, step / 6, 6)
        assert recorder.recordings == 2
        weights = weakref.ref(fused.fused.template), weakref.ref(single.model)
        del fused, single
        assert [weight() for weight in weights] == [None, None]
    finally:
        gc.enable()


class Sparse(nn.Module):
    """Its gradients are sparse, which optimizers that can be recorded do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(x).mean(1))
        return out


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sparse_gradients_train_unrecorded(problem: Problem, recorder: Recorder | Counted, optimizer: str) -> None:
    x, y = torch.arange(80).reshape(40, 2) % 10, torch.arange(40) % 3
    data = make_batches((x, y), "train_data", problem.device, 0)
    problem = replace(problem, model_fn=lambda config: Sparse(), train_data=data, val_data=data)
    outcome = train_full_size_trial(
        problem.with_settings(race=RaceConfig(ema=0.0)),
        Trial(0, {"optimizer": optimizer, "lr": 0.1, "batch_size": 4, "grad_clip": 1.0}),
        full_size_task("key", 0, Span(0, 1), None, 0),
        None,
    )
    assert outcome.error is None, outcome.error
    assert recorder.recordings == 0


def test_ranks_whose_optimizer_has_hooks_are_not_recorded(problem: Problem, recorder: Recorder | Counted) -> None:
    """What times and rescales their steps, no replay would call."""
    place, task = RankPlace(ALONE, 1.0, "gloo"), full_size_task("key", 1, Span(0, 2), None, 0)
    outcome = train_target_on_ranks(problem, TRIALS[1], task, None, place, lambda: None, lambda: False, lambda *_: None)
    assert outcome.error is None, outcome.error
    assert len(outcome.epochs) == 2
    assert recorder.recordings == 0


def test_what_fits_memory_only_as_it_is_written_trains_so(
    problem: Problem, recorder: Recorder | Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group is not made smaller for a recording."""

    def recorded(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for module in (fused_learner, single_learner):
        monkeypatch.setattr(module, "recorded", recorded)
    assert equal(
        target(problem, 1, Span(0, 2)).epochs, target(problem.with_settings(graph=False), 1, Span(0, 2)).epochs
    )
    outcome = group(problem, (0, 1, 2), 0, 1)
    assert [part["members"] for part in outcome.checkpoint] == [[0, 1, 2]]


def test_a_whole_run_chooses_the_same(
    quick: Callable[..., TuneResult], recorder: Recorder | Counted, one_process: None
) -> None:
    asked = {"model_fn": mlp, "num_samples": 6}
    recorded = quick(name="recorded", **asked)
    assert recorder.replays > 0
    made = recorder.recordings
    plain = quick(name="plain", backend=LocalBackend(graph=False), **asked)
    assert recorder.recordings == made
    assert recorded.best_config == plain.best_config
    assert recorded.best_metric == pytest.approx(plain.best_metric, rel=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU")
def test_it_is_refused_where_there_is_no_gpu(quick: Callable[..., TuneResult]) -> None:
    with pytest.raises(ValueError, match="`graph` is True, but must be 'auto' or False where no device is a GPU"):
        quick(backend=LocalBackend(graph=True))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="steps are compiled on a CPU")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler `g++`, which compiled steps need")
def test_a_compiled_group_trains_the_same_up_to_rounding_and_again_to_the_last_bit(problem: Problem) -> None:
    trials = {n: Trial(n, {**trial.config, "dropout": 0.0}) for n, trial in TRIALS.items()}

    def train(compiled: bool, graph: Any = "auto") -> Outcome:
        members = Group("kind", (0, 1, 2), fused=True, compiled=compiled)
        task = Task("key", (members,), (), Span(0, EPOCHS))
        return train_group(problem.with_settings(graph=graph), trials, task, lambda key: {})

    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphWarning)
        ours, again, as_written, switched_off = train(True), train(True), train(False), train(True, False)
    assert not equal(ours.checkpoint, as_written.checkpoint)
    assert equal(ours.history, again.history)
    assert equal(ours.checkpoint, again.checkpoint)
    assert equal(as_written.checkpoint, switched_off.checkpoint)
    for number, history in ours.history.items():
        for (_, found), (_, expected) in zip(history, as_written.history[number], strict=True):
            assert found == pytest.approx(expected, rel=1e-3)
