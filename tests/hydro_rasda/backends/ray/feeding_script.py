"""`python -m ... FOLDER`: trains six full-size trials there, or goes on with those that are there."""

import sys
from pathlib import Path

import ray

from hydro_rasda import loguniform
from hydro_rasda.backends.ray.full_size import FullSize
from tests.hydro_rasda.backends.ray import feeding


def main(folder: str) -> None:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    configs = [{"lr": 0.5 / 2 ** (3 * i % 8), "seconds": 0.3} for i in range(4)]
    run = feeding.open_run(Path(folder) / "run", feeding.of_linear(feeding.noise()), configs, max_t=8)
    full = FullSize(run, {"CPU": 1}, space={"lr": loguniform(1e-3, 1.0)}, train=feeding.train)
    full.offer(range(4))
    full.finish(range(4))
    best = min(run.checkpoints, key=lambda number: run.score("target", number))
    print("FINISHED", len(run.failures), best, run.epochs("target", best), run.checkpoints[best])
    run.store.close()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
