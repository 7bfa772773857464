"""Tune an MLP on scikit-learn's images of digits."""

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import nn

from hydro_rasda import choice, loguniform, tune, uniform

images, labels = shuffle(*load_digits(return_X_y=True), random_state=0)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
sizes = (1200, 300, 297)
train_data, val_data, test_data = zip(x.split(sizes), y.split(sizes))


def model_fn(config, width_ratio=1.0):
    """Build the model; a smaller `width_ratio` makes it narrower."""
    width = int(512 * width_ratio)
    layers = nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    return nn.Sequential(*layers)


space = {
    "lr": loguniform(1e-4, 1),
    "optimizer": choice(["sgd", "adamw"]),
    "batch_size": choice([32, 64]),
    "schedule": "linear",
    "decay_start": uniform(0, 0.9),  # a share of the training
}
# num_samples: configurations to try; max_t: epochs of a full training
result = tune(model_fn, space, train_data=train_data, val_data=val_data, num_samples=128, max_t=27)
model = result.best_model()  # the trained full-size model of result.best_config
print(f"Test accuracy: {result.evaluate(test_data)['accuracy']:.4f}")
