"""RASDA in a Ray Tune script of your own: the scheduler and elastic trials, without `tune()`.

Run it as it is (8 logical CPUs are enough), or on a cluster with `--address auto` after `slurm/submit.sh`.
"""

import argparse
import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Switch off Ray's warning about trials that save often. Trials save often here because they take only seconds.
os.environ.setdefault("TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S", "0")

import ray
import torch
from ray import tune
from ray.tune.search import BasicVariantGenerator
from sklearn.datasets import load_digits
from torch import nn

from hydro_rasda import RASDAScheduler, Worker, elastic
from hydro_rasda.backends.ray import read_journal

EPOCHS, BATCH = 8, 32


def train(worker: Worker) -> None:
    """Train on every rank of a trial. A resize starts this function again from the checkpoint, on more ranks."""
    x, y = worker.data
    x_val, y_val, x, y = x[:360], y[:360], x[360:], y[360:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=worker.config["lr"], momentum=worker.config["momentum"])
    trained = worker.prepare(model)
    if worker.checkpoint is not None:
        model.load_state_dict(worker.checkpoint["model"])
        optimizer.load_state_dict(worker.checkpoint["optimizer"])
    steps_per_epoch = -(-len(x) // (BATCH * worker.world_size))
    worker.rescale(optimizer, warmup_steps=worker.config["rescale_warmup_epochs"] * steps_per_epoch)
    while worker.iteration < EPOCHS:
        for batch, weight in worker.batches(len(x), BATCH):
            loss = nn.functional.cross_entropy(trained(x[batch]), y[batch]) * weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(x_val).argmax(1) == y_val).float().mean()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        worker.report({"accuracy": accuracy}, state)


def main() -> None:
    """Tunes an MLP on scikit-learn's digits: 8 configurations, 1 -> 8 workers each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--address", help="a running Ray cluster; without it, one of 8 logical CPUs is started here")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--storage", default=os.path.expanduser("~/ray_results"), help="a folder that all nodes see")
    arguments = parser.parse_args()
    # Without `log_to_driver=False` you see what `train` prints, and a line of Ray's for each checkpoint.
    if arguments.address:
        ray.init(address=arguments.address, log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    digits = load_digits()
    data = (torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

    scheduler = RASDAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=2, scaling_factor=2, workers=1)
    tuner = tune.Tuner(
        elastic(train, scheduler, data=data),
        param_space={
            "lr": tune.loguniform(1e-3, 0.1),  # multiplied by up to 8 on 8 workers
            "momentum": tune.uniform(0.5, 0.99),
            "rescale_warmup_epochs": tune.choice([1, 2]),
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=arguments.trials,
            search_alg=BasicVariantGenerator(random_state=0),
            scheduler=scheduler,
        ),
        run_config=tune.RunConfig(
            storage_path=arguments.storage,
            failure_config=tune.FailureConfig(max_failures=2),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            verbose=1,
        ),
    )
    results = tuner.fit()
    print("trial: accuracy after its last epoch, workers in each epoch")
    history = read_journal(results.experiment_path)
    for trial in sorted({entry.trial for entry in history}):
        epochs = {entry.t: entry for entry in history if entry.trial == trial}
        print(f"{trial}: {epochs[max(epochs)].score:.3f}", *(epochs[t].workers for t in sorted(epochs)))
    best = results.get_best_result()
    assert best.metrics is not None
    print(f"best: {best.config}, accuracy {best.metrics['accuracy']:.3f} with {best.metrics['workers']} workers")
    ray.shutdown()


if __name__ == "__main__":
    main()
