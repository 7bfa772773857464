"""Train models that cannot be fused, several at a time: 3 architectures at 4 learning rates, in a minute."""

from __future__ import annotations

import argparse
from functools import partial

from hydro_rasda.packing import Task, pack

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1)


def train(architecture: str, lr: float) -> dict[str, float]:
    """Train a model. A job may be any code that ends: its return value is kept, and its prints go to its log."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    conv = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    models = {
        "linear": nn.Linear(64, 10),
        "mlp": nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        "conv": conv,
    }
    model = models[architecture]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for epoch in range(10):
        for batch in torch.randperm(1500).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        print(f"epoch {epoch}", flush=True)
    return {"accuracy": float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())}


def main() -> None:
    """Train all, then say which is best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="digits", help="of the run; one that was interrupted goes on under its name")
    parser.add_argument("--lr", type=float, nargs="+", default=LEARNING_RATES, help="learning rates to try")
    arguments = parser.parse_args()
    jobs = [
        Task(partial(train, architecture, lr), kind=architecture, name=f"{architecture}-{lr:g}")
        for architecture in ("linear", "mlp", "conv")
        for lr in arguments.lr
    ]
    result = pack(jobs, name=arguments.name)
    best = max((job for job in result.jobs if job.value), key=lambda job: float(job.value["accuracy"]))
    took, memory = sum(job.seconds for job in result.jobs), max(job.memory for job in result.jobs)
    print(f"best {best.name}: accuracy {best.value['accuracy']:.4f}")
    print(f"{result.seconds:.0f} s for jobs that took {took:.0f} s in all, with {memory / 1e6:.0f} MB at most")


if __name__ == "__main__":
    main()
