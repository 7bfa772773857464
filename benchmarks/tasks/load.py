"""All tasks by name, and the data file that each needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.tasks import images, small_images, tabular, text
from benchmarks.tasks.task import Task

TASKS: dict[str, Callable[[Path, bool], Task]] = {
    "digits": images.digits,
    "residual": images.residual,
    "warm_up": images.warm_up,
    "breast_cancer": tabular.breast_cancer,
    "breast_cancer_splits": tabular.breast_cancer_splits,
    "diabetes": tabular.diabetes,
    "diabetes_splits": tabular.diabetes_splits,
    "recurrent": text.recurrent,
    "cifar10": images.cifar10,
    "shakespeare": text.shakespeare,
    "turbulence": images.turbulence,
    "cifar10_resnet18": images.cifar10_resnet18,
    "shakespeare_gpt": text.shakespeare_gpt,
    "depthwise": small_images.depthwise,
    "augmented": small_images.augmented,
    "label_noise": small_images.label_noise,
    "denoising": small_images.denoising,
    "gated_recurrent": text.gated_recurrent,
    "two_layers": text.two_layers,
    "wide_table": tabular.wide_table,
    "few_rows": tabular.few_rows,
    "spoken_digits": small_images.spoken_digits,
    "wide_transformer": text.wide_transformer,
    "wide_lstm": text.wide_lstm,
    "wide_residual": small_images.wide_residual,
}

ON_GPU = ("cifar10_resnet18", "shakespeare_gpt")

_CIFAR10, _SHAKESPEARE = "cifar10/cifar10_jpeg.npz", "tinyshakespeare/input.txt"
NEEDS = {
    **dict.fromkeys(("cifar10", "cifar10_resnet18", "depthwise", "augmented", "wide_residual"), _CIFAR10),
    **dict.fromkeys(("shakespeare", "recurrent", "shakespeare_gpt", "gated_recurrent"), _SHAKESPEARE),
    **dict.fromkeys(("two_layers", "wide_transformer", "wide_lstm"), _SHAKESPEARE),
    "spoken_digits": small_images.SPOKEN_DIGITS,
}
"""Task -> the file that it reads from the folder of data sets, for tasks that read one."""


def load_task(name: str, data: Path, *, reduced: bool = False) -> Task:
    """Build a task by name.

    Args:
        name: One of `TASKS`. Tasks in `ON_GPU` train on a GPU.
        reduced: If True, use fewer examples, trials and epochs, for a quick look. Tasks of seconds do not change.

    Raises:
        ValueError: if there is no such task.
        FileNotFoundError: if its data file is missing. The message has the path of the file.
    """
    if name not in TASKS:
        raise ValueError(f"task is {name!r}, but must be one of {sorted(TASKS)}")
    return TASKS[name](data, reduced)
