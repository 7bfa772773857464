"""The gradient noise scale against its definition, where that is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hydro_rasda.data import Shard, Share
from hydro_rasda.problem.objective import Objective
from hydro_rasda.training.gradient_noise import HORIZON, GradientNoise
from hydro_rasda.training.single_learner import SingleLearner
from tests.hydro_rasda.ranks import on_ranks

SIZE = 12


class Bowl(nn.Module):
    """The quadratic |x - point|^2 / 2, its mean over examples x: an example's gradient is point - x."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.full((SIZE // 2,), 0.5, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x - torch.cat([self.left, self.right])).square().sum(1).mean() / 2


def examples(count: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(count, SIZE, dtype=torch.float64, generator=generator)


def gradient(x: Tensor) -> Tensor:
    return 0.5 - x.mean(0)


def test_from_the_expected_norms_it_is_the_definition() -> None:
    """|G|^2 = 3 and tr(Sigma) = 600, over batches of all sizes."""
    measured = GradientNoise(nn.Linear(1, 1))
    assert math.isnan(measured.scale)
    for of, out_of in ((1, 2), (16, 32), (16, 128), (5, 7)):
        measured.add(3 + 600 / of, of, 3 + 600 / out_of, out_of)
        assert measured.scale == pytest.approx(200)


def test_gradients_of_known_covariance() -> None:
    """Drawn: one step says little, their mean is unbiased. Sigma = diag(1, ..., 12), G = (2, ..., 2)."""
    generator = torch.Generator().manual_seed(0)
    deviations = torch.arange(1, SIZE + 1, dtype=torch.float64).sqrt()
    measured = GradientNoise(nn.Linear(1, 1))
    scales = []
    for _ in range(400):
        for _ in range(HORIZON):
            drawn = 2 + deviations * torch.randn(8, SIZE, dtype=torch.float64, generator=generator)
            means = [part.mean(0).square().sum().item() for part in (drawn[:2], drawn)]
            measured.add(means[0], 2, means[1], 8)
        scales.append(measured.state())
    signal, trace = (sum(state[name] for state in scales[5:]) / len(scales[5:]) for name in ("signal", "noise"))
    assert signal == pytest.approx(4 * SIZE, rel=0.01)
    assert trace == pytest.approx(SIZE * (SIZE + 1) / 2, rel=0.01)


def test_no_gradient_in_sight_and_none_that_is_finite() -> None:
    measured = GradientNoise(nn.Linear(1, 1))
    measured.add(math.inf, 1, 1.0, 2)
    measured.add(math.nan, 1, 1.0, 2)
    measured.add(1.0, 2, 1.0, 2)  # of all examples: says nothing
    assert math.isnan(measured.scale)
    assert measured.state() == {}
    measured.add(4.0, 1, 2.0, 2)  # as of noise alone
    assert measured.scale == math.inf
    calm = GradientNoise(nn.Linear(1, 1))
    calm.add(1.0, 1, 1.0, 2)
    assert calm.scale == 0


COUNTS = (8, 8, 8, 5, 8, 1, 8)
"""Examples of each step; of five, the first rank takes one more; of one, the second has none."""


def batches() -> list[Tensor]:
    return list(examples(sum(COUNTS)).split(COUNTS))


def ranks_measure(rank: int, world: int, interrupted: bool) -> tuple[float, dict[str, float]]:
    joint = DistributedDataParallel(Bowl(), bucket_cap_mb=1e-5)  # two buckets
    measured = GradientNoise(joint)
    for i, batch in enumerate(batches()):
        part = Shard(rank, world).part(len(batch))
        measured.expect(len(batch[part.rows]), part.weight)
        joint.zero_grad()
        (joint(batch[part.rows]) * part.weight).backward()
        for parameter, value in zip(joint.parameters(), gradient(batch).split(SIZE // 2), strict=True):
            torch.testing.assert_close(parameter.grad, value)
        if interrupted and i == 3:
            measured.settle(torch.device("cpu"))
            state = measured.state()
            joint = DistributedDataParallel(Bowl(), bucket_cap_mb=1e-5)
            measured = GradientNoise(joint)
            measured.load(state)
    measured.settle(torch.device("cpu"))
    return measured.scale, measured.state()


def averaged(steps: Sequence[Sequence[tuple[float, float, float, float]]]) -> tuple[float, float]:
    """(small, of, big, out_of) of each rank in each step -> signal and noise, averaged by hand."""
    signal = trace = 0.0
    for ranks in steps:
        signals = [(n * big - m * small) / (n - m) for small, m, big, n in ranks]
        traces = [(small - big) / (1 / m - 1 / n) for small, m, big, n in ranks]
        signal += (sum(signals) / len(signals) - signal) / HORIZON
        trace += (sum(traces) / len(traces) - trace) / HORIZON
    return signal, trace


def by_hand(whole: Tensor, parts: Sequence[Tensor]) -> list[tuple[float, float, float, float]]:
    big = gradient(whole).square().sum().item()
    return [(gradient(part).square().sum().item(), len(part), big, len(whole)) for part in parts]


@pytest.mark.parametrize("interrupted", [False, True])
def test_two_ranks_find_what_the_equations_say(interrupted: bool) -> None:
    """Over a restart, too; all ranks know the same."""
    (scale, state), other = on_ranks(2, ranks_measure, interrupted)
    assert other == (scale, state)
    steps = [by_hand(batch, (batch[0::2], batch[1::2])) for batch in batches() if len(batch) > 1]
    signal, trace = averaged(steps)
    assert state == pytest.approx({"signal": signal, "noise": trace})
    assert scale == pytest.approx(trace / signal)


def learners_measure(rank: int, world: int) -> list[dict[str, float]]:
    """Of learners whose examples count equally: without weights, and with the weight of each batch told."""
    plain: Objective = lambda model, batch: {"loss": model(batch)}  # noqa: E731
    weighing: Objective = lambda model, batch: {"loss": model(batch), "weight": torch.tensor(3.0 * len(batch))}  # noqa: E731
    shard, states = Shard(rank, world), []
    for objective in (plain, weighing):
        learner = SingleLearner(Bowl(), {"lr": 0.01}, objective, 4, shard)
        learner.noise = GradientNoise(learner.joint)
        for batch in batches():
            part = shard.part(len(batch))
            learner.step(Share(batch[part.rows], part.examples, part.weight), 0.0, 1.0)
        learner.noise.settle(torch.device("cpu"))
        states.append(learner.noise.state())
    return states


def test_equal_weights_of_examples_change_no_measurement() -> None:
    (plain, weighed), _ = on_ranks(2, learners_measure)
    assert plain.keys() == {"signal", "noise"}
    assert weighed == pytest.approx(plain, rel=1e-6)


def micro_batched(orders: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """One rank that sums up the gradients of parts of each batch, taken in some order."""
    model = Bowl()
    measured = GradientNoise(model)
    for batch, order in zip(batches(), orders):
        model.zero_grad()
        for i in order:
            part = batch[i :: len(order)]
            (model(part) * len(part) / len(batch)).backward()
            measured.after_backward(len(part), len(batch))
    assert measured.scale == pytest.approx(measured.state()["noise"] / measured.state()["signal"])
    return measured.state()


def test_micro_batches_of_one_rank_say_what_ranks_say() -> None:
    """Two ranks average over both parts; one rank's g is its first part's, so that both orders average to the same."""
    orders = [(0, 1) if count > 1 else (0,) for count in COUNTS]
    forth, back = micro_batched(orders), micro_batched([order[::-1] for order in orders])
    (_, state), _ = on_ranks(2, ranks_measure, False)
    assert {name: (forth[name] + back[name]) / 2 for name in state} == pytest.approx(state)


def test_whole_batches_of_one_rank_say_nothing() -> None:
    model = Bowl()
    measured = GradientNoise(model)
    for batch in batches():
        model.zero_grad()
        model(batch).backward()
        measured.after_backward(len(batch), len(batch))
    assert measured.state() == {}
