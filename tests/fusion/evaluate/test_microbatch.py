from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import fuse
from fusion.evaluate.microbatch import Sums, backward, evaluate, split

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    right: Tensor = model(batch[0]).argmax(-1) == batch[1]
    return right.float().mean()


def some_batch(samples: int) -> Batch:
    torch.manual_seed(1)
    return torch.randn(samples, 4), torch.randint(0, 3, (samples,))


@pytest.mark.parametrize("parts", [2, 3, 7, 100])
def test_gradients_and_means_are_those_of_the_whole_batch(parts: int) -> None:
    fused = fuse([nn.Linear(4, 3) for _ in range(5)])
    batch = some_batch(7)  # does not divide evenly

    def objective(part: Batch) -> dict[str, Tensor]:
        return {"loss": fused.map(loss, part), "accuracy": fused.map(accuracy, part)}

    whole = backward(objective, batch)
    expected = {name: p.grad for name, p in fused.stacked.items()}
    fused.zero_grad()
    in_parts = backward(objective, batch, parts)
    torch.testing.assert_close(in_parts, whole)
    torch.testing.assert_close({name: p.grad for name, p in fused.stacked.items()}, expected)
    torch.testing.assert_close(evaluate(objective, batch, parts), whole)


def weighted(model: nn.Linear, batch: Batch) -> dict[str, Tensor]:
    """A mean over the targets that are not ignored, of classes that each member weighs in a way of its own."""
    x, y = batch
    of_class = model.bias.detach().square() + 0.1
    counted = y != -100
    weight_N = of_class[y.where(counted, 0)] * counted
    loss_N = F.cross_entropy(model(x), y, reduction="none")
    hits = ((model(x).argmax(-1) == y) & counted).sum()
    weight, number = weight_N.sum(), counted.sum()
    loss, accuracy = (loss_N * weight_N).sum() / weight.where(weight > 0, 1), hits / number
    return {"loss": loss, "accuracy": accuracy, "weight/loss": weight, "weight/accuracy": number}


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("ignored", [[0, 1, 2], [5, 6], [0, 3, 4, 6]])
def test_parts_count_by_the_weights_of_their_means(parts: int, ignored: list[int]) -> None:
    """One part at least, among them the first or the last, has nothing that counts."""
    fused = fuse([nn.Linear(4, 3) for _ in range(5)])
    batch = some_batch(7)
    batch[1][ignored] = -100

    def objective(part: Batch) -> dict[str, Tensor]:
        means: dict[str, Tensor] = fused.map(weighted, part)
        return means

    whole = backward(objective, batch)
    expected = {name: p.grad for name, p in fused.stacked.items()}
    fused.zero_grad()
    in_parts = backward(objective, batch, parts, gradients=lambda: (p.grad for p in fused.stacked.values()))
    torch.testing.assert_close(in_parts, whole)
    torch.testing.assert_close({name: p.grad for name, p in fused.stacked.items()}, expected)
    torch.testing.assert_close(evaluate(objective, batch, parts), whole)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("ignored", [[0, 1], [0, 1, 2, 3], [5]])
def test_ranks_average_to_the_gradients_of_the_whole_batch(parts: int, ignored: list[int]) -> None:
    """Each rank divides by the mean weight of all ranks. One rank may have no example that counts."""
    model, batch = nn.Linear(4, 3), some_batch(8)
    batch[1][ignored] = -100
    shares = [(x, y) for x, y in zip(batch[0].split([4, 4]), batch[1].split([4, 4]))]
    mean = (weighted(model, shares[0])["weight/loss"] + weighted(model, shares[1])["weight/loss"]) / 2
    entered: list[int] = []

    @contextmanager
    def apart() -> Iterator[None]:
        entered.append(len(entered))
        yield

    def gradients() -> list[Tensor | None]:
        return [parameter.grad for parameter in model.parameters()]

    def gradients_of(share: Batch, **options: Any) -> list[Tensor]:
        model.zero_grad()
        backward(partial(weighted, model), share, parts, gradients=gradients, **options)
        return [gradient.clone() for gradient in gradients() if gradient is not None]

    found = [gradients_of(share, apart=apart, over_ranks=lambda own: mean) for share in shares]
    assert len(entered) == 2 * (parts - 1)
    model.zero_grad()
    weighted(model, batch)["loss"].backward()
    for one, other, expected in zip(*found, gradients(), strict=True):
        torch.testing.assert_close((one + other) / 2, expected)
    assert not any(gradient.any() for gradient in gradients_of(shares[0], weight=0.0, over_ranks=lambda own: mean))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_factor_of_the_loss_scales_its_gradients_and_no_mean(parts: int) -> None:
    model, batch = nn.Linear(4, 3), some_batch(7)

    def objective(part: Batch) -> dict[str, Tensor]:
        return {"loss": loss(model, part)}

    means, gradients = [], []
    for options in ({}, {"weight": 0.5}, {"scaled": lambda of: 8 * of}):
        model.zero_grad()
        means.append(backward(objective, batch, parts, **options)["loss"])
        gradients.append(model.weight.grad)
    torch.testing.assert_close(means, [means[0]] * 3)
    assert gradients[0] is not None
    torch.testing.assert_close(gradients[1:], [0.5 * gradients[0], 8 * gradients[0]])


def test_activations_are_those_of_one_part() -> None:
    seen: list[int] = []
    model = nn.Linear(4, 3)

    def objective(part: Batch) -> dict[str, Tensor]:
        seen.append(len(part[0]))
        return {"loss": loss(model, part)}

    backward(objective, some_batch(7), 3)
    assert seen == [3, 2, 2]
    assert evaluate(objective, some_batch(7), 2)["loss"].grad_fn is None
    assert seen[3:] == [4, 3]


def test_one_part_is_the_batch_itself_whatever_it_holds() -> None:
    assert split("text", 1) == ["text"]
    ragged = [torch.ones(2), torch.ones(3)]
    assert split(ragged, 1)[0] is ragged


def test_a_nested_batch_is_split_and_what_is_no_tensor_goes_everywhere() -> None:
    batch = {"x": torch.arange(4), "more": [torch.arange(8).view(4, 2), "name", torch.tensor(5)]}
    first, second = split(batch, 2)
    assert first["x"].tolist() == [0, 1]
    assert second["more"][0].tolist() == [[4, 5], [6, 7]]
    assert first["more"][1:] == second["more"][1:] == ["name", torch.tensor(5)]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="`parts` is 0, but must be >= 1"):
        split(torch.ones(3), 0)
    with pytest.raises(ValueError, match=r"`batch` has tensors of \[2, 3\] samples"):
        split((torch.ones(3), torch.ones(2)), 2)
    with pytest.raises(ValueError, match=r"`batch` has tensors of \[\] samples"):
        split("text", 2)


def test_a_weight_that_is_a_number_counts_where_its_mean_lies() -> None:
    """It is made on the host, as `torch.tensor(float(n))` in an objective is."""
    sums = Sums()
    sums.add({"loss": torch.ones(3, device="meta"), "weight": torch.full((3,), 5.0)}, 7)
    assert sums.means()["loss"].device.type == "meta"


def test_the_mean_of_counts_and_flags_over_parts_is_no_whole_number() -> None:
    metrics = {"wrong": torch.tensor([1, 2, 2, 2]), "any": torch.tensor([True, False, False, False])}
    found = evaluate(lambda part: {name: value[part[0]] for name, value in metrics.items()}, torch.arange(4), 4)
    assert {name: value.item() for name, value in found.items()} == {"wrong": 1.75, "any": 0.25}
