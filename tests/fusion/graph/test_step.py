"""A recorded step does what the step does: over epochs with dropout, schedules, clipping and a smaller last batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion import FusedModel, FusedOptimizer, GraphedStep, clip_grad_norm_, fuse, fused_optimizer
from fusion.graph import GraphWarning
from fusion.graph import step as step_module
from fusion.optim import native
from tests.recorder import DEVICE, Counted, Recorder, recording
from tests.zoo import CASES, Case

pytestmark = pytest.mark.gpu

K, BATCH, EXAMPLES, EPOCHS = 3, 8, 44, 3
STEPS = -(-EXAMPLES // BATCH)
CONFIGS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    {"optimizer": "adam", "lr": 0.02, "beta1": 0.8},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
]
INPUTS, LABELS = (
    torch.randn(EXAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE),
    torch.arange(EXAMPLES, device=DEVICE) % 4,
)


class Net(nn.Module):
    """Convolution, statistics, two kinds of dropout (one of them by the default generator), noise, and a head."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.channels, self.head = nn.Dropout(p), nn.Dropout2d(p), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.channels(torch.relu(self.norm(self.conv(x))))
        x = self.drop(x).flatten(1)
        out: Tensor = self.head(x + 0.01 * torch.randn_like(x))
        return out


class Training:
    """K models with their optimizer, and a step of theirs that is recorded where that is asked for."""

    def __init__(self, make: Callable[[int], nn.Module] = lambda k: Net(0.1 + 0.2 * k), K: int = K) -> None:
        torch.manual_seed(0)
        self.fused: FusedModel = fuse([make(k).to(DEVICE) for k in range(K)])
        self.optimizer: FusedOptimizer = fused_optimizer(self.fused, CONFIGS[:K])
        self.limits = [0.5, float("inf"), 2.0][:K]
        self.step = GraphedStep(self.plain, self.fused, self.optimizer)

    def plain(self, batch: Any) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        losses_K = self.fused.map(lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
        losses_K.sum().backward()
        norms_K = clip_grad_norm_(self.fused, self.limits)
        self.optimizer.step()
        return {"loss": losses_K.detach(), "norm": norms_K}

    def epoch(self, epoch: int, step: Callable[[Any], Any]) -> list[Tensor]:
        self.fused.seed([10 * epoch + k for k in range(self.fused.K)])
        factors = [[1 / (1 + epoch + 0.1 * s + 0.01 * k) for k in range(self.fused.K)] for s in range(STEPS)]
        self.optimizer.schedule(factors)
        found = [value for batch in batches(epoch) for value in step(batch).values()]
        self.fused.train(False)
        with torch.no_grad():
            found.append(self.fused(INPUTS))
        self.fused.train(True)
        return found

    def state(self) -> list[Tensor]:
        moments = [t for of in self.optimizer.state_dict()["state"].values() for t in of.values()]
        return [*self.fused.state_dict().values(), *moments, self.optimizer.steps_KP]


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH):
        yield INPUTS[rows], LABELS[rows]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder | Counted]:
    monkeypatch.setattr(native, "takes", lambda tensors: False)  # as on a GPU
    with recording() as made:
        yield made


def on_device(batch: Any) -> Any:
    return tuple(t.to(DEVICE) for t in batch)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("K", "first_check"), [(3, 64), (3, 2), (1, 64)])
def test_replays_equal_the_step_as_it_is_written(
    recorder: Recorder | Counted, monkeypatch: pytest.MonkeyPatch, K: int, first_check: int
) -> None:
    """Losses, norms, weights, statistics and moments, to the last bit; also where replays are checked on the way."""
    monkeypatch.setattr(step_module, "FIRST_CHECK", first_check)
    ours, theirs = Training(K=K), Training(K=K)
    for epoch in range(EPOCHS):
        assert same(ours.epoch(epoch, ours.step), theirs.epoch(epoch, theirs.plain))
    assert same(ours.state(), theirs.state())
    assert recorder.recordings == 1
    # Three steps to look at, one to record, and the last of each epoch, which is smaller.
    checks = {64: 0, 2: 3}[first_check]
    assert recorder.replays == EPOCHS * (STEPS - 1) - 4 - checks


def test_no_step_allocates_what_the_next_one_reads(recorder: Recorder | Counted) -> None:
    """Parameters, gradients, statistics, moments, counters and schedules stay where they are, and so do inputs."""
    training = Training()
    inputs: list[int] = []

    def step(batch: Any) -> Any:
        inputs.append(batch[0].data_ptr())
        return training.plain(batch)

    graphed = GraphedStep(step, training.fused, training.optimizer)

    def addresses() -> list[int]:
        fused, optimizer = training.fused, training.optimizer
        moments = [block for rows in optimizer._moments.values() for block in rows.blocks.values()]
        grads = [p.grad for p in fused.stacked.values() if p.grad is not None]
        own = [optimizer.steps_KP, optimizer.lr_factor_K, optimizer._schedule_SK, optimizer._next]
        tensors = [*fused.parameters(), *fused.buffers(), *grads, *moments, *own]
        assert len(grads) == len(fused.stacked)
        return [t.data_ptr() for t in tensors if t is not None]

    training.epoch(0, step)
    before = addresses()
    for epoch in range(1, 4):
        training.epoch(epoch, training.plain if epoch == 1 else graphed)
        assert addresses() == before
    looked_at = inputs[STEPS:]
    assert recorder.replays
    assert len(set(looked_at[1:4])) == 1


def test_it_is_recorded_anew_when_tensors_lie_elsewhere(recorder: Recorder | Counted) -> None:
    ours, theirs = Training(), Training()
    saved: list[Any] = []

    def change(training: Training, at: int) -> None:
        if at == 1:
            saved.append((training.fused.state_dict(), training.optimizer.state_dict()))
            saved[-1] = torch.utils._pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, saved[-1])
            training.fused.keep([2, 0])
            training.optimizer.keep([2, 0])
            training.limits = [2.0, 0.5]
        if at == 2:
            other = Training()
            training.fused.concat(other.fused)
            training.optimizer.concat(other.optimizer)
            training.limits = [2.0, 0.5, 1.0, 3.0, 0.1]
        if at == 3:
            training.fused.keep([1, 2, 3])
            training.optimizer.keep([1, 2, 3])
            training.limits = [0.5, 1.0, 2.0]
            model, optimizer = saved.pop(0)
            training.fused.load_state_dict(model)
            training.optimizer.load_state_dict(optimizer)

    for epoch in range(4):
        for training in (ours, theirs):
            change(training, epoch)
        assert same(ours.epoch(epoch, ours.step), theirs.epoch(epoch, theirs.plain)), epoch
        assert recorder.recordings == epoch + 1
    assert same(ours.state(), theirs.state())
    assert recorder.replays > 0


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("lstm", "transformer", "tied")], ids=lambda c: c.name)
def test_other_models_are_recorded_too(recorder: Recorder | Counted, case: Case) -> None:
    ends = []
    for recorded in (True, False):
        torch.manual_seed(0)
        fused = fuse([case.build().to(DEVICE) for _ in range(K)])
        optimizer = fused_optimizer(fused, CONFIGS)
        fused.seed(range(K))

        def step(batch: Any, fused: FusedModel = fused, optimizer: FusedOptimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            losses_K: Tensor = fused.map(case.objective, batch)
            losses_K.sum().backward()
            optimizer.step()
            return losses_K.detach()

        train = GraphedStep(step, fused, optimizer) if recorded else step
        ends.append([*(train(on_device(case.batch(seed))) for seed in range(7)), *fused.state_dict().values()])
    assert same(*ends)
    assert recorder.replays == 3


def test_what_is_returned_stays(recorder: Recorder | Counted) -> None:
    training = Training()
    kept = [(value, value.clone()) for epoch in range(2) for value in training.epoch(epoch, training.step)]
    assert recorder.replays
    assert all(torch.equal(value, then) for value, then in kept)


class Reads(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.mean().item() > 9 else 2.0)


class Masks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[x > 0].mean()


class Counts(Net):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)


class Anneals(Net):
    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.heat = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        self.heat[0] *= 0.9
        return super().forward(x) * self.heat[0]


class Literal(Net):
    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.seen = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += 1
        return super().forward(x) + torch.tensor([float(self.seen[0])], device=x.device)


class Alternates(Net):
    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.seen = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += 1
        return super().forward(x).tanh() if self.seen[0] % 2 else super().forward(x)


class Assigns(Net):
    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().mean()
        return super().forward(x) + self.mean


class Shuffles(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


LITERAL = (
    "aten.lift_fresh.default is given another tensor"
    if DEVICE.type == "cpu"
    else "numbers of the host become a tensor of the device"
)
REFUSED = [
    (Reads, "_local_scalar_dense.default waits for values of the device, at .*`return super.*item"),
    (Masks, r"aten.index.Tensor waits for values of the device, at .*`return super.*x\[x > 0\]"),
    (Counts, "it changes `steps`, an attribute of the model"),
    (Anneals, "is given 0.8.* in one step and 0.7.* in the next, at .*`return super.*heat"),
    (Literal, f"{LITERAL}.*at .*torch.tensor"),
    (Alternates, "aten.tanh.default is called in one step and not in the next, at .*`return super.*tanh"),
    (Assigns, "is given another tensor, in form, place or value"),
    (Shuffles, "it draws from Python's or NumPy's generator"),
]


@pytest.mark.parametrize(("net", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_recorded_is_named_and_trains_as_it_is(
    recorder: Recorder | Counted, net: type[Net], reason: str
) -> None:
    """One member alone, which vmap need not follow; its results are those of the step as it is written."""
    ours, theirs = Training(lambda k: net(0.2), 1), Training(lambda k: net(0.2), 1)
    with pytest.warns(GraphWarning, match=reason):
        found = [v for epoch in range(2) for v in ours.epoch(epoch, ours.step)]
    assert ours.step.refusal
    assert same(found, [v for epoch in range(2) for v in theirs.epoch(epoch, theirs.plain)])
    assert same(ours.state(), theirs.state())
    assert recorder.recordings == 0


def test_a_step_that_changes_later_is_found_out(recorder: Recorder | Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "FIRST_CHECK", 4)
    training, scale = Training(), [1.0]

    def step(batch: Any) -> Any:
        return {name: value * scale[0] for name, value in training.plain(batch).items()}

    graphed = GraphedStep(step, training.fused, training.optimizer)
    training.epoch(0, graphed)
    training.epoch(1, graphed)
    assert graphed.recorded
    scale[0] = 2.0
    with pytest.warns(GraphWarning, match=r"is given 1.0 in one step and 2.0 in the next"):
        training.epoch(2, graphed)
    training.epoch(3, graphed)
    assert not graphed.recorded


def test_a_capture_that_fails_costs_nothing(recorder: Recorder | Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, step: Any, generators: Any) -> Any:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    monkeypatch.setattr(type(recorder), "record", fail)
    ours, theirs = Training(), Training()
    with pytest.warns(GraphWarning, match="not recorded, OutOfMemoryError: CUDA out of memory"):
        found = ours.epoch(0, ours.step)
    assert same(found, theirs.epoch(0, theirs.plain))


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((INPUTS[:4], LABELS[:4].to("meta")), f"a batch has a tensor on meta, and the model is on {DEVICE.type}"),
        ((INPUTS[:4], object()), "a batch has a object"),
    ],
)
def test_batches_that_no_recording_follows(recorder: Recorder | Counted, batch: Any, reason: str) -> None:
    training = Training()
    step = GraphedStep(lambda batch: batch[0].sum(), training.fused)
    with pytest.warns(GraphWarning, match=reason):
        assert torch.equal(step(batch), batch[0].sum())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
def test_a_capture_that_cuda_refuses_harms_no_other(recorder: Counted) -> None:
    """No operator waits, so that only the capture finds it; later trainings are recorded as if it had not been."""
    waits, ours, theirs = Training(), Training(), Training()

    def step(batch: Any) -> Any:
        torch.cuda.synchronize()
        return waits.plain(batch)

    graphed = GraphedStep(step, waits.fused, waits.optimizer)
    expected = [theirs.epoch(epoch, theirs.plain) for epoch in range(2)]
    with pytest.warns(GraphWarning, match="not recorded, .*captur"):
        assert same(waits.epoch(0, graphed), expected[0])
    assert same(waits.epoch(1, graphed), expected[1])
    assert recorder.recordings == 0
    assert all(same(ours.epoch(epoch, ours.step), expected[epoch]) for epoch in range(2))
    assert recorder.recordings == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_is_the_step_itself() -> None:
    training = Training()
    seen: list[Any] = []
    step = GraphedStep(seen.append, training.fused)
    for _ in range(9):
        step("anything")
    assert seen == ["anything"] * 9
    with pytest.raises(ValueError, match="`model` is 3, but must be a "):
        GraphedStep(seen.append, 3)  # type: ignore[arg-type]
