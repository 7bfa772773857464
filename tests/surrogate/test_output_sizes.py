from __future__ import annotations

import pytest
import torch
from torch import nn

from surrogate.output_sizes import batch_at, call_model, check_outputs, output_shapes


def test_shapes_of_nested_outputs() -> None:
    output = {"logits": torch.zeros(2, 3), "states": (torch.zeros(2), None)}
    assert output_shapes(output) == {"output['logits']": (2, 3), "output['states'][0]": (2,)}


def test_inputs_by_position_by_name_or_alone() -> None:
    layer, x, y = nn.Bilinear(2, 3, 4), torch.randn(5, 2), torch.randn(5, 3)
    assert torch.equal(call_model(layer, (x, y)), call_model(layer, {"input1": x, "input2": y}))
    assert call_model(nn.Identity(), x) is x


def test_an_output_that_grows_is_named() -> None:
    with pytest.raises(ValueError, match=r"output depends on `width_ratio`: its shape is \(5, 2\) .* \(5, 4\)"):
        check_outputs(nn.Linear(3, 2), nn.Linear(3, 4), torch.zeros(5, 3))


def test_a_batch_goes_where_the_module_is_unless_a_part_of_it_lies_there() -> None:
    x, lengths = torch.zeros(2, 3), torch.zeros(2, device="meta")
    assert {t.device.type for t in batch_at(torch.device("meta"), [x, x])} == {"meta"}
    assert [t.device.type for t in batch_at(torch.device("cpu"), [x, lengths])] == ["cpu", "meta"]
