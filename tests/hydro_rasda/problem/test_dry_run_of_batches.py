from __future__ import annotations

import pytest
import torch

from hydro_rasda.problem.dry_run_of_batches import _grows, one_thread


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
