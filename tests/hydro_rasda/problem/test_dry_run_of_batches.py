from __future__ import annotations

import pytest
import torch
from torch import nn

from hydro_rasda.problem.dry_run_of_batches import _grows, _random, one_thread
from tests.hydro_rasda.models import Config
from tests.hydro_rasda.problems import problem, trials


def test_torch_has_one_thread_for_a_while_also_where_an_error_ends_it() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        with one_thread():
            seen.append(torch.get_num_threads())
            raise KeyError
    except KeyError:
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("of_one", "of_two", "of_four", "grows"),
    [
        (1.0, 2.0, 4.0, True),
        (-1.0, -2.0, -4.0, True),
        (3.0, 4.0, 6.0, True),  # a sum and a constant
        (3.0, 4.0, 6.03, True),
        (3.0, 4.0, 6.05, False),
        (1.0, 2**0.5, 2.0, True),  # a norm
        (1.0, 2.0, 4.07, True),
        (1.0, 2.0, 4.09, False),
        (1.0, 1.0, 1.0, False),  # a mean
        (1.0, 1.1, 0.9, False),
        (5.0, 5.9, 7.7, False),  # a sum, but it hardly counts beside the constant
        (5.0, 6.1, 8.3, True),
        (1.0, 1.5, 1.6, False),
        (1.0, 0.5, 0.25, False),
    ],
)
def test_a_value_that_doubles_with_its_batch_is_a_sum(
    of_one: float, of_two: float, of_four: float, grows: bool
) -> None:
    assert _grows(of_one, of_two, of_four) is grows


@pytest.mark.parametrize(("spread", "noise"), [(0.0, 0.02), (3.0, 3.0)])
def test_a_random_model_has_noise_of_the_size_of_its_weights_also_where_these_are_constant(
    spread: float, noise: float
) -> None:
    def filled(config: Config, width_ratio: float = 1.0) -> nn.Module:
        layer = nn.Linear(64, 10, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1.0)[:, ::2] += 2 * spread
        return layer

    one, same, other = (_random(problem(filled), trials()[0], seed).get_parameter("weight") for seed in (0, 0, 1))
    drawn = (one - filled({}).get_parameter("weight")).detach()
    assert drawn.std().item() == pytest.approx(noise, rel=0.1)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
