"""`python -m ... FOLDER`: starts an experiment there, or goes on with the one that is there."""

import sys
from pathlib import Path

import ray
from ray import tune

from hydro_rasda import RASDAScheduler
from tests.hydro_rasda.backends.ray.curves import curve


def main(folder: str) -> None:
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    path = str(Path(folder) / "run")
    if tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(path, trainable=curve)
    else:
        tuner = tune.Tuner(
            curve,
            param_space={"x": tune.grid_search([(3 * i % 5) / 5 for i in range(5)]), "seconds": 0.6},
            tune_config=tune.TuneConfig(scheduler=RASDAScheduler(max_t=8), metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=folder, name="run", verbose=0),
        )
    results = tuner.fit()
    best = results.get_best_result("loss", "min")
    print("FINISHED", results.num_errors, best.config["x"], best.metrics["training_iteration"])
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
