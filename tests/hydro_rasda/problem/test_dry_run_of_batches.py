from __future__ import annotations

import torch

from hydro_rasda.problem.dry_run_of_batches import one_thread


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
