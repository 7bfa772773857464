"""The search of digits.py without the library: random configurations, each trained to the end."""

import random

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn

images, labels = shuffle(*load_digits(return_X_y=True), random_state=0)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
sizes = (1200, 300, 297)
train_data, val_data, test_data = zip(x.split(sizes), y.split(sizes))


def model_fn(config):
    """Build the model."""
    width = 512
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    return nn.Sequential(*layers)


def sample():
    """Draw a configuration."""
    return {
        "lr": 10 ** random.uniform(-4, 0),
        "optimizer": random.choice(["sgd", "adamw"]),
        "batch_size": random.choice([32, 64]),
        "decay_start": random.uniform(0, 0.9),  # a share of the training
    }


def train(config, epochs):
    """Train a model, and return it with its loss on the validation data."""
    model = model_fn(config)
    optimizers = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = optimizers[config["optimizer"]](model.parameters(), config["lr"])
    inputs, target = train_data
    steps = epochs * -(-len(inputs) // config["batch_size"])
    start = config["decay_start"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (1 - step / steps) / (1 - start)))
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs)).split(config["batch_size"]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), target[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(val_data[0]), val_data[1])
    return loss.nan_to_num(torch.inf).item(), model  # a training may diverge


random.seed(0)
torch.manual_seed(0)
_, model = min((train(sample(), epochs=27) for _ in range(128)), key=lambda trained: trained[0])
with torch.no_grad():
    print(f"Test accuracy: {(model(test_data[0]).argmax(1) == test_data[1]).float().mean():.4f}")
