import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import fuse
from fusion.microbatch import backward, split

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def some_batch(samples: int) -> Batch:
    torch.manual_seed(1)
    return torch.randn(samples, 4), torch.randint(0, 3, (samples,))


@pytest.mark.parametrize("parts", [2, 3, 7, 100])
def test_gradients_are_those_of_the_whole_batch(parts: int) -> None:
    fused = fuse([nn.Linear(4, 3) for _ in range(5)])
    batch = some_batch(7)  # does not divide evenly
    whole = backward(lambda part: fused.map(loss, part), batch)
    expected = {name: p.grad for name, p in fused.stacked.items()}
    fused.zero_grad()
    in_parts = backward(lambda part: fused.map(loss, part), batch, parts)
    torch.testing.assert_close(in_parts, whole)
    torch.testing.assert_close({name: p.grad for name, p in fused.stacked.items()}, expected)


def test_activations_are_those_of_one_part() -> None:
    seen: list[int] = []
    model = nn.Linear(4, 3)

    def objective(part: Batch) -> Tensor:
        seen.append(len(part[0]))
        return loss(model, part)

    backward(objective, some_batch(7), 3)
    assert seen == [3, 2, 2]


def test_a_nested_batch_is_split_and_what_is_no_tensor_goes_everywhere() -> None:
    batch = {"x": torch.arange(4), "more": [torch.arange(8).view(4, 2), "name", torch.tensor(5)]}
    first, second = split(batch, 2)
    assert first["x"].tolist() == [0, 1]
    assert second["more"][0].tolist() == [[4, 5], [6, 7]]
    assert first["more"][1:] == second["more"][1:] == ["name", torch.tensor(5)]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="parts is 0, but must be >= 1"):
        split(torch.ones(3), 0)
    with pytest.raises(ValueError, match=r"batch has tensors of \[2, 3\] samples"):
        split((torch.ones(3), torch.ones(2)), 2)
    with pytest.raises(ValueError, match=r"batch has tensors of \[\] samples"):
        split("text", 2)
