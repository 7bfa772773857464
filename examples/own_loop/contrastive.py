"""Contrastive pairs from two loaders (InfoNCE): to which top half of a digit does a bottom half belong?"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

EPOCHS = 27

images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
tops, bottoms = images.split(32, dim=1)
TRAIN = 1200


def model_fn(config):
    """Build an encoder for each half."""
    width = 256

    def encoder():
        return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32))

    return nn.ModuleDict({"top": encoder(), "bottom": encoder()})


def similarities(model, top, bottom):
    """Return the cosines of all pairs, [tops, bottoms]."""
    return F.normalize(model["top"](top), dim=1) @ F.normalize(model["bottom"](bottom), dim=1).T


def train(config):
    """Train both encoders; the diagonal has the pairs that belong together."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_fn(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])
    for epoch in range(EPOCHS):
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
        print(f"epoch {epoch + 1}: retrieval accuracy {accuracy:.3f}")


torch.manual_seed(0)
train({"lr": 1e-3, "weight_decay": 0.01, "temperature": 0.1})
