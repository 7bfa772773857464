from __future__ import annotations

import pytest
from torch import Tensor, nn

from surrogate import make_surrogate, parameter_roles
from surrogate.widths import compare_widths
from tests.surrogate.models import ZOO


class Depthwise(nn.Module):
    """An embedding, a depthwise convolution, a scale of its own, and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, stride=2)
        self.depthwise = nn.Conv2d(width, width, 3, groups=width, padding=1)
        self.scale = nn.Parameter(self.patches.weight.new_ones(width, 1, 1))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.scale * self.depthwise(self.patches(x))).mean((2, 3)))
        return out


def test_roles_of_layers_by_what_they_read_and_write() -> None:
    mlp = parameter_roles(make_surrogate(ZOO["mlp"][0], {}, 1 / 4))
    assert mlp == {"0.weight": "embedding", "2.weight": "hidden", "4.weight": "head"}
    assert parameter_roles(make_surrogate(lambda _, ratio: Depthwise(int(32 * ratio)), {}, 1 / 4)) == {
        "patches.weight": "embedding",
        "head.weight": "head",
    }


@pytest.mark.parametrize("name", ZOO)
def test_target_and_surrogate_have_the_same_roles(name: str) -> None:
    model_fn, config, _ = ZOO[name]
    narrow, target = make_surrogate(model_fn, config, 1 / 4), model_fn(config, 1.0)
    found = parameter_roles(narrow)
    assert parameter_roles(target, compare_widths(target, narrow)) == found
    # The readout of a tied model is the embedding's weight.
    assert set(found.values()) >= ({"embedding"} if name == "tied" else {"embedding", "head"})
    assert all(narrow.get_parameter(each).dim() > 1 for each in found)


def test_a_model_without_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="without a width plan"):
        parameter_roles(nn.Linear(2, 2))
