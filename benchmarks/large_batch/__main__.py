"""A batch that grows with the workers: which learning rate, and which warm-up, lose least at equal examples seen.

    python -m benchmarks.large_batch                  # under half an hour on one core; goes on where it was
    python -m benchmarks.large_batch --minutes 4      # as many trainings as that takes
    python -m benchmarks.large_batch --check          # one of them on real ranks; then the page is drawn again

Trials grow as RASDA has them grow: each epoch trains on all examples, and at the milestones (after 2, 4 and 8 of 16
epochs) the batch doubles, up to `workers` times the first one. A step on k ranks is the step of one process with the
k-fold batch (`--check` measures how exactly), so all trainings run in one process. Each starts from the learning rate
that is best for the first batch. It rewrites `large_batch.{json,md}` in `benchmarks/results`, or elsewhere (`--out`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from benchmarks.large_batch.cells import train, wanted
from benchmarks.large_batch.page import FILE, markdown
from benchmarks.large_batch.ranks import check, overhead
from benchmarks.result_files import environment, options, read, save_lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what is missing and writes the results."""
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training after so long")
    parser.add_argument("--check", action="store_true", help="only compare real ranks with one process")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / FILE
    results = read(path, {"environment": environment("torch"), "check": None, "overhead": None, "rows": []})
    until = time.monotonic() + 60 * given.minutes
    if given.check:
        results["check"] = check(given.out)
        results["overhead"] = overhead(given.out)
        save_lines(path, results, "rows")
    else:
        while (cell := next(wanted(results["rows"]), None)) is not None and time.monotonic() < until:
            results["rows"].append(train(cell))
            save_lines(path, results, "rows")
        if cell is not None:
            print("not done yet: the same call goes on")
            return
    (given.out / "large_batch.md").write_text(markdown(results))
    print(f"wrote {given.out / 'large_batch.md'}")


if __name__ == "__main__":
    main()
