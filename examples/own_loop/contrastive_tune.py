"""Contrastive pairs from two loaders (InfoNCE): `contrastive.py`, tuned by its own training loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hydro_rasda import loguniform, tune

EPOCHS = 27

images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
tops, bottoms = images.split(32, dim=1)
TRAIN = 1200


def model_fn(config, width_ratio=1.0):
    """Build an encoder for each half."""
    width = int(256 * width_ratio)

    def encoder():
        return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32))

    return nn.ModuleDict({"top": encoder(), "bottom": encoder()})


def similarities(model, top, bottom):
    """Return the cosines of all pairs, [tops, bottoms]."""
    return F.normalize(model["top"](top), dim=1) @ F.normalize(model["bottom"](bottom), dim=1).T


def train(worker):
    """Train both encoders; the diagonal has the pairs that belong together."""
    device, config = worker.device, worker.config
    model = worker.model()
    optimizer = worker.optimizer(model, torch.optim.AdamW, lr=config["lr"], weight_decay=config["weight_decay"])
    parts = {"model": model, "optimizer": optimizer}
    for name, state in (worker.checkpoint or {}).items():
        parts[name].load_state_dict(state)
    for epoch in range(worker.iteration, EPOCHS):
        loaders = [
            DataLoader(half[:TRAIN], 60, shuffle=True, generator=torch.Generator().manual_seed(epoch))
            for half in (tops, bottoms)
        ]
        for top, bottom in zip(*loaders):
            logits = similarities(model, top.to(device), bottom.to(device)) / config["temperature"]
            pairs = torch.arange(len(logits), device=device)
            optimizer.zero_grad()
            (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)).backward()
            optimizer.step()
        with torch.no_grad():
            found = similarities(model, tops[TRAIN:].to(device), bottoms[TRAIN:].to(device)).argmax(1).cpu()
        accuracy = (found == torch.arange(len(found))).float().mean()
        worker.report({"accuracy": accuracy}, {name: part.state_dict() for name, part in parts.items()})


space = {"lr": loguniform(1e-4, 1e-1), "weight_decay": loguniform(1e-4, 1), "temperature": loguniform(0.02, 1)}
result = tune(model_fn, space, train=train, metric="accuracy", mode="max", num_samples=16, max_t=EPOCHS)
print(f"Best configuration {result.best_config}: retrieval accuracy {result.best_metric:.3f}")
