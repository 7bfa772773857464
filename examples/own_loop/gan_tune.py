"""A GAN with two steps of the discriminator to one of the generator: `gan.py`, tuned by its own training loop."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from hydro_rasda import LocalBackend, loguniform, tune, uniform

EPOCHS, NOISE = 27, 16

images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
train_images, val_images = images[:1200], images[1200:]


def model_fn(config, width_ratio=1.0):
    """Build the generator and the discriminator."""
    width = int(256 * width_ratio)

    def mlp(inputs, outputs):
        hidden = nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)
        return nn.Sequential(*hidden, nn.Linear(width, outputs))

    return nn.ModuleDict({"generator": nn.Sequential(mlp(NOISE, 64), nn.Sigmoid()), "discriminator": mlp(64, 1)})


def draw(model, count):
    """Return `count` generated images."""
    return model["generator"](torch.randn(count, NOISE))


@torch.no_grad()
def frechet_distance(fake, real):
    """Return the Frechet distance of two sets of images, as normal distributions of pixels (Heusel et al. 2017)."""
    means, covariances = [of.mean(0) for of in (fake, real)], [of.T.cov().double() for of in (fake, real)]
    # The trace of the root of a product is the sum of the roots of its eigenvalues.
    roots = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    return ((means[0] - means[1]).square().sum() + covariances[0].trace() + covariances[1].trace() - 2 * roots).item()


def train(worker):
    """Train a generator against a discriminator."""
    model, config = worker.model(), worker.config
    betas = config["beta1"], 0.99
    g_optimizer = worker.optimizer(model["generator"], torch.optim.Adam, lr=config["g_lr"], betas=betas)
    d_optimizer = worker.optimizer(model["discriminator"], torch.optim.Adam, lr=config["d_lr"], betas=betas)
    parts = {"model": model, "g_optimizer": g_optimizer, "d_optimizer": d_optimizer}
    for name, state in (worker.checkpoint or {}).items():
        parts[name].load_state_dict(state)
    while worker.iteration < EPOCHS:
        for rows in torch.randperm(len(train_images)).split(50):
            for _ in range(2):
                real = F.softplus(-model["discriminator"](train_images[rows])).mean()
                fake = F.softplus(model["discriminator"](draw(model, len(rows)).detach())).mean()
                d_optimizer.zero_grad()
                (real + fake).backward()
                d_optimizer.step()
            g_optimizer.zero_grad()
            F.softplus(-model["discriminator"](draw(model, len(rows)))).mean().backward()
            g_optimizer.step()
        with torch.no_grad():
            distance = frechet_distance(draw(model, 1000), val_images)
        worker.report({"distance": distance}, {name: part.state_dict() for name, part in parts.items()})


space = {"g_lr": loguniform(1e-4, 1e-1), "d_lr": loguniform(1e-4, 1e-1), "beta1": uniform(0, 0.9)}
result = tune(
    model_fn,
    space,
    train=train,
    metric="distance",
    num_samples=16,
    max_t=EPOCHS,
    backend=LocalBackend(device="cpu"),  # the models are too small for a GPU
)
print(f"Best configuration {result.best_config}: Frechet distance {result.best_metric:.3f}")
